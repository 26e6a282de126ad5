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
