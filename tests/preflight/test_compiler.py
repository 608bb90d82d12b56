"""How a program is compiled: the options of the compiler, and the executable that is kept."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import serialize_executable

import replicax as rx
from replicax._src.preflight import compiler
from replicax._src.preflight.compiler import Compiling
from replicax._src.preflight.preflight import compile_steps
from replicax._src.preflight.targets import Limits, Target
from replicax._src.preflight.trace import Step, trace
from tests.preflight.needs import needs_compiler, needs_cuda

ON_EACH = pytest.mark.parametrize(
    "name",
    [pytest.param("v5e:2x2", marks=needs_compiler), pytest.param("h100:1x4", marks=needs_cuda)],
)


def learn(count):
    """A step of ``count`` replicas, and its variable."""
    strategy = rx.distribute.MirroredStrategy([f"CPU:{i}" for i in range(count)])
    with strategy.scope():
        weight = rx.Variable(jnp.ones((8, 8)), name="weight")

    def replica(x):
        gradient = rx.distribute.get_replica_context().all_reduce("SUM", x.T @ x)
        weight.assign_add(gradient)
        return (x @ weight.read_value()).sum()

    step = rx.function(
        lambda x: strategy.reduce("SUM", strategy.run(replica, args=(x,)), axis=None)
    )
    x = np.arange(count * 16, dtype=np.float32).reshape(count, 2, 8) / 64
    rows = strategy.experimental_distribute_values_from_function(
        lambda context: x[context.replica_id_in_sync_group]
    )
    return step, rows, weight


def test_an_executable_is_loaded_again_and_computes_what_the_step_does(tmp_path):
    """Of the devices here; the same for others, which only they can run."""
    step, rows, weight = learn(4)
    devices = Target("cpu:4", "cpu", "cpu", 4, 1 << 30, Limits(1, 1, 1))
    traced = trace(Step.of(step, (rows,), {}), devices)
    request = traced.request() | {"platform": "cpu", "flags": {}}
    compiled = compiler._compile(request, np.asarray(jax.devices()[:4]), traced.program)
    compiler._save(compiled, str(tmp_path / "step.bin"))

    loaded = serialize_executable.deserialize_and_load(
        *pickle.loads((tmp_path / "step.bin").read_bytes()), execution_devices=jax.devices()[:4]
    )
    (of_weight, of_rows), _ = loaded.input_shardings
    stacked = jax.device_put(np.arange(64, dtype=np.float32).reshape(4, 2, 8) / 64, of_rows)
    new, total = loaded(jax.device_put(np.ones((8, 8), np.float32), of_weight), stacked)

    assert traced.names == ("weight", "argument 0")
    expected = step(rows)
    np.testing.assert_allclose(total, expected, rtol=1e-6)
    np.testing.assert_allclose(new, weight.read_value(), rtol=1e-6)


@ON_EACH
def test_the_executable_for_devices_that_are_not_here_is_kept_and_only_they_take_it(name, tmp_path):
    step, rows, _ = learn(2)
    path = tmp_path / "step.bin"

    (report,) = compile_steps(
        Step.of(step, (rows,), {}), [Target.parse(name)], Compiling(executable=str(path))
    )

    assert report.compiles
    payload, ins, outs = pickle.loads(path.read_bytes())
    assert (ins.num_leaves, outs.num_leaves) == (2, 2)  # the weight and the rows; it and the loss
    with pytest.raises(jax.errors.JaxRuntimeError):
        serialize_executable.deserialize_and_load(payload, ins, outs)


@ON_EACH
def test_flags_reach_the_compiler(name, tmp_path):
    step, rows, _ = learn(2)
    how = Compiling.of(f"--xla_dump_to={tmp_path} --xla_dump_hlo_as_text")

    (report,) = compile_steps(Step.of(step, (rows,), {}), [Target.parse(name)], how)

    assert report.compiles
    assert list(tmp_path.glob("*after_optimizations*"))  # which the compiler wrote


@ON_EACH
@pytest.mark.parametrize("flag", ["xla_no_such_thing=7", "xla_dump_hlo_as_text=perhaps"])
def test_a_flag_that_the_compiler_does_not_take_is_an_error_with_words(name, flag):
    step, rows, _ = learn(2)

    with pytest.raises(ValueError, match=rf"does not take --{flag}: .*--xla-flags"):
        list(compile_steps(Step.of(step, (rows,), {}), [Target.parse(name)], Compiling.of(flag)))


def test_what_is_not_a_flag_at_all_is_refused_first():
    with pytest.raises(ValueError, match="'verbose' is not a flag of XLA"):
        Compiling.of("--xla_dump_hlo_as_text verbose=1")
    assert Compiling.of("--xla_a --xla_b=false --xla_c=3").xla_flags == {
        "xla_a": True,
        "xla_b": False,
        "xla_c": "3",
    }
