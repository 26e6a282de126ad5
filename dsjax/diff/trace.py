"""Traces: what an engine computes for given tokens, after every segment, on the host."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import numpy as np

from dsjax.aot.planner import PlannedProgram
from dsjax.engine.llm import LLM, Prompt
from dsjax.engine.sampling_params import SamplingParams
from dsjax.segments import Link, Program


class ForcedTokens(NamedTuple):
    """Token ids to compute: the first `prompt_tokens` as chunks of a prompt, the others one by one."""

    token_ids: list[int]
    prompt_tokens: int


@dataclass(frozen=True)
class Trace:
    """What one engine computed for T tokens.

    `values`: per segment ("layers.3.ffn") in the order in which they run, per name of a value, an array [T, ...].
    `logits`: float32 [T, V], by the engine's executables. `tapped_logits`: by those that give `values` as well; if the
    two are equal, looking inside has changed nothing.
    """

    tokens: ForcedTokens
    values: dict[str, dict[str, np.ndarray]]
    logits: np.ndarray
    tapped_logits: np.ndarray


def continue_prompts(llm: LLM, prompts: Sequence[Prompt], max_tokens: int) -> list[ForcedTokens]:
    """Each of `prompts` with the `max_tokens` likeliest tokens that `llm` adds, but for the last one."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    answers = llm.generate(prompts, params)
    return [ForcedTokens(a.prompt_token_ids + a.token_ids[:-1], len(a.prompt_token_ids)) for a in answers]


def trace(llm: LLM, sequences: Sequence[ForcedTokens]) -> list[Trace]:
    """What `llm` computes for each of `sequences`, one after the other. It must have no open requests.

    Compiles its bodies again with the values between segments as further results; pools stay on the device. Raises
    RequestError for tokens that are no prompt of this model.
    """
    runner = llm.engine.runner
    before = runner.counts.programs.copy()
    logits = [_logits(llm, tokens) for tokens in sequences]
    used = runner.counts.programs - before
    bodies = [program for program in runner.blueprint.planned if program.key.is_body and str(program.key) in used]
    own, recorder = dict(runner.programs), _Recorder()
    runner.programs |= recorder.bind(llm, bodies)
    try:
        traces = []
        for tokens, untapped in zip(sequences, logits, strict=True):
            tapped = _logits(llm, tokens)
            traces.append(Trace(tokens, recorder.take(_chunk_sizes(llm, tokens)), untapped, tapped))
        return traces
    finally:
        runner.programs.update(own)


def _logits(llm: LLM, tokens: ForcedTokens) -> np.ndarray:
    return llm.logits(tokens.token_ids, _chunk_sizes(llm, tokens))


def _chunk_sizes(llm: LLM, tokens: ForcedTokens) -> list[int]:
    """The prompt in chunks as large as the tail allows, then one token at a time, as in decoding."""
    largest, prompt = llm.engine.scheduler.rows, tokens.prompt_tokens
    chunks = [min(largest, prompt - begin) for begin in range(0, prompt, largest)]
    return chunks + [1] * (len(tokens.token_ids) - prompt)


class _Recorder:
    """Runs tapped programs in the place of an engine's, and keeps what each segment gave in each step."""

    def __init__(self):
        self._steps: dict[str, dict[str, list[np.ndarray]]] = {}

    def bind(self, llm: LLM, bodies: Sequence[PlannedProgram]) -> dict[Any, Program]:
        """`bodies` as programs that are recorded."""
        runner = llm.engine.runner
        tapped = [replace(body, links=tuple(_tapped(link) for link in body.links)) for body in bodies]
        executables, _ = replace(runner.blueprint, planned=tapped).compile()
        return {
            body.key: self._recorded(runner.executor.bind(body.links, executables[body.key], body.results), body.links)
            for body in tapped
        }

    def take(self, sizes: Sequence[int]) -> dict[str, dict[str, np.ndarray]]:
        """What was recorded in steps of `sizes` tokens, without padding; begins anew."""
        steps, self._steps = self._steps, {}
        return {
            path: {
                name: np.concatenate([array[:size] for array, size in zip(arrays, sizes, strict=True)])
                for name, arrays in values.items()
            }
            for path, values in steps.items()
        }

    def _recorded(self, program: Program, links: Sequence[Link]) -> Program:
        dispatches = [
            dispatch._replace(executable=self._recording(dispatch.executable, link.paths))
            for dispatch, link in zip(program.dispatches, links, strict=True)
        ]
        return replace(program, dispatches=dispatches)

    def _recording(self, executable: Any, paths: tuple[str, ...]) -> Any:
        def run(*arguments: Any) -> tuple[Any, ...]:
            *given, taps = executable(*arguments)
            for path, values in zip(paths, jax.device_get(taps), strict=True):
                if path:  # pieces of the model; those without weights prepare and collect
                    self._keep(path, values)
            return tuple(given)

        return run

    def _keep(self, path: str, values: dict[str, Any]) -> None:
        kept = self._steps.setdefault(path, defaultdict(list))
        for key, leaf in jax.tree_util.tree_leaves_with_path(values):
            kept[jax.tree_util.keystr(key, simple=True, separator=".")].append(leaf)


def _tapped(link: Link) -> Link:
    return link._replace(chain=replace(link.chain, tapped=True))
