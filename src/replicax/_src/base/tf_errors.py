"""The exceptions of datasets, with TensorFlow's names.

Each is also a subclass of the corresponding built-in exception::

    ReplicaxError
    |-- OutOfRangeError (EOFError)              the dataset has no further element
    |   `-- EndOfSequenceError (StopIteration)  the same, raised by `next`
    |-- DataLossError (OSError)                 a file is corrupt or truncated
    |-- NotFoundError (FileNotFoundError)       a file does not exist
    |-- AlreadyExistsError (FileExistsError)    a file exists and would be overwritten
    |-- PermissionDeniedError (PermissionError) a file was opened in another mode
    |-- FailedPreconditionError (OSError)       a precondition of a call does not hold
    |-- UnimplementedError (NotImplementedError) not supported for this dataset or path
    |-- InvalidArgumentError (ValueError)       an invalid value
    |   `-- ArgumentTypeError (TypeError)       an argument of the wrong type
    `-- StructureError (TypeError, ValueError)  elements of different structure
"""

from replicax._src.base.errors import ReplicaxError


class OutOfRangeError(ReplicaxError, EOFError):
    """The dataset has no further element.

    Example:
        >>> iterator = iter(rx.data.Dataset.range(0))
        >>> iterator.get_next()  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        replicax.errors.OutOfRangeError: End of sequence: ...
    """

    __module__ = "replicax.errors"


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


class DataLossError(ReplicaxError, OSError):
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


class NotFoundError(ReplicaxError, FileNotFoundError):
    """A file does not exist.

    Example:
        >>> list(rx.data.TextLineDataset("/no/such/file"))  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        replicax.errors.NotFoundError: There is no file '/no/such/file' ...
    """

    __module__ = "replicax.errors"


class AlreadyExistsError(ReplicaxError, FileExistsError):
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


class PermissionDeniedError(ReplicaxError, PermissionError):
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


class FailedPreconditionError(ReplicaxError, OSError):
    """A precondition does not hold: a folder where a file should be, a wrong declared size.

    Example:
        >>> promise = rx.data.experimental.assert_cardinality(5)
        >>> list(rx.data.Dataset.range(3).apply(promise))  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        replicax.errors.FailedPreconditionError: assert_cardinality() was promised 5 ...
    """

    __module__ = "replicax.errors"


class UnimplementedError(ReplicaxError, NotImplementedError):
    """The operation is not supported for this dataset or path.

    Example:
        >>> odd = rx.data.Dataset.range(5).filter(lambda x: x % 2 == 1)
        >>> rx.data.experimental.at(odd, 1)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        replicax.errors.UnimplementedError: at() needs a dataset of known size...
    """

    __module__ = "replicax.errors"


class InvalidArgumentError(ReplicaxError, ValueError):
    """An invalid value: a batch size of zero, incompatible shapes.

    Example:
        >>> rx.data.Dataset.range(3).batch(0)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        replicax.errors.InvalidArgumentError: batch(batch_size=0): ...
    """

    __module__ = "replicax.errors"


class ArgumentTypeError(InvalidArgumentError, TypeError):
    """An argument of the wrong type, such as a float for a batch size.

    Example:
        >>> rx.data.Dataset.range(3).batch(1.5)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        replicax._src.base.tf_errors.ArgumentTypeError: batch(batch_size=1.5): ...
    """


class StructureError(ReplicaxError, TypeError, ValueError):
    """Elements of one dataset differ in structure.

    Example:
        >>> list(rx.data.Dataset.from_generator(lambda: [1, (2, 3)]))  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        replicax.errors.StructureError: Element 1 is built differently from the ones before...
    """

    __module__ = "replicax.errors"
