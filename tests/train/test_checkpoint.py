import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import replicax as rx

ON_READ = rx.VariableSynchronization.ON_READ
SUM = rx.VariableAggregation.SUM


class Model:
    """A user's own class, with variables anywhere in it."""

    def __init__(self, start):
        self.layers = [{"w": rx.Variable(start)}, (rx.Variable(start + 1),)]
        self.name = "model"
        self.bias = rx.Variable(jnp.full(3, start), name="bias")
        self.self_ = self  # a circle is no trouble

    def values(self):
        return [float(self.layers[0]["w"]), float(self.layers[1][0]), self.bias.numpy().tolist()]


def test_objects_come_back_as_they_were_saved(tmp_path):
    model, step = Model(1.0), rx.Variable(7)
    path = rx.train.Checkpoint(model=model, step=step).save(f"{tmp_path}/ckpt")

    other, other_step = Model(0.0), rx.Variable(0)
    status = rx.train.Checkpoint(model=other, step=other_step).restore(path)

    assert other.values() == model.values()
    assert int(other_step) == 7
    status.assert_consumed()


def test_saves_are_numbered_and_the_number_continues_after_a_restore(tmp_path):
    v = rx.Variable(0.0)
    first = rx.train.Checkpoint(v=v)
    assert [first.save(f"{tmp_path}/ckpt") for _ in range(2)] == [
        f"{tmp_path}/ckpt-1",
        f"{tmp_path}/ckpt-2",
    ]

    again = rx.train.Checkpoint(v=v)
    again.restore(rx.train.latest_checkpoint(tmp_path))

    assert again.save(f"{tmp_path}/ckpt") == f"{tmp_path}/ckpt-3"


def test_there_is_no_newest_checkpoint_in_an_empty_or_missing_folder(tmp_path):
    assert rx.train.latest_checkpoint(tmp_path) is None
    assert rx.train.latest_checkpoint(tmp_path / "missing") is None
    rx.train.Checkpoint(v=rx.Variable(0.0)).restore(None).assert_consumed()


@pytest.mark.parametrize("after", [1, 2, 4])
@pytest.mark.parametrize("before", [1, 2, 4])
def test_a_checkpoint_is_restored_on_any_number_of_replicas(tmp_path, before, after):
    def made(n):
        strategy = rx.distribute.MirroredStrategy([f"CPU:{i}" for i in range(n)])
        with strategy.scope():
            w = rx.Variable(jnp.zeros(3))
            total = rx.Variable(0, synchronization=ON_READ, aggregation=SUM)
        return strategy, w, total

    strategy, w, total = made(before)
    w.assign(jnp.arange(3.0))
    strategy.run(lambda: total.assign_add(5))
    path = rx.train.Checkpoint(w=w, total=total).write(f"{tmp_path}/ckpt")

    strategy, w, total = made(after)
    rx.train.Checkpoint(w=w, total=total).restore(path).assert_consumed()

    assert [v.numpy().tolist() for v in strategy.experimental_local_results(w)] == [
        [0.0, 1.0, 2.0]
    ] * after
    assert int(total.read_value()) == 5 * before


AGGREGATIONS = [SUM, rx.VariableAggregation.MEAN, rx.VariableAggregation.ONLY_FIRST_REPLICA]


def counted(n, aggregation, dtype):
    """What replicas add to, each for itself, and how they add."""
    strategy = rx.distribute.MirroredStrategy([f"CPU:{i}" for i in range(n)])
    with strategy.scope():
        zeros = jnp.zeros(2, dtype)
        v = rx.Variable(zeros, synchronization=ON_READ, aggregation=aggregation)

    def add(rows):
        values = [jnp.asarray(row, dtype) for row in rows]
        given = strategy.experimental_distribute_values_from_function(
            lambda c: values[c.replica_id_in_sync_group]
        )
        strategy.run(v.assign_add, args=(given,))

    return strategy, v, add


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_what_replicas_count_continues_to_the_bit(tmp_path, data):
    n, other_n = data.draw(st.sampled_from([(2, 3), (3, 2), (4, 1), (1, 4)]))
    aggregation = data.draw(st.sampled_from(AGGREGATIONS))
    is_mean = aggregation is rx.VariableAggregation.MEAN
    dtype = data.draw(st.sampled_from(["float32", "bfloat16", "int32"][: 3 - is_mean]))
    before, after = np.random.default_rng(data.draw(st.integers(0, 99))).normal(size=(2, n, 2))
    scale = data.draw(st.sampled_from([1, 1e3]))
    strategy, v, add = counted(n, aggregation, dtype)
    add(before * scale)
    total = v.numpy().tobytes()
    path = rx.train.Checkpoint(v=v).write(f"{tmp_path}/ckpt")
    add(after)

    same, again, add = counted(n, aggregation, dtype)
    rx.train.Checkpoint(v=again).restore(path).assert_consumed()
    assert again.numpy().tobytes() == total
    add(after)
    assert again.numpy().tobytes() == v.numpy().tobytes()
    for x, y in zip(
        same.experimental_local_results(again),
        strategy.experimental_local_results(v),
        strict=True,
    ):
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()

    # On other replicas, and for everybody else, it is one value.
    _, other, _ = counted(other_n, aggregation, dtype)
    rx.train.Checkpoint(v=other).restore(path).assert_consumed()
    if is_mean and other_n == 3:  # of three equal numbers it may be rounded
        eps = float(jnp.finfo(dtype).eps)
        saved = np.frombuffer(total, jnp.dtype(dtype)).astype("f8")
        np.testing.assert_allclose(other.numpy().astype("f8"), saved, rtol=eps)
    else:
        assert other.numpy().tobytes() == total
    reader = rx.train.load_checkpoint(path)
    assert list(reader.get_variable_to_shape_map()) == ["save_counter" + SUFFIX, "v" + SUFFIX]
    assert np.asarray(reader.get_tensor("v" + SUFFIX)).tobytes() == total


def test_copies_are_restored_only_where_they_are_combined_as_they_were(tmp_path):
    _, v, add = counted(2, SUM, "float32")
    add([[1, 2], [3, 4]])
    path = rx.train.Checkpoint(v=v).write(f"{tmp_path}/ckpt")

    for aggregation in AGGREGATIONS:
        _, other, _ = counted(2, aggregation, "float32")
        rx.train.Checkpoint(v=other).restore(path)
        assert other.numpy().tolist() == [4, 6]


def variable_of(kind):
    """A variable of 27 KiB that lies on devices in one of several ways."""
    name, _, count = kind.partition(" ")
    devices = [f"CPU:{i}" for i in range(int(count))]
    shape = (66, 104)
    if name == "plain":
        return rx.Variable(jnp.zeros(shape))
    if name == "cut":  # over logical devices
        topology = rx.tpu.experimental.initialize_tpu_system()
        dims = [1, 1, int(count)]
        assignment = rx.tpu.experimental.DeviceAssignment.build(topology, dims, num_replicas=2)
        strategy = rx.distribute.experimental.TPUStrategy(device_assignment=assignment)
        with strategy.scope(), rx.tpu.LayoutMap({"w": [1, int(count)]}).scope():
            return rx.Variable(jnp.zeros(shape), name="w")
    strategy = rx.distribute.MirroredStrategy(devices, variable_policy=name)
    with strategy.scope():
        return rx.Variable(jnp.zeros(shape))


KINDS = ["plain 1", "mirrored 2", "sharded 2", "sharded 3", "sharded 8", "cut 2"]


@pytest.mark.parametrize("after", KINDS)
@pytest.mark.parametrize("before", KINDS)
def test_a_value_is_restored_however_it_lay_and_lies_on_devices(tmp_path, before, after):
    value = np.random.default_rng(0).normal(size=(66, 104)).astype("f4")
    old, new = variable_of(before), variable_of(after)
    old.assign(value)
    path = rx.train.Checkpoint(w=old).write(f"{tmp_path}/ckpt")

    rx.train.Checkpoint(w=new).restore(path).assert_consumed()

    assert new.numpy().tobytes() == value.tobytes()
    assert rx.train.load_checkpoint(path).get_tensor("w" + SUFFIX).tobytes() == value.tobytes()


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["float32", "bfloat16", "float16", "int32", "uint8", "bool", "int8"]),
            st.lists(st.integers(0, 3), max_size=3),
        ),
        max_size=5,
    )
)
def test_values_of_any_shape_and_dtype_come_back_to_the_bit(tmp_path, kinds):
    rng = np.random.default_rng(len(kinds))
    values = [jnp.asarray(rng.integers(0, 2, shape), dtype) for dtype, shape in kinds]
    path = rx.train.Checkpoint(all=list(map(rx.Variable, values))).write(f"{tmp_path}/ckpt")

    fresh = [rx.Variable(jnp.zeros_like(v)) for v in values]
    rx.train.Checkpoint(all=fresh).read(path).assert_consumed()

    for new, old in zip(fresh, values, strict=True):
        assert new.dtype == old.dtype
        assert new.numpy().tobytes() == np.asarray(old).tobytes()


def test_random_keys_come_back(tmp_path):
    key = rx.Variable(jax.random.key(3))
    path = rx.train.Checkpoint(key=key).write(f"{tmp_path}/ckpt")
    fresh = rx.Variable(jax.random.key(0))
    rx.train.Checkpoint(key=fresh).read(path)
    assert jax.random.uniform(fresh.read_value()) == jax.random.uniform(jax.random.key(3))


def test_iterators_continue_where_they_were(tmp_path):
    dataset = rx.data.Dataset.range(100).shuffle(50, seed=3).batch(4)
    strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    plain = iter(dataset)
    spread = iter(strategy.experimental_distribute_dataset(dataset))
    for _ in range(3):
        next(plain), next(spread)
    checkpoint = rx.train.Checkpoint(plain=plain, spread=spread)
    path = checkpoint.write(f"{tmp_path}/ckpt")
    wanted = [np.asarray(next(plain)).tolist() for _ in range(4)]
    wanted_spread = [strategy.gather(next(spread), axis=0).tolist() for _ in range(4)]

    checkpoint.restore(path)

    assert [np.asarray(next(plain)).tolist() for _ in range(4)] == wanted
    assert [strategy.gather(next(spread), axis=0).tolist() for _ in range(4)] == wanted_spread
    spread.close()


def test_a_save_beside_the_training_holds_the_values_of_its_moment(tmp_path):
    strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        w = rx.Variable(jnp.zeros(1000))

    @rx.function
    def step():
        strategy.run(lambda: w.assign_add(jnp.ones(1000)))

    checkpoint = rx.train.Checkpoint(w=w)
    step()
    paths = []
    for _ in range(3):
        paths.append(checkpoint.save(f"{tmp_path}/ckpt", block=False))
        step()
        step()
    checkpoint.sync()

    found = [float(rx.train.load_checkpoint(p).get_tensor("w" + SUFFIX)[5]) for p in paths]

    assert found == [1.0, 3.0, 5.0]


def test_the_end_of_the_program_waits_for_a_save(tmp_path):
    program = f"""
import jax.numpy as jnp, replicax as rx
v = [rx.Variable(jnp.full(100_000, i)) for i in range(20)]
rx.train.Checkpoint(v=v).save({str(tmp_path / "ckpt")!r}, block=False)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
    reader = rx.train.load_checkpoint(tmp_path)
    assert reader.get_tensor("v/19" + SUFFIX)[5] == 19


def test_a_save_that_fails_beside_the_training_is_told_by_the_next_call(tmp_path):
    (tmp_path / "file").write_text("")
    checkpoint = rx.train.Checkpoint(v=rx.Variable(0.0))
    with pytest.raises(OSError, match="file"):  # noqa: PT012 - at once on Python 3.12
        checkpoint.write(f"{tmp_path}/file/ckpt", block=False)
        checkpoint.sync()


class Lazy:
    """Makes its variables when it is first called."""

    def __init__(self):
        self.parts = []

    def __call__(self):
        if not self.parts:
            self.parts.append(rx.Variable(0.0))
            self.parts.append(rx.Variable(jnp.zeros(2)))
        return self.parts[0] + self.parts[1].read_value().sum()


@pytest.mark.parametrize("how", ["eager", "compiled", "in a strategy"])
def test_variables_that_are_made_after_the_restore_have_the_saved_values(tmp_path, how):
    saved = Lazy()
    saved()
    saved.parts[0].assign(3.0)
    saved.parts[1].assign([1.0, 1.0])
    path = rx.train.Checkpoint(model=saved).write(f"{tmp_path}/ckpt")

    model = Lazy()
    checkpoint = rx.train.Checkpoint(model=model)
    status = checkpoint.restore(path)
    with pytest.raises(rx.errors.CheckpointError, match="model/parts/1"):
        status.assert_consumed()
    if how == "eager":
        result = model()
    elif how == "compiled":
        result = rx.function(model.__call__)()
    else:
        strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        with strategy.scope():
            run = rx.function(lambda: strategy.run(model))
        result = strategy.reduce("MEAN", run(), axis=None)

    assert float(result) == 5.0
    status.assert_consumed()
    assert float(rx.Variable(7.0)) == 7.0  # nobody waits any more


def test_what_does_not_fit_is_named_and_nothing_is_restored(tmp_path):
    path = rx.train.Checkpoint(a=rx.Variable([1.0, 2.0]), b=rx.Variable(3.0)).write(
        f"{tmp_path}/ckpt"
    )
    b, wrong = rx.Variable(0.0), rx.Variable([0.0])
    with pytest.raises(rx.errors.VariableError, match=r"shape \(2,\).*shape \(1,\)"):
        rx.train.Checkpoint(b=b, a=wrong).restore(path)
    with pytest.raises(rx.errors.VariableError, match=r"float32.*int32"):
        rx.train.Checkpoint(b=rx.Variable(0)).restore(path)
    with pytest.raises(rx.errors.VariableError, match=r"float32.*float16"):
        rx.train.Checkpoint(b=rx.Variable(0.0, dtype="float16"), c=rx.Variable(0.1)).restore(
            rx.train.Checkpoint(b=rx.Variable(0.1)).write(f"{tmp_path}/tenth")
        )
    assert float(b) == 0.0

    status = rx.train.Checkpoint(b=b, c=rx.Variable(0.0)).restore(path)
    assert float(b) == 3.0
    with pytest.raises(rx.errors.CheckpointError, match="c/"):
        status.assert_existing_objects_matched()
    with pytest.raises(rx.errors.CheckpointError, match="a/"):
        status.assert_consumed()


def test_a_plain_number_is_refused_with_what_to_write():
    with pytest.raises(ValueError, match=r"rx\.Variable"):
        rx.train.Checkpoint(step=3)


def test_saving_inside_a_replica_is_refused(tmp_path):
    strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    checkpoint = rx.train.Checkpoint(v=rx.Variable(0.0))
    with pytest.raises(rx.errors.ScopeError, match="between the steps"):
        strategy.run(lambda: checkpoint.save(f"{tmp_path}/ckpt"))


def test_no_damage_gives_other_values(tmp_path):
    """Flip bits and cut files anywhere: the saved values, or an error that says so."""
    v = rx.Variable(jnp.arange(5.0))
    path = rx.train.Checkpoint(v=v, w=rx.Variable(3)).write(f"{tmp_path}/ckpt")
    rng = np.random.default_rng(1)
    for file in [p for p in pathlib.Path(path).rglob("*") if p.is_file()]:
        good = file.read_bytes()
        for at in rng.integers(0, max(len(good), 1), 6).tolist():
            bad = bytearray(good)
            if bad:
                bad[at] ^= 1 << int(rng.integers(8))
            file.write_bytes(bad if at % 2 else good[:at])
            fresh = rx.Variable(jnp.zeros(5))
            try:
                rx.train.Checkpoint(v=fresh).read(path)
            except (rx.errors.DataLossError, rx.errors.NotFoundError):
                assert fresh.numpy().tolist() == [0.0] * 5
            else:
                assert fresh.numpy().tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
        file.write_bytes(good)


def test_links_are_not_followed(tmp_path):
    path = rx.train.Checkpoint(v=rx.Variable(1.0)).write(f"{tmp_path}/ckpt")
    inner = next(p for p in pathlib.Path(path).rglob("*") if p.is_file() and p.name == "0")
    inner.rename(tmp_path / "elsewhere")
    inner.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(rx.errors.DataLossError, match="link"):
        rx.train.Checkpoint(v=rx.Variable(0.0)).read(path)


def test_restoring_loads_no_pickle_and_runs_no_code(tmp_path):
    path = rx.train.Checkpoint(v=rx.Variable(1.0)).write(f"{tmp_path}/ckpt")
    program = f"""
import sys
import replicax as rx
v = rx.Variable(0.0)
c = rx.train.Checkpoint(v=v)
import orbax.checkpoint
seen = []
sys.addaudithook(lambda event, args: seen.append(event) if event == "pickle.find_class" else None)
c.read({path!r})
assert float(v) == 1.0 and not seen, seen
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_a_second_save_to_one_place_replaces_the_first(tmp_path):
    v = rx.Variable(1.0)
    checkpoint = rx.train.Checkpoint(v=v)
    checkpoint.write(f"{tmp_path}/ckpt")
    v.assign(2.0)
    path = checkpoint.write(f"{tmp_path}/ckpt")
    assert rx.train.load_checkpoint(path).get_tensor("v" + SUFFIX) == 2.0
    assert len([n for n in os.listdir(path) if n.startswith("data-")]) == 1


def test_what_others_have_put_into_the_folder_stays(tmp_path):
    (tmp_path / "data-train").mkdir()
    (tmp_path / "data-train" / "rows").write_text("1")
    (tmp_path / "checkpoint.json-notes").write_text("mine")
    checkpoint = rx.train.Checkpoint(v=rx.Variable(1.0))
    for _ in range(2):
        checkpoint.write(tmp_path)
    assert (tmp_path / "data-train" / "rows").read_text() == "1"
    assert (tmp_path / "checkpoint.json-notes").read_text() == "mine"


def test_a_folder_that_cannot_be_written_is_an_error_and_harms_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        rx.train.Checkpoint(v=rx.Variable(0.0)).save(f"{tmp_path}/file/ckpt")


def test_the_manifest_is_plain_json(tmp_path):
    path = rx.train.Checkpoint(v=rx.Variable(1.0)).write(f"{tmp_path}/ckpt")
    whole = json.loads((pathlib.Path(path) / "checkpoint.json").read_text())
    assert set(whole) == {"sha256", "content"}


SUFFIX = "/.ATTRIBUTES/VARIABLE_VALUE"
