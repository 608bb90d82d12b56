"""Levels: reads and writes of variables inside JAX's own control flow.

JAX keeps the jaxpr of a function that was given to scan, cond, jit and so on, found again by the
function's identity. So the functions here stand at module level, and look a variable up by name.
"""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import replicax as rx
from replicax._src.base.errors import TracingError

box = {}


def add(x):
    return x + box["v"].read_value()


def scan_step(carry, _):
    return add(carry), None


def fori_step(_, x):
    return add(x)


def counting_step(state):
    return state[0] + 1, add(state[1])


def is_first(state):
    return state[0] < 1


def below(state):
    return state[0] < box["v"].read_value()


def count(state):
    return state[0] + 1.0, state[1] + 1.0


jitted = jax.jit(add)
remembered = jax.checkpoint(add)


@jax.custom_vjp
def with_rule(x):
    return x * 1.0


with_rule.defvjp(lambda x: (with_rule(x), None), lambda _, g: (g,))


# Each adds the variable to x once.
CONSTRUCTS = {
    "scan": lambda x: lax.scan(scan_step, x, None, length=1)[0],
    "cond": lambda x: lax.cond(x > -1.0, add, add, x),
    "switch": lambda x: lax.switch(x.astype(int) * 0, [add, add, add], x),
    "map": lambda x: lax.map(add, x[None])[0],
    "fori_loop": lambda x: lax.fori_loop(0, 1, fori_step, x),
    "while_loop": lambda x: lax.while_loop(is_first, counting_step, (0, x))[1],
    "while_condition": lambda x: lax.while_loop(below, count, (0.0, x))[1],
    "jit": jitted,
    "checkpoint": remembered,
    "vmap_of_jit": lambda x: jax.vmap(jitted)(x[None])[0],
    "jit_in_scan": lambda x: lax.scan(lambda c, _: (jitted(c), None), x, None, length=1)[0],
    "scan_of_checkpoint": lambda x: lax.scan(lambda c, _: (remembered(c), None), x, None, length=1)[
        0
    ],
    "custom_vjp": lambda x: jitted(with_rule(x)),
}
NESTED = ("vmap_of_jit", "jit_in_scan", "scan_of_checkpoint", "custom_vjp", "switch")
SIMPLE = [name for name in CONSTRUCTS if name not in NESTED]
TRACING = [name for name in CONSTRUCTS if name != "vmap_of_jit"]


@pytest.fixture
def v():
    box["v"] = rx.Variable(3.0, name="seen")
    yield box["v"]
    box.clear()


@pytest.fixture(params=SIMPLE)
def use(request):
    return CONSTRUCTS[request.param]


@pytest.fixture(params=[name for name in SIMPLE if not name.startswith("while")])
def smooth(request):
    return CONSTRUCTS[request.param]


def test_the_second_call_sees_what_was_assigned_since_the_first(v, use):
    f = rx.function(use)
    first = float(f(jnp.float32(0)))

    v.assign(5.0)

    assert (first, float(f(jnp.float32(0)))) == (3.0, 5.0)


def test_a_second_function_sees_the_value_and_the_variable_of_its_own_time(v, use):
    seen = [float(rx.function(lambda x: use(x))(jnp.float32(0)))]
    v.assign(5.0)
    seen.append(float(rx.function(lambda x: use(x))(jnp.float32(0))))
    box["v"] = rx.Variable(7.0)
    seen.append(float(rx.function(lambda x: use(x))(jnp.float32(0))))

    assert seen == [3.0, 5.0, 7.0]


@pytest.mark.parametrize("name", list(CONSTRUCTS))
def test_writes_in_between_are_seen(v, name):
    @rx.function
    def f(x):
        seen = [CONSTRUCTS[name](x)]
        for _ in range(2):
            seen.append(CONSTRUCTS[name](x))
            v.assign(v * 2)
        return [*seen, CONSTRUCTS[name](x)]

    assert [float(y) for y in f(jnp.float32(0))] == [3.0, 3.0, 6.0, 12.0]
    assert [float(y) for y in f(jnp.float32(0))] == [12.0, 12.0, 24.0, 48.0]


def test_the_gradient_sees_a_write_in_between(v, smooth, mode):
    def loss():
        before = smooth(jnp.float32(0))
        v.assign(v * 10)
        return before * 100 + smooth(jnp.float32(0))

    value, gradient = mode(lambda: rx.value_and_grad(loss, v)())()

    # d(100 v + 10 v) / dv
    assert (float(value), float(gradient), float(v)) == (330.0, 110.0, 30.0)


def test_a_gradient_does_not_leak_into_what_comes_after(v, smooth):
    @rx.function
    def f():
        inside = rx.grad(lambda: smooth(jnp.float32(1)) ** 2, v)()
        return inside, smooth(jnp.float32(1))

    first = [float(y) for y in f()]
    v.assign(5.0)

    assert (first, [float(y) for y in f()]) == ([8.0, 4.0], [12.0, 6.0])


def test_replicas_see_their_own_copies(two, use):
    with two.scope():
        box["v"] = rx.Variable(
            0.0,
            synchronization=rx.VariableSynchronization.ON_READ,
            aggregation=rx.VariableAggregation.SUM,
        )

    def step():
        i = rx.distribute.get_replica_context().replica_id_in_sync_group
        box["v"].assign(i.astype(jnp.float32) + 3)
        before = use(jnp.float32(0))
        box["v"].assign_add(1.0)
        return before, use(jnp.float32(0))

    before, after = rx.function(lambda: two.run(step))()

    assert [float(x) for x in before.values] == [3.0, 4.0]
    assert [float(x) for x in after.values] == [4.0, 5.0]


def test_across_replicas_and_inside_one_are_not_mixed_up(two, use):
    with two.scope():
        box["v"] = rx.Variable(3.0)

    @rx.function
    def f():
        outside = use(jnp.float32(0))
        inside = two.run(lambda: use(jnp.float32(1)))
        box["v"].assign(5.0)
        return outside, inside, use(jnp.float32(0)), two.run(lambda: use(jnp.float32(1)))

    a, b, c, d = f()

    assert (float(a), float(c)) == (3.0, 5.0)
    assert [float(x) for x in (*b.values, *d.values)] == [4.0, 4.0, 6.0, 6.0]


def test_our_own_control_flow_around_it_sees_each_turn(v, use):
    def turn(carry, _):
        v.assign_add(1.0)
        return carry, use(jnp.float32(0))

    _, seen = rx.function(lambda: rx.scan(turn, 0.0, length=3))()

    assert seen.tolist() == [4.0, 5.0, 6.0]


@pytest.mark.parametrize("name", TRACING)
def test_outside_of_a_function_a_read_inside_a_trace_is_refused(v, name):
    with pytest.raises(TracingError, match=r"'seen'.*jax\.jit.*@rx\.function"):
        CONSTRUCTS[name](jnp.float32(0))


def test_an_eager_replica_refuses_it_too(two):
    with two.scope():
        box["v"] = rx.Variable(3.0, name="seen")

    with pytest.raises(TracingError, match=r"'seen'.*@rx\.function"):
        two.run(lambda: jitted(jnp.float32(0)))


def test_plain_grad_and_vmap_read_the_value(v):
    grad = jax.grad(lambda x: x * v * v)
    first = float(grad(2.0)), jax.vmap(lambda x: x + v)(jnp.arange(2.0)).tolist()

    v.assign(5.0)

    assert first == (9.0, [3.0, 4.0])
    assert (float(grad(2.0)), jax.vmap(lambda x: x + v)(jnp.arange(2.0)).tolist()) == (
        25.0,
        [5.0, 6.0],
    )


def test_eager_value_and_grad_compiles_nothing_on_its_second_call(v):
    compiled = []

    def listen(event, _duration, **_):
        if event.endswith("backend_compile_duration"):
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        step = rx.value_and_grad(lambda x: jnp.mean(jax.nn.relu(jnp.where(x > 0, x * v, 0.0))), v)
        x = jnp.arange(5.0)
        step(x)
        at_first = len(compiled)
        step(x)
        assert (at_first > 0, len(compiled) - at_first) == (True, 0)
    finally:
        jax.monitoring.clear_event_listeners()


def write_raw(x):
    box["v"].assign(x)
    return x


@pytest.mark.parametrize(
    "transform",
    [
        lambda x: jax.jit(write_raw)(x),
        lambda x: lax.cond(x > 0, write_raw, lambda y: y, x),
        lambda x: lax.fori_loop(0, 2, lambda _, y: write_raw(y), x),
        lambda x: jax.grad(write_raw)(x),
        lambda x: jax.vmap(write_raw)(x[None]),
    ],
    ids=["jit", "cond", "fori_loop", "grad", "vmap"],
)
@pytest.mark.parametrize("wrap", [rx.function, lambda f: f], ids=["function", "outside"])
def test_a_write_that_a_transformation_would_lose_is_refused(v, transform, wrap):
    with pytest.raises(TracingError, match=r"'seen'.*`rx\.scan`|'seen'.*`rx\.function`"):
        wrap(transform)(jnp.float32(1))

    assert float(v) == 3.0


def test_a_constant_written_inside_jit_is_refused_too(v):
    constant = jnp.float32(9)

    with pytest.raises(TracingError, match="never when it runs"):
        jax.jit(lambda: (v.assign(constant), 0)[1])()

    assert float(v) == 3.0


def test_copies_are_read_again_on_every_call(two):
    with two.scope():
        v = rx.Variable(1.0)
        w = rx.Variable(
            2.0,
            synchronization=rx.VariableSynchronization.ON_READ,
            aggregation=rx.VariableAggregation.SUM,
        )

    @rx.function
    def f():
        return [c.read_value() for c in (*v.components, *w.components)]

    first = [float(x) for x in f()]
    v.assign(5.0)
    w.components[1].assign(7.0)

    assert first == [1.0, 1.0, 2.0, 2.0]
    assert [float(x) for x in f()] == [5.0, 5.0, 2.0, 7.0]


def test_copies_are_written_one_by_one(two, mode):
    with two.scope():
        w = rx.Variable(
            2.0,
            synchronization=rx.VariableSynchronization.ON_READ,
            aggregation=rx.VariableAggregation.SUM,
        )

    mode(lambda: _add(w.components[1]))()

    assert [float(c) for c in w.components] == [2.0, 7.0]


def _add(copy):
    copy.assign_add(5.0)


def test_extended_update_changes_every_copy_once(two, mode):
    with two.scope():
        v = rx.Variable(1.0)

    def step(delta):
        two.extended.update(v, lambda copy, d: copy.assign_add(d), args=(delta,))

    mode(step)(jnp.float32(2))

    assert [float(c) for c in v.components] == [3.0, 3.0]


def test_compiled_copies_of_a_mirrored_variable_must_stay_equal(two):
    with two.scope():
        v = rx.Variable(1.0, name="apart")

    with pytest.raises(rx.errors.DivergenceError, match="'apart'"):
        rx.function(lambda: _add(v.components[1]))()

    assert [float(c) for c in v.components] == [1.0, 1.0]
