"""Sharded variables of stacked layers: gathered layer by layer, with the numbers of one device."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax import lax

import replicax as rx
from tests.replicas import context, eagerly, mirrored, per_replica

LAYERS, WIDTH, HIDDEN, ROWS, COUNT = 4, 96, 128, 8, 4  # every variable is above 16 KiB
COLLECTIVE = re.compile(r"= \(?(\w+)\[([\d,]*)\]\S* (all-reduce|reduce-scatter|all-gather)\(")


class Model:
    """Layers with stacked weights, in one of many ways to write them, and momentum."""

    def __init__(self, strategy, **how):
        self.strategy, self.how = strategy, how
        rng = np.random.default_rng(0)
        shapes = [(LAYERS, WIDTH, HIDDEN), (LAYERS, HIDDEN, WIDTH), (WIDTH, WIDTH)]
        values = [rng.normal(size=s).astype("f4") / s[-2] ** 0.5 for s in shapes]
        with strategy.scope():
            self.weights = [rx.Variable(v) for v in values]
            self.slots = [rx.Variable(np.zeros_like(v)) for v in values]
        self.call = rx.function(lambda x: strategy.run(self.step, (x,)))

    def layer(self, x, one):
        up, down, *shared = (w.astype(self.how["dtype"]) for w in one)
        x = x.astype(self.how["dtype"])
        hidden = jnp.tanh(x @ up)
        if self.how["cond"]:
            hidden = lax.cond(up.sum() > 0, lambda: hidden @ down, lambda: -(hidden @ down))
        else:
            hidden = hidden @ down
        for w in shared:
            hidden = hidden @ w
        return (x + hidden).astype(jnp.float32)

    def loss(self, weights, x):
        *stacks, last = weights
        if self.how["cast"]:
            stacks = [s.astype(self.how["dtype"]) for s in stacks]
        layer = jax.checkpoint(self.layer) if self.how["remat"] else self.layer
        shared = [last] if self.how["shared"] else []
        over = lambda x, one: (layer(x, [*one, *shared]), None)  # noqa: E731
        match self.how["loop"]:
            case "scan":
                x, _ = lax.scan(over, x, tuple(stacks), reverse=self.how["reverse"])
            case "nested":
                pairs = tuple(s.reshape(2, LAYERS // 2, *s.shape[1:]) for s in stacks)
                x, _ = lax.scan(lambda x, two: lax.scan(over, x, two), x, pairs)
            case "twice":
                x, _ = lax.scan(lambda x, _: lax.scan(over, x, tuple(stacks)), x, None, length=2)
            case "unrolled":
                for i in range(LAYERS):
                    x, _ = over(x, [s[i] for s in stacks])
        return jnp.mean(jnp.square(x @ last))

    def step(self, x):
        value, gradients = rx.value_and_grad(
            lambda: self.loss([w.read_value() for w in self.weights], x), self.weights
        )()
        gradients = context().all_reduce("MEAN", gradients)
        for w, m, g in zip(self.weights, self.slots, gradients, strict=True):
            m.assign(0.9 * m + g)
            w.assign_sub(0.1 * m)
        return value

    def batch(self, step=0):
        count = self.strategy.num_replicas_in_sync
        rows = np.random.default_rng(step).normal(size=(count, ROWS // count, WIDTH))
        return per_replica(self.strategy, rows.astype("f4"))

    def train(self, steps=2):
        losses = [self.call(self.batch(i)) for i in range(steps)]
        return [float(self.strategy.reduce("MEAN", x, axis=None)) for x in losses]

    def collectives(self):
        """Return (kind, dtype, shape of the result) of each collective in the program."""
        text = self.call.get_concrete_function(self.batch()).as_text()
        return sorted((kind, dtype, shape) for dtype, shape, kind in COLLECTIVE.findall(text))

    def lowered_types(self):
        """Return the dtypes of the results of the collectives in the program, before XLA."""
        concrete = self.call.get_concrete_function(self.batch())
        text = concrete._program.lowered(concrete._arguments.arrays).as_text()
        found = {"all_gather": [], "reduce_scatter": []}
        kind = ""
        for line in text.splitlines():  # a reduce-scatter has its reduction in a region below it
            kind = next((k for k in found if f"stablehlo.{k}" in line), kind)
            if kind and (result := re.search(r"-> tensor<[\dx]*?(b?f\d+)>", line)):
                found[kind].append(result[1])
                kind = ""
        return {k: sorted(v) for k, v in found.items()}


PLAIN = dict(  # noqa: C408
    loop="scan", remat=False, cast=False, cond=False, shared=False, reverse=False, dtype="float32"
)
HOW = st.fixed_dictionaries(
    {
        "loop": st.sampled_from(["scan", "nested", "twice", "unrolled"]),
        "remat": st.booleans(),
        "cast": st.booleans(),
        "cond": st.booleans(),
        "shared": st.booleans(),
        "reverse": st.booleans(),
        "dtype": st.sampled_from(["float32", "bfloat16"]),
    }
)


@settings(max_examples=3, deadline=None)
@given(HOW)
@example(PLAIN | {"remat": True, "dtype": "bfloat16"})
@example(PLAIN | {"loop": "twice", "remat": True, "shared": True, "cond": True})
def test_layers_give_the_numbers_of_one_device(how):
    parts = Model(mirrored(COUNT, variable_policy="sharded"), **how)
    alone = Model(mirrored(1), **how)
    # In bfloat16 the rows of a batch are summed in other orders.
    tolerance = 1e-5 if how["dtype"] == "float32" else 2e-2

    assert parts.train() == pytest.approx(alone.train(), rel=tolerance)

    for a, b in zip((*parts.weights, *parts.slots), (*alone.weights, *alone.slots), strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=tolerance, atol=tolerance)


@settings(max_examples=1, deadline=None)
@given(HOW)
def test_compiled_layers_equal_eager_ones(how):
    compiled, plain = (Model(mirrored(2, variable_policy="sharded"), **how) for _ in range(2))
    tolerance = 1e-5 if how["dtype"] == "float32" else 2e-2

    compiled.call(compiled.batch())
    eagerly(plain.strategy, plain.step, plain.batch())

    for a, b in zip(compiled.weights, plain.weights, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("remat", [False, True])
def test_each_iteration_gathers_and_scatters_its_layer(remat):
    model = Model(mirrored(COUNT, variable_policy="sharded"), **PLAIN | {"remat": remat})

    found = model.collectives()

    # Forwards and backwards, a layer each; the last weight once. A part of each gradient.
    up, down, last = "96,128", "128,96", "96,96"
    assert [s for k, _, s in found if k == "all-gather"] == sorted([up, up, down, down, last])
    assert [s for k, _, s in found if k == "reduce-scatter"] == sorted(["24,128", "32,96", "24,96"])


@pytest.mark.parametrize("cast", [False, True])
def test_weights_are_gathered_in_the_type_of_the_computation(cast):
    how = PLAIN | {"dtype": "bfloat16", "cast": cast}
    model = Model(mirrored(COUNT, variable_policy="sharded"), **how)

    found = model.lowered_types()

    assert found["all_gather"] == ["bf16"] * 4 + ["f32"]
    assert found["reduce_scatter"] == ["f32"] * 3


def test_gradients_are_summed_in_the_type_that_is_asked_for():
    strategy = mirrored(COUNT, variable_policy="sharded", reduce_dtype="bfloat16")
    model, plain = Model(strategy, **PLAIN), Model(mirrored(COUNT), **PLAIN)

    assert model.lowered_types()["reduce_scatter"] == ["bf16"] * 3
    assert model.train() == pytest.approx(plain.train(), rel=1e-2)


@pytest.mark.parametrize(
    ("policy", "dtype", "message"),
    [
        ("mirrored", "bfloat16", "gradients of sharded variables"),
        ("sharded", "int32", "floating-point type such as 'bfloat16', got 'int32'"),
        ("sharded", "half a float", "got 'half a float'"),
    ],
)
def test_other_reduce_types_are_refused(policy, dtype, message):
    with pytest.raises(ValueError, match=message):
        mirrored(2, variable_policy=policy, reduce_dtype=dtype)


def _summed(strategy, size):
    rows = np.ones((strategy.num_replicas_in_sync, size), "f4")
    return lambda: strategy.run(
        lambda x: context().all_reduce("SUM", x), (per_replica(strategy, rows),)
    )


def test_eager_replicas_refuse_sums_that_compiled_steps_would_round():
    strategy = mirrored(2, variable_policy="sharded", reduce_dtype="bfloat16")

    with pytest.raises(RuntimeError, match=r"shape \(8192,\) and type float32.*rx.function"):
        _summed(strategy, 8192)()

    small = _summed(strategy, 16)()
    assert strategy.experimental_local_results(small)[0].dtype == "float32"
    assert rx.function(_summed(strategy, 8192))() is not None


def test_reduce_dtype_is_refused_where_gradients_are_summed_in_another_way():
    sharded = {"variable_policy": "sharded", "reduce_dtype": "bfloat16"}
    with pytest.raises(ValueError, match="Leave out one of the two"):
        mirrored(2, cross_device_ops=rx.distribute.NcclAllReduce(num_packs=2), **sharded)
    strategy = mirrored(2, **sharded)
    packed = rx.distribute.experimental.CommunicationOptions(bytes_per_pack=1 << 20)
    with pytest.raises(ValueError, match="bytes_per_pack=1048576"):
        strategy.run(lambda: context().all_reduce("SUM", jnp.ones(3), packed))
