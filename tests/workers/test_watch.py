"""Who is silent, stuck, or does something else, from what the workers say.

What a worker counts of its steps and waits.
"""

import threading
import time
import zlib

import pytest

from replicax._src.workers import watchdog
from replicax._src.workers.watchdog import (
    FIGURES,
    Disk,
    Load,
    Progress,
    different,
    hanging,
    silent,
    slow,
    stuck,
)


def progress(count, *, inside, ago, pace=0.0, calls=()):
    then = time.monotonic() - ago
    p = Progress(count, f"call {count}", inside, pace, then, then)
    chain = 0
    for number, what in enumerate(calls, 1):
        chain = zlib.crc32(what.encode(), chain)
        p.journal[number] = (what, chain)
    return p


def nobody_asked():
    return time.monotonic(), []


def test_a_worker_that_says_nothing_is_silent():
    workers = {0: progress(3, inside=False, ago=1), 1: progress(3, inside=False, ago=30)}

    assert [i for i, _ in silent(workers, 20)] == [1]


def test_one_that_keeps_another_waiting_is_stuck():
    workers = {0: progress(5, inside=True, ago=10), 1: progress(4, inside=False, ago=11)}

    late, waiting, seconds = stuck(workers, nobody_asked(), 5, 600)

    assert (late, waiting) == (1, 0)
    assert 10 < seconds < 30


def test_nobody_is_stuck_while_nobody_waits():
    workers = {0: progress(5, inside=False, ago=100), 1: progress(4, inside=False, ago=100)}

    assert stuck(workers, nobody_asked(), 5, 600) is None


def test_slow_steps_make_more_patience():
    workers = {0: progress(5, inside=True, ago=10, pace=2), 1: progress(4, inside=False, ago=11)}

    assert stuck(workers, nobody_asked(), 5, 600) is None


def test_all_in_the_same_collective_is_not_stuck():
    workers = {0: progress(5, inside=True, ago=10), 1: progress(5, inside=True, ago=11)}

    assert stuck(workers, nobody_asked(), 5, 600) is None


def test_one_that_does_not_answer_a_question_is_stuck():
    workers = {0: progress(5, inside=True, ago=10), 1: progress(5, inside=True, ago=11)}

    late, waiting, _ = stuck(workers, (time.monotonic() - 20, [1]), 5, 600)

    assert (late, waiting) == (1, 0)


def at_disk(p, ago, what="writing checkpoint 'c'"):
    p.disk, p.disk_moved = (what, 1), time.monotonic() - ago
    return p


def test_one_at_the_disk_may_keep_others_waiting_for_longer():
    workers = {
        0: progress(5, inside=True, ago=10),
        1: at_disk(progress(4, inside=False, ago=700), ago=8),
    }

    assert stuck(workers, nobody_asked(), 5, 600) is None
    assert stuck(workers, (time.monotonic() - 20, [1]), 5, 600) is None
    assert stuck(workers, nobody_asked(), 5, 1)[0] == 1


def test_a_disk_that_does_not_get_on_hangs_whether_anyone_waits_or_not():
    workers = {
        0: progress(5, inside=False, ago=10),
        1: at_disk(progress(5, inside=False, ago=10), ago=700),
        2: at_disk(progress(5, inside=False, ago=10), ago=700, what=""),
    }

    index, seconds = hanging(workers, 600)

    assert (index, round(seconds)) == (1, 700)
    assert hanging(workers, 701) is None


def test_progress_at_the_disk_is_reported():
    disk, p = Disk(), Progress()
    ping = {"count": 1, "inside": False, "pace": 0.0, "journal": []}
    with disk.at("writing"), disk.at("reading"):
        p.note(ping | {"disk": disk.status()})
        p.disk_moved = 0.0
        p.note(ping | {"disk": disk.status()})
        assert p.disk_moved == 0.0
        disk.note_progress()
        p.note(ping | {"disk": disk.status()})
        assert p.disk_moved > 0.0
        assert p.disk[0] == "writing"
    p.note(ping | {"disk": disk.status()})

    assert p.disk[0] == ""


def test_different_calls_are_found_with_their_number():
    workers = {
        0: progress(3, inside=True, ago=0, calls=["a", "b", "c"]),
        1: progress(3, inside=True, ago=0, calls=["a", "x", "c"]),
    }

    assert different(workers) == (2, 0, 1)


def test_a_difference_is_found_after_it_has_left_the_journal():
    workers = {
        0: progress(3, inside=True, ago=0, calls=["a", "b", "c"]),
        1: progress(3, inside=True, ago=0, calls=["x", "b", "c"]),
    }
    for p in workers.values():
        del p.journal[1], p.journal[2]

    assert different(workers) == (3, 0, 1)


def test_equal_calls_are_no_difference_even_if_one_is_behind():
    workers = {
        0: progress(3, inside=True, ago=0, calls=["a", "b", "c"]),
        1: progress(2, inside=True, ago=0, calls=["a", "b"]),
    }

    assert different(workers) is None


PING = {"count": 1, "inside": False, "pace": 0.0, "journal": []}


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: now[0])
    return now


def test_rates_are_those_of_the_last_seconds(clock):
    load = Load()
    for _ in range(30):
        clock[0] += 1.0
        load.steps += 4
        with load:
            clock[0] += 1.0
        told = load.figures()

    assert told["steps"] == 120
    assert told["rate"] == pytest.approx(2.0)
    assert told["waited"] == pytest.approx(30.0)
    assert told["waits"] == pytest.approx(0.5)
    assert load.batches == 30


def test_a_wait_is_counted_while_it_lasts(clock):
    load = Load()
    load.figures()
    with load:
        clock[0] += 8.0
        seen = load.figures()

    assert seen["waited"] == load.figures()["waited"] == pytest.approx(8.0)
    assert seen["waits"] == pytest.approx(1.0)


def test_threads_wait_each_for_itself(clock):
    load = Load()

    def inner():
        with load:
            pass

    with load:
        thread = threading.Thread(target=inner)
        thread.start()
        thread.join()
        clock[0] += 3.0

    assert load.waited == pytest.approx(3.0)


def test_the_hub_takes_what_a_worker_tells():
    load = Load()
    load.steps = 3
    progress = Progress()
    progress.note({**PING, "load": load.figures()})

    assert progress.load["steps"] == 3
    assert set(load.figures()) == set(FIGURES)


@pytest.mark.parametrize("figure", [float("nan"), float("inf"), "x", None, [1], 10**400])
def test_what_is_not_a_number_is_not_a_message_of_a_worker(figure):
    with pytest.raises((ValueError, TypeError, OverflowError)):
        Progress().note({**PING, "load": {"steps": figure}})


def paced(clock, workers, seconds=20):
    """The progress of workers after steps of 0.1 s: seconds blocked and reading in each step."""
    found = {i: Progress() for i in range(len(workers))}
    for second in range(seconds + 1):
        for (blocked, reading), p in zip(workers, found.values(), strict=True):
            steps = 10 * second
            figures = {"steps": steps, "blocked": blocked * steps, "reading": reading * steps}
            p.note({**PING, "load": figures})
        clock[0] += 1.0
    return found


# The steps of all workers take 0.1 s; the slow one is blocked least.
@pytest.mark.parametrize(
    ("workers", "expected"),
    [
        ([(0.05, 0), (0.05, 0), (0.05, 0)], []),
        ([(0.08, 0), (0.08, 0), (0.04, 0)], [(2, "host")]),
        ([(0.08, 0.01), (0.08, 0.01), (0.04, 0.05)], [(2, "input")]),
        ([(0.08, 0), (0.04, 0)], [(1, "host")]),  # of two, the faster is the measure
        ([(0.08, 0), (0.07, 0)], []),  # 0.1 s against 0.09 s
    ],
)
def test_the_worker_that_others_wait_for_is_slow(clock, workers, expected):
    assert [(s.worker, s.cause) for s in slow(paced(clock, workers))] == expected


def test_a_few_steps_do_not_make_a_worker_slow(clock):
    workers = [(0.08, 0), (0.08, 0), (0.04, 0)]

    assert slow(paced(clock, workers, seconds=4)) == []
    (found,) = slow(paced(clock, workers))
    assert found.times == pytest.approx(0.1 / 0.06)
    assert found.seconds == pytest.approx(0.1)


def test_start_up_does_not_hide_a_slow_worker(clock):
    """A minute of start-up, the same for all, would make the factor almost one."""
    workers = [(0.08, 0), (0.08, 0), (0.04, 0)]
    found = {i: Progress() for i in range(3)}
    for p in found.values():
        p.note({**PING, "load": {"steps": 0}})
    clock[0] += 60.0
    for (blocked, _), p in zip(workers, found.values(), strict=True):
        for steps in range(10, 220, 10):
            figures = {"steps": steps, "blocked": blocked * steps, "reading": 0}
            p.note({**PING, "load": figures})
            clock[0] += 1.0

    assert [s.times for s in slow(found)] == [pytest.approx(0.1 / 0.06)]


def test_reading_counts_while_the_program_waits_for_it(clock):
    load = Load()
    with load.reads():
        clock[0] += 3.0  # ahead of the program
    with load:
        clock[0] += 1.0  # for another worker
        with load.reads():
            clock[0] += 2.0

    assert (load.reading, load.waited) == (2.0, 3.0)


def test_goodput_is_the_time_after_the_first_step_without_waits(clock):
    load = Load()
    clock[0] += 2.0
    load.steps += 1
    load.figures()
    with load:
        clock[0] += 3.0
    clock[0] += 5.0

    assert load.figures()["goodput"] == pytest.approx(0.5)
