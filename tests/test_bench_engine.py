"""The engine benchmark says what has run."""

from types import SimpleNamespace

import pytest

from bench.engine import name_of
from dsjax.telemetry import counters


@pytest.mark.parametrize(
    ("target", "fell_back", "name"),
    [
        ("hopper", [], "v2_lite step with kernels mla_decode+experts"),
        ("hopper", ["experts"], "v2_lite step with kernels mla_decode"),
        ("hopper", ["experts", "mla_decode"], "v2_lite step"),
        ("cpu", [], "v2_lite step"),
    ],
)
def test_cases_name_the_kernels_that_serve_the_model(
    monkeypatch: pytest.MonkeyPatch, target: str, fell_back: list[str], name: str
):
    for op in ("mla_decode", "experts"):
        monkeypatch.setitem(counters, f"reference_op.{op}", int(op in fell_back))
    deployment = SimpleNamespace(target=target, deterministic=False)
    llm = SimpleNamespace(
        engine=SimpleNamespace(runner=SimpleNamespace(blueprint=SimpleNamespace(deployment=deployment)))
    )
    assert name_of(llm, "v2_lite", "step") == name  # pyright: ignore
