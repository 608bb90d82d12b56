"""Programs that are right: both checkers accept every line, and infer what is asserted."""

from typing import assert_type

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

import replicax as rx

assert_type(rx.__version__, str)


def a_variable_is_an_array(w: rx.Variable, x: jax.Array) -> None:
    assert_type(rx.Variable(1.0), rx.Variable)
    assert_type(rx.Variable(1.0, trainable=False, name="w", dtype="float32"), rx.Variable)
    assert_type(w.assign_add(1.0), rx.Variable)
    assert_type(w.scatter_add(rx.IndexedSlices(x, x)), rx.Variable)
    assert_type(w.read_value(), jax.Array)
    assert_type(w.device, str)
    assert_type(w * 2, jax.Array)
    assert_type(2 * w, jax.Array)
    assert_type(w @ x, jax.Array)
    assert_type(x @ w, jax.Array)
    assert_type(-w, jax.Array)
    assert_type(w[0], jax.Array)
    assert_type(w.T, jax.Array)
    assert_type(w.sum(axis=0), jax.Array)
    assert_type(w.at[0].set(1), jax.Array)
    assert_type(jnp.sum(w), jax.Array)
    assert_type(jnp.dot(x, w), jax.Array)
    assert_type(float(w), float)
    assert_type(w.numpy(), np.ndarray)
    anywhere: ArrayLike = w
    keys = {w: 1}
    print(np.asarray(w), anywhere, keys[w])


def messages_know_their_fields() -> None:
    feature = rx.train.Feature(int64_list=rx.train.Int64List(value=[1]))
    assert_type(feature.int64_list.value, list[int])
    example = rx.train.Example(features=rx.train.Features(feature={"x": feature}))
    assert_type(example.features.feature["x"], rx.train.Feature)


def options_know_their_fields(options: rx.data.Options) -> None:
    options.deterministic = True
    options.experimental_distribute.auto_shard_policy = rx.data.experimental.AutoShardPolicy.DATA
