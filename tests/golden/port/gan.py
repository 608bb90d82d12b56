"""A generative adversarial network: two models, two optimizers and two losses in one step."""

import json

import numpy as np
import tensorflow as tf
from tensorflow.keras import layers

GLOBAL_BATCH, NOISE = 8, 4


def make_generator():
    model = tf.keras.Sequential()
    model.add(tf.keras.Input((NOISE,)))
    model.add(layers.Dense(2 * 2 * 4, use_bias=False))
    model.add(layers.LeakyReLU(negative_slope=0.2))
    model.add(layers.Reshape((2, 2, 4)))
    model.add(layers.Conv2DTranspose(1, 3, strides=2, padding="same", activation="tanh"))
    return model


def make_discriminator():
    return tf.keras.Sequential(
        [
            tf.keras.Input((4, 4, 1)),
            layers.Conv2D(4, 3, strides=2, padding="same"),
            layers.LeakyReLU(negative_slope=0.2),
            layers.Flatten(),
            layers.Dense(1),
        ]
    )


def main(directory):
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    rng = np.random.default_rng(11)
    images = np.tanh(rng.normal(size=(24, 4, 4, 1))).astype("float32")
    noise = rng.normal(size=(24, NOISE)).astype("float32")
    dataset = tf.data.Dataset.from_tensor_slices((images, noise)).batch(GLOBAL_BATCH)
    dataset = strategy.experimental_distribute_dataset(dataset.repeat(2))

    with strategy.scope():
        cross_entropy = tf.keras.losses.BinaryCrossentropy(from_logits=True, reduction="none")
        generator, discriminator = make_generator(), make_discriminator()
        for model in (generator, discriminator):
            model.set_weights([0.3 * rng.normal(size=w.shape) for w in model.get_weights()])
        generator_optimizer = tf.keras.optimizers.Adam(1e-2, beta_1=0.5)
        discriminator_optimizer = tf.keras.optimizers.Adam(1e-2, beta_1=0.5)
        generator_optimizer.build(generator.trainable_variables)
        discriminator_optimizer.build(discriminator.trainable_variables)

    def average(losses):
        return tf.nn.compute_average_loss(losses, global_batch_size=GLOBAL_BATCH)

    def discriminator_loss(real_output, fake_output):
        real_loss = cross_entropy(tf.ones_like(real_output), real_output)
        fake_loss = cross_entropy(tf.zeros_like(fake_output), fake_output)
        return average(real_loss + fake_loss)

    def generator_loss(fake_output):
        return average(cross_entropy(tf.ones_like(fake_output), fake_output))

    def train_step(inputs):
        real, seeds = inputs
        with tf.GradientTape() as gen_tape, tf.GradientTape() as disc_tape:
            generated = generator(seeds, training=True)
            real_output = discriminator(real, training=True)
            fake_output = discriminator(generated, training=True)
            gen_loss = generator_loss(fake_output)
            disc_loss = discriminator_loss(real_output, fake_output)
        gen_gradients = gen_tape.gradient(gen_loss, generator.trainable_variables)
        disc_gradients = disc_tape.gradient(disc_loss, discriminator.trainable_variables)
        generator_optimizer.apply_gradients(zip(gen_gradients, generator.trainable_variables))
        discriminator_optimizer.apply_gradients(
            zip(disc_gradients, discriminator.trainable_variables)
        )
        return gen_loss, disc_loss

    @tf.function
    def distributed_train_step(inputs):
        gen_loss, disc_loss = strategy.run(train_step, args=(inputs,))
        return (
            strategy.reduce(tf.distribute.ReduceOp.SUM, gen_loss, axis=None),
            strategy.reduce(tf.distribute.ReduceOp.SUM, disc_loss, axis=None),
        )

    losses = []
    for batch in dataset:
        gen_loss, disc_loss = distributed_train_step(batch)
        losses.append([gen_loss.numpy().item(), disc_loss.numpy().item()])
    sample = generator(tf.constant(noise[:2]), training=False)
    return {"losses": losses, "sample": float(tf.reduce_sum(tf.abs(sample)))}


if __name__ == "__main__":
    print(json.dumps(main(".")))
