"""How a stream of batches is divided; TensorFlow's recorded streams and a model are the oracles."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import replicax as rx
from replicax._src.data.dataset import Dataset
from replicax._src.data.options import AutoShardPolicy
from replicax._src.input.autoshard import shard
from replicax._src.input.sources import DatasetSource
from replicax._src.input.split import (
    HostStep,
    Share,
    deal,
    empty_batch,
    split_batches,
    split_stream,
)

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "input_streams.json").read_text())
POLICIES = {
    "range": AutoShardPolicy.AUTO,
    "range_off": AutoShardPolicy.OFF,
    "range_mapafter": AutoShardPolicy.AUTO,
    "files": AutoShardPolicy.AUTO,
    "files_off": AutoShardPolicy.OFF,
    "files_data": AutoShardPolicy.DATA,
    "files_mapafter": AutoShardPolicy.AUTO,
}


def chunks_of(part, whole, share):
    batches = iter(Dataset(part.node))
    if part.batch_size is None:
        steps = split_batches(batches, share, shared=part.every_worker_reads_all)
    else:
        steps = split_stream(batches, share, part.batch_size, lambda: _nothing(part, whole))
    return [piece.tolist() for step in steps for piece in step.pieces(share.replicas)]


def _nothing(part, whole):
    return empty_batch(DatasetSource(Dataset(part.node), whole).element_spec)


@pytest.fixture
def files(tmp_path):
    def write(sizes):
        names = []
        for number, size in enumerate(sizes):
            path = tmp_path / f"{number:02}.txt"
            path.write_text("".join(f"{chr(97 + number)}{k}\n" for k in range(size)))
            names.append(str(path))
        return names

    return write


def dataset_of(case, files):
    kind = case["kind"]
    if kind.startswith("files"):
        dataset = rx.data.TextLineDataset(files(case["src"]))
        dataset = dataset.map(lambda x: x.decode() if isinstance(x, bytes) else x)
    else:
        dataset = rx.data.Dataset.range(case["src"])
    dataset = dataset.batch(case["b"], drop_remainder=case["drop"])
    return dataset.map(lambda x: x) if "mapafter" in kind else dataset


def splits_alike(case):
    """One replica in all takes batches as they are; AUTO with few files is a deviation of ours."""
    few = case["kind"] in ("files", "files_mapafter") and len(case["src"]) < case["W"]
    return case["W"] * case["R"] > 1 and not few


@pytest.mark.parametrize(
    "case",
    [c for c in GOLDEN if splits_alike(c)],
    ids=lambda c: f"{c['kind']}-{c['src']}-{c['b']}-{c['drop']}-{c['W']}x{c['R']}".replace(" ", ""),
)
def test_every_worker_splits_as_tensorflow_was_seen_to(case, files):
    for worker, expected in enumerate(case["streams"]):
        share = Share(case["W"], worker, case["R"])
        whole = dataset_of(case, files)
        part = shard(whole.node, POLICIES[case["kind"]], share)

        chunks = [[as_text(x) for x in chunk] for chunk in chunks_of(part, whole, share)]

        # The last step is filled up with parts that have no rows.
        assert chunks == expected + [[]] * (-len(expected) % case["R"])


def as_text(x):
    return x.decode() if isinstance(x, bytes) else x


def model(rows, batch, share):
    """Every batch on its own, from the rule's words."""
    steps = []
    for start in range(0, len(rows), batch):
        whole = rows[start : start + batch]
        size = -(-len(whole) // share.total)
        cut = [whole[j * size : (j + 1) * size] for j in range(share.total)]
        steps.append(cut[share.worker :: share.workers])
    return steps


@given(st.integers(0, 40), st.integers(1, 12), st.integers(1, 3), st.integers(1, 4), st.data())
def test_batches_are_split_by_the_rule_and_nothing_is_lost(rows, batch, workers, replicas, data):
    worker = data.draw(st.integers(0, workers - 1))
    everything = list(range(rows))

    def steps(w):
        share = Share(workers, w, replicas)
        batches = (np.asarray(everything[i : i + batch]) for i in range(0, rows, batch))
        return [[p.tolist() for p in s.pieces(replicas)] for s in split_batches(batches, share)]

    assert steps(worker) == model(everything, batch, Share(workers, worker, replicas))
    seen = sorted(itertools.chain(*(c for w in range(workers) for step in steps(w) for c in step)))
    assert seen == everything


@given(st.integers(1, 40), st.integers(2, 12), st.integers(2, 4))
def test_a_stream_is_split_in_order_without_loss(rows, batch, replicas):
    batches = (np.arange(rows)[i : i + batch] for i in range(0, rows, batch))

    steps = list(split_stream(batches, Share(1, 0, replicas), batch, lambda: np.zeros(0)))

    flat = [x for step in steps for piece in step.pieces(replicas) for x in piece.tolist()]
    assert flat == list(range(rows))
    assert all(len(step.pieces(replicas)) == replicas for step in steps)


def test_an_even_step_is_one_array_with_a_row_for_each_replica():
    (step,) = split_batches([np.arange(6)], Share(1, 0, 3))

    assert step.even.tolist() == [[0, 1], [2, 3], [4, 5]]


def test_an_even_step_of_one_worker_shares_memory_with_the_batch():
    batch = np.arange(6)

    (step,) = split_batches([batch], Share(1, 0, 3))

    assert np.shares_memory(step.even, batch)


def test_structures_are_kept():
    batch = ({"a": np.arange(4)}, np.arange(4) * 10)

    (step,) = split_batches([batch], Share(1, 0, 2))

    first, second = step.pieces(2)
    assert first[0]["a"].tolist() == [0, 1]
    assert second[1].tolist() == [20, 30]


def test_a_dataset_without_batches_is_refused_with_what_to_write():
    with pytest.raises(ValueError, match=r"batch\(global_batch_size\)"):
        next(split_batches([np.float32(1)], Share(1, 0, 2)))


def test_deal_gives_every_replica_one_element_and_fills_the_last_step():
    steps = list(deal([np.ones(2), np.ones(2), np.ones(1)], 2, drop=lambda: False))

    assert [[len(p) for p in s.pieces(2)] for s in steps] == [[2, 2], [1, 0]]


def test_deal_can_leave_out_a_last_step_that_cannot_serve_all():
    assert len(list(deal([np.ones(2)] * 3, 2, drop=lambda: True))) == 1


def test_parts_without_rows_keep_dtype_and_inner_shape():
    (step,) = deal([np.ones((2, 3), np.int16)], 2, drop=lambda: False)

    empty = step.pieces(2)[1]
    assert empty.shape == (0, 3)
    assert empty.dtype == np.int16


def test_pieces_of_an_even_step_are_its_rows():
    assert [p.tolist() for p in HostStep(even=np.eye(2)).pieces(2)] == [[1, 0], [0, 1]]
