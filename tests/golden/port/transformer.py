"""A transformer for sequences: custom layers, masks and a schedule with a warmup."""

import json

import numpy as np
import tensorflow as tf

VOCABULARY, LENGTH, WIDTH, BATCH = 12, 6, 8, 8


def positional_encoding(length, depth):
    positions = np.arange(length)[:, np.newaxis]
    depths = np.arange(depth // 2)[np.newaxis, :] / (depth // 2)
    angles = positions / 10000**depths
    return tf.cast(np.concatenate([np.sin(angles), np.cos(angles)], axis=-1), tf.float32)


def scaled_dot_product_attention(q, k, v, mask):
    matmul_qk = tf.matmul(q, k, transpose_b=True)
    dk = tf.cast(tf.shape(k)[-1], tf.float32)
    logits = matmul_qk / tf.math.sqrt(dk)
    if mask is not None:
        logits += mask * -1e9
    return tf.matmul(tf.nn.softmax(logits, axis=-1), v)


def create_look_ahead_mask(size):
    return 1 - tf.linalg.band_part(tf.ones((size, size)), -1, 0)


class Attention(tf.keras.layers.Layer):
    def __init__(self, width, heads):
        super().__init__()
        self.supports_masking = True
        self.heads, self.depth = heads, width // heads
        self.wq = tf.keras.layers.Dense(width)
        self.wk = tf.keras.layers.Dense(width)
        self.wv = tf.keras.layers.Dense(width)
        self.dense = tf.keras.layers.Dense(width)

    def split_heads(self, x):
        x = tf.reshape(x, (tf.shape(x)[0], -1, self.heads, self.depth))
        return tf.transpose(x, perm=[0, 2, 1, 3])

    def call(self, x, mask=None):
        batch_size = tf.shape(x)[0]
        q, k, v = (self.split_heads(layer(x)) for layer in (self.wq, self.wk, self.wv))
        attended = tf.transpose(scaled_dot_product_attention(q, k, v, mask), perm=[0, 2, 1, 3])
        return self.dense(tf.reshape(attended, (batch_size, -1, self.heads * self.depth)))


class Decoder(tf.keras.Model):
    def __init__(self):
        super().__init__()
        self.embedding = tf.keras.layers.Embedding(VOCABULARY, WIDTH)
        self.encoding = positional_encoding(LENGTH, WIDTH)
        self.attention = Attention(WIDTH, 2)
        self.norm = tf.keras.layers.LayerNormalization(epsilon=1e-6)
        self.out = tf.keras.layers.Dense(VOCABULARY)

    def call(self, tokens, training=False):
        x = self.embedding(tokens) * tf.math.sqrt(tf.cast(WIDTH, tf.float32))
        x += self.encoding[tf.newaxis, : tf.shape(tokens)[1], :]
        padding = tf.cast(tf.math.equal(tokens, 0), tf.float32)[:, tf.newaxis, tf.newaxis, :]
        mask = tf.maximum(padding, create_look_ahead_mask(tf.shape(tokens)[1]))
        return self.out(self.norm(x + self.attention(x, mask=mask)))


class CustomSchedule(tf.keras.optimizers.schedules.LearningRateSchedule):
    def __init__(self, d_model, warmup_steps=4):
        super().__init__()
        self.d_model = tf.cast(d_model, tf.float32)
        self.warmup_steps = warmup_steps

    def __call__(self, step):
        step = tf.cast(step, tf.float32) + 1.0
        arg1 = tf.math.rsqrt(step)
        arg2 = step * (self.warmup_steps**-1.5)
        return 0.1 * tf.math.rsqrt(self.d_model) * tf.math.minimum(arg1, arg2)


def main(directory):
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    rng = np.random.default_rng(29)
    tokens = rng.integers(1, VOCABULARY, size=(32, LENGTH + 1)).astype("int32")
    tokens[::3, -2:] = 0
    dataset = tf.data.Dataset.from_tensor_slices(tokens)
    dataset = dataset.map(lambda row: (row[:-1], row[1:]), num_parallel_calls=tf.data.AUTOTUNE)
    dataset = dataset.batch(BATCH, drop_remainder=True).prefetch(tf.data.AUTOTUNE)

    with strategy.scope():
        model = Decoder()
        model(tf.ones((1, LENGTH), tf.int32))
        model.set_weights([0.4 * rng.normal(size=w.shape) for w in model.get_weights()])
        optimizer = tf.keras.optimizers.Adam(
            CustomSchedule(WIDTH), beta_1=0.9, beta_2=0.98, epsilon=1e-9
        )
        optimizer.build(model.trainable_variables)
        loss_object = tf.keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, reduction="none"
        )
        train_loss = tf.keras.metrics.Mean(name="train_loss")

    def loss_function(real, pred):
        mask = tf.math.logical_not(tf.math.equal(real, 0))
        losses = loss_object(real, pred)
        losses *= tf.cast(mask, losses.dtype)
        per_example = tf.reduce_sum(losses, axis=-1) / tf.cast(tf.shape(real)[1], tf.float32)
        return tf.nn.compute_average_loss(per_example, global_batch_size=BATCH)

    def step_fn(inputs):
        inp, tar = inputs
        with tf.GradientTape() as tape:
            loss = loss_function(tar, model(inp, training=True))
        variables = model.trainable_variables
        # Keras on TensorFlow squares the slices of a sparse gradient one by one.
        gradients = [tf.convert_to_tensor(g) for g in tape.gradient(loss, variables)]
        optimizer.apply_gradients(zip(gradients, variables))
        train_loss(loss)
        return loss

    @tf.function
    def train_step(inputs):
        return strategy.reduce(
            tf.distribute.ReduceOp.SUM, strategy.run(step_fn, args=(inputs,)), axis=None
        )

    dataset = strategy.experimental_distribute_dataset(dataset)
    losses = [float(train_step(batch)) for _ in range(2) for batch in dataset]
    predicted = tf.argmax(model(tf.constant(tokens[:2, :-1])), axis=-1)
    return {
        "losses": losses,
        "mean": float(train_loss.result()),
        "predicted": np.asarray(predicted).tolist(),
    }


if __name__ == "__main__":
    print(json.dumps(main(".")))
