"""Max pooling on CPUs gives what XLA's own kernels give, bit by bit, and is used by strategies.

Products that sum over several dimensions of rows give what NumPy gives, and are used by them too.
"""

import importlib
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import replicax as rx
from replicax._src.functions.jaxpr.cpu_kernels import with_cpu_kernels
from tests.fresh_process import run_fresh

WINDOWS = importlib.import_module("jax._src.lax.windowed_reductions")
HARD = [0.0, -0.0, 1.0, -1.0, 1.5, np.inf, -np.inf, np.nan, 1e-40, 3e-8, -1e-42]


def fast(fn):
    """Return ``fn`` as replicax compiles it."""
    return lambda *args: compiled(fn, *args)(*args)


def compiled(fn, *args):
    return jax.jit(jaxpr_as_fun(with_cpu_kernels(jax.make_jaxpr(fn)(*args))))


def mlir_of(fn, *args):
    return jax.jit(fn).lower(*args).as_text()


def xla_pool(x, window, strides, padding):
    lowest = np.asarray(-np.inf, x.dtype)
    return lax.reduce_window(x, lowest, lambda a, b: lax.max(a, b), window, strides, padding)


def xla_gradient(source, x, window, strides, padding, select=lax.ge_p):
    options = {"window_dimensions": window, "window_strides": strides, "padding": padding}
    return WINDOWS._select_and_scatter_add_impl(
        source, x, select_prim=select, expand_padding=True, **options
    )


def own_gradient(source, x, window, strides, padding, select=lax.ge_p):
    options = {"window_dimensions": window, "window_strides": strides, "padding": padding}
    return lax.select_and_scatter_add_p.bind(source, x, select_prim=select, **options)


def own_pool(x, window, strides, padding):
    return lax.reduce_window(x, np.asarray(-np.inf, x.dtype), lax.max, window, strides, padding)


def bits(x):
    """The bits of floats; one NaN is like another."""
    x = np.asarray(x)
    return np.where(np.isnan(x), np.asarray(np.nan, x.dtype), x).view(f"u{x.dtype.itemsize}")


def assert_same(own, xla, *args):
    with jax.enable_x64():
        (mine,), theirs = fast(own)(*args), jax.jit(xla)(*args)

    assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
    np.testing.assert_array_equal(bits(mine), bits(theirs))


@st.composite
def pools(draw):
    """A shape, its windows and an array, with ties and all that is no ordinary number."""
    rank = draw(st.integers(1, 4))
    window = draw(st.lists(st.sampled_from([1, 1, 2, 2, 3]), min_size=rank, max_size=rank))
    strides = draw(st.lists(st.sampled_from([1, 2, 2, 3]), min_size=rank, max_size=rank))
    if draw(st.booleans()):
        strides = window
    shape = [k + draw(st.integers(0, 4)) for k in window]
    padding = draw(
        st.one_of(
            st.sampled_from(["VALID", "SAME"]),
            st.just([(draw(st.integers(0, k)), draw(st.integers(0, k))) for k in window]),
        )
    )
    if isinstance(padding, str):
        padding = lax.padtype_to_pads(shape, window, strides, padding)
    dtype = draw(st.sampled_from(["float32", "float32", "float64", "bfloat16", "float16"]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    ordinary = draw(st.booleans())

    def numbers(shape):
        some = rng.normal(size=shape) if ordinary else rng.choice(HARD, size=shape)
        return some.astype(jnp.dtype(dtype))

    return tuple(window), tuple(strides), tuple(padding), numbers(shape), numbers


@pytest.mark.parametrize("cases", [12, pytest.param(100, marks=pytest.mark.slow)])
def test_pools_and_gradients_are_those_of_xla(cases):
    law = given(pools(), st.sampled_from([lax.ge_p, lax.le_p]))(is_as_in_xla)
    settings(max_examples=cases, deadline=None)(law)()


def is_as_in_xla(case, select):
    window, strides, padding, x, numbers = case
    how = {"window": window, "strides": strides, "padding": padding}
    ends = jax.eval_shape(partial(own_pool, **how), x)

    assert_same(partial(own_pool, **how), partial(xla_pool, **how), x)
    source = numbers(ends.shape)
    gradients = [partial(g, **how, select=select) for g in (own_gradient, xla_gradient)]
    assert_same(*gradients, source, x)


@pytest.mark.parametrize(
    ("shape", "window", "strides", "padding", "dtype"),
    [
        ((4, 28, 28, 8), (1, 2, 2, 1), (1, 2, 2, 1), "VALID", "float32"),
        ((4, 27, 29, 8), (1, 2, 2, 1), (1, 2, 2, 1), "SAME", "bfloat16"),
        ((4, 15, 15, 3), (1, 3, 3, 1), (1, 2, 2, 1), "SAME", "float32"),
        ((2, 3, 15, 15), (1, 1, 3, 3), (1, 1, 2, 2), "VALID", "bfloat16"),
        ((2, 6, 7, 8, 3), (1, 2, 2, 2, 1), (1, 2, 2, 2, 1), "SAME", "float32"),
    ],
)
def test_layers_pool_as_xla_does(shape, window, strides, padding, dtype):
    padding = lax.padtype_to_pads(shape, window, strides, padding)
    how = {"window": window, "strides": strides, "padding": tuple(padding)}
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.integers(0, 4, shape), dtype)
    source = jnp.asarray(rng.normal(size=own_pool(x, **how).shape), dtype)

    assert_same(partial(own_pool, **how), partial(xla_pool, **how), x)
    assert_same(partial(own_gradient, **how), partial(xla_gradient, **how), source, x)


def step(x):
    pooled = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    return jnp.sum(pooled**2)


def test_no_window_is_visited_by_xla_in_a_step_of_a_strategy():
    strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    x = jnp.arange(2 * 4 * 4 * 3, dtype="float32").reshape(2, 4, 4, 3)

    @rx.function
    def train(x):
        return strategy.run(jax.grad(step), (x,))

    text = train.get_concrete_function(x).as_text()

    assert "select-and-scatter" not in text
    assert "reduce-window" not in text
    np.testing.assert_array_equal(
        strategy.experimental_local_results(train(x))[1],
        xla_gradient(
            2 * xla_pool(x, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"),
            x,
            (1, 2, 2, 1),
            (1, 2, 2, 1),
            ((0, 0),) * 4,
        ),
    )


def test_higher_derivatives_and_batches_are_as_before():
    x = jnp.arange(3 * 2 * 4 * 4, dtype="float32").reshape(3, 2, 4, 4, 1) % 7
    (hessian,) = fast(jax.vmap(jax.hessian(step)))(x)

    eye = np.einsum("baij->baij", hessian.reshape(3, 32, 32)[:, None]).squeeze(1)
    assert {*np.unique(eye)} == {0.0, 2.0}
    assert [int(np.trace(h)) for h in eye] == [2 * 8] * 3


@pytest.mark.parametrize("axis", [0, 1, 3])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_arrays_that_jax_divides_pool_as_whole_ones(axis, kind):
    mesh = Mesh(np.asarray(jax.devices()[:2]), ("a",), axis_types=(kind,))
    x = jnp.asarray(np.random.default_rng(1).normal(size=(4, 8, 8, 4)), "float32")
    divided = jax.device_put(x, NamedSharding(mesh, PartitionSpec(*[None] * axis, "a")))

    with jax.set_mesh(mesh):
        if kind is AxisType.Explicit and axis == 1:
            pytest.skip("JAX itself refuses to pool over a dimension that it divides")
        (found,) = fast(jax.grad(step))(divided)

    np.testing.assert_array_equal(found, jax.grad(step)(x))


@pytest.mark.parametrize("check", [True, False])
def test_pools_within_a_shard_map_are_those_of_the_parts(check):
    mesh = Mesh(np.asarray(jax.devices()[:2]), ("a",))
    x = jnp.asarray(np.random.default_rng(1).normal(size=(4, 9, 8, 4)), "float32")
    spec = PartitionSpec("a")
    inside = jax.shard_map(
        jax.grad(step), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check
    )

    np.testing.assert_array_equal(fast(inside)(x)[0], jax.grad(step)(x))


def test_shapes_with_names_are_left_to_xla():
    names = jax.export.symbolic_shape("n, 4, 4, 3")
    shape = jax.ShapeDtypeStruct(names, "float32")
    exported = jax.export.export(compiled(jax.grad(step), shape))(shape)
    x = jnp.arange(48, dtype="float32").reshape(1, 4, 4, 3)

    np.testing.assert_array_equal(exported.call(x)[0], jax.grad(step)(x))


@given(st.data())
@settings(max_examples=4)
def test_programs_of_jax_are_lowered_as_without_replicax(data):
    window, strides, padding, x, _ = data.draw(pools())
    how = {"window": window, "strides": strides, "padding": padding}
    axes, dtype, (left, right) = data.draw(products())
    programs = [
        (jax.grad(lambda x: own_pool(x, **how).astype("float32").sum()), x),
        (partial(jnp.tensordot, axes=axes), left.astype(dtype), right.astype(dtype)),
    ]
    strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])

    for fn, *args in programs:
        before = mlir_of(fn, *args)
        strategy.run(rx.function(fn), tuple(args))
        rx.function(lambda *xs, fn=fn: strategy.run(fn, xs))(*args)
        jax.clear_caches()
        assert mlir_of(fn, *args) == before


def test_rules_of_jax_are_those_that_it_was_imported_with():
    ran = run_fresh("""
        import jax
        from jax._src.interpreters import mlir

        def rules():
            tables = [mlir._lowerings, *mlir._platform_specific_lowerings.values()]
            return [{p: t[p] for p in jax_primitives if p in t} for t in tables]

        jax_primitives = list(mlir._lowerings) + [
            p for t in mlir._platform_specific_lowerings.values() for p in t
        ]
        before = rules()
        import replicax as rx
        strategy = rx.distribute.OneDeviceStrategy("CPU:0")
        rx.function(lambda x: strategy.run(lambda x: x + 1, (x,)))(1.0)
        assert rules() == before
    """)

    assert ran.returncode == 0, ran.stderr


# Products.

SUMS = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 0.05, "float16": 0.01}


@st.composite
def products(draw):
    """Two arrays that agree in the dimensions which are summed: the first ones, or any."""
    sizes = st.integers(1, 5)
    rows = draw(st.lists(sizes, min_size=2, max_size=4))
    ends = [draw(st.lists(sizes, max_size=2)) for _ in range(2)]
    dtype = draw(st.sampled_from([*SUMS]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    arrays = [rng.normal(size=(*rows, *end)) for end in ends]
    orders = [range(x.ndim) for x in arrays]
    if draw(st.booleans()):
        orders = [draw(st.permutations(order)) for order in orders]
    axes = [[order.index(i) for i in range(len(rows))] for order in orders]
    return axes, dtype, [x.transpose(order) for x, order in zip(arrays, orders, strict=True)]


@pytest.mark.parametrize("cases", [12, pytest.param(100, marks=pytest.mark.slow)])
def test_products_over_rows_are_those_of_numpy(cases):
    settings(max_examples=cases, deadline=None)(given(products())(is_as_in_numpy))()


def is_as_in_numpy(case):
    axes, dtype, whole = case
    with jax.enable_x64():
        left, right = (jnp.asarray(x, dtype) for x in whole)
        (found,) = fast(partial(jnp.tensordot, axes=axes))(left, right)
    left, right = (np.asarray(x, "float64") for x in (left, right))

    assert found.dtype == dtype
    wanted = np.tensordot(left, right, axes)
    np.testing.assert_allclose(np.asarray(found, "float64"), wanted, SUMS[dtype], SUMS[dtype])


def bend(w, x):
    return jnp.sum(jnp.tanh(x @ w) ** 2)


@pytest.fixture
def sequences():
    rng = np.random.default_rng(2)
    return jnp.asarray(rng.normal(size=(3, 5)), "float32"), jnp.asarray(
        rng.normal(size=(4, 6, 3)), "float32"
    )


def gradient(w, x):
    """Of `bend` for ``w``, by NumPy."""
    w, x = (np.asarray(a, "float64") for a in (w, x))
    bent = np.tanh(x @ w)
    return np.einsum("bti,bto->io", x, 2 * bent * (1 - bent**2))


def test_gradients_of_sequences_are_products_of_matrices_in_a_step_of_a_strategy(sequences):
    strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    train = rx.function(lambda w, x: strategy.run(jax.grad(bend), (w, x)))

    text = train.get_concrete_function(*sequences).as_text()

    # Turned around, the rows would be the second dimension of one of them.
    assert "lhs_contracting_dims={0}, rhs_contracting_dims={0}" in text
    assert "[5,24]" not in text
    found = strategy.experimental_local_results(train(*sequences))[1]
    np.testing.assert_allclose(found, gradient(*sequences), 1e-5)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_products_over_rows_that_jax_divides_are_left_to_xla(sequences, axis, kind):
    w, x = sequences
    mesh = Mesh(np.asarray(jax.devices()[:2]), ("a",), axis_types=(kind,))
    divided = jax.device_put(x, NamedSharding(mesh, PartitionSpec(*[None] * axis, "a")))

    with jax.set_mesh(mesh):
        spread = jax.device_put(w, NamedSharding(mesh, PartitionSpec()))
        program = compiled(jax.grad(bend), spread, divided).lower(spread, divided).compile()

    assert "all-gather" not in program.as_text()
    np.testing.assert_allclose(program(spread, divided)[0], gradient(w, x), 1e-5)


@pytest.mark.parametrize("check", [True, False])
def test_products_over_rows_within_a_shard_map_are_those_of_the_parts(sequences, check):
    w, x = sequences
    mesh = Mesh(np.asarray(jax.devices()[:2]), ("a",))
    own = PartitionSpec("a")

    def part(w, x):
        w = jax.lax.pcast(w, "a", to="varying") if check else w
        return jax.grad(bend)(w, x)[None]

    inside = jax.shard_map(
        part, mesh=mesh, in_specs=(PartitionSpec(), own), out_specs=own, check_vma=check
    )

    parts = [gradient(w, half) for half in np.split(x, 2)]
    np.testing.assert_allclose(fast(inside)(w, x)[0], parts, 1e-4)


def test_batches_and_names_of_rows_are_as_before(sequences):
    w, x = sequences
    (each,) = fast(jax.vmap(jax.grad(bend), (None, 0)))(w, jnp.stack([x, 2 * x]))
    names = jax.export.symbolic_shape("n, 6, 3")
    shapes = jax.ShapeDtypeStruct(w.shape, w.dtype), jax.ShapeDtypeStruct(names, x.dtype)
    exported = jax.export.export(compiled(jax.grad(bend), *shapes))(*shapes)

    np.testing.assert_allclose(each, [gradient(w, x), gradient(w, 2 * x)], 1e-5)
    np.testing.assert_allclose(exported.call(w, x)[0], gradient(w, x), 1e-5)
