"""Progress: the same elements, and what is said about them to whom."""

import io
import re
import time

import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx
from replicax._src.preflight.report import Memory
from replicax._src.preflight.targets import Target

LINE = re.compile(
    r"(?:\w+: )?step (\d+)(/\d+)?, (?:([\d,]+) examples/s, )?[\d,.]+ steps/s, input wait \d+%"
    r", goodput \d+%"
)


def gone_through(capsys, iterable, **options):
    """The elements and the lines that were written."""
    elements = list(rx.train.progress(iterable, every=0.0, **options))
    return elements, capsys.readouterr().err.splitlines()


def test_the_elements_are_the_iterables_own():
    assert list(rx.train.progress("abc", every=None)) == ["a", "b", "c"]
    assert list(rx.train.progress(iter([]), every=None)) == []


def test_without_a_terminal_there_are_plain_lines(capsys):
    _, lines = gone_through(capsys, range(3), description="train")

    assert [LINE.fullmatch(line).groups()[:2] for line in lines[:-1]] == [
        ("1", "/3"),
        ("2", "/3"),
        ("3", "/3"),
    ]
    assert lines[-1].startswith("train: step 3/3")


def test_the_end_of_a_distributed_dataset_is_known(capsys):
    strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    batches = strategy.experimental_distribute_dataset(rx.data.Dataset.range(6).batch(2))

    _, lines = gone_through(capsys, batches)
    _, endless = gone_through(capsys, rx.data.Dataset.range(3).filter(lambda x: x > 0))

    assert lines[-1].startswith("step 3/3, ")
    assert endless[-1].startswith("step 2, ")


def test_seldom_lines_still_tell_the_end(capsys):
    list(rx.train.progress(range(100), every=1e6))

    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("step 100/100")


def test_numbers_are_shown_when_they_are_known(capsys):
    steps = rx.train.progress(range(2), every=0.0)
    for x in steps:
        steps.update(loss=jnp.float32(x) + 0.25, rate=0.125)

    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].endswith("loss 1.25, rate 0.125")


def test_rows_of_arrays_are_counted_also_where_replicas_have_them(capsys):
    dataset = rx.data.Dataset.from_tensor_slices(np.zeros((10, 3))).batch(4)
    strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    for batches in (dataset, strategy.experimental_distribute_dataset(dataset)):
        steps = rx.train.progress(batches, every=0.0)
        for _ in steps:
            pass
        assert (steps.steps, steps.examples) == (3, 10)
        assert LINE.match(capsys.readouterr().err.splitlines()[-1])[3] is not None


def test_a_batch_size_is_believed_and_plain_numbers_have_no_rows():
    steps = rx.train.progress(range(3), batch_size=64, every=None)
    list(steps)
    assert steps.examples == 192
    steps = rx.train.progress(range(3), every=None)
    list(steps)
    assert steps.examples is None


def test_a_second_pass_counts_anew():
    steps = rx.train.progress([np.zeros((2, 1))] * 3, every=None)
    list(steps)
    list(steps)

    assert (steps.steps, steps.examples) == (3, 6)


def test_on_a_terminal_there_is_a_bar_and_an_error_leaves_no_trace(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")

    def train():
        steps = rx.train.progress(range(5), description="training")
        for x in steps:
            steps.update(loss=0.5)
            if x == 3:
                raise KeyError("stop")

    with pytest.raises(KeyError, match="stop"):
        train()
    list(rx.train.progress(range(5), description="again"))

    shown = terminal.getvalue()
    assert "training" in shown
    assert "again" in shown
    assert "5/5" in shown
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h")  # the cursor is back


def silent_worker():
    """Whether a worker of a cluster shows something."""
    rx.distribute.MultiWorkerMirroredStrategy()
    steps = rx.train.progress(range(2), every=0.0)
    list(steps)
    return steps._line._is_shown


@pytest.mark.multi_process
def test_of_several_workers_the_first_shows_it():
    assert list(rx.testing.run_in_processes(silent_worker, 2)) == [True, False]


def report_of(seconds):
    """A report on a step whose arithmetic takes ``seconds`` at the peak rate of a v5e."""
    return rx.tpu.PreflightReport(
        step="s",
        topology="v5e:2x2",
        num_devices=4,
        num_replicas=4,
        error="",
        compiles=True,
        fits=True,
        memory=Memory(),
        hbm=1,
        collectives=(),
        flops=seconds * Target.parse("v5e:2x2").limits.flops,
        bytes_accessed=1.0,
        compile_seconds=1.0,
    )


def test_goodput_and_mfu_leave_out_the_first_step(capsys, monkeypatch):
    """Five waits of 1 s; a first step of 3 s, then four of 1 s: 4 of 12 s are productive.

    The arithmetic of a step takes 0.5 s at peak rate: 2 s of the 8 s after the first step.
    """
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def waited_for():
        for _ in range(5):
            now[0] += 1.0
            yield None

    for step, _ in enumerate(rx.train.progress(waited_for(), preflight=report_of(0.5))):
        now[0] += 1.0 if step else 3.0

    line = capsys.readouterr().err.splitlines()[-1]
    assert "input wait 42%, goodput 33%, MFU 25.0%" in line


def test_mfu_is_shown_from_the_second_step_on(capsys):
    _, lines = gone_through(capsys, range(2), preflight=report_of(1.0))

    assert ["MFU" in line for line in lines] == [False, True, True]
