"""What the benchmarks say of their figures; the figures themselves are not for tests."""

import json
import xml.etree.ElementTree as ET
from pathlib import Path

from benchmarks import curves

COMMITTED = Path(curves.__file__).with_name("curves.json")


def point(clock, processors):
    return {"clock": [clock] * 3, "processors": [processors] * 3}


def test_the_committed_curves_have_every_point_that_is_compared_quickly():
    committed = json.loads(COMMITTED.read_text())

    for name, curve in curves.CURVES.items():
        assert {str(x) for x in curve.quickly} <= set(committed[name])
    assert curves.far_above(committed, committed) == 0


def test_only_processor_time_far_above_the_committed_one_fails():
    before = {"batch": {"8": point(1.0, 1.0), "64": point(1.0, 1.0)}}
    busy = {"batch": {"8": point(9.0, 1.7)}}
    slow = {"batch": {"8": point(1.0, 1.1), "64": point(1.0, 1.9)}}

    assert curves.far_above(busy, before) == 0
    assert curves.far_above(slow, before) == (
        "Far slower than before:\nbatch at 64: 1.90 of by hand, 1.00 before"
    )


def test_curves_are_written_as_a_table_as_json_and_as_plots(tmp_path):
    found = {
        "empty": {"1": point(1.4, 1.5)},
        "replicas": {"2": point(1.0, 1.1), "64": point(0.5, 0.6)},
    }

    curves.write(found, tmp_path)

    assert json.loads((tmp_path / "curves.json").read_text()) == found
    assert (
        "| replicas of a small MLP | 64 | 0.50 | 0.50..0.50 | 0.60 |"
        in (tmp_path / "curves.md").read_text()
    )
    assert [p.name for p in tmp_path.glob("*.svg")] == ["replicas.svg"]
    words = [e.text for e in ET.parse(tmp_path / "replicas.svg").iter() if e.text]
    assert {"2", "64", "by the clock", "of the processors"} <= set(words)
