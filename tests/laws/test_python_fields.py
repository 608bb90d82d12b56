"""Python values in the objects that a step takes and returns, such as an Equinox module's sizes.

A step may run eagerly, compiled, or one of both inside the other, and on short batches; what comes
back is used for the next step. A field that the step does not change must stay what it was, and one
that it changes must not make every step another program.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import equinox as eqx
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx
from tests.replicas import context


class Inner(eqx.Module):
    rate: float
    off: bool
    act: Callable = jnp.tanh


class Model(eqx.Module):
    hidden: int
    scale: complex
    name: str
    nothing: None
    parts: list
    sizes: dict
    weight: jax.Array

    def __call__(self, x):
        hidden = jnp.zeros(self.hidden)  # a shape: only a Python number will do
        for part in self.parts:
            if not part.off:
                hidden = part.act(hidden + part.rate)
        return x * self.weight.sum() + hidden.sum() + self.sizes["k"][0]


def model():
    parts = [Inner(0.5, False), Inner(0.25, True, jnp.sin)]
    return Model(3, 2j, "n", None, parts, {"k": (7, 1.5)}, jnp.ones(2))


def statics(tree):
    return [
        (type(x), x) for x in jax.tree.leaves(tree, is_leaf=lambda x: x is None) if not is_array(x)
    ]


def is_array(x):
    return isinstance(x, jax.Array | np.ndarray | rx.distribute.DistributedValues)


def replica_step(model, x):
    return eqx.tree_at(lambda m: m.weight, model, model.weight + 1 + 0 * model(jnp.sum(x))), x


def merged(model, x):
    # No array reaches merge_fn: of those it sees all replicas' values.
    sizes = context().merge_call(lambda _, *sizes: sizes, args=(model.hidden, model.sizes["k"]))
    assert sizes == (model.hidden, model.sizes["k"])
    return replica_step(model, x)


def branch(model, x):
    weight = rx.cond(jnp.sum(x) >= 0, lambda: model(x[:1]).sum(), lambda: jnp.float32(0))
    weight, _ = rx.scan(lambda c, _: (c + model.hidden, None), weight, length=2)
    return eqx.tree_at(lambda m: m.weight, model, model.weight + 0 * weight), x


WAYS = {
    "function": lambda two, fn: rx.function(fn),
    "method of run": lambda two, fn: lambda *a: two.run(fn, args=a),
    "run in function": lambda two, fn: rx.function(lambda *a: two.run(fn, args=a)),
    "function in run": lambda two, fn: partial(lambda f, *a: two.run(f, args=a), rx.function(fn)),
}


@pytest.mark.parametrize("fn", [replica_step, merged, branch])
@pytest.mark.parametrize("way", WAYS)
def test_fields_come_back_as_they_were(two, way, fn):
    if way == "function" and fn is merged:
        pytest.skip("merge_call needs replicas")
    step, before = WAYS[way](two, fn), model()
    x = np.ones(4, "float32")
    after, _ = step(before, x)
    for _ in range(2):
        after, _ = step(after, x)
    assert statics(after) == statics(before)


@pytest.mark.parametrize("rows", [8, 7])
def test_fields_pass_short_batches(two, rows):
    dataset = rx.data.Dataset.from_tensor_slices(np.ones(rows, "float32")).batch(rows)
    (batch,) = two.experimental_distribute_dataset(dataset)
    step = rx.function(lambda m, x: two.run(replica_step, args=(m, x))[0])
    after = step(step(model(), batch), batch)
    assert statics(after) == statics(model())


def test_fields_of_a_new_object_stay_numbers():
    made = rx.function(lambda key: (eqx.nn.Dropout(0.5), Inner(0.5, False)))(jax.random.key(0))
    assert statics(made) == statics((eqx.nn.Dropout(0.5), Inner(0.5, False)))


def test_a_mode_that_a_step_sets_is_a_python_value():
    after = rx.function(eqx.nn.inference_mode)(eqx.nn.Dropout(0.5))
    assert after.inference is True
    assert jnp.all(after(jnp.ones(3)) == 1)


@flax.struct.dataclass
class Registered:
    step: int
    w: jax.Array


@dataclass
class Record:
    step: int
    w: jax.Array


class Pair(NamedTuple):
    step: int
    w: jax.Array


@pytest.mark.parametrize("kind", [Registered, Pair])
def test_a_counter_does_not_make_every_step_another_program(two, kind):
    count_up = lambda s: kind(s.step + 1, s.w * 2)  # noqa: E731
    step = rx.function(lambda state: two.run(count_up, args=(state,)))
    state, counts = kind(0, jnp.ones(2)), []
    for _ in range(6):
        state = step(state)
        counts.append(step.experimental_get_tracing_count())
    assert int(state.step) == 6
    assert counts[2] == counts[5]


def test_a_dataclass_that_jax_does_not_know_keeps_its_fields(two):
    made = rx.function(lambda x: two.run(lambda x: Record(3, x * 2), args=(x,)))(jnp.ones(2))
    assert type(made.step) is int


@pytest.mark.parametrize("number", [3, 0.5, True, 1j])
@pytest.mark.parametrize("put", [lambda n: n, lambda n: [n], lambda n: {"a": (n,)}], ids="n[{")
def test_numbers_in_structures_of_tensorflow_become_arrays(number, put):
    (seen,) = jax.tree.leaves(rx.function(put)(number))
    assert isinstance(seen, jax.Array)
