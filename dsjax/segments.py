"""Segments, plans and the executor: what is compiled per bucket, and the Python loop that chains the executables.

A *segment* is one piece of the model as a pure function of its weights and of named values. A *program* (a body or a
tail, for one bucket) is a list of segment calls. A *plan* cuts that list into chains, and each chain is compiled into
one executable: one per "piece", one per "layer", or one for the whole "step", from the same functions. Since weights
and the places of a layer in the pools are arguments, one executable serves all layers of a kind.

Values that a chain both takes and gives (caches, page tables, the residual stream) are donated: they stay in place.
"""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding

from dsjax.quantization import BlockScaled
from dsjax.sharding import REPLICATED, value_partition, weight_partition

Places = tuple[tuple[str, int], ...]  # per page kind, a layer's place in its pools


@dataclass(frozen=True)
class Segment:
    """A piece as a pure function. Pieces with equal graphs and weight shapes are equal segments.

    `takes` are the parameter names of the piece's __call__, `gives` the names of what it returns, `weights` path,
    shape and dtype of its leaves (values and scales of one weight have its path). A segment of a layer may take
    "places".
    """

    name: str
    graph: Any
    weights: tuple[tuple[str, tuple[int, ...], Any], ...]
    takes: tuple[str, ...]
    gives: tuple[str, ...]

    @classmethod
    def of(cls, name: str, piece: Any) -> "Segment":
        graph, state = nnx.split(piece)
        weights = tuple((path, leaf.shape, leaf.dtype) for path, leaf in weight_leaves(state))
        takes = tuple(inspect.signature(type(piece).__call__).parameters)[1:]
        return cls(name, (graph, jax.tree.structure(state)), weights, takes, tuple(piece.gives))

    def run(self, leaves: Sequence[jax.Array], *arguments: Any) -> tuple[Any, ...]:
        """The piece applied to `arguments` (in the order of `takes`), with its weights given as flat leaves."""
        graph, structure = self.graph
        with jax.named_scope(self.name):
            return nnx.merge(graph, jax.tree.unflatten(structure, leaves))(*arguments)

    @cached_property
    def traced_once(self) -> Any:
        """`run` behind a jit of its own, so that a step of many layers traces and lowers each segment once."""
        return jax.jit(_named(self.run, self.name))


def named_weights(state: nnx.State) -> list[tuple[str, Any]]:
    """Path (such as "router.bias") and value, an array or BlockScaled, of each weight; in the order of flat leaves."""
    flat = jax.tree_util.tree_leaves_with_path(state, is_leaf=lambda value: isinstance(value, BlockScaled))
    return [(".".join(str(key.key) for key in path if hasattr(key, "key")), weight) for path, weight in flat]


def weight_leaves(state: nnx.State) -> list[tuple[str, Any]]:
    """Path of its weight and value of every leaf, in the order of flat leaves. A BlockScaled has two leaves."""
    return [(path, leaf) for path, weight in named_weights(state) for leaf in jax.tree.leaves(weight)]


@dataclass(frozen=True)
class Call:
    """A segment at one place of a program: the path of its weights in the model ("" if it has none), and its layer.

    `layer` is None outside layers, `places` are those of the layer.
    """

    segment: Segment
    path: str = ""
    layer: int | None = None
    places: Places = ()


@dataclass(frozen=True)
class Chain:
    """Consecutive segments that become one executable. Equal chains share it.

    `places` are baked in where segments of several layers are chained; a chain within one layer gets them as an
    argument instead, and has None throughout. A `tapped` chain returns one result more: per segment what it gave, by
    name, caches excepted. In a `deterministic` chain each segment computes the same bits as in any other: XLA may fuse
    nothing across segments.
    """

    segments: tuple[Segment, ...]
    places: tuple[Places | None, ...]
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    tapped: bool = False
    deterministic: bool = False

    @property
    def name(self) -> str:
        names = [segment.name for segment in self.segments]
        return "+".join(names) if len(names) <= 4 else f"{names[0]}..{names[-1]}"

    def run(self, weights: Sequence[Sequence[jax.Array]], places: dict | None, *values: Any, jit: bool = True) -> tuple:
        """weights: flat leaves per segment. values: in the order of `takes`. Returns values in the order of `gives`."""
        named, taps = dict(zip(self.takes, values, strict=True)), []
        for segment, leaves, baked in zip(self.segments, weights, self.places, strict=True):
            named["places"] = places if baked is None else {kind: jnp.int32(place) for kind, place in baked}
            arguments = [named[name] for name in segment.takes]
            if self.deterministic:
                arguments = lax.optimization_barrier(arguments)
            function = segment.traced_once if jit else segment.run
            results = function(leaves, *arguments)
            named.update(zip(segment.gives, results, strict=True))
            taps.append({name: named[name] for name in segment.gives if name != "pools"})
        given = tuple(named[name] for name in self.gives)
        return (*given, tuple(taps)) if self.tapped else given

    def sharded(self, mesh: Mesh, name: str) -> Any:
        """`run` as one shard_map over `mesh`, jitted under `name`, with all that it both takes and gives donated."""
        weights = tuple(tuple(weight_partition(path) for path, _, _ in segment.weights) for segment in self.segments)
        values = tuple(value_partition(name) for name in self.takes)
        results: tuple = tuple(value_partition(name) for name in self.gives)
        if self.tapped:
            taps = [{name: value_partition(name) for name in s.gives if name != "pools"} for s in self.segments]
            results = (*results, tuple(taps))
        specs = (weights, REPLICATED, *values)
        function = jax.shard_map(self.run, mesh=mesh, in_specs=specs, out_specs=results, check_vma=False)
        donated = tuple(i + 2 for i, name in enumerate(self.takes) if name in self.gives)
        return jax.jit(_named(function, name), donate_argnums=donated)


def _named(function: Any, name: str) -> Any:
    """`function` under another name, which profiles, dumps and cached executables show."""

    def renamed(*arguments):
        return function(*arguments)

    renamed.__name__ = renamed.__qualname__ = name
    return renamed


class Link(NamedTuple):
    """One executable call of a program: the chain, and where its weights and its places come from."""

    chain: Chain
    paths: tuple[str, ...]
    places: Places | None


def cut(calls: Sequence[Call], plan: str, results: Iterable[str]) -> list[Link]:
    """Cut a program into chains: per "piece", per "layer", or not at all ("step").

    `results` names the values that must be there when the program ends.
    """
    if plan == "piece":
        groups = [[call] for call in calls]
    elif plan == "layer":
        groups = [list(group) for _, group in groupby(calls, key=lambda call: call.layer)]
    elif plan == "step":
        groups = [list(calls)]
    else:
        raise ValueError(f"plan is {plan!r}, expected piece, layer or step")
    links, live = [], set(results)
    for group in reversed(groups):
        link = _link(group, live)
        live = (live - _given(group)) | set(link.chain.takes)
        links.append(link)
    return links[::-1]


def _given(group: Sequence[Call]) -> set[str]:
    return {name for call in group for name in call.segment.gives}


def _link(group: Sequence[Call], live: set[str]) -> Link:
    within_a_layer = len({call.layer for call in group}) == 1
    takes: dict[str, None] = {}
    known: set[str] = {"places"}
    for call in group:
        takes |= dict.fromkeys(name for name in call.segment.takes if name not in known)
        known |= set(call.segment.gives)
    chain = Chain(
        segments=tuple(call.segment for call in group),
        places=(None,) * len(group) if within_a_layer else tuple(call.places for call in group),
        takes=tuple(takes),
        gives=tuple(sorted(_given(group) & live)),
    )
    return Link(chain, tuple(call.path for call in group), group[0].places if within_a_layer else None)


class Dispatch(NamedTuple):
    """A link bound to its executable, weights and places: what the executor's loop calls."""

    executable: Any
    weights: tuple[Sequence[jax.Array], ...]
    places: dict[str, jax.Array] | None
    takes: tuple[str, ...]
    gives: tuple[str, ...]


@dataclass(frozen=True)
class Program:
    """A bound program, and the names of the values that it leaves."""

    dispatches: list[Dispatch]
    results: tuple[str, ...]


class Executor:
    """Holds weights and device state, and runs programs.

    `state` are the named values that live from step to step (pools, page_tables, last_tokens, sampling). Running a
    program that rewrites one donates the old buffer. If a call fails after that, the state is lost.
    """

    def __init__(self, mesh: Mesh, weights: Mapping[str, Sequence[jax.Array]], state: dict[str, Any]):
        self.mesh, self.weights, self.state = mesh, weights, state
        self.dispatched = 0
        self._scalars: dict[int, jax.Array] = {}

    def bind(self, links: Sequence[Link], executables: Mapping[Chain, Any], results: Iterable[str]) -> Program:
        """The program of `links`, with `executables` for its chains."""
        dispatches = [
            Dispatch(
                executables[link.chain],
                tuple(self.weights[path] if path else () for path in link.paths),
                None if link.places is None else {kind: self._scalar(place) for kind, place in link.places},
                link.chain.takes,
                link.chain.gives,
            )
            for link in links
        ]
        return Program(dispatches, tuple(results))

    def run(self, program: Program, values: dict[str, Any]) -> dict[str, Any]:
        """Run `program` on the state and further `values`; returns its results, of which state is kept.

        Only enqueues: it neither waits for the device nor looks at a device value.
        """
        named = self.state | values
        for executable, weights, places, takes, gives in program.dispatches:
            named.update(zip(gives, executable(weights, places, *[named[name] for name in takes]), strict=True))
        self.dispatched += len(program.dispatches)
        results = {name: named[name] for name in program.results}
        self.state.update((name, value) for name, value in results.items() if name in self.state)
        return results

    def drop_state(self) -> None:
        """Free the state, or what a failed call has left of it."""
        for leaf in jax.tree.leaves(self.state):
            leaf.delete()
        self.state = {}

    def close(self) -> None:
        """Free weights and state on the device."""
        for leaf in jax.tree.leaves((self.weights, self.state, self._scalars)):
            leaf.delete()
        self.weights, self.state, self._scalars = {}, {}, {}

    def _scalar(self, value: int) -> jax.Array:
        """`value` as an int32 on the device, one array for all uses."""
        if value not in self._scalars:
            self._scalars[value] = jax.device_put(jnp.int32(value), NamedSharding(self.mesh, REPLICATED))
        return self._scalars[value]


def allocator(state: dict[str, Any], mesh: Mesh) -> Any:
    """A jitted function that gives device arrays of zeros for the abstract `state`, each in its place on the mesh."""
    placed = {
        name: jax.tree.map(lambda _, name=name: NamedSharding(mesh, value_partition(name)), value)
        for name, value in state.items()
    }

    def zeros():
        return jax.tree.map(lambda aval: jnp.zeros(aval.shape, aval.dtype), state)

    return jax.jit(_named(zeros, "allocate"), out_shardings=placed)


def allocate(state: dict[str, Any], mesh: Mesh) -> dict[str, Any]:
    """Device arrays of zeros for the abstract `state`, each in its place on the mesh."""
    return allocator(state, mesh)()
