"""Datasets: how they are divided among workers, and what TensorFlow keeps in this namespace."""

from replicax.data._csv_dataset import CsvDataset, make_csv_dataset
from replicax.data._experimental import (
    TFRecordWriter,
    assert_cardinality,
    at,
    cardinality,
    from_list,
)
from replicax.data._node import AUTOTUNE, INFINITE_CARDINALITY, UNKNOWN_CARDINALITY
from replicax.data._nodes._select import SHARD_HINT
from replicax.data._optional import Optional
from replicax.data._options import (
    AutoShardPolicy,
    AutotuneAlgorithm,
    AutotuneOptions,
    DistributeOptions,
    ExternalStatePolicy,
    OptimizationOptions,
    ServiceOptions,
    ThreadingOptions,
)

__all__ = [
    "AUTOTUNE",
    "INFINITE_CARDINALITY",
    "SHARD_HINT",
    "UNKNOWN_CARDINALITY",
    "AutoShardPolicy",
    "AutotuneAlgorithm",
    "AutotuneOptions",
    "CsvDataset",
    "DistributeOptions",
    "ExternalStatePolicy",
    "OptimizationOptions",
    "Optional",
    "ServiceOptions",
    "TFRecordWriter",
    "ThreadingOptions",
    "assert_cardinality",
    "at",
    "cardinality",
    "from_list",
    "make_csv_dataset",
]
