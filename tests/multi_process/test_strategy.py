"""Several workers compute, hold variables and read data as one strategy."""

import jax
import numpy as np
import pytest

import replicax as rx
from replicax.testing import run_in_processes
from tests.laws.test_combinations import COMBINATIONS, Model
from tests.multi_process import programs
from tests.replicas import mirrored

pytestmark = pytest.mark.multi_process

SIZES = [
    (2, 1),
    pytest.param(2, 2, marks=pytest.mark.slow),
    pytest.param(3, 1, marks=pytest.mark.slow),
    pytest.param(3, 2, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("workers", "devices"), SIZES)
@pytest.mark.parametrize(
    "compiled", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["compiled", "eager"]
)
def test_collectives_reach_every_replica_of_every_worker(workers, devices, compiled):
    results = run_in_processes(programs.collectives, workers, devices, args=(compiled,))

    n = workers * devices
    ids = list(range(n))
    for w, result in enumerate(results):
        mine = ids[w * devices : (w + 1) * devices]
        assert result["ids"] == mine
        assert result["total"] == [[n * (n + 1) / 2] * devices, [[sum(ids)] * 2] * devices]
        assert result["mean"] == [sum(ids) / n] * devices
        assert result["rows"] == [ids] * devices
        assert result["merged"] == [sum(ids)] * devices
        assert result["grad"] == [n * n * (n + 1) * (i + 1) for i in mine]
        assert result["reduce"] == [sum(ids), sum(ids) / n]
        assert result["gather"] == [[i, i] for i in ids]


@pytest.mark.parametrize("workers", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_sums_of_any_size_are_equal_to_the_bit_on_all_workers(workers):
    sizes = [1, 255, 256, 10_000, 2**18, 2**18 + 1, 2**20 + 3]

    results = run_in_processes(programs.sums, workers, args=(sizes,))

    for i, _ in enumerate(sizes):
        total = np.sum([own[i] for own, _, _ in results], axis=0, dtype=np.float64)
        for _, each, gradients in results:
            np.testing.assert_array_equal(each[i], results[0][1][i])
            np.testing.assert_allclose(each[i], total, atol=1e-5)
            np.testing.assert_allclose(gradients[i], 2 * workers * total, atol=1e-4)


def test_a_mean_that_is_returned_is_made_in_the_place_of_the_sum():
    assert max(run_in_processes(programs.memory_of_a_mean, 2)) < 2**10


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "devices"), [(2, 1), (2, 2), (3, 1)])
def test_values_of_different_sizes_are_reduced_and_gathered_exactly(workers, devices):
    results = run_in_processes(programs.ragged_values, workers, devices)

    rows = [list(range(i + 1)) for i in range(workers * devices)]
    joined = [x for r in rows for x in r]
    for result in results:
        assert result["sum"] == sum(joined)
        assert result["mean"] == pytest.approx(sum(joined) / len(joined))
        assert result["gather"] == joined
        assert result["all_gather"] == [joined] * devices


@pytest.mark.parametrize(("workers", "devices"), SIZES)
def test_what_python_holds_is_each_workers_own(workers, devices):
    results = run_in_processes(programs.each_workers_own, workers, devices)

    n, all_workers = workers * devices, range(workers)
    total = [devices * sum(all_workers), devices * sum(w + 1 for w in all_workers)]
    rows = [w for w in all_workers for _ in range(devices)]
    for w, result in enumerate(results):
        mine = range(w * devices, (w + 1) * devices)
        for kind in ("eager", "compiled"):
            found = result[kind]
            reduced, number, mean, gathered, nothing, merged = found["constants"]
            assert reduced == merged == found["written"] == [total] * devices
            assert number == [total[0]] * devices
            assert mean == [total[0] / n] * devices
            assert gathered == [rows] * devices
            assert nothing == [[]] * devices
            assert found["mean"] == [total[0] / n, total[1] / n]
            assert found["axis"] == sum(total)
            assert found["captured"] == [[[i + 1] for i in mine], sum(range(n)), [*range(n)]]
            assert found["shared"] == [[pytest.approx(8 / n, rel=1e-5)] * devices, 8]
        if devices == 1:
            reduced = [n * (n + 1) / 2, (n + 1) / 2]
            joined = [i for w in all_workers for i in range(w + 1)]
            assert result["plain"] == [reduced, joined, sum(all_workers)]
        else:
            assert len(result["refused"]) == 2
            for told in result["refused"]:
                assert f"one value for the {devices} replicas of this worker" in told
                assert "experimental_distribute_values_from_function" in told


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "eager"])
@pytest.mark.parametrize(("workers", "devices"), [(2, 1), (2, 2), (3, 1)])
def test_variables_made_in_a_replica_start_with_the_chiefs_value(workers, devices, compiled):
    results = run_in_processes(programs.lazy_variables, workers, devices, args=(compiled,))

    n, added = workers * devices, sum(range(workers * devices))
    for w, (returned, copies, read) in enumerate(results):
        mine = range(w * devices, (w + 1) * devices)
        assert returned == [[5 + added] * devices, [5 + 2 * added] * devices]
        assert copies == [5 + 2 * i for i in mine]
        assert read == 5 * n + 2 * added


@pytest.mark.slow
def test_workers_bear_the_names_of_their_tasks():
    results = run_in_processes(programs.names, 3)

    for task, result in zip(["chief/0", "worker/0", "worker/1"], results, strict=True):
        job, number = task.split("/")
        name = f"/job:{job}/replica:0/task:{number}/device:CPU:0"
        assert result["devices"] == [name] * 3
        assert result["config"] == ["/job:chief/replica:0/task:0", [f"/job:{job}/task:{number}"]]
        assert result["isolate"] is False
        assert result["between_graph"] is True
        assert result["structure"] == 1
        assert result["synchronization"] == "ON_WRITE"


@pytest.mark.slow
def test_variables_start_with_the_chiefs_value_and_stay_equal():
    first, second = run_in_processes(programs.variables, 2)

    assert first["start"] == second["start"] == [1.0, 1.0, 1.0]
    assert first["signbit"]
    assert second["signbit"]
    assert first["whole"] == second["whole"] == 7
    assert first["key"] == second["key"]
    assert first["written"] == second["written"] == [[10.0, 0.5, 3.0], [10.0, 0.5, 6.0]]
    for result in (first, second):
        assert "'start' differs between workers" in result["diverged"]
        assert "assigned different values" in result["refused"]


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "eager"])
@pytest.mark.parametrize(("workers", "devices"), [(2, 1), (2, 2), (3, 1)])
def test_training_equals_one_worker_also_with_short_batches(workers, devices, compiled):
    (alone,) = run_in_processes(programs.train, 1, args=(2, compiled, 31))
    results = run_in_processes(programs.train, workers, devices, args=(2, compiled, 31))

    for result in results:
        assert result["seen"] == alone["seen"] == 62
        np.testing.assert_allclose(result["losses"], alone["losses"], rtol=1e-4)
        np.testing.assert_allclose(result["w"], alone["w"], rtol=1e-4)


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_large_batches_that_are_kept_never_change(devices):
    rows, width = 160, 20_000

    results = run_in_processes(programs.kept_batches, 2, devices, args=(rows, width))

    sums = (np.arange(rows * width) % 1021).reshape(rows, width).sum(-1)
    chunks = sums.reshape(-1, 2, 4 // devices)  # in turn to one worker and the other
    for worker, seen in enumerate(results):
        np.testing.assert_array_equal(seen, chunks[:, worker])


@pytest.mark.slow
@pytest.mark.parametrize("rows", [8, 10])
def test_an_iterator_ends_on_all_workers_at_the_same_step(rows):
    results = run_in_processes(programs.iterator_train, 2, args=(rows,))

    assert results == [[-(-rows // 4), rows * (rows - 1) / 2]] * 2


@pytest.mark.slow
def test_a_loop_in_one_call_takes_a_batch_in_every_turn_on_all_workers():
    # 44 rows in batches of 8: two calls of two steps, then one of 8 rows, a short one, and the end.
    results = run_in_processes(programs.iterator_loop, 2, 2, args=(44, 2))

    assert results == [([0 + 1, 2 + 3, 4 + 5], sum(range(44)), 6)] * 2


@pytest.mark.slow
def test_a_worker_whose_files_are_read_continues_with_nothing():
    first, second = run_in_processes(programs.uneven_files, 2, args=([7, 4, 6], 8, "FILE"))

    assert first[0] == [[[0, 1, 2, 3]], [[4, 5, 6, 200]], [[201, 202, 203, 204]], [[205]]]
    assert second[0] == [[[100, 101, 102, 103]], [[]], [[]], [[]]]
    assert first[1] == second[1] == [412, 215, 810, 205]


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [[3, 8], [8, 3], [0, 5], [4, 4]])
def test_dataset_functions_of_different_lengths_end_together(lengths):
    results = run_in_processes(programs.uneven_function, 2, args=(lengths,))

    assert len(results[0]) == len(results[1]) == -(-max(lengths) // 2)
    for w, steps in enumerate(results):
        assert [x for s in steps for part in s for x in part] == [
            100 * w + i for i in range(lengths[w])
        ]


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 4])
def test_a_step_that_fails_on_one_worker_fails_on_all_and_the_next_follows(number):
    results = run_in_processes(programs.failing_function, 2, args=(1, number))

    steps = [[[i]] for i in range(6)]
    steps[number] = True
    assert results == [steps, steps]


@pytest.mark.slow
def test_an_unseeded_shuffle_gives_every_element_to_one_worker():
    results = run_in_processes(programs.unseeded_shuffle, 2, 2, args=(11,))

    for epoch in range(2):
        assert sorted(x for r in results for x in r[epoch]) == list(range(11))
    assert results[0][0] != results[0][1]


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "devices"), [(2, 1), (2, 2)])
def test_random_keys_and_gradients_are_the_same_on_all_workers(workers, devices):
    results = run_in_processes(programs.keys_and_gradients, workers, devices)

    key = jax.random.key(7)
    for _ in range(2):
        key = jax.random.split(key)[0]
    mean = (workers * devices - 1) / 2
    for numbers, weights in results:
        np.testing.assert_array_equal(numbers, jax.random.key_data(key))
        np.testing.assert_allclose(weights, mean + (1 - mean) / 4, rtol=1e-6)


def test_every_worker_knows_its_place():
    first, second = run_in_processes(programs.facts, 2, 2)

    assert first["n"] == second["n"] == 4
    assert first["numbers"] == [0, 1]
    assert second["numbers"] == [2, 3]
    assert first["devices"][1] == "/job:worker/replica:0/task:0/device:CPU:1"
    assert second["devices"][0] == "/job:worker/replica:0/task:1/device:CPU:0"
    assert first["writes"] == [True, True]
    assert second["writes"] == [False, False]
    assert first["pid"] != second["pid"]


@pytest.mark.parametrize(
    ("workers", "devices"), [(2, 1), pytest.param(2, 2, marks=pytest.mark.slow)]
)
def test_sharded_variables_are_one_value_of_all_workers(workers, devices, tmp_path):
    copies, parts = (
        run_in_processes(programs.sharded_training, workers, devices, args=(policy, str(tmp_path)))
        for policy in ("mirrored", "sharded")
    )

    for a, b in zip(copies, parts, strict=True):
        np.testing.assert_allclose(b["losses"], a["losses"], rtol=1e-5)
        np.testing.assert_allclose(b["trained"], a["trained"], rtol=1e-5, atol=1e-6)
        assert b["restored"] == b["trained"]
        assert b["held"] == b["share"]
        assert "'w'" in b["refused"]
        assert "reduce-scatter(" in b["program"]
        assert "all-reduce(" not in b["program"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["replicate 4 tensor 2", "replicate 2 shard 2 tensor 2"])
def test_replicas_of_several_devices_equal_one_device_on_two_workers(name):
    one = Model(mirrored(1))
    losses = one.train()

    results = run_in_processes(programs.combination, 2, 4, args=(COMBINATIONS[name],))

    for result in results:
        assert result["replicas"] == 4
        np.testing.assert_allclose(result["losses"], losses, rtol=1e-4)
        for n, value in one.numbers().items():
            np.testing.assert_allclose(result["numbers"][n], value, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("before", "workers", "after"),
    [
        ("sharded", 2, [("sharded", 3)]),
        pytest.param("mirrored", 2, [("sharded", 2)], marks=pytest.mark.slow),
        pytest.param("sharded", 3, [("sharded", 2), ("mirrored", 2)], marks=pytest.mark.slow),
    ],
)
def test_each_worker_writes_its_part_once_and_any_number_restores(tmp_path, before, workers, after):
    saved = run_in_processes(programs.save_state, workers, args=(before, str(tmp_path)))
    wanted = {**saved[0], "save_counter": 1}
    assert all({**s, "own": 0} == saved[0] for s in saved)

    path = tmp_path / "ckpt-1"
    assert [p.name for p in tmp_path.iterdir()] == ["ckpt-1"]  # and no worker's own
    reader = rx.train.load_checkpoint(path)
    for name, value in wanted.items():
        found = reader.get_tensor(f"{name}/.ATTRIBUTES/VARIABLE_VALUE")
        np.testing.assert_array_equal(found, np.asarray(value, found.dtype))
    sizes = [
        sum(f.stat().st_size for f in path.glob(f"data-*/arrays-{w}/*/0*")) for w in range(workers)
    ]
    assert sum(sizes) == 4 * (66 * 104 + 67 * 101 + 3 + 3 + workers)  # and each one's own count
    assert max(sizes) < 1.2 * sum(sizes) / workers
    for policy, count in after:
        for values, held in run_in_processes(
            programs.restore_state, count, args=(policy, str(path))
        ):
            assert {**values, "save_counter": 1} == wanted
            share = count if policy == "sharded" else 1
            assert held == 4 * 66 * 104 // share


def test_what_workers_count_each_for_itself_continues_to_the_bit(tmp_path):
    for saved, expected, restored, found in run_in_processes(
        programs.counted_on, 2, 2, args=(str(tmp_path),)
    ):
        assert restored == saved
        assert found == expected
    path = tmp_path / "ckpt"
    total = rx.train.load_checkpoint(path).get_tensor("v/.ATTRIBUTES/VARIABLE_VALUE")
    assert total.tolist() == saved[1]
    v = rx.Variable(np.zeros(5, "f4"))  # without replicas it is the total
    rx.train.Checkpoint(v=v).restore(path).assert_consumed()
    assert v.numpy().tolist() == saved[1]


def test_what_one_worker_cannot_do_all_hear_and_nothing_is_half_done(tmp_path):
    for index, (words, mean) in enumerate(
        run_in_processes(programs.refused_checkpoints, 2, args=(str(tmp_path),))
    ):
        first, second, third = words
        for told in (first, second):
            assert "OSError" in told
            assert "File too large" in told
            assert "Earlier checkpoints are as they were" in told
            assert index == 1 or "worker 1" in told
        assert "FailedPreconditionError" in third
        assert "restore different checkpoints" in third
        assert mean == 3.0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["good", "other"]
    value = rx.train.load_checkpoint(tmp_path / "good").get_tensor("w/.ATTRIBUTES/VARIABLE_VALUE")
    np.testing.assert_array_equal(value, np.ones((66, 104)))


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("raised", "it raised ValueError: a wrong turn"),
        ("on a TPU", "it raised ValueError: a wrong turn"),
        pytest.param("in a collective", "`strategy.leave()`", marks=pytest.mark.slow),
        pytest.param("done", "`strategy.leave()`", marks=pytest.mark.slow),
    ],
)
def test_a_worker_that_leaves_and_lives_on_keeps_nobody_waiting(tmp_path, how, cause):
    first, second = run_in_processes(programs.left_alive, 2, args=(how, str(tmp_path)))

    error, seconds = first
    assert error.startswith("WorkerLostError: Worker 1 (")
    assert cause in error
    assert seconds < 30  # without it: a minute
    after, total, own, is_connected = second
    assert "has left its cluster" in after
    assert (total, own, is_connected) == (2.0, 3.0, False)
