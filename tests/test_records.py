import json
import re

import pytest

from collab.records import RunRecord, append_record, provenance, read_records


def record(**changes):
    values = {"name": "run", "config": {"shared_dim": 8}, "metrics": {"error": 0.25}, "provenance": provenance(seed=3)}
    return RunRecord(**(values | changes))


def test_records_come_back_in_the_order_they_were_appended(tmp_path):
    path = tmp_path / "results" / "runs.jsonl"
    first, second = record(), record(name="another", metrics={"per layer": [0.1, 0.2], "text": "naïve\nlines"})
    append_record(path, first)
    before = path.read_bytes()
    append_record(path, second)
    assert read_records(path) == [first, second]
    assert path.read_bytes().startswith(before)
    assert len(path.read_text().splitlines()) == 2


def test_provenance_says_where_a_number_came_from():
    found = provenance(seed=7)
    assert found["seed"] == 7
    assert found["commit"] is None or re.fullmatch(r"[0-9a-f]{40}(\+changes)?", found["commit"])
    assert found["device"].startswith("cpu (")
    assert {"collab", "python", "torch"} <= set(found["versions"])
    assert found["time"].endswith("+00:00")
    json.dumps(found)


def test_a_number_that_json_cannot_hold_is_not_written(tmp_path):
    path = tmp_path / "runs.jsonl"
    append_record(path, record())
    with pytest.raises(ValueError, match="not JSON compliant"):
        append_record(path, record(metrics={"error": float("nan")}))
    assert read_records(path) == [record(provenance=read_records(path)[0].provenance)]


@pytest.mark.parametrize("line", ['{"name": "run"}', "not json", "[1]", '{"name": 1, "config": 2, "extra": 3}'])
def test_a_damaged_line_is_named(tmp_path, line):
    path = tmp_path / "runs.jsonl"
    append_record(path, record())
    with path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ValueError, match=r"runs\.jsonl, line 2, must be a record"):
        read_records(path)
