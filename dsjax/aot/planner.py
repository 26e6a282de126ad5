"""The planner: which programs a deployment consists of, one per body kind or tail and bucket.

A step runs one body and one tail. Bodies are "decode" (decode tokens only) and "mixed" (decode tokens, then prefill
chunks). Arrays of rows have the fixed size max_num_seqs in every body, so there are token buckets + row buckets + a few
tails, never their product.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from dsjax.cache.kinds import PageKind
from dsjax.engine.options import Buckets
from dsjax.engine.sampler import Sample, SamplingState, SetRows
from dsjax.engine.step_inputs import Collect, Prepare, SampleInputs, Trim
from dsjax.engine.step_layout import StepShape, row_layout, step_layout
from dsjax.model import Model
from dsjax.segments import Call, Link, Segment, cut


class ProgramKey(NamedTuple):
    """ "decode", "mixed", "tail" or "set_rows", and the bucket."""

    kind: str
    bucket: int

    def __str__(self) -> str:
        return f"{self.kind}[{self.bucket}]"


@dataclass(frozen=True)
class PlannedProgram:
    """A program before compilation. `arguments`: abstract values that it takes beside the state."""

    key: ProgramKey
    links: tuple[Link, ...]
    results: tuple[str, ...]
    arguments: dict[str, Any]


def plan_programs(model: Model, buckets: Buckets, rows: int, granularity: str) -> list[PlannedProgram]:
    """Every program of a deployment with `rows` = max_num_seqs, cut by `granularity`."""
    interned: dict[Segment, Segment] = {}
    bodies = [("decode", bucket) for bucket in buckets.decode] + [("mixed", bucket) for bucket in buckets.tokens]
    planned = [_body(model, ProgramKey(*key), rows, granularity, interned) for key in bodies]
    planned += [_tail(model, bucket, rows, granularity) for bucket in buckets.tails]
    return [*planned, _set_rows(rows, granularity)]


def state_avals(kinds: Sequence[PageKind], pages: dict[str, int], rows: int, max_tokens: int) -> dict[str, Any]:
    """Shapes of the device state: pools of `pages` per kind, page tables of `rows` rows of `max_tokens` tokens."""
    pools = {pool.name: _aval(pool.shape(pages[kind.name]), pool.dtype) for kind in kinds for pool in kind.pools}
    tables = {kind.name: _aval((rows, kind.pages_for(max_tokens))) for kind in kinds}
    sampling = SamplingState(*(_aval(shape, dtype) for shape, dtype in SamplingState.shapes(rows)))
    return {"pools": pools, "page_tables": tables, "sampling": sampling, "last_tokens": _aval((rows,))}


def _body(model: Model, key: ProgramKey, rows: int, granularity: str, interned: dict) -> PlannedProgram:
    shape = StepShape(tokens=key.bucket, rows=rows, has_prefill=key.kind == "mixed")
    calls = [_call("prepare", Prepare(shape, model.page_kinds, model.ropes), interned)]
    calls.append(_call("embed", model.embed, interned, "embed"))
    for index, layer in enumerate(model.layers):
        calls += [_call(name, getattr(layer, name), interned, f"layers.{index}.{name}", index) for name in layer.PIECES]
    calls.append(_call("collect", Collect(), interned))
    results = ("page_tables", "pools", "samples", "hidden")
    packed = _aval((step_layout(shape, model.page_kinds).size,))
    return PlannedProgram(key, tuple(cut(calls, granularity, results)), results, {"packed": packed})


def _tail(model: Model, bucket: int, rows: int, granularity: str) -> PlannedProgram:
    calls = [
        _call("trim", Trim(bucket), {}),
        _call("head", model.head, {}, "head"),
        _call("sample", Sample(), {}),
    ]
    results = ("last_tokens", "tokens", "logits")
    hidden = _aval((rows, model.config.hidden_size), model.dtype)
    arguments = {"hidden": hidden, "samples": SampleInputs(*[_aval((rows,))] * 3)}
    return PlannedProgram(ProgramKey("tail", bucket), tuple(cut(calls, granularity, results)), results, arguments)


def _set_rows(rows: int, granularity: str) -> PlannedProgram:
    links = cut([_call("set_rows", SetRows(rows), {})], granularity, ["sampling"])
    arguments = {"packed": _aval((row_layout(rows).size,))}
    return PlannedProgram(ProgramKey("set_rows", rows), tuple(links), ("sampling",), arguments)


def _call(name: str, piece: nnx.Module, interned: dict, path: str = "", layer: int | None = None) -> Call:
    """Equal segments are made one object, so that each is traced once."""
    segment = Segment.of(name, piece)
    return Call(interned.setdefault(segment, segment), path, layer)


def _aval(shape: tuple[int, ...], dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)
