"""Comparing two settings: the first segment and token that differ are named, and looking inside changes nothing."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dsjax import LLM
from dsjax.checkpoint.safetensors import read_file, write_file
from dsjax.diff import Comparison, ForcedTokens, Trace, compare, continue_prompts, trace
from dsjax.diff.report import as_json, as_text
from dsjax.errors import DsjaxError, OptionError
from tests.conftest import GOLDEN, SMALL
from tests.serve.commands import run_command
from tests.test_golden import TOLERANCE, golden, logit_error

PROMPTS = [[5, 6, 7, 8, 9], [70, 60, 50, 40, 30, 20, 10]]
FLAGS = ["--dtype", "float32", "--max-num-seqs", "3", "--token-buckets", "32", "--max-model-len", "512"]
FLAGS += ["--kv-tokens", "448", "--token-ids"]


@pytest.fixture(scope="module")
def forced(make_llm: Callable[..., LLM]) -> list[ForcedTokens]:
    return continue_prompts(make_llm(plan="step"), PROMPTS, max_tokens=3)


@pytest.fixture(scope="module")
def original(make_llm: Callable[..., LLM], forced: list[ForcedTokens]) -> list[Trace]:
    return trace(make_llm(plan="step"), forced)


def test_prompts_are_continued_by_the_likeliest_tokens(make_llm: Callable[..., LLM]):
    expected = golden("v3")
    prompt = expected["prompt_0"].tolist()
    [tokens] = continue_prompts(make_llm(plan="step"), [prompt], max_tokens=4)
    assert tokens == (prompt + expected["greedy_0"][:3].tolist(), len(prompt))


def test_a_trace_has_every_segment_and_the_right_logits(original: list[Trace], make_llm: Callable[..., LLM]):
    [*_, last] = original
    pieces = ("attn_in", "attention", "attn_out", "ffn")
    assert list(last.values) == ["embed", *(f"layers.{i}.{piece}" for i in range(3) for piece in pieces)]
    assert {name: array.shape for name, array in last.values["layers.2.attn_out"].items()} == {
        "x": (9, 64),
        "h": (9, 64),
        "expert_ids": (9, 3),
        "expert_weights": (9, 3),
    }
    assert last.values["layers.1.attn_in"]["latent"].shape == (9, 48)
    assert last.values["layers.1.attention"]["o"].shape == (9, 4, 16)
    expected = make_llm(plan="piece").logits(last.tokens.token_ids)
    assert logit_error(last.logits, expected) < TOLERANCE


def test_plans_agree_in_every_bit_tapped_or_not(make_llm: Callable[..., LLM], forced, original):
    comparison = compare(original, trace(make_llm(plan="piece"), forced))
    assert comparison.agree
    assert comparison.tapping == (0.0, 0.0)
    assert comparison.predicted_alike == 7 + 9
    assert "segments: all agree" in as_text(comparison, forced)


def test_decode_steps_agree_on_other_plans_and_meshes(make_llm: Callable[..., LLM]):
    """Four devices add in another order."""
    tokens = [ForcedTokens([5, 6, 7], 1)]
    steps = trace(make_llm(plan="step"), tokens)
    assert compare(steps, trace(make_llm(plan="layer"), tokens)).agree
    split = trace(make_llm(plan="step", tp=4), tokens)
    assert {name: value.shape for name, value in split[0].values["layers.2.attn_in"].items()}["q"] == (3, 4, 32)
    comparison = compare(steps, split, tolerance=1e-5)
    assert comparison.agree
    assert comparison.tapping == (0.0, 0.0)


def mutated(folder: Path, name: str, change: Callable[[np.ndarray], None]) -> Path:
    """A copy of the golden v3 checkpoint with one tensor changed."""
    shutil.copytree(GOLDEN / "v3", folder, ignore=shutil.ignore_patterns("golden.npz"))
    tensors = {key: np.array(value) for key, value in read_file(folder / "model.safetensors").items()}
    change(tensors[f"model.{name}.weight"])
    write_file(folder / "model.safetensors", tensors)
    return folder


def scale(rows: slice) -> Callable[[np.ndarray], None]:
    def change(tensor: np.ndarray) -> None:
        tensor[rows] *= 2

    return change


@pytest.mark.parametrize(
    ("name", "rows", "segment", "value", "first"),
    [
        ("embed_tokens", slice(40, 41), "embed", "x", (1, 3)),
        ("layers.1.self_attn.kv_a_proj_with_mqa", slice(0, 1), "layers.1.attn_in", "latent", (0, 0)),
        # Keys without positions (the first 16 of each head's 32 rows): a token that sees one key only does not care.
        ("layers.2.self_attn.kv_b_proj", slice(0, 16), "layers.2.attention", "o", (0, 1)),
    ],
)
def test_a_changed_weight_is_found(tmp_path: Path, forced, original, name, rows, segment, value, first):
    folder = mutated(tmp_path / "changed", name, scale(rows))
    with LLM(folder, **SMALL | {"plan": "step"}) as llm:
        comparison = compare(original, trace(llm, forced))
    assert not comparison.agree
    assert comparison.first is not None
    assert comparison.first.segment == segment
    found = comparison.first.first
    assert found is not None
    assert (found.name, found.first) == (value, first)
    assert comparison.logits.differing > 0


def test_a_changed_expert_is_found_by_the_command(tmp_path: Path, forced: list[ForcedTokens], original: list[Trace]):
    """The first token that differs is the first one routed to that expert, and its row is named."""
    expert, path = 5, "layers.1.ffn"
    chosen = original[0].values["layers.1.attn_out"]["expert_ids"]
    first = int(np.argmax((chosen == expert).any(axis=1)))
    assert expert in chosen[first]
    folder = mutated(tmp_path / "changed", f"layers.1.mlp.experts.{expert}.down_proj", scale(slice(None)))
    arguments = ["diff", str(GOLDEN / "v3"), *FLAGS, "--max-tokens", "3", "--b", f"plan=step,model={folder}"]
    arguments += ["--prompt", ",".join(map(str, PROMPTS[0]))]
    found = json.loads(run_command(*arguments, "--json", exit_code=1))
    assert (found["agree"], found["first"]) == (False, path)
    [ffn] = [segment for segment in found["segments"] if segment["segment"] == path]
    assert ffn["values"][0]["first"] == [0, first]
    text = run_command(*arguments, exit_code=1)
    token = forced[0].token_ids[first]
    assert found["b"]["model"] == str(folder)
    assert f"segments: {path} differs first, in x of token {first} (id {token}) of prompt 0" in text
    assert "embed .. layers.1.attn_out: equal" in text


def traces(**values: np.ndarray) -> list[Trace]:
    logits = np.zeros((3, 4), np.float32)
    return [Trace(ForcedTokens([1, 2, 3], 3), {"embed": values}, logits, logits)]


def test_magnitudes():
    rng = np.random.default_rng(0)
    a, noise = rng.normal(size=(3, 2, 5)), rng.normal(size=(3, 2, 5))
    noise[0] = 0
    value = compare(traces(x=a), traces(x=a + noise)).segments[0].values[0]
    assert (value.tokens, value.differing, value.first) == (3, 2, (0, 1))
    np.testing.assert_allclose(value.max_abs, np.abs(noise).max())
    np.testing.assert_allclose(value.relative, np.sqrt((noise**2).sum() / (a**2).sum()))


def test_tolerance_is_relative_to_each_token():
    a = np.array([[1.0, 0], [1000, 0], [0, 0]])
    b = a + np.array([[0.01, 0], [9, 0], [0, 0]])
    values = [compare(traces(x=a), traces(x=b), tolerance).segments[0].values[0] for tolerance in (0, 0.0095, 0.02)]
    assert [(value.differing, value.first) for value in values] == [(2, (0, 0)), (1, (0, 0)), (0, None)]


def test_numbers_that_are_none_and_integers():
    nan = np.array([[np.nan], [np.inf], [1.0]])
    assert compare(traces(x=nan), traces(x=nan)).agree
    assert not compare(traces(x=nan), traces(x=np.nan_to_num(nan)), tolerance=0.5).agree
    text = json.dumps(as_json(compare(traces(x=np.ones((3, 1))), traces(x=nan))), allow_nan=False)
    [value] = json.loads(text)["segments"][0]["values"]
    assert (value["max_abs"], value["relative"], value["differing"]) == (None, None, 2)
    ids = np.array([[1, 2], [3, 4], [5, 6]], np.int32)
    moved = compare(traces(ids=ids), traces(ids=ids + np.array([[0, 0], [0, 90], [0, 0]], np.int32)))
    assert moved.segments[0].values[0].first == (0, 1)
    assert moved.segments[0].values[0].max_abs == 1
    assert compare(traces(ids=ids), traces(ids=ids + 1), tolerance=0.1).agree


def test_the_first_other_prediction_has_its_margin():
    a, b = traces(x=np.zeros((3, 1))), traces(x=np.zeros((3, 1)))
    a = [replace(a[0], logits=np.array([[0, 1, 0, 0], [0, 3, 0, 2], [1, 0, 0, 0]], np.float32))]
    b = [replace(b[0], logits=np.array([[0, 1, 0, 0], [0, 2, 0, 3], [1, 0, 0, 0]], np.float32))]
    comparison: Comparison = compare(a, b)
    assert comparison.predicted_alike == 2
    assert comparison.first_prediction is not None
    assert vars(comparison.first_prediction) == {"prompt": 0, "position": 1, "a": 1, "b": 3, "margin": 1.0}
    assert comparison.logits.first == (0, 1)


def test_models_that_cannot_be_compared(original: list[Trace]):
    with pytest.raises(OptionError, match="differ in their segments, first in embed"):
        compare(original, [replace(original[0], values={}), *original[1:]])
    with pytest.raises(OptionError, match=r"x is \(4,\) in A, \(5,\) in B"):
        compare(traces(x=np.zeros((3, 4))), traces(x=np.zeros((3, 5))))
    with pytest.raises(OptionError, match="tolerance is -1"):
        compare(original, original, tolerance=-1)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("plan", "'plan' in a setting is no NAME=VALUE"),
        ("speed=high", "Unknown option 'speed'"),
        ("tp=two", "tp is 'two'"),
        ("token_buckets=16,x", "token_buckets is '16,x'"),
        ("prefix-cache=maybe", "prefix-cache is 'maybe'"),
        ("plan=best", "plan is 'best'"),
        ("model=/nowhere/model", "/nowhere/model"),
    ],
)
def test_bad_settings(setting: str, message: str):
    with pytest.raises(DsjaxError, match=message):
        run_command("diff", "demo", "--b", setting)
