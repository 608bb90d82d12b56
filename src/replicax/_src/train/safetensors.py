"""Read and write safetensors files, the format in which Hugging Face distributes weights.

A file has 8 bytes with the length of its header, the header (JSON: dtype, shape and byte range of
each tensor), and the data, in C order and little endian. A model of several files has an index,
``model.safetensors.index.json``, which maps each tensor to its file. The format's library is not
used, because only the ranges that a variable's shards need are read, from URLs too.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import product
from typing import IO, Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from replicax._src.base.errors import VariableError
from replicax._src.base.tf_errors import AlreadyExistsError, DataLossError, NotFoundError
from replicax._src.files import storage
from replicax._src.files.paths import is_url, user_path
from replicax._src.state.variables import variable_of
from replicax._src.train.array_pieces import Part, local_parts, put_parts
from replicax._src.train.checkpoint_files import as_bytes, buffer
from replicax._src.train.object_graph import is_variable
from replicax._src.train.stored_checkpoint import check_same_source, is_placed, set_free_value
from replicax._src.workers.watchdog import disk

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_LONGEST_HEADER = 100_000_000  # bytes; the limit of the safetensors library
# Two ranges that are closer than this are read as one: a request costs more than the bytes between.
_GAP = 64 * 1024
_AT_ONCE = 64 << 20  # bytes of one read, after which the other workers learn that it got on
_DTYPES: dict[str, Any] = {
    "BOOL": np.bool_,
    "U8": np.uint8,
    "I8": np.int8,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "I16": np.int16,
    "U16": np.uint16,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "I32": np.int32,
    "U32": np.uint32,
    "F32": np.float32,
    "C64": np.complex64,
    "F64": np.float64,
    "I64": np.int64,
    "U64": np.uint64,
}
_NAMES = {np.dtype(dtype): name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file: its shape and dtype, and its values when they are needed.

    `T`, `transpose`, `reshape` and indexing with integers and slices select what to read later;
    ``np.asarray(tensor)`` reads it.

    Attributes:
        path: The file.
        start: The byte at which its first element is.
        shape: The shape.
        dtype: The dtype.
        strides: The distance of neighbours along each axis, in elements.

    Example:
        >>> import tempfile
        >>> path = f"{tempfile.mkdtemp()}/x.safetensors"
        >>> rx.train.save_safetensors(path, {"x": np.arange(6.0).reshape(2, 3)})
        >>> x = rx.train.open_safetensors(path)["x"]
        >>> x.T.shape, np.asarray(x[1, :2])
        ((3, 2), array([3., 4.]))
    """

    path: str
    start: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    strides: tuple[int, ...] = field(repr=False)

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def T(self) -> StoredTensor:  # noqa: N802
        """The tensor with its axes in reverse order."""
        return self.transpose()

    def transpose(self, *axes: int) -> StoredTensor:
        """Return the tensor with its axes in another order, by default in reverse order."""
        order = axes or tuple(reversed(range(self.ndim)))
        if sorted(order) != list(range(self.ndim)):
            raise ValueError(
                f"transpose{order} of a tensor of shape {self.shape}: name each of its"
                f" {self.ndim} axes once."
            )
        return self._view(self.start, [(self.shape[i], self.strides[i]) for i in order])

    def reshape(self, *shape: int) -> StoredTensor:
        """Return the tensor with another shape; before any transposition or indexing.

        Raises:
            ValueError: The tensor was transposed or indexed before, or its size is another.
        """
        if math.prod(shape) != math.prod(self.shape) or self.strides != _strides(self.shape):
            raise ValueError(
                f"A stored tensor of shape {self.shape} cannot be reshaped to {shape}: the sizes"
                " must be equal, and reshape must come before transpose and indexing. Use"
                " `np.asarray(tensor)` to read it as an array."
            )
        return StoredTensor(self.path, self.start, shape, self.dtype, _strides(shape))

    def __getitem__(self, index: Any) -> StoredTensor:
        given = index if isinstance(index, tuple) else (index,)
        if Ellipsis in given:
            at = given.index(Ellipsis)
            fill = (slice(None),) * (self.ndim - len(given) + 1)
            given = (*given[:at], *fill, *given[at + 1 :])
        if len(given) > self.ndim or not all(isinstance(i, int | slice) for i in given):
            raise IndexError(
                f"A stored tensor of shape {self.shape} takes an integer or a slice for each axis,"
                f" got {index!r}. Use `np.asarray(tensor)` to read it as an array."
            )
        start, axes = self.start, []
        for i, length, stride in zip(given, self.shape, self.strides, strict=False):
            chosen = range(length)[i]
            is_range = isinstance(chosen, range)
            if is_range and chosen.step < 1:
                raise IndexError(f"A stored tensor takes slices with positive steps, got {i!r}.")
            first = chosen.start if isinstance(chosen, range) else chosen
            start += min(first, length) * stride * self.dtype.itemsize
            if isinstance(chosen, range):
                axes.append((len(chosen), stride * chosen.step))
        rest = len(given)
        axes += zip(self.shape[rest:], self.strides[rest:], strict=True)
        return self._view(start, axes)

    def _view(self, start: int, axes: list[tuple[int, int]]) -> StoredTensor:
        shape, strides = tuple(n for n, _ in axes), tuple(s for _, s in axes)
        return StoredTensor(self.path, start, shape, self.dtype, strides)

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        with storage.open_file(self.path) as file:
            array = self.read(file)
        return array if dtype is None else array.astype(dtype)

    def read(self, file: IO[bytes]) -> np.ndarray:
        """Read the values from the opened file, into memory that is not shared."""
        # The axes in the order in which they are in the file, slowest first.
        order = sorted(range(self.ndim), key=lambda i: -self.strides[i])
        shape = [self.shape[i] for i in order]
        strides = [self.strides[i] for i in order]
        size = self.dtype.itemsize
        # Bytes along the last axes, `looped` of which are not among them, are read together.
        looped, span = len(shape), 1
        while looped and (strides[looped - 1] - span) * size <= _GAP:
            looped -= 1
            span = max(shape[looped] - 1, 0) * strides[looped] + span
        found = buffer(math.prod(shape) * size).view(self.dtype).reshape(shape)
        if found.size:
            is_whole = span == math.prod(shape[looped:])
            steps = [s * size for s in strides[looped:]]
            for index in product(*map(range, shape[:looped])):
                at = self.start + sum(map(_times, index, strides)) * size
                part: Any = found[(*index, ...)]  # type: ignore[arg-type]
                room = part.reshape(-1) if is_whole else np.empty(span, self.dtype)
                _read_into(file, self.path, at, as_bytes(room))
                if not is_whole:
                    part[...] = np.lib.stride_tricks.as_strided(room, part.shape, steps)
        turned = found.transpose(np.argsort(order))
        return np.ascontiguousarray(turned).reshape(self.shape)

    def part(self, file: IO[bytes], part: Part) -> np.ndarray:
        """Read a part, into memory that is not shared."""
        if not part.is_flat:
            return self[part.slices()].read(file)
        if self.strides == _strides(self.shape):
            return self.reshape(math.prod(self.shape))[part.slices()].read(file)
        return self.read(file).ravel()[part.slices()].copy()


def _times(a: int, b: int) -> int:
    return a * b


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a C-ordered array, in elements."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def _read_into(file: IO[bytes], path: str, at: int, into: Any) -> None:
    file.seek(at)
    view, done = memoryview(into).cast("B"), 0
    while done < len(view):
        count = file.readinto(view[done : done + _AT_ONCE])  # type: ignore[attr-defined]
        if not count:
            raise DataLossError(f"{path!r} is cut off: there are no {len(view)} bytes at {at}.")
        done += count
        disk.note_progress()


def open_safetensors(path: str | os.PathLike[str]) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file or folder by name, without reading their values.

    Args:
        path: A file, or a folder (or URL) with ``model.safetensors``, or with
            ``model.safetensors.index.json`` and the files that it names.

    Raises:
        NotFoundError: There is no such file.
        DataLossError: A file is damaged or incomplete.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> rx.train.save_safetensors(folder, {"w": np.zeros((2, 3), "float32")})
        >>> {name: tensor.shape for name, tensor in rx.train.open_safetensors(folder).items()}
        {'w': (2, 3)}
    """
    place = user_path(path)
    if not storage.is_folder(place):
        return _tensors_of(place)
    if storage.is_file(single := f"{place}/{_SINGLE}"):
        return _tensors_of(single)
    if not storage.is_file(index := f"{place}/{_INDEX}"):
        raise NotFoundError(f"Folder {place!r} has neither {_SINGLE!r} nor {_INDEX!r}.")
    found = _read_index(index)
    opened = {file: _tensors_of(f"{place}/{file}") for file in dict.fromkeys(found.values())}
    for name, file in found.items():
        if name not in opened[file]:
            raise DataLossError(f"{index!r} has tensor {name!r} in {file!r}, which lacks it.")
    return {name: opened[file][name] for name, file in found.items()}


def _read_index(index: str) -> dict[str, str]:
    """Return the file of each tensor."""
    try:
        files = json.loads(storage.read_bytes(index))["weight_map"]
        found = {str(name): str(file) for name, file in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataLossError(f"{index!r} is damaged: {type(error).__name__}: {error}.") from None
    for file in found.values():
        if file != os.path.basename(file) or file in ("", ".", ".."):
            raise DataLossError(f"{index!r} names {file!r}, which is not a file of its folder.")
    return found


def _tensors_of(path: str) -> dict[str, StoredTensor]:
    """Return the tensors of one file; every byte must belong to one of them."""
    status = storage.status(path)
    if status is None or status.is_folder:
        raise NotFoundError(f"There is no safetensors file {path!r}{storage.here(path)}.")
    with storage.open_file(path) as file:
        begin = file.read(8)
        length = struct.unpack("<Q", begin)[0] if len(begin) == 8 else -1
        if not 0 < length <= min(_LONGEST_HEADER, status.size - 8):
            raise DataLossError(
                f"{path!r} is not a safetensors file, or it is cut off: it has {status.size} bytes"
                f" and its first 8 announce a header of {length}."
            )
        header = file.read(length)
    try:
        entries = json.loads(header)
        entries.pop("__metadata__", None)
        found = {str(name): _entry(path, 8 + length, entry) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataLossError(
            f"The header of {path!r} is damaged: {type(error).__name__}: {error}."
        ) from None
    end = 8 + length
    for name, tensor in sorted(found.items(), key=lambda item: item[1].start):
        nbytes = math.prod(tensor.shape) * tensor.dtype.itemsize
        if nbytes and tensor.start != end:
            raise DataLossError(
                f"Tensor {name!r} of {path!r} begins at byte {tensor.start}, and the one before it"
                f" ends at byte {end}."
            )
        end += nbytes
    if end != status.size:
        raise DataLossError(
            f"{path!r} has the wrong size: its tensors need {end} bytes, found {status.size}."
        )
    return found


def _entry(path: str, data: int, entry: Any) -> StoredTensor:
    shape = tuple(int(n) for n in entry["shape"])
    begin, end = map(int, entry["data_offsets"])
    if entry["dtype"] not in _DTYPES:
        raise ValueError(f"dtype {entry['dtype']!r} is unknown; known: {', '.join(_DTYPES)}")
    dtype: np.dtype[Any] = np.dtype(_DTYPES[entry["dtype"]])
    if min(shape, default=0) < 0 or end - begin != math.prod(shape) * dtype.itemsize or begin < 0:
        raise ValueError(f"{end - begin} bytes for {dtype}{list(shape)}")
    return StoredTensor(path, data + begin, shape, dtype, _strides(shape))


def load_safetensors(
    path: str | os.PathLike[str],
    variables: Mapping[str, Any],
    *,
    transform: Callable[[str, StoredTensor], Any] | None = None,
    cast: bool = False,
) -> None:
    """Assign tensors of a safetensors file or folder to variables.

    Of sharded variables and of those split over logical devices, each process reads only the ranges
    that its own devices hold. One tensor is in host memory at a time. All shapes and dtypes are
    checked before the first variable changes.

    Args:
        path: As for `open_safetensors`.
        variables: The variables (replicax's, Keras's or Flax NNX's) by the names of their tensors.
            Other tensors of the file are not read.
        transform: Called with the name and the `StoredTensor`; returns what to assign: a
            `StoredTensor`, for example ``tensor.T`` for a kernel that PyTorch stores as (out, in),
            of which only the needed ranges are read, or an array.
        cast: Whether to round to the dtypes of the variables, if they have fewer bits. Integers
            must fit.

    Raises:
        NotFoundError: The file does not exist, or a tensor is not in it.
        VariableError: A tensor does not fit its variable.
        DataLossError: A file is damaged or incomplete.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> rx.train.save_safetensors(folder, {"w": np.arange(4.0).reshape(2, 2)})
        >>> strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> with strategy.scope():
        ...     w = rx.Variable(jnp.zeros((2, 2)))
        >>> rx.train.load_safetensors(folder, {"w": w}, transform=lambda _, x: x.T, cast=True)
        >>> w.numpy().tolist()
        [[0.0, 2.0], [1.0, 3.0]]
    """
    place = user_path(path)
    stored = open_safetensors(place)
    if absent := [name for name in variables if name not in stored]:
        raise NotFoundError(
            f"{place!r} has no tensor {', '.join(map(repr, absent[:5]))}"
            f"{' and others' if len(absent) > 5 else ''}; it has"
            f" {', '.join(map(repr, list(stored)[:20]))}. Nothing was loaded."
        )
    chosen: dict[str, Any] = {name: stored[name] for name in variables}
    if transform is not None:
        chosen = {name: transform(name, tensor) for name, tensor in chosen.items()}
    for name, x in variables.items():
        _check(name, chosen[name], x, cast=cast)
    layout = {n: (t.dtype.name, t.shape) for n, t in stored.items()}
    identity = hashlib.sha256(json.dumps(layout, sort_keys=True).encode()).hexdigest()
    check_same_source(identity, variables.values(), "safetensors")
    with ExitStack() as files, disk.at("reading safetensors"):
        opened: dict[str, IO[bytes]] = {}
        for name, x in variables.items():
            value = chosen[name]
            if isinstance(value, StoredTensor) and value.path not in opened:
                opened[value.path] = files.enter_context(storage.open_file(value.path))
            _assign(name, value, x, opened)


def _check(name: str, value: Any, x: Any, *, cast: bool) -> None:
    """Raise unless a tensor fits its variable."""
    if not is_variable(x):
        raise TypeError(
            f"The tensor {name!r} needs a variable, got a {type(x).__name__}: pass an rx.Variable,"
            " or a variable of Keras or Flax NNX."
        )
    shape, dtype = tuple(np.shape(value)), np.dtype(value.dtype)
    if shape != tuple(x.shape):
        turned = " Use `transform=lambda name, x: x.T`." if shape[::-1] == tuple(x.shape) else ""
        raise VariableError(
            f"Tensor {name!r} has shape {shape}, and the variable that it is for has shape"
            f" {tuple(x.shape)}. Nothing was loaded.{turned}"
        )
    own = np.dtype(x.dtype)
    if not cast and not _holds(own, dtype):
        raise VariableError(
            f"Tensor {name!r} has dtype {dtype.name}, and the variable that it is for has"
            f" {own.name}, which cannot hold it exactly. Nothing was loaded. Use `cast=True` to"
            f" convert it, or make the variable with dtype={dtype.name!r}."
        )


def _holds(own: np.dtype[Any], dtype: np.dtype[Any]) -> bool:
    """Whether a dtype represents every value of another exactly."""
    if not jnp.issubdtype(own, np.floating):
        return np.can_cast(dtype, own, "safe")
    # NumPy takes a cast of integers to floats of 8 bits for safe.
    new = jnp.finfo(own)
    if jnp.issubdtype(dtype, np.integer):
        digits = jnp.iinfo(dtype).bits - (dtype.kind == "i")
        return bool(digits <= new.nmant + 1)
    if not jnp.issubdtype(dtype, np.floating):
        return dtype == np.bool_
    old = jnp.finfo(dtype)
    is_wider = new.maxexp >= old.maxexp and new.minexp <= old.minexp
    return bool(own == dtype or (new.nmant >= old.nmant and is_wider))


def _assign(name: str, value: Any, x: Any, opened: Mapping[str, IO[bytes]]) -> None:
    variable = variable_of(x)
    if variable is not None and is_placed(variable):
        parts = {
            part: _fitted(name, _part(value, part, opened), x)
            for part in local_parts(variable.cell)
        }
        put_parts(variable.cell, parts)
        return
    whole = value.read(opened[value.path]) if isinstance(value, StoredTensor) else value
    whole = _fitted(name, np.asarray(whole), x)
    if variable is None:
        set_free_value(x, whole)
    else:
        variable.assign(whole)


def _part(value: Any, part: Part, opened: Mapping[str, IO[bytes]]) -> np.ndarray:
    if isinstance(value, StoredTensor):
        return value.part(opened[value.path], part)
    array = np.asarray(value)
    return (array.ravel() if part.is_flat else array)[part.slices()].copy()


def _fitted(name: str, array: np.ndarray, x: Any) -> np.ndarray:
    own = np.dtype(x.dtype)
    if array.dtype == own:
        return array
    new = array.astype(own)
    is_rounded = jnp.issubdtype(own, np.inexact) and array.dtype.kind != "c"
    if not is_rounded and not (new == array).all():
        raise VariableError(
            f"Tensor {name!r} of dtype {array.dtype.name} has values that do not fit in the"
            f" {own.name} of its variable."
        )
    return new


def save_safetensors(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Any],
    *,
    max_file_bytes: int = 5_000_000_000,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write variables and arrays as safetensors.

    With several workers all must call it; the first one writes. Sharded variables are gathered one
    at a time.

    Args:
        path: A file that ends in ``.safetensors``, or a folder (or URL) that gets files of at most
            ``max_file_bytes`` and ``model.safetensors.index.json``, which names them.
        tensors: Variables (replicax's, Keras's or Flax NNX's) and arrays, by name.
        max_file_bytes: The largest file; a larger tensor has a file of its own.
        metadata: Texts for the header of each file.

    Raises:
        AlreadyExistsError: The folder has a ``model.safetensors``, which readers would prefer.
        TypeError: The format has no such dtype.

    Example:
        >>> import os, tempfile
        >>> folder = tempfile.mkdtemp()
        >>> tensors = {"a": np.zeros(4), "b": np.ones(4)}
        >>> rx.train.save_safetensors(folder, tensors, max_file_bytes=40)
        >>> sorted(os.listdir(folder))[:2]
        ['model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors']
    """
    place, files = user_path(path), list(_files(tensors, max_file_bytes))
    is_writer = not jax.distributed.is_initialized() or jax.process_index() == 0
    if place.endswith(".safetensors"):
        _write(place, [name for names in files for name in names], tensors, metadata, is_writer)
        return
    if storage.is_file(single := f"{place}/{_SINGLE}"):
        raise AlreadyExistsError(
            f"{single!r} exists, and readers prefer it to an index. Remove it, or write to another"
            " folder."
        )
    if is_writer:
        storage.make_folders(place)
    where: dict[str, str] = {}
    for number, names in enumerate(files, 1):
        file = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        _write(f"{place}/{file}", names, tensors, metadata, is_writer)
        where.update(dict.fromkeys(names, file))
    if is_writer:  # last, so that it never names a file that does not exist yet
        total = sum(_nbytes(x) for x in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        storage.put(f"{place}/{_INDEX}", json.dumps(index, indent=2).encode())


def _files(tensors: Mapping[str, Any], most: int) -> Iterator[list[str]]:
    """Yield the names of the tensors of each file."""
    names: list[str] = []
    filled = 0
    for name, x in tensors.items():
        if _dtype(x) not in _NAMES:
            raise TypeError(f"safetensors has no dtype {_dtype(x).name}, which {name!r} has.")
        if names and filled + _nbytes(x) > most:
            yield names
            names, filled = [], 0
        names.append(name)
        filled += _nbytes(x)
    yield names


def _dtype(x: Any) -> np.dtype[Any]:
    dtype: np.dtype[Any] = np.dtype(x.dtype if hasattr(x, "dtype") else np.asarray(x).dtype)
    return dtype


def _nbytes(x: Any) -> int:
    return math.prod(_shape(x)) * _dtype(x).itemsize


def _shape(x: Any) -> list[int]:
    return [int(n) for n in (x.shape if hasattr(x, "shape") else np.shape(x))]


def _write(
    path: str,
    names: list[str],
    tensors: Mapping[str, Any],
    metadata: Mapping[str, str] | None,
    is_writer: bool,  # noqa: FBT001
) -> None:
    """Write one file; a process that is not the writer only takes part in the gathering."""
    # Wide dtypes first, so that every tensor is aligned, as the library of the format does.
    order = sorted(names, key=lambda name: (-_dtype(tensors[name]).itemsize, name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name in order:
        x = tensors[name]
        end = at + _nbytes(x)
        header[name] = {
            "dtype": _NAMES[_dtype(x)],
            "shape": _shape(x),
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    values = (np.ascontiguousarray(_value(tensors[name])) for name in order)
    if not is_writer:
        for _ in values:
            pass
        return
    # A local file gets its name when it is complete.
    part = path if is_url(path) else f"{path}.part"
    with storage.uploading(part) as file, disk.at("writing safetensors"):
        file.write(struct.pack("<Q", len(text)) + text)
        for value in values:
            file.write(as_bytes(value).data)
    if part != path:
        storage.replace(part, path)


def _value(x: Any) -> np.ndarray:
    variable = variable_of(x)
    return variable.numpy() if variable is not None else np.asarray(x)
