"""`rx.data.experimental`: dataset options and functions that TensorFlow has in this namespace."""

from typing import TYPE_CHECKING

from replicax._src.base.lazy import on_demand
from replicax._src.data.csv_dataset import CsvDataset, make_csv_dataset
from replicax._src.data.experimental_functions import (
    Reducer,
    TFRecordWriter,
    assert_cardinality,
    at,
    cardinality,
    from_list,
    group_by_reducer,
    pad_to_cardinality,
)
from replicax._src.data.legacy_transformations import (
    Counter,
    choose_from_datasets,
    dense_to_ragged_batch,
    dense_to_sparse_batch,
    enumerate_dataset,
    get_next_as_optional,
    get_single_element,
    get_structure,
    group_by_window,
    ignore_errors,
    load,
    map_and_batch,
    parallel_interleave,
    sample_from_datasets,
    save,
    scan,
    shuffle_and_repeat,
    take_while,
    unbatch,
    unique,
)
from replicax._src.data.node import AUTOTUNE, INFINITE_CARDINALITY, UNKNOWN_CARDINALITY
from replicax._src.data.nodes.select import SHARD_HINT
from replicax._src.data.optional import Optional
from replicax._src.data.options import (
    AutoShardPolicy,
    AutotuneAlgorithm,
    AutotuneOptions,
    DistributeOptions,
    ExternalStatePolicy,
    OptimizationOptions,
    ServiceOptions,
    ThreadingOptions,
)
from replicax._src.data.parsed_dataset import make_batched_features_dataset, parse_example_dataset

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
    "Reducer",
    "ServiceOptions",
    "TFRecordWriter",
    "ThreadingOptions",
    "assert_cardinality",
    "at",
    "cardinality",
    "choose_from_datasets",
    "dense_to_ragged_batch",
    "dense_to_sparse_batch",
    "enumerate_dataset",
    "from_list",
    "get_next_as_optional",
    "get_single_element",
    "get_structure",
    "group_by_reducer",
    "group_by_window",
    "ignore_errors",
    "load",
    "make_batched_features_dataset",
    "make_csv_dataset",
    "map_and_batch",
    "pad_to_cardinality",
    "parallel_interleave",
    "parse_example_dataset",
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
    "SqlDataset": "Write `rx.data.Dataset.from_generator` over a cursor of `sqlite3`.",
    "copy_to_device": (
        "A strategy brings batches to devices: `strategy.experimental_distribute_dataset`."
    ),
    "distributed_save": "There is no data service: write `dataset.save(path)`.",
    "enable_debug_mode": (
        "Functions of elements are plain Python here: print and breakpoints work in them."
    ),
    "from_variant": "Datasets are Python objects here; pass them directly.",
    "get_model_proto": "There is no autotuning here, and so no model of it.",
    "index_table_from_dataset": "There are no lookup tables: use a dict in `map`.",
    "make_saveable_from_iterator": (
        "Write `iterator.save_state()`, or give the iterator to rx.train.Checkpoint."
    ),
    "prefetch_to_device": (
        "A strategy brings batches to devices: `strategy.experimental_distribute_dataset`."
    ),
    "service": "There is no data service: each worker reads its own part of a dataset.",
    "table_from_dataset": "There are no lookup tables: use a dict in `map`.",
    "to_variant": "Datasets are Python objects here; pass them directly.",
}

if not TYPE_CHECKING:
    __getattr__ = on_demand(__name__, {}, _ABSENT)
