"""Deterministic mode on a real GPU, where the library that multiplies matrices is another one than on CPUs."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dsjax import LLM
from tests.test_deterministic import GREEDY, RANDOM, Answer, ask
from tests.wide import write_v2_lite

pytestmark = pytest.mark.gpu
LAYERS = 4
OPTIONS = {"load_format": "dummy", "deterministic": True, "max_model_len": 1024, "kv_tokens": 1 << 15}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """DeepSeek-V2-Lite at its real width, with few layers."""
    return write_v2_lite(tmp_path_factory.mktemp("wide"), LAYERS)


@pytest.fixture(scope="module")
def first_answers() -> dict[str, list[Answer]]:
    """The first answers seen per dtype: those of all other plans must be the same."""
    return {}


@pytest.mark.parametrize("plan", ["step", "layer", "piece"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_alone_and_in_company(folder: Path, first_answers: dict[str, list[Answer]], plan: str, dtype: str):
    """Three requests alone, then each at many places of a full batch; and their tokens again as a prompt."""
    rng = np.random.default_rng(0)
    requests = [
        (rng.integers(2, 100_000, rng.integers(1, 300)).tolist(), replace((GREEDY, RANDOM)[i % 2], seed=i))
        for i in range(100)
    ]
    with LLM(folder, plan=plan, dtype=dtype, **OPTIONS) as llm:
        alone = [ask(llm, [request])[0] for request in requests[:3]]
        for answer, expected in zip(alone, first_answers.setdefault(dtype, alone), strict=True):
            answer.assert_same(expected)
        for _ in range(4):
            order = rng.permutation(len(requests))
            together = ask(llm, [requests[i] for i in order])
            for i in range(3):
                together[order.tolist().index(i)].assert_same(alone[i])
        for (prompt, _), answer in zip(requests[:3], alone, strict=True):
            for chunk_tokens in (100, 7):
                logits = llm.logits(prompt + answer.tokens[:-1], chunk_tokens)
                np.testing.assert_array_equal(logits[len(prompt) - 1 :], answer.logits)
