"""`replicax.compat.tfds`, with a stand-in for the package that it wraps, which needs TensorFlow."""

import sys
import types

import numpy as np
import pytest

import replicax as rx


class Spec:
    """A stand-in for ``tf.TensorSpec``."""

    def __init__(self, shape, dtype):
        self.shape = type("Shape", (tuple,), {"rank": len(shape)})(shape)
        self.dtype = types.SimpleNamespace(as_numpy_dtype=dtype)


Spec.__name__ = "TensorSpec"


class Source:
    """A stand-in for ``tf.data.Dataset``."""

    element_spec = (Spec((2,), np.float32), Spec((), np.int64))

    def as_numpy_iterator(self):
        return iter([(np.full(2, i, np.float32), np.int64(i)) for i in range(3)])

    def cardinality(self):
        return np.int64(3)


@pytest.fixture
def tfds(monkeypatch):
    theirs = types.ModuleType("tensorflow_datasets")
    builder = types.SimpleNamespace(info="info", as_dataset=lambda split: {split: Source()})
    theirs.builder = lambda name: builder
    theirs.load = lambda name, **options: ({"train": Source()}, options)
    theirs.ReadConfig = dict
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", theirs)
    return rx.compat.tfds


def test_load_gives_datasets_of_replicax(tfds):
    datasets, options = tfds.load("numbers", with_info=True)
    train = datasets["train"].map(lambda x, y: (x * 2, y)).batch(2)

    assert options == {"with_info": True}
    assert isinstance(train, rx.data.Dataset)
    assert len(train) == 2
    assert train.element_spec[0].shape == (None, 2)
    assert [x[:, 0].tolist() for x, _ in tfds.as_numpy(train)] == [[0, 2], [4]]


def test_a_builder_gives_datasets_of_replicax(tfds):
    builder = tfds.builder("numbers")

    assert builder.info == "info"
    assert len(builder.as_dataset(split="test")["test"]) == 3


def test_other_names_are_those_of_the_package(tfds):
    assert tfds.ReadConfig is dict


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)

    with pytest.raises(ModuleNotFoundError, match="pip install tensorflow-datasets"):
        rx.compat.tfds.load("mnist")
