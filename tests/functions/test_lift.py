"""Lift: a function with variables -> a jaxpr with inputs and outputs in their place."""

import jax
import jax.numpy as jnp

import replicax as rx
from replicax._src.functions.jaxpr.lift import in_one_equation, lift
from replicax._src.state.levels import TraceLevel


def lifted(body, *args):
    return lift(body, args, TraceLevel(in_replica=False))


def test_what_is_read_becomes_an_input_and_what_is_written_an_output():
    a, b, c = rx.Variable(1.0), rx.Variable(2.0), rx.Variable(3.0)

    def body(x):
        b.assign(a * x)
        c.assign(5.0)
        a.read_value()
        return [x + b]

    result = lifted(body, jnp.float32(10))

    assert (result.reads, result.writes, result.num_outs) == ([a.cell], [b.cell, c.cell], 1)
    assert [float(x) for x in result.call(2.0, 7.0)] == [16.0, 14.0, 5.0]
    assert (float(a), float(b), float(c)) == (1.0, 2.0, 3.0)


def test_a_variable_that_is_only_replaced_is_not_an_input():
    v = rx.Variable(jnp.ones(3))

    def body(x):
        v.assign(x)
        return [v.read_value()]

    assert lifted(body, jnp.zeros(3)).reads == []


def test_reads_inside_a_scan_are_inputs_of_the_whole():
    v = rx.Variable(2.0)

    def body(x):
        return [jax.lax.scan(lambda c, _: (c * v, None), x, None, length=3)[0]]

    result = lifted(body, jnp.float32(1))

    assert result.reads == [v.cell]
    assert float(result.call(jnp.float32(1), jnp.float32(3))[0]) == 27.0


def test_the_body_runs_once():
    bodies = []

    def body(x):
        bodies.append(x)
        return [x + 1]

    result = lifted(body, jnp.float32(1))
    result.call(1.0)
    result.call(2.0)

    assert len(bodies) == 1


def test_the_order_of_inputs_is_that_of_the_first_reads():
    variables = [rx.Variable(float(i)) for i in range(4)]

    def body():
        return [variables[2] + variables[0] * variables[3] + variables[2]]

    assert lifted(body).reads == [variables[i].cell for i in (0, 3, 2)]


def test_what_was_traced_stays_one_equation_in_other_traces():
    closed = jax.make_jaxpr(lambda x, y: (x * y + 1, [jnp.sin(y)]))(1.0, 2.0)
    call = in_one_equation(closed)

    again = jax.make_jaxpr(call)(1.0, 2.0)

    assert len(again.eqns) == 1
    assert [float(x) for x in jax.jit(call)(3.0, 0.0)] == [1.0, 0.0]
    assert jax.grad(lambda y: call(3.0, y)[0])(2.0) == 3.0
