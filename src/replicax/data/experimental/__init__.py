"""Datasets and distribution strategies: how a dataset is divided among workers."""

from replicax.data._node import AUTOTUNE, INFINITE_CARDINALITY, UNKNOWN_CARDINALITY
from replicax.data._nodes._select import SHARD_HINT
from replicax.data._options import AutoShardPolicy, DistributeOptions

__all__ = [
    "AUTOTUNE",
    "INFINITE_CARDINALITY",
    "SHARD_HINT",
    "UNKNOWN_CARDINALITY",
    "AutoShardPolicy",
    "DistributeOptions",
]
