import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import replicax as rx
from replicax._src.preflight.costs import Collective
from replicax._src.preflight.report import Memory
from tests.preflight.needs import needs_compiler
from tests.tpu.nets import ConvNet, Training, Transformer, slice_of

WIDTH = 512


def matrix_step(strategy):
    """A step that multiplies by a matrix and all-reduces its gradient."""
    with strategy.scope():
        weight = rx.Variable(jnp.zeros((WIDTH, WIDTH)), name="weight")

    @rx.function
    def train_step(x):
        def replica(x):
            def loss():
                return jnp.square(jnp.tanh(x @ weight.read_value()) - 1).mean()

            value, (gradient,) = rx.value_and_grad(loss, [weight])()
            gradient = rx.distribute.get_replica_context().all_reduce("SUM", gradient)
            weight.assign_sub(gradient)
            return value

        return strategy.run(replica, args=(x,))

    return train_step


@needs_compiler
def test_a_step_is_compiled_for_a_whole_slice():
    strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    rows = strategy.experimental_distribute_values_from_function(lambda _: np.ones((8, WIDTH)))

    report = rx.tpu.preflight(matrix_step(strategy), (rows,), "v5e:4x4")

    assert (report.compiles, report.fits, report.error) == (True, True, "")
    assert (report.num_devices, report.num_replicas, report.step) == (16, 16, "train_step")
    weight = WIDTH * WIDTH * 4
    rows_of_one = 8 * WIDTH * 4
    assert report.memory.arguments == pytest.approx(weight + rows_of_one, rel=0.1)
    assert report.memory.outputs < weight / 10  # the new weight takes the place of the old
    (reduced,) = (c for c in report.collectives if c.kind == "all-reduce")
    assert (reduced.group, reduced.bytes) == (16, weight)
    assert report.flops == 2 * 2 * 8 * WIDTH * WIDTH
    assert report.headroom > 15 * 2**30
    assert report.step_seconds >= report.communication_seconds > 0


@needs_compiler
def test_sharded_variables_take_their_share_of_a_slice():
    strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"], variable_policy="sharded")
    rows = strategy.experimental_distribute_values_from_function(lambda _: np.ones((8, WIDTH)))

    report = rx.tpu.preflight(matrix_step(strategy), (rows,), "v5e:4x4")

    weight = WIDTH * WIDTH * 4
    assert report.memory.arguments == pytest.approx(weight / 16 + 8 * WIDTH * 4, rel=0.1)
    # Along one dimension of the slice and then the other: all at once, it would be summed whole.
    found = {(c.kind, c.group): c.count for c in report.collectives}
    assert found == {("all-gather", 16): 1, ("reduce-scatter", 4): 2}


@needs_compiler
def test_slices_are_joined_by_the_network_of_the_data_centre():
    strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    rows = strategy.experimental_distribute_values_from_function(lambda _: np.ones((8, WIDTH)))

    report = rx.preflight(matrix_step(strategy), (rows,), "2x v5e:2x2")

    assert (report.num_devices, report.num_replicas) == (8, 8)
    found = {c.kind: c for c in report.collectives}
    weight = WIDTH * WIDTH * 4
    # Each of the four chips of a slice sends its quarter of the gradients to the other slice.
    assert weight / 4 <= found["send"].bytes < weight / 3
    assert (found["send"].hosts, found["reduce-scatter"].group) == (2, 4)
    near, far = report.chip.link_bytes, report.chip.far_bytes / report.chip.near
    assert report.communication_seconds > found["send"].bytes / far > found["send"].bytes / near


@needs_compiler
def test_the_step_still_runs_here_afterwards():
    strategy = slice_of(cores=4, replicas=2)
    training = Training(strategy, Transformer)
    expected = Training(strategy, Transformer).run(2)

    rx.tpu.preflight(training.step, (training.batch(0),), "v5e:2x4")

    for w, e in zip(training.run(2), expected, strict=True):
        np.testing.assert_array_equal(w, e)


@needs_compiler
def test_logical_devices_hold_their_parts():
    strategy = slice_of(cores=4, replicas=2)
    with rx.tpu.LayoutMap({"weight": [1, 4]}).scope():
        step = matrix_step(strategy)

    report = rx.tpu.preflight(step, (jnp.ones((8, WIDTH)),), "v4:2x2x2")

    assert (report.num_devices, report.num_replicas) == (8, 2)
    part = WIDTH * WIDTH * 4 / 4
    assert report.memory.arguments == pytest.approx(part + 8 * WIDTH * 4, rel=0.05)
    assert max(c.bytes for c in report.collectives) == pytest.approx(part, rel=0.01)


@needs_compiler
def test_a_spatial_split_shows_its_halo():
    strategy = slice_of(cores=8, replicas=1)

    def split(x):
        return strategy.experimental_split_to_logical_devices(x, [1, 2, 4, 1])

    training = Training(strategy, ConvNet, split)

    report = rx.tpu.preflight(training.step, (training.batch(0),), "v5e:4x4")

    assert report.num_replicas == 2
    assert "collective-permute" in {c.kind for c in report.collectives}


@needs_compiler
def test_what_does_not_fit_says_by_how_much():
    strategy = rx.distribute.TPUStrategy()
    with strategy.scope(), rx.tpu.planning():
        large = rx.Variable(lambda: jnp.zeros((100_000, 50_000)), name="20 GB")

    def replica():
        large.assign_add(jnp.ones(large.shape))

    @rx.function
    def grow():
        strategy.run(replica)

    report = rx.tpu.preflight(grow, (), "v5e:2x2")

    assert not report.fits
    assert "RESOURCE_EXHAUSTED" in report.error
    assert report.headroom < -(2**30)
    assert "does NOT fit" in str(report)
    # Of 20 GB, three of four replicas hold 15 GB, or 13.97 GiB.
    assert report.advice[0] == (
        'variable_policy="sharded": each of 4 replicas stores 1/4 of the variables, 13.97 GiB less'
        " between steps"
    )


@needs_compiler
def test_planned_variables_that_are_split_fit():
    strategy = slice_of(cores=8, replicas=1)
    layouts = rx.tpu.LayoutMap({"large": [8, 1]})
    with strategy.scope(), rx.tpu.planning(), layouts.scope():
        large = rx.Variable(lambda: jnp.zeros((128_000, 50_000)), name="large")

    def replica():
        large.assign_add(jnp.ones(large.shape))

    report = rx.tpu.preflight(lambda: strategy.run(replica), (), "v5e:2x4")

    assert report.fits
    assert report.memory.arguments == pytest.approx(math.prod(large.shape) * 4 / 8, rel=0.05)


@needs_compiler
def test_a_sweep_is_a_table_json_and_a_plot(tmp_path):
    pytest.importorskip("matplotlib", reason="a plot needs matplotlib")
    strategy = rx.distribute.TPUStrategy()
    step = matrix_step(strategy)

    sweep = rx.tpu.preflight_sweep(step, (jnp.ones((8, WIDTH)),), ["v5e:2x2", "v5e:2x4"])
    for name in ("sweep.png", "sweep.svg"):
        sweep.plot(tmp_path / name)

    assert [r.num_devices for r in sweep.reports] == [4, 8]
    assert [r["topology"] for r in json.loads(sweep.to_json())] == ["v5e:2x2", "v5e:2x4"]
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "sweep.svg").read_text()


# Without the compiler.


@pytest.mark.parametrize("name", ["v9:2x2", "v5e:3x3", "v5e:2x2x2", "16x16"])
def test_a_slice_that_does_not_exist_is_refused_first(name):
    with pytest.raises(ValueError, match=r"The generations.*v5e:16x16"):
        rx.tpu.preflight(lambda: None, (), name)
    with pytest.raises(ValueError, match=r"The generations.*v5e:16x16"):
        rx.tpu.preflight_sweep(lambda: None, (), ["v5e:2x2", name])


def test_without_the_compiler_the_error_has_the_pip_line(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    with pytest.raises(ImportError, match=r"pip install 'replicax\[preflight\]'"):
        rx.tpu.preflight(lambda: None, (), "v5e:2x2")


@needs_compiler
def test_a_program_of_jax_alone_is_compiled_on_its_own_mesh():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    cut, whole = (NamedSharding(mesh, P(*axes)) for axes in (["data"], []))
    w = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32, sharding=whole)
    x = jax.ShapeDtypeStruct((64, WIDTH), jnp.float32, sharding=cut)

    def step(w, x):
        gradient = jax.grad(lambda w: jnp.square(jnp.tanh(x @ w) - 1).mean())(w)
        return w - gradient

    report = rx.preflight(jax.jit(step, donate_argnums=0), (w, x), "v5e:2x4")

    weight = WIDTH * WIDTH * 4
    assert (report.step, report.num_devices, report.num_replicas) == ("step", 8, 0)
    assert report.memory.arguments == weight + 8 * WIDTH * 4
    assert report.memory.outputs == 0  # in the place of the old weight
    assert {c.kind: (c.group, c.bytes) for c in report.collectives} == {"all-reduce": (8, weight)}
    assert report.flops == 2 * 2 * 8 * WIDTH * WIDTH
    with pytest.raises(ValueError, match="a mesh of 8 devices, while v5e:4x4 has 16"):
        rx.preflight(jax.jit(step), (w, x), "v5e:4x4")


@needs_compiler
def test_a_kernel_is_compiled_and_counted_by_what_it_says_of_itself():
    def double(x, out):
        out[...] = x[...] * 2

    told = pl.CostEstimate(flops=12345, transcendentals=0, bytes_accessed=777)
    x = jnp.ones((256, 256))
    kernel = pl.pallas_call(double, out_shape=jax.typeof(x), cost_estimate=told)

    report = rx.preflight(jax.jit(kernel), (x,), "v5e:1x1")

    assert (report.flops, report.notes) == (12345, ())
    assert report.operation_seconds >= 2 * x.nbytes / report.chip.hbm_bytes


@needs_compiler
def test_a_program_without_a_mesh_is_one_devices_work():
    weight = rx.Variable(jnp.ones((256, 256)), name="weight")

    @rx.function
    def step(x):
        weight.assign_add(x @ weight.read_value())

    report = rx.preflight(step, (jnp.ones((256, 256)),), "v5e:2x2")

    assert report.flops == 2 * 256**3
    assert (report.memory.arguments, report.memory.outputs) == (2 * 256 * 1024, 0)
    assert report.largest[0].what == "weight f32[256,256]"
    assert "one device computes everything" in report.notes[0]


@needs_compiler
def test_a_short_batch_is_compiled_as_the_full_one():
    strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    step = matrix_step(strategy)
    reports = {}
    for rows in (16, 15):
        dataset = rx.data.Dataset.from_tensor_slices(np.ones((rows, WIDTH), np.float32))
        (batch,) = strategy.experimental_distribute_dataset(dataset.batch(rows))
        reports[rows] = rx.preflight(step, (batch,), "v5e:2x2")

    full, short = reports[16], reports[15]
    assert (short.flops, short.memory.arguments) == (full.flops, full.memory.arguments)
    assert short.collectives == full.collectives
    assert full.notes == ()
    assert "compiled as if each had the most" in short.notes[0]


@needs_compiler
def test_the_step_of_keras_fit_without_a_strategy():
    keras = pytest.importorskip("keras")
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(128), keras.layers.Dense(1)])
    model.compile(optimizer="adam", loss="mse")
    model.optimizer.build(model.trainable_variables)
    groups = model.trainable_variables, model.non_trainable_variables, model.optimizer.variables
    groups = *groups, model.metrics_variables
    state = tuple([v.value for v in group] for group in groups)
    rows = jnp.ones((32, 64)), jnp.ones((32, 1))

    report = rx.preflight(jax.jit(model.train_step, donate_argnums=0), (state, rows), "v5e:1x1")

    numbers = 64 * 128 + 128 + 128 + 1
    assert report.compiles
    assert report.flops == 2 * 2 * 32 * 64 * 128  # a single column is no matrix product
    assert report.memory.arguments > 3 * 4 * numbers  # Adam keeps two more for each
    assert report.memory.outputs < 4 * numbers
    assert report.collectives == ()


@needs_compiler
def test_a_step_of_nnx_without_a_strategy():
    nnx = pytest.importorskip("flax.nnx")
    graph, state = nnx.split(nnx.Linear(64, 128, rngs=nnx.Rngs(0)))

    @jax.jit
    def step(state, x):
        gradient = jax.grad(lambda s: jnp.square(nnx.merge(graph, s)(x)).mean())(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, gradient)

    report = rx.preflight(step, (state, jnp.ones((32, 64))), "v5e:1x1")

    assert report.flops == 2 * 2 * 32 * 64 * 128
    assert any("kernel" in b.what for b in report.largest)


@needs_compiler
def test_replicas_that_do_not_fill_the_slice_are_refused():
    strategy = slice_of(cores=8, replicas=1)

    with pytest.raises(ValueError, match="4 devices, which replicas of 8 logical devices"):
        rx.tpu.preflight(lambda: strategy.run(lambda: jnp.ones(2)), (), "v5e:2x2")


def ask_the_host(x):
    return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def print_it(x):
    jax.debug.print("x is {}", x)
    return x


@needs_compiler
@pytest.mark.parametrize("called", [ask_the_host, print_it])
def test_a_step_that_calls_back_into_python_is_refused(called):
    strategy = rx.distribute.TPUStrategy()

    with pytest.raises(
        TypeError, match=r"calls back into Python.*jax\.debug\.print.*Leave that out"
    ):
        rx.tpu.preflight(lambda x: strategy.run(called, args=(x,)), (jnp.ones(2),), "v5e:2x2")
    with pytest.raises(TypeError, match=f"{called.__name__} calls back into Python"):
        rx.preflight(jax.jit(called), (jnp.ones(2),), "v5e:1x1")


def report_of(**changes):
    facts = {
        "step": "train_step",
        "topology": "v5e:2x2",
        "num_devices": 4,
        "num_replicas": 2,
        "compiles": True,
        "fits": True,
        "error": "",
        "memory": Memory(arguments=2**30, temporaries=2**30, total=2**31),
        "hbm": 2**34,
        "collectives": (),
        "flops": 197e12,
        "bytes_accessed": 819e9 * 2,
        "compile_seconds": 1.0,
    }
    return rx.tpu.PreflightReport(**facts | changes)


def test_the_estimate_is_the_roofline_that_the_report_states():
    report = report_of()

    assert report.compute_seconds == pytest.approx(1.0)
    assert report.memory_seconds == pytest.approx(2.0)
    assert report.step_seconds == pytest.approx(2.0)
    assert report_of(operation_seconds=2.5).step_seconds == pytest.approx(2.5)
    assert "max(flops / peak flops" in str(report)
    assert "fits, with 14.00 GiB to spare" in str(report)
    assert "2 replicas of 2 logical devices" in str(report)


def test_the_report_shows_what_runs_concurrently_and_what_would_need_less():
    gathers = Collective("all-gather", 4, 2**20, 8, asynchronous=2, apart_seconds=6e-3)
    waits = report_of(collectives=(gathers,), operation_seconds=1.0, waiting_seconds=0.25)
    full = report_of(fits=False, compiles=False, advice=("shard the variables",))

    text = " ".join(str(waits).replace("│", " ").split())
    # Two of the four have 3 ms of operations each between start and finish.
    assert "2 asynchronous with 3 ms of operations" in text
    assert "1.25e+03 ms if asynchronous collectives run" in text
    assert "concurrently" not in str(report_of())
    assert "would need less" in str(full)
    assert "shard the variables" in str(full)
    assert rx.tpu.PreflightReport.from_json(full.to_json()) == full


def test_a_report_of_failure_shows_the_compilers_words():
    text = str(report_of(compiles=False, error="INTERNAL: no such thing"))

    assert "does not compile" in text
    assert "INTERNAL: no such thing" in text


def test_json_has_every_figure():
    facts = json.loads(report_of().to_json())

    assert facts["memory"]["total"] == 2**31
    assert facts["headroom"] == 2**34 - 2**31
    assert facts["step_seconds"] == pytest.approx(2.0)
    assert "formula" in facts
