"""Trainings that are killed and go on: shuffled, ragged data, dropout, BatchNorm, Adam, metrics.

    exact KIND STRATEGY FOLDER          one run, which goes on where the one before it was
    exact KIND STRATEGY FOLDER KILLS    runs in processes of their own, killed and started again

A run writes one line for each step to a ledger: the step, and all that it has found, bit for bit.
Random numbers of a run that goes on start from other seeds: all that matters is in the checkpoint.
"""

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import replicax as rx

keras = rx.keras
EXAMPLES, BATCH, EPOCHS, EVERY = 37, 8, 3, 2
STEPS = EPOCHS * -(-EXAMPLES // BATCH)
ROWS = np.random.default_rng(0).normal(size=(EXAMPLES, 4)).astype("float32")
TARGETS = (np.arange(EXAMPLES) * 0.1).astype("float32")[:, None]

STRATEGIES = {
    "one": lambda: rx.distribute.OneDeviceStrategy("CPU:0"),
    "mirrored": lambda: rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"]),
    "workers": rx.distribute.MultiWorkerMirroredStrategy,
    "tpu": lambda: rx.distribute.TPUStrategy(_simulated()),
}


def _simulated():
    resolver = rx.distribute.cluster_resolver.TPUClusterResolver(tpu="local")
    rx.config.experimental_connect_to_cluster(resolver)
    rx.tpu.experimental.initialize_tpu_system(resolver)
    return resolver


def bits(x):
    """A hash of the bits of an array."""
    array = np.asarray(x)
    return hashlib.sha256(f"{array.dtype}{array.shape}".encode() + array.tobytes()).hexdigest()[:16]


def examples(indices):
    return jnp.asarray(ROWS)[indices], jnp.asarray(TARGETS)[indices]


def indices():
    """The examples of three files, mixed and shuffled anew in every pass; the last batch is short.

    The shuffle inside of the function has no seed of its own.
    """
    ends = rx.data.Dataset.from_tensor_slices(np.asarray([[0, 13], [13, 20], [20, EXAMPLES]]))
    mixed = ends.interleave(
        lambda e: rx.data.Dataset.range(int(e[0]), int(e[1])).shuffle(5), cycle_length=2
    )
    return mixed.shuffle(16).batch(BATCH).repeat(EPOCHS)


class Ledger:
    """What every step found, on disk before the next one begins."""

    def __init__(self, path):
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def add(self, *found):
        os.write(self._file, (json.dumps(found) + "\n").encode())


def network():
    layers = keras.layers
    return keras.Sequential(
        [
            layers.Input((4,)),
            layers.Dense(8),
            layers.BatchNormalization(),
            layers.Dropout(0.3),
            layers.Dense(1),
        ]
    )


class Order(keras.metrics.Metric):
    """A number that depends on all examples and on their order."""

    def __init__(self):
        super().__init__(name="order")
        self.total = self.add_weight(dtype="int32", initializer="zeros")

    def update_state(self, y, predictions, sample_weight=None):
        ids = jnp.round(y[:, 0] * 10).astype("int32")
        places = jnp.arange(1, ids.shape[0] + 1)
        self.total.assign((self.total.value * 31 + jnp.sum(ids * places)) % 65521)

    def result(self):
        return self.total.value


def fit(strategy, folder, ledger, data):
    """Keras's fit, with its own callback for interruptions."""
    with strategy.scope():
        model = network()
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae", Order()])

    class Written(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.epoch = epoch

        def on_train_batch_end(self, batch, logs=None):
            found = [bits(logs[name]) for name in sorted(logs)]
            ledger.add([self.epoch, batch], *found, bits(model.weights[0]))

    callbacks = [keras.callbacks.BackupAndRestore(folder, save_freq=EVERY), Written()]
    model.fit(**data(), epochs=EPOCHS, verbose=0, callbacks=callbacks)
    return [bits(v) for v in (*model.variables, *model.optimizer.variables)]


def arrays():
    return {"x": ROWS, "y": TARGETS, "batch_size": BATCH}


def dataset():
    one_pass = rx.data.Dataset.from_tensor_slices((ROWS, TARGETS)).shuffle(16).batch(BATCH)
    return {"x": one_pass}


def keras_loop(strategy, folder, ledger):
    """A custom loop with Keras objects."""
    with strategy.scope():
        model, optimizer = network(), keras.optimizers.Adam(0.01)
        error = keras.metrics.MeanSquaredError()

    def step(ids):
        x, y = examples(ids)

        def loss_fn():
            predictions = model(x, training=True)
            errors = jnp.square(predictions - y)[:, 0]
            return rx.nn.compute_average_loss(errors, global_batch_size=BATCH), predictions

        (loss, predictions), grads = rx.value_and_grad(
            loss_fn, model.trainable_variables, has_aux=True
        )()
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        error.update_state(y, predictions)
        return loss

    loop(strategy, folder, ledger, step, {"model": model, "optimizer": optimizer, "error": error})
    return [bits(v) for v in (*model.variables, *optimizer.variables, *error.variables)]


class Net(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.inner = nnx.Linear(4, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, axis_name="replica", rngs=rngs)
        self.drop = nnx.Dropout(0.3, rngs=rngs)
        self.outer = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, x):
        return self.outer(self.drop(nnx.relu(self.norm(self.inner(x)))))


def nnx_loop(strategy, folder, ledger):
    """A custom loop with Flax NNX objects."""
    with strategy.scope():
        model = Net()
        optimizer = nnx.Optimizer(model, optax.adam(0.01), wrt=nnx.Param)
        error = nnx.metrics.Average("errors")

    def step(ids):
        x, y = examples(ids)

        def loss_of(model):
            errors = jnp.square(model(x) - y)[:, 0]
            return rx.nn.compute_average_loss(errors, global_batch_size=BATCH), errors

        (loss, errors), gradients = nnx.value_and_grad(loss_of, has_aux=True)(model)
        optimizer.update(model, gradients)
        error.update(errors=errors)
        return loss

    objects = {"model": model, "optimizer": optimizer, "error": error}
    loop(strategy, folder, ledger, step, objects)
    return [
        bits(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)
        for x in jax.tree.leaves(nnx.state((model, optimizer, error)))
    ]


def loop(strategy, folder, ledger, step, objects):
    iterator = iter(strategy.experimental_distribute_dataset(indices()))
    count = rx.Variable(0)

    @rx.function
    def train(batch):
        count.assign_add(1)
        return strategy.reduce("SUM", strategy.run(step, args=(batch,)), axis=None)

    with rx.train.Resumable(folder, every=EVERY, step=count, data=iterator, **objects) as run:
        for batch in iterator:
            loss = train(batch)
            met = np.concatenate(strategy.experimental_local_results(batch)).tolist()
            ledger.add(int(count), met, bits(loss))
            run.step()


KINDS = {
    "fit on arrays": lambda *where: fit(*where, arrays),
    "fit on a dataset": lambda *where: fit(*where, dataset),
    "Keras loop": keras_loop,
    "NNX loop": nnx_loop,
}


def train(kind, strategy, folder):
    """One run."""
    commits = Path(folder) / "commits"
    goes_on = any(commits.glob("*/checkpoint.json"))
    seed = os.getpid() if goes_on else 1
    rx.random.set_seed(seed)
    keras.utils.set_random_seed(seed)
    me = json.loads(os.environ.get("TF_CONFIG", '{"task": {"index": 0}}'))["task"]["index"]
    ledger = Ledger(Path(folder) / f"ledger{me}")
    ledger.add("go on" if goes_on else "start")
    final = KINDS[kind](STRATEGIES[strategy](), str(commits), ledger)
    ledger.add("final", final)


def in_a_process(kind, strategy, folder, kill):
    """A run in a process of its own, killed some seconds after some step if ``kill`` says so."""
    ledger = Path(folder) / "ledger0"
    before = len(ledger.read_bytes().splitlines()) if ledger.exists() else 0
    child = os.fork()
    if child == 0:
        code = 1
        try:
            train(kind, strategy, folder)
            code = 0
        finally:
            sys.stderr.flush()
            os._exit(code)
    if kill is not None:
        steps, seconds = kill
        while os.waitpid(child, os.WNOHANG) == (0, 0):
            if ledger.exists() and len(ledger.read_bytes().splitlines()) > before + steps:
                time.sleep(seconds)
                os.kill(child, signal.SIGKILL)
                break
            time.sleep(0.002)
        else:
            return
    _, status = os.waitpid(child, 0)
    if kill is None and status:
        raise SystemExit(f"the run ended with {status}")


def main():
    kind, strategy, folder, *kills = sys.argv[1:]
    if not kills:
        train(kind, strategy, folder)
        return
    for kill in (*json.loads(kills[0]), None):
        in_a_process(kind, strategy, folder, kill)


if __name__ == "__main__":
    main()
