"""The exceptions of datasets, with TensorFlow's names.

Each is also the built-in that says the same::

    ReplicaxError
    |-- OutOfRangeError (EOFError)              the dataset has no further element
    |   `-- EndOfSequenceError (StopIteration)  the same, where Python's iterators end: `next`
    |-- DataLossError (OSError)                 a file is corrupt or cut off
    |-- NotFoundError (FileNotFoundError)       a file does not exist
    |-- AlreadyExistsError (FileExistsError)    a file exists that would be written over
    |-- PermissionDeniedError (PermissionError) a file was not opened for that
    |-- FailedPreconditionError (OSError)       something is not as a call needs it
    |-- UnimplementedError (NotImplementedError) there is no such thing for this dataset
    |-- InvalidArgumentError (ValueError)       a value that cannot be worked with
    |   `-- ArgumentTypeError (TypeError)       an argument of another type than a call needs
    `-- StructureError (TypeError, ValueError)  elements that are not built alike
"""

from replicax._errors import ReplicaxError


class OutOfRangeError(ReplicaxError, EOFError):
    """The dataset has no further element.

    Example:
        >>> iterator = iter(rx.data.Dataset.range(0))
        >>> iterator.get_next()  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        replicax.data._errors.OutOfRangeError: End of sequence: ...
    """


class EndOfSequenceError(StopIteration, OutOfRangeError):
    """What ``next(iterator)`` raises at the end: a `StopIteration` and an `OutOfRangeError`.

    TensorFlow raises the one in eager code and the other in a compiled function; programs written
    for either find theirs. `get_next` raises the plain `OutOfRangeError`: a `StopIteration` from
    anything but `next` would silently end the loop or the `map` around it.

    Example:
        >>> try:
        ...     next(iter(rx.data.Dataset.range(0)))
        ... except rx.errors.OutOfRangeError as error:
        ...     isinstance(error, StopIteration)
        True
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.value = None  # what a `yield from` evaluates to; Python would take the message


class DataLossError(ReplicaxError, OSError):
    """A file is corrupt or cut off; the message names file, byte offset and what was wrong.

    Example:
        >>> import pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp(), "a.tfrecord")
        >>> _ = path.write_bytes(b"too short")
        >>> list(rx.data.TFRecordDataset(path))  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        replicax.data._errors.DataLossError: '...a.tfrecord' is cut off: ...
    """


class NotFoundError(ReplicaxError, FileNotFoundError):
    """A file does not exist.

    Example:
        >>> list(rx.data.TextLineDataset("/no/such/file"))  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        replicax.data._errors.NotFoundError: There is no file '/no/such/file' ...
    """


class AlreadyExistsError(ReplicaxError, FileExistsError):
    """A file exists that would be written over.

    Example:
        >>> import pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp(), "a")
        >>> _ = path.write_text("x")
        >>> rx.io.gfile.copy(path, path)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        replicax.data._errors.AlreadyExistsError: '...' exists already...
    """


class PermissionDeniedError(ReplicaxError, PermissionError):
    """A file was not opened for reading, or not for writing.

    Example:
        >>> import os, tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "a")
        >>> with rx.io.gfile.GFile(path, "w") as file:
        ...     file.read()  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        replicax.data._errors.PermissionDeniedError: ...
    """


class FailedPreconditionError(ReplicaxError, OSError):
    """Something is not as a call needs it: a folder where a file should be, a wrong promise.

    Example:
        >>> promise = rx.data.experimental.assert_cardinality(5)
        >>> list(rx.data.Dataset.range(3).apply(promise))  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        replicax.data._errors.FailedPreconditionError: assert_cardinality() was promised 5 ...
    """


class UnimplementedError(ReplicaxError, NotImplementedError):
    """There is no such thing for this dataset.

    Example:
        >>> odd = rx.data.Dataset.range(5).filter(lambda x: x % 2 == 1)
        >>> rx.data.experimental.at(odd, 1)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        replicax.data._errors.UnimplementedError: at() needs a dataset of known size...
    """


class InvalidArgumentError(ReplicaxError, ValueError):
    """A value that cannot be worked with: a batch size of zero, shapes that do not fit.

    Example:
        >>> rx.data.Dataset.range(3).batch(0)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        replicax.data._errors.InvalidArgumentError: batch(batch_size=0): ...
    """


class ArgumentTypeError(InvalidArgumentError, TypeError):
    """An argument of another type than a call needs: a float for a batch size, say.

    Example:
        >>> rx.data.Dataset.range(3).batch(1.5)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        replicax.data._errors.ArgumentTypeError: batch(batch_size=1.5): ...
    """


class StructureError(ReplicaxError, TypeError, ValueError):
    """Elements of one dataset that are not built alike.

    Example:
        >>> list(rx.data.Dataset.from_generator(lambda: [1, (2, 3)]))  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        replicax.data._errors.StructureError: Element 1 is built differently from the ones before...
    """
