"""Random arrays from a global state.

The state is a variable, so compiled functions draw new numbers in each call.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax._src.base.types import VariableAggregation
from replicax._src.compat.jax import concrete
from replicax._src.context.current import current, entered, get_replica_context
from replicax._src.data.seeds import follow_global_seed, set_global_seed
from replicax._src.random.stateless import (
    categorical_of,
    gamma_of,
    normal_of,
    poisson_of,
    sizes,
    truncated_of,
    uniform_of,
)
from replicax._src.state.variable import Variable

_source: list[Variable] = []
_start = [np.zeros(2, np.uint32)]


def set_seed(seed: int) -> None:
    """Reset the global random state, and seed the datasets that are created from now on.

    A program that starts with it draws the same numbers and orders in every run.

    Example:
        >>> rx.random.set_seed(1)
        >>> a = rx.random.uniform([])
        >>> rx.random.set_seed(1)
        >>> bool(a == rx.random.uniform([]))
        True
    """
    set_global_seed(seed)


def _restart(seed: int) -> None:
    start = np.asarray([seed % 2**32, 0], np.uint32)
    if _source or current().level is not None:
        _state().assign(start)
    else:  # do not initialize JAX: a multi-worker strategy may be created later
        _start[:] = [start]


follow_global_seed(_restart)


def uniform(
    shape: Any,
    minval: Any = 0,
    maxval: Any = None,
    dtype: Any = jnp.float32,
    seed: int | None = None,
    name: str | None = None,
) -> jax.Array:
    """Draw uniformly distributed numbers; every replica draws its own.

    Args:
        shape: The shape of the result.
        minval: The lower bound, inclusive.
        maxval: The upper bound, exclusive; by default 1 for floating-point numbers.
        dtype: The dtype of the result.
        seed: Selects another sequence.
        name: Accepted for compatibility with TensorFlow.

    Raises:
        ValueError: ``dtype`` is an integer type and ``maxval`` is missing.

    Example:
        >>> rx.random.set_seed(0)
        >>> rx.random.uniform([3], maxval=2.0).shape
        (3,)
    """
    if jnp.issubdtype(dtype, jnp.integer) and maxval is None:
        raise ValueError(
            f"uniform of the integer type {jnp.dtype(dtype).name} needs maxval, which is exclusive."
        )
    return uniform_of(_next_key(seed), shape, (minval, maxval), dtype)


def normal(
    shape: Any,
    mean: Any = 0.0,
    stddev: Any = 1.0,
    dtype: Any = jnp.float32,
    seed: int | None = None,
    name: str | None = None,
) -> jax.Array:
    """Draw normally distributed numbers; every replica draws its own.

    Example:
        >>> rx.random.set_seed(0)
        >>> rx.random.normal([3]).shape
        (3,)
    """
    return normal_of(_next_key(seed), shape, (mean, stddev), dtype)


def truncated_normal(
    shape: Any,
    mean: Any = 0.0,
    stddev: Any = 1.0,
    dtype: Any = jnp.float32,
    seed: int | None = None,
    name: str | None = None,
) -> jax.Array:
    """Draw normally distributed numbers within two standard deviations of the mean.

    Every replica draws its own.

    Example:
        >>> bool((abs(rx.random.truncated_normal([99])) <= 2).all())
        True
    """
    return truncated_of(_next_key(seed), shape, (mean, stddev), dtype)


def categorical(
    logits: Any,
    num_samples: int,
    dtype: Any = None,
    seed: int | None = None,
    name: str | None = None,
) -> jax.Array:
    """Draw class indices for each row of logits; every replica draws its own.

    Example:
        >>> rx.random.categorical([[0.0, 500.0]], 3).tolist()
        [[1, 1, 1]]
    """
    return categorical_of(_next_key(seed), logits, num_samples, dtype)


def gamma(
    shape: Any,
    alpha: Any,
    beta: Any = None,
    dtype: Any = jnp.float32,
    seed: int | None = None,
    name: str | None = None,
) -> jax.Array:
    """Draw gamma-distributed numbers, an array of ``shape`` for each pair of parameters.

    Example:
        >>> rx.random.gamma([4], alpha=[0.5, 1.5]).shape
        (4, 2)
    """
    rates = np.shape(1 if beta is None else beta)
    inner = np.broadcast_shapes(np.shape(alpha), rates)
    return gamma_of(_next_key(seed), (*sizes(shape), *inner), (alpha, beta), dtype)


def poisson(
    shape: Any,
    lam: Any,
    dtype: Any = jnp.float32,
    seed: int | None = None,
    name: str | None = None,
) -> jax.Array:
    """Draw Poisson-distributed numbers, an array of ``shape`` for each mean.

    Example:
        >>> rx.random.poisson([4], lam=[0.5, 1.5]).shape
        (4, 2)
    """
    return poisson_of(_next_key(seed), (*sizes(shape), *np.shape(lam)), lam, dtype)


def shuffle(value: Any, seed: int | None = None, name: str | None = None) -> jax.Array:
    """Return the rows of an array in random order.

    Example:
        >>> sorted(rx.random.shuffle([3, 1, 2]).tolist())
        [1, 2, 3]
    """
    return jax.random.permutation(_next_key(seed), jnp.asarray(value))


def _state() -> Variable:
    """Return the global state, created on first use: the seed and the number of draws."""
    if not _source:
        with (
            entered(strategy=None, replica=None, level=None, body=None),
            concrete(),
        ):
            _source.append(
                Variable(
                    _start[0],
                    trainable=False,
                    name="random_state",
                    aggregation=VariableAggregation.NONE,
                )
            )
            _source[0].cell.draws = True
    return _source[0]


def _next_key(seed: int | None) -> jax.Array:
    state = _state()
    first, count = state.read_value()
    state.assign(jnp.stack([first, count + 1]))
    key = jax.random.fold_in(jax.random.key(0 if seed is None else seed % 2**32), first)
    key = jax.random.fold_in(key, count)
    replica = get_replica_context()
    return key if replica is None else jax.random.fold_in(key, replica.replica_id_in_sync_group)
