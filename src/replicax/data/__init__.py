"""Datasets: the tf.data programming surface over a NumPy engine."""

from typing import TYPE_CHECKING

from replicax._lazy import on_demand

if TYPE_CHECKING:
    from replicax.data import experimental
    from replicax.data._ahead import Optional
    from replicax.data._dataset import Dataset
    from replicax.data._iterator import DatasetIterator, Iterator
    from replicax.data._leaves import DatasetSpec
    from replicax.data._node import AUTOTUNE, INFINITE_CARDINALITY, UNKNOWN_CARDINALITY
    from replicax.data._options import Options, ThreadingOptions
    from replicax.data._readers import (
        FixedLengthRecordDataset,
        TextLineDataset,
        TFRecordDataset,
    )
    from replicax.data._seeds import set_seed_source

__all__ = [
    "AUTOTUNE",
    "INFINITE_CARDINALITY",
    "UNKNOWN_CARDINALITY",
    "Dataset",
    "DatasetIterator",
    "DatasetSpec",
    "FixedLengthRecordDataset",
    "Iterator",
    "Optional",
    "Options",
    "TFRecordDataset",
    "TextLineDataset",
    "ThreadingOptions",
    "experimental",
    "set_seed_source",
]

__dir__ = __all__.copy

_HOMES = {
    **{
        name: f"replicax.data.{module}"
        for module, names in {
            "_dataset": ("Dataset",),
            "_leaves": ("DatasetSpec",),
            "_iterator": ("DatasetIterator", "Iterator"),
            "_node": ("AUTOTUNE", "INFINITE_CARDINALITY", "UNKNOWN_CARDINALITY"),
            "_ahead": ("Optional",),
            "_options": ("Options", "ThreadingOptions"),
            "_readers": ("FixedLengthRecordDataset", "TFRecordDataset", "TextLineDataset"),
            "_seeds": ("set_seed_source",),
        }.items()
        for name in names
    },
    "experimental": "replicax.data.experimental",
}

_ABSENT = {
    "IteratorSpec": "Iterators are Python objects here; read `iterator.element_spec` instead.",
    "NumpyIterator": "Write `dataset.as_numpy_iterator()`.",
}

if not TYPE_CHECKING:
    __getattr__ = on_demand(__name__, _HOMES, _ABSENT)
