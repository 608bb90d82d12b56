"""Context managers end in time or not at all, and leave nothing behind."""

import gc

import pytest

from replicax._src.base import managers
from replicax._src.base.managers import contextmanager
from tests.fresh_process import run_fresh


@contextmanager
def block(log, *, fails=""):
    if fails == "before":
        raise KeyError(fails)
    try:
        yield log
    except ValueError:
        log.append("caught")
    finally:
        log.append("ended")
    if fails == "after":
        raise KeyError(fails)


@pytest.fixture(autouse=True)
def _nothing_stays_open():
    before = set(managers._open)
    yield
    assert managers._open == before


def test_a_block_ends_once_and_may_handle_an_exception():
    log = []

    with block(log) as given:
        assert given is log
        raise ValueError

    assert log == ["caught", "ended"]


@pytest.mark.parametrize("fails", ["before", "after"])
def test_a_block_that_fails_itself_is_forgotten(fails):
    with pytest.raises(KeyError, match=fails), block([], fails=fails):
        pass


def test_exceptions_of_the_body_pass():
    log = []

    with pytest.raises(TypeError), block(log):
        raise TypeError

    assert log == ["ended"]


def test_a_block_that_was_left_without_its_end_never_ends():
    # As if a signal had come between the last statement and the end.
    log, before = [], set(managers._open)
    manager = block(log)
    manager.__enter__()

    del manager
    gc.collect()

    assert log == []
    (left,) = managers._open - before
    left.close()
    managers._open.discard(left)


def test_an_open_block_is_silent_when_python_exits():
    # It ends while its modules exist: afterwards `sys.stdout` and `print` would be gone.
    result = run_fresh("""
        import sys
        from replicax._src.base.managers import contextmanager

        @contextmanager
        def block():
            try:
                yield
            finally:
                print("ended", file=sys.stdout)

        manager = block()
        manager.__enter__()
    """)

    assert (result.stdout, result.stderr) == ("ended\n", "")


def test_a_function_keeps_its_name_and_arguments():
    assert (block.__name__, block.__wrapped__.__kwdefaults__) == ("block", {"fails": ""})
