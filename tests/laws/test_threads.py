"""Reading and writing a variable is one step: threads lose no update of each other's."""

import threading

import jax
import jax.numpy as jnp
import pytest

import replicax as rx
from tests.replicas import mirrored

THREADS, TIMES = 4, 40
SUM = rx.VariableAggregation.SUM


def at_once(*works):
    """Call every function TIMES times in a thread of its own; raise what one raised."""
    errors, gate = [], threading.Barrier(len(works))

    def loop(work):
        gate.wait()
        try:
            for _ in range(TIMES):
                work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=loop, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@pytest.fixture
def strategy():
    return mirrored(2)


WRITES = {
    "assign_add": lambda v: v.assign_add(jnp.ones(3)),
    "assign_sub": lambda v: v.assign_sub(-jnp.ones(3)),
    "scatter_add": lambda v: v.scatter_add(rx.IndexedSlices(jnp.ones(3), jnp.arange(3))),
    "scatter_nd_add": lambda v: v.scatter_nd_add(jnp.arange(3)[:, None], jnp.ones(3)),
}


@pytest.mark.parametrize("where", ["plain", "mirrored"])
@pytest.mark.parametrize("verb", WRITES)
def test_no_eager_update_is_lost(verb, where, strategy):
    if where == "plain":
        variable = rx.Variable(jnp.zeros(3))
    else:
        with strategy.scope():
            variable = rx.Variable(jnp.zeros(3))

    at_once(*[lambda: WRITES[verb](variable)] * THREADS)

    assert variable.numpy().tolist() == [THREADS * TIMES] * 3


@pytest.mark.parametrize("made_in", ["scope", "nowhere"])
def test_no_update_of_replicas_is_lost(made_in, strategy):
    if made_in == "scope":
        with strategy.scope():
            variable = rx.Variable(0.0, aggregation=SUM)
    else:
        variable = rx.Variable(0.0)

    at_once(*[lambda: strategy.run(lambda: variable.assign_add(jnp.float32(1)))] * THREADS)

    assert float(variable.numpy()) == 2 * THREADS * TIMES


def test_no_update_of_a_copy_is_lost(strategy):
    with strategy.scope():
        own = rx.Variable(0.0, synchronization=rx.VariableSynchronization.ON_READ, aggregation=SUM)

    at_once(*[lambda c=c: c.assign_add(1.0) for c in own.components] * 2)

    assert [float(c.numpy()) for c in own.components] == [2 * TIMES] * 2


def test_a_compiled_step_and_eager_updates_do_not_undo_each_other(strategy):
    with strategy.scope():
        variable = rx.Variable(jnp.zeros(3))
    step = rx.function(lambda: variable.assign_add(jnp.ones(3)).read_value())
    step()

    at_once(step, lambda: variable.assign_add(jnp.ones(3)), lambda: variable.numpy(), step)

    assert variable.numpy().tolist() == [3 * TIMES + 1] * 3


def test_a_callback_may_change_a_variable_while_its_program_runs():
    counter, weight = rx.Variable(0), rx.Variable(jnp.zeros(3))

    @rx.function
    def step():
        jax.debug.callback(lambda: counter.assign_add(1) and None)
        weight.assign_add(jnp.ones(3))

    for _ in range(5):
        step()
    jax.effects_barrier()

    assert (int(counter.numpy()), weight.numpy().tolist()) == (5, [5.0] * 3)
