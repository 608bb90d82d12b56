"""Errors of clusters and workers, and the validation that all resolvers share.

Each error is also the built-in that TensorFlow raises in the same place::

    ReplicaxError
    |-- ClusterError (ValueError)            an invalid cluster, task or address
    |   `-- RollCallError (RuntimeError)     not all workers joined
    |-- ClusterTypeError (TypeError)         a value of the wrong type, such as a number for a list
    |-- ClusterStateError (RuntimeError)     the environment lacks something that a resolver needs
    |-- ClusterConflictError (KeyError)      two resolvers that claim the same task
    |-- MissingPackageError (ImportError)    a client library that is not installed
    `-- WorkerLostError (RuntimeError)       a worker crashed, hung, or raised an error
"""

import re
import zlib
from numbers import Integral
from typing import NamedTuple

from replicax._src.base.errors import ReplicaxError
from replicax._src.base.tf_errors import AbortedError, DeadlineExceededError, UnavailableError


class ClusterError(ReplicaxError, ValueError):
    """A cluster, a task or an address is invalid.

    Example:
        >>> issubclass(rx.errors.ClusterError, ValueError)
        True
    """

    __module__ = "replicax.errors"


class ClusterTypeError(ReplicaxError, TypeError):
    """A part of a cluster description has the wrong type, such as a number for a list."""


class ClusterStateError(ReplicaxError, RuntimeError):
    """The environment (Slurm, Kubernetes) lacks or contradicts something that a resolver needs."""


class ClusterConflictError(ReplicaxError, KeyError):
    """Two resolvers of a union claim the same task."""

    def __str__(self) -> str:
        # KeyError shows the repr of its argument, with quotes and escapes; these are sentences.
        return str(self.args[0]) if self.args else ""


class MissingPackageError(ReplicaxError, ImportError):
    """A resolver needs a client library that is not installed."""


_LARGEST_INDEX = 999_999  # a larger one is a typing error, and would make a list of that length
_LARGEST_PORT = 2**16 - 1


_FIRST_PORT, _NUM_PORTS = 61_000, 4_000  # above Linux's default range of ephemeral ports


def port_of_job(job: str) -> int:
    """Return a port that all processes of a job agree on, and that differs between most jobs.

    Example:
        >>> from replicax._src.cluster.checks import port_of_job
        >>> port_of_job("7.0") == port_of_job("7.0")
        True
    """
    return _FIRST_PORT + zlib.crc32(job.encode(errors="replace")) % _NUM_PORTS


def natural_key(name: str) -> list[tuple[int, str]]:
    """Return a sort key that compares the numbers in a name by value: m2 before m10.

    Example:
        >>> from replicax._src.cluster.checks import natural_key
        >>> sorted(["m10", "m2"], key=natural_key)
        ['m2', 'm10']
        >>> sorted(["10.0.0.10", "10.0.0.9"], key=natural_key)
        ['10.0.0.9', '10.0.0.10']
    """
    parts = re.findall(r"[0-9]+|[^0-9]+", name)
    return [(int(part), "") if part[0] in "0123456789" else (-1, part) for part in parts]


def show(value: object, limit: int = 60) -> str:
    """Return the repr of a value for an error message, truncated to ``limit`` characters.

    Example:
        >>> from replicax._src.cluster.checks import show
        >>> show("worker")
        "'worker'"
    """
    try:
        text = repr(value)
    except RecursionError:
        return f"a deeply nested {type(value).__name__}"
    return text if len(text) <= limit else f"{text[:limit]}..."


def to_index(value: object, where: str) -> int:
    """Convert a task index: a whole number from 0 on, also as text or as a NumPy integer.

    Args:
        value: The value to convert.
        where: Its name in an error, such as ``TF_CONFIG["task"]["index"]``.

    Returns:
        The index.

    Example:
        >>> from replicax._src.cluster.checks import to_index
        >>> to_index("3", "task_id"), to_index(2, "task_id")
        (3, 2)
    """
    if isinstance(value, Integral) and not isinstance(value, bool):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ClusterTypeError(
            f"{where} is {show(value)}, a {type(value).__name__}; it must be a whole number"
            " from 0 on, such as 0 for the first worker."
        )
    number = _whole_number(value)
    if number is None or not 0 <= number <= _LARGEST_INDEX:
        raise ClusterError(
            f"{where} is {show(value)}; it must be a whole number from 0 to {_LARGEST_INDEX},"
            " such as 0 for the first worker."
        )
    return number


def _whole_number(value: float | str) -> int | None:
    if isinstance(value, str):
        # int() would also accept "1_0", " ٣" and 5,000 digits.
        return int(value) if re.fullmatch(r" *[0-9]{1,10} *", value) else None
    return int(value) if value % 1 == 0 and -1 < value < 2**53 else None


def to_name(value: object, where: str) -> str:
    """Validate the name of a job or of a task type, which must be non-empty text.

    Example:
        >>> from replicax._src.cluster.checks import to_name
        >>> to_name("worker", "task_type")
        'worker'
    """
    if not isinstance(value, str):
        raise ClusterTypeError(
            f"{where} is {show(value)}, a {type(value).__name__}; it must be text,"
            " such as 'worker' or 'chief'."
        )
    if not value:
        raise ClusterError(f"{where} is empty; write a name, such as 'worker' or 'chief'.")
    return value


class Address(NamedTuple):
    """A host and a port, parsed from ``host:port``.

    Example:
        >>> from replicax._src.cluster.checks import Address
        >>> Address("10.0.0.1", 8888).port
        8888
    """

    host: str
    port: int


def parse_address(text: str, where: str) -> Address:
    """Split ``host:port`` (or ``[ipv6]:port``) and validate both parts.

    Args:
        text: The address.
        where: Whose address it is, for the error message.

    Returns:
        The host, without brackets, and the port.

    Example:
        >>> from replicax._src.cluster.checks import parse_address
        >>> parse_address("[::1]:8888", "worker 0")
        Address(host='::1', port=8888)
    """
    if "://" in text:
        raise ClusterError(
            f"{where} has the address {show(text)}, which starts with a protocol;"
            f" write only host:port, such as {show(text.split('://', 1)[1])}."
        )
    match = re.fullmatch(r"(\[[^\[\]\s/@]+\]|[^\[\]\s/@:]+):([0-9]{1,5})", text)
    if match is None:
        raise ClusterError(
            f"{where} has the address {show(text)}; it must be host:port,"
            " such as 'localhost:12345', '10.0.0.1:8888' or '[::1]:8888'."
        )
    port = int(match[2])
    if not 1 <= port <= _LARGEST_PORT:
        raise ClusterError(
            f"{where} has the address {show(text)} with port {port};"
            f" a port is a number from 1 to {_LARGEST_PORT}."
        )
    host = match[1].strip("[]")
    try:
        host.encode("idna")  # as name resolution will
    except UnicodeError as error:
        raise ClusterError(
            f"{where} has the address {show(text)}, whose host is not a valid name:"
            f" {error}. The parts of a name between dots have 1 to 63 letters."
        ) from error
    return Address(host, port)


class RollCallError(ClusterError, DeadlineExceededError, RuntimeError):
    """Not all workers joined: one is missing, present twice, or runs other versions or devices.

    Example:
        >>> issubclass(rx.errors.RollCallError, RuntimeError)
        True
    """

    __module__ = "replicax.errors"


class WorkerLostError(UnavailableError, AbortedError, RuntimeError):
    """A worker crashed, hung or raised an error, and the others cannot continue.

    Attributes:
        index: The worker; None if the coordinator was lost.

    Example:
        >>> issubclass(rx.errors.WorkerLostError, RuntimeError)
        True
    """

    __module__ = "replicax.errors"

    def __init__(self, message: str, index: int | None = None) -> None:
        super().__init__(message)
        self.index = index
