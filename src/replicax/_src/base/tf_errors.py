"""The exceptions of `tf.errors`, with TensorFlow's names and codes.

Each is an `OpError`, with ``message`` and ``error_code``, and a subclass of the corresponding
built-in exception::

    ReplicaxError
    `-- OpError
        |-- AbortedError                            an operation was given up
        |-- AlreadyExistsError (FileExistsError)    a file exists and would be overwritten
        |-- CancelledError                          an operation was cancelled
        |-- DataLossError (OSError)                 a file is corrupt or truncated
        |-- DeadlineExceededError                   something took too long
        |-- FailedPreconditionError (OSError)       a precondition of a call does not hold
        |-- InternalError (RuntimeError)            a fault of the runtime
        |-- InvalidArgumentError (ValueError)       an invalid value
        |   `-- ArgumentTypeError (TypeError)       an argument of the wrong type
        |-- NotFoundError (FileNotFoundError)       a file does not exist
        |-- OutOfRangeError (EOFError)              the dataset has no further element
        |   `-- EndOfSequenceError (StopIteration)  the same, raised by `next`
        |-- PermissionDeniedError (PermissionError) a file was opened in another mode
        |-- ResourceExhaustedError (MemoryError)    memory is full
        |-- StructureError (TypeError, ValueError)  elements of different structure
        |-- UnauthenticatedError (PermissionError)  credentials are missing
        |-- UnavailableError                        a worker or service is not reachable
        |-- UnimplementedError (NotImplementedError) not supported for this dataset or path
        `-- UnknownError                            an error of another kind
"""

from typing import Any

from replicax._src.base.errors import ReplicaxError

# The codes, TensorFlow's and gRPC's.
OK, CANCELLED, UNKNOWN, INVALID_ARGUMENT, DEADLINE_EXCEEDED, NOT_FOUND = range(6)
ALREADY_EXISTS, PERMISSION_DENIED, RESOURCE_EXHAUSTED, FAILED_PRECONDITION = range(6, 10)
ABORTED, OUT_OF_RANGE, UNIMPLEMENTED, INTERNAL, UNAVAILABLE, DATA_LOSS, UNAUTHENTICATED = range(
    10, 17
)


class OpError(ReplicaxError):
    """An error of an operation.

    Construct it as in TensorFlow, from ``node_def``, ``op`` and ``message``, or from a message.

    Attributes:
        error_code: The code of this class of errors.
        node_def: None: there are no graphs.
        op: None: there are no graphs.

    Example:
        >>> rx.errors.AbortedError(None, None, "gone").message
        'gone'
    """

    __module__ = "replicax.errors"

    error_code = UNKNOWN
    node_def: Any = None
    op: Any = None

    def __init__(
        self,
        *args: Any,
        node_def: Any = None,
        op: Any = None,
        message: str | None = None,
        error_code: int | None = None,
    ) -> None:
        if message is not None:
            args = (message,)
        elif len(args) > 2 and args[0] is None and isinstance(args[2], str):
            error_code = args[3] if type(self) is OpError and len(args) > 3 else error_code
            args = (args[2],)
        super().__init__(*args)
        if error_code is not None:
            self.error_code = error_code

    @property
    def message(self) -> str:
        """The text of the error."""
        return str(self)

    @property
    def experimental_payloads(self) -> dict[str, bytes]:
        """An empty dict: errors carry nothing else."""
        return {}


class OutOfRangeError(OpError, EOFError):
    """The dataset has no further element.

    Example:
        >>> iterator = iter(rx.data.Dataset.range(0))
        >>> iterator.get_next()  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        replicax.errors.OutOfRangeError: End of sequence: ...
    """

    __module__ = "replicax.errors"
    error_code = OUT_OF_RANGE


class EndOfSequenceError(StopIteration, OutOfRangeError):
    """Raised by ``next(iterator)`` at the end: both a `StopIteration` and an `OutOfRangeError`.

    TensorFlow raises `StopIteration` in eager code and `OutOfRangeError` in compiled functions;
    programs that catch either keep working. `get_next` raises the plain `OutOfRangeError`: a
    `StopIteration` from anything but `next` would silently end an enclosing loop or `map`.

    Example:
        >>> try:
        ...     next(iter(rx.data.Dataset.range(0)))
        ... except rx.errors.OutOfRangeError as error:
        ...     isinstance(error, StopIteration)
        True
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.value = None  # the value of a `yield from`; Python would use the message


class DataLossError(OpError, OSError):
    """A file is corrupt or truncated; the message names the file, byte offset and problem.

    Example:
        >>> import pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp(), "a.tfrecord")
        >>> _ = path.write_bytes(b"too short")
        >>> list(rx.data.TFRecordDataset(path))  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        replicax.errors.DataLossError: '...a.tfrecord' is cut off: ...
    """

    __module__ = "replicax.errors"
    error_code = DATA_LOSS


class NotFoundError(OpError, FileNotFoundError):
    """A file does not exist.

    Example:
        >>> list(rx.data.TextLineDataset("/no/such/file"))  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        replicax.errors.NotFoundError: There is no file '/no/such/file' ...
    """

    __module__ = "replicax.errors"
    error_code = NOT_FOUND


class AlreadyExistsError(OpError, FileExistsError):
    """A file exists and would be overwritten.

    Example:
        >>> import pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp(), "a")
        >>> _ = path.write_text("x")
        >>> rx.io.gfile.copy(path, path)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        replicax.errors.AlreadyExistsError: '...' exists already...
    """

    __module__ = "replicax.errors"
    error_code = ALREADY_EXISTS


class PermissionDeniedError(OpError, PermissionError):
    """A file was not opened for reading, or not for writing.

    Example:
        >>> import os, tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "a")
        >>> with rx.io.gfile.GFile(path, "w") as file:
        ...     file.read()  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        replicax.errors.PermissionDeniedError: ...
    """

    __module__ = "replicax.errors"
    error_code = PERMISSION_DENIED


class FailedPreconditionError(OpError, OSError):
    """A precondition does not hold: a folder where a file should be, a wrong declared size.

    Example:
        >>> promise = rx.data.experimental.assert_cardinality(5)
        >>> list(rx.data.Dataset.range(3).apply(promise))  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        replicax.errors.FailedPreconditionError: assert_cardinality() was promised 5 ...
    """

    __module__ = "replicax.errors"
    error_code = FAILED_PRECONDITION


class UnimplementedError(OpError, NotImplementedError):
    """The operation is not supported for this dataset or path.

    Example:
        >>> odd = rx.data.Dataset.range(5).filter(lambda x: x % 2 == 1)
        >>> rx.data.experimental.at(odd, 1)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        replicax.errors.UnimplementedError: at() needs a dataset of known size...
    """

    __module__ = "replicax.errors"
    error_code = UNIMPLEMENTED


class InvalidArgumentError(OpError, ValueError):
    """An invalid value: a batch size of zero, incompatible shapes.

    Example:
        >>> rx.data.Dataset.range(3).batch(0)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        replicax.errors.InvalidArgumentError: batch(batch_size=0): ...
    """

    __module__ = "replicax.errors"
    error_code = INVALID_ARGUMENT


class ArgumentTypeError(InvalidArgumentError, TypeError):
    """An argument of the wrong type, such as a float for a batch size.

    Example:
        >>> rx.data.Dataset.range(3).batch(1.5)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        replicax._src.base.tf_errors.ArgumentTypeError: batch(batch_size=1.5): ...
    """


class StructureError(OpError, TypeError, ValueError):
    """Elements of one dataset differ in structure.

    Example:
        >>> list(rx.data.Dataset.from_generator(lambda: [1, (2, 3)]))  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        replicax.errors.StructureError: Element 1 is built differently from the ones before...
    """

    __module__ = "replicax.errors"
    error_code = INVALID_ARGUMENT


class AbortedError(OpError):
    """An operation was aborted, for example because a worker restarted.

    Example:
        >>> rx.errors.AbortedError("reason").error_code == rx.errors.ABORTED
        True
    """

    __module__ = "replicax.errors"
    error_code = ABORTED


class CancelledError(OpError):
    """An operation was cancelled.

    Example:
        >>> rx.errors.CancelledError("reason").error_code == rx.errors.CANCELLED
        True
    """

    __module__ = "replicax.errors"
    error_code = CANCELLED


class DeadlineExceededError(OpError):
    """Something took longer than its time limit.

    Example:
        >>> rx.errors.DeadlineExceededError("reason").error_code == rx.errors.DEADLINE_EXCEEDED
        True
    """

    __module__ = "replicax.errors"
    error_code = DEADLINE_EXCEEDED


class InternalError(OpError, RuntimeError):
    """A fault of the runtime.

    Example:
        >>> rx.errors.InternalError("reason").error_code == rx.errors.INTERNAL
        True
    """

    __module__ = "replicax.errors"
    error_code = INTERNAL


class ResourceExhaustedError(OpError, MemoryError):
    """Memory or another resource is used up.

    Example:
        >>> rx.errors.ResourceExhaustedError("reason").error_code == rx.errors.RESOURCE_EXHAUSTED
        True
    """

    __module__ = "replicax.errors"
    error_code = RESOURCE_EXHAUSTED


class UnauthenticatedError(OpError, PermissionError):
    """Credentials are missing or invalid.

    Example:
        >>> rx.errors.UnauthenticatedError("reason").error_code == rx.errors.UNAUTHENTICATED
        True
    """

    __module__ = "replicax.errors"
    error_code = UNAUTHENTICATED


class UnavailableError(OpError):
    """A worker or a service is not reachable.

    Example:
        >>> rx.errors.UnavailableError("reason").error_code == rx.errors.UNAVAILABLE
        True
    """

    __module__ = "replicax.errors"
    error_code = UNAVAILABLE


class UnknownError(OpError):
    """An error of another kind.

    Example:
        >>> rx.errors.UnknownError("reason").error_code == rx.errors.UNKNOWN
        True
    """

    __module__ = "replicax.errors"
    error_code = UNKNOWN
