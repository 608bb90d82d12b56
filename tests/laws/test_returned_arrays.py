"""State that a compiled step returned is used as the `jax.Array` that it is.

A step that returns parameters made of reduced values returns the same value on every replica. Each
operation below is what programs do with parameters; its result must be that of plain arrays.
"""

import copy
import io
import operator
import pickle
import tempfile
from collections.abc import Hashable
from functools import cache

import equinox as eqx
import flax.serialization
import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

import replicax as rx
from tests.replicas import context

TX = optax.adam(0.1)


def fresh(*, with_key=False):
    tree = {
        "w": jnp.arange(6.0).reshape(2, 3) / 7,
        "b": jnp.array([0.5, -1.5, 2.5]),
        "n": jnp.int32(3),
        "ok": jnp.array(True),
        "x": jnp.float32(0.25),
        "h": jnp.array([1.5, 2.5], jnp.bfloat16),
    }
    return {**tree, "key": jax.random.key(7)} if with_key else tree


def weights(tree):
    return {k: tree[k] for k in ("w", "b")}


@cache
def returned(strategy, *, with_key=False):
    """The state as a compiled step returns it."""
    step = rx.function(lambda state: strategy.run(lambda s: s, args=(state,)))
    return step(fresh(with_key=with_key))


def through(save, load):
    def pass_file(p, q):
        file = io.BytesIO()
        save(file, p)
        file.seek(0)
        return load(file, q)

    return pass_file


def orbax_round(p, q):
    with tempfile.TemporaryDirectory() as folder, ocp.StandardCheckpointer() as saver:
        saver.save(f"{folder}/saved", p)
        saver.wait_until_finished()
        return saver.restore(f"{folder}/saved", q)


def plotted(p, q):
    figure = Figure()
    axes = figure.subplots()
    line = axes.plot(p["b"], p["b"] * 2)[0]
    axes.bar([0, 1, 2], p["b"])
    axes.imshow(p["w"])
    FigureCanvasAgg(figure).draw()
    return line.get_xdata(), line.get_ydata()


def scanned(p, q):
    return jax.lax.scan(lambda c, x: (c + x, c * x), p["x"], p["b"])


def looped(p, q):
    return jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 2), (0, p["w"]))


@jax.custom_vjp
def doubled(x):
    return x * 2


doubled.defvjp(lambda x: (x * 2, x), lambda x, g: (g * x,))


def loss(p):
    return (jnp.ones((2,)) @ p["w"] + p["b"]).sum() ** 2


# ``p`` is what the step returned, and ``q`` a plain tree of the same structure.
OPERATIONS = {
    # trees
    "tree.map(plain, returned)": lambda p, q: jax.tree.map(jnp.add, q, p),
    "tree.map(returned, plain)": lambda p, q: jax.tree.map(operator.add, weights(p), weights(q)),
    "tree.structure": lambda p, q: jax.tree.structure(p) == jax.tree.structure(q),
    "tree.leaves": lambda p, q: jax.tree.leaves(p),
    "tree.transpose": lambda p, q: jax.tree.transpose(
        jax.tree.structure([0, 0]), jax.tree.structure(q), [p, p]
    ),
    "tree.reduce": lambda p, q: jax.tree.reduce(lambda a, b: a + b.sum(), p, 0.0),
    "ravel_pytree": lambda p, q: jax.flatten_util.ravel_pytree(weights(p))[0],
    "keystr": lambda p, q: jax.tree_util.tree_map_with_path(lambda k, x: x + len(k), p),
    "allclose": lambda p, q: jax.tree.map(jnp.allclose, p, q),
    # Optax
    "apply_updates": lambda p, q: optax.apply_updates(weights(q), weights(p)),
    "apply_updates to returned": lambda p, q: optax.apply_updates(weights(p), weights(q)),
    "incremental_update": lambda p, q: optax.incremental_update(weights(p), weights(q), 0.1),
    "periodic_update": lambda p, q: optax.periodic_update(p, q, jnp.int32(4), 2),
    "global_norm": lambda p, q: optax.tree.norm(weights(p)),
    "optax.tree": lambda p, q: optax.tree.add_scale(weights(p), 0.5, weights(q)),
    "tree.vdot": lambda p, q: optax.tree.vdot(weights(p), weights(q)),
    "tx.init": lambda p, q: TX.init(weights(p)),
    "tx.update": lambda p, q: TX.update(weights(p), TX.init(weights(q)), weights(q)),
    "clip": lambda p, q: optax.clip_by_global_norm(1.0).update(weights(p), optax.EmptyState())[0],
    # Equinox
    "is_array": lambda p, q: jax.tree.map(eqx.is_array, p),
    "is_inexact_array": lambda p, q: jax.tree.map(eqx.is_inexact_array, p),
    "partition": lambda p, q: eqx.combine(*eqx.partition({**p, "s": "text"}, eqx.is_array)),
    "filter": lambda p, q: eqx.filter(p, eqx.is_inexact_array),
    "tree_at": lambda p, q: eqx.tree_at(lambda t: t["w"], q, p["w"]),
    "tree_at in returned": lambda p, q: eqx.tree_at(lambda t: t["w"], p, replace_fn=jnp.sin),
    "eqx.apply_updates": lambda p, q: eqx.apply_updates(weights(q), weights(p)),
    "tree_equal": lambda p, q: eqx.tree_equal(p, q),
    "tree_serialise_leaves": through(eqx.tree_serialise_leaves, eqx.tree_deserialise_leaves),
    "tree_deserialise_leaves": lambda p, q: through(
        eqx.tree_serialise_leaves, eqx.tree_deserialise_leaves
    )(q, eqx.filter_eval_shape(lambda tree: tree, p)),
    "tree_deserialise_leaves to returned": lambda p, q: through(
        eqx.tree_serialise_leaves, eqx.tree_deserialise_leaves
    )(q, p),
    "filter_jit": lambda p, q: eqx.filter_jit(loss)(p),
    "filter_grad": lambda p, q: eqx.filter_grad(loss)(p),
    "filter_vmap": lambda p, q: eqx.filter_vmap(lambda r: r * 2)(p["w"]),
    # files and copies
    "pickle": lambda p, q: pickle.loads(pickle.dumps(p)),
    "deepcopy": lambda p, q: copy.deepcopy(p),
    "copy": lambda p, q: jax.tree.map(copy.copy, p),
    "flax bytes": lambda p, q: flax.serialization.from_bytes(q, flax.serialization.to_bytes(p)),
    "flax state dict": lambda p, q: flax.serialization.to_state_dict(p),
    "orbax": orbax_round,
    "orbax target": lambda p, q: orbax_round(q, p),
    "np.savez": through(lambda f, p: np.savez(f, **weights(p)), lambda f, q: dict(np.load(f))),
    # transformations
    "jit": lambda p, q: jax.jit(loss)(p),
    "jit mixed": lambda p, q: jax.jit(lambda a, b: jax.tree.map(jnp.add, a, b))(p, q),
    "jit donated": lambda p, q: jax.jit(lambda a: a * 2, donate_argnums=0)(jnp.array(p["w"])),
    "jit closed over": lambda p, q: jax.jit(lambda x: x + p["w"])(q["w"]),
    "grad": lambda p, q: jax.grad(loss)(weights(p)),
    "grad of jit": lambda p, q: jax.grad(jax.jit(loss))(weights(p)),
    "jit of grad": lambda p, q: jax.jit(jax.grad(loss))(weights(p)),
    "grad closed over": lambda p, q: jax.grad(lambda x: (x * p["w"]).sum())(q["w"]),
    "value_and_grad": lambda p, q: jax.value_and_grad(loss)(weights(p)),
    "hessian": lambda p, q: jax.hessian(lambda b: (b**3).sum())(p["b"]),
    "vmap": lambda p, q: jax.vmap(lambda r, s: r @ s, in_axes=(0, None))(p["w"], p["b"]),
    "jvp": lambda p, q: jax.jvp(loss, (weights(p),), (weights(p),)),
    "vjp": lambda p, q: jax.vjp(loss, weights(p))[1](p["x"]),
    "linearize": lambda p, q: jax.linearize(jnp.sin, p["w"])[1](p["w"]),
    "checkpoint": lambda p, q: jax.grad(jax.checkpoint(loss))(weights(p)),
    "custom_vjp": lambda p, q: jax.grad(lambda x: doubled(x).sum())(p["w"]),
    "scan": scanned,
    "while_loop": looped,
    "cond": lambda p, q: jax.lax.cond(p["ok"], jnp.sin, jnp.cos, p["w"]),
    "switch": lambda p, q: jax.lax.switch(p["n"], [jnp.sin, jnp.cos], p["w"]),
    "fori_loop": lambda p, q: jax.lax.fori_loop(0, p["n"], lambda i, c: c + i, p["w"]),
    "map": lambda p, q: jax.lax.map(lambda r: r * 2, p["w"]),
    "associative_scan": lambda p, q: jax.lax.associative_scan(jnp.add, p["b"]),
    "eval_shape": lambda p, q: str(jax.eval_shape(lambda t: t, p)),
    "make_jaxpr": lambda p, q: str(jax.make_jaxpr(loss)(weights(p))),
    "typeof": lambda p, q: str(jax.typeof(p["w"])),
    "pure_callback": lambda p, q: jax.pure_callback(np.sin, jax.typeof(q["w"]), p["w"]),
    "lax": lambda p, q: jax.lax.add(p["w"], jax.lax.neg(p["w"])),
    "jnp": lambda p, q: jnp.concatenate([p["b"], jnp.where(p["ok"], p["b"], q["b"])]),
    "jnp.stack": lambda p, q: jnp.stack([p["b"], p["b"]]),
    "einsum": lambda p, q: jnp.einsum("ij,j->i", p["w"], p["b"]),
    "linalg": lambda p, q: jnp.linalg.norm(p["w"]),
    "jax.nn": lambda p, q: jax.nn.softmax(p["b"]),
    "random": lambda p, q: jax.random.normal(jax.random.key(p["n"]), (2,)),
    "fold_in": lambda p, q: jax.random.uniform(jax.random.fold_in(jax.random.key(0), p["n"])),
    "key": lambda p, q: jax.random.normal(p["key"], (3,)),
    "keys": lambda p, q: jax.vmap(jax.random.uniform)(jax.random.split(p["key"], 3)),
    "key_data": lambda p, q: (jax.random.key_data(p["key"]), str(jax.random.key_impl(p["key"]))),
    "key in jit": lambda p, q: jax.jit(jax.random.bits)(jax.random.fold_in(p["key"], 1)),
    "keys in scan": lambda p, q: jax.lax.scan(
        lambda k, _: (jax.random.split(k)[0], jax.random.bits(k)), p["key"], length=2
    )[1],
    "key dtype": lambda p, q: jnp.issubdtype(p["key"].dtype, jax.dtypes.prng_key),
    "nnx.Param": lambda p, q: nnx.Param(p["w"])[...] + 1,
    # conversions
    "device_get": lambda p, q: jax.device_get(p),
    "device_put": lambda p, q: jax.device_put(p),
    "device_put to one": lambda p, q: jax.device_put(p["w"], jax.devices()[1]),
    "block_until_ready": lambda p, q: jax.block_until_ready(p),
    "np.asarray": lambda p, q: {k: np.asarray(v) for k, v in p.items()},
    "np.array": lambda p, q: np.array(p["w"], dtype="float64"),
    "np functions": lambda p, q: (np.sin(p["b"]), np.mean(p["w"]), np.stack([p["b"], p["b"]])),
    "np + returned": lambda p, q: np.ones(3, "float32") + p["b"],
    "returned + np": lambda p, q: p["b"] + np.ones(3, "float32"),
    "np index": lambda p, q: np.arange(5)[p["n"]],
    "jnp index": lambda p, q: jnp.arange(5)[p["n"]],
    "at": lambda p, q: (p["w"].at[0].set(p["b"]), q["w"].at[p["n"] - 2].add(p["b"])),
    "jnp.asarray": lambda p, q: (jnp.asarray(p["w"]), jnp.array(p["w"]), jnp.array([p["x"]] * 2)),
    "dlpack": lambda p, q: np.from_dlpack(jnp.asarray(p["w"])),
    "matplotlib": plotted,
    # Python
    "isinstance": lambda p, q: [isinstance(x, jax.Array) for x in jax.tree.leaves(p)],
    "not a tracer": lambda p, q: [isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(p)],
    "format": lambda p, q: f"{p['x']:.3f} {p['n']:d} {p['n']:>5} {p['x']:e}",
    "format of %": lambda p, q: "%.2f %d" % (p["x"], p["n"]),  # noqa: UP031
    "item": lambda p, q: (p["x"].item(), p["n"].item(), p["b"].tolist()),
    "numbers": lambda p, q: (float(p["x"]), int(p["n"]), complex(p["x"]), bool(p["ok"])),
    "round": lambda p, q: (round(p["x"], 1), p["b"].round(0)),
    "index": lambda p, q: ([5, 6, 7, 8][p["n"]], list(range(p["n"]))),
    "iteration": lambda p, q: [float(x) for x in p["b"]],
    "unpacking": lambda p, q: (lambda a, b: (a, b))(*p["w"]),
    "slices": lambda p, q: (p["w"][0], p["w"][:, 1:], p["w"][..., None], p["b"][p["n"] - 2]),
    "len": lambda p, q: (len(p["w"]), p["w"].shape, p["w"].ndim, p["w"].size, p["w"].nbytes),
    "in": lambda p, q: (0.5 in p["b"], 9.0 in p["b"]),
    "dtype": lambda p, q: ([str(p[k].dtype) for k in q], jnp.result_type(p["n"], p["x"])),
    "weak type": lambda p, q: [p[k].weak_type for k in q],
    "arithmetic": lambda p, q: (p["w"] * 2 + 1, 2 - p["w"], p["w"] @ p["b"], -p["x"], p["n"] // 2),
    "two returned": lambda p, q: (p["b"] * p["x"], p["b"] - p["b"], p["n"] ** p["n"]),
    "plain and returned": lambda p, q: (q["b"] * p["x"], p["b"] / q["b"], q["n"] ** p["n"]),
    "divmod": lambda p, q: (divmod(p["n"], 2), divmod(7, p["n"])),
    "logic": lambda p, q: (p["ok"] & True, ~p["ok"], p["n"] << 1, p["n"] | 4, p["n"] ^ 1),
    "comparison": lambda p, q: (p["b"] > 0, p["b"] == q["b"], p["n"] != 3, q["x"] <= p["x"]),
    "if": lambda p, q: "yes" if p["x"] > 0 else "no",
    "sum, min, max, sorted": lambda p, q: (sum(p["b"]), min(p["b"]), max(p["b"]), sorted(p["b"])),
    "methods": lambda p, q: (
        p["w"].sum(), p["w"].mean(0), p["w"].reshape(-1), p["w"].T, p["w"].astype("int32"),
        p["b"].argmax(), p["w"].ravel(), p["w"].max(), p["w"].std(), p["b"].dot(p["b"]),
        p["w"].transpose(1, 0), p["w"].flatten(), p["b"].clip(0, 1), p["w"].real, p["w"].copy(),
    ),
    "replicated": lambda p, q: (p["w"].is_fully_replicated, p["w"].is_fully_addressable),
    "deletion": lambda p, q: p["w"].is_deleted(),
    "hashable": lambda p, q: isinstance(p["w"], Hashable),
}  # fmt: skip


def same(a, b, rtol=0.0):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        if isinstance(y, jax.Array | np.ndarray | np.generic):
            assert isinstance(x, jax.Array) == isinstance(y, jax.Array)
            assert x.dtype == y.dtype
            np.testing.assert_allclose(*map(_numbers, (x, y)), rtol)
        else:
            assert type(x) is type(y)
            assert x == y


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_returned_state_is_used_as_arrays(two, operation):
    with_key = "key" in operation.__code__.co_consts
    plain, state = fresh(with_key=with_key), returned(two, with_key=with_key)
    same(operation(state, plain), operation(plain, plain))


TRACED = """tree.map(plain, returned);tree.map(returned, plain);tree.reduce;ravel_pytree
apply_updates;incremental_update;periodic_update;tx.update;filter;tree_at;eqx.apply_updates
filter_grad;jit;jit mixed;grad;jit of grad;grad closed over;vmap;vjp;checkpoint;custom_vjp;scan
while_loop;cond;map;pure_callback;lax;jnp;fold_in;key;keys in scan;at;slices;arithmetic;two returned
plain and returned;logic;comparison;methods""".replace("\n", ";").split(";")


@pytest.mark.parametrize("name", TRACED)
def test_traced_code_uses_it_as_arrays(two, name):
    operation = OPERATIONS[name]
    plain = fresh(with_key="key" in operation.__code__.co_consts)

    @rx.function
    def step(plain):
        return operation(two.run(lambda tree: tree, args=(plain,)), plain)

    want = jax.jit(lambda plain: operation(plain, plain))(plain)
    got = step(plain)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(*map(_numbers, (x, y)), 1e-6), got, want)


def watched(strategy, p):
    with rx.GradientTape() as tape:
        tape.watch(p)
        y = jnp.sum(jnp.sin(p["w"])) + (p["b"] * p["b"]).sum()
    return tape.gradient(y, [p["w"], p["b"]])


def in_variables(strategy, p):
    with strategy.scope():
        held = [rx.Variable(p["w"]), rx.Variable(jnp.zeros(3)), rx.Variable(1.0)]
    held[1].assign(p["b"])
    held[2].assign_add(p["x"])
    rx.function(held[1].assign_add)(p["b"])
    strategy.run(lambda: held[2].assign(p["x"]))
    return [v.read_value() for v in held]


def in_checkpoint(strategy, p):
    with tempfile.TemporaryDirectory() as folder:
        path = rx.train.Checkpoint(v=rx.Variable(p["w"])).write(f"{folder}/c")
        v = rx.Variable(jnp.zeros((2, 3)))
        rx.train.Checkpoint(v=v).read(path)
    return v.read_value()


def in_modules(strategy, p):
    class Scale(nnx.Module):
        def __init__(self, by):
            self.by = nnx.Param(by)

    outside = Scale(p["b"])
    with strategy.scope():
        inside = Scale(p["b"])
    nnx.update(inside, nnx.state(outside))
    run = rx.function(lambda: strategy.run(lambda: outside.by * inside.by))
    return [strategy.experimental_local_results(run())[0], inside.by[...]]


def in_keras(strategy, p):
    v = keras.Variable(p["w"])
    kept = [v.value + 1]
    v.assign(p["w"])
    return [*kept, v + 1, rx.function(lambda: v + 1)(), keras.ops.sum(p["w"])]


def in_next_step(strategy, p):
    def replica(p, x):
        return context().all_reduce("SUM", p["w"] * x), p["n"] + 1

    def outer(p):
        w, n = strategy.run(replica, args=(p, p["x"]))
        return strategy.reduce("SUM", w, axis=None), strategy.reduce("MEAN", n, axis=None)

    return outer(p), rx.function(outer)(p)


# What replicax itself makes of returned state.
OWN = {
    "tape": watched,
    "variables": in_variables,
    "checkpoint": in_checkpoint,
    "NNX": in_modules,
    "next step": in_next_step,
    "closed over": lambda s, p: [
        s.experimental_local_results(f(lambda: s.run(lambda: p["w"] + jnp.sin(p["w"])))())[0]
        for f in (lambda f: f, rx.function)
    ],
    "closed over in a function": lambda s, p: rx.function(lambda: p["w"] @ p["b"] + p["x"])(),
    "argument of a function": lambda s, p: rx.function(lambda p: p["w"] @ p["b"] + p["x"])(p),
    "broadcast": lambda s, p: s.extended.broadcast_to(p["w"], ["CPU:0", "CPU:1"]).values[1],
    "dataset": lambda s, p: [*rx.data.Dataset.from_tensor_slices(p["w"])],
    "cond": lambda s, p: rx.cond(p["ok"], lambda: p["w"] * 2, lambda: p["w"]),
    "scan": lambda s, p: rx.scan(lambda c, x: (c + x, c), p["x"], p["b"]),
    "while_loop": lambda s, p: rx.while_loop(lambda x: x < p["n"], lambda x: x * 2, p["x"]),
    "average_loss": lambda s, p: rx.nn.compute_average_loss(p["b"], global_batch_size=3),
    "Keras": in_keras,
    "metric": lambda s, p: (m := rx.metrics.Mean(), m.update_state(p["b"]), m.result())[2],
    "fold_in": lambda s, p: rx.random.fold_in([1, 2], p["n"]),
    "constant": lambda s, p: rx.constant(p["w"]) + rx.identity(p["w"]),
}  # fmt: skip


@pytest.mark.parametrize("use", OWN.values(), ids=OWN)
def test_own_functions_take_returned_state(two, use):
    same(use(two, returned(two)), use(two, fresh()), rtol=1e-6)


def test_it_is_a_result_of_every_replica_as_in_tensorflow(two):
    p = returned(two)["w"]
    assert isinstance(p, rx.distribute.PerReplica | rx.distribute.DistributedValues)
    assert [x.devices() for x in p.values] == [{d} for d in jax.devices()[:2]]
    assert two.experimental_local_results(p) == p.values
    np.testing.assert_array_equal(two.reduce("SUM", p, axis=None), fresh()["w"] * 2)
    np.testing.assert_array_equal(two.reduce("MEAN", p, axis=None), fresh()["w"])
    assert two.gather(p, axis=0).shape == (4, 3)
    assert repr(p).startswith("PerReplica:{")
    assert repr(p).endswith("} (Mirrored: equal on all replicas)")


def test_values_that_may_differ_are_no_array(two):
    p = rx.function(lambda: two.run(lambda: context().replica_id_in_sync_group * jnp.ones(2)))()
    assert not isinstance(p, jax.Array)
    assert not eqx.is_array(p)
    for use in (jnp.sum, np.asarray, lambda x: x + 1, jax.jit(jnp.sum), lambda x: x[0], float):
        with pytest.raises((TypeError, ValueError)):
            use(p)
    with pytest.raises(ValueError, match="PerReplica"):
        jax.tree.map(jnp.add, [jnp.ones(2)], [p])


def test_jitted_functions_find_compiled_code_for_it(two):
    calls = []
    f = jax.jit(lambda p: calls.append(0) or loss(p))
    for _ in range(3):
        f(returned(two))
    f(jax.tree.map(jnp.asarray, returned(two)))
    assert len(calls) == 1


def _numbers(x):
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if is_key else x).astype("float64")
