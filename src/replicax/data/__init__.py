"""Datasets: the tf.data programming surface over a NumPy engine."""

from typing import TYPE_CHECKING

from replicax._src.base.lazy import on_demand

if TYPE_CHECKING:
    from replicax._src.data.dataset import Dataset
    from replicax._src.data.iterator import DatasetIterator, Iterator
    from replicax._src.data.leaves import DatasetSpec
    from replicax._src.data.node import AUTOTUNE, INFINITE_CARDINALITY, UNKNOWN_CARDINALITY
    from replicax._src.data.optional import Optional
    from replicax._src.data.options import Options, ThreadingOptions
    from replicax._src.data.readers import (
        FixedLengthRecordDataset,
        TextLineDataset,
        TFRecordDataset,
    )
    from replicax._src.data.seeds import set_seed_source
    from replicax.data import experimental

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
        name: f"replicax._src.data.{module}"
        for module, names in {
            "dataset": ("Dataset",),
            "leaves": ("DatasetSpec",),
            "iterator": ("DatasetIterator", "Iterator"),
            "node": ("AUTOTUNE", "INFINITE_CARDINALITY", "UNKNOWN_CARDINALITY"),
            "optional": ("Optional",),
            "options": ("Options", "ThreadingOptions"),
            "readers": ("FixedLengthRecordDataset", "TFRecordDataset", "TextLineDataset"),
            "seeds": ("set_seed_source",),
        }.items()
        for name in names
    },
    "experimental": "replicax.data.experimental",
}

_ABSENT = {
    "DataLoader": (
        "Write `rx.data.Dataset.from_tensor_slices(arrays).shuffle(n).batch(global_batch_size)`, or"
        " give a torch DataLoader to `strategy.experimental_distribute_dataset`."
    ),
    "IteratorSpec": "Iterators are Python objects here; read `iterator.element_spec` instead.",
    "NumpyIterator": "Write `dataset.as_numpy_iterator()`.",
}

if not TYPE_CHECKING:
    __getattr__ = on_demand(__name__, _HOMES, _ABSENT)
