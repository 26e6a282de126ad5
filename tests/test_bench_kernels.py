"""The kernel benchmark measures what it says: calls on ever other rows, each after the one before."""

import sys
from unittest import mock

import jax
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


def test_the_difference_of_one_call_shows_a_wrong_layer():
    """Beside a stand-in for FlashMLA, which reads the layer that it is told, or the one before."""
    bench = MLADecodeBench("reference", quick=True)
    case = bench.cases["quick batch 1 context 100"]

    def beside_anchor(layers_before: int) -> float:
        def anchor(_, latent):
            others = bench.queries(case)[1], bench.pool(case)
            of_case = bench.tables(case), bench.entries(case)
            return lambda layer: Tensor(mla_decode(latent, *others, layer - layers_before, *of_case, scale=SCALE))

        with mock.patch.object(bench, "_flash_mla", anchor):
            return bench.difference(case)

    class Tensor:
        """As much of a tensor of torch as the benchmark asks for."""

        def __init__(self, value: jax.Array):
            self.numpy = lambda: np.asarray(value, np.float32)

        def float(self) -> "Tensor":
            return self

        cpu = float

    assert beside_anchor(layers_before=0) == 0
    assert beside_anchor(layers_before=1) > 100 * kernels.LARGEST_DIFFERENCE


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


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--implementation", "foo"], "mla_decode has no foo on this device, but reference, deterministic."),
        (["--implementation", "hopper"], "mla_decode has no hopper on this device, but reference, deterministic."),
        (["--tune"], "--tune: the reference implementation of mla_decode has no settings to try."),
        (["--cases", "nothing"], "There are:\nquick batch 1 context 100\nquick batch 2 context 100\n"),
        (["--rounds", "0"], "--rounds: must be at least 1."),
    ],
)
def test_the_command_says_what_is_wrong(
    arguments: list[str],
    complaint: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setattr(sys, "argv", ["kernels", "--op", "mla_decode", "--quick", *arguments])
    with pytest.raises(SystemExit, match="2"):
        kernels.main()
    said = capsys.readouterr()
    assert not said.out
    assert complaint in said.err
