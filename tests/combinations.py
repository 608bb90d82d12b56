"""A model for every combination of replicate x shard x tensor, and the combinations."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import replicax as rx
from tests.replicas import context

WIDTH, HIDDEN, LAYERS, ROWS, LENGTH = 16, 64, 2, 16, 8
SHAPES = {
    "embedding": (64, WIDTH * 8),
    "up/kernel": (LAYERS, WIDTH * 8, HIDDEN),
    "down/kernel": (LAYERS, HIDDEN, WIDTH * 8),
    "odd": (67, 101),
}
TENSOR = {
    # Not its rows: XLA of JAX 0.12 aborts if the rows that it reads are sharded over another axis.
    "embedding": [None, "tensor"],
    "up/kernel": [None, None, "tensor"],
    "down/kernel": [None, "tensor", None],
}
COMBINATIONS = {
    "replicate 8": {},
    "shard 8": {"variable_policy": "sharded"},
    "replicate 2 shard 4": {"variable_policy": "sharded", "shards": 4},
    "replicate 4 tensor 2": {"devices_per_replica": 2},
    "shard 4 tensor 2": {"variable_policy": "sharded", "devices_per_replica": 2},
    "replicate 2 shard 2 tensor 2": {
        "variable_policy": "sharded",
        "shards": 2,
        "devices_per_replica": 2,
    },
    "tensor 8": {"devices_per_replica": 8},
    "shard 2 tensor 2 sequence 2": {
        "variable_policy": "sharded",
        "devices_per_replica": {"tensor": 2, "sequence": 2},
    },
}


class Model:
    """Stacked layers that Adam trains, clipped by the global norm."""

    def __init__(self, strategy):
        self.strategy, self.adam = (
            strategy,
            optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2)),
        )
        rng = np.random.default_rng(0)
        named = strategy.topology.cores > 1
        layouts = rx.tpu.LayoutMap(TENSOR if named else {})
        with strategy.scope(), layouts.scope():
            self.weights = {
                n: rx.Variable(rng.normal(size=s).astype("f4") / 8, name=n)
                for n, s in SHAPES.items()
            }
            state = self.adam.init({n: w.read_value() for n, w in self.weights.items()})
            self.state = jax.tree.map(lambda x: rx.Variable(x), state)
        self.step = rx.function(self._step)

    def loss(self, tokens):
        constrain = self.strategy.constrain
        is_long = "sequence" in self.strategy.topology.named_axes
        x = constrain(self.weights["embedding"][tokens], None, "sequence" if is_long else None)
        stacks = self.weights["up/kernel"].read_value(), self.weights["down/kernel"].read_value()

        @jax.checkpoint
        def layer(x, pair):
            up, down = pair
            hidden = constrain(jnp.tanh(x @ up), None, None, "tensor")
            return x + hidden @ down, None

        x, _ = jax.lax.scan(layer, x, stacks)
        own = jnp.sum(jnp.sin(self.weights["odd"].read_value()))
        return rx.nn.mean_loss(jnp.square(x).mean((1, 2))) + rx.nn.scale_regularization_loss(own)

    def _replica_step(self, tokens):
        names = list(self.weights)
        variables = list(self.weights.values())
        loss, gradients = rx.value_and_grad(lambda: self.loss(tokens), variables)()
        gradients = dict(zip(names, context().all_reduce("SUM", gradients), strict=True))
        is_variable = lambda v: isinstance(v, rx.Variable)  # noqa: E731
        state = jax.tree.map(lambda v: v.read_value(), self.state, is_leaf=is_variable)
        weights = {n: w.read_value() for n, w in self.weights.items()}
        updates, new = self.adam.update(gradients, state, weights)
        for n, value in optax.apply_updates(weights, updates).items():
            self.weights[n].assign(value)
        slots = jax.tree.leaves(self.state, is_leaf=is_variable)
        for slot, value in zip(slots, jax.tree.leaves(new), strict=True):
            slot.assign(value)
        return loss

    def _step(self, tokens):
        losses = self.strategy.run(self._replica_step, (tokens,))
        return self.strategy.reduce("SUM", losses, axis=None)

    def checkpoint(self):
        """A checkpoint of the weights and of the state of Adam."""
        slots = jax.tree.leaves(self.state, is_leaf=lambda v: isinstance(v, rx.Variable))
        return rx.train.Checkpoint(weights=self.weights, slots=slots)

    def train(self, steps=2, seed=1):
        tokens = np.random.default_rng(seed).integers(64, size=(ROWS * steps, LENGTH))
        data = rx.data.Dataset.from_tensor_slices(tokens.astype("i4")).batch(ROWS)
        return [float(self.step(x)) for x in self.strategy.experimental_distribute_dataset(data)]

    def numbers(self):
        return {n: w.numpy() for n, w in self.weights.items()}
