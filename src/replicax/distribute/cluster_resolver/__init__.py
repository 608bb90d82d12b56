"""Cluster resolvers, which find the machines of a cluster.

Example:
    >>> resolver = rx.distribute.cluster_resolver.SimpleClusterResolver(
    ...     rx.train.ClusterSpec({"worker": ["a:1", "b:1"]}), task_type="worker", task_id=1
    ... )
    >>> resolver.cluster_spec().num_tasks("worker")
    2
"""

from replicax._src.cluster.clouds import (
    GCEClusterResolver,
    KubernetesClusterResolver,
    KubernetesExecutableLocation,
)
from replicax._src.cluster.resolvers import ClusterResolver, SimpleClusterResolver, UnionResolver
from replicax._src.cluster.slurm import SlurmClusterResolver
from replicax._src.cluster.tf_config import TFConfigClusterResolver
from replicax._src.topology.tpu_system import TPUClusterResolver

UnionClusterResolver = UnionResolver

__all__ = [
    "ClusterResolver",
    "GCEClusterResolver",
    "KubernetesClusterResolver",
    "KubernetesExecutableLocation",
    "SimpleClusterResolver",
    "SlurmClusterResolver",
    "TFConfigClusterResolver",
    "TPUClusterResolver",
    "UnionClusterResolver",
    "UnionResolver",
]

__dir__ = __all__.copy
