"""Faster CPU code for max pooling and for weight gradients of sequences.

XLA has no window kernels for CPUs: it computes max pooling element by element. For the gradient
that is 5 to 150 times slower than comparing strided slices of the whole array. The results here
are bitwise the same: the first of equal numbers wins, a NaN loses to its successor, and sums are
accumulated in window order.

The weight gradient of a batch of sequences contracts several leading dimensions. XLA transposes one
operand element by element and selects a slow kernel; as a 2-D matmul it takes 0.6 to 0.9 of the
time, and may round differently.

`with_cpu_kernels` replaces these operations in the jaxpr of a program that replicax compiles, by
primitives that select the code at lowering: only then is it known how XLA shards the arrays.
Programs of `jax.jit` are not changed.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core as jaxprs
from jax.interpreters import mlir

from replicax._src.functions.jaxpr.lift import with_equations, with_inner

_MOST_PLACES = 32  # window size limit (5 x 5, 3 x 3 x 3): larger ones make long programs
# Equations whose inner jaxprs are lowered like the code around them. The jaxprs of others, such as
# a Pallas kernel or the operator of a reduction, have lowering rules of their own.
_CALLS = {"scan", "while", "cond", "jit", "pjit", "closed_call", "core_call", "eval_jaxpr"}
_CALLS |= {"shard_map", "custom_jvp_call", "custom_vjp_call", "remat2", "checkpoint"}


def with_cpu_kernels(jaxpr: Any) -> Any:
    """Return `jaxpr`, closed or not, with the operations that have CPU kernels replaced."""

    def change(equation: Any) -> Any:
        if equation.primitive in _KERNELS:
            kernel, is_candidate = _KERNELS[equation.primitive]
            return equation.replace(primitive=kernel) if is_candidate(equation.params) else equation
        if equation.primitive.name in _CALLS:
            return with_inner(equation, with_cpu_kernels)
        return equation

    return with_equations(jaxpr, change)


def _kernel(original: Any, fast: Callable[..., Any], fits: Callable[[Any, Any], bool]) -> Any:
    """Return a primitive like `original` that lowers to `fast` on CPUs if `fits(ctx, params)`."""
    primitive = jaxprs.Primitive(f"replicax_{original.name}")
    primitive.def_effectful_abstract_eval(original.abstract_eval)
    plain = mlir.lower_fun(original.bind, multiple_results=False)
    quick = mlir.lower_fun(fast, multiple_results=False)

    def lower(ctx: Any, *args: Any, **params: Any) -> Any:
        return (quick if fits(ctx, params) else plain)(ctx, *args, **params)

    mlir.register_lowering(primitive, plain)
    mlir.register_lowering(primitive, lower, platform="cpu")
    return primitive


def _pool_fits(ctx: Any, params: Any) -> bool:
    dilations = (*params["base_dilation"], *params["window_dilation"])
    return all(d == 1 for d in dilations) and _are_plain(ctx)


def _gradient_fits(ctx: Any, params: Any) -> bool:
    # XLA accumulates sums of small floats in larger ones, and would round differently.
    if _overlap(**params) and ctx.avals_out[0].dtype.itemsize < 4:
        return False
    # For a single window XLA does not add the value to 0, so -0 stays -0.
    selects = params["select_prim"] in (lax.ge_p, lax.le_p)
    return selects and _are_plain(ctx) and ctx.avals_in[0].size > 1


def _product_fits(ctx: Any, params: Any) -> bool:
    return _are_plain(ctx) and _are_whole(ctx)


def _are_plain(ctx: Any) -> bool:
    """Whether arrays are floats with static, nonempty shapes, not sharded by JAX itself."""
    return all(
        jnp.issubdtype(a.dtype, jnp.floating)
        and all(type(d) is int for d in a.shape)
        and 0 not in a.shape
        and not any(a.sharding.spec)
        for a in (*ctx.avals_in, *ctx.avals_out)
    )


# Matrix products that contract all leading dimensions.


def _sums_over_rows(dimension_numbers: Any, **_: Any) -> bool:
    """Whether the contraction is over the same two or more leading dimensions of both operands."""
    (left, right), batches = dimension_numbers
    first = tuple(range(len(left)))
    several = len(first) > 1 and tuple(left) == tuple(right) == first
    return several and not any(batches)


def _are_whole(ctx: Any) -> bool:
    """Whether each device holds these arrays whole, so that XLA does not shard them later.

    If XLA sharded the second of the contracted dimensions, a reshape that merges them would have
    no equivalent sharding, and XLA would have to gather the array.
    """
    mesh = ctx.avals_in[0].sharding.mesh
    if not mesh.empty:
        return bool(mesh.are_all_axes_manual)
    context = getattr(ctx.module_context, "axis_context", None)
    return getattr(context, "num_devices", None) == 1


def _product(
    left: jax.Array, right: jax.Array, *, dimension_numbers: Any, **params: Any
) -> jax.Array:
    """Return the product, computed as a 2-D matmul with the contracted dimensions merged."""
    rows = len(dimension_numbers[0][0])
    how = {name: params[name] for name in ("precision", "preferred_element_type")}
    a, b = (x.reshape(-1, math.prod(x.shape[rows:])) for x in (left, right))
    product = lax.dot_general(a, b, (((0,), (0,)), ((), ())), **how)
    return product.reshape(left.shape[rows:] + right.shape[rows:])


# Max pooling.


def _has_small_windows(window_dimensions: Sequence[int], **_: Any) -> bool:
    return 1 < math.prod(window_dimensions) <= _MOST_PLACES


def _overlap(window_dimensions: Sequence[int], window_strides: Sequence[int], **_: Any) -> bool:
    return any(k > s for k, s in zip(window_dimensions, window_strides, strict=True))


def _pool(
    operand: jax.Array,
    *,
    window_dimensions: Sequence[int],
    window_strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
    **_: Any,
) -> jax.Array:
    """Return the maximum of each window."""
    x = _padded(operand, -jnp.inf, padding)
    best, *others = _places(x, window_dimensions, window_strides)
    for other in others:
        best = lax.max(best, other)
    return best


def _gradient(source: jax.Array, operand: jax.Array, **params: Any) -> jax.Array:
    """Return `source` scattered to the winning position of each window; overlaps are summed."""
    select_prim, padding = params["select_prim"], params["padding"]
    window, strides = params["window_dimensions"], params["window_strides"]
    # Padding must never win, which is larger or smaller than all numbers.
    x = _padded(operand, -jnp.inf if select_prim is lax.ge_p else jnp.inf, padding)
    best, *others = _places(x, window, strides)
    winner = lax.full(source.shape, 0, jnp.int32)
    for number, other in enumerate(others, start=1):
        stays = select_prim.bind(best, other)
        best = lax.select(stays, best, other)
        winner = lax.select(stays, winner, lax.full_like(winner, number))
    in_rows = window[-1] == strides[-1] == 1
    spread = _added
    if in_rows and not _overlap(window, strides):
        spread = _side_by_side
    whole = spread(source, winner, x.shape, window, strides)
    starts = [lo for lo, _ in padding]
    return lax.slice(whole, starts, [a + d for a, d in zip(starts, operand.shape, strict=True)])


def _padded(x: jax.Array, value: float, padding: Sequence[tuple[int, int]]) -> jax.Array:
    return lax.pad(x, lax.full_like(x, value, shape=()), [(lo, hi, 0) for lo, hi in padding])


def _places(x: jax.Array, window: Sequence[int], strides: Sequence[int]) -> list[jax.Array]:
    """Return, for each position in a window in order, the array of all windows' values at it."""
    ends = [d - k + 1 for d, k in zip(x.shape, window, strict=True)]
    return [
        lax.slice(x, at, [a + end for a, end in zip(at, ends, strict=True)], strides)
        for at in itertools.product(*map(range, window))
    ]


def _side_by_side(
    source: jax.Array,
    winner: jax.Array,
    shape: Sequence[int],
    window: Sequence[int],
    strides: Sequence[int],
) -> jax.Array:
    """Return the gradient for windows that do not overlap: one block per window."""
    blocks: list[int] = []  # each dimension, followed by the one inside its windows
    outer, inner = [], {}
    for d, (count, step) in enumerate(zip(source.shape, strides, strict=True)):
        outer.append(len(blocks))
        blocks.append(count)
        if step > 1:
            inner[d] = len(blocks)
            blocks.append(step)
    number = lax.full(blocks, 0, jnp.int32)
    within = lax.full(blocks, True, jnp.bool)
    for d, at in inner.items():
        place = lax.broadcasted_iota(jnp.int32, blocks, at)
        number = number * window[d] + place
        if window[d] < strides[d]:
            within &= place < window[d]
    won = within & (lax.broadcast_in_dim(winner, blocks, outer) == number)
    zeros = lax.full(blocks, 0, source.dtype)
    spread = lax.select(won, lax.broadcast_in_dim(_from_zero(source), blocks, outer), zeros)
    whole = lax.reshape(spread, [n * s for n, s in zip(source.shape, strides, strict=True)])
    rest = [(0, d - n, 0) for d, n in zip(shape, whole.shape, strict=True)]
    return lax.pad(whole, lax.full_like(whole, 0, shape=()), rest)


def _added(
    source: jax.Array,
    winner: jax.Array,
    shape: Sequence[int],
    window: Sequence[int],
    strides: Sequence[int],
) -> jax.Array:
    """Return the gradient for windows that overlap: a sum over the positions in a window."""
    zero = lax.full_like(source, 0, shape=())
    zeros = lax.full_like(source, 0)
    winner = lax.optimization_barrier(winner)
    source = _from_zero(source)
    total = lax.full(shape, 0, source.dtype)
    places = list(enumerate(itertools.product(*map(range, window))))
    for number, place in reversed(places):  # adds the windows in XLA's order
        won = lax.select(winner == number, source, zeros)
        edges = [
            (at, d - at - ((n - 1) * s + 1), s - 1)
            for at, d, n, s in zip(place, shape, source.shape, strides, strict=True)
        ]
        total += lax.pad(won, zero, edges)
    return total


def _from_zero(x: jax.Array) -> jax.Array:
    """Return `0 + x`, which XLA would simplify to `x`: 0 for -0, and for flushed denormals."""
    return lax.select(x == 0, lax.full_like(x, 0), x)


# For each primitive its replacement, and whether an equation with given parameters may benefit.
_KERNELS: dict[Any, tuple[Any, Callable[[Any], bool]]] = {
    lax.reduce_window_max_p: (
        _kernel(lax.reduce_window_max_p, _pool, _pool_fits),
        lambda params: _has_small_windows(**params),
    ),
    lax.select_and_scatter_add_p: (
        _kernel(lax.select_and_scatter_add_p, _gradient, _gradient_fits),
        lambda params: _has_small_windows(**params),
    ),
    lax.dot_general_p: (
        _kernel(lax.dot_general_p, _product, _product_fits),
        lambda params: _sums_over_rows(**params),
    ),
}
