"""Snapshots in several files, and arguments of `save`."""

import pytest

import replicax as rx

D = rx.data.Dataset


def one_by_one(files):
    return files.flat_map(lambda file: file)


def ints(dataset):
    return [int(x) for x in dataset]


def test_every_pass_gives_the_order_of_the_reader(tmp_path):
    calls = []
    dataset = D.range(6).map(lambda x: calls.append(1) or x)
    dataset = dataset.snapshot(tmp_path, None, one_by_one, lambda x: x % 3)

    assert ints(dataset) == ints(dataset) == [0, 3, 1, 4, 2, 5]
    assert len(calls) == 6


def test_shards_without_a_reader_come_in_turn(tmp_path):
    dataset = D.range(6).snapshot(tmp_path, shard_func=lambda x: x // 3)

    assert ints(dataset) == [0, 3, 1, 4, 2, 5]
    assert dataset.element_spec == D.range(6).element_spec


def test_another_pipeline_finds_nothing_kept(tmp_path):
    first = D.range(3).snapshot(tmp_path, None, one_by_one)
    second = D.range(4).snapshot(tmp_path, None, one_by_one)

    assert (ints(first), ints(second)) == ([0, 1, 2], [0, 1, 2, 3])


def test_random_reader_can_be_restored(tmp_path):
    def shuffled(files):
        return files.flat_map(lambda file: file).shuffle(9)

    dataset = D.range(9).snapshot(tmp_path, None, shuffled)
    iterator = iter(dataset)
    begun = [int(next(iterator)) for _ in range(4)]
    state = iterator.save_state()
    rest = ints(iterator)
    again = iter(dataset)
    again.restore_state(state)

    assert ints(again) == rest
    assert sorted(begun + rest) == list(range(9))


def test_infinite_dataset_is_refused(tmp_path):
    with pytest.raises(ValueError, match="has no end"):
        D.range(3).repeat().snapshot(tmp_path, None, one_by_one)


def test_save_takes_checkpoint_args(tmp_path):
    path = tmp_path / "saved"
    D.range(3).save(path, checkpoint_args={"directory": "x", "checkpoint_interval": 50})

    assert ints(D.load(path)) == [0, 1, 2]
    for wrong in (3, {}, {"directory": "x", "interval": 2}):
        with pytest.raises(ValueError, match="give a dict with a 'directory'"):
            D.range(3).save(path, checkpoint_args=wrong)
