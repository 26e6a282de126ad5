"""The planner: which programs a deployment consists of, one per body kind or tail and bucket.

A step runs one body and one tail. Bodies are "decode" (decode tokens only) and "mixed" (decode tokens, then prefill
chunks). Arrays of rows have the fixed size max_num_seqs in every body, so there are token buckets + row buckets + a few
tails, never their product. Three more programs have one size: "set_rows" and "set_constraints" run when requests get
their rows, "logits" in the place of a tail when someone asks for logits.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dsjax.aot.ladders import Buckets
from dsjax.cache.kinds import PageKind
from dsjax.config import ModelConfig
from dsjax.engine.sampling_params import MAX_STOP_IDS
from dsjax.model import Model
from dsjax.segments import Call, Link, Segment, cut
from dsjax.step.inputs import Collect, Prepare, SampleInputs, Trim
from dsjax.step.layout import ConstraintShape, StepShape, constraint_layout, row_layout, step_layout
from dsjax.step.sampler import Sample
from dsjax.step.sampling_state import Constraints, SamplingState, SetConstraints, SetRows


class ProgramKey(NamedTuple):
    """ "decode", "mixed", "tail", "logits", "set_rows" or "set_constraints", and the bucket."""

    kind: str
    bucket: int

    @property
    def is_body(self) -> bool:
        return self.kind in ("decode", "mixed")

    def __str__(self) -> str:
        return f"{self.kind}[{self.bucket}]"


def body_shape(key: ProgramKey, rows: int) -> StepShape:
    """The static sizes of the body `key` in a deployment with `rows` = max_num_seqs."""
    return StepShape(tokens=key.bucket, rows=rows, has_prefill=key.kind == "mixed")


@dataclass(frozen=True)
class PlannedProgram:
    """A program before compilation. `arguments`: abstract values that it takes beside the state."""

    key: ProgramKey
    links: tuple[Link, ...]
    results: tuple[str, ...]
    arguments: dict[str, Any]


def constraint_shape(config: ModelConfig) -> ConstraintShape:
    """The static sizes of a row's constraints: its own stop ids and the model's."""
    return ConstraintShape(config.vocab_size, MAX_STOP_IDS + len(config.eos_token_ids))


def plan_programs(model: Model, buckets: Buckets, plan: str, deterministic: bool = False) -> list[PlannedProgram]:
    """Every program of a deployment, cut by `plan`."""
    layers = _layer_calls(model)
    keys = [ProgramKey("decode", bucket) for bucket in buckets.decode]
    keys += [ProgramKey("mixed", bucket) for bucket in buckets.tokens]
    planned = [_body(model, layers, key, buckets.rows, plan) for key in keys]
    planned += [_tail(model, bucket, buckets.rows, plan) for bucket in buckets.tails]
    planned += [
        _logits(model, buckets.rows, plan),
        _set_rows(buckets.rows, model.page_kinds, plan),
        _set_constraints(model, plan),
    ]
    return [_deterministic(program) for program in planned] if deterministic else planned


def _deterministic(program: PlannedProgram) -> PlannedProgram:
    links = (link._replace(chain=replace(link.chain, deterministic=True)) for link in program.links)
    return replace(program, links=tuple(links))


def state_avals(model: Model, pages: dict[str, int], rows: int, max_tokens: int) -> dict[str, Any]:
    """Shapes of the device state: pools of `pages` per kind, and all that is kept for `rows` rows of `max_tokens`."""
    kinds = model.page_kinds
    return {
        "pools": {pool.name: _aval(pool.shape(pages[kind.name]), pool.dtype) for kind in kinds for pool in kind.pools},
        "page_tables": {kind.name: _aval((rows, kind.pages_for(max_tokens))) for kind in kinds},
        "sampling": SamplingState.abstract(rows),
        "constraints": Constraints.abstract(rows, constraint_shape(model.config)),
        "output_counts": _aval((rows, model.config.vocab_size)),
        "last_tokens": _aval((rows,)),
    }


def row_state_bytes(model: Model, rows: int, max_tokens: int) -> int:
    """Bytes of the device state beside the pools."""
    state = state_avals(model, dict.fromkeys((kind.name for kind in model.page_kinds), 0), rows, max_tokens)
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))


def _layer_calls(model: Model) -> list[Call]:
    """Embedding and layers. Equal segments are one object, so that each is traced once."""
    interned: dict[Segment, Segment] = {}
    calls = [Call(Segment.of("embed", model.embed), "embed")]
    for index, layer in enumerate(model.layers):
        for name in layer.PIECES:
            segment = Segment.of(name, getattr(layer, name))
            segment = interned.setdefault(segment, segment)
            calls.append(Call(segment, f"layers.{index}.{name}", index, layer.places))
    return calls


def _body(model: Model, layers: list[Call], key: ProgramKey, rows: int, plan: str) -> PlannedProgram:
    shape = body_shape(key, rows)
    prepare = Segment.of("prepare", Prepare(shape, model.page_kinds, model.ropes, model.plan_decode))
    calls = [Call(prepare), *layers, Call(Segment.of("collect", Collect()))]
    results = ("page_tables", "pools", "samples", "hidden")
    packed = _aval((step_layout(shape, model.page_kinds).size,))
    return PlannedProgram(key, tuple(cut(calls, plan, results)), results, {"packed": packed})


def _tail(model: Model, bucket: int, rows: int, plan: str) -> PlannedProgram:
    calls = [*_head_calls(model, bucket), Call(Segment.of("sample", Sample()))]
    results = ("last_tokens", "output_counts", "tokens", "logprobs")
    samples = SampleInputs(*[_aval((rows,))] * len(SampleInputs._fields))
    arguments = {"hidden": _hidden(model, rows), "samples": samples}
    return PlannedProgram(ProgramKey("tail", bucket), tuple(cut(calls, plan, results)), results, arguments)


def _logits(model: Model, rows: int, plan: str) -> PlannedProgram:
    links = cut(_head_calls(model, rows), plan, ["logits"])
    return PlannedProgram(ProgramKey("logits", rows), tuple(links), ("logits",), {"hidden": _hidden(model, rows)})


def _head_calls(model: Model, bucket: int) -> list[Call]:
    return [Call(Segment.of("trim", Trim(bucket))), Call(Segment.of("head", model.head), "head")]


def _hidden(model: Model, rows: int) -> Any:
    return _aval((rows, *model.hidden_shape), model.dtype)


def _set_rows(rows: int, kinds: tuple[PageKind, ...], plan: str) -> PlannedProgram:
    results = ("sampling", "page_tables")
    links = cut([Call(Segment.of("set_rows", SetRows(rows, kinds)))], plan, results)
    arguments = {"packed": _aval((row_layout(rows, kinds).size,))}
    return PlannedProgram(ProgramKey("set_rows", rows), tuple(links), results, arguments)


def _set_constraints(model: Model, plan: str) -> PlannedProgram:
    shape, results = constraint_shape(model.config), ("constraints", "output_counts")
    links = cut([Call(Segment.of("set_constraints", SetConstraints(shape)))], plan, results)
    arguments = {"packed": _aval((constraint_layout(shape).size,))}
    return PlannedProgram(ProgramKey("set_constraints", 1), tuple(links), results, arguments)


def _aval(shape: tuple[int, ...], dtype: Any = jnp.int32) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)
