"""The networks in JAX: what our workers and the hand-written ones share."""

import jax
import jax.numpy as jnp

from benchmarks._workers import networks


def mlp_loss(weights, x, y):
    for i in range(0, len(weights), 2):
        x = x @ weights[i] + weights[i + 1]
        x = jax.nn.relu(x) if i < len(weights) - 2 else x
    return cross_entropy(x, y)


def cnn_loss(weights, x, y):
    for kernel in weights[:2]:
        places = ("NHWC", "HWIO", "NHWC")
        x = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=places)
        window = (1, 2, 2, 1)
        x = jax.lax.reduce_window(jax.nn.relu(x), -jnp.inf, jax.lax.max, window, window, "VALID")
    return cross_entropy(x.reshape(len(x), -1) @ weights[2] + weights[3], y)


def transformer_loss(weights, tokens, following):
    embedding, positions, *blocks, out = weights
    n, t = tokens.shape
    heads, each = networks.HEADS, networks.WIDTH // networks.HEADS
    hidden = (embedding[tokens] + positions).reshape(n * t, -1)
    mask = jnp.tril(jnp.ones((t, t), bool))
    for i in range(0, len(blocks), 4):
        to_qkv, to_hidden, up, down = blocks[i : i + 4]
        qkv = (normalised(hidden) @ to_qkv).reshape(n, t, 3, heads, each)
        q, k, v = (qkv[:, :, j].transpose(0, 2, 1, 3) for j in range(3))
        scores = jnp.where(mask, q @ k.swapaxes(2, 3) / each**0.5, -1e9)
        mixed = (jax.nn.softmax(scores) @ v).transpose(0, 2, 1, 3).reshape(n * t, -1)
        hidden += mixed @ to_hidden
        hidden += jax.nn.relu(normalised(hidden) @ up) @ down
    return cross_entropy(normalised(hidden) @ out, following.reshape(-1))


def normalised(x):
    x -= x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5)


def cross_entropy(logits, labels):
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1))


LOSSES = {"MLP": mlp_loss, "CNN": cnn_loss, "transformer": transformer_loss}
