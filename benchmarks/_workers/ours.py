"""One of our workers."""

from functools import partial

import jax
import jax.numpy as jnp

import replicax as rx
from benchmarks._workers import in_jax, networks
from benchmarks._workers.serve import eager, is_eager, serve


def main() -> None:
    if is_eager():
        eager(first_eager_step)
        return
    strategy = rx.distribute.MultiWorkerMirroredStrategy()
    mlp = (in_jax.mlp_loss, networks.mlp_weights())
    makers = {
        **networks.all_reduces(partial(all_reduce, strategy)),
        **networks.trainers(partial(held, strategy), in_jax.LOSSES),
        "MLP from files": lambda: fed(strategy, *mlp, rows("OFF")),
        "MLP from memory": lambda: fed(strategy, *mlp, rows("DATA")),
    }
    serve(makers, lambda x: jax.block_until_ready(strategy.experimental_local_results(x)))


def all_reduce(strategy, size):
    context = rx.distribute.get_replica_context
    last = [strategy.run(lambda: jnp.ones(size))]

    @rx.function
    def step(x):
        return strategy.run(lambda x: context().all_reduce("MEAN", x), args=(x,))

    def one():
        last[0] = step(last[0])
        return last[0]

    return one


def first_eager_step():
    [cpu] = rx.config.list_physical_devices("CPU")
    rx.config.set_logical_device_configuration(cpu, [rx.config.LogicalDeviceConfiguration()] * 2)
    strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    step = trainer(strategy, in_jax.mlp_loss, networks.mlp_weights(), compiled=False)
    jax.block_until_ready(strategy.experimental_local_results(step(*networks.mlp_batch())))


def trainer(strategy, loss, initial, *, compiled=True):
    with strategy.scope():
        weights = [rx.Variable(w) for w in initial]

    def replica(*batch):
        values = [w.read_value() for w in weights]
        value, grads = jax.value_and_grad(loss)(values, *batch)
        grads = rx.distribute.get_replica_context().all_reduce("MEAN", grads)
        for w, g in zip(weights, grads, strict=True):
            w.assign_sub(networks.RATE * g)
        return value

    def step(*batch):
        return strategy.run(replica, args=batch)

    return rx.function(step) if compiled else step


def held(strategy, loss, initial, batch):
    """Steps on one batch that stays on the device."""
    step = trainer(strategy, loss, initial)
    dataset = rx.data.Dataset.from_tensors(batch)
    batch = next(iter(strategy.distribute_datasets_from_function(lambda _: dataset)))
    return lambda: step(*batch)


def fed(strategy, loss, initial, dataset):
    """Steps on the batches of a distributed dataset."""
    step = trainer(strategy, loss, initial)
    batches = iter(strategy.experimental_distribute_dataset(dataset))
    return lambda: step(*next(batches))


def rows(policy):
    """A dataset whose batches the workers agree on (OFF), or count by themselves (DATA)."""
    options = rx.data.Options()
    policies = rx.data.experimental.AutoShardPolicy
    options.experimental_distribute.auto_shard_policy = getattr(policies, policy)
    batch = 2 * networks.MLP_ROWS
    examples = rx.data.Dataset.from_tensor_slices(networks.mlp_batch(8 * batch))
    return examples.repeat(100_000).batch(batch).with_options(options)


if __name__ == "__main__":
    main()
