"""One training step of a model, with replicax and written by hand."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import replicax as rx
from benchmarks._models import RATE, Model
from benchmarks._timing import Block, block


def with_replicax(strategy: rx.distribute.Strategy, model: Model) -> Block:
    """The step as users write it."""
    with strategy.scope():
        weights = [rx.Variable(w) for w in model.weights()]
    step = replicax_step(strategy, model, weights)
    x, y = (per_replica(strategy, a) for a in model.batch(strategy.num_replicas_in_sync))
    return block(lambda: step(x, y), lambda: jax.block_until_ready([w.cell.value for w in weights]))


def replicax_step(
    strategy: rx.distribute.Strategy, model: Model, weights: list[rx.Variable]
) -> rx.function:
    """The compiled step; fresh, so that its first call traces."""

    def replica_step(x, y):
        def loss_fn():
            return model.loss([w.read_value() for w in weights], x, y)

        loss, gradients = rx.value_and_grad(loss_fn, weights)()
        gradients = rx.distribute.get_replica_context().all_reduce("MEAN", gradients)
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.assign_sub(RATE * gradient)
        return loss

    @rx.function
    def step(x, y):
        return strategy.reduce("MEAN", strategy.run(replica_step, args=(x, y)), axis=None)

    return step


def with_iterator(strategy: rx.distribute.Strategy, model: Model, steps: int) -> Block:
    """Calls that take their batches from an iterator, each of ``steps`` steps in one program."""
    with strategy.scope():
        weights = [rx.Variable(w) for w in model.weights()]
    step = replicax_step(strategy, model, weights)
    rows = model.batch(strategy.num_replicas_in_sync)
    dataset = rx.data.Dataset.from_tensors(tuple(map(np.asarray, rows))).repeat()
    iterator = iter(strategy.experimental_distribute_dataset(dataset))

    @rx.function
    def train(it):
        if steps == 1:
            return step(*next(it))
        turn = lambda total, _: (total + step(*next(it)), None)  # noqa: E731
        return rx.scan(turn, 0.0, length=steps)[0]

    return block(
        lambda: train(iterator), lambda: jax.block_until_ready([w.cell.value for w in weights])
    )


def per_replica(strategy: rx.distribute.Strategy, rows) -> rx.distribute.PerReplica:
    """Rows split over the replicas, on their devices, as a step before this one would give them."""
    size = len(rows) // strategy.num_replicas_in_sync
    values = strategy.experimental_distribute_values_from_function(
        lambda ctx: jnp.asarray(rows[ctx.replica_id_in_sync_group * size :][:size])
    )
    return rx.function(lambda v: strategy.run(lambda a: a, args=(v,)))(values)


def by_hand(devices: list[jax.Device], model: Model) -> Block:
    """The same with nothing but JAX: shard_map, jit, and the state handed on and donated."""
    mesh = Mesh(devices, ("replica",))
    split, same = PartitionSpec("replica"), PartitionSpec()

    def replica_step(weights, x, y):
        loss, gradients = jax.value_and_grad(model.loss)(weights, x, y)
        gradients = jax.lax.pmean(gradients, "replica")
        new = [w - RATE * g for w, g in zip(weights, gradients, strict=True)]
        return new, jax.lax.pmean(loss, "replica")

    step = jax.jit(
        jax.shard_map(
            replica_step,
            mesh=mesh,
            in_specs=(same, split, split),
            out_specs=(same, same),
            check_vma=False,
        ),
        donate_argnums=0,
    )
    x, y = jax.device_put(model.batch(len(devices)), NamedSharding(mesh, split))
    state = [jax.device_put(model.weights(), NamedSharding(mesh, same))]

    def once():
        state[0], _ = step(state[0], x, y)

    return block(once, lambda: jax.block_until_ready(state[0]))


def products(devices: list[jax.Device], model: Model) -> Block:
    """Only the matrix products of a dense network's step, forwards and back, in the same engine."""
    mesh, split, same = Mesh(devices, ("replica",)), PartitionSpec("replica"), PartitionSpec()

    def multiply(kernels, activations, errors):
        forwards = [a @ k for a, k in zip(activations, kernels, strict=True)]
        of_kernels = [a.T @ e for a, e in zip(activations, errors, strict=True)]
        back = [e @ k.T for e, k in zip(errors[1:], kernels[1:], strict=True)]
        return forwards, [g[None] for g in of_kernels], back

    kernels = [w for w in model.weights() if w.ndim == 2]
    rows = len(model.batch(len(devices))[0])
    activations = [np.ones((rows, k.shape[0]), np.float32) for k in kernels]
    errors = [np.ones((rows, k.shape[1]), np.float32) for k in kernels]
    specs = {"in_specs": (same, split, split), "out_specs": split}
    step = jax.jit(jax.shard_map(multiply, mesh=mesh, check_vma=False, **specs))
    given = (
        jax.device_put(kernels, NamedSharding(mesh, same)),
        *jax.device_put((activations, errors), NamedSharding(mesh, split)),
    )
    last = [None]

    def once():
        last[0] = step(*given)

    return block(once, lambda: jax.block_until_ready(last[0]))
