"""Programs that use Keras or Flax after one of its functions was changed, each in its own process.

`python -m tests.integrations.changed_library` reads jobs from its input, one JSON list. A job names
a contract, a part of the library, and a change of it. The library and the core of replicax are
imported once; each job runs in a fork, which makes the change and then attaches replicax.
"""

import functools
import importlib
import inspect
import json
import os
import sys
import tempfile
import traceback
import warnings

import jax
import jax.numpy as jnp
import numpy as np

import replicax as rx
from replicax._src.integrations import registry
from replicax._src.train.object_graph import TensorFlowNames

if __name__ == "__main__":  # a fork attaches replicax to them, after the change
    sys.meta_path[:] = [f for f in sys.meta_path if not isinstance(f, registry._Finder)]

import keras
import optax
from flax import nnx

from tests.tpu.nets import slice_of

X = np.ones((4, 2), "float32")


def two():
    return rx.distribute.MirroredStrategy(jax.devices()[:2])


def in_scope(make):
    with two().scope():
        return make()


def on_replicas(use, *made):
    """Use what ``made`` makes in a scope in replica functions, eagerly."""
    strategy = two()
    with strategy.scope():
        things = [make() for make in made]
    return strategy.run(lambda: use(*things))


def compiled(use, *made):
    with two().scope():
        things = [make() for make in made]
    return rx.function(lambda: use(*things))()


# Keras.


def dense():
    layer = keras.layers.Dense(1)
    layer.build((None, 2))
    return layer


def net():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def fit(x=X, y=X[:, :1], callbacks=()):
    in_scope(net).fit(x, y, verbose=0, callbacks=list(callbacks))


def make_distributed_variable():
    devices = jax.devices()[:2]
    mesh = keras.distribution.DeviceMesh((2,), ["batch"], [f"cpu:{d.id}" for d in devices])
    with keras.distribution.DataParallel(device_mesh=mesh).scope():
        in_scope(lambda: keras.Variable(jnp.ones((2, 2))))


def step(optimizer):
    def use(layer, optimizer):
        optimizer.apply([keras.ops.ones(w.shape) for w in layer.weights], layer.weights)

    on_replicas(use, dense, optimizer)


def cut_slots():
    strategy = slice_of(cores=2, replicas=2)
    with strategy.scope(), rx.tpu.LayoutMap({"kernel": [2, 1]}).scope():
        layer = dense()
        keras.optimizers.SGD(0.1, momentum=0.9).build(layer.weights)


def callback(make):
    with tempfile.TemporaryDirectory() as folder:
        fit(callbacks=[make(folder)])


def adapt():
    """Adapt both layers; one whose method is gone cannot refuse for itself, but the other does."""
    raised = []
    for layer in (keras.layers.Normalization(), keras.layers.Discretization(num_bins=2)):
        try:
            layer.adapt(dataset())
        except Exception as error:
            raised.append(error)
    for error in sorted(raised, key=lambda e: not isinstance(e, rx.errors.ReplicaxError)):
        raise error


def save_model():
    with tempfile.TemporaryDirectory() as folder:
        rx.saved_model.save(in_scope(net), f"{folder}/saved")


def restore_slots():
    with two().scope():
        layer, optimizer = dense(), keras.optimizers.SGD(0.1, momentum=0.9)
        optimizer.build(layer.weights)
    assert TensorFlowNames().slot(optimizer, layer.kernel, "momentum").shape == (2, 1)


def dataset():
    return rx.data.Dataset.from_tensor_slices((X, X[:, :1])).batch(4)


def flow(name, *args):
    on_replicas(lambda: getattr(keras.ops, name)(*args))


KERAS = {
    "VARIABLES": lambda: on_replicas(lambda v: v.assign_add(1.0), lambda: keras.Variable(1.0)),
    "TRACED_VARIABLES": lambda: compiled(lambda layer: layer(X), lambda: keras.layers.Dense(1)),
    "DISTRIBUTION": make_distributed_variable,
    "SEEDS": lambda: on_replicas(
        lambda seed: keras.random.uniform((2,), seed=seed), lambda: keras.random.SeedGenerator(1)
    ),
    "BUILDING": lambda: on_replicas(lambda layer: layer(X), lambda: keras.layers.Dense(1)),
    "LOSSES": lambda: on_replicas(lambda layer: layer.add_loss(jnp.float32(1)), dense),
    "BATCH_NORMALIZATION": lambda: on_replicas(
        lambda layer: layer(X, training=True),
        lambda: built(keras.layers.BatchNormalization(synchronized=True)),
    ),
    "OPTIMIZERS": lambda: step(lambda: keras.optimizers.SGD(0.1)),
    "LOSS_SCALE": lambda: step(
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    ),
    "SLOTS": cut_slots,
    "TRAINING": fit,
    "DATASETS": lambda: fit(dataset(), None),
    "ADAPTATION": adapt,
    "BACKUP": lambda: callback(keras.callbacks.BackupAndRestore),
    "MODEL_CHECKPOINT": lambda: callback(
        lambda folder: keras.callbacks.ModelCheckpoint(f"{folder}/m.keras")
    ),
    "CSV_LOGGER": lambda: callback(lambda folder: keras.callbacks.CSVLogger(f"{folder}/log")),
    "TENSORBOARD": lambda: in_scope(show_on_board),
    "SAVED_MODEL": save_model,
    "RESTORED_SLOTS": restore_slots,
    "COND": lambda: flow("cond", jnp.asarray(True), lambda: 1.0, lambda: 2.0),
    "SCAN": lambda: flow("scan", lambda c, x: (c + x, x), jnp.float32(0), jnp.ones(2)),
    "WHILE_LOOP": lambda: flow("while_loop", lambda i: i < 2, lambda i: i + 1, jnp.int32(0)),
    "SWITCH": lambda: flow("switch", jnp.int32(0), [lambda: 1.0, lambda: 2.0]),
    "FORI_LOOP": lambda: flow("fori_loop", 0, 2, lambda i, v: v + i, jnp.int32(0)),
    "MAP": lambda: flow("map", lambda x: x + 1, jnp.ones(2)),
}


def built(layer):
    layer.build((None, 2))
    return layer


def show_on_board():
    """Do what `fit` does first with a TensorBoard, which may not be installed."""

    class Board(keras.callbacks.TensorBoard):
        log_dir, write_graph, embeddings_freq, _model = "", False, 0, None

    board = object.__new__(Board)
    board.set_params({})
    board.set_model(net())


# Flax.


class Scale(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.ones(2))
        self.flag = False

    def __call__(self, x):
        return x * self.w[...]


def loss(model):
    return model(jnp.ones(2)).sum()


def write(model):
    model.w[...] = model.w[...] + 1


def set_flag(model):
    model.flag = True


def tape():
    model = in_scope(Scale)
    with rx.GradientTape():
        loss(model)


def optimizer():
    model = Scale()
    return model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)


def update(pair):
    model, optimizer = pair
    optimizer.update(model, nnx.grad(loss)(model))


def jitted(**options):
    """Raise as replicax does for nnx.jit in replica functions; nothing else is right."""
    run = nnx.jit(loss, **options)
    try:
        on_replicas(run, Scale)
    except rx.errors.TracingError:
        return
    raise AssertionError("nnx.jit was not refused")


FLAX = {
    "VARIABLES": lambda: in_scope(Scale),
    "UPDATES": lambda: compiled(write, Scale),
    "CONTEXT": lambda: compiled(set_flag, Scale),
    "CHANGES": lambda: compiled(loss, Scale),
    "CONSTRUCTION": lambda: compiled(loss, Scale),
    "TAPES": tape,
    "TRANSFORMS": lambda: on_replicas(nnx.grad(loss), Scale),
    "OPTIMIZERS": lambda: on_replicas(update, optimizer),
    "KEYS": lambda: on_replicas(lambda rngs: rngs.params(), lambda: nnx.Rngs(0)),
    "STATISTICS": lambda: on_replicas(
        lambda layer: layer(X), lambda: nnx.BatchNorm(2, axis_name="replica", rngs=nnx.Rngs(0))
    ),
    "WELFORD": lambda: on_replicas(lambda m: m.update(values=X), nnx.metrics.Welford),
    "JIT": jitted,
    "SIMPLE_JIT": lambda: jitted(graph=True, graph_updates=False),
}
PROGRAMS = {"keras": KERAS, "flax": FLAX}
REST = {"keras": ("VARIABLES", "TRAINING"), "flax": ("VARIABLES", "WELFORD")}


# Changes.


def with_parameter(function, **parameter):
    """Return a function that works as before, and has one more parameter."""
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())
    new = inspect.Parameter("a_new_one", inspect.Parameter.KEYWORD_ONLY, **parameter)
    at = len(parameters) - (bool(parameters) and parameters[-1].kind is new.VAR_KEYWORD)

    @functools.wraps(function)
    def changed(*args, **kwargs):
        kwargs.pop("a_new_one", None)
        return function(*args, **kwargs)

    changed.__signature__ = signature.replace(parameters=[*parameters[:at], new, *parameters[at:]])
    return changed


def change(contract, part, kind):
    """Change a function of the library; hide the name of a part that is renamed."""
    if kind == "renamed":
        find = contract.find

        def hidden(place):
            if place == part.place:
                raise AttributeError(place)
            return find(place)

        contract.find = hidden
        return
    owner, name = contract.find(part.place)
    default = {"default": None} if kind == "optional" else {}
    new = with_parameter(getattr(owner, name), **default)
    signature = new.__signature__
    contract._replace(owner, name, lambda _: new)
    new.__signature__ = signature


def contract_of(library):
    return importlib.import_module(f"replicax._src.integrations.{library}_private").CONTRACT


def attach():
    registry.join_libraries()


def outcome(program):
    try:
        program()
    except rx.errors.ScopeError as error:
        return f"refused: {error}"
    except BaseException:
        return f"failed: {traceback.format_exc()}"
    return "works"


def run(library, places, kind, programs):
    contract = contract_of(library)
    for part in contract.parts:
        if part.place in places and (kind == "renamed" or part.parameters is not None):
            change(contract, part, kind)
            places = [place for place in places if place != part.place]
    attach()
    lost = sorted(feature.name for feature in contract.lost)
    return {"lost": lost, **{name: outcome(PROGRAMS[library][name]) for name in programs}}


def main():
    jax.config.update("jax_num_cpu_devices", 8)
    warnings.simplefilter("ignore")
    for job in json.load(sys.stdin):
        sys.stdout.flush()
        child = os.fork()
        if child:
            os.waitpid(child, 0)
            continue
        try:
            told = run(*job)
        except BaseException:
            told = {"crash": traceback.format_exc()}
        sys.stdout.write(json.dumps(told) + "\n")
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
