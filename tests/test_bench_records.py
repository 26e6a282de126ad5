"""Benchmark records: medians, and files in which a new run replaces its old records only."""

import json

import pytest

from bench import records


def test_new_records_replace_old_ones_of_the_same_case(tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(records, "RESULTS", tmp_path)
    first = records.record("s", "ttft", "a", "time", [3.0, 1.0, 2.0], "ms")
    other = records.record("s", "ttft", "b", "time", [5.0], "ms")
    assert (first["value"], first["spread"], other["spread"]) == (2.0, 2.0, 0.0)
    records.save([first, other])
    path = records.save([records.record("s", "ttft", "a", "time", [9.0], "ms")])
    assert {entry["case"]: entry["value"] for entry in json.loads(path.read_text())} == {"a": 9.0, "b": 5.0}
    assert path == tmp_path / "cpu" / "s.json"


def test_times_beside_an_anchor_and_the_floor(monkeypatch: pytest.MonkeyPatch):
    entry = records.record("s", "op", "case", "time", [20.0], "us")
    compared = records.above(records.against(entry, entry | {"case": "other", "value": 30.0}), 5.0)
    assert compared["anchor"] == {"name": "other", "value": 30.0}
    assert (compared["ratio"], compared["floor"], compared["floor_ratio"]) == (1.5, 5.0, 0.25)
    assert records.floor_s(1e12, 1e9) is None, "nothing is known of this machine"
    monkeypatch.setattr(records, "card", lambda: "h200")
    assert records.floor_s(790e12, 1e9) == 1
    assert records.floor_s(1e12, 8.6e12) == 2
