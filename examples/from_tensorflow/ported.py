"""A program for TensorFlow: a custom training loop on two devices, with a tape and a checkpoint."""

import argparse
import os
import tempfile

import numpy as np
import jax.numpy as jnp
import replicax as rx

BATCH = 64


def make_dataset():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1024, 8)).astype(np.float32)
    y = np.sin(x.sum(axis=1, keepdims=True))

    def noisy(row, target):
        return np.concatenate([row, np.square(row[:2])], axis=0), np.asarray(target, np.float32)

    return rx.data.Dataset.from_tensor_slices((x, y)).map(noisy).repeat().batch(BATCH)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--logs", default=tempfile.mkdtemp())
    options = parser.parse_args()

    cpus = rx.config.list_physical_devices("CPU")
    rx.config.set_logical_device_configuration(
        cpus[0], [rx.config.LogicalDeviceConfiguration()] * 2
    )
    strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        model = rx.keras.Sequential(
            [
                rx.keras.Input((10,)),
                rx.keras.layers.Dense(32, activation=jnp.tanh),
                rx.keras.layers.Dense(1),
            ]
        )
        optimizer = rx.keras.optimizers.Adam(0.01)
        optimizer.build(model.trainable_variables)
        mean_error = rx.keras.metrics.Mean()
    checkpoint = rx.train.Checkpoint(model=model, optimizer=optimizer)

    def replica_step(x, y):
        with rx.GradientTape() as tape:
            error = jnp.squeeze(model(x, training=True) - y, axis=1)
            loss = rx.nn.compute_average_loss(jnp.square(error), global_batch_size=BATCH)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        mean_error.update_state(jnp.mean(jnp.abs(0.5 * error)))
        return loss

    @rx.function
    def train_step(batch):
        losses = strategy.run(replica_step, args=batch)
        return strategy.reduce(rx.distribute.ReduceOp.SUM, losses, axis=None)

    batches = iter(strategy.experimental_distribute_dataset(make_dataset()))
    writer = rx.summary.create_file_writer(options.logs)
    with writer.as_default():
        for step in range(options.steps):
            loss = train_step(next(batches))
            if step % 20 == 0 or step == options.steps - 1:
                rx.summary.scalar("loss", loss, step=step)
                print(f"step {step}: loss {np.array(loss):.4f}, error {mean_error.result():.4f}")
    path = checkpoint.save(os.path.join(options.logs, "model"))
    print(f"saved as {path}")


if __name__ == "__main__":
    main()
