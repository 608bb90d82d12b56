"""Datasets: the tf.data programming surface over a NumPy engine."""

from typing import TYPE_CHECKING

from replicax._lazy import on_demand
from replicax.data._dataset import Dataset
from replicax.data._dataset_spec import DatasetSpec
from replicax.data._iterator import DatasetIterator
from replicax.data._node import AUTOTUNE, INFINITE_CARDINALITY, UNKNOWN_CARDINALITY
from replicax.data._optional import Optional
from replicax.data._options import Options, ThreadingOptions
from replicax.data._seeds import set_seed_source

if TYPE_CHECKING:
    from replicax.data import experimental
    from replicax.data._readers import (
        FixedLengthRecordDataset,
        TextLineDataset,
        TFRecordDataset,
    )

__all__ = [
    "AUTOTUNE",
    "INFINITE_CARDINALITY",
    "UNKNOWN_CARDINALITY",
    "Dataset",
    "DatasetIterator",
    "DatasetSpec",
    "FixedLengthRecordDataset",
    "Optional",
    "Options",
    "TFRecordDataset",
    "TextLineDataset",
    "ThreadingOptions",
    "experimental",
    "set_seed_source",
]

_HOMES = {
    **dict.fromkeys(
        ("FixedLengthRecordDataset", "TFRecordDataset", "TextLineDataset"),
        "replicax.data._readers",
    ),
    "experimental": "replicax.data.experimental",
}

__getattr__ = on_demand(__name__, _HOMES)
