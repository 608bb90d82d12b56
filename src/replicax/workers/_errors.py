"""The errors of a group of workers.

::

    ReplicaxError
    |-- ClusterError (ValueError)
    |   `-- RollCallError (RuntimeError)     the workers did not come together
    `-- WorkerLostError (RuntimeError)       a worker is gone, stuck, or has raised an error
"""

from replicax._errors import ReplicaxError
from replicax.cluster._errors import ClusterError


class RollCallError(ClusterError, RuntimeError):
    """The workers did not come together: one is missing, twice there, or of another kind.

    Example:
        >>> issubclass(rx.errors.RollCallError, RuntimeError)
        True
    """


class WorkerLostError(ReplicaxError, RuntimeError):
    """A worker is gone, stuck, or has raised an error, and the others cannot go on.

    Attributes:
        index: Which worker; None if it is the coordinator of all.

    Example:
        >>> issubclass(rx.errors.WorkerLostError, RuntimeError)
        True
    """

    def __init__(self, message: str, index: int | None = None) -> None:
        super().__init__(message)
        self.index = index
