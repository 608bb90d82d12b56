"""Objects that hold a variable pass wherever one does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx
from replicax._errors import DivergenceError, TracingError
from replicax.state._held import read_global, trusted, variable_of


class Weight:
    """What an adapter makes of a library's variable."""

    def __init__(self, value, **kwargs):
        self.held = None if value is None else rx.Variable(value, **kwargs)

    def __rx_variable__(self):
        return self.held


@pytest.fixture
def strategy():
    return rx.distribute.MirroredStrategy(jax.devices()[:2])


def test_a_holder_is_differentiated_reduced_returned_and_compared_as_its_variable(strategy):
    with strategy.scope():
        weight = Weight(3.0)
        shares = Weight(
            1.0,
            synchronization=rx.VariableSynchronization.ON_READ,
            aggregation=rx.VariableAggregation.SUM,
        )

    value, (gradient,) = rx.value_and_grad(lambda: weight.held**2, [weight])()
    returned = rx.function(lambda: weight)()

    assert (float(value), float(gradient), float(returned)) == (9.0, 6.0, 3.0)
    assert float(strategy.reduce("SUM", shares, axis=None)) == float(shares.held.read_value())
    assert float(strategy.reduce("MEAN", weight, axis=None)) == 3.0
    assert len(strategy.experimental_local_results(weight)) == 2
    assert strategy.extended.read_var(weight) == 3.0
    assert strategy.extended.variable_created_in_scope(weight)
    strategy.extended.update(weight, lambda copy: copy.assign(4.0))
    assert weight.held.numpy() == 4.0
    with strategy.extended.colocate_vars_with(weight):
        rx.Variable(1.0)
    rx.debug.check_in_sync([weight])
    weight.held.components[1].assign(5.0)
    with pytest.raises(DivergenceError, match="differs between replicas"):
        rx.debug.check_in_sync([weight])


def test_what_holds_no_variable_is_refused_with_words(strategy):
    nothing = Weight(None)

    assert variable_of(nothing) is None
    assert variable_of(3) is None
    with pytest.raises(TypeError, match="differentiates with respect to variables"):
        rx.value_and_grad(lambda: jnp.zeros(()), [nothing])
    with pytest.raises(TypeError, match="check_in_sync needs a variable"):
        rx.debug.check_in_sync([nothing])


def test_the_global_value_lies_on_all_devices_and_is_not_consumed(strategy):
    with strategy.scope():
        v = rx.Variable(np.arange(3.0))
    bump = rx.function(lambda: v.assign_add(jnp.ones(3)))
    bump()

    held = read_global(v)
    bump()

    assert len(held.devices()) == 2
    assert np.asarray(held).tolist() == [1.0, 2.0, 3.0]
    assert v.numpy().tolist() == [2.0, 3.0, 4.0]


def test_a_foreign_trace_reads_the_global_value_only_where_it_is_trusted(strategy):
    with strategy.scope():
        v = rx.Variable(2.0)

    with pytest.raises(TracingError, match="JAX is tracing"):
        jax.jit(lambda: read_global(v) * 2)()
    with trusted():
        assert float(jax.jit(lambda: read_global(v) * 2)()) == 4.0
