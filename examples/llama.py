"""A Llama of Flax NNX, from 110 million to 8 billion parameters, with sharded variables.

    pip install 'replicax[flax]'
    python examples/llama.py  # a tiny one, on 8 virtual devices
    python examples/llama.py --tensor 2  # replicas of two devices each

Layers are stacked and rematerialized, compute in bfloat16, and their weights and Adam's state are
sharded over the replicas. Which devices a larger one needs, without having any:

    python examples/llama.py --size 8b --plan h100 --global-batch 64
"""

import argparse
import functools
import os
import subprocess
import sys
from collections import namedtuple
from typing import Any

os.environ.setdefault("REPLICAX_CPU_DEVICES", "8")  # without accelerators: virtual devices

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import replicax as rx

Size = namedtuple("Size", "layers width heads groups hidden vocabulary length")
SIZES = {
    "tiny": Size(2, 64, 4, 2, 128, 256, 16),
    "110m": Size(12, 768, 12, 12, 2048, 32768, 1024),
    "1b": Size(16, 2048, 32, 8, 8192, 128256, 2048),
    "3b": Size(28, 3072, 24, 8, 8192, 128256, 2048),
    "8b": Size(32, 4096, 32, 8, 14336, 128256, 2048),
}

UNNAMED = {nnx.PARTITION_NAME: None}  # the axis of layers is not sharded by name


def main() -> None:
    """Train on sequences that count upwards, or plan."""
    parser = argparse.ArgumentParser(description="Train a Llama.")
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--global-batch", type=int, default=16, help="sequences per step")
    parser.add_argument("--policy", choices=["mirrored", "sharded"], default="sharded")
    parser.add_argument("--shards", type=int, help="replicas that hold one copy (default: all)")
    parser.add_argument("--tensor", type=int, default=1, help="devices of each replica")
    parser.add_argument("--accumulate", type=int, default=1, metavar="K", help="parts of a batch")
    parser.add_argument("--float32", action="store_true", help="compute in float32")
    parser.add_argument("--plan", metavar="KINDS", help="find devices, such as h100,v5p")
    parser.add_argument("--most", type=int, default=64, help="the most devices of a plan")
    parser.add_argument("--abstract", action="store_true", help="compute no weights, for a plan")
    options = parser.parse_args()
    if options.plan:
        sys.exit(plan(options))

    strategy = rx.distribute.MirroredStrategy(
        variable_policy=options.policy,
        shards=options.shards,
        devices_per_replica={"tensor": options.tensor},
        reduce_dtype="bfloat16" if options.policy == "sharded" and not options.float32 else None,
    )
    trainer = Trainer(strategy, SIZES[options.size], options)
    print(f"{strategy}, {trainer.num_parameters:,} parameters")
    for step in range(options.steps):
        loss = trainer.step(trainer.rows(step))
        if step % 10 == 0 or step == options.steps - 1:
            print(f"step {step}: loss {float(loss):.4f}")


def plan(options: Any) -> int:
    """Let `replicax plan` compile the step for many devices, with several sizes of a replica."""
    command = [sys.executable, "-m", "replicax", "plan", __file__, "--plan", "--fit", options.plan]
    command += ["--global-batch", str(options.global_batch), "--most", str(options.most)]
    command += ["--vary", "tensor=1,4", "--", "--abstract", "--size", options.size]
    return subprocess.call([*command, "--accumulate", str(options.accumulate)])


class Trainer:
    """A model, its optimizer, and one step of training."""

    def __init__(self, strategy: Any, size: Size, options: Any) -> None:
        self.strategy, self.size, self.options = strategy, size, options
        with strategy.scope():
            # A plan needs shapes only: 8 billion parameters and their state take 96 GB.
            made = nnx.eval_shape(self._make) if options.abstract else self._make()
        self.model, self.optimizer = made
        self.step = rx.function(self._step)

    def _make(self) -> Any:
        model = Llama(self.size, nnx.Rngs(0))
        adam = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-3, b2=0.95))
        return model, nnx.Optimizer(model, adam, wrt=nnx.Param)

    @property
    def num_parameters(self) -> int:
        """How many numbers are learned."""
        return sum(x.size for x in jax.tree.leaves(nnx.state(self.model, nnx.Param)))

    def rows(self, step: int) -> Any:
        """For each replica, its sequences of a global batch; they count upwards from anywhere."""
        size, count = self.size, self.strategy.num_replicas_in_sync
        rng = np.random.default_rng(step)
        starts = rng.integers(size.vocabulary, size=(self.options.global_batch, 1))
        rows = ((starts + np.arange(size.length + 1)) % size.vocabulary).astype(np.int32)
        parts = np.array_split(rows, count)
        return self.strategy.experimental_distribute_values_from_function(
            lambda context: parts[context.replica_id_in_sync_group]
        )

    def _step(self, rows: Any) -> Any:
        losses = self.strategy.run(self._replica_step, args=(self.model, self.optimizer, rows))
        return self.strategy.reduce("SUM", losses, axis=None)

    def _replica_step(self, model: Any, optimizer: Any, rows: jax.Array) -> Any:
        def gradients_of(rows: jax.Array) -> Any:
            def loss_fn(model: Any) -> Any:
                logits = model(rows[:, :-1]).astype(jnp.float32)
                losses = optax.softmax_cross_entropy_with_integer_labels(logits, rows[:, 1:])
                return rx.nn.mean_loss(losses)

            wrapped = loss_fn if self.options.float32 else rx.mixed_precision(loss_fn)
            return nnx.value_and_grad(wrapped)(model)

        loss, gradients = rx.accumulate(gradients_of, self.options.accumulate)(rows)
        optimizer.update(model, gradients)  # sums the gradients of all replicas
        return loss


class Layer(nnx.Module):
    """Attention of grouped heads, then a gated network."""

    def __init__(self, size: Size, rngs: nnx.Rngs) -> None:
        self.size = size
        d, kv = size.width, size.width // size.heads * size.groups
        linear = functools.partial(nnx.Linear, use_bias=False, rngs=rngs)
        # Heads and hidden units are sharded over the devices of a replica, if it has several.
        to_heads = functools.partial(linear, kernel_init=partitioned(None, "tensor"))
        from_heads = functools.partial(linear, kernel_init=partitioned("tensor", None))
        self.query, self.key, self.value = to_heads(d, d), to_heads(d, kv), to_heads(d, kv)
        self.output = from_heads(d, d)
        self.gate, self.up = to_heads(d, size.hidden), to_heads(d, size.hidden)
        self.down = from_heads(size.hidden, d)
        self.first, self.second = nnx.RMSNorm(d, rngs=rngs), nnx.RMSNorm(d, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """For each token, its new value."""
        y = self.first(x)
        split = lambda z: z.reshape(*z.shape[:2], -1, self.size.width // self.size.heads)  # noqa: E731
        q, k = rotated(split(self.query(y))), rotated(split(self.key(y)))
        seen = jax.nn.dot_product_attention(q, k, split(self.value(y)), is_causal=True)
        x = x + self.output(seen.reshape(x.shape))
        y = self.second(x)
        return x + self.down(nnx.silu(self.gate(y)) * self.up(y))


class Llama(nnx.Module):
    """For each token, how likely each token is to follow."""

    def __init__(self, size: Size, rngs: nnx.Rngs) -> None:
        self.embedding = nnx.Embed(size.vocabulary, size.width, rngs=rngs)
        keys = rngs.split(size.layers)
        stacked = nnx.vmap(functools.partial(Layer, size), transform_metadata=UNNAMED)
        self.layers = stacked(keys)
        self.norm = nnx.RMSNorm(size.width, rngs=rngs)
        self.head = nnx.Linear(size.width, size.vocabulary, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Rows of tokens."""
        x = self.embedding(tokens)
        # Each iteration gathers the weights of its layer, forwards and again backwards.
        layer = rx.remat(lambda x, layer: layer(x))
        x = nnx.scan(layer, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)
        return self.head(self.norm(x))


def partitioned(*axes: str | None) -> Any:
    """Return the initializer of a kernel whose axes are sharded over these named devices."""
    return nnx.with_partitioning(nnx.initializers.lecun_normal(), axes)


def rotated(x: jax.Array) -> jax.Array:
    """Rotate pairs of numbers by the position of their token (RoPE)."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None, None] / 10_000 ** (jnp.arange(half) / half)
    a, b = jnp.split(x, 2, axis=-1)
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1).astype(x.dtype)


if __name__ == "__main__":
    main()
