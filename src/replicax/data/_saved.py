"""Elements in a folder: what `Dataset.save` writes and `Dataset.load` reads.

The folder has one folder for each saving, with a file of blocks for each shard, and a list of them,
`dataset.json`, which is exchanged when all of them are written.
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

from replicax._types import TensorSpec
from replicax.data import _storage
from replicax.data._blocks import Block, RowBlock, as_structure, join
from replicax.data._errors import DataLossError, InvalidArgumentError, NotFoundError, StructureError
from replicax.data._leaves import common_shape, leaf_spec
from replicax.data._node import Node, SourceNode, Stream, walk
from replicax.data._nodes._cache import FileStream, writing
from replicax.data._seeds import Run
from replicax.data._structure import Structure, flatten, from_json, to_json

Shard = Callable[[Any, int], Any]  # of an element and its number

_LIST = "dataset.json"
_FORMAT = "replicax-dataset-1"
_COMPRESSIONS = (None, "", "NONE", "AUTO", "GZIP", "SNAPPY")
_ROWS = 256  # of a block in a file


def check_compression(compression: str | None, verb: str) -> None:
    """Whether it is one of TensorFlow's; none of them changes anything."""
    if compression not in _COMPRESSIONS:
        raise InvalidArgumentError(
            f"{verb}(compression={compression!r}): give None, 'AUTO', 'GZIP' or 'SNAPPY'; elements"
            " are kept uncompressed with any of them."
        )


def is_saved(path: str) -> bool:
    """Whether a folder holds elements that were saved."""
    return _storage.exists(os.path.join(path, _LIST))


def save_elements(node: Node, path: str, shard: Shard | None, run: Run | None = None) -> None:
    """Make all elements and keep them.

    Args:
        node: The elements.
        path: The folder.
        shard: Gives the number of the file for an element.
        run: The pass to make; a new one if None.
    """
    folder = secrets.token_hex(8)
    saving = _Saving(os.path.join(path, folder), node)
    try:
        for number, block in _numbered(node, shard, run):
            saving.add(number, block)
        told = {"format": _FORMAT, "folder": folder, **saving.commit()}
    except BaseException:
        saving.abandon()
        raise
    before = _read_list(path) if is_saved(path) else None
    _storage.put(os.path.join(path, _LIST), json.dumps(told).encode())
    if before is not None:
        with suppress(OSError):
            _storage.remove_tree(os.path.join(path, before.folder))


def saved_parts(path: str, element_spec: Any) -> list["SavedNode"]:
    """One node for each file of a folder."""
    told = _read_list(path)
    structure, specs = told.structure, told.specs or []
    if element_spec is not None:
        structure, given = flatten(element_spec)
        _check_given(path, given if told.specs is None else told.specs, given)
        specs = given
    if structure is None:
        raise InvalidArgumentError(
            f"What was saved in {path!r} does not tell how its elements are built: there are none,"
            " or they are of a class of your own. Pass element_spec, nested like an element:"
            " `Dataset.load(path, element_spec=dataset.element_spec)`."
        )
    spec = structure.unflatten(specs)
    folder = os.path.join(path, told.folder)
    return [SavedNode(os.path.join(folder, name), count, spec) for name, count in told.files]


@final
@dataclass(frozen=True, eq=False)
class SavedNode(SourceNode):
    """The elements of one file."""

    path: str
    count: int
    spec: Any

    @property
    def element_spec(self) -> Any:
        """What all elements have in common."""
        return self.spec

    @property
    def cardinality(self) -> int:
        """As many as were written."""
        return self.count

    def open(self, run: Run) -> Stream:
        """Start a pass."""
        if not _storage.exists(self.path):
            raise NotFoundError(
                f"There is no file {self.path!r} any more, although its folder lists it: the"
                " dataset was saved again, or the file was deleted. Call `Dataset.load` again."
            )
        return FileStream(self.path, self)


class _Saving:
    """Files that are being written."""

    def __init__(self, folder: str, node: Node) -> None:
        _storage.make_folders(folder)
        self._folder = folder
        self._files: dict[int, writing] = {}
        self._counts: dict[int, int] = {}
        self._waiting: dict[int, list[Block]] = {}
        self._structure: Structure | None = None
        self._specs: list[Any] | None = None
        if node.is_spec_known:
            self._structure = flatten(node.element_spec)[0]

    def add(self, number: int, block: Block) -> None:
        if self._structure is None:
            self._structure = block.structure
        block = as_structure(block, self._structure)
        if number not in self._files:
            self._files[number] = writing(os.path.join(self._folder, f"{number:08d}"))
            self._counts[number], self._waiting[number] = 0, []
        self._specs = _common(self._specs, block)
        self._counts[number] += len(block)
        self._waiting[number].append(block)
        if sum(map(len, self._waiting[number])) >= _ROWS:
            self._write(number)

    def commit(self) -> dict[str, Any]:
        if not self._files:
            self._files[0] = writing(os.path.join(self._folder, f"{0:08d}"))
            self._counts[0], self._waiting[0] = 0, []
        for number, file in self._files.items():
            self._write(number)
            file.commit()
        specs = self._specs
        return {
            "files": [[f"{number:08d}", self._counts[number]] for number in sorted(self._files)],
            "structure": None if specs is None else to_json(_known(self._structure)),
            "specs": specs and [[s.shape, s.dtype.name] for s in specs],
        }

    def abandon(self) -> None:
        for file in self._files.values():
            file.abandon()
        with suppress(OSError):
            _storage.remove_tree(self._folder)

    def _write(self, number: int) -> None:
        blocks, self._waiting[number] = self._waiting[number], []
        if blocks:
            self._files[number].add(join(blocks))


def _numbered(node: Node, shard: Shard | None, run: Run | None) -> Iterator[tuple[int, Block]]:
    """Blocks, and the number of the file that each goes to."""
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
                yield _number(shard(element, index)), block.slice(place, place + 1)
                index += 1
    finally:
        stream.close()


def _number(value: Any) -> int:
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


def _common(specs: list[Any] | None, block: Block) -> list[Any]:
    """What is known of all elements so far."""
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


def _check_given(path: str, stored: list[Any], given: list[Any]) -> None:
    pairs = list(zip(stored, given, strict=False))
    if len(stored) != len(given) or any(a.dtype != b.dtype for a, b in pairs):
        raise InvalidArgumentError(
            f"load(element_spec=...) does not fit what was saved in {path!r}: it has parts of"
            f" {[str(spec.dtype) for spec in stored]}, the spec of"
            f" {[str(spec.dtype) for spec in given]}. Leave it out to have what was saved."
        )


@dataclass(frozen=True)
class _SavedList:
    """What the list of a saved dataset tells."""

    folder: str
    files: list[tuple[str, int]]
    structure: Structure | None
    specs: list[Any] | None

    @classmethod
    def of(cls, told: Any) -> "_SavedList":
        """Read it; names that could lead out of the folder are none that `save` gives.

        Raises:
            ValueError: If it is not what `save` writes.
        """
        try:
            if told["format"] != _FORMAT or not re.fullmatch("[0-9a-f]{16}", told["folder"]):
                raise ValueError("it is not a list of saved elements")
            files = [(name, int(count)) for name, count in told["files"]]
            if not all(re.fullmatch("[0-9]{8}", name) and count >= 0 for name, count in files):
                raise ValueError("its files have wrong names")
            structure, specs = from_json(told["structure"]), told["specs"]
            if specs is not None:
                specs = [TensorSpec(shape, _dtype(dtype)) for shape, dtype in specs]
                if structure is not None and structure.num_leaves != len(specs):
                    raise ValueError("its specs do not fit its structure")
            return cls(told["folder"], files, structure, specs)
        except (KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error


def _read_list(path: str) -> _SavedList:
    file = os.path.join(path, _LIST)
    is_ours = _storage.exists(file)
    if not is_ours and _storage.exists(os.path.join(path, "dataset_spec.pb")):
        raise DataLossError(
            f"{path!r} was saved by TensorFlow, in a format of its own. Read it there, write the"
            " elements with `tf.io.TFRecordWriter`, and use `rx.data.TFRecordDataset`."
        )
    try:
        return _SavedList.of(json.loads(_storage.read_bytes(file)))
    except FileNotFoundError:
        raise NotFoundError(
            f"There is no saved dataset in {path!r}: it has no file {_LIST!r}. `dataset.save(path)`"
            " writes one."
        ) from None
    except (ValueError, RecursionError) as error:
        raise DataLossError(f"{file!r} is damaged ({error}). Save the dataset again.") from None


def _dtype(name: str) -> Any:
    return np.dtype(object if name == "object" else name)


def _known(structure: Structure | None) -> Structure:
    assert structure is not None
    return structure
