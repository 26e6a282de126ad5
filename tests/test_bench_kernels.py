"""The kernel benchmark measures what it says: calls on ever other rows, each after the one before."""

import sys

import jax.numpy as jnp
import numpy as np
import pytest

from bench import kernels
from bench.ops.mla_decode import SCALE, MLADecodeBench
from bench.timing import time_in_turns
from dsjax.pallas_kernels.mla_decode.reference import mla_decode


def test_a_chain_of_mla_decode_goes_through_all_layers():
    bench = MLADecodeBench("reference", quick=True)
    case = bench.cases["quick batch 2 context 100"]
    chain, pool = bench.subject(case), bench.pool(case)
    assert (chain.calls, len(pool)) == (64, 3)
    latent, rotated = bench.queries(case)
    chain.run()
    for call in range(chain.calls):
        before, arguments = latent, (pool, jnp.int32(call % 3), bench.tables(case), bench.entries(case))
        latent = mla_decode(before, rotated, *arguments, scale=SCALE)
    np.testing.assert_array_equal(chain.state[0], latent)
    np.testing.assert_array_equal(chain.state[1], before)


def test_cases_fill_more_than_the_l2_cache():
    """And no page belongs to two rows."""
    bench = MLADecodeBench("reference", quick=False)
    for case in bench.cases.values():
        tables = np.asarray(bench.tables(case))
        assert len(np.unique(tables)) == tables.size
        layers = min(bench.cache_pages // tables.size, bench.calls(case))
        assert layers * case.batch * case.context * 576 * 2 > 100e6
        assert case.context <= tables.shape[1] * 64


def test_contenders_take_turns():
    order = []

    class Contender:
        calls = 2

        def __init__(self, name: str):
            self.name = name

        def run(self):
            order.append(self.name)

        def wait(self):
            pass

    samples = time_in_turns([Contender("a"), Contender("b")], rounds=3, round_s=0)
    assert [len(one) for one in samples] == [3, 3]
    assert order[-6:] == ["a", "b"] * 3


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    quick = ["--op", "mla_decode", "--quick", "--rounds", "2", "--round-ms", "0", "--cases", "batch 1"]
    monkeypatch.setattr(sys, "argv", ["kernels", *quick])
    kernels.main()
    title, line = capsys.readouterr().out.splitlines()[-2:]
    assert "TFLOP/s" in title
    assert line.startswith("quick batch 1 context 100")
