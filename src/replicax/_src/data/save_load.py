"""The on-disk format of `Dataset.save` and `Dataset.load`.

Each save writes a new subfolder with one file of blocks per shard. The manifest, `dataset.json`,
names the current subfolder and its files. It is replaced atomically after all files are written, so
readers never see a partial save.
"""

import json
import operator
import os
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from replicax._src.base.tf_errors import (
    DataLossError,
    InvalidArgumentError,
    NotFoundError,
    StructureError,
)
from replicax._src.base.types import TensorSpec
from replicax._src.data.element_blocks import Block, RowBlock, as_structure, join
from replicax._src.data.leaves import common_shape, leaf_spec
from replicax._src.data.node import Node, SourceNode, Stream, walk
from replicax._src.data.nodes.cache import FileStream, writing
from replicax._src.data.seeds import Run
from replicax._src.data.structure import Structure, flatten, from_json, to_json
from replicax._src.files import storage

Shard = Callable[[Any, int], Any]  # (element, index) -> shard number

_MANIFEST = "dataset.json"
_FORMAT = "replicax-dataset-1"
_COMPRESSIONS = (None, "", "NONE", "AUTO", "GZIP", "SNAPPY")
_ROWS = 256  # rows per block in a file


def check_compression(compression: str | None, verb: str) -> None:
    """Raise `InvalidArgumentError` unless it is one of TensorFlow's names; all are ignored."""
    if compression not in _COMPRESSIONS:
        raise InvalidArgumentError(
            f"{verb}(compression={compression!r}): give None, 'AUTO', 'GZIP' or 'SNAPPY'; elements"
            " are kept uncompressed with any of them."
        )


def is_saved(path: str) -> bool:
    """Whether a folder contains a saved dataset."""
    return storage.exists(os.path.join(path, _MANIFEST))


def save_elements(node: Node, path: str, shard: Shard | None, run: Run | None = None) -> None:
    """Produce all elements of `node` and save them.

    Args:
        node: The dataset.
        path: The folder.
        shard: Returns the number of the file for an element.
        run: The pass to save; a new one if None.
    """
    folder = secrets.token_hex(8)
    writer = _ShardWriter(os.path.join(path, folder), node)
    try:
        for number, block in _sharded(node, shard, run):
            writer.add(number, block)
        manifest = {"format": _FORMAT, "folder": folder, **writer.commit()}
    except BaseException:
        writer.abandon()
        raise
    previous = _read_manifest(path) if is_saved(path) else None
    # The commit point: all files are complete, and the manifest is replaced atomically. Only then
    # are the files of the previous save removed.
    storage.put(os.path.join(path, _MANIFEST), json.dumps(manifest).encode())
    if previous is not None:
        with suppress(OSError):
            storage.remove_tree(os.path.join(path, previous.folder))


def saved_parts(path: str, element_spec: Any) -> list["SavedNode"]:
    """Return one node per file of a saved dataset.

    Args:
        path: The folder.
        element_spec: The spec of elements; that of the manifest if None.

    Raises:
        InvalidArgumentError: The spec is not in the manifest, or contradicts it.
    """
    manifest = _read_manifest(path)
    structure, specs = manifest.structure, manifest.specs or []
    if element_spec is not None:
        structure, requested = flatten(element_spec)
        stored = requested if manifest.specs is None else manifest.specs
        _check_dtypes(path, stored, requested)
        specs = requested
    if structure is None:
        raise InvalidArgumentError(
            f"The structure of the elements saved in {path!r} is unknown: there are none, or they"
            " are of a class of your own. Pass element_spec, nested like an element:"
            " `Dataset.load(path, element_spec=dataset.element_spec)`."
        )
    spec = structure.unflatten(specs)
    folder = os.path.join(path, manifest.folder)
    return [SavedNode(os.path.join(folder, name), count, spec) for name, count in manifest.files]


@final
@dataclass(frozen=True, eq=False)
class SavedNode(SourceNode):
    """A source of the elements in one file of a saved dataset."""

    path: str
    count: int
    spec: Any

    @property
    def element_spec(self) -> Any:
        """The most specific spec that all elements match."""
        return self.spec

    @property
    def cardinality(self) -> int:
        """The number of elements in the file."""
        return self.count

    def open(self, run: Run) -> Stream:
        """Start a pass."""
        if not storage.exists(self.path):
            raise NotFoundError(
                f"There is no file {self.path!r} any more, although its folder lists it: the"
                " dataset was saved again, or the file was deleted. Call `Dataset.load` again."
            )
        return FileStream(self.path, self)


class _ShardWriter:
    """The files of a save in progress."""

    def __init__(self, folder: str, node: Node) -> None:
        storage.make_folders(folder)
        self._folder = folder
        self._files: dict[int, writing] = {}
        self._counts: dict[int, int] = {}
        self._buffered: dict[int, list[Block]] = {}
        self._structure: Structure | None = None
        self._specs: list[Any] | None = None
        if node.is_spec_known:
            self._structure = flatten(node.element_spec)[0]

    def add(self, number: int, block: Block) -> None:
        """Append a block to the file of a shard."""
        if self._structure is None:
            self._structure = block.structure
        block = as_structure(block, self._structure)
        if number not in self._files:
            self._files[number] = writing(os.path.join(self._folder, f"{number:08d}"))
            self._counts[number], self._buffered[number] = 0, []
        self._specs = _merged_specs(self._specs, block)
        self._counts[number] += len(block)
        self._buffered[number].append(block)
        if sum(map(len, self._buffered[number])) >= _ROWS:
            self._write(number)

    def commit(self) -> dict[str, Any]:
        """Complete all files; return their entries for the manifest."""
        if not self._files:
            self._files[0] = writing(os.path.join(self._folder, f"{0:08d}"))
            self._counts[0], self._buffered[0] = 0, []
        for number, file in self._files.items():
            self._write(number)
            file.commit()
        specs = self._specs
        return {
            "files": [[f"{number:08d}", self._counts[number]] for number in sorted(self._files)],
            "structure": None if specs is None else to_json(_required(self._structure)),
            "specs": specs and [[s.shape, s.dtype.name] for s in specs],
        }

    def abandon(self) -> None:
        """Delete all files of this save."""
        for file in self._files.values():
            file.abandon()
        with suppress(OSError):
            storage.remove_tree(self._folder)

    def _write(self, number: int) -> None:
        blocks, self._buffered[number] = self._buffered[number], []
        if blocks:
            self._files[number].add(join(blocks))


def _sharded(node: Node, shard: Shard | None, run: Run | None) -> Iterator[tuple[int, Block]]:
    """Yield blocks with the number of the file that each belongs to."""
    if run is None:
        parts = [part.random for part in walk(node) if part.random is not None]
        run = Run({seeds: seeds.begin() for seeds in parts})
    stream, index = node.open(run), 0
    step = 1 if node.calls_user_code else _ROWS
    try:
        while (block := stream.pull(step)) is not None:
            if shard is None:
                yield 0, block
                continue
            for place, element in enumerate(block.elements()):
                yield _shard_number(shard(element, index)), block.slice(place, place + 1)
                index += 1
    finally:
        stream.close()


def _shard_number(value: Any) -> int:
    """Return the result of a user's shard function as an int; raise if it is none."""
    try:
        number = operator.index(value[()] if isinstance(value, np.ndarray) else value)
    except TypeError:
        number = -1
    if number < 0:
        raise InvalidArgumentError(
            f"The shard_func must return the number of a file, an int from 0 on;"
            f" got {value!r:.100}."
        )
    return number


def _merged_specs(specs: list[Any] | None, block: Block) -> list[Any]:
    """Return the leaf specs that match both `specs`, of earlier blocks, and this block."""
    rows = block.rows() if isinstance(block, RowBlock) else block.slice(0, 1).rows()
    for row in rows:
        found: list[Any] = [leaf_spec(leaf) for leaf in row]
        if specs is None:
            specs = found
        if not all(isinstance(spec, TensorSpec) for spec in found):
            raise InvalidArgumentError(
                "save() keeps arrays, numbers and strings, but an element has a nested dataset."
                " Turn each into arrays first: `flat_map(lambda window: window.batch(n))`."
            )
        if any(a.dtype != b.dtype for a, b in zip(specs, found, strict=True)):
            raise StructureError(
                f"save() needs elements of the same dtypes, got {specs} and then {found}."
            )
        pairs = zip(specs, found, strict=True)
        specs = [TensorSpec(common_shape(a.shape, b.shape), a.dtype) for a, b in pairs]
    assert specs is not None
    return specs


def _check_dtypes(path: str, stored: list[Any], requested: list[Any]) -> None:
    pairs = list(zip(stored, requested, strict=False))
    if len(stored) != len(requested) or any(a.dtype != b.dtype for a, b in pairs):
        raise InvalidArgumentError(
            f"load(element_spec=...) does not match the dataset saved in {path!r}: its parts have"
            f" the dtypes {[str(spec.dtype) for spec in stored]}, the parts of the spec"
            f" {[str(spec.dtype) for spec in requested]}. Leave it out to use the saved spec."
        )


@dataclass(frozen=True)
class _Manifest:
    """The manifest of a saved dataset."""

    folder: str
    files: list[tuple[str, int]]
    structure: Structure | None
    specs: list[Any] | None

    @classmethod
    def of(cls, content: Any) -> "_Manifest":
        """Parse the decoded JSON of a manifest.

        Raises:
            ValueError: If it is malformed, or a name could refer to a file outside of the folder.
        """
        try:
            if content["format"] != _FORMAT or not re.fullmatch("[0-9a-f]{16}", content["folder"]):
                raise ValueError("it is not a list of saved elements")
            files = [(name, int(count)) for name, count in content["files"]]
            if not all(re.fullmatch("[0-9]{8}", name) and count >= 0 for name, count in files):
                raise ValueError("its files have wrong names")
            structure, specs = from_json(content["structure"]), content["specs"]
            if specs is not None:
                specs = [TensorSpec(shape, _dtype(dtype)) for shape, dtype in specs]
                if structure is not None and structure.num_leaves != len(specs):
                    raise ValueError("its specs do not fit its structure")
            return cls(content["folder"], files, structure, specs)
        except (KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error


def _read_manifest(path: str) -> _Manifest:
    file = os.path.join(path, _MANIFEST)
    is_ours = storage.exists(file)
    if not is_ours and storage.exists(os.path.join(path, "dataset_spec.pb")):
        raise DataLossError(
            f"{path!r} was saved by TensorFlow, in a format of its own. Read it there, write the"
            " elements with `tf.io.TFRecordWriter`, and use `rx.data.TFRecordDataset`."
        )
    try:
        return _Manifest.of(json.loads(storage.read_bytes(file)))
    except FileNotFoundError:
        raise NotFoundError(
            f"There is no saved dataset in {path!r}: it has no file {_MANIFEST!r}."
            " `dataset.save(path)` writes one."
        ) from None
    except (ValueError, RecursionError) as error:
        raise DataLossError(f"{file!r} is damaged ({error}). Save the dataset again.") from None


def _dtype(name: str) -> Any:
    return np.dtype(object if name == "object" else name)


def _required(structure: Structure | None) -> Structure:
    assert structure is not None
    return structure
