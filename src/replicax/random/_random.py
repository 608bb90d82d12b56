"""Random arrays; the key is a variable, so that compiled functions draw new numbers each call."""

from typing import Any

import jax
import jax.numpy as jnp

from replicax._enums import VariableAggregation
from replicax.context._current import entered, get_replica_context
from replicax.variables._variable import Variable

_source: list[Variable] = []


def set_seed(seed: int) -> None:
    """Start the sequence of random numbers anew.

    Example:
        >>> rx.random.set_seed(1)
        >>> a = rx.random.uniform([])
        >>> rx.random.set_seed(1)
        >>> bool(a == rx.random.uniform([]))
        True
    """
    _state().assign(jnp.asarray([seed, 0], jnp.uint32))


def uniform(
    shape: Any,
    minval: Any = 0,
    maxval: Any = 1,
    dtype: Any = jnp.float32,
    seed: int | None = None,
    name: str | None = None,
) -> jax.Array:
    """Numbers evenly spread between two bounds; of its own on every replica.

    Example:
        >>> rx.random.set_seed(0)
        >>> rx.random.uniform([3], maxval=2.0).shape
        (3,)
    """
    key = _next_key(seed)
    if jnp.issubdtype(dtype, jnp.integer):
        return jax.random.randint(key, tuple(shape), minval, maxval, dtype)
    return jax.random.uniform(key, tuple(shape), dtype, minval, maxval)


def normal(
    shape: Any,
    mean: Any = 0.0,
    stddev: Any = 1.0,
    dtype: Any = jnp.float32,
    seed: int | None = None,
    name: str | None = None,
) -> jax.Array:
    """Numbers of the normal distribution; of its own on every replica.

    Example:
        >>> rx.random.set_seed(0)
        >>> rx.random.normal([3]).shape
        (3,)
    """
    drawn: jax.Array = mean + stddev * jax.random.normal(_next_key(seed), tuple(shape), dtype)
    return drawn


def _state() -> Variable:
    if not _source:
        with (
            entered(strategy=None, replica=None, level=None, body=None),
            jax.ensure_compile_time_eval(),
        ):
            _source.append(
                Variable(
                    jnp.zeros(2, jnp.uint32),
                    trainable=False,
                    name="random_state",
                    aggregation=VariableAggregation.NONE,
                )
            )
    return _source[0]


def _next_key(seed: int | None) -> jax.Array:
    state = _state()
    first, count = state.read_value()
    state.assign(jnp.stack([first, count + 1]))
    key = jax.random.fold_in(jax.random.key(0 if seed is None else seed), first)
    key = jax.random.fold_in(key, count)
    replica = get_replica_context()
    return key if replica is None else jax.random.fold_in(key, replica.replica_id_in_sync_group)
