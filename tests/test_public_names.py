"""Every public name of TensorFlow 2.21 works here, or says why not and what to use."""

from pathlib import Path

import pytest

import replicax as rx
from tests.golden.public_names import PUBLIC, differences, found, table

NAMES = [(path, name) for path, names in PUBLIC.items() for name in names]

# What programs do not make by themselves, so that its arguments are our own.
MADE_BY_US = {
    "Dataset",
    "DistributedDataset",
    "DistributedIterator",
    "DistributedValues",
    "Iterator",
    "ReplicaContext",
    "Strategy",
    "StrategyExtended",
    "SummaryWriter",
}
# Parts of TensorFlow's own machinery, which programs do not call.
INNER = {
    "DatasetSpec": "how a tf.TypeSpec becomes tensors",
    "RaggedFeature": "kinds of partitions, which are refused",
    "TFRecordOptions": "conversions between its older forms",
}


@pytest.mark.parametrize(("path", "name"), NAMES, ids=lambda part: part)
def test_a_name_takes_what_tensorflows_takes_or_says_what_to_use(path, name):
    ours, words = found(path, name)

    if words is not None:
        assert "has no attribute" not in words, words
        assert len(words.partition(". ")[2]) > 20, words
        return
    left = list(differences(ours, PUBLIC[path][name]))
    if name in MADE_BY_US:
        left = [problem for problem in left if not problem.startswith(("does not take", "needs"))]
    if name in INNER:
        left = [problem for problem in left if not problem.startswith("has no")]
    assert left == []


def test_a_refusal_names_the_place_and_the_name():
    with pytest.raises(AttributeError, match=r"replicax\.random has no all_candidate_sampler\. "):
        _ = rx.random.all_candidate_sampler


def test_a_method_that_is_left_out_says_what_to_use():
    strategy = rx.distribute.OneDeviceStrategy("CPU:0")

    with pytest.raises(AttributeError, match=r"experimental_local_results"):
        strategy.unwrap(1)
    with pytest.raises(AttributeError, match="as_dict"):
        rx.train.ClusterSpec({}).as_cluster_def()
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = strategy.nothing
    assert not hasattr(strategy, "unwrap")


def test_the_table_of_names_is_that_of_the_docs():
    text = Path(__file__).parents[1].joinpath("docs", "porting.md").read_text()

    assert "\n".join(table()) in text, "python -m tests.golden.public_names prints it"
