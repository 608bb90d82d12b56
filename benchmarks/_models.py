"""The networks of the table, as plain functions of a list of arrays."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np

BATCH = 64  # rows of each replica
RATE = 0.01


@dataclass(frozen=True)
class Model:
    """A network: shapes of its weights and of one row, and its logits."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    row: tuple[int, ...]
    logits: Callable[[list[jax.Array], jax.Array], jax.Array]
    rows: int = BATCH

    def weights(self) -> list[np.ndarray]:
        """Small numbers, so that any depth stays finite."""
        rng = np.random.default_rng(0)
        return [(rng.standard_normal(s) * 0.05).astype(np.float32) for s in self.shapes]

    def batch(self, replicas: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows and labels of all replicas."""
        rng = np.random.default_rng(1)
        rows = self.rows * replicas
        x = rng.standard_normal((rows, *self.row)).astype(np.float32)
        return x, rng.integers(0, 10, rows).astype(np.int32)

    def loss(self, weights: list[jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
        """The mean cross-entropy."""
        logs = jax.nn.log_softmax(self.logits(weights, x))
        return -jnp.take_along_axis(logs, y[:, None], 1).mean()


def _mlp(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    for kernel, bias in zip(weights[:-2:2], weights[1:-2:2], strict=True):
        x = jax.nn.relu(x @ kernel + bias)
    return x @ weights[-2] + weights[-1]


def _cnn(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    for kernel in weights[:2]:
        x = jax.lax.conv_general_dilated(
            x, kernel, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        x = jax.nn.relu(x)
    return x.reshape(len(x), -1) @ weights[2] + weights[3]


def _pooled_cnn(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    for kernel in weights[:2]:
        x = jax.lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        x = jax.nn.relu(x)
        window = (1, 2, 2, 1)
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, window, window, "VALID")
    return x.reshape(len(x), -1) @ weights[2] + weights[3]


def _deep(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    for kernel, bias in zip(weights[:-2:2], weights[1:-2:2], strict=True):
        x = x + jax.nn.relu(x @ kernel + bias)
    return x @ weights[-2] + weights[-1]


def _many(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    for i in range(0, len(weights) - 10, 10):
        kernel = jnp.concatenate(weights[i : i + 8])
        x = x + weights[i + 8] * jax.nn.relu(x @ kernel + weights[i + 9])
    kernel = jnp.concatenate(weights[-10:-2])
    return weights[-1] * (x @ kernel + weights[-2])


def _vectors(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    return x @ jnp.stack(weights).T


def of_variables(count: int) -> Model:
    """A network of so many variables of 16 numbers each, at least 10."""
    return Model(f"{count} variables", ((16,),) * count, (16,), _vectors)


def _dense(*widths: int) -> tuple[tuple[int, ...], ...]:
    return tuple(s for a, b in pairwise(widths) for s in ((a, b), (b,)))


MLP = Model("MLP", _dense(784, 512, 512, 10), (784,), _mlp)
CNN = Model("CNN", ((3, 3, 1, 16), (3, 3, 16, 32), (7 * 7 * 32, 10), (10,)), (28, 28, 1), _cnn)
POOLED_CNN = Model(
    "CNN with max pooling",
    ((3, 3, 1, 32), (3, 3, 32, 64), (7 * 7 * 64, 10), (10,)),
    (28, 28, 1),
    _pooled_cnn,
)
DEEP = Model("50 layers", _dense(*([128] * 50), 10), (128,), _deep)
MANY = Model(
    "1,000 variables",
    (((2, 16),) * 8 + ((16,),) * 2) * 99 + ((2, 10),) * 8 + ((10,),) * 2,
    (16,),
    _many,
)
MODELS = (MLP, CNN, DEEP, MANY)

# The same shapes with little to multiply: there the libraries differ, not their matrix products.
SMALL_MLP = Model("small MLP", _dense(784, 128, 10), (784,), _mlp)
SMALL_DEEP = Model("50 narrow layers", _dense(*([32] * 50), 10), (32,), _deep)
