"""An integration: variables of another library, in strategies, gradients and checkpoints.

    python examples/extend/integration.py

`Parameter` stands for a library's class. All of its reads and writes go through one attribute,
``data``. The integration puts a property in its place, which keeps the value in an `rx.Variable`.
"""

import os
from typing import Any

os.environ.setdefault("REPLICAX_CPU_DEVICES", "2")  # without accelerators: virtual devices

import jax
import jax.numpy as jnp

import replicax as rx


class Parameter:
    """The library's class, which knows nothing of replicax."""

    def __init__(self, data: jax.Array) -> None:
        self.data = data


def write(parameter: Parameter, data: jax.Array) -> None:
    """Create the variable on the first write, in the strategy that is current; then assign."""
    if "rx" in vars(parameter):
        vars(parameter)["rx"].assign(data)
    else:
        vars(parameter)["rx"] = rx.Variable(data)


def attach() -> rx.extend.Integration:
    """Replace the attribute, and declare which variable is behind a parameter."""
    kind: Any = Parameter
    kind.data = property(lambda parameter: vars(parameter)["rx"].read_value(), write)
    return rx.extend.Integration(variables={Parameter: lambda parameter: vars(parameter)["rx"]})


rx.extend.register_integration(__name__, attach)  # of a real library: its name

strategy = rx.distribute.MirroredStrategy()
with strategy.scope():
    w = Parameter(jnp.zeros(3))


@rx.function
def step(x: jax.Array) -> Any:
    """Run gradient descent on every replica, written for the library's class."""

    def replica_step() -> Any:
        loss, [gradient] = rx.value_and_grad(lambda: ((w.data - x) ** 2).mean(), [w])()
        w.data -= rx.distribute.get_replica_context().all_reduce("MEAN", gradient)
        return loss

    return strategy.reduce("MEAN", strategy.run(replica_step), axis=None)


losses = [float(step(jnp.ones(3))) for _ in range(5)]
print(losses)
assert losses[-1] < losses[0] / 10
assert len(strategy.experimental_local_results(w)) == strategy.num_replicas_in_sync
