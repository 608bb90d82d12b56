"""What XLA does slowly on CPUs, written in another way: max pooling, and gradients of sequences.

Max pooling is one array for each place within the windows, compared whole. XLA has no kernels for
windows on CPUs: it visits them number by number, for the gradient 5 to 150 times slower than this.
The result is the same, bit by bit: of equal numbers the first wins, what follows a NaN wins, and
sums are added in the order of the windows.

The gradient of a weight that rows of several dimensions went through (a batch of sequences) is a
product of two matrices with all rows below each other. XLA turns one of them around number by
number, and takes a slow kernel; told that they are matrices, it takes 0.6 to 0.9 of the time.
"""

import itertools
import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import mlir

from replicax._jax_private import lowering_of

_MOST_PLACES = 32  # of a window: 5 x 5, 3 x 3 x 3; more would be long programs


@cache
def fast_on_cpus() -> bool:
    """Have JAX lower these operations for CPUs in this way from now on.

    It holds for all programs of this process that are compiled from here on.

    Returns:
        Whether this JAX offers a way.
    """
    slow_pool = lowering_of(lax.reduce_window_max_p, "cpu")
    slow_gradient = lowering_of(lax.select_and_scatter_add_p, "cpu")
    slow_product = lowering_of(lax.dot_general_p, "cpu")
    if not (slow_pool and slow_gradient and slow_product):  # pragma: no cover - a JAX that moved
        return False
    fast_pool = mlir.lower_fun(_pool, multiple_results=False)
    fast_gradient = mlir.lower_fun(_gradient, multiple_results=False)
    fast_product = mlir.lower_fun(_product, multiple_results=False)

    def lower_pool(ctx: Any, operand: Any, **params: Any) -> Any:
        dilations = (*params["base_dilation"], *params["window_dilation"])
        fits = all(d == 1 for d in dilations) and _fits(ctx, params)
        return (fast_pool if fits else slow_pool)(ctx, operand, **params)

    def lower_gradient(ctx: Any, source: Any, operand: Any, **params: Any) -> Any:
        selects = params["select_prim"] in (lax.ge_p, lax.le_p)
        # Of a single window XLA adds nothing to 0: -0 stays what it is.
        fits = selects and _fits(ctx, params) and ctx.avals_in[0].size > 1
        # XLA keeps sums of small floats in larger ones, and would round at other places.
        if _overlap(**params) and ctx.avals_out[0].dtype.itemsize < 4:
            fits = False
        return (fast_gradient if fits else slow_gradient)(ctx, source, operand, **params)

    def lower_product(ctx: Any, left: Any, right: Any, **params: Any) -> Any:
        fits = _sums_over_rows(**params) and _are_plain(ctx) and _are_whole(ctx)
        return (fast_product if fits else slow_product)(ctx, left, right, **params)

    mlir.register_lowering(lax.reduce_window_max_p, lower_pool, platform="cpu")
    mlir.register_lowering(lax.select_and_scatter_add_p, lower_gradient, platform="cpu")
    mlir.register_lowering(lax.dot_general_p, lower_product, platform="cpu")
    return True


def _are_plain(ctx: Any) -> bool:
    """Whether arrays are floats, shapes are numbers, and JAX itself shards none of them."""
    return all(
        jnp.issubdtype(a.dtype, jnp.floating)
        and all(type(d) is int for d in a.shape)
        and 0 not in a.shape
        and not any(a.sharding.spec)
        for a in (*ctx.avals_in, *ctx.avals_out)
    )


# Products of which all rows are summed.


def _sums_over_rows(dimension_numbers: Any, **_: Any) -> bool:
    """Whether the sum is over the same first dimensions of both, of which there are several."""
    (left, right), batches = dimension_numbers
    first = tuple(range(len(left)))
    several = len(first) > 1 and tuple(left) == tuple(right) == first
    return several and not any(batches)


def _are_whole(ctx: Any) -> bool:
    """Whether each device has these arrays as they are: XLA does not divide them after this.

    It may have cut the second dimension, say, which it could not say of both in one.
    """
    mesh = ctx.avals_in[0].sharding.mesh
    if not mesh.empty:
        return bool(mesh.are_all_axes_manual)
    context = getattr(ctx.module_context, "axis_context", None)
    return getattr(context, "num_devices", None) == 1


def _product(
    left: jax.Array, right: jax.Array, *, dimension_numbers: Any, **params: Any
) -> jax.Array:
    """The product, as that of two matrices with all rows below each other."""
    rows = len(dimension_numbers[0][0])
    how = {name: params[name] for name in ("precision", "preferred_element_type")}
    a, b = (x.reshape(-1, math.prod(x.shape[rows:])) for x in (left, right))
    product = lax.dot_general(a, b, (((0,), (0,)), ((), ())), **how)
    return product.reshape(left.shape[rows:] + right.shape[rows:])


# Max pooling.


def _fits(ctx: Any, params: dict[str, Any]) -> bool:
    """Whether the arrays are plain and the windows small."""
    return _are_plain(ctx) and 1 < math.prod(params["window_dimensions"]) <= _MOST_PLACES


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
    """The greatest number of each window."""
    x = _padded(operand, -jnp.inf, padding)
    best, *others = _places(x, window_dimensions, window_strides)
    for other in others:
        best = lax.max(best, other)
    return best


def _gradient(source: jax.Array, operand: jax.Array, **params: Any) -> jax.Array:
    """Each window's number of ``source``, at the place that won; a sum where windows overlap."""
    select_prim, padding = params["select_prim"], params["padding"]
    window, strides = params["window_dimensions"], params["window_strides"]
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
    """For each place within a window, in their order, an array of all windows' numbers there."""
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
    """An array of ``shape`` for windows that do not overlap: one block for each of them."""
    blocks: list[int] = []  # each dimension, and behind it the one within its windows
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
    """An array of ``shape``: for each place within a window, what the windows give it, added."""
    zero = lax.full_like(source, 0, shape=())
    zeros = lax.full_like(source, 0)
    winner = lax.optimization_barrier(winner)
    source = _from_zero(source)
    total = lax.full(shape, 0, source.dtype)
    places = list(enumerate(itertools.product(*map(range, window))))
    for number, place in reversed(places):  # the windows in their order
        won = lax.select(winner == number, source, zeros)
        edges = [
            (at, d - at - ((n - 1) * s + 1), s - 1)
            for at, d, n, s in zip(place, shape, source.shape, strides, strict=True)
        ]
        total += lax.pad(won, zero, edges)
    return total


def _from_zero(x: jax.Array) -> jax.Array:
    """``0 + x``, which XLA would take for ``x``: it is 0 for -0, and for what counts as 0."""
    return lax.select(x == 0, lax.full_like(x, 0), x)
