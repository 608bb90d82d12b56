"""rx.Variable: what it is, reads as, takes, prints, and refuses.

Variables where JAX takes arrays; `_jax_private.accept_as_array` makes them pass.
"""

import copy
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import replicax as rx
from replicax._src.base.errors import VariableError

ON_READ = rx.VariableSynchronization.ON_READ


def test_a_declaration_can_be_read_back(two):
    constraint = jnp.abs
    with two.scope():
        v = rx.Variable(
            jnp.ones((2, 3)),
            trainable=False,
            name="w",
            dtype=jnp.bfloat16,
            constraint=constraint,
            aggregation=rx.VariableAggregation.MEAN,
            shape=(2, 3),
        )

    assert (v.name, v.shape, v.dtype, v.ndim, v.size) == ("w:0", (2, 3), jnp.bfloat16, 2, 6)
    assert (v.trainable, v.constraint) == (False, constraint)
    assert v.synchronization is rx.VariableSynchronization.ON_WRITE
    assert v.aggregation is rx.VariableAggregation.MEAN
    assert v.distribute_strategy is two
    assert v.device == "/job:localhost/replica:0/task:0/device:CPU:0"


def test_copies_are_named_and_placed_by_replica(two):
    with two.scope():
        v = rx.Variable(1.0, name="w")

    assert [c.name for c in v.components] == ["w:0", "w/replica_1:0"]
    assert [c.device[-5:] for c in v.components] == ["CPU:0", "CPU:1"]
    assert [c.whole for c in v.components] == [v, v]
    assert [next(iter(c.read_value().devices())).id for c in v.components] == [0, 1]


def test_trainable_is_the_default_except_on_read(two):
    with two.scope():
        assert rx.Variable(1.0).trainable
        assert not rx.Variable(1.0, synchronization=ON_READ).trainable


def test_it_prints_as_in_the_specification(two):
    with two.scope():
        mirrored = rx.Variable(1.0)
        on_read = rx.Variable(1, synchronization=ON_READ, name="n")

    assert repr(mirrored) == (
        "MirroredVariable:{\n"
        "  0: <rx.Variable 'Variable:0' shape=() dtype=float32, numpy=1.0>,\n"
        "  1: <rx.Variable 'Variable/replica_1:0' shape=() dtype=float32, numpy=1.0>\n}"
    )
    assert repr(on_read).startswith("SyncOnReadVariable:{\n  0: <rx.Variable 'n:0' shape=() dty")
    assert repr(rx.Variable([1.0, 2.0])) == (
        "<rx.Variable 'Variable:0' shape=(2,) dtype=float32, numpy=array([1., 2.], dtype=float32)>"
    )


def test_inside_a_function_it_prints_without_a_value():
    v = rx.Variable(1.0)
    shown = []

    rx.function(lambda: shown.append(repr(v)))()

    assert shown == ["<rx.Variable 'Variable:0' shape=() dtype=float32>"]


BINARY = [
    operator.add,
    operator.sub,
    operator.mul,
    operator.truediv,
    operator.floordiv,
    operator.mod,
    operator.pow,
    operator.lt,
    operator.le,
    operator.gt,
    operator.ge,
    operator.eq,
    operator.ne,
]
INTEGERS = [operator.and_, operator.or_, operator.xor, operator.lshift, operator.rshift]


@settings(max_examples=60)
@given(
    op=st.sampled_from([*BINARY, *INTEGERS]),
    left=st.integers(1, 9),
    right=st.integers(1, 5),
    side=st.sampled_from(["left", "right", "both"]),
)
def test_operators_are_those_of_the_value(op, left, right, side):
    a = rx.Variable(left) if side != "right" else jnp.asarray(left)
    b = rx.Variable(right) if side != "left" else jnp.asarray(right)

    result = op(a, b)

    wanted = op(jnp.asarray(left), jnp.asarray(right))
    assert isinstance(result, jax.Array)
    assert (result.dtype, float(result)) == (wanted.dtype, float(wanted))


def test_unary_operators_indexing_and_products():
    v = rx.Variable([[1.0, -2.0], [3.0, 4.0]])
    x = np.array([[1.0, -2.0], [3.0, 4.0]], np.float32)

    assert (-v).tolist() == (-x).tolist()
    assert abs(v).tolist() == abs(x).tolist()
    assert (v @ x).tolist() == (x @ x).tolist()
    assert (x @ v).tolist() == (x @ x).tolist()
    assert v[0, 1] == -2.0
    assert [row.tolist() for row in v] == x.tolist()
    assert len(v) == 2
    assert v.sum() == 6.0
    assert v.T.tolist() == x.T.tolist()
    assert (~rx.Variable(5)).tolist() == -6


def test_it_converts_to_python_and_numpy():
    v = rx.Variable(3)

    assert (int(v), float(v), bool(v), [0, 1, 2, 3][v]) == (3, 3.0, True, 3)
    assert np.asarray(v, np.float64).dtype == np.float64
    assert isinstance(v.numpy(), np.ndarray)
    assert jnp.asarray(v) + 1 == 4


def test_it_is_a_key_of_dictionaries_by_identity():
    a, b = rx.Variable(1.0), rx.Variable(1.0)

    assert {a: "a", b: "b"}[a] == "a"
    assert a.ref() is a
    assert hash(a) != hash(b)


def test_what_it_does_not_have_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'Variable' object has no attribute 'assing'"):
        rx.Variable(1.0).assing  # noqa: B018


def test_it_cannot_be_copied_by_accident():
    with pytest.raises(VariableError, match=r"use copy\.deepcopy"):
        copy.copy(rx.Variable(1.0))


def test_writes_return_the_variable_with_its_new_value():
    v = rx.Variable(1.0)

    assert v.assign(5.0) is v
    assert float(v.assign_add(2.0)) == 7.0
    assert float(v.assign_sub(3.0)) == 4.0
    assert float(v.assign(rx.Variable(9.0))) == 9.0


@pytest.mark.parametrize(
    ("dtype", "value", "stored"),
    [
        (jnp.float32, 1, 1.0),
        (jnp.float32, True, 1.0),
        (jnp.float32, np.float64(0.5), 0.5),
        (jnp.float32, np.int32(2), 2.0),
        (jnp.bfloat16, np.float32(0.5), 0.5),
        (jnp.bfloat16, 0.5, 0.5),
        (jnp.int32, np.int64(3), 3),
        (jnp.int32, True, 1),
        (jnp.complex64, 1.5, 1.5),
    ],
)
def test_values_are_converted_where_nothing_is_lost(dtype, value, stored):
    v = rx.Variable(0, dtype=dtype)

    v.assign(value)

    assert (v.dtype, complex(v.read_value())) == (dtype, stored)


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        (jnp.int32, 0.5),
        (jnp.int32, np.float32(2.0)),
        (jnp.int32, jnp.float32(2.0)),
        (jnp.float32, 1j),
        (jnp.bool_, 2),
        (jnp.bool_, np.int32(1)),
    ],
)
@pytest.mark.parametrize("verb", ["assign", "assign_add"])
def test_values_that_would_lose_something_are_refused(dtype, value, verb):
    v = rx.Variable(0, dtype=dtype, name="n")

    with pytest.raises(VariableError, match=rf"{verb} of a value of dtype.*'n:0'.*astype"):
        getattr(v, verb)(value)

    assert v.numpy() == 0


@pytest.mark.parametrize("verb", ["assign", "assign_add", "assign_sub"])
def test_a_wrong_shape_is_refused_and_nothing_changes(two, mode, verb):
    with two.scope():
        v = rx.Variable(jnp.zeros(3), name="w")

    for value in (jnp.ones(2), 1.0, jnp.ones((1, 3))):
        with pytest.raises(ValueError, match=rf"{verb} of a value of shape.*'w:0' of shape \(3,"):
            mode(lambda value=value: getattr(v, verb)(value))()
    assert v.numpy().tolist() == [0.0] * 3


def test_the_size_of_numbers_does_not_change_the_dtype():
    v = rx.Variable(1, dtype=jnp.int8)

    v.assign_add(jnp.int8(2))
    v.assign_add(1)

    assert (v.dtype, int(v), v.read_value().dtype) == (jnp.int8, 4, jnp.int8)


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"synchronization": "AUTO"}, r"synchronization='AUTO'.*rx\.VariableSynchronization\.AUTO"),
        ({"aggregation": 1}, r"aggregation=1.*rx\.VariableAggregation\.NONE"),
        ({"synchronization": rx.VariableSynchronization.NONE}, "NONE, which no strategy supports"),
        ({"aggregation": rx.VariableAggregation.MEAN, "dtype": jnp.int32}, "cannot have .* MEAN"),
        ({"shape": (2,)}, r"declared with shape \(2,\).*has shape \(\)"),
    ],
)
def test_a_declaration_that_contradicts_itself_is_refused(two, kwargs, words):
    with two.scope(), pytest.raises(ValueError, match=f"'w'.*{words}|{words}"):
        rx.Variable(1, **{"name": "w", **kwargs})


def test_outside_of_every_scope_every_mode_is_an_ordinary_variable():
    for synchronization in rx.VariableSynchronization:
        v = rx.Variable(1, synchronization=synchronization, aggregation=rx.VariableAggregation.MEAN)

        assert (int(v.assign_add(2)), v.components) == (3, (v,))


FUNCTIONS = {
    "sum": jnp.sum,
    "mean": jnp.mean,
    "add": lambda v: jnp.add(v, 1),
    "dot": lambda v: jnp.dot(np.eye(3, dtype=np.float32), v),
    "matmul": lambda v: jnp.matmul(v, v),
    "tanh": jnp.tanh,
    "where": lambda v: jnp.where(v > 1, v, 0),
    "maximum": lambda v: jnp.maximum(0, v),
    "einsum": lambda v: jnp.einsum("ij,jk->ik", v, v),
    "relu": jax.nn.relu,
    "softmax": jax.nn.softmax,
    "lax": lambda v: jax.lax.add(v, v),
    "jit": jax.jit(lambda x: x * 2),
    "vmap": jax.vmap(lambda x: x * 2),
    "fori_loop": lambda v: jax.lax.fori_loop(0, 3, lambda _, c: c * 2, v),
    "concatenate": lambda v: jnp.concatenate([v, v]),
}
VALUE = np.arange(9, dtype=np.float32).reshape(3, 3)


@pytest.fixture(params=["plain", "mirrored"])
def variable(request):
    if request.param == "plain":
        return rx.Variable(VALUE)
    with rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        return rx.Variable(VALUE)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_of_jax_takes_a_variable_as_its_value(variable, name):
    function = FUNCTIONS[name]

    np.testing.assert_allclose(function(variable), function(jnp.asarray(VALUE)), rtol=1e-6)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_inside_a_compiled_function_the_variable_stays_an_input(name):
    variable, function = rx.Variable(VALUE), FUNCTIONS[name]
    compiled = rx.function(lambda: function(variable))
    compiled()

    variable.assign(VALUE + 1)

    np.testing.assert_allclose(compiled(), function(jnp.asarray(VALUE + 1)), rtol=1e-6)


def test_a_jitted_function_sees_the_value_of_today(variable):
    double = jax.jit(lambda x: x * 2)
    double(variable)

    variable.assign(VALUE + 1)

    np.testing.assert_array_equal(double(variable), 2 * (VALUE + 1))


def test_gradients_flow_through_functions_of_jax():
    variable = rx.Variable(VALUE)

    gradient = rx.grad(lambda: jnp.sum(jnp.square(variable)), variable)()

    np.testing.assert_array_equal(gradient, 2 * VALUE)
