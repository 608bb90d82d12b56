"""Optimizer recipes on sharded variables: collectives of a step, and the numbers of copies."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import replicax as rx
from tests.replicas import context, mirrored, per_replica

SHAPES = [(256, 64), (67, 101), (8, 64, 64)]  # by rows, flat and padded, a stack
COLLECTIVE = re.compile(r"= (.*) (all-reduce|reduce-scatter|all-gather)(?:-start)?\(")
RECIPES = {
    "adam": lambda: optax.adam(1e-2),
    "clip by global norm": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2)),
    "clip by value": lambda: optax.chain(optax.clip(1e-3), optax.sgd(1e-2)),
    "lamb": lambda: optax.lamb(1e-2),
    "lars": lambda: optax.lars(1e-2),
    "decayed weights": lambda: optax.adamw(1e-2, mask=lambda ws: [w.ndim > 2 for w in ws]),
    "skipped if not finite": lambda: _finite_only(optax.adam(1e-2)),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(1e-2), 3),
    "EMA": lambda: optax.chain(optax.adam(1e-2), optax.ema(0.9)),
    "MultiSteps": lambda: optax.MultiSteps(
        optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2)), 2
    ).gradient_transformation(),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=32),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=1e-2),
    "adaptive clip": lambda: optax.chain(optax.adaptive_grad_clip(0.01), optax.sgd(1e-2)),
}


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
        self.strategy, self.optimizer = strategy, RECIPES[name]()
        rng = np.random.default_rng(0)
        values = [rng.normal(size=s).astype("f4") for s in SHAPES]
        with strategy.scope():
            self.weights = [rx.Variable(v) for v in values]
            state = self.optimizer.init([jnp.asarray(v) for v in values])
            self.state = jax.tree.map(rx.Variable, state)
        self.call = rx.function(lambda x: strategy.run(self.step, (x,)))

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


@pytest.mark.parametrize(
    "name",
    [
        name
        if name in ("clip by global norm", "lamb")
        else pytest.param(name, marks=pytest.mark.slow)
        for name in RECIPES
    ],
)
def test_recipes_stay_sharded_and_give_the_numbers_of_copies(name):
    parts, copies = (Recipe(mirrored(4, variable_policy=p), name) for p in ("sharded", "mirrored"))

    # Norms of rows and columns of the array that is stored flat are computed whole.
    whole = int(name in ("adafactor", "adaptive clip"))
    assert parts.collectives() == {
        "all-gather": 3,
        "reduce-scatter": 3 - whole,
        "all-reduce": whole,
    }

    for model in (parts, copies):
        model.call(model.batch())
        model.call(model.batch())
    for a, b in zip(parts.weights, copies.weights, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-4, atol=1e-6)


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
