"""How a step is laid over a slice, without compiling it."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import replicax as rx
from replicax._src.preflight.script import preflight_script
from replicax._src.preflight.targets import Target
from replicax._src.preflight.trace import Step, trace
from tests.replicas import mirrored


def traced(shape, name, *, replicas=1):
    topology = rx.tpu.experimental.initialize_tpu_system()  # 2 x 2 chips of two cores
    assignment = rx.tpu.experimental.DeviceAssignment.build(topology, shape, num_replicas=replicas)
    strategy = rx.distribute.experimental.TPUStrategy(device_assignment=assignment)
    with strategy.scope():
        v = rx.Variable(jnp.zeros(8))
    step = Step.of(lambda: strategy.run(lambda: v.assign_add(jnp.ones(8))), (), {})
    return trace(step, Target.parse(name))


def test_a_device_assignment_is_laid_over_the_slice():
    found = traced([2, 2, 1], "v5e:4x4")

    assert found.axes == {"replica": 4, "l0": 2, "l1": 2}
    replicas = [set(found.places[i : i + 4]) for i in range(0, 16, 4)]
    corners = [(0, 0), (0, 2), (2, 0), (2, 2)]
    blocks = [{(x + i, y + j, 0, 0) for i in (0, 1) for j in (0, 1)} for x, y in corners]
    assert sorted(map(sorted, replicas)) == sorted(map(sorted, blocks))


def test_a_device_assignment_of_the_slice_itself_is_taken_as_it_is():
    found = traced([1, 2, 1, 2], "v3:2x2", replicas=2)

    first, second = set(found.places[:4]), set(found.places[4:])
    assert {place[0] for place in first} == {0}
    assert {place[0] for place in second} == {1}


def test_an_assignment_that_the_slice_has_no_room_for_is_named():
    found = traced([1, 1, 2], "v5e:4x4")

    assert found.places == ()
    assert "cannot be laid over 4x4x1x1" in found.notes[0]


def test_without_an_assignment_devices_come_in_their_order():
    strategy = rx.distribute.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        v = rx.Variable(1.0)
    step = Step.of(lambda: strategy.run(lambda: v.assign_add(jnp.asarray(1.0))), (), {})

    assert trace(step, Target.parse("v5e:2x2")).places == ()


def test_values_that_a_step_closes_over_are_on_the_slice_too():
    strategy = mirrored(2)
    with strategy.scope():
        v = rx.Variable(jnp.zeros(3))
    ids = strategy.run(lambda: jnp.ones(3))
    step = Step.of(lambda: strategy.run(lambda: v.assign_add(strategy_sum(ids))), (), {})

    found = trace(step, Target.parse("v5e:4x4"))

    assert found.axes == {"replica": 16}
    assert found.num_replicas == 16


def strategy_sum(x):
    return rx.distribute.get_replica_context().all_reduce("SUM", x)


def test_strategies_and_variables_are_as_they_were_after_a_trace_also_one_that_fails():
    strategy = mirrored(2)
    with strategy.scope():
        v = rx.Variable(jnp.zeros(3))
    here = strategy.topology

    def fails_on_many():
        if strategy.num_replicas_in_sync > 2:
            raise RuntimeError("too many")
        return strategy.run(lambda: v.assign_add(jnp.ones(3)))

    with pytest.raises(RuntimeError, match="too many"):
        trace(Step.of(fails_on_many, (), {}), Target.parse("v5e:4x4"))

    assert strategy.topology is here
    assert v.cell.topology is here
    assert strategy.num_replicas_in_sync == 2
    strategy.run(lambda: v.assign_add(jnp.ones(3)))
    assert v.numpy().tolist() == [1, 1, 1]


def _nnx_step(make):
    """Return a step of a layer of NNX and Adam, made by `make`, on two replicas of two devices."""
    devices = {"tensor": 2}
    strategy = mirrored(4, variable_policy="sharded", devices_per_replica=devices)
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "tensor"))

    def trainer():
        layer = nnx.Linear(64, 256, kernel_init=init, rngs=nnx.Rngs(0))
        return layer, nnx.Optimizer(layer, optax.adam(1e-2), wrt=nnx.Param)

    with strategy.scope():
        layer, optimizer = make(trainer)

    def replica_step(layer, optimizer, x):
        loss, gradients = nnx.value_and_grad(lambda m: rx.nn.mean_loss(m(x).sum(-1)))(layer)
        optimizer.update(layer, gradients)
        return loss

    x = strategy.experimental_distribute_values_from_function(lambda _: np.ones((4, 64), "f4"))
    return Step.of(lambda x: strategy.run(replica_step, (layer, optimizer, x)), (x,), {})


def test_a_model_of_nnx_eval_shape_is_planned_like_one_with_values():
    target = Target.parse("h100:2x4")
    with rx.tpu.planning():
        abstract = trace(_nnx_step(nnx.eval_shape), target)
    made = trace(_nnx_step(lambda make: make()), target)

    def inputs(found):
        text = jax.export.deserialize(bytearray(found.program)).mlir_module()
        return re.findall(r"%arg\d+: (tensor<\w+>)", re.search(r"@main\((.*)\) ->", text)[1])

    assert abstract.axes == made.axes == {"replica": 4, "l0": 2}
    assert inputs(abstract) == inputs(made)
    assert inputs(abstract).count("tensor<64x256xf32>") == 3  # the kernel, and both moments


FIT = """
import numpy as np
import replicax as rx
with rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
    model = rx.keras.Sequential([rx.keras.Input((4,)), rx.keras.layers.Dense(3)])
    model.compile("sgd", "mse")
model.fit(np.ones((6, 4)), np.ones((6, 3)), batch_size=6, verbose=0)
"""


def test_a_batch_of_keras_fit_is_cut_over_the_slice(tmp_path):
    script = tmp_path / "fit.py"
    script.write_text(FIT)
    target = Target.parse("v5e:2x2")

    program = preflight_script(str(script), [], None, lambda step: trace(step, target))

    shapes = {i.split(": ")[1].partition(" ")[0] for i in batches(program)}
    assert shapes >= {"tensor<12x4xf32>", "tensor<12x3xf32>"}  # 3 rows for each of 4 replicas


def batches(program):
    """Return the inputs that are sharded over the replicas, as in the text of the program."""
    text = jax.export.deserialize(bytearray(program.program)).mlir_module()
    head = re.search(r"@main\((.*?)\) ->", text, re.DOTALL)[1]
    return [i for i in re.split(r", (?=%arg)", head) if '{"replica"}' in i]
