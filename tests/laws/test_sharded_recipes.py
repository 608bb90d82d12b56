"""Optimizer recipes on sharded variables: collectives of a step, and the numbers of copies."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import replicax as rx
from tests.replicas import context, mirrored, per_replica

SHAPES = [(256, 64), (67, 101), (8, 64, 64)]  # by rows, flat and padded, a stack
COLLECTIVE = re.compile(r"= (.*) (all-reduce|reduce-scatter|all-gather)(?:-start)?\(")
# By the names in the table of docs/sharding.md.
RECIPES = {
    "Adam": lambda: optax.adam(1e-2),
    "clip by global norm, Adam": lambda: optax.chain(
        optax.clip_by_global_norm(0.1), optax.adam(1e-2)
    ),
    "clip by value, SGD": lambda: optax.chain(optax.clip(1e-3), optax.sgd(1e-2)),
    "LAMB": lambda: optax.lamb(1e-2),
    "LARS": lambda: optax.lars(1e-2),
    "AdamW with a mask for the decay": lambda: optax.adamw(
        1e-2, mask=lambda ws: [w.ndim > 2 for w in ws]
    ),
    "Adam, skipped unless all gradients are finite": lambda: _finite_only(optax.adam(1e-2)),
    "`optax.apply_if_finite`": lambda: optax.apply_if_finite(optax.adam(1e-2), 3),
    "Adam, EMA of updates": lambda: optax.chain(optax.adam(1e-2), optax.ema(0.9)),
    "`optax.MultiSteps` of clip by global norm, Adam": lambda: optax.MultiSteps(
        optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2)), 2
    ).gradient_transformation(),
    "`optax.inject_hyperparams` of Adam": lambda: optax.inject_hyperparams(optax.adam)(
        learning_rate=1e-2
    ),
    "Adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=32),
    "adaptive gradient clipping, SGD": lambda: optax.chain(
        optax.adaptive_grad_clip(0.01), optax.sgd(1e-2)
    ),
}
KERAS_RECIPES = {
    "Keras, Adam": lambda o: o.Adam(1e-2),
    "Keras, `global_clipnorm`": lambda o: o.Adam(1e-2, global_clipnorm=0.1),
    "Keras, `clipnorm`": lambda o: o.SGD(1e-2, momentum=0.9, clipnorm=0.1),
    "Keras, AdamW, `use_ema`": lambda o: o.AdamW(1e-2, use_ema=True, ema_momentum=0.9),
    "Keras, `gradient_accumulation_steps`": lambda o: o.Adam(1e-2, gradient_accumulation_steps=2),
    "Keras, `LossScaleOptimizer`": lambda o: o.LossScaleOptimizer(o.Adam(1e-2), 2.0**10),
}
# Norms of rows and columns of the array that is stored flat are computed whole.
WHOLE = ("Adafactor", "adaptive gradient clipping, SGD")


def _finite_only(inner):
    """Updates of zero unless all gradients are finite, without a conditional."""

    def update(gradients, state, weights):
        is_finite = jnp.stack([jnp.all(jnp.isfinite(g)) for g in gradients]).all()
        updates, new = inner.update(gradients, state, weights)
        chosen = lambda a, b: jnp.where(is_finite, a, b)  # noqa: E731
        return [u * is_finite for u in updates], jax.tree.map(chosen, new, state)

    return optax.GradientTransformation(inner.init, update)


class Recipe:
    """Variables that an Optax optimizer trains."""

    def __init__(self, strategy, name):
        self.strategy = strategy
        rng = np.random.default_rng(0)
        values = [rng.normal(size=s).astype("f4") for s in SHAPES]
        self.create(values, name)
        self.call = rx.function(lambda x: strategy.run(self.step, (x,)))

    def create(self, values, name):
        self.optimizer = RECIPES[name]()
        with self.strategy.scope():
            self.weights = [rx.Variable(v) for v in values]
            state = self.optimizer.init([jnp.asarray(v) for v in values])
            self.state = jax.tree.map(rx.Variable, state)

    def step(self, x):
        loss = lambda: sum(jnp.mean(jnp.sin(w * x)) for w in self.weights)  # noqa: E731
        gradients = context().all_reduce("SUM", rx.value_and_grad(loss, self.weights)()[1])
        is_variable = lambda v: isinstance(v, rx.Variable)  # noqa: E731
        state = jax.tree.map(lambda v: v.read_value(), self.state, is_leaf=is_variable)
        weights = [w.read_value() for w in self.weights]
        updates, new = self.optimizer.update(gradients, state, weights)
        for w, value in zip(self.weights, optax.apply_updates(weights, updates), strict=True):
            w.assign(value)
        slots = jax.tree.leaves(self.state, is_leaf=is_variable)
        for slot, value in zip(slots, jax.tree.leaves(new), strict=True):
            slot.assign(value)

    def batch(self):
        count = self.strategy.num_replicas_in_sync
        return per_replica(self.strategy, np.arange(1.0, count + 1, dtype="f4"))

    def collectives(self):
        """Return how many collectives of arrays of a variable's size a step has, by kind."""
        text = self.call.get_concrete_function(self.batch()).as_text()
        found = [
            kind
            for results, kind in COLLECTIVE.findall(text)  # XLA may combine several into one
            for shape in re.findall(r"\[([\d,]+)\]", results)
            if np.prod([int(n) for n in shape.split(",")], dtype=int) > 1000
        ]
        return {kind: found.count(kind) for kind in ("all-gather", "reduce-scatter", "all-reduce")}


class KerasRecipe(Recipe):
    """Variables that an optimizer of Keras trains."""

    def create(self, values, name):
        with self.strategy.scope():
            self.weights = [rx.keras.Variable(v) for v in values]
            self.optimizer = KERAS_RECIPES[name](rx.keras.optimizers)
            self.optimizer.build(self.weights)

    def step(self, x):
        def loss():
            value = sum(jnp.mean(jnp.sin(w.value * x)) for w in self.weights)
            return self.optimizer.scale_loss(value)

        _, gradients = rx.value_and_grad(loss, self.weights)()
        self.optimizer.apply(gradients, self.weights)  # sums the gradients of all replicas


def _counts(name):
    """Return how many collectives of each kind the step of a recipe has."""
    whole = int(name in WHOLE)
    return {"all-gather": 3, "reduce-scatter": 3 - whole, "all-reduce": whole}


FAST = ("clip by global norm, Adam", "LAMB", "Keras, `global_clipnorm`")


@pytest.mark.parametrize(
    "name",
    [
        name if name in FAST else pytest.param(name, marks=pytest.mark.slow)
        for name in (*RECIPES, *KERAS_RECIPES)
    ],
)
def test_recipes_stay_sharded_and_give_the_numbers_of_copies(name):
    kind = Recipe if name in RECIPES else KerasRecipe
    parts, copies = (kind(mirrored(4, variable_policy=p), name) for p in ("sharded", "mirrored"))

    assert parts.collectives() == _counts(name)

    for model in (parts, copies):
        model.call(model.batch())
        model.call(model.batch())
    for a, b in zip(parts.weights, copies.weights, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-4, atol=1e-6)


def test_the_table_of_the_page_has_the_counts_of_all_recipes():
    page = Path(__file__).parents[2] / "docs" / "sharding.md"
    rows = re.findall(r"^\| (.+?) \| (\d+) \| (\d+) \| (\d+) \|$", page.read_text(), re.MULTILINE)
    section = page.read_text().partition("## Optimizer recipes")[2].partition("\n## ")[0]
    shown = {name: tuple(map(int, counts)) for name, *counts in rows if f"| {name} |" in section}

    assert shown == {name: tuple(_counts(name).values()) for name in (*RECIPES, *KERAS_RECIPES)}


def _results(w, own):
    """Reductions of a weight, some of them different on each replica (`own` is)."""
    return [
        jnp.sum(jnp.cos(w)),  # not zero in the padding of a flat shard
        jnp.sum(w * own),
        jnp.sum(jnp.square(w), axis=0),
        jnp.mean(w, axis=-1),
        jnp.all(w < 4.0) & jnp.all(jnp.cos(w) < 0.9999),
        jnp.sum(w + w[::-1]),
        jnp.sum(jnp.sin(w * jnp.mean(w, axis=0, keepdims=True))),
        jnp.max(w / jnp.sum(jnp.abs(w), axis=-1, keepdims=True), axis=0),
    ]


@pytest.mark.parametrize("shape", SHAPES)
def test_reductions_of_shards_are_those_of_the_whole_on_each_replica(shape):
    strategy = mirrored(4, variable_policy="sharded")
    value = np.random.default_rng(0).normal(size=shape).astype("f4")
    with strategy.scope():
        w = rx.Variable(value)
    own = np.arange(1.0, 5.0, dtype="f4")
    call = rx.function(lambda x: strategy.run(lambda x: _results(w.read_value(), x), (x,)))

    found = call(per_replica(strategy, own))

    for replica, number in enumerate(own):
        for x, expected in zip(found, _results(jnp.asarray(value), number), strict=True):
            mine = strategy.experimental_local_results(x)[replica]
            np.testing.assert_allclose(mine, expected, rtol=1e-4, atol=1e-3)
