"""Bucket ladders and the options that choose them."""

import itertools

import pytest

from dsjax.aot.ladders import Buckets, pick, row_ladder, sparse, tail_ladder, token_ladder
from dsjax.config import ModelConfig
from dsjax.engine.options import EngineOptions, resolve, resolve_buckets
from tests.conftest import GOLDEN


def test_token_ladder():
    ladder = token_ladder(8192)
    assert ladder[:8] == (8, 16, 32, 64, 96, 128, 144, 160)
    assert ladder[-3:] == (7168, 7680, 8192)
    assert len(ladder) == 50
    assert all(bucket % 8 == 0 for bucket in ladder)
    worst = max(b / (a + 1) for a, b in itertools.pairwise(ladder[3:]))
    assert worst < 1.5, "above 64 tokens padding stays below half of the real tokens"


@pytest.mark.parametrize("largest", [8, 100, 300, 4096, 5000])
def test_the_last_bucket_is_what_was_asked_for(largest: int):
    for ladder in (token_ladder(largest), row_ladder(largest), tail_ladder(largest), sparse(token_ladder(largest))):
        assert ladder[-1] == largest
        assert list(ladder) == sorted(set(ladder))


def test_row_and_tail_ladders():
    assert row_ladder(32) == (1, 2, 4, 8, 16, 24, 32)
    assert row_ladder(1) == (1,)
    assert tail_ladder(100) == (1, 4, 16, 32, 64, 100)


def test_pick():
    assert [pick((8, 16, 32), size) for size in (1, 8, 9, 32)] == [8, 8, 16, 32]


def test_a_gpu_deployment_stays_within_its_budget_of_executables():
    buckets = resolve_buckets(EngineOptions(), on_cpu=False)
    assert len(buckets.tokens) + len(buckets.decode) + len(buckets.tails) + 1 <= 160


def test_explicit_buckets_are_kept():
    buckets = resolve_buckets(EngineOptions(token_buckets=[24, 40], row_buckets=[1, 3, 5]), on_cpu=True)
    assert buckets == Buckets((24, 40), (1, 3, 5), (1, 3, 5))
    assert resolve(EngineOptions(row_buckets=[1, 3, 5]), ModelConfig.load(GOLDEN / "v3"), "cpu").max_num_seqs == 5
