"""Extensions as another package would write them: this file imports public names alone."""

import ast
import copy
import dataclasses
import importlib
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import replicax as rx


def test_tests_and_examples_use_public_names_only():
    examples = Path(__file__).parents[2].joinpath("examples", "extend").glob("*.py")
    for path in [Path(__file__), *examples]:
        tree = ast.parse(path.read_text())
        imported = [n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
        imported += [a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names]

        assert not [name for name in imported if "_src" in name], path.name


def context():
    return rx.distribute.get_replica_context()


# A strategy.


class Grouped(rx.distribute.Strategy):
    """Groups of ``size`` devices, in reverse order."""

    def __init__(self, size, **kwargs):
        devices = tuple(reversed(jax.devices()))
        super().__init__(rx.extend.Topology(devices, cores=size), **kwargs)


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("policy", ["mirrored", "sharded"])
def test_strategy_trains_like_one_device(size, policy, mode):
    rows, w0 = np.arange(24, dtype="float32").reshape(8, 3), np.ones(3, "float32")

    def loss(w, x):
        return ((x @ w - 1) ** 2).mean()

    expected = w0 - 0.01 * jax.grad(loss)(w0, rows)

    strategy = Grouped(size, variable_policy=policy)
    with strategy.scope():
        w = rx.Variable(w0)

    def replica_step(x):
        _, [gradient] = rx.value_and_grad(lambda: loss(w, x), [w])()
        w.assign_sub(0.01 * context().all_reduce("MEAN", gradient))

    dataset = rx.data.Dataset.from_tensors(rows)
    for batch in strategy.experimental_distribute_dataset(dataset):
        mode(lambda b: strategy.run(replica_step, args=(b,)))(batch)

    assert strategy.num_replicas_in_sync == 8 // size
    np.testing.assert_allclose(w.numpy(), expected, rtol=1e-5)


def test_topology_describes_the_replicas():
    topology = rx.extend.Topology(tuple(jax.devices()[:6]), cores=3)

    assert topology.num_replicas == 2
    assert topology.local_replicas == (0, 1)
    assert topology.primary_devices == (jax.devices()[0], jax.devices()[3])
    assert topology.devices_of(1) == tuple(jax.devices()[3:6])
    assert topology.is_fully_addressable
    assert topology.mesh.shape[rx.extend.REPLICA_AXIS] == 2


@pytest.mark.parametrize("cores", [0, 3, 5, -1])
def test_topology_rejects_devices_that_do_not_divide(cores):
    with pytest.raises(rx.errors.PlacementError, match=f"cores is {cores}"):
        rx.extend.Topology(tuple(jax.devices()), cores=cores)


def test_topology_rejects_no_devices_and_duplicates():
    with pytest.raises(rx.errors.PlacementError, match="no devices"):
        rx.extend.Topology(())
    with pytest.raises(rx.errors.PlacementError, match="twice"):
        rx.extend.Topology((jax.devices()[0],) * 2)


# An integration.

LIBRARY = '''
class Parameter:
    """A class without any knowledge of replicax, which keeps its value in one attribute."""

    def __init__(self, data):
        self.data = data


class Frozen(Parameter):
    pass


class Module:
    def __init__(self, w):
        self.w = Parameter(w)
        self.b = Frozen(w * 0)
'''


@pytest.fixture
def library(tmp_path, monkeypatch):
    name = f"paramlib{len(os.listdir(tmp_path.parent))}_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    sys.modules.pop(name, None)


def attach_to(name):
    """Return the attach function of an integration that keeps ``data`` in an `rx.Variable`."""

    def write(p, data):
        variable = vars(p).get("variable")
        if variable is None:
            vars(p)["variable"] = rx.Variable(data)
        else:
            variable.assign(data)

    def attach():
        parameter = importlib.import_module(name).Parameter
        parameter.data = property(lambda p: vars(p)["variable"].read_value(), write)
        return rx.extend.Integration(variables={parameter: lambda p: vars(p).get("variable")})

    return attach


@pytest.mark.parametrize("first", ["library", "integration"])
def test_integration_is_attached_once_whichever_comes_first(library, first):
    calls = Counter()

    def attach():
        calls["attach"] += 1
        assert library in sys.modules
        return attach_to(library)()

    if first == "library":
        importlib.import_module(library)
    rx.extend.register_integration(library, attach)
    assert calls["attach"] == (first == "library")
    importlib.import_module(library)
    importlib.import_module(library)

    assert calls["attach"] == 1


def test_parameters_of_a_library_are_variables_everywhere(library, two, mode, tmp_path):
    rx.extend.register_integration(library, attach_to(library))
    lib = importlib.import_module(library)
    with two.scope():
        model = lib.Module(jnp.ones(2))

    def replica_step():
        with rx.GradientTape() as tape:
            loss = (model.w.data**2).sum()
        gradient = tape.gradient(loss, model.w)
        model.w.data = model.w.data - context().all_reduce("MEAN", gradient) / 4
        return context().replica_id_in_sync_group

    mode(lambda: two.run(replica_step))()
    np.testing.assert_array_equal(model.w.data, [0.5, 0.5])
    assert len(two.experimental_local_results(model.w)) == 2

    path = rx.train.Checkpoint(model=model).save(str(tmp_path / "ckpt"))
    model.w.data = jnp.zeros(2)
    rx.train.Checkpoint(model=model).restore(path).assert_consumed()
    np.testing.assert_array_equal(model.w.data, [0.5, 0.5])


def test_pending_parameters_are_restored_when_they_get_a_value(library, tmp_path):
    def attach():
        parameter = importlib.import_module(library).Parameter
        integration = attach_to(library)()
        return dataclasses.replace(
            integration, pending={parameter: lambda p: "variable" not in vars(p)}
        )

    rx.extend.register_integration(library, attach)
    lib = importlib.import_module(library)
    saved = lib.Module(jnp.full(2, 3.0))
    path = rx.train.Checkpoint(model=saved).save(str(tmp_path / "ckpt"))

    model = lib.Module(jnp.zeros(2))
    del vars(model.w)["variable"]
    checkpoint = rx.train.Checkpoint(model=model)
    checkpoint.restore(path)
    model.w.data = jnp.zeros(2)

    np.testing.assert_array_equal(model.w.data, [3.0, 3.0])


def test_checkpoints_do_not_look_into_bookkeeping(library, tmp_path):
    def attach():
        module = importlib.import_module(library).Module
        return dataclasses.replace(attach_to(library)(), bookkeeping={module: {"calls"}})

    rx.extend.register_integration(library, attach)
    lib = importlib.import_module(library)
    model = lib.Module(jnp.full(2, 3.0))
    model.calls = [rx.Variable(1.0)]
    path = rx.train.Checkpoint(model=model).save(str(tmp_path / "ckpt"))

    assert [name for name, _ in rx.train.list_variables(path) if "calls" in name] == []
    assert any("model/w" in name for name, _ in rx.train.list_variables(path))


def test_subclasses_inherit_handlers(library):
    rx.extend.register_integration(library, attach_to(library))
    lib = importlib.import_module(library)

    frozen = lib.Frozen(jnp.float32(3))
    _, [gradient] = rx.value_and_grad(lambda: frozen.data**2, [frozen])()

    assert float(gradient) == 6


def test_opaque_objects_are_passed_whole(library, two):
    lib = importlib.import_module(library)
    jax.tree_util.register_pytree_node(
        lib.Module, lambda m: ((m.w, m.b), None), lambda _, parts: copy.copy(parts)
    )
    rx.extend.register_integration(
        library, lambda: rx.extend.Integration(opaque={lib.Module: lambda m: True})
    )
    model, seen = lib.Module(jnp.ones(2)), []

    two.run(seen.append, args=(model,))

    assert [m is model for m in seen] == [True, True]


def test_exports_and_checkpoint_handlers_are_used(library, tmp_path):
    lib = importlib.import_module(library)
    spec = rx.TensorSpec([None], "float32")
    rx.extend.register_integration(
        library,
        lambda: rx.extend.Integration(exports={lib.Module: lambda m: (lambda x: x * 2, [spec])}),
    )

    rx.saved_model.save(lib.Module(jnp.ones(2)), str(tmp_path / "model"))

    loaded = rx.saved_model.load(str(tmp_path / "model"))
    np.testing.assert_array_equal(loaded(jnp.arange(3.0)), [0, 2, 4])


def test_integration_by_place_is_imported_with_the_library(library, tmp_path):
    text = f"""
import replicax as rx
import {library}

def attach():
    {library}.attached = True
    return rx.extend.Integration()
"""
    (tmp_path / f"{library}_rx.py").write_text(text)
    rx.extend.register_integration(library, f"{library}_rx:attach")
    assert f"{library}_rx" not in sys.modules

    assert importlib.import_module(library).attached


@pytest.mark.parametrize("attach", [None, 3, "no_colon"])
def test_register_integration_rejects_other_arguments(attach):
    with pytest.raises(TypeError, match=r"must be a function that returns an rx\.extend"):
        rx.extend.register_integration("os", attach)


def test_attach_must_return_an_integration():
    with pytest.raises(TypeError, match="integration of os returned None"):
        rx.extend.register_integration("os", lambda: None)


def test_integration_needs_classes_that_take_attributes():
    with pytest.raises(TypeError, match=r"'int'.*derive"):
        rx.extend.register_integration(
            "os", lambda: rx.extend.Integration(variables={int: lambda x: None})
        )


# A dataset source.


class Counted(rx.extend.InputSource):
    """Batches of consecutive numbers from a random start, which is the state of a pass."""

    element_spec = rx.TensorSpec((4,), "int64")

    def __init__(self, steps):
        self.steps, self.produced = steps, 0

    @property
    def cardinality(self):
        return self.steps

    def open(self, state=None, skip=0):
        start = int(np.random.default_rng().integers(1000)) if state is None else state

        def batches():
            for i in range(skip, self.steps):
                self.produced += 1
                yield start + 4 * i + np.arange(4)

        return batches(), start


def collected(strategy, batches):
    return [np.asarray(strategy.gather(b, axis=0)) for b in batches]


@settings(deadline=None, max_examples=20)
@given(steps=st.integers(0, 5), position=st.integers(0, 5))
def test_input_source_resumes_at_any_step(steps, position):
    position = min(position, steps)
    two = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    iterator = iter(two.experimental_distribute_dataset(Counted(steps)))
    before = collected(two, (next(iterator) for _ in range(position)))
    state = json.loads(json.dumps(iterator.save_state()))
    rest = collected(two, iterator)
    source = Counted(steps)
    other = iter(two.experimental_distribute_dataset(source))
    other.restore_state(state)
    again = collected(two, other)

    np.testing.assert_array_equal(rest, again)
    everything = np.concatenate([*before, *rest]) if steps else np.zeros(0)
    assert everything.tolist() == [everything[0] + i for i in range(4 * steps)]


def test_input_source_skips_without_producing(two):
    iterator = iter(two.experimental_distribute_dataset(Counted(100)))
    next(iterator)
    state = {**iterator.save_state(), "steps": 99}
    iterator.close()
    source = Counted(100)
    other = iter(two.experimental_distribute_dataset(source))
    other.close()
    source.produced = 0
    other.restore_state(state)

    assert len(collected(two, other)) == 1
    assert source.produced <= 2


def test_input_source_per_worker(two):
    dataset = two.distribute_datasets_from_function(lambda _: Counted(4))

    seen = collected(two, dataset)

    assert [len(x) for x in seen] == [8, 8]


def test_input_source_declares_its_spec(two):
    dataset = two.experimental_distribute_dataset(Counted(2))

    local = rx.TensorSpec((2,), "int32")  # JAX has no int64 by default
    assert dataset.element_spec == rx.distribute.PerReplicaSpec(local, local)


# A cluster resolver.


class Listed(rx.distribute.cluster_resolver.ClusterResolver):
    def __init__(self):
        self.task_type, self.task_id = "worker", 0

    def cluster_spec(self):
        return rx.train.ClusterSpec({"worker": ["localhost:6501"]})

    def master(self, task_type=None, task_id=None, rpc_layer=None):
        return ""


RESOLVE = """
import os
import replicax as rx

def chosen(mode, **environment):
    os.environ.update(environment, ACME=mode)
    resolver = rx.distribute.MultiWorkerMirroredStrategy().cluster_resolver
    print(mode, type(resolver).__name__, resolver.task_type)
    for name in environment:
        del os.environ[name]

chosen("present")
chosen("present", REPLICAX_ALONE="1")
task = '"task": {"type": "worker", "index": 0}'
chosen("present", TF_CONFIG='{"cluster": {"worker": ["localhost:1"]}, ' + task + "}")
chosen("present", REPLICAX_HUB="localhost:1")
chosen("absent")
try:
    chosen("wrong")
except TypeError as error:
    print(error)
"""

PLUGIN = """
import os
import replicax as rx

class Acme(rx.distribute.cluster_resolver.ClusterResolver):
    def __init__(self):
        self.task_type, self.task_id = "chief", 0

    def cluster_spec(self):
        return rx.train.ClusterSpec({"chief": ["localhost:6502"]})

    def master(self, task_type=None, task_id=None, rpc_layer=None):
        return ""

def resolver():
    return {"present": Acme(), "absent": None, "wrong": 3}[os.environ["ACME"]]
"""


def test_resolver_is_found_by_its_entry_point(tmp_path):
    """In an environment in which a package with an entry point is installed."""
    (tmp_path / "acme_plugin.py").write_text(PLUGIN)
    info = tmp_path / "acme_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-plugin\nVersion: 1.0\n")
    points = "[replicax.cluster_resolvers]\nacme = acme_plugin:resolver\n"
    (info / "entry_points.txt").write_text(points)
    source = str(Path(rx.__file__).parents[1])
    env = os.environ | {"PYTHONPATH": f"{source}:{tmp_path}", "JAX_PLATFORMS": "cpu"}

    result = subprocess.run(
        [sys.executable, "-c", RESOLVE], env=env, capture_output=True, text=True
    )

    assert result.returncode == 0, result.stderr
    found, alone, tf_config, launched, absent, error = result.stdout.splitlines()
    assert found == "present Acme chief"
    assert alone == "present TFConfigClusterResolver None"
    assert tf_config == "present TFConfigClusterResolver worker"
    assert launched == "present TFConfigClusterResolver None"
    assert absent == "absent TFConfigClusterResolver None"
    assert "The entry point 'acme'" in error
    assert "returned 3" in error


def test_resolver_as_an_argument():
    strategy = rx.distribute.MultiWorkerMirroredStrategy(Listed())

    assert isinstance(strategy.cluster_resolver, Listed)


# Cross-device ops.


class Chain(rx.extend.CollectiveOps):
    """Sums around a ring of neighbours, step by step."""

    def sum_replicas(self, leaves, options, topology):
        size = topology.num_replicas
        ring = [(i, (i + 1) % size) for i in range(size)]
        totals = list(leaves)
        for _ in range(size - 1):
            leaves = [jax.lax.ppermute(x, rx.extend.REPLICA_AXIS, ring) for x in leaves]
            totals = [t + x for t, x in zip(totals, leaves, strict=True)]
        return totals


@pytest.mark.parametrize("op", ["SUM", "MEAN"])
@pytest.mark.parametrize("size", [1, 4])
def test_own_all_reduce_matches_numpy(size, op, mode):
    strategy = rx.distribute.MirroredStrategy(jax.devices()[:size], Chain())
    rows = np.random.default_rng(0).integers(0, 99, (size, 3)).astype("float32")
    expected = rows.sum(0) if op == "SUM" else rows.mean(0)

    def replica_step(x):
        return context().all_reduce(op, {"a": x[0], "b": x[0] * 2})

    got = mode(lambda x: strategy.run(replica_step, args=(x,)))(
        next(iter(strategy.experimental_distribute_dataset(rx.data.Dataset.from_tensors(rows))))
    )

    for replica in range(size):
        local = jax.tree.map(
            lambda v: strategy.experimental_local_results(v)[replica],  # noqa: B023
            got,
            is_leaf=lambda v: isinstance(v, rx.distribute.DistributedValues),
        )
        np.testing.assert_allclose(local["a"], expected, rtol=1e-6)
        np.testing.assert_allclose(local["b"], 2 * expected, rtol=1e-6)


def test_ops_without_the_method_explain(two):
    class Empty(rx.extend.CollectiveOps):
        pass

    strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"], Empty())
    with pytest.raises(NotImplementedError, match="Empty does not define sum_replicas"):
        strategy.run(lambda: context().all_reduce("SUM", jnp.ones(2)))


# A checkpointable object.


class Phase:
    def __init__(self, name):
        self.name = name

    def save_state(self):
        return {"name": self.name}

    def restore_state(self, state):
        self.name = state["name"]


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: [x], lambda x: {"inner": x}])
def test_checkpointable_object_is_restored_at_any_depth(tmp_path, wrap):
    saved, other = Phase("warmup"), Phase("")
    path = rx.train.Checkpoint(phase=wrap(saved)).save(str(tmp_path / "ckpt"))

    rx.train.Checkpoint(phase=wrap(other)).restore(path).assert_consumed()

    assert other.name == "warmup"


def test_objects_with_both_methods_satisfy_the_protocol():
    phase: rx.extend.Checkpointable = Phase("a")

    assert phase.save_state() == {"name": "a"}
