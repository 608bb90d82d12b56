"""Stateless random functions, whose results depend only on a seed or a key."""

from __future__ import annotations

import enum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax._src.base.ops import canonical_dtype, default_dtype
from replicax._src.base.tf_errors import InvalidArgumentError

_WORD = 2**32


class Algorithm(enum.Enum):
    """TensorFlow's random number algorithms; all of them select JAX's ThreeFry here.

    Example:
        >>> rx.random.Generator.from_seed(1, rx.random.Algorithm.PHILOX).normal([2]).shape
        (2,)
    """

    PHILOX = 1
    THREEFRY = 2
    AUTO_SELECT = 3


def check_algorithm(alg: Any) -> None:
    """Check that ``alg`` names an algorithm of TensorFlow.

    Raises:
        ValueError: It does not.
    """
    names = [member.name.lower() for member in Algorithm]
    known = (None, *names, *(member.value for member in Algorithm), *Algorithm)
    if alg not in known:
        raise ValueError(f"alg={alg!r} is not one of {', '.join(map(repr, names))}.")


def key_of(seed: Any, alg: Any = "auto_select") -> jax.Array:
    """Return the key for a seed of two integers; equal integers of any dtype give equal keys.

    Raises:
        InvalidArgumentError: ``seed`` is not two integers.
    """
    check_algorithm(alg)
    numbers = seed if isinstance(seed, jax.Array) else np.asarray(seed)
    if numbers.shape != (2,) or not jnp.issubdtype(numbers.dtype, jnp.integer):
        raise InvalidArgumentError(
            f"seed must be two whole numbers, such as [1, 2], got shape {numbers.shape} and dtype"
            f" {numbers.dtype}. `rx.random.split(seed, num)` makes more of them."
        )
    low: Any
    high: Any
    if isinstance(numbers, np.ndarray):
        wide = [int(n) for n in numbers]
        low, high = ([(n >> shift) % _WORD for n in wide] for shift in (0, 32))
    elif numbers.dtype.itemsize == 8:
        low, high = numbers.astype(jnp.uint32), (numbers >> 32).astype(jnp.uint32)
    else:
        low = numbers.astype(jnp.uint32)
        high = jnp.where(numbers < 0, jnp.uint32(_WORD - 1), jnp.uint32(0))
    key = jax.random.wrap_key_data(jnp.asarray(low, jnp.uint32), impl="threefry2x32")
    first, second = jnp.asarray(high, jnp.uint32)
    return jax.random.fold_in(jax.random.fold_in(key, first), second)


def sizes(shape: Any) -> tuple[int, ...]:
    """Return ``shape`` as a tuple of integers.

    Raises:
        ValueError: ``shape`` is a scalar.
    """
    if not np.ndim(shape):
        raise ValueError(f"shape must be a list of sizes, got {shape!r}; write `[{shape}]`.")
    return tuple(int(n) for n in shape)


# Functions of a key.


def uniform_of(key: jax.Array, shape: Any, bounds: tuple[Any, Any], dtype: Any) -> jax.Array:
    """Draw numbers between two bounds; if both are None, integers of the full range."""
    low, high = bounds
    dtype = canonical_dtype(dtype)
    if not jnp.issubdtype(dtype, jnp.integer):
        top = 1 if high is None else high
        return jax.random.uniform(key, sizes(shape), dtype, low or 0, top)
    if low is None and high is None:
        kind = jnp.dtype(dtype)
        bits = jax.random.bits(key, sizes(shape), np.dtype(f"uint{kind.itemsize * 8}"))
        return jax.lax.bitcast_convert_type(bits, kind)
    if low is None or high is None:
        raise ValueError(
            f"uniform of the integer type {jnp.dtype(dtype).name} takes both bounds, or None"
            f" for both: got minval={low!r} and maxval={high!r}."
        )
    return jax.random.randint(key, sizes(shape), low, high, dtype)


def normal_of(key: jax.Array, shape: Any, parameters: tuple[Any, Any], dtype: Any) -> jax.Array:
    """Draw normally distributed numbers; ``parameters`` are mean and standard deviation."""
    drawn: jax.Array = jax.random.normal(key, sizes(shape), _floats(dtype, "normal"))
    return _scaled(drawn, *parameters)


def truncated_of(key: jax.Array, shape: Any, parameters: tuple[Any, Any], dtype: Any) -> jax.Array:
    """Draw normally distributed numbers within two standard deviations of the mean."""
    dtype = _floats(dtype, "truncated_normal")
    drawn: jax.Array = jax.random.truncated_normal(key, -2, 2, sizes(shape), dtype)
    return _scaled(drawn, *parameters)


def categorical_of(key: jax.Array, logits: Any, num_samples: int, dtype: Any) -> jax.Array:
    """Draw ``num_samples`` class indices for each row of logits."""
    rows = jnp.asarray(logits)
    if rows.ndim != 2:
        raise InvalidArgumentError(
            f"categorical needs logits of shape [rows, classes], got {rows.shape}. Write"
            " `logits[None]` for one row."
        )
    drawn = jax.random.categorical(key, rows, axis=-1, shape=(int(num_samples), len(rows)))
    return drawn.T.astype(default_dtype(np.int64) if dtype is None else canonical_dtype(dtype))


def gamma_of(
    key: jax.Array, shape: tuple[int, ...], parameters: tuple[Any, Any], dtype: Any
) -> jax.Array:
    """Draw gamma-distributed numbers; ``parameters`` are concentration and rate."""
    kind = _floats(dtype, "gamma", ValueError)
    alpha, beta = (jnp.asarray(1 if p is None else p, kind) for p in parameters)
    drawn: jax.Array = jax.random.gamma(key, _broadcast(alpha, shape), dtype=kind)
    return drawn / beta


def poisson_of(key: jax.Array, shape: tuple[int, ...], lam: Any, dtype: Any) -> jax.Array:
    """Draw Poisson-distributed numbers with mean ``lam``."""
    means = _broadcast(jnp.asarray(lam, jnp.float32), shape)
    return jax.random.poisson(key, means).astype(canonical_dtype(dtype))


def _broadcast(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    try:
        return jnp.broadcast_to(x, shape)
    except ValueError:
        raise InvalidArgumentError(
            f"Parameters of shape {x.shape} do not fit the shape {list(shape)} of the result: it"
            " must end as they do."
        ) from None


def _scaled(drawn: jax.Array, mean: Any, stddev: Any) -> jax.Array:
    return drawn * jnp.asarray(stddev, drawn.dtype) + jnp.asarray(mean, drawn.dtype)


def _floats(dtype: Any, verb: str, error: type[Exception] = TypeError) -> Any:
    if not jnp.issubdtype(dtype, jnp.floating):
        raise error(f"{verb} draws floating-point numbers, not {jnp.dtype(dtype).name}.")
    return canonical_dtype(dtype)


# Functions of a seed.


def stateless_uniform(
    shape: Any,
    seed: Any,
    minval: Any = 0,
    maxval: Any = None,
    dtype: Any = jnp.float32,
    name: str | None = None,
    alg: Any = "auto_select",
) -> jax.Array:
    """Draw uniformly distributed numbers that depend only on the seed, also on every replica.

    Args:
        shape: The shape of the result.
        seed: Two integers.
        minval: The lower bound, inclusive.
        maxval: The upper bound, exclusive; by default 1 for floats.
        dtype: The dtype of the result.
        name: Accepted for compatibility with TensorFlow.
        alg: Accepted for compatibility with TensorFlow.

    Raises:
        ValueError: ``dtype`` is an integer type and only one bound is given.
        InvalidArgumentError: ``seed`` is not two integers.

    Example:
        >>> one, other = (rx.random.stateless_uniform([3], seed=[1, 2]) for _ in range(2))
        >>> bool((one == other).all())
        True
    """
    return uniform_of(key_of(seed, alg), shape, (minval, maxval), dtype)


def stateless_normal(
    shape: Any,
    seed: Any,
    mean: Any = 0.0,
    stddev: Any = 1.0,
    dtype: Any = jnp.float32,
    name: str | None = None,
    alg: Any = "auto_select",
) -> jax.Array:
    """Draw normally distributed numbers that depend only on the seed.

    Example:
        >>> rx.random.stateless_normal([2, 3], seed=[1, 2]).shape
        (2, 3)
    """
    return normal_of(key_of(seed, alg), shape, (mean, stddev), dtype)


def stateless_truncated_normal(
    shape: Any,
    seed: Any,
    mean: Any = 0.0,
    stddev: Any = 1.0,
    dtype: Any = jnp.float32,
    name: str | None = None,
    alg: Any = "auto_select",
) -> jax.Array:
    """Draw normal numbers within two standard deviations that depend only on the seed.

    Example:
        >>> bool((abs(rx.random.stateless_truncated_normal([99], seed=[1, 2])) <= 2).all())
        True
    """
    return truncated_of(key_of(seed, alg), shape, (mean, stddev), dtype)


def stateless_parameterized_truncated_normal(
    shape: Any,
    seed: Any,
    means: Any = 0.0,
    stddevs: Any = 1.0,
    minvals: Any = -2.0,
    maxvals: Any = 2.0,
    name: str | None = None,
) -> jax.Array:
    """Draw normally distributed numbers between bounds that depend only on the seed.

    Example:
        >>> draw = rx.random.stateless_parameterized_truncated_normal
        >>> bool((draw([9], [1, 2], minvals=0.5, maxvals=1.0) >= 0.5).all())
        True
    """
    mean, deviation = (jnp.asarray(p, jnp.float32) for p in (means, stddevs))
    low, high = ((jnp.asarray(p, jnp.float32) - mean) / deviation for p in (minvals, maxvals))
    wide = sizes(shape)
    drawn: jax.Array = jax.random.truncated_normal(
        key_of(seed), _broadcast(low, wide), _broadcast(high, wide), wide
    )
    return drawn * deviation + mean


def stateless_categorical(
    logits: Any, num_samples: int, seed: Any, dtype: Any = None, name: str | None = None
) -> jax.Array:
    """Draw class indices for each row of logits that depend only on the seed.

    Example:
        >>> rx.random.stateless_categorical([[0.0, 0.0]], 5, seed=[1, 2]).shape
        (1, 5)
    """
    return categorical_of(key_of(seed), logits, num_samples, dtype)


def stateless_gamma(
    shape: Any,
    seed: Any,
    alpha: Any,
    beta: Any = None,
    dtype: Any = jnp.float32,
    name: str | None = None,
) -> jax.Array:
    """Draw gamma-distributed numbers that depend only on the seed.

    Example:
        >>> rx.random.stateless_gamma([5, 2], seed=[1, 2], alpha=[0.5, 1.5]).shape
        (5, 2)
    """
    return gamma_of(key_of(seed), sizes(shape), (alpha, beta), dtype)


def stateless_poisson(
    shape: Any, seed: Any, lam: Any, dtype: Any = jnp.int32, name: str | None = None
) -> jax.Array:
    """Draw Poisson-distributed numbers that depend only on the seed.

    Example:
        >>> rx.random.stateless_poisson([5, 2], seed=[1, 2], lam=[0.5, 1.5]).shape
        (5, 2)
    """
    return poisson_of(key_of(seed), sizes(shape), lam, dtype)


def stateless_binomial(
    shape: Any,
    seed: Any,
    counts: Any,
    probs: Any,
    output_dtype: Any = jnp.int32,
    name: str | None = None,
) -> jax.Array:
    """Draw the numbers of successes in ``counts`` trials, which depend only on the seed.

    Example:
        >>> rx.random.stateless_binomial([2], [1, 2], counts=10.0, probs=[0.0, 1.0]).tolist()
        [0, 10]
    """
    n, p = (_broadcast(jnp.asarray(x, jnp.float32), sizes(shape)) for x in (counts, probs))
    return jax.random.binomial(key_of(seed), n, p).astype(canonical_dtype(output_dtype))


def stateless_shuffle(
    value: Any, seed: Any, alg: Any = "auto_select", name: str | None = None
) -> jax.Array:
    """Return the rows of an array in a random order that depends only on the seed.

    Example:
        >>> sorted(rx.random.experimental.stateless_shuffle([3, 1, 2], seed=[1, 2]).tolist())
        [1, 2, 3]
    """
    return jax.random.permutation(key_of(seed, alg), jnp.asarray(value))


def split(seed: Any, num: int = 2, alg: Any = "auto_select") -> jax.Array:
    """Derive ``num`` new seeds from one.

    Example:
        >>> rx.random.split([1, 2], num=3).shape
        (3, 2)
    """
    return _as_seeds(jax.random.split(key_of(seed, alg), num), seed)


def fold_in(seed: Any, data: Any, alg: Any = "auto_select") -> jax.Array:
    """Derive a new seed from a seed and an integer, such as the number of the step.

    Example:
        >>> bool((rx.random.fold_in([1, 2], 3) == rx.random.fold_in([1, 2], 4)).all())
        False
    """
    return _as_seeds(jax.random.fold_in(key_of(seed, alg), data), seed)


def _as_seeds(keys: jax.Array, like: Any) -> jax.Array:
    dtype = like.dtype if isinstance(like, jax.Array) else jnp.int32
    return jax.lax.bitcast_convert_type(jax.random.key_data(keys), jnp.int32).astype(dtype)
