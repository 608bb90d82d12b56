"""rx.cond, rx.scan and rx.while_loop: JAX's control flow, with state."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import replicax as rx
from replicax._src.base.errors import ReplicaError, TracingError

EXAMPLES = settings(max_examples=12)
FLOATS = st.floats(-4, 4, width=32, allow_subnormal=False)  # XLA takes such numbers for 0


def replica_id():
    return rx.distribute.get_replica_context().replica_id_in_sync_group


def close(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6), a, b)


def test_cond_keeps_the_assignment_of_the_branch_that_is_called(mode):
    v = rx.Variable(1.0)
    f = mode(lambda p: rx.cond(p, lambda: v.assign_add(1.0) * 1, lambda: v.assign(10.0) * 1))

    seen = [float(f(jnp.asarray(p))) for p in (True, False, True)]

    assert (seen, float(v)) == ([2.0, 10.0, 11.0], 11.0)


def test_cond_may_assign_in_one_branch_only(mode):
    v, w = rx.Variable(1.0), rx.Variable(5.0)

    def if_true(x):
        v.assign(x)
        return x

    def if_false(x):
        return w * x

    f = mode(lambda p, x: rx.cond(p, if_true, if_false, x))

    assert float(f(jnp.asarray(False), jnp.float32(3))) == 15.0
    assert (float(v), float(w)) == (1.0, 5.0)
    assert float(f(jnp.asarray(True), jnp.float32(3))) == 3.0
    assert (float(v), float(w)) == (3.0, 5.0)


@EXAMPLES
@given(x=FLOATS, compiled=st.booleans())
def test_cond_is_that_of_jax(x, compiled):
    def ours(x):
        return rx.cond(x > 0, lambda y: {"a": y * 2}, lambda y: {"a": y - 1}, x)

    wanted = jax.lax.cond(x > 0, lambda y: {"a": y * 2}, lambda y: {"a": y - 1}, jnp.float32(x))

    close((_COMPILED["cond"] if compiled else ours)(jnp.float32(x)), wanted)


@EXAMPLES
@given(
    xs=st.lists(FLOATS, min_size=3, max_size=3),
    reverse=st.booleans(),
    compiled=st.booleans(),
)
def test_scan_is_that_of_jax(xs, reverse, compiled):
    xs = jnp.asarray(xs, jnp.float32)
    wanted = jax.lax.scan(_turn, (jnp.float32(1), 0), xs, reverse=reverse)
    ours = _COMPILED["scan"] if compiled else _scan

    close(ours(xs, reverse), wanted)


def _turn(carry, x):
    total, n = carry
    return (total * x + n, n + 1), {"y": total, "n": n}


def _scan(xs, reverse):
    return rx.scan(_turn, (jnp.float32(1), 0), xs, reverse=reverse)


_COMPILED = {
    "cond": rx.function(
        lambda x: rx.cond(x > 0, lambda y: {"a": y * 2}, lambda y: {"a": y - 1}, x)
    ),
    "scan": rx.function(_scan),
}


@pytest.mark.parametrize("unroll", [1, 2, True])
def test_scan_carries_what_is_assigned(mode, unroll):
    v, scale = rx.Variable(1.0), rx.Variable(2.0)

    def turn(carry, x):
        v.assign(v * scale + x)
        return carry + v, v.read_value()

    last, seen = mode(lambda xs: rx.scan(turn, 0.0, xs, unroll=unroll))(jnp.arange(3.0))

    assert (float(last), seen.tolist(), float(v)) == (19.0, [2, 5, 12], 12.0)


def test_scan_of_no_steps_gives_empty_outputs(mode):
    v = rx.Variable(1.0)

    def turn(carry, x):
        v.assign_add(x.sum())
        return carry + 1, x * 2

    last, seen = mode(lambda xs: rx.scan(turn, 5, xs))(jnp.zeros((0, 3)))

    assert (int(last), seen.shape, float(v)) == (5, (0, 3), 1.0)


def test_scan_without_arrays_takes_a_length(mode):
    v = rx.Variable(0)

    def turn(carry, x):
        assert x is None
        v.assign_add(2)
        return carry, None

    last, seen = mode(lambda: rx.scan(turn, 1.0, length=4))()

    assert (float(last), seen, int(v)) == (1.0, None, 8)


def test_while_loop_carries_what_is_assigned(mode):
    v = rx.Variable(1.0)

    def body(state):
        v.assign(v * 2)
        return {"n": state["n"] + 1, "seen": state["seen"] + v}

    f = mode(lambda n: rx.while_loop(lambda s: s["n"] < n, body, {"n": 0, "seen": 0.0}))

    last = f(jnp.int32(3))

    assert (int(last["n"]), float(last["seen"]), float(v)) == (3, 14.0, 8.0)
    assert int(f(jnp.int32(0))["n"]) == 0
    assert float(v) == 8.0


def test_the_condition_of_a_while_loop_sees_what_the_body_assigned(mode):
    v = rx.Variable(1.0)

    def body(n):
        v.assign(v * 2)
        return n + 1

    turns = mode(lambda: rx.while_loop(lambda _: v.read_value() < 20.0, body, 0))()

    assert (int(turns), float(v)) == (5, 32.0)


def test_they_nest(mode):
    v = rx.Variable(0.0)

    def count(x):
        v.assign_add(x)
        return x

    def turn(carry, x):
        y = rx.cond(x > 1, lambda: count(x), lambda: x * 0)
        z = rx.while_loop(lambda k: k < x, lambda k: count(k) * 0 + k + 1, 0.0)
        return carry + y + z, v.read_value()

    last, seen = mode(lambda xs: rx.scan(turn, 0.0, xs))(jnp.arange(4.0))

    # x: 0, 1, 2, 3; the loop adds 0 .. x-1, the condition adds x above 1.
    assert (float(last), seen.tolist(), float(v)) == (11.0, [0, 0, 3, 9], 9.0)


def test_they_carry_state_inside_replicas(two, mode):
    with two.scope():
        v = rx.Variable(
            0.0,
            synchronization=rx.VariableSynchronization.ON_READ,
            aggregation=rx.VariableAggregation.SUM,
        )

    def step():
        mine = replica_id().astype(jnp.float32) + 1

        def turn(carry, x):
            rx.cond(mine > 1, lambda: add(mine), lambda: add(x))
            return carry, None

        rx.scan(turn, 0.0, jnp.arange(3.0))
        return v.read_value()

    def add(x):
        v.assign_add(x)
        return x

    seen = mode(lambda: two.run(step))()

    assert [float(x) for x in seen.values] == [3.0, 6.0]
    assert float(v) == 9.0


def test_they_carry_state_inside_merge_call(two, mode):
    with two.scope():
        v = rx.Variable(1.0)

    def merge(strategy, x):
        total = strategy.reduce("SUM", x, axis=None)

        def turn(carry, _):
            v.assign(v * total)
            return carry, None

        rx.scan(turn, 0.0, length=2)
        return rx.cond(total > 2, lambda: v.assign_add(0.5) * 1, lambda: v * 1)

    def step():
        mine = replica_id().astype(jnp.float32) + 1
        return rx.distribute.get_replica_context().merge_call(merge, (mine,))

    seen = mode(lambda: two.run(step))()

    assert [float(x) for x in two.experimental_local_results(seen)] == [9.5, 9.5]
    assert [float(c) for c in v.components] == [9.5, 9.5]


def test_run_inside_scan_and_cond(two, mode):
    with two.scope():
        v = rx.Variable(0.0, aggregation=rx.VariableAggregation.SUM)

    def turn(carry, x):
        two.run(lambda: v.assign_add(x * (replica_id() + 1)))
        return carry + v, None

    f = mode(lambda xs: rx.scan(turn, jnp.float32(0), xs)[0])
    g = mode(lambda p: rx.cond(p, lambda: f(jnp.arange(3.0)), lambda: jnp.float32(0)))

    assert float(f(jnp.arange(3.0))) == 0 + 3 + 9
    assert float(g(jnp.asarray(False))) == 0.0
    assert float(v) == 9.0
    assert float(g(jnp.asarray(True))) == 9 + 12 + 18


def test_gradients_flow_through_them(mode):
    w, v = rx.Variable(2.0), rx.Variable(1.0)

    def loss(xs):
        def turn(carry, x):
            v.assign(v * w)
            return carry + rx.cond(x > 1, lambda: v * x, lambda: v * 1), None

        return rx.scan(turn, 0.0, xs)[0]

    value, gradient = mode(lambda xs: rx.value_and_grad(loss, w)(xs))(jnp.array([1.0, 2.0, 3.0]))

    # w + 2 w^2 + 3 w^3
    assert (float(value), float(gradient), float(v)) == (34.0, 45.0, 8.0)


def test_under_vmap_they_are_those_of_jax():
    xs = jnp.arange(4.0)

    conds = jax.vmap(lambda x: rx.cond(x > 1, lambda: x * 2, lambda: x))(xs)
    loops = jax.vmap(lambda x: rx.while_loop(lambda y: y < 5, lambda y: y + 2, x))(xs)
    scans = jax.vmap(lambda x: rx.scan(lambda c, y: (c + y, c), x, jnp.ones(2))[0])(xs)

    assert conds.tolist() == [0, 1, 4, 6]
    assert loops.tolist() == [6, 5, 6, 5]
    assert scans.tolist() == [2, 3, 4, 5]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: rx.scan(lambda c, x: c, 0.0, jnp.ones(2)),
            r"must return a pair.*return carry, None",
        ),
        (
            lambda: rx.scan(lambda c, x: ({"a": c[0], "b": c[1]}, x), (0.0, 1.0), jnp.ones(2)),
            r"rx\.scan returns the structure.*'a'",
        ),
        (
            lambda: rx.while_loop(lambda s: s[0] < 2, lambda s: [s[0] + 1, s[1]], (0, 1)),
            r"body_fun of rx\.while_loop returns the structure",
        ),
    ],
    ids=["no pair", "scan structure", "while structure"],
)
def test_a_turn_that_does_not_fit_the_next_is_refused(mode, call, words):
    with pytest.raises(TypeError, match=words):
        mode(call)()


@pytest.mark.parametrize(
    ("xs", "length"),
    [(None, None), ([jnp.ones(2), jnp.ones(3)], None), (jnp.ones(2), 3), (jnp.float32(1), None)],
    ids=["nothing", "two sizes", "another length", "a scalar"],
)
def test_scan_says_over_what_it_walks(mode, xs, length):
    with pytest.raises(ValueError, match=r"rx\.scan walks over the first axis.*length="):
        mode(lambda: rx.scan(lambda c, x: (c, None), 0.0, xs, length=length))()


def test_cond_refuses_two_structures():
    with pytest.raises(TypeError, match=r"rx\.cond return different structures"):
        rx.function(lambda p: rx.cond(p, lambda: 1, lambda: (1, 2)))(jnp.asarray(True))


def test_a_condition_that_assigns_is_refused():
    v = rx.Variable(0, name="asked")

    def test(x):
        v.assign_add(1)
        return x < 3

    with pytest.raises(TracingError, match=r"cond_fun.*'asked'.*body_fun"):
        rx.function(lambda: rx.while_loop(test, lambda x: x + 1, 0))()


def all_reduce(x):
    return rx.distribute.get_replica_context().all_reduce("SUM", x)


def all_gather(x):
    return rx.distribute.get_replica_context().all_gather(x[None], axis=0).sum()


DIVERGENT = {
    "all_reduce under cond": lambda i, v: rx.cond(i == 0, lambda: all_reduce(i), lambda: i),
    "all_gather under cond": lambda i, v: rx.cond(i == 0, lambda: all_gather(i), lambda: i),
    "all_reduce under raw cond": lambda i, v: jax.lax.cond(i == 0, all_reduce, lambda x: x, i),
    "all_reduce in while": lambda i, v: rx.while_loop(
        lambda x: x < i, lambda x: all_reduce(x) * 0 + x + 1, jnp.int32(0)
    ),
    "all_reduce in condition": lambda i, v: rx.while_loop(
        lambda x: all_reduce(x) < i, lambda x: x + 1, i
    ),
    "summed assignment": lambda i, v: rx.cond(
        i == 0, lambda: v.assign(i.astype(jnp.float32)) * 0, lambda: v * 0
    ),
    "nested": lambda i, v: rx.cond(
        i == 0,
        lambda: rx.scan(lambda c, _: (all_reduce(c), None), i, length=2)[0],
        lambda: i,
    ),
    "after a gather": lambda i, v: rx.cond(all_gather(i) + i > 1, lambda: all_reduce(i), lambda: i),
}


@pytest.mark.parametrize("body", DIVERGENT.values(), ids=DIVERGENT)
def test_a_collective_that_only_some_replicas_reach_is_refused(two, body):
    with two.scope():
        v = rx.Variable(1.0, aggregation=rx.VariableAggregation.SUM)

    with pytest.raises(ReplicaError, match=r"collective \((psum|all_gather)[a-z_]*\).*rx\.cond"):
        rx.function(lambda: two.run(lambda: body(replica_id(), v)))()

    assert float(v) == 1.0


UNIFORM = {
    "constant": lambda i, x: rx.cond(x > 0, lambda: all_reduce(i), lambda: i),
    "reduced": lambda i, x: rx.cond(all_reduce(i) > 0, lambda: all_reduce(i), lambda: i),
    "loop": lambda i, x: rx.scan(lambda c, _: (all_reduce(i), None), i, length=2)[0],
    "while": lambda i, x: rx.while_loop(
        lambda s: s[0] < 2, lambda s: (s[0] + 1, all_reduce(i)), (0, i)
    )[1],
}


@pytest.mark.parametrize("body", UNIFORM.values(), ids=UNIFORM)
def test_a_collective_that_all_replicas_reach_is_fine(two, body):
    f = rx.function(lambda x: two.run(lambda x: body(replica_id(), x), args=(x,)))

    assert [int(x) for x in f(jnp.float32(1)).values] == [1, 1]


def _assign(v, w, x):
    v.assign(w * 0.5 + x)


def _add(v, w, x):
    v.assign_add(x)


def _sub(v, w, x):
    v.assign_sub(w * 0.25)


def _cond(v, w, x):
    one = jnp.float32(1)
    return rx.cond(v > w, lambda: v.assign_add(one) * 1, lambda: w.assign_sub(one) * 1)


def _walk(v, w, x):
    def turn(carry, y):
        v.assign(v * 0.5 + y)
        return carry + w, v.read_value()

    return rx.scan(turn, 0.0, jnp.arange(2.0))


def _loop(v, w, x):
    def more(n):
        v.assign_add(x)
        return n + 1

    return rx.while_loop(lambda n: (n < 2) & (w < 50.0), more, 0)


STEPS = st.lists(
    st.sampled_from([_assign, _add, _sub, _cond, _walk, _loop]), min_size=1, max_size=3
)


def interpret(program, variables, x):
    """Run a little program on two variables that take turns; what it read."""
    a, b = variables
    seen = []
    for step in program:
        seen.append((step(a, b, x), a.read_value(), b.read_value()))
        a, b = b, a
    return seen


@settings(max_examples=8)
@given(program=STEPS, where=st.sampled_from(["outside", "cross", "replica"]))
def test_random_programs_are_the_same_eager_and_compiled(two, program, where):
    results = []
    for wrap in (lambda f: f, rx.function):
        with two.scope():
            a = rx.Variable(1.0, aggregation=rx.VariableAggregation.MEAN)
            b = rx.Variable(2.0, aggregation=rx.VariableAggregation.SUM)

        def body(x, variables=(a, b)):
            return interpret(program, variables, x)

        if where == "replica":
            step = wrap(lambda x, body=body: two.run(lambda x: body(x + replica_id()), (x,)))
        else:
            step = wrap(body)
        if where == "outside":
            seen = [step(jnp.float32(0.5)), step(jnp.float32(1.5))]
        else:
            with two.scope():
                seen = [step(jnp.float32(0.5)), step(jnp.float32(1.5))]
        leaves = jax.tree.leaves(seen, is_leaf=lambda x: isinstance(x, rx.distribute.PerReplica))
        values = [two.experimental_local_results(x) for x in leaves]
        results.append(([np.asarray(x) for v in values for x in v], a.numpy(), b.numpy()))

    close(*results)
