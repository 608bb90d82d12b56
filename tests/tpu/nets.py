"""Two small networks, and a training loop that serves every strategy."""

import jax
import jax.numpy as jnp
import numpy as np

import replicax as rx

BATCH = 4  # rows of all replicas together


def slice_of(cores, replicas):
    """A TPUStrategy of replicas with so many logical devices each."""
    shape = {1: [1, 1, 1], 2: [1, 1, 2], 4: [2, 1, 2], 8: [2, 2, 2]}[cores]
    topology = rx.tpu.experimental.initialize_tpu_system()
    assignment = rx.tpu.experimental.DeviceAssignment.build(topology, shape, num_replicas=replicas)
    return rx.distribute.experimental.TPUStrategy(device_assignment=assignment)


def normal(seed, *shape):
    rng = np.random.default_rng(seed)
    return rng.normal(0, shape[-2] ** -0.5 / 3, shape).astype(np.float32)


class ConvNet:
    """Two convolutions on images, cut along their height and width."""

    layouts = rx.tpu.LayoutMap()
    x_shape = (8, 8, 3)
    kernels = (3, 3, 3, 8), (3, 3, 8, 4)

    def __init__(self, split):
        self.split = split
        self.weights = [rx.Variable(normal(i, *shape)) for i, shape in enumerate(self.kernels)]

    def __call__(self, x):
        x = self.split(x)
        for kernel in self.weights:
            x = jnp.tanh(_convolved(x, kernel.read_value()))
        return x.mean((1, 2))


def _convolved(x, kernel):
    layout = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=layout)


class Transformer:
    """A block of attention and feed-forward, cut over its heads and its hidden units."""

    heads, width, hidden = 4, 16, 64
    x_shape = (6, 16)
    layouts = rx.tpu.LayoutMap(
        {
            "(query|key|value)$": [1, 4, 1],
            "output$": [4, 1, 1],
            "up$": [1, 4],
            "down$": [4, 1],
        }
    )

    def __init__(self, split):
        h, d, f = self.heads, self.width, self.hidden
        shapes = {
            "query": (d, h, d // h),
            "key": (d, h, d // h),
            "value": (d, h, d // h),
            "output": (h, d // h, d),
            "up": (d, f),
            "down": (f, d),
        }
        self.weights = [
            rx.Variable(normal(i, *s), name=f"block/{n}") for i, (n, s) in enumerate(shapes.items())
        ]

    def __call__(self, x):
        query, key, value, output, up, down = (w.read_value() for w in self.weights)
        q, k, v = (jnp.einsum("btd,dhe->bthe", x, w) for w in (query, key, value))
        scores = jax.nn.softmax(jnp.einsum("bthe,bshe->bhts", q, k) / 2)
        x = x + jnp.einsum("bhts,bshe,hed->btd", scores, v, output)
        x = x + jnp.tanh(x @ up) @ down
        return x.mean(1)


class Training:
    """Momentum and a squared error, on rows that depend on the step alone."""

    def __init__(self, strategy, net, split=lambda x: x):
        self.strategy = strategy
        with strategy.scope(), net.layouts.scope():
            self.net = net(split)
            self.momenta = [rx.Variable(jnp.zeros_like(w)) for w in self.net.weights]
        self.step = rx.function(self._step)

    def run(self, steps):
        """The weights after so many steps."""
        for step in range(steps):
            self.step(self.batch(step))
        return [w.numpy() for w in self.net.weights]

    def batch(self, step):
        rows = np.random.default_rng(step).normal(size=(BATCH, *self.net.x_shape))
        rows = rows.astype(np.float32)
        return self.strategy.experimental_distribute_values_from_function(
            lambda ctx: rows[ctx.replica_id_in_sync_group :: ctx.num_replicas_in_sync]
        )

    def _step(self, batch):
        return self.strategy.run(self._replica_step, args=(batch,))

    def _replica_step(self, x):
        def loss():
            return jnp.square(self.net(x) - 0.5).sum() / BATCH

        weights = self.net.weights
        value, gradients = rx.value_and_grad(loss, weights)()
        gradients = rx.distribute.get_replica_context().all_reduce("SUM", gradients)
        for w, m, g in zip(weights, self.momenta, gradients, strict=True):
            m.assign(0.9 * m + g)
            w.assign_sub(0.05 * m.read_value())
        return value
