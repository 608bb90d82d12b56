"""The errors of clusters and resolvers.

Each is also the built-in that TensorFlow raises in the same place::

    ReplicaxError
    |-- ClusterError (ValueError)            a cluster, a task or an address that makes no sense
    |-- ClusterTypeError (TypeError)         a value of the wrong kind, such as a number for a list
    |-- ClusterStateError (RuntimeError)     the surroundings lack what a resolver needs
    |-- ClusterConflictError (KeyError)      two resolvers that claim the same task
    `-- MissingPackageError (ImportError)    a client library that is not installed
"""

from replicax._errors import ReplicaxError


class ClusterError(ReplicaxError, ValueError):
    """A cluster, a task or an address that makes no sense.

    Example:
        >>> issubclass(rx.errors.ClusterError, ValueError)
        True
    """


class ClusterTypeError(ReplicaxError, TypeError):
    """A part of a cluster description is of the wrong kind, such as a number for a list."""


class ClusterStateError(ReplicaxError, RuntimeError):
    """The surroundings (Slurm, Kubernetes) lack what a resolver needs, or contradict it."""


class ClusterConflictError(ReplicaxError, KeyError):
    """Two resolvers of a union claim the same task."""

    def __str__(self) -> str:
        # KeyError shows the repr of its argument, which is no way to print a sentence.
        return str(self.args[0]) if self.args else ""


class MissingPackageError(ReplicaxError, ImportError):
    """A resolver needs a client library that is not installed."""
