"""What a report may not exceed."""

import dataclasses

import pytest

import replicax as rx
from replicax._src.preflight.costs import Collective
from replicax._src.preflight.memory import Buffer
from replicax._src.preflight.report import Memory, Sweep
from replicax._src.preflight.tables import above, grown, limit_of

GIB = 2**30
OLD = rx.tpu.PreflightReport(
    step="train_step",
    topology="v5e:2x2",
    num_devices=4,
    num_replicas=4,
    compiles=True,
    fits=True,
    error="",
    memory=Memory(arguments=GIB, temporaries=GIB, total=2 * GIB),
    hbm=16 * GIB,
    collectives=(Collective("all-reduce", 1, GIB, 4),),
    flops=1e12,
    bytes_accessed=1e9,
    compile_seconds=1.0,
    largest=(Buffer(GIB, "weight f32[16384,16384]"),),
    by_line=(Collective("all-reduce", 1, GIB, 4, 1, "train.py:12"),),
)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("12GiB", 12 * GIB),
        ("1.5 G", 1.5 * GIB),
        ("900MiB", 900 * 2**20),
        ("50%", 8 * GIB),
        ("7", 7),
    ],
)
def test_amounts_are_written_in_several_ways(text, size):
    assert limit_of(text, 16 * GIB) == size


@pytest.mark.parametrize("text", ["", "much", "-1GiB", "12 parsecs", "GiB"])
def test_what_is_not_an_amount_is_refused(text):
    with pytest.raises(ValueError, match="not an amount of memory"):
        limit_of(text, 1)


def test_memory_above_a_limit_names_what_fills_it():
    (found,) = above([OLD], "1GiB")

    assert (found.before, found.now) == (GIB, 2 * GIB)
    assert found.where == ("1.00 GiB weight f32[16384,16384]",)
    assert not list(above([OLD], "2GiB"))


def test_what_grew_is_told_with_its_line():
    new = dataclasses.replace(
        OLD,
        memory=Memory(arguments=GIB, temporaries=2 * GIB, total=3 * GIB),
        collectives=(Collective("all-reduce", 2, 2 * GIB, 4),),
        largest=(Buffer(GIB, "tanh f32[16384,16384]", "train.py:30"), *OLD.largest),
        by_line=(*OLD.by_line, Collective("all-reduce", 1, GIB, 4, 1, "train.py:31")),
    )

    found = {e.figure: e for e in grown([OLD], [new])}

    assert set(found) == {"memory", "sent bytes", "step time"}
    assert found["memory"].shown == "2.00 GiB -> 3.00 GiB (+50.0 %)"
    assert found["memory"].where == ("1.00 GiB tanh f32[16384,16384] (train.py:30)",)
    assert found["sent bytes"].where == ("1.00 GiB all-reduce over 4 devices (train.py:31)",)


def test_what_stays_or_shrinks_passes():
    assert not list(grown([OLD], [OLD]))
    assert not list(grown([OLD], [dataclasses.replace(OLD, flops=1.0)]))
    assert not list(grown([], [OLD]))  # never seen before


def test_a_step_that_compiles_no_more_is_an_excess():
    broken = dataclasses.replace(OLD, compiles=False, error="INTERNAL: no")

    (found,) = grown([OLD], [broken])

    assert "does not compile: INTERNAL: no" in found.shown


def test_json_keeps_everything():
    assert rx.tpu.PreflightReport.from_json(OLD.to_json()) == OLD
    assert rx.tpu.Sweep.from_json(OLD.to_json()) == rx.tpu.Sweep((OLD,))
    assert rx.tpu.Sweep.from_json(rx.tpu.Sweep((OLD, OLD)).to_json()).reports == (OLD, OLD)


@pytest.mark.parametrize(("total", "hbm"), [(2**34, 2**35), (2**18, 2**35), (2**36, 2**35)])
def test_reports_are_drawn_whatever_their_size(total, hbm, tmp_path):
    pytest.importorskip("matplotlib")
    memory = Memory(arguments=total if total < hbm else 0, total=total)
    facts = {"memory": memory, "hbm": hbm}
    many = [dataclasses.replace(OLD, topology=f"v5e:{n}x{n}", **facts) for n in (2, 4, 8, 16)]

    Sweep((*many, *many[:1])).plot(tmp_path / "plot.svg")

    assert (tmp_path / "plot.svg").read_text().count("</svg>") == 1
