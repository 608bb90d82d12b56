"""Where the time of a step goes: known traces, known sleeps, and a law for the arithmetic."""

import itertools
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import replicax as rx
from replicax._src.debug.timeline import INPUT_MARK, KINDS, Event, _merge, _subtract

spans = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 8)).map(lambda s: (s[0], s[0] + s[1])), max_size=8
)


def moments(found):
    return {t for begin, end in found for t in range(begin, end)}


@given(spans, spans)
def test_spans_are_sets_of_moments(some, others):
    joined, rest = _merge(some), _subtract(_merge(some), _merge(others))

    assert moments(joined) == moments(some)
    assert moments(rest) == moments(some) - moments(others)
    for found in (joined, rest):
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(found))


def operation(name, begin, end, device=0, run=1, **more):
    facts = {"hlo_op": name, "hlo_module": "jit_step", "program_id": 3, "run_id": run}
    return Event("t", name, begin, end, {**facts, "device_ordinal": device, **more})


def test_each_moment_counts_once():
    events = [
        operation("fusion", 0.0, 2.0),
        operation("all-reduce.1", 1.0, 5.0),  # one second of it hides behind the fusion
        Event("main", INPUT_MARK, 4.0, 8.0, {}),  # one second of it hides behind the collective
        operation("fusion", 10.0, 11.0, run=2),
    ]

    (step,) = rx.debug.Timeline._of(events).steps

    assert (step.begin, step.end) == (0.0, 10.0)
    assert step.seconds["CPU:0"] == {
        "compute": 2.0,
        "collective": 3.0,
        "input": 3.0,
        "idle": 2.0,
    }


def test_an_operation_that_other_threads_finish_lasts_until_they_have():
    events = [
        operation("fusion", 0.0, 0.1, _p=77),
        Event("u", "end: fusion", 3.0, 3.0, {"_c": 77}),
        operation("fusion", 5.0, 6.0, run=2),
    ]

    assert rx.debug.Timeline._of(events).mean["CPU:0"]["compute"] == pytest.approx(3.0)


def test_what_is_noted_late_does_not_hide_a_collective():
    events = [
        operation("tanh", 0.0, 1.0, _p=77),
        operation("all-reduce.1", 1.0, 4.0, _p=78),
        Event("u", "end: tanh", 4.5, 4.5, {"_c": 77}),  # after what followed it in its thread
        Event("u", "end: all-reduce.1", 4.4, 4.4, {"_c": 78}),
        operation("tanh", 5.0, 6.0, run=2),
    ]

    kinds = rx.debug.Timeline._of(events).mean["CPU:0"]

    assert (kinds["compute"], kinds["collective"], kinds["idle"]) == pytest.approx((1.5, 3.0, 0.5))


def test_an_operation_in_which_devices_meet_is_a_collective_whatever_its_name():
    events = [
        operation("wrapped_add", 0.0, 4.0),
        Event("t", "Rendezvous", 1.0, 3.0, {}),
        operation("fusion", 5.0, 6.0, run=2),
    ]

    assert rx.debug.Timeline._of(events).mean["CPU:0"]["collective"] == pytest.approx(4.0)


def test_where_code_runs_op_by_op_elements_make_the_steps():
    events = [operation("add", t / 10, t / 10 + 0.05, run=t) for t in range(100)]
    events += [Event("main", INPUT_MARK, t, t + 0.01, {}) for t in range(10)]

    found = rx.debug.Timeline._of(events)

    assert len(found.steps) == 9
    assert "element" in found.unit


def trained(sleep, size, batches=12):
    """The timeline of a training whose input sleeps, and whose step multiplies matrices."""
    strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        w = rx.Variable(jnp.zeros((size, size)))

    def replica_step(x):
        y = x
        for _ in range(8):
            y = jnp.tanh(y @ (w + 1.0))
        total = rx.distribute.get_replica_context().all_reduce("SUM", y.T @ y)
        w.assign_sub(1e-6 * total)
        return y.sum()

    step = rx.function(lambda b: strategy.reduce("SUM", strategy.run(replica_step, (b,)), None))

    def rows():
        for _ in range(batches):
            time.sleep(sleep)
            yield np.ones((2 * size, size), "f")

    signature = rx.TensorSpec((2 * size, size), "float32")
    data = strategy.experimental_distribute_dataset(
        rx.data.Dataset.from_generator(rows, output_signature=signature)
    )
    step(next(iter(data)))
    with rx.debug.timeline() as seen:
        for batch in data:
            last = step(batch)
        jax.block_until_ready(last)
    return seen


def test_an_input_that_sleeps_is_what_the_devices_wait_for():
    seen = trained(sleep=0.2, size=16, batches=6)

    assert sorted(seen.mean) == ["CPU:0", "CPU:1"]
    for kinds in seen.mean.values():
        # Each element sleeps 200 ms, of which the step before hides little.
        assert kinds["input"] > 0.1
        assert kinds["input"] > kinds["compute"] + kinds["collective"]
    for step in seen.steps:
        for kinds in step.seconds.values():
            assert sum(kinds.values()) == pytest.approx(step.end - step.begin)
            assert all(kinds[k] >= 0 for k in KINDS)


def test_a_step_that_computes_much_hides_its_input():
    seen = trained(sleep=0.0, size=512, batches=6)

    for kinds in seen.mean.values():
        assert kinds["compute"] > 5 * kinds["input"]
        assert kinds["collective"] > 0


def test_a_page_is_bounded_and_alone(tmp_path):
    events = [operation("f", t / 10, t / 10 + 0.05, d, t) for t in range(3000) for d in range(40)]

    page = rx.debug.Timeline._of(events).html()

    assert len(page) < 1_000_000
    assert "<script" not in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")


def test_two_recordings_at_a_time_are_refused():
    with (
        rx.debug.timeline(),
        pytest.raises(RuntimeError, match="Only one recording can run at a time"),
        rx.debug.timeline(),
    ):
        pass


PROGRAM = """
    import sys
    import jax.numpy as jnp
    import numpy as np
    import replicax as rx

    strategy = rx.distribute.MirroredStrategy()
    step = rx.function(lambda b: strategy.reduce("SUM", b, axis=0))
    endless = rx.data.Dataset.from_tensor_slices(np.ones((8, 64), "f")).repeat().batch(8)
    if sys.argv[1] == "train":
        for batch in strategy.experimental_distribute_dataset(endless):
            step(batch).block_until_ready()
    print("the end")
"""


@pytest.mark.parametrize(("what", "code"), [("train", 0), ("nothing", 1)])
def test_the_command_records_some_steps_of_a_program_and_ends_it(tmp_path, what, code):
    script, out = tmp_path / "train.py", tmp_path / "timeline.html"
    script.write_text(textwrap.dedent(PROGRAM))
    source = str(Path(rx.__file__).parents[1])
    asked = ("--steps", "5", "-o", str(out), str(script), "--", what)
    done = subprocess.run(
        [sys.executable, "-m", "replicax", "timeline", *asked],
        env={**os.environ, "PYTHONPATH": source, "REPLICAX_CPU_DEVICES": "2"},
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert done.returncode == code, done.stderr
    if code:
        assert "took 0 elements" in done.stderr
    else:
        assert "Averages of 5 steps" in " ".join(done.stdout.split())
        assert "CPU:1" in out.read_text()
