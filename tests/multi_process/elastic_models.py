"""A training of a library whose workers die: LIBRARY FOLDER STEPS [RANK@POINT@COUNT ...].

LIBRARY is ``keras`` (`fit` with `BackupAndRestore`, in epochs of 6 steps) or ``nnx`` (a loop with
`Resumable`). A worker is killed at the given point of the library, or with ``step`` before it takes
a step; a worker that joins again is not. With ``STOP_AFTER`` in the environment, the run saves
after that step and ends; with ``WAIT_FOR``, steps are slow while there are fewer replicas than
that; with ``PACE``, each takes so many seconds longer. A line for each step goes to the worker's
ledger: the step, the number of replicas, and the bits of the weights.
"""

import json
import os
import sys
import time

BATCH, EPOCH = 12, 6


def main(*arguments):
    library, folder, steps, *plan = arguments
    dies_before = set()
    for who, point, number in (item.split("@") for item in plan):
        is_first = os.environ["REPLICAX_RESTART"] == "0" and "REPLICAX_JOIN" not in os.environ
        if who == os.environ["RANK"] and is_first:
            if point == "step":
                dies_before.add(int(number))
            else:
                os.environ["REPLICAX_FAULT"] = f"{point}:kill@{number}"
    os.environ["KERAS_BACKEND"] = "jax"

    # The fault is read when replicax is imported.
    import numpy as np  # noqa: PLC0415

    import replicax as rx  # noqa: PLC0415

    strategy = rx.distribute.MultiWorkerMirroredStrategy()
    sizes = []
    strategy.on_resize(lambda s: sizes.append(s.num_replicas_in_sync))
    rows = np.random.default_rng(0).normal(size=(BATCH * EPOCH, 4)).astype("float32")
    # No line through these points: the weights always show which batch came last.
    data = rx.data.Dataset.from_tensor_slices((rows, np.sin(3 * rows).sum(1, keepdims=True)))
    data = data.shuffle(30, seed=7).batch(BATCH)

    def begin(step):
        if step in dies_before:
            os.kill(os.getpid(), 9)

    def end(step, weights):
        line = [step, strategy.num_replicas_in_sync, [w.tobytes().hex() for w in weights]]
        name = f"{os.environ['RANK']}.{os.environ['REPLICAX_RESTART']}"
        with open(f"{folder}/ledger{name}", "a") as file:
            file.write(json.dumps(line) + "\n")
        time.sleep(float(os.environ.get("PACE", "0")))
        if strategy.num_replicas_in_sync < int(os.environ.get("WAIT_FOR", "0")):
            time.sleep(1.0)

    train = {"keras": _train_keras, "nnx": _train_nnx}[library]
    said = train(rx, strategy, data, folder, int(steps), begin, end)
    sys.stdout.write(f"sizes {sizes} chief {strategy.is_chief} {said}\n")


def _train_keras(rx, strategy, data, folder, steps, begin, end):
    import keras  # noqa: PLC0415

    last = int(os.environ.get("STOP_AFTER", steps))
    with strategy.scope():
        kernel = keras.initializers.Constant(0.5)
        model = keras.Sequential(
            [keras.Input((4,)), keras.layers.Dense(1, kernel_initializer=kernel)]
        )
        model.compile(keras.optimizers.SGD(0.02, momentum=0.9), "mse", metrics=["mae"])

    class Ledger(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            begin(int(model.optimizer.iterations.numpy()) + 1)

        def on_train_batch_end(self, batch, logs=None):
            step = int(model.optimizer.iterations.numpy())
            end(step, model.get_weights())
            if step == last and "STOP_AFTER" in os.environ:
                sys.exit(0)

    backup = keras.callbacks.BackupAndRestore(
        f"{folder}/backup", save_freq=1, delete_checkpoint=False
    )
    held = [*model.variables, *model.optimizer.variables]
    history = model.fit(
        data, epochs=steps // EPOCH, callbacks=[backup, Ledger()], verbose=0
    ).history
    known = {id(v) for v in (*model.variables, *model.optimizer.variables)}
    assert all(id(v) in known for v in held)  # what a program holds stays the same objects
    return json.dumps({name: values[-1] for name, values in history.items()})


def _train_nnx(rx, strategy, data, folder, steps, begin, end):
    import jax.numpy as jnp  # noqa: PLC0415
    import numpy as np  # noqa: PLC0415
    import optax  # noqa: PLC0415
    from flax import nnx  # noqa: PLC0415

    last = int(os.environ.get("STOP_AFTER", steps))
    with strategy.scope():
        model = nnx.Linear(4, 1, rngs=nnx.Rngs(0))
        model.kernel[...] = jnp.full((4, 1), 0.5)
        optimizer = nnx.Optimizer(model, optax.sgd(0.02, momentum=0.9), wrt=nnx.Param)
        metric = nnx.metrics.Average()
    batches = iter(strategy.experimental_distribute_dataset(data.repeat()))
    held = [model.kernel, optimizer.step, batches]

    def replica_step(x, y):
        def loss_fn(model):
            errors = jnp.square(model(x) - y).mean(-1)
            return rx.nn.compute_average_loss(errors, global_batch_size=BATCH)

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        metric.update(values=loss)
        return loss

    @rx.function
    def train(batch):
        return strategy.reduce("SUM", strategy.run(replica_step, args=batch), axis=None)

    state = {"model": model, "optimizer": optimizer, "metric": metric, "data": batches}
    with rx.train.Resumable(f"{folder}/commits", every=2, **state) as run:
        while int(optimizer.step[...]) < last:
            begin(int(optimizer.step[...]) + 1)
            train(next(batches))
            weights = [np.asarray(model.kernel[...]), np.asarray(model.bias[...])]
            end(int(optimizer.step[...]), weights)
            run.step()
        if "STOP_AFTER" in os.environ:
            run.commit()
    assert held[0] is model.kernel
    assert held[1] is optimizer.step
    return json.dumps({"loss": float(metric.compute())})


if __name__ == "__main__":
    main(*sys.argv[1:])
