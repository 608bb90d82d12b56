"""Datasets and distribution strategies: how a dataset is divided among workers."""

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
    "DistributeOptions",
    "ExternalStatePolicy",
    "OptimizationOptions",
    "Optional",
    "ServiceOptions",
    "ThreadingOptions",
]
