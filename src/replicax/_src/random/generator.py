"""`Generator`: a random number generator with explicit state, as `tf.random.Generator`.

The state is a variable of four words: the number of draws (low, high), and the key. Each draw folds
that number, and in a replica the replica id, into the key.
"""

from __future__ import annotations

import operator
import secrets
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax._src.base.ops import canonical_dtype, default_dtype
from replicax._src.base.types import VariableAggregation
from replicax._src.context.current import entered, get_replica_context
from replicax._src.random.stateless import (
    check_algorithm,
    normal_of,
    sizes,
    truncated_of,
    uniform_of,
)
from replicax._src.state.variable import Variable

_WORDS = 4


class Generator:
    """A random number generator with its own state, which checkpoints save.

    Every draw advances the state, also in compiled functions. Each replica of a strategy has its
    own stream, which does not depend on the number of replicas, and the state stays equal on all of
    them; the first replica's stream is that of a single device. The numbers are JAX's (ThreeFry),
    not TensorFlow's.

    Args:
        copy_from: A generator whose state to copy.
        state: The initial state: four integers, as `state` of another generator.
        alg: Accepted for compatibility with TensorFlow; the algorithm is always ThreeFry.

    Raises:
        ValueError: Neither or both of ``copy_from`` and ``state`` are given, or ``alg`` is unknown.

    Example:
        >>> generator = rx.random.Generator.from_seed(1)
        >>> a = generator.normal([2])
        >>> generator.reset_from_seed(1)
        >>> bool((a == generator.normal([2])).all())
        True
    """

    def __init__(
        self, copy_from: Generator | None = None, state: Any = None, alg: Any = None
    ) -> None:
        check_algorithm(alg)
        if (copy_from is None) == (state is None):
            raise ValueError(
                "Generator() takes copy_from=generator or state=..., one of them. For a new one"
                " write `rx.random.Generator.from_seed(1)`, or"
                " `rx.random.Generator.from_non_deterministic_state()`."
            )
        start = copy_from.state.read_value() if copy_from is not None else _words(state)
        self._state_var: Variable = Variable(
            start,
            trainable=False,
            name="StateVar",
            dtype=jnp.uint32,
            aggregation=VariableAggregation.NONE,
        )
        self._state_var.cell.draws = True

    @classmethod
    def from_seed(cls, seed: int, alg: Any = None) -> Generator:
        """Create a generator from a seed, which may be any integer.

        Example:
            >>> rx.random.Generator.from_seed(7).uniform([3]).shape
            (3,)
        """
        return cls(state=_seeded(seed), alg=alg)

    @classmethod
    def from_non_deterministic_state(cls, alg: Any = None) -> Generator:
        """Create a generator with a random state, which differs in every run of the program.

        Example:
            >>> rx.random.Generator.from_non_deterministic_state().uniform([3]).shape
            (3,)
        """
        return cls(state=_seeded(secrets.randbits(64)), alg=alg)

    @classmethod
    def from_state(cls, state: Any, alg: Any = None) -> Generator:
        """Create a generator that continues from the `state` of another.

        Example:
            >>> one = rx.random.Generator.from_seed(7)
            >>> _ = one.normal([])
            >>> other = rx.random.Generator.from_state(one.state)
            >>> bool(one.normal([]) == other.normal([]))
            True
        """
        return cls(state=state, alg=alg)

    @classmethod
    def from_key_counter(cls, key: Any, counter: Any, alg: Any) -> Generator:
        """Create a generator from the `key` of another and a number of draws.

        Args:
            key: Two words of uint32, as `key` of another generator.
            counter: The number of draws so far, as two words: low and high.
            alg: Accepted for compatibility with TensorFlow.

        Example:
            >>> one = rx.random.Generator.from_seed(7)
            >>> other = rx.random.Generator.from_key_counter(one.key, [0, 0], "threefry")
            >>> bool(one.normal([]) == other.normal([]))
            True
        """
        return cls(state=_keyed(key, counter), alg=alg)

    @property
    def key(self) -> jax.Array:
        """The key: the two words of the state that stay the same when numbers are drawn."""
        return self._state_var.read_value()[2:]

    def reset_from_key_counter(self, key: Any, counter: Any) -> None:
        """Set the state to a `key` and a number of draws, two words each."""
        self._state_var.assign(_keyed(key, counter))

    @property
    def state(self) -> Variable:
        """The variable that holds the state."""
        return self._state_var

    @property
    def algorithm(self) -> str:
        """The name of the algorithm, always ``"threefry"``."""
        return "threefry"

    def reset(self, state: Any) -> None:
        """Set the state."""
        self._state_var.assign(_words(state))

    def reset_from_seed(self, seed: int) -> None:
        """Set the state to the initial state of a seed."""
        self._state_var.assign(_seeded(seed))

    def skip(self, delta: int) -> Variable:
        """Advance the state as if ``delta`` draws had happened, and return it.

        Example:
            >>> one, other = (rx.random.Generator.from_seed(7) for _ in range(2))
            >>> _, _ = one.normal([]), other.skip(1)
            >>> bool(one.normal([]) == other.normal([]))
            True
        """
        self._advanced(_whole(delta, "skip", "delta"))
        return self._state_var

    def normal(
        self,
        shape: Any,
        mean: Any = 0.0,
        stddev: Any = 1.0,
        dtype: Any = jnp.float32,
        name: str | None = None,
    ) -> jax.Array:
        """Draw normally distributed numbers.

        Example:
            >>> rx.random.Generator.from_seed(7).normal([2, 3]).shape
            (2, 3)
        """
        return normal_of(self._key(), shape, (mean, stddev), dtype)

    def truncated_normal(
        self,
        shape: Any,
        mean: Any = 0.0,
        stddev: Any = 1.0,
        dtype: Any = jnp.float32,
        name: str | None = None,
    ) -> jax.Array:
        """Draw normally distributed numbers within two standard deviations of the mean.

        Example:
            >>> bool((abs(rx.random.Generator.from_seed(7).truncated_normal([99])) <= 2).all())
            True
        """
        return truncated_of(self._key(), shape, (mean, stddev), dtype)

    def uniform(
        self,
        shape: Any,
        minval: Any = 0,
        maxval: Any = None,
        dtype: Any = jnp.float32,
        name: str | None = None,
    ) -> jax.Array:
        """Draw uniformly distributed numbers.

        Args:
            shape: The shape of the result.
            minval: The lower bound, inclusive.
            maxval: The upper bound, exclusive; by default 1 for floats. If both bounds are None,
                integers are drawn from the full range of their type.
            dtype: The dtype of the result.
            name: Accepted for compatibility with TensorFlow.

        Raises:
            ValueError: ``dtype`` is an integer type and only one bound is given.

        Example:
            >>> rx.random.Generator.from_seed(7).uniform([3], 0, 10, jnp.int32).dtype
            dtype('int32')
        """
        return uniform_of(self._key(), shape, (minval, maxval), dtype)

    def uniform_full_int(self, shape: Any, dtype: Any = None, name: str | None = None) -> jax.Array:
        """Draw integers from the full range of their type.

        Args:
            shape: The shape of the result.
            dtype: An integer type; by default ``uint64`` as in TensorFlow if JAX's 64-bit types are
                enabled, else ``uint32``.
            name: Accepted for compatibility with TensorFlow.

        Raises:
            ValueError: If ``dtype`` is not an integer type.

        Example:
            >>> rx.random.Generator.from_seed(7).uniform_full_int([3]).dtype
            dtype('uint32')
        """
        kind = jnp.dtype(default_dtype(np.uint64) if dtype is None else dtype)
        if not jnp.issubdtype(kind, jnp.integer):
            raise ValueError(f"uniform_full_int draws integers, not {kind.name}.")
        return uniform_of(self._key(), shape, (None, None), kind)

    def binomial(
        self, shape: Any, counts: Any, probs: Any, dtype: Any = jnp.int32, name: str | None = None
    ) -> jax.Array:
        """Draw the number of successes in ``counts`` trials, each with probability ``probs``.

        Example:
            >>> rx.random.Generator.from_seed(7).binomial([2], 10.0, [0.0, 1.0]).tolist()
            [0, 10]
        """
        n, p = jnp.asarray(counts, jnp.float32), jnp.asarray(probs, jnp.float32)
        drawn: jax.Array = jax.random.binomial(self._key(), n, p, sizes(shape))
        return drawn.astype(canonical_dtype(dtype))

    def make_seeds(self, count: int = 1) -> jax.Array:
        """Draw ``count`` seeds for stateless functions, as the columns of a 2 x ``count`` array.

        Example:
            >>> seeds = rx.random.Generator.from_seed(7).make_seeds(3)
            >>> jax.random.normal(jax.random.wrap_key_data(seeds[:, 0]), [2]).shape
            (2,)
        """
        columns = _whole(count, "make_seeds", "count")
        return jax.random.bits(self._key(), (2, columns), jnp.uint32)

    def split(self, count: int = 1) -> list[Generator]:
        """Create ``count`` generators that are independent of each other and of this one.

        Example:
            >>> one, other = rx.random.Generator.from_seed(7).split(2)
            >>> bool(one.normal([]) == other.normal([]))
            False
        """
        seeds = self.make_seeds(count)
        none = jnp.zeros(2, jnp.uint32)
        return [
            Generator(state=jnp.concatenate([none, seeds[:, i]])) for i in range(seeds.shape[1])
        ]

    def __repr__(self) -> str:
        return f"<rx.random.Generator, state {self._state_var.read_value()}>"

    def _advanced(self, delta: int) -> jax.Array:
        """Add ``delta`` to the 64-bit counter of draws; return the previous state."""
        before = self._state_var.read_value()
        low = before[0] + jnp.uint32(delta % 2**32)
        carry = (low < before[0]).astype(jnp.uint32)
        high = before[1] + jnp.uint32((delta >> 32) % 2**32) + carry
        self._state_var.assign(jnp.stack([low, high, before[2], before[3]]))
        return before

    def _key(self) -> jax.Array:
        """Return the key of the next draw, and advance the state."""
        before = self._advanced(1)
        key = jax.random.wrap_key_data(before[2:], impl="threefry2x32")
        key = jax.random.fold_in(jax.random.fold_in(key, before[1]), before[0])
        replica = get_replica_context()
        if replica is None or replica.num_replicas_in_sync == 1:
            return key
        # The stream of a replica does not depend on the number of replicas: the first replica draws
        # the numbers of a single device, and a restored state works with any number of replicas.
        number = replica.replica_id_in_sync_group
        folded = jax.random.key_data(jax.random.fold_in(key, number))
        numbers = jnp.where(number == 0, jax.random.key_data(key), folded)
        replica_key: jax.Array = jax.random.wrap_key_data(numbers, impl="threefry2x32")
        return replica_key


def _seeded(seed: int) -> np.ndarray:
    number = _whole(seed, "Generator.from_seed", "seed", least=None) % 2**64
    return np.asarray([0, 0, number % 2**32, number >> 32], np.uint32)


def _whole(x: Any, verb: str, what: str, *, least: int | None = 0) -> int:
    try:
        number = operator.index(x)
    except TypeError:
        raise TypeError(f"{verb} takes a whole number as {what}, got {x!r}.") from None
    if least is not None and number < least:
        raise ValueError(f"{verb}: {what} must be {least} or more, got {number}.")
    return number


def _keyed(key: Any, counter: Any) -> Any:
    words = [jnp.asarray(x) for x in (counter, key)]
    if [x.shape for x in words] != [(2,), (2,)]:
        raise ValueError(
            "A generator has a counter and a key of two words each, got the shapes"
            f" {words[0].shape} and {words[1].shape}. A number is a seed:"
            " `rx.random.Generator.from_seed(number)`."
        )
    return _words(jnp.concatenate([x.astype(jnp.uint32) for x in words]))


def _words(state: Any) -> Any:
    value = state.read_value() if isinstance(state, Variable) else state
    words = jnp.asarray(np.asarray(value, np.uint32) if isinstance(value, Sequence) else value)
    if words.shape != (_WORDS,) or words.dtype != jnp.uint32:
        raise ValueError(
            f"The state of a generator is {_WORDS} words of uint32, got shape {words.shape} and"
            f" dtype {words.dtype}. Take it from `generator.state`; a number is a seed:"
            " `rx.random.Generator.from_seed(number)`."
        )
    return words


def create_rng_state(seed: int, alg: Any) -> jax.Array:
    """Return the initial state of a generator with a seed.

    Example:
        >>> state = rx.random.create_rng_state(7, "philox")
        >>> a = rx.random.Generator.from_state(state, "philox").normal([])
        >>> bool(a == rx.random.Generator.from_seed(7).normal([]))
        True
    """
    check_algorithm(alg)
    return jnp.asarray(_seeded(seed))


_global: list[Generator] = []


def get_global_generator() -> Generator:
    """Return the global generator; it is created on first use unless it was set.

    Example:
        >>> rx.random.get_global_generator() is rx.random.get_global_generator()
        True
    """
    if not _global:
        with entered(strategy=None, replica=None, level=None, body=None):
            _global.append(Generator.from_non_deterministic_state())
    return _global[0]


def set_global_generator(generator: Generator) -> None:
    """Set the global generator.

    Example:
        >>> rx.random.set_global_generator(rx.random.Generator.from_seed(1))
        >>> rx.random.get_global_generator().normal([2]).shape
        (2,)
    """
    if not isinstance(generator, Generator):
        raise TypeError(
            f"set_global_generator takes a Generator, got {generator!r}. Write"
            " `rx.random.Generator.from_seed(1)`."
        )
    _global[:] = [generator]
