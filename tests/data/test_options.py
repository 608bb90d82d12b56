"""Options and the graph: what a distribution strategy looks at."""

import numpy as np
import pytest

from replicax._src.base.tf_errors import InvalidArgumentError
from replicax._src.data.node import Batching, walk
from replicax._src.data.readers import ReaderNode
from replicax.data import Dataset, Options, TextLineDataset
from replicax.data.experimental import SHARD_HINT, AutoShardPolicy, DistributeOptions
from tests.data.pipelines import ints


def with_policy(dataset, policy):
    options = Options()
    options.experimental_distribute.auto_shard_policy = policy
    return dataset.with_options(options)


def test_policies_have_tensorflows_values():
    assert {policy.name: policy.value for policy in AutoShardPolicy} == {
        "OFF": -1,
        "AUTO": 0,
        "FILE": 1,
        "DATA": 2,
        "HINT": 3,
    }


def test_options_survive_later_transformations():
    dataset = with_policy(Dataset.range(4), AutoShardPolicy.DATA).batch(2).prefetch(1)

    assert dataset.options().experimental_distribute.auto_shard_policy is AutoShardPolicy.DATA


def test_later_options_win_and_unset_ones_do_not():
    first = with_policy(Dataset.range(4), AutoShardPolicy.DATA)
    second = with_policy(first, AutoShardPolicy.OFF)
    third = second.with_options(Options())

    assert third.options().experimental_distribute.auto_shard_policy is AutoShardPolicy.OFF
    assert ints(third) == [0, 1, 2, 3]


def test_attached_options_do_not_change_any_more():
    options = Options()
    dataset = Dataset.range(4).with_options(options)
    options.deterministic = False

    assert dataset.options().deterministic is None


def test_auto_shard_is_the_older_switch():
    options = DistributeOptions()
    options.auto_shard = False
    assert options.auto_shard_policy is AutoShardPolicy.OFF
    options.auto_shard = True
    assert options.auto_shard_policy is AutoShardPolicy.AUTO
    options.auto_shard_policy = 2
    assert options.auto_shard_policy is AutoShardPolicy.DATA


def test_an_unknown_option_is_refused():
    with pytest.raises(AttributeError, match=r"no option 'determinstic'; it has .* deterministic"):
        Options().determinstic = True
    with pytest.raises(InvalidArgumentError, match=r"needs rx.data.Options, got dict"):
        Dataset.range(3).with_options({})


def test_the_shard_hint_does_nothing_by_itself():
    assert ints(Dataset.range(4).shard(SHARD_HINT, SHARD_HINT)) == [0, 1, 2, 3]


def test_the_graph_can_be_walked_and_rewritten():
    dataset = Dataset.zip((Dataset.range(6).map(lambda x: x * 2), Dataset.range(6))).batch(2)
    names = [type(node).__name__ for node in walk(dataset.node)]

    def halve(node):
        inputs = [halve(part) for part in node.inputs]
        node = node.with_inputs(*inputs)
        return Dataset(node).shard(2, 1).node if not inputs else node

    assert names == ["BatchNode", "ZipNode", "MapNode", "RangeNode", "RangeNode"]
    halved = Dataset(halve(dataset.node))
    assert [[x.tolist() for x in pair] for pair in halved] == [[[2, 6], [1, 3]], [[10], [5]]]


def test_a_rewritten_shuffle_keeps_its_order():
    dataset = Dataset.range(20).shuffle(20)
    other = Dataset(dataset.node.with_inputs(Dataset.range(20).node))
    state = iter(dataset).save_state()
    first, second = iter(dataset), iter(other)
    first.restore_state(state)
    second.restore_state(state)

    assert ints(first) == ints(second)


def test_a_rewritten_cache_and_map_know_nothing_of_the_first():
    dataset = Dataset.range(6).batch(2).map(lambda x: x * 2).cache()
    assert np.concatenate(list(dataset)).tolist() == [0, 2, 4, 6, 8, 10]
    assert dataset.element_spec.shape == (None,)

    fixed = Dataset.range(6).batch(3, drop_remainder=True).node
    other = Dataset(dataset.node.with_inputs(dataset.node.input.with_inputs(fixed)))

    assert [x.tolist() for x in other] == [[0, 2, 4], [6, 8, 10]]
    assert other.element_spec.shape == (3,)


def test_a_reader_knows_its_files(tmp_path):
    files = []
    for k in range(5):
        files.append(str(tmp_path / f"{k}.txt"))
        (tmp_path / f"{k}.txt").write_text(f"{k}\n")
    node = TextLineDataset(files).node
    assert isinstance(node, ReaderNode)

    assert node.files == tuple(files)
    assert [int(x) for x in Dataset(node.shard_files(2, 1))] == [1, 3]


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (lambda d: d.batch(4), Batching(4, is_static=False)),
        (lambda d: d.batch(4, drop_remainder=True).prefetch(1), Batching(4, is_static=True)),
        (lambda d: d.batch(4).repeat(2).take(3).shuffle(2), Batching(4, is_static=False)),
        (lambda d: d.batch(4).map(lambda x: x), None),
        (lambda d: Dataset.zip((d.batch(4), d.batch(4))), Batching(4, is_static=False)),
        (lambda d: Dataset.zip((d.batch(4), d.batch(5))), None),
        (lambda d: d.batch(4).unbatch(), None),
        (lambda d: d.batch(4).rebatch(2), Batching(2, is_static=False)),
        (lambda d: d.batch(4, drop_remainder=True).rebatch(2), Batching(2, is_static=True)),
        (lambda d: d.batch(4, drop_remainder=True).rebatch(3), Batching(3, is_static=False)),
        (lambda d: d, None),
    ],
)
def test_the_graph_knows_batch_sizes(build, expected):
    assert build(Dataset.range(20)).node.batching == expected


def test_datasets_say_what_they_are_without_reading():
    def never(x):
        raise AssertionError

    dataset = Dataset.from_tensor_slices(np.arange(3)).map(never).batch(2)

    assert repr(dataset) == "<Dataset Batch < Map < Slices>"
    assert dataset
    known = repr(Dataset.range(3).batch(2))
    assert known.startswith("<Dataset Batch < Range, element_spec=TensorSpec(shape=(None,), ")
    assert len(dataset) == 2
