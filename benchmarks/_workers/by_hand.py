"""A worker of two written with ``jax.distributed`` and ``shard_map``, with one flat all-reduce."""

import json
import os
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks._workers import in_jax, networks
from benchmarks._workers.serve import serve


def main() -> None:
    config = json.loads(os.environ["TF_CONFIG"])
    workers = config["cluster"]["worker"]
    jax.distributed.initialize(workers[0], len(workers), config["task"]["index"])
    mesh = jax.make_mesh((len(workers),), ("r",))
    makers = {
        **networks.all_reduces(partial(all_reduce, mesh)),
        **networks.trainers(partial(trainer, mesh), in_jax.LOSSES),
    }
    serve(makers, jax.block_until_ready)


def all_reduce(mesh, size):
    spec = PartitionSpec("r")
    body = jax.shard_map(lambda x: jax.lax.pmean(x, "r"), mesh=mesh, in_specs=spec, out_specs=spec)
    step = jax.jit(body, donate_argnums=0)
    last = [placed(mesh, spec, np.ones((1, size), np.float32))]

    def one():
        last[0] = step(last[0])
        return last[0]

    return one


def trainer(mesh, loss, initial, batch):
    shared, split = PartitionSpec(), PartitionSpec("r")

    def body(weights, *batch):
        weights_here = jax.tree.map(lambda w: jax.lax.pcast(w, "r", to="varying"), weights)
        value, grads = jax.value_and_grad(loss)(weights_here, *(x[0] for x in batch))
        flat, unflatten = ravel_pytree(grads)
        grads = unflatten(jax.lax.pmean(flat, "r"))
        updated = [w - networks.RATE * g for w, g in zip(weights, grads, strict=True)]
        return updated, jnp.expand_dims(value, 0)

    step = jax.jit(
        jax.shard_map(
            body,
            mesh=mesh,
            in_specs=(shared, *(split for _ in batch)),
            out_specs=(shared, split),
        ),
        donate_argnums=0,
    )
    state = [[placed(mesh, shared, w) for w in initial]]
    batch = [placed(mesh, split, x[None]) for x in batch]

    def one():
        state[0], value = step(state[0], *batch)
        return value

    return one


def placed(mesh, spec, value):
    return jax.make_array_from_process_local_data(NamedSharding(mesh, spec), value)


if __name__ == "__main__":
    main()
