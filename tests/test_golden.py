"""Logits and greedy tokens against transformers' own, for every supported generation and every plan (tests/golden)."""

from collections.abc import Callable

import numpy as np
import pytest

from dsjax import LLM, SamplingParams
from dsjax.engine.request import Request
from tests.conftest import GOLDEN

CASES = ("v2_lite", "v2", "v3", "moonlight")
PLANS = ("piece", "layer", "step")
TOLERANCE = 1e-5  # of the largest logit; float32 noise is about 1e-6
GREEDY = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)


def golden(case: str) -> dict[str, np.ndarray]:
    return dict(np.load(GOLDEN / case / "golden.npz"))


def logit_error(logits: np.ndarray, expected: np.ndarray) -> float:
    """Largest difference, as a part of the largest expected logit."""
    return float(np.abs(logits - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("case", CASES)
class TestAgainstTransformers:
    @pytest.mark.parametrize("chunk_tokens", [3, 2, 1])
    def test_logits(self, make_llm: Callable[..., LLM], case: str, plan: str, chunk_tokens: int):
        """150 tokens in chunks, and one by one through the decode body; longer chunks come in the next test."""
        expected = golden(case)
        logits = make_llm(case, plan=plan).logits(expected["tokens"].tolist(), chunk_tokens)
        assert logit_error(logits, expected["logits"]) < TOLERANCE

    def test_logits_after_chunks_of_the_whole_bucket(
        self, make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch, case: str, plan: str
    ):
        """Prompts cut into chunks of 32 tokens, cold and over cached ones: the logits behind their last tokens."""
        expected, engine = golden(case), make_llm(case, plan=plan).engine
        engine.forget_prefixes()
        lengths = (17, 64, 33)
        found: dict[str, np.ndarray] = {}
        dispatch = engine.runner.dispatch

        def keep_logits(step):
            result = dispatch(step)
            logits = engine.runner.logits(result, len(step.picks))
            found.update((pick.request.id, row) for pick, row in zip(step.picks, logits, strict=True))
            return result

        monkeypatch.setattr(engine.runner, "dispatch", keep_logits)
        for length in lengths:
            prompt = expected["tokens"][:length].tolist()
            engine.add(Request.create(str(length), prompt, SamplingParams(max_tokens=1), engine.limits))
        while engine.has_work:
            engine.step()
        for length in lengths:
            assert logit_error(found[str(length)], expected["logits"][length - 1]) < TOLERANCE

    def test_greedy_tokens_in_a_mixed_batch(self, make_llm: Callable[..., LLM], case: str, plan: str):
        """Prompts of 5, 37 and 100 tokens at once: chunks of the long one run beside decode tokens of the others."""
        expected = golden(case)
        llm = make_llm(case, plan=plan)
        llm.engine.forget_prefixes()
        answers = llm.generate([expected[f"prompt_{i}"].tolist() for i in range(3)], GREEDY)
        assert [answer.token_ids for answer in answers] == [expected[f"greedy_{i}"].tolist() for i in range(3)]
        used = llm.engine.runner.counts.programs
        assert used["mixed[32]"] > 0
        assert used["decode[3]"] > 0


def test_op_by_op_agrees(make_llm: Callable[..., LLM]):
    expected = golden("v3")
    logits = make_llm("v3", plan="off").logits(expected["tokens"][:3].tolist())
    assert logit_error(logits, expected["logits"][:3]) < TOLERANCE


def test_published_and_nested_config_styles_are_both_covered():
    """The golden folders hold both spellings of the rotary fields, so that reading either is tested above."""
    styles = {case: "rope_parameters" in (GOLDEN / case / "config.json").read_text() for case in CASES}
    assert set(styles.values()) == {True, False}
