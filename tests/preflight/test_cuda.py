"""Steps compiled for machines of eight H100s: what the GPUs would be made to do.

There is no GPU here. This is the nearest that the project comes to its GPU path: XLA's compiler for
GPUs, and the program that it makes.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

import replicax as rx
from tests.preflight.needs import needs_cuda

pytestmark = needs_cuda

NAMES = "h100:1x8", "h100:2x8"
WIDTH, ROWS = 256, 8


@pytest.fixture
def strategy():
    return rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def rows_of(strategy, *shape):
    return strategy.experimental_distribute_values_from_function(
        lambda _: np.ones(shape, np.float32)
    )


def layers(strategy, count=20):
    """Twenty variables, one all-reduce."""
    with strategy.scope():
        weights = [rx.Variable(jnp.ones((WIDTH, WIDTH)) / WIDTH) for _ in range(count)]

    def replica(x):
        def loss():
            y = x
            for w in weights:
                y = jnp.tanh(y @ w.read_value())
            return jnp.square(y - 1).mean()

        value, gradients = rx.value_and_grad(loss, weights)()
        gradients = rx.distribute.get_replica_context().all_reduce("SUM", gradients)
        for w, g in zip(weights, gradients, strict=True):
            w.assign_sub(0.1 * g)
        return value

    @rx.function
    def step(x):
        return strategy.reduce("MEAN", strategy.run(replica, args=(x,)), axis=None)

    return step, (rows_of(strategy, ROWS, WIDTH),)


def by_keras(strategy):
    keras = pytest.importorskip("keras")
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((WIDTH,)), keras.layers.Dense(WIDTH, "tanh"), keras.layers.Dense(8)]
        )
        optimizer = keras.optimizers.Adam()
        optimizer.build(model.trainable_variables)

    def replica(x):
        def loss():
            return keras.ops.mean(keras.ops.square(model(x, training=True)))

        value, gradients = rx.value_and_grad(loss, model.trainable_variables)()
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return value

    step = rx.function(lambda x: strategy.run(replica, args=(x,)))
    return step, (rows_of(strategy, ROWS, WIDTH),)


def by_nnx(strategy):
    nnx, optax = pytest.importorskip("flax.nnx"), pytest.importorskip("optax")
    with strategy.scope():
        model = nnx.Sequential(
            nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0)), nnx.Linear(WIDTH, 8, rngs=nnx.Rngs(1))
        )
        optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    def replica(x):
        value, gradients = nnx.value_and_grad(lambda m: jnp.square(m(x)).mean())(model)
        optimizer.update(model, gradients)
        return value

    step = rx.function(lambda x: strategy.run(replica, args=(x,)))
    return step, (rows_of(strategy, ROWS, WIDTH),)


def of_workers(_):
    """A script of several workers, which starts alone."""
    return layers(rx.distribute.MultiWorkerMirroredStrategy(), count=2)


def on_short_batches(strategy):
    """Replicas with different numbers of rows."""
    rows = np.ones((2 * ROWS - 1, WIDTH), np.float32)
    dataset = rx.data.Dataset.from_tensor_slices(rows).batch(len(rows))
    (batch,) = strategy.experimental_distribute_dataset(dataset)
    step, _ = layers(strategy, count=2)
    return step, (batch,)


def report_of(step, args, name):
    report = rx.preflight(step, args, name)
    assert (report.compiles, report.error) == (True, "")
    return report


def issued(report, kind):
    """Count a collective; compilers since JAX 0.11 keep it synchronous if nothing overlaps it."""
    started = len(re.findall(rf" {kind}-start\(", report.hlo))
    assert len(re.findall(rf" {kind}-done\(", report.hlo)) == started
    return started + len(re.findall(rf" {kind}\(", report.hlo))


def assert_nothing_goes_to_the_host(report):
    assert not re.findall(r" (infeed|outfeed|send|recv)\(", report.hlo)
    assert "S(5)" not in report.hlo  # the memory of the host
    assert "callback" not in report.hlo


@pytest.mark.parametrize("name", NAMES)
def test_the_gradients_of_twenty_variables_are_one_all_reduce(strategy, name):
    report = report_of(*layers(strategy), name)

    weights = 20 * WIDTH * WIDTH * 4
    (reduced,) = report.collectives
    hosts = 2 if name == "h100:2x8" else 1
    # The mean of the losses travels with the gradients, or is dropped by none.
    assert reduced.kind == "all-reduce"
    assert (reduced.group, reduced.hosts) == (report.num_devices, hosts)
    assert weights <= reduced.bytes <= weights + 64
    assert issued(report, "all-reduce") == reduced.count <= 2
    assert report.flops == (3 * 20 - 1) * 2 * ROWS * WIDTH * WIDTH
    # Every variable's new value takes the place of the old one.
    assert report.memory.arguments == weights + ROWS * WIDTH * 4
    assert report.memory.outputs < 1024
    assert_nothing_goes_to_the_host(report)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("make", [of_workers, on_short_batches])
def test_workers_and_short_batches_make_the_same_program(strategy, make, name):
    report = report_of(*make(strategy), name)

    weights = 2 * WIDTH * WIDTH * 4
    (reduced,) = report.collectives
    hosts = 2 if name == "h100:2x8" else 1
    assert (reduced.kind, reduced.group, reduced.hosts) == ("all-reduce", report.num_devices, hosts)
    assert weights <= reduced.bytes <= weights + 64
    assert issued(report, "all-reduce") == reduced.count <= 2
    assert report.flops == 5 * 2 * ROWS * WIDTH * WIDTH
    assert report.memory.outputs < 1024
    assert ("different numbers of rows" in "".join(report.notes)) == (make is on_short_batches)
    assert_nothing_goes_to_the_host(report)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("make", [by_keras, by_nnx])
def test_the_gradients_of_a_librarys_model_are_one_all_reduce(strategy, make, name):
    report = report_of(*make(strategy), name)

    parameters = 4 * (WIDTH * WIDTH + WIDTH + WIDTH * 8 + 8)
    sent = sum(c.bytes for c in report.collectives)
    assert {c.kind for c in report.collectives} == {"all-reduce"}
    assert parameters <= sent <= parameters + 1024
    assert issued(report, "all-reduce") <= 2
    assert report.memory.outputs < 1024  # parameters and Adam's moments stay where they are
    assert_nothing_goes_to_the_host(report)


@pytest.mark.parametrize("name", NAMES)
def test_sharded_variables_are_gathered_and_their_gradients_scattered(name):
    devices = ["CPU:0", "CPU:1"]
    strategy = rx.distribute.MirroredStrategy(devices, variable_policy="sharded")

    report = report_of(*layers(strategy, count=2), name)

    weights = 2 * WIDTH * WIDTH * 4
    assert report.memory.arguments == weights / report.num_devices + ROWS * WIDTH * 4
    assert report.memory.outputs < 1024
    kinds = {c.kind for c in report.collectives}
    assert "all-gather" in kinds
    assert kinds & {"reduce-scatter", "all-reduce"}
    assert_nothing_goes_to_the_host(report)


def test_loops_count_by_their_turns(strategy):
    with strategy.scope():
        weight = rx.Variable(jnp.zeros((WIDTH, WIDTH)))

    def replica(x):
        w = weight.read_value()
        y = jax.lax.while_loop(
            lambda c: c[0] < 20, lambda c: (c[0] + 2, jnp.tanh(c[1] @ w)), (0, x)
        )[1]
        weight.assign_add(rx.distribute.get_replica_context().all_reduce("SUM", y.T @ y))

    step = rx.function(lambda x: strategy.run(replica, args=(x,)))

    report = report_of(step, (rows_of(strategy, ROWS, WIDTH),), "h100:1x8")

    assert report.flops == 11 * 2 * ROWS * WIDTH * WIDTH
    assert report.notes == ()


@pytest.mark.parametrize("name", ["a100:1x8", "h200:1x8", "b200:1x8", "l4:1x8"])
def test_the_other_gpus_have_compilers_too(strategy, name):
    report = report_of(*layers(strategy, count=2), name)

    assert report.fits
    assert report.flops == 5 * 2 * ROWS * WIDTH * WIDTH


def test_what_a_gpu_cannot_hold_does_not_fit():
    strategy = rx.distribute.MirroredStrategy(["CPU:0"])
    with strategy.scope(), rx.tpu.planning():
        large = rx.Variable(lambda: jnp.zeros((1 << 17, 1 << 17)), name="64 GiB")

    report = rx.preflight(
        lambda: strategy.run(lambda: large.assign_add(jnp.ones(large.shape))), (), "h100:1x8"
    )

    assert (report.compiles, report.fits) == (True, False)
    assert report.headroom < 0


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.parametrize("in_replicas", [False, True])
def test_kernels_of_pallas_are_compiled_and_named(strategy, in_replicas):
    def double(x, out):
        out[...] = x[...] * 2

    x = jnp.ones((256, 256))
    how = triton.CompilerParams(num_warps=4)
    kernel = pl.pallas_call(double, out_shape=jax.typeof(x), compiler_params=how)

    def product(x):
        return kernel(x) @ x

    step, given, name = jax.jit(product), x, "h100:1x1"
    if in_replicas:
        step, given, name = (
            lambda x: strategy.run(product, (x,)),
            rows_of(strategy, 256, 256),
            "h100:1x2",
        )
    report = rx.preflight(step, (given,), name)

    assert report.compiles
    assert report.flops == 2 * 256**3
    assert any("triton, whose arithmetic is not counted" in note for note in report.notes)
