"""Sharded variables: a step against FSDP written by hand in JAX, and the memory of each device.

    python benchmarks/sharded.py [--quick]

Adam on 4 virtual CPU devices. By hand means `jax.jit` with a NamedSharding for each weight and slot
and a constraint that gathers a weight before it is used; what else happens, XLA's partitioner
decides. What each row means is in docs/benchmarks.md.
"""

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("REPLICAX_CPU_DEVICES", "4")
ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

import replicax as rx  # noqa: E402
from benchmarks._models import DEEP, MLP, RATE, Model  # noqa: E402
from benchmarks._steps import per_replica  # noqa: E402
from benchmarks._timing import Block, block, compare  # noqa: E402

COUNT = 4
SMALL = 16 * 1024
WIDE = Model(
    "wide MLP", ((784, 2048), (2048,), (2048, 1024), (1024,), (1024, 12), (12,)), (784,), MLP.logits
)


def main() -> None:
    parser = argparse.ArgumentParser(description="Sharded variables against FSDP by hand.")
    parser.add_argument("--quick", action="store_true", help="a tenth of the pairs, to try it out")
    pairs = 6 if parser.parse_args().quick else 60
    for model in (MLP, WIDE, DEEP):
        ours, variables = with_replicax(model, "sharded")
        copies, mirrored = with_replicax(model, "mirrored")
        ratio = compare(ours, by_hand(model), pairs=pairs).ratio
        to_copies = compare(ours, copies, pairs=pairs).ratio
        print(
            f"{model.name}: sharded / by hand {ratio.median:.2f}"
            f" ({ratio.low:.2f}..{ratio.high:.2f}, target 1.05);"
            f" sharded / mirrored {to_copies.median:.2f};"
            f" state of a device {held(variables):,} bytes, mirrored {held(mirrored):,}"
        )


def held(variables: list[rx.Variable]) -> int:
    """The most that a device holds of some variables."""
    by_device: dict[jax.Device, int] = {}
    for variable in variables:
        for part in variable.cell.array().addressable_shards:
            by_device[part.device] = by_device.get(part.device, 0) + part.data.nbytes
    return max(by_device.values())


def adam(w, m, v, g):
    m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
    return w - RATE * m / (jnp.sqrt(v) + 1e-7), m, v


def with_replicax(model: Model, policy: str) -> tuple[Block, list[rx.Variable]]:
    strategy = rx.distribute.MirroredStrategy(jax.devices()[:COUNT], variable_policy=policy)
    with strategy.scope():
        weights, *slots = (
            [rx.Variable(start(w)) for w in model.weights()]
            for start in (np.asarray, np.zeros_like, np.zeros_like)
        )

    def replica_step(x, y):
        loss, gradients = rx.value_and_grad(
            lambda: model.loss([w.read_value() for w in weights], x, y), weights
        )()
        gradients = rx.distribute.get_replica_context().all_reduce("MEAN", gradients)
        for w, m, v, g in zip(weights, *slots, gradients, strict=True):
            for variable, new in zip((w, m, v), adam(w, m, v, g), strict=True):
                variable.assign(new)
        return loss

    step = rx.function(
        lambda x, y: strategy.reduce("MEAN", strategy.run(replica_step, args=(x, y)), axis=None)
    )
    x, y = (per_replica(strategy, a) for a in model.batch(COUNT))
    state = [*weights, *slots[0], *slots[1]]
    return block(
        lambda: step(x, y), lambda: jax.block_until_ready([v.cell.value for v in state])
    ), state


def by_hand(model: Model) -> Block:
    mesh = Mesh(jax.devices()[:COUNT], ("replica",))
    same, split = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), ("replica",)))
    where = [
        split if w.nbytes > SMALL and w.shape[0] % COUNT == 0 else same for w in model.weights()
    ]

    def step(state, x, y):
        def loss_fn(weights):
            whole = [jax.lax.with_sharding_constraint(w, same) for w in weights]
            return model.loss(whole, x, y)

        loss, gradients = jax.value_and_grad(loss_fn)(state[0])
        gradients = jax.lax.with_sharding_constraint(gradients, where)
        new = [adam(*row) for row in zip(*state, gradients, strict=True)]
        return [list(column) for column in zip(*new, strict=True)], loss

    compiled = jax.jit(step, donate_argnums=0, out_shardings=([where] * 3, same))
    x, y = jax.device_put(model.batch(COUNT), split)
    zeros = [[np.zeros_like(w) for w in model.weights()] for _ in range(2)]
    state = [jax.device_put([model.weights(), *zeros], [where] * 3)]

    def once():
        state[0], _ = compiled(state[0], x, y)

    return block(once, lambda: jax.block_until_ready(state[0]))


if __name__ == "__main__":
    main()
