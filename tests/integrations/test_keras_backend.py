"""Steps of Keras's optimizers in eager replicas: one program, that knows all that Python says."""

import gc
import weakref
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import replicax as rx
from tests.replicas import mirrored

keras = rx.keras
optimizers = keras.optimizers
GRADIENT = jnp.asarray([0.5, -2.0, 1.0])


class Odd(keras.constraints.Constraint):
    """A constraint of somebody's, that counts its calls."""

    def __init__(self):
        self.calls = 0

    def __call__(self, w):
        self.calls += 1
        return w * (1.0 + 0.5 * (self.calls % 2))


class Turning(optimizers.SGD):
    """An optimizer of somebody's, that looks at numbers."""

    def update_step(self, gradient, variable, learning_rate):
        turned = -gradient if int(self.iterations) % 2 else gradient
        super().update_step(turned, variable, learning_rate)


MADE = {
    "Adam": lambda: optimizers.Adam(0.1),
    "averages": lambda: optimizers.SGD(0.1, momentum=0.5, use_ema=True, ema_momentum=0.5),
    "schedule": lambda: optimizers.SGD(optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)),
    "somebody's": lambda: Turning(0.1),
}


def attribute(name, value):
    return name, lambda optimizer, _: setattr(optimizer, name, value)


def scheduled(optimizer, _):
    schedule = getattr(optimizer, "_learning_rate", None)
    if isinstance(schedule, optimizers.schedules.LearningRateSchedule):
        schedule.decay_rate = 0.9


def called(optimizer, _):
    rates = iter(np.linspace(0.1, 0.9, 20).tolist())
    optimizer.learning_rate = lambda: next(rates)


CHANGES = dict(
    [
        attribute("clipnorm", 0.1),
        attribute("weight_decay", 0.25),
        attribute("momentum", 0.75),
        attribute("loss_scale_factor", 4.0),
        ("rate", lambda o, _: o.__setattr__("learning_rate", 0.05)),
        ("schedule", scheduled),
        ("function", called),
        ("constraint", lambda _, v: setattr(v, "constraint", keras.constraints.NonNeg())),
        ("stricter", lambda _, v: setattr(v.constraint, "max_value", 0.5)),
        ("somebody's constraint", lambda _, v: setattr(v, "constraint", Odd())),
    ]
)


def may(name, change):
    """Whether a change can be made."""
    return (change != "rate" or name != "schedule") and (change != "momentum" or name == "averages")


def trained(name, changes, strategy=None):
    """The variable after each of the steps, with a change before each but the first."""

    def made():
        variable = keras.Variable([3.0, -1.0, 2.0])
        variable.constraint = keras.constraints.MaxNorm(4.0)
        return variable

    if strategy is None:
        variable, optimizer = made(), MADE[name]()
        step = lambda: optimizer.apply([GRADIENT], [variable])  # noqa: E731
    else:
        with strategy.scope():
            variable, optimizer = made(), MADE[name]()
        half = GRADIENT / strategy.num_replicas_in_sync
        step = lambda: strategy.run(lambda: optimizer.apply([half], [variable]))  # noqa: E731
    seen = []
    for change in ["none", *changes]:
        if change != "none" and may(name, change):
            CHANGES[change](optimizer, variable)
        step()
        seen.append(variable.numpy())
    return np.asarray(seen)


def is_settable(changes):
    """Whether no number is set in place of a schedule or a function, which Keras refuses."""
    kinds = [change for change in changes if change in ("rate", "schedule", "function")]
    return not any(before != "rate" and now == "rate" for before, now in pairwise(kinds))


@settings(max_examples=10)
@given(
    st.sampled_from(list(MADE)),
    st.lists(st.sampled_from(["none", *CHANGES]), max_size=4).filter(is_settable),
)
def test_an_eager_step_is_one_devices_whatever_was_changed_before_it(name, changes):
    np.testing.assert_allclose(
        trained(name, changes, mirrored(2)), trained(name, changes), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_between_eager_steps_counts_from_the_next_one_on(change):
    name = {"schedule": "schedule"}.get(change, "averages")

    with_it, without = (trained(name, [c, "none"], mirrored(2)) for c in (change, "none"))

    assert (with_it[0] == without[0]).all()
    assert (with_it[1:] != without[1:]).any()


def test_the_eager_step_of_many_variables_is_one_program():
    strategy = mirrored(2)
    with strategy.scope():
        variables = [keras.Variable(jnp.ones(n)) for n in range(1, 9)]
        optimizer = optimizers.Adam(0.1)
    optimizer.build(variables)
    step = lambda: optimizer.apply([jnp.ones(v.shape) for v in variables], variables)  # noqa: E731
    compiled = []

    def note(event, duration, **more):
        if event.endswith("backend_compile_duration"):
            compiled.append(more)

    strategy.run(lambda: [jnp.ones(v.shape) for v in variables])
    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        strategy.run(step)
        first = len(compiled)
        strategy.run(step)
    finally:
        jax.monitoring.clear_event_listeners()

    assert first < len(variables)
    assert len(compiled) == first
    assert int(optimizer.iterations) == 2


def two_in_turn(strategy):
    """Two variables that take steps in turn, each with another weight decay."""
    with strategy.scope():
        both = [keras.Variable([3.0, -1.0, 2.0]) for _ in range(2)]
        optimizer = optimizers.SGD(0.1, momentum=0.5)
    optimizer.build(both)
    share = GRADIENT / strategy.num_replicas_in_sync

    def step(number):
        optimizer.apply([share], [both[number % 2]])

    for number in range(8):
        optimizer.weight_decay = 0.1 * (number % 5)
        strategy.run(step, args=(number,))
    return [v.numpy() for v in both]


def test_steps_of_an_optimizer_that_changes_all_the_time_are_one_devices():
    one = rx.distribute.OneDeviceStrategy("CPU:0")

    np.testing.assert_allclose(two_in_turn(mirrored(2)), two_in_turn(one), rtol=1e-5)


def test_the_program_of_an_eager_step_does_not_keep_the_optimizer():
    strategy = mirrored(2)
    with strategy.scope():
        variable, made = keras.Variable([3.0, -1.0, 2.0]), [optimizers.Adam(0.1)]
    strategy.run(lambda: made[0].apply([GRADIENT], [variable]))
    alive = weakref.ref(made[0])

    made.clear()
    gc.collect()

    assert alive() is None
