"""The hop budget: how far it is from strategy.run to the function of the user, and the walks."""

import json
import re
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx
from tests.fresh_process import run_fresh
from tests.replicas import context, mirrored

MOST_FRAMES = 25
MOST_MODULES = 5
MOST_CALLS = 45
PACKAGE = str(Path(rx.__file__).parent)


def own_frames(frame):
    """The file names of replicax's frames below ``frame``, innermost first."""
    files = []
    while frame is not None:
        if frame.f_code.co_filename.startswith(PACKAGE):
            files.append(frame.f_code.co_filename)
        frame = frame.f_back
    return files


def frames_into(run):
    """The frames of replicax between a warm ``run(fn)`` and ``fn``, on both threads."""
    seen = []

    def fn():
        here, main = threading.get_ident(), threading.main_thread().ident
        starter = [] if here == main else own_frames(sys._current_frames()[main])
        seen.append([*own_frames(sys._getframe()), *starter])
        return jnp.ones(())

    run(fn)
    del seen[:]
    run(fn)
    return seen[0]


@pytest.mark.parametrize("count", [1, 2])
def test_an_eager_run_is_a_short_way(count):
    files = frames_into(mirrored(count).run)

    assert len(files) <= MOST_FRAMES
    assert len(set(files)) <= MOST_MODULES


def test_a_compiled_run_is_a_short_way_while_it_is_traced():
    strategy = mirrored(2)

    files = frames_into(lambda fn: rx.function(lambda: strategy.run(fn))())

    assert len(files) <= MOST_FRAMES


def in_pieces(make):
    def values(strategy):
        rows = strategy.experimental_distribute_values_from_function(
            lambda ctx: make(np.full(2, ctx.replica_id_in_sync_group, np.float32))
        )
        return jax.block_until_ready(rows)

    return values


@pytest.mark.parametrize(
    "argument",
    [lambda _: jnp.ones(2), in_pieces(jnp.asarray), in_pieces(np.asarray)],
    ids=["array", "pieces of jnp", "pieces of NumPy"],
)
def test_a_warm_call_of_a_compiled_step_makes_few_calls(argument):
    strategy = mirrored(2)
    step = rx.function(lambda x: strategy.run(lambda y: y + 1, args=(x,)))
    step(argument(strategy))
    x = argument(strategy)  # not seen before
    calls = []

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            calls.append(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        step(x)
    finally:
        sys.setprofile(None)

    assert 0 < len(calls) <= MOST_CALLS  # all calls, not only those that are open at once


def test_a_collective_is_a_short_way_from_the_replica():
    strategy = mirrored(2)
    deepest = []

    class Ops(rx.distribute.NcclAllReduce):
        def batch_reduce_implementation(self, reduce_op, value_destination_pairs, options):
            deepest.append(own_frames(sys._getframe()))
            return super().batch_reduce_implementation(reduce_op, value_destination_pairs, options)

    strategy = mirrored(2, cross_device_ops=Ops())
    strategy.run(lambda: context().all_reduce("SUM", jnp.ones(())))

    assert len(deepest[0]) <= MOST_FRAMES


DOCS = Path(__file__).parents[2] / "docs"


def test_the_walks_are_as_short_as_the_architecture_says():
    result = run_fresh(
        f"""
        import json, sys
        sys.path.insert(0, {str(DOCS)!r})
        import make_walks
        found = make_walks.walks()
        assert make_walks.drawing(found).count("<circle") >= sum(map(len, found.values()))
        print(json.dumps(found))
        """,
        REPLICAX_CPU_DEVICES="2",
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    rows = re.findall(r"^\| (an? [^|]+) \| (\d+) \|", (DOCS / "architecture.md").read_text(), re.M)
    stated = {what: int(most) for what, most in rows}

    assert set(stated) == set(found)
    # With an older JAX, code of `_jax_private` stands in for what a newer one does itself.
    more = jax.__version_info__ < (0, 10, 2)
    assert {what: names for what, names in found.items() if len(names) > stated[what] + more} == {}
