"""Common mistakes: each error says what to write instead."""

import logging
import os
import pickle
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import replicax as rx
from tests.fresh_process import run_fresh
from tests.replicas import mirrored


@pytest.fixture(scope="module")
def strategy():
    return mirrored(2)


@pytest.fixture(scope="module")
def w(strategy):
    with strategy.scope():
        return rx.Variable(jnp.zeros(3), name="w")


def enter(context):
    with context:
        pass


def set_item(w):
    w[0] = 1


def in_place(w):
    w -= 0.1


def examples():
    return rx.data.Dataset.from_tensor_slices((np.ones((4, 3)), np.ones((4, 2))))


def two_gradients(w):
    with rx.GradientTape() as tape:
        loss = (w * w).sum()
    tape.gradient(loss, w)
    tape.gradient(loss, w)


def use_two_scopes(one, other):
    with one.scope(), other.scope():
        pass


def assign_devices(num_replicas):
    topology = rx.tpu.experimental.initialize_tpu_system()
    rx.tpu.experimental.DeviceAssignment.build(topology, num_replicas=num_replicas)


MISTAKES = {
    "with strategy": (lambda s, w: enter(s), "with strategy.scope():"),
    "with strategy.scope": (lambda s, w: enter(s.scope), "with strategy.scope():"),
    "item assignment": (lambda s, w: set_item(w), r"v[key].assign(value)"),
    "maximum": (lambda s, w: rx.distribute.ReduceOp.MAX, "jnp.max(strategy.gather("),
    "num_replicas": (lambda s, w: s.num_replicas, "num_replicas_in_sync"),
    "run of a result": (lambda s, w: s.run(jnp.ones((99, 99))), "run(fn, args=(x,))"),
    "args that are no list": (lambda s, w: s.run(abs, args=jnp.ones((99, 99))), "args=(x,)"),
    "experimental_run_v2": (lambda s, w: s.experimental_run_v2, "Write `run`"),
    "reduce without axis": (lambda s, w: s.reduce("SUM", w), "axis=None"),
    "assign of text": (lambda s, w: w.assign("text"), "'text' to variable 'w:0'"),
    "no device": (lambda s, w: rx.distribute.OneDeviceStrategy(), 'OneDeviceStrategy("CPU:0")'),
    "cuda": (lambda s, w: rx.distribute.OneDeviceStrategy("cuda:1"), "Did you mean 'GPU:1'?"),
    "losses": (lambda s, w: rx.losses, "rx.keras.losses"),
    "optimizers": (lambda s, w: rx.optimizers, "rx.keras.optimizers"),
    "jit": (lambda s, w: rx.jit, "rx.function"),
    "Sequential": (lambda s, w: rx.Sequential, "rx.keras.Sequential"),
    "value is assigned": (lambda s, w: setattr(w, "value", 1), "variable.assign(value)"),
    "in place": (lambda s, w: in_place(w), "variable.assign_sub(value)"),
    "distribute_dataset": (lambda s, w: s.distribute_dataset, "experimental_distribute_dataset"),
    "parts for args": (lambda s, w: s.run(max, jnp.ones(2), jnp.ones(2)), "args=(x, y)"),
    "op after value": (lambda s, w: s.reduce(w, "SUM", axis=None), "before the value"),
    "gather without axis": (lambda s, w: s.gather(w), "MirroredStrategy.gather needs the argument"),
    "DataParallel": (lambda s, w: rx.distribute.DataParallel, "`MirroredStrategy`"),
    "FSDP": (lambda s, w: rx.distribute.FSDPStrategy, 'variable_policy="sharded"'),
    "DataLoader": (lambda s, w: rx.data.DataLoader, "from_tensor_slices"),
    "no GPU": (lambda s, w: rx.distribute.OneDeviceStrategy("GPU:0"), "`replicax doctor` shows"),
    "shuffle without buffer": (lambda s, w: examples().shuffle(), "Dataset.shuffle() missing"),
    "one argument for tuples": (lambda s, w: list(examples().map(lambda e: e)), "each part"),
    "single examples": (
        lambda s, w: next(iter(s.experimental_distribute_dataset(examples()))),
        "dataset.batch(global_batch_size)",
    ),
    "no Checkpoint": (
        lambda s, w: rx.train.CheckpointManager(w, "folder", max_to_keep=1),
        "rx.train.Checkpoint(model=model)",
    ),
    "values for cond": (lambda s, w: rx.cond(True, 1, 2), "(pred, lambda: a, lambda: b)"),
    "a value for scan": (lambda s, w: rx.scan(w, 0, jnp.ones(2)), "rx.scan needs functions"),
    "a value for while_loop": (lambda s, w: rx.while_loop(True, abs, 1), "while_loop(cond, body, "),
    "no InputContext": (
        lambda s, w: s.distribute_datasets_from_function(lambda: examples()),
        "`lambda context: dataset`",
    ),
    "no max_to_keep": (
        lambda s, w: rx.train.CheckpointManager(rx.train.Checkpoint(w=w), "folder"),
        "or None for all",
    ),
    "no saved model": (lambda s, w: rx.saved_model.load("/nowhere"), "rx.saved_model.save("),
    "pickled variable": (lambda s, w: pickle.dumps(w), "`rx.train.Checkpoint`"),
    "pickled strategy": (lambda s, w: pickle.dumps(s), "Create it in each process"),
    "initializer": (
        lambda s, w: rx.Variable(jax.nn.initializers.normal()),
        "rx.Variable(lambda: initializer(shape))",
    ),
    "two gradients of one tape": (lambda s, w: two_gradients(w), "persistent=True"),
    "two strategies": (
        lambda s, w: mirrored(2).run(lambda: w.assign(jnp.ones(3))),
        "two strategies, though they look the same",
    ),
    "scope in another": (
        lambda s, w: use_two_scopes(s, mirrored(2)),
        "create one, and use it everywhere",
    ),
    "more devices than a simulated slice has": (
        lambda s, w: assign_devices(num_replicas=1024),
        "REPLICAX_CPU_DEVICES",
    ),
    "parameters that differ": (
        lambda s, w: s.run(lambda: jnp.ones(2)) + 1,
        "all-reduce the gradients",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told_what_to_write(strategy, w, name):
    make, words = MISTAKES[name]
    kinds = (AttributeError, TypeError, ValueError, RuntimeError, rx.errors.NotFoundError)
    with pytest.raises(kinds) as raised:
        make(strategy, w)

    assert words in str(raised.value)
    assert len(str(raised.value)) < 600
    # Python would append the most similar name of `obj`: "Did you mean: 'per_replica'?"
    assert getattr(raised.value, "obj", None) is None


def test_fit_in_a_replica_is_told_where_to_call_it(strategy):
    with strategy.scope():
        model = rx.keras.Sequential([rx.keras.layers.Dense(1)])
        model.compile("sgd", "mse")

    with pytest.raises(rx.errors.ScopeError, match="divides each batch over the replicas itself"):
        strategy.run(lambda: model.fit(np.ones((4, 3)), np.ones((4, 1))))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (([[1.0, 2.0]], [1.0]), "`numpy.asarray(x)`"),
        ((np.ones((4, 3)),), "(inputs, targets)"),
        ((rx.data.Dataset.from_tensor_slices(np.ones((4, 3), "f")).batch(2),), "(inputs, targets)"),
    ],
    ids=["lists", "no targets", "dataset of inputs"],
)
def test_keras_errors_for_data_are_explained(data, words):
    model = rx.keras.Sequential([rx.keras.layers.Dense(1)])
    model.compile("sgd", "mse")

    with pytest.raises(ValueError) as raised:  # noqa: PT011 - Keras's words
        model.fit(*data, verbose=0)

    assert words in "".join(raised.value.__notes__)


def test_a_replica_context_outside_of_replicas_is_explained(strategy):
    with pytest.raises(AttributeError) as raised, strategy.scope():
        rx.distribute.get_replica_context().all_reduce("SUM", jnp.ones(1))

    assert "`strategy.reduce`" in "".join(raised.value.__notes__)


def test_an_optax_optimizer_in_compile_is_explained():
    model = rx.keras.Sequential([rx.keras.layers.Dense(1)])
    with pytest.raises(ValueError, match="interpret optimizer") as raised:
        model.compile(optax.adam(0.1), "mse")

    assert "rx.keras.optimizers.Adam" in "".join(raised.value.__notes__)


def needs_two(x, y):
    return x


def changes_in_place(x):
    outer = x if x is None else outer - x  # noqa: F821, F841 - the mistake


IN_REPLICAS = {
    "backward": (lambda x: x.sum().backward(), "`tape.gradient(loss, variables)`"),
    "minimize": (lambda x: rx.keras.optimizers.SGD().minimize(x, []), "apply_gradients(zip("),
    "numpy": (lambda x: x.numpy(), "numpy.asarray(x)"),
    "unknown axis": (lambda x: jax.lax.psum(x, "batch"), "all_reduce('SUM', x)"),
    "local name": (changes_in_place, "`w.assign_sub(value)`"),
    "too few arguments": (needs_two, "passed 1 argument to needs_two(x, y). `args=batch` passes"),
}


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("name", IN_REPLICAS)
def test_a_mistake_in_a_replica_gets_a_note(strategy, name, compiled):
    fn, words = IN_REPLICAS[name]
    step = lambda x: strategy.run(fn, args=(x,))  # noqa: E731

    with pytest.raises((AttributeError, NameError, TypeError, ValueError)) as raised:
        (rx.function(step) if compiled else step)(jnp.ones(3))

    notes = raised.value.__notes__
    assert sum(words in note for note in notes) == 1, notes


def test_gradients_that_are_all_none_get_a_note(strategy):
    with strategy.scope():
        weight, optimizer = rx.keras.Variable(1.0), rx.keras.optimizers.SGD()

    with pytest.raises(ValueError, match="No gradients provided") as raised:
        strategy.run(lambda: optimizer.apply_gradients([(None, weight)]))

    assert any("the tape did not record" in note for note in raised.value.__notes__)


def test_an_error_of_the_function_itself_gets_no_note_about_arguments(strategy):
    with pytest.raises(TypeError, match="missing 1 required") as raised:
        strategy.run(lambda x: needs_two(x), args=(jnp.ones(3),))

    assert not any("strategy.run" in note for note in raised.value.__notes__)


@pytest.mark.parametrize("trainable", [True, False])
def test_weights_outside_of_the_scope_that_replicas_add_to_are_reported_once(
    strategy, trainable, caplog, monkeypatch
):
    monkeypatch.setattr("replicax._src.state.policy._warned", False)
    outside = rx.Variable(jnp.zeros(2), trainable=trainable)

    for _ in range(2):
        strategy.run(lambda: outside.assign_add(jnp.ones(2)))

    assert caplog.text.count("an update from all-reduced gradients counts 2 times") == trainable
    assert outside.numpy().tolist() == [4.0, 4.0]


# Tracebacks.


def fails(x):
    return x @ jnp.ones((7, 7))


def own_frames(error):
    frames = traceback.extract_tb(error.__traceback__)
    return [f for f in frames if "/replicax/_src/" in f.filename]


@pytest.mark.parametrize("compiled", [True, False])
def test_tracebacks_of_user_errors_leave_out_replicax(strategy, compiled, monkeypatch):
    run = lambda: strategy.run(fails, args=(jnp.ones((3, 3)),))  # noqa: E731
    step = rx.function(run) if compiled else run

    with pytest.raises(TypeError, match="dot_general") as raised:
        step()
    assert len(own_frames(raised.value)) == 1
    assert "fails" in [f.name for f in traceback.extract_tb(raised.value.__traceback__)]

    monkeypatch.setenv("REPLICAX_TRACEBACK_FILTERING", "off")
    with pytest.raises(TypeError, match="dot_general") as raised:
        step()
    assert len(own_frames(raised.value)) > 4


# Processes.

LATE = """
import replicax as rx, jax
jax.devices()
import os
os.environ["REPLICAX_CPU_DEVICES"] = "2"
rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
"""


def test_virtual_devices_that_come_too_late_are_reported():
    result = run_fresh(LATE)
    assert "REPLICAX_CPU_DEVICES=2 is in the environment now, but was not" in result.stderr


PROGRAM = """
import replicax as rx
with rx.distribute.MirroredStrategy().scope():
    rx.keras.layers.Dense(1)
"""


@pytest.mark.parametrize("library", ["jax", "keras"])
def test_a_program_with_the_name_of_a_library_is_reported(library, tmp_path):
    program = tmp_path / f"{library}.py"
    program.write_text(PROGRAM)

    result = run_fresh(f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{PROGRAM}")

    assert f"ImportError: The file {program} hides the library {library}" in result.stderr


FORK = """
import os, sys, warnings
warnings.simplefilter("ignore")
import jax.numpy as jnp, replicax as rx
double = rx.function(lambda x: x * 2)
double(jnp.ones(2))
if os.fork() == 0:
    try:
        double(jnp.ones(2))
    except RuntimeError as error:
        os.write(1, str(error).encode())
    os._exit(0)
os.wait()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_process_is_refused_at_once():
    result = run_fresh(FORK)
    assert "forked after JAX had started" in result.stdout
    assert "spawn" in result.stdout


def test_log_lines_name_replicax_unless_logging_is_configured(capsys, monkeypatch):
    log = logging.getLogger("replicax")
    log.warning("seen by the handlers of the root logger")
    assert "replicax: seen" not in capsys.readouterr().err
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    log.warning("seen %d", 1)
    assert capsys.readouterr().err == "replicax: seen 1\n"
