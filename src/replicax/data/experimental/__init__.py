"""Datasets: how they are divided among workers, and what TensorFlow keeps in this namespace."""

from typing import TYPE_CHECKING

from replicax._lazy import on_demand
from replicax.data._ahead import Optional
from replicax.data._csv_dataset import CsvDataset, make_csv_dataset
from replicax.data._experimental import (
    Counter,
    TFRecordWriter,
    assert_cardinality,
    at,
    cardinality,
    choose_from_datasets,
    enumerate_dataset,
    from_list,
    get_next_as_optional,
    get_single_element,
    get_structure,
    group_by_window,
    ignore_errors,
    load,
    map_and_batch,
    sample_from_datasets,
    save,
    scan,
    shuffle_and_repeat,
    take_while,
    unbatch,
    unique,
)
from replicax.data._node import AUTOTUNE, INFINITE_CARDINALITY, UNKNOWN_CARDINALITY
from replicax.data._nodes._select import SHARD_HINT
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
    "Counter",
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
    "choose_from_datasets",
    "enumerate_dataset",
    "from_list",
    "get_next_as_optional",
    "get_single_element",
    "get_structure",
    "group_by_window",
    "ignore_errors",
    "load",
    "make_csv_dataset",
    "map_and_batch",
    "sample_from_datasets",
    "save",
    "scan",
    "shuffle_and_repeat",
    "take_while",
    "unbatch",
    "unique",
]

__dir__ = __all__.copy

_ABSENT = {
    **{
        name: f"It is a method: write `dataset.{name}(...)`."
        for name in (
            "bucket_by_sequence_length",
            "rejection_resample",
            "snapshot",
        )
    },
    "DatasetInitializer": "There are no lookup tables: use a dict in `map`.",
    "RandomDataset": "Write `rx.data.Dataset.random(seed)`.",
    "Reducer": "Write `dataset.group_by_window` with a reduce_func, or `dataset.reduce`.",
    "SqlDataset": "Write `rx.data.Dataset.from_generator` over a cursor of `sqlite3`.",
    "copy_to_device": (
        "A strategy brings batches to devices: `strategy.experimental_distribute_dataset`."
    ),
    "dense_to_ragged_batch": "There are no ragged elements: write `dataset.padded_batch(n)`.",
    "dense_to_sparse_batch": "There are no sparse elements: write `dataset.padded_batch(n)`.",
    "distributed_save": "There is no data service: write `dataset.save(path)`.",
    "enable_debug_mode": (
        "Functions of elements are plain Python here: print and breakpoints work in them."
    ),
    "from_variant": "Datasets are Python objects here; pass them as they are.",
    "get_model_proto": "Nothing is tuned here, so that there is no model of it.",
    "group_by_reducer": "Write `dataset.group_by_window` with a reduce_func, or `dataset.reduce`.",
    "index_table_from_dataset": "There are no lookup tables: use a dict in `map`.",
    "make_batched_features_dataset": (
        "Write `rx.data.TFRecordDataset(files).batch(n).map(lambda x: rx.io.parse_example(x, f))`."
    ),
    "make_saveable_from_iterator": (
        "Write `iterator.save_state()`, or give the iterator to rx.train.Checkpoint."
    ),
    "pad_to_cardinality": "Write `dataset.repeat().take(count)`, and a mask with `enumerate`.",
    "parallel_interleave": (
        "Write `dataset.interleave(function, cycle_length, num_parallel_calls=n)`."
    ),
    "parse_example_dataset": (
        "Write `dataset.batch(n).map(lambda x: rx.io.parse_example(x, features))`."
    ),
    "prefetch_to_device": (
        "A strategy brings batches to devices: `strategy.experimental_distribute_dataset`."
    ),
    "service": "There is no data service: each worker reads its own part of a dataset.",
    "table_from_dataset": "There are no lookup tables: use a dict in `map`.",
    "to_variant": "Datasets are Python objects here; pass them as they are.",
}

if not TYPE_CHECKING:
    __getattr__ = on_demand(__name__, {}, _ABSENT)
