"""``replicax verify``: small programs on this machine's devices, compared with NumPy.

Each check computes a result that is known without replicax. An owner of hardware on which replicax
has not been tested can run it, and post the JSON file.
"""

import argparse
import dataclasses
import json
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax._src.base.types import VariableAggregation, VariableSynchronization
from replicax._src.context.current import get_replica_context
from replicax._src.data.dataset import Dataset
from replicax._src.files.paths import local_file
from replicax._src.functions.control_flow import cond, scan
from replicax._src.functions.function import function
from replicax._src.functions.gradients import value_and_grad
from replicax._src.nn.loss import mean_loss
from replicax._src.state.variable import Variable
from replicax._src.strategy.strategies import MirroredStrategy
from replicax._src.topology.devices import device_name

_ROWS, _FEATURES, _STEPS = 50, 6, 5  # 50 rows: the last batch of 16 is short
_RATE = 0.1
_TOLERANCE = 2e-4  # of float32 on hardware that rounds matrix products


@dataclass(frozen=True)
class Check:
    """The result of one check.

    Attributes:
        name: The computation.
        status: ``ok``, ``FAILED`` or ``skipped``.
        seconds: How long it took, with compilation.
        said: The largest difference, the error, or why it was skipped.
    """

    name: str
    status: str
    seconds: float
    said: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this subcommand."""
    parser.add_argument(
        "--devices",
        metavar="NAMES",
        help="such as GPU:0,GPU:1; by default all GPUs or TPUs, else all CPU devices",
    )
    parser.add_argument(
        "--json", type=local_file, metavar="FILE", help="also write the results, to post them"
    )


def run(options: argparse.Namespace) -> int:
    """Run all checks, print a line for each, and return 0 if none failed."""
    strategy = MirroredStrategy(options.devices.split(",") if options.devices else None)
    about = _about(strategy)
    sys.stdout.write(f"{about['replicas']} replicas on {about['kinds']}, JAX {about['jax']}\n")
    found = []
    for check in _checks(strategy):
        found.append(check)
        line = f"{check.status:<8} {check.name:<34} {check.seconds:6.1f} s  {check.said}"
        sys.stdout.write(f"{line[:110]}\n")
        sys.stdout.flush()
    failed = sum(check.status == "FAILED" for check in found)
    sys.stdout.write(f"{len(found)} checks, {failed} failed\n")
    if options.json:
        results = {**about, "checks": [dataclasses.asdict(check) for check in found]}
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    return 1 if failed else 0


def _about(strategy: Any) -> dict[str, Any]:
    devices = strategy.topology.devices
    kinds = [device.device_kind for device in devices]
    return {
        "replicax": sys.modules["replicax"].__version__,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "replicas": strategy.num_replicas_in_sync,
        "devices": [device_name(device) for device in devices],
        "kinds": ", ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds)),
    }


def _checks(strategy: Any, compiled: Callable[[Any], Any] = function) -> Iterator[Check]:
    """Yield the results of all checks; ``compiled`` makes a step of a Python function."""
    sharded = MirroredStrategy(list(strategy.topology.devices), variable_policy="sharded")
    eager = lambda f: f  # noqa: E731
    yield _check("all_reduce SUM and MEAN, compiled", lambda: _all_reduce(strategy, compiled))
    yield _check("all_reduce SUM and MEAN, eager", lambda: _all_reduce(strategy, eager))
    yield _check("all_gather and gather", lambda: _gather(strategy, compiled))
    yield _check("gradient of an all-reduce", lambda: _gradient(strategy, compiled))
    yield _check("variables in scan and cond", lambda: _control_flow(strategy, compiled))
    yield _check("variables read across replicas", lambda: _on_read(strategy, compiled))
    yield _check("random numbers of the replicas", lambda: _random(strategy, compiled))
    yield _check("training, compiled", lambda: _train(strategy, compiled))
    yield _check("training, eager", lambda: _train(strategy, eager))
    yield _check("training, sharded variables", lambda: _train(sharded, compiled))
    yield _check("training in bfloat16", lambda: _train(strategy, compiled, jnp.bfloat16))
    yield _check("keras fit", lambda: _keras(strategy), "keras")
    yield _check("keras, custom loop", lambda: _keras_loop(strategy, compiled), "keras")
    yield _check("flax nnx", lambda: _nnx(strategy, compiled), "flax")
    yield _check("checkpoint", lambda: _checkpoint(strategy), "orbax")


def _check(name: str, compute: Callable[[], tuple[Any, Any]], needs: str = "") -> Check:
    if needs and find_spec(needs) is None:
        return Check(name, "skipped", 0.0, f"{needs} is not installed")
    began = time.monotonic()
    try:
        found, expected = (np.asarray(x, np.float64) for x in compute())
        tolerance = 0.05 if "bfloat16" in name else _TOLERANCE
        distance = float(np.max(np.abs(found - expected)) / max(1.0, np.max(np.abs(expected))))
        status, said = "ok" if distance <= tolerance else "FAILED", f"differs by {distance:.1e}"
    except Exception as error:  # a failed check is a result: the others still run
        status, said = "FAILED", f"{type(error).__name__}: {error}".replace("\n", " ")
    return Check(name, status, time.monotonic() - began, said)


def _all_reduce(strategy: Any, wrap: Callable[[Any], Any]) -> tuple[Any, Any]:
    def step() -> Any:
        replica = get_replica_context()
        assert replica is not None
        mine = jnp.arange(5.0) * (replica.replica_id_in_sync_group + 1)
        return jnp.concatenate([replica.all_reduce("SUM", mine), replica.all_reduce("MEAN", mine)])

    n = strategy.num_replicas_in_sync
    results = strategy.experimental_local_results(wrap(lambda: strategy.run(step))())
    total = np.arange(5.0) * n * (n + 1) / 2
    return np.stack(results), np.stack([np.concatenate([total, total / n])] * len(results))


def _gather(strategy: Any, compiled: Callable[[Any], Any]) -> tuple[Any, Any]:
    def step() -> Any:
        replica = get_replica_context()
        assert replica is not None
        mine = jnp.ones((2, 3)) * replica.replica_id_in_sync_group
        return replica.all_gather(mine, axis=0).sum(), mine

    sums, rows = compiled(lambda: strategy.run(step))()
    n = strategy.num_replicas_in_sync
    total = strategy.reduce("SUM", sums, axis=None)
    found = np.append(np.asarray(strategy.gather(rows, axis=0)).ravel(), total)
    return found, np.append(np.repeat(np.arange(n), 6), n * 3.0 * n * (n - 1))


def _gradient(strategy: Any, compiled: Callable[[Any], Any]) -> tuple[Any, Any]:
    def step(x: Any) -> Any:
        replica = get_replica_context()
        assert replica is not None
        loss = lambda v: jnp.sum(replica.all_reduce("SUM", v) ** 2)  # noqa: E731
        return jax.grad(loss)(x)

    x, n = jnp.arange(4.0), strategy.num_replicas_in_sync
    gradients = compiled(lambda x: strategy.run(step, args=(x,)))(x)
    return strategy.experimental_local_results(gradients)[0], 2 * n * n * np.arange(4.0)


def _control_flow(strategy: Any, compiled: Callable[[Any], Any]) -> tuple[Any, Any]:
    """Check `cond` in `scan`: even iterations add a sum over the replicas to a variable."""
    with strategy.scope():
        total = Variable(jnp.zeros(3))

    def step() -> None:
        replica = get_replica_context()
        assert replica is not None
        mine = jnp.ones(3) * (replica.replica_id_in_sync_group + 1)

        def body(carry: Any, i: Any) -> tuple[Any, None]:
            add = lambda: total.assign_add(replica.all_reduce("SUM", mine) * i)  # noqa: E731
            cond(i % 2 == 0, add, total.read_value)
            return carry, None

        scan(body, None, jnp.arange(5))

    compiled(lambda: strategy.run(step))()
    n = strategy.num_replicas_in_sync
    return total.numpy(), np.full(3, (0 + 2 + 4) * n * (n + 1) / 2)


def _on_read(strategy: Any, compiled: Callable[[Any], Any]) -> tuple[Any, Any]:
    """Check ON_READ variables: each replica counts its rows, and a read sums the counts."""
    with strategy.scope():
        on_read = VariableSynchronization.ON_READ
        count = Variable(0.0, synchronization=on_read, aggregation=VariableAggregation.SUM)
    step = compiled(lambda x, y: strategy.run(lambda x: count.assign_add(len(x)), args=(x,)))
    for batch in _batches(strategy):
        step(*batch)
    return float(count), _ROWS * _STEPS


def _random(strategy: Any, compiled: Callable[[Any], Any]) -> tuple[Any, Any]:
    """Check random numbers: each replica's must equal those drawn on one device with its key."""

    def step(key: Any) -> Any:
        replica = get_replica_context()
        assert replica is not None
        return jax.random.bits(jax.random.fold_in(key, replica.replica_id_in_sync_group), (4,))

    key = jax.random.key(0)
    draws = compiled(lambda key: strategy.run(step, args=(key,)))(key)
    found = np.stack(strategy.experimental_local_results(draws))
    keys = [jax.random.fold_in(key, replica) for replica in range(len(found))]
    return found, np.stack([jax.random.bits(key, (4,)) for key in keys])


def _data() -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(0)
    x = draw.normal(size=(_ROWS, _FEATURES)).astype(np.float32)
    return x, (x @ draw.normal(size=(_FEATURES, 1))).astype(np.float32)


def _batches(strategy: Any) -> Iterator[Any]:
    dataset = Dataset.from_tensor_slices(_data()).batch(16)
    for _ in range(_STEPS):
        yield from strategy.experimental_distribute_dataset(dataset)


def _expected() -> np.ndarray:
    """Train the linear model with NumPy, in float64."""
    x, y = (part.astype(np.float64) for part in _data())
    w = np.zeros((_FEATURES, 1))
    for _ in range(_STEPS):
        for i in range(0, _ROWS, 16):
            a, b = x[i : i + 16], y[i : i + 16]
            w -= _RATE * 2 * a.T @ (a @ w - b) / len(a)
    return w


def _train(strategy: Any, wrap: Callable[[Any], Any], dtype: Any = None) -> tuple[Any, Any]:
    with strategy.scope():
        w = Variable(jnp.zeros((_FEATURES, 1)))

    def step(x: Any, y: Any) -> None:
        def loss() -> Any:
            prediction = x.astype(dtype or x.dtype) @ w.read_value().astype(dtype or x.dtype)
            return mean_loss((prediction - y) ** 2)

        _, gradient = value_and_grad(loss, w)()
        replica = get_replica_context()
        assert replica is not None
        w.assign_sub(_RATE * replica.all_reduce("SUM", gradient))

    train = wrap(lambda batch: strategy.run(step, args=batch))
    for batch in _batches(strategy):
        train(batch)
    return w.numpy(), _expected()


def _keras(strategy: Any) -> tuple[Any, Any]:
    keras = sys.modules["replicax"].keras
    with strategy.scope():
        dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        model = keras.Sequential([keras.Input((_FEATURES,)), dense])
        model.compile(keras.optimizers.SGD(_RATE), "mse")
    model.fit(*_data(), batch_size=16, epochs=_STEPS, shuffle=False, verbose=0)
    return np.asarray(dense.kernel), _expected()


def _keras_loop(strategy: Any, compiled: Callable[[Any], Any]) -> tuple[Any, Any]:
    keras = sys.modules["replicax"].keras
    with strategy.scope():
        dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        model = keras.Sequential([keras.Input((_FEATURES,)), dense])
        optimizer = keras.optimizers.SGD(_RATE)

    def step(x: Any, y: Any) -> None:
        weights = model.trainable_variables
        loss = lambda: mean_loss((model(x, training=True) - y) ** 2)  # noqa: E731
        optimizer.apply_gradients(zip(value_and_grad(loss, weights)()[1], weights, strict=True))

    train = compiled(lambda batch: strategy.run(step, args=batch))
    for batch in _batches(strategy):
        train(batch)
    return np.asarray(dense.kernel), _expected()


def _nnx(strategy: Any, compiled: Callable[[Any], Any]) -> tuple[Any, Any]:
    import optax  # noqa: PLC0415 - comes with Flax
    from flax import nnx  # noqa: PLC0415

    with strategy.scope():
        model = nnx.Linear(
            _FEATURES, 1, use_bias=False, kernel_init=nnx.initializers.zeros, rngs=nnx.Rngs(0)
        )
        optimizer = nnx.Optimizer(model, optax.sgd(_RATE), wrt=nnx.Param)

    def step(x: Any, y: Any) -> None:
        gradients = nnx.grad(lambda model: mean_loss((model(x) - y) ** 2))(model)
        optimizer.update(model, gradients)

    train = compiled(lambda batch: strategy.run(step, args=batch))
    for batch in _batches(strategy):
        train(batch)
    return np.asarray(model.kernel[...]), _expected()


def _checkpoint(strategy: Any) -> tuple[Any, Any]:
    from replicax._src.train.checkpoint import Checkpoint  # noqa: PLC0415 - needs Orbax

    with strategy.scope():
        saved, restored = Variable(jnp.arange(6.0)), Variable(jnp.zeros(6))
    with tempfile.TemporaryDirectory() as folder:
        path = Checkpoint(w=saved).save(f"{folder}/checkpoint")
        Checkpoint(w=restored).restore(path).assert_consumed()
    return restored.numpy(), np.arange(6.0)
