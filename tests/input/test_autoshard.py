"""Which worker reads what, and by which rule it is split."""

import logging

import pytest

import replicax as rx
from replicax._src.data.dataset import Dataset
from replicax._src.data.options import AutoShardPolicy
from replicax._src.input.autoshard import batch_size, choose, shard
from replicax._src.input.split import Share

AUTO, FILE, DATA = AutoShardPolicy.AUTO, AutoShardPolicy.FILE, AutoShardPolicy.DATA
HINT, OFF = AutoShardPolicy.HINT, AutoShardPolicy.OFF


@pytest.fixture
def lines(tmp_path):
    names = []
    for number in range(3):
        path = tmp_path / f"{number}.txt"
        path.write_text(f"{number}\n" * 4)
        names.append(str(path))
    return rx.data.TextLineDataset(names)


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.batch(2),
        lambda d: d.map(lambda x: x).filter(lambda x: True).shuffle(4).repeat(2).batch(2),
        lambda d: d.take(3).skip(1).cache().batch(2).unbatch().batch(2),
        lambda d: rx.data.Dataset.zip((d, d)).batch(2),
        lambda d: d.concatenate(d).batch(2),
    ],
    ids=["batch", "map filter shuffle repeat", "take skip cache unbatch", "zip", "concatenate"],
)
def test_auto_goes_by_file_when_every_branch_reads_files(lines, change):
    assert choose(change(lines).node, AUTO, 2) is FILE


def test_readers_over_a_dataset_of_names_are_files_too(lines, tmp_path):
    names = rx.data.Dataset.list_files(str(tmp_path / "*.txt"), shuffle=False)
    node = names.interleave(rx.data.TextLineDataset).batch(4).node

    assert choose(node, AUTO, 3) is FILE
    parts = [shard(node, FILE, Share(3, w, 1)).node for w in range(3)]
    assert [{x for b in Dataset(p) for x in b} for p in parts] == [{b"0"}, {b"1"}, {b"2"}]


def test_auto_goes_by_element_when_a_branch_reads_no_files(lines):
    mixed = rx.data.Dataset.zip((lines, rx.data.Dataset.range(12))).batch(2)

    assert choose(mixed.node, AUTO, 1) is DATA


def test_auto_with_fewer_files_than_workers_goes_by_element_and_says_so(lines, caplog):
    with caplog.at_level(logging.WARNING, "replicax"):
        assert choose(lines.batch(2).node, AUTO, 4) is DATA
    assert "3 file(s) for 4 workers" in caplog.text


def test_auto_by_element_warns_with_several_workers_and_never_with_one(caplog):
    node = rx.data.Dataset.range(4).batch(2).node
    with caplog.at_level(logging.WARNING, "replicax"):
        choose(node, AUTO, 1)
        assert not caplog.text
        choose(node, AUTO, 2)
    assert "distribute_datasets_from_function" in caplog.text


def test_by_file_needs_a_file_for_each_worker(lines):
    with pytest.raises(ValueError, match=r"each of the 4 workers, and the dataset reads 3"):
        shard(lines.batch(2).node, FILE, Share(4, 0, 1))


def test_by_file_needs_files():
    with pytest.raises(ValueError, match="read from files"):
        shard(rx.data.Dataset.range(4).batch(2).node, FILE, Share(2, 0, 1))


def test_workers_take_every_nth_file_and_together_all(lines):
    def read(worker):
        part = shard(lines.batch(4).node, FILE, Share(2, worker, 1))
        return [b[0] for b in Dataset(part.node)]

    assert (read(0), read(1)) == ([b"0", b"2"], [b"1"])


@pytest.mark.parametrize("keep", ["cache", "snapshot"])
@pytest.mark.parametrize("policy", [FILE, HINT])
def test_workers_that_read_different_data_keep_them_in_different_files(
    lines, tmp_path, policy, keep
):
    marker = rx.data.experimental.SHARD_HINT
    source = lines if policy is FILE else lines.skip(1).shard(marker, marker)
    dataset = getattr(source, keep)(str(tmp_path / "kept")).batch(4)

    def read(worker):
        part = shard(dataset.node, policy, Share(2, worker, 1))
        return [b.tolist() for b in Dataset(part.node)]

    first = [read(0), read(1)]

    assert [read(0), read(1)] == first
    assert first[0] != first[1]


def test_a_hint_is_replaced_by_the_workers_numbers():
    marker = rx.data.experimental.SHARD_HINT
    node = rx.data.Dataset.range(8).shard(marker, marker).batch(4).node

    part = shard(node, HINT, Share(2, 1, 1))

    assert [b.tolist() for b in Dataset(part.node)] == [[1, 3, 5, 7]]


def test_off_leaves_the_dataset_as_it_is():
    node = rx.data.Dataset.range(8).batch(4).node

    assert shard(node, OFF, Share(2, 1, 1)).node is node


@pytest.mark.parametrize(
    ("change", "size"),
    [
        (lambda d: d.batch(4), 4),
        (lambda d: d.batch(4).prefetch(1).repeat().take(3), 4),
        (lambda d: d.batch(4).map(lambda x: x), None),
        (lambda d: d.batch(4, drop_remainder=True).map(lambda x: x), 4),
        (lambda d: d.padded_batch(3), 3),
        (lambda d: d, None),
    ],
    ids=["batch", "batch and passing", "map after", "map after, fixed", "padded", "none"],
)
def test_the_batch_size_is_known_where_the_graph_says_it(change, size):
    assert batch_size(change(rx.data.Dataset.range(12)).node) == size
