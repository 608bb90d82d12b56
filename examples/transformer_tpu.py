"""A transformer on a TPU slice: data parallel over replicas, split inside each of them.

Every replica owns some logical devices; the attention heads, the hidden units and the vocabulary
are split over them, so that a model trains which one device could not hold. Without TPUs the slice
is simulated on virtual CPU devices:

    python examples/transformer_tpu.py --size tiny --cores 4 --steps 60

What a slice would say to a model of a billion parameters, without having either:

    replicax preflight --plan --topology v4-2048 examples/transformer_tpu.py -- --size 1b --cores 8
"""

import argparse
from collections import namedtuple
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

import replicax as rx

Size = namedtuple("Size", "layers width heads hidden vocabulary length")
SIZES = {
    "tiny": Size(layers=2, width=64, heads=8, hidden=256, vocabulary=256, length=32),
    "110m": Size(layers=12, width=768, heads=12, hidden=3072, vocabulary=32768, length=1024),
    "1b": Size(layers=19, width=2048, heads=16, hidden=8192, vocabulary=32768, length=2048),
}
LEARNING_RATE, DECAYS, EPSILON = 1e-2, (0.9, 0.95), 1e-8


def main() -> None:
    """Train on sequences that count upwards."""
    parser = argparse.ArgumentParser(description="Train a transformer with TPUStrategy.")
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--cores", type=int, default=4, help="logical devices of each replica")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, help="rows of each replica (default: one per core)")
    parser.add_argument("--keep", action="store_true", help="keep what layers compute: no remat")
    options = parser.parse_args()

    # Without a TPU, and unless told otherwise: one machine, eight devices.
    [cpu] = rx.config.list_physical_devices("CPU")
    if rx.config.get_logical_device_configuration(cpu) is None:
        eight = [rx.config.LogicalDeviceConfiguration()] * 8
        rx.config.set_logical_device_configuration(cpu, eight)

    size, console = SIZES[options.size], Console()
    strategy = make_strategy(options.cores)
    batch = options.batch or options.cores
    trainer = Trainer(strategy, size, options.cores, batch, keep=options.keep)
    console.print(f"{strategy}, {trainer.num_parameters:,} parameters")
    for step in range(options.steps):
        loss = trainer.step(trainer.rows(step))
        if step % 5 == 0 or step == options.steps - 1:
            console.print(f"step {step}: loss {float(loss):.4f}")


def make_strategy(cores: int) -> Any:
    """As many replicas as the slice has room for."""
    shape = {1: [1, 1, 1], 2: [1, 1, 2], 4: [2, 1, 2], 8: [2, 2, 2]}[cores]
    topology = rx.tpu.experimental.initialize_tpu_system()
    assignment = rx.tpu.experimental.DeviceAssignment.build(
        topology, shape, num_replicas=int(topology.mesh_shape.prod()) // cores
    )
    return rx.distribute.TPUStrategy(experimental_device_assignment=assignment)


def layouts(cores: int) -> rx.tpu.LayoutMap:
    """Which axis of which weight is split; the first axis counts the layers."""
    return rx.tpu.LayoutMap(
        {
            "embedding": [cores, 1],
            "attention/in": [1, 1, 1, cores, 1],
            "attention/out": [1, cores, 1, 1],
            "feed_forward/in": [1, 1, cores],
            "feed_forward/out": [1, cores, 1],
        }
    )


class Trainer:
    """The weights, the state of Adam, and one step of training."""

    def __init__(
        self, strategy: Any, size: Size, cores: int, batch: int, *, keep: bool = False
    ) -> None:
        self.strategy, self.size, self.batch, self.keep = strategy, size, batch, keep
        with strategy.scope(), layouts(cores).scope():
            self.weights = [_weight(i, n, s) for i, (n, s) in enumerate(shapes(size).items())]
            self.moments = [_like(w) for w in self.weights], [_like(w) for w in self.weights]
            self.count = rx.Variable(0.0, name="count")
        self.step = rx.function(self._step)

    @property
    def num_parameters(self) -> int:
        """How many numbers are learned."""
        return sum(weight.size for weight in self.weights)

    def rows(self, step: int) -> Any:
        """For each replica, sequences that count upwards from anywhere."""
        size = self.size

        def of_replica(context: Any) -> Any:
            seed = [step, context.replica_id_in_sync_group]
            starts = np.random.default_rng(seed).integers(size.vocabulary, size=(self.batch, 1))
            return ((starts + np.arange(size.length + 1)) % size.vocabulary).astype(np.int32)

        return self.strategy.experimental_distribute_values_from_function(of_replica)

    def _step(self, rows: Any) -> Any:
        losses = self.strategy.run(self._replica_step, args=(rows,))
        return self.strategy.reduce("MEAN", losses, axis=None)

    def _replica_step(self, rows: jax.Array) -> Any:
        loss, gradients = rx.value_and_grad(lambda: self._loss(rows), self.weights)()
        gradients = rx.distribute.get_replica_context().all_reduce("MEAN", gradients)
        self.count.assign_add(1.0)
        self._adam(gradients)
        return loss

    def _loss(self, rows: jax.Array) -> jax.Array:
        values = [weight.read_value() for weight in self.weights]
        logits = network(values, rows[:, :-1], keep=self.keep)
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), rows[:, 1:, None], axis=-1)
        return -jnp.mean(picked)

    def _adam(self, gradients: list[jax.Array]) -> None:
        (b1, b2), t = DECAYS, self.count.read_value()
        for w, m, v, g in zip(self.weights, *self.moments, gradients, strict=True):
            m.assign(b1 * m.read_value() + (1 - b1) * g)
            v.assign(b2 * v.read_value() + (1 - b2) * g * g)
            scale = jnp.sqrt(v.read_value() / (1 - b2**t)) + EPSILON
            w.assign_sub(LEARNING_RATE * m.read_value() / (1 - b1**t) / scale)


def shapes(size: Size) -> dict[str, tuple[int, ...]]:
    """The weights by name; those of all layers are stacked."""
    layers, d, h, f = size.layers, size.width, size.heads, size.hidden
    return {
        "embedding": (size.vocabulary, d),
        "attention/in": (layers, 3, d, h, d // h),
        "attention/out": (layers, h, d // h, d),
        "feed_forward/in": (layers, d, f),
        "feed_forward/out": (layers, f, d),
    }


def _weight(seed: int, name: str, shape: tuple[int, ...]) -> rx.Variable:
    key = jax.random.key(seed)
    return rx.Variable(lambda: jax.random.normal(key, shape) * 0.02, name=name)


def _like(weight: rx.Variable) -> rx.Variable:
    with weight.distribute_strategy.extended.colocate_vars_with(weight):
        return rx.Variable(lambda: jnp.zeros(weight.shape), name=f"moment of {weight.name}")


def network(weights: list[jax.Array], tokens: jax.Array, *, keep: bool) -> jax.Array:
    """For each token, how likely each token is to follow; in bfloat16, layer by layer."""
    embedding, *layers = (weight.astype(jnp.bfloat16) for weight in weights)
    x = embedding[tokens] + _positions(tokens.shape[1], embedding.shape[1])

    def layer(x: jax.Array, one: Any) -> tuple[jax.Array, None]:
        inside, outside, up, down = one
        x = x + attention(_normal(x), inside, outside)
        return x + jax.nn.gelu(_normal(x) @ up) @ down, None

    # Unless they are kept, the values inside a layer are computed again for the gradients.
    x, _ = jax.lax.scan(layer if keep else jax.checkpoint(layer), x, tuple(layers))
    return (_normal(x) @ embedding.T).astype(jnp.float32)


def attention(x: jax.Array, inside: jax.Array, outside: jax.Array) -> jax.Array:
    """Every token looks at those before it."""
    q, k, v = jnp.einsum("btd,cdhe->cbthe", x, inside)
    scores = jnp.einsum("bthe,bshe->bhts", q, k) / q.shape[-1] ** 0.5
    before = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    seen = jax.nn.softmax(jnp.where(before, scores, -jnp.inf))
    return jnp.einsum("bhts,bshe,hed->btd", seen, v, outside)


def _normal(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def _positions(length: int, width: int) -> jax.Array:
    angles = jnp.arange(length)[:, None] / 10_000 ** (jnp.arange(width // 2) / (width // 2))
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=1).astype(jnp.bfloat16)


if __name__ == "__main__":
    main()
