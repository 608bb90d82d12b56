"""`Dataset` methods that store elements in memory or on disk: cache, save, load, snapshot."""

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from replicax._src.base.ops import T_co
from replicax._src.base.tf_errors import InvalidArgumentError
from replicax._src.data.graph_facts import fingerprint_of
from replicax._src.data.node import INFINITE_CARDINALITY, Root
from replicax._src.data.nodes.assert_cardinality import PromisedNode
from replicax._src.data.nodes.cache import CacheNode
from replicax._src.data.nodes.snapshot import SnapshotNode, files_of
from replicax._src.data.save_load import check_compression, save_elements, saved_parts
from replicax._src.data.seeds import Seeds
from replicax._src.data.user_functions import ElementFunction
from replicax._src.files.paths import user_path

if TYPE_CHECKING:
    from replicax._src.data.dataset import Dataset


_CHECKPOINT_ARGS = {
    "checkpoint",
    "checkpoint_interval",
    "checkpoint_name",
    "directory",
    "init_fn",
    "keep_checkpoint_every_n_hours",
    "max_to_keep",
    "step_counter",
}


class Caching(Root[T_co]):
    """The methods of `Dataset` that store elements or read stored ones."""

    def cache(
        self, filename: str | os.PathLike[str] = "", name: str | None = None
    ) -> "Dataset[T_co]":
        """Store the elements of the first complete pass, and read them in later passes.

        The order of a `shuffle` before the cache is stored too: shuffle after the cache for a new
        order in each pass.

        Args:
            filename: The file to store elements in, which later processes reuse; in memory if
                empty. Workers that a strategy assigns different files to add their index to it.
            name: Ignored.

        Returns:
            A dataset of the same elements.

        Example:
            >>> calls = []
            >>> dataset = rx.data.Dataset.range(3).map(calls.append).cache()
            >>> _ = list(dataset), list(dataset)
            >>> len(calls)
            3
        """
        del name
        return self._wrap(CacheNode(self.node, user_path(filename)))

    def save(
        self,
        path: str | os.PathLike[str],
        compression: str | None = None,
        shard_func: Callable[..., Any] | None = None,
        checkpoint_args: Mapping[str, Any] | None = None,
    ) -> None:
        """Write all elements to a folder that `Dataset.load` reads.

        Args:
            path: The folder. A dataset saved there before is replaced when all elements are
                written.
            compression: Accepted, without effect.
            shard_func: Takes an element, returns the number of the file to write it to.
            checkpoint_args: Accepted, without effect: a dict with the arguments of TensorFlow's
                checkpoint manager. An interrupted save leaves no partial dataset, and starts over.

        Example:
            >>> import os, tempfile
            >>> path = os.path.join(tempfile.mkdtemp(), "saved")
            >>> rx.data.Dataset.range(3).save(path)
            >>> [int(x) for x in rx.data.Dataset.load(path)]
            [0, 1, 2]
        """
        check_compression(compression, "save")
        if checkpoint_args is not None:
            _check_checkpoint_args(checkpoint_args)
        shard = None if shard_func is None else ElementFunction(shard_func, "save").call
        save_elements(self.node, user_path(path), shard)

    def snapshot(
        self,
        path: str | os.PathLike[str],
        compression: str | None = "AUTO",
        reader_func: Callable[..., Any] | None = None,
        shard_func: Callable[..., Any] | None = None,
        name: str | None = None,
    ) -> "Dataset[T_co]":
        """Store the elements of the first complete pass on disk, for later processes too.

        Files are named by the `fingerprint` of the pipeline, so a changed pipeline writes new ones.
        So does a new process if a function refers to objects that `fingerprint` cannot compare by
        value.

        Args:
            path: A folder.
            compression: Accepted, without effect.
            reader_func: Takes a dataset with one dataset for each file, returns the dataset of
                their elements; if None, several files are interleaved.
            shard_func: Takes an element, returns the number of the file to write it to. With either
                function, all elements are written before the first is returned.
            name: Ignored.

        Returns:
            A dataset of the same elements.

        Example:
            >>> import tempfile
            >>> path, calls = tempfile.mkdtemp(), []
            >>> dataset = rx.data.Dataset.range(3).map(lambda x: calls.append(1) or x)
            >>> dataset = dataset.snapshot(path)
            >>> len(list(dataset)), len(list(dataset)), len(calls)
            (3, 3, 3)
            >>> one_by_one = lambda files: files.flat_map(lambda file: file)
            >>> dataset = rx.data.Dataset.range(4)
            >>> dataset = dataset.snapshot(path, None, one_by_one, lambda x: x % 2)
            >>> [int(x) for x in dataset]
            [0, 2, 1, 3]
        """
        del name
        check_compression(compression, "snapshot")
        if reader_func is not None or shard_func is not None:
            if self.node.cardinality == INFINITE_CARDINALITY:
                raise InvalidArgumentError(
                    "snapshot() with a reader_func or a shard_func keeps all elements before it"
                    " gives the first, and this dataset has no end. Write `take(n)` before it, and"
                    " `repeat()` after it."
                )
            shard = None if shard_func is None else ElementFunction(shard_func, "snapshot")
            reader = ElementFunction(reader_func or _in_turn, "snapshot")
            key, seeds = int(fingerprint_of(self.node)), Seeds(None)
            return self._wrap(
                SnapshotNode(self.node, user_path(path), shard, reader, seeds, self._wrap, key)
            )
        file = os.path.join(user_path(path), f"{int(fingerprint_of(self.node)):016x}")
        return self._wrap(CacheNode(self.node, file))

    def fingerprint(self) -> np.uint64:
        """Return a hash that two datasets share only if they have the same elements.

        Arrays, numbers and explicit seeds are compared by value, functions and classes by their
        code and the objects they refer to, also through modules, installed libraries by their
        version, and any other object by identity. Transformations that are random
        without a seed compare as equal. Datasets that compute the same elements in different ways
        may have different hashes.

        Returns:
            The hash.

        Example:
            >>> a, b = rx.data.Dataset.range(3).batch(2), rx.data.Dataset.range(3).batch(2)
            >>> int(a.fingerprint()) == int(b.fingerprint())
            True
        """
        return fingerprint_of(self.node)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        element_spec: Any = None,
        compression: str | None = None,
        reader_func: Callable[["Dataset[Any]"], "Dataset[Any]"] | None = None,
        wait: bool = False,  # noqa: FBT001, FBT002
    ) -> "Dataset[Any]":
        """Read the elements that `save` has written.

        Args:
            path: The folder that was passed to `save`.
            element_spec: The spec of elements; needed only if their structure has custom classes.
            compression: Accepted, without effect.
            reader_func: Takes a dataset with one dataset for each file, returns the dataset of
                their elements; if None, several files are interleaved.
            wait: Must be False: the dataset is complete when `save` returns.

        Returns:
            A dataset of the elements.

        Example:
            >>> import os, tempfile
            >>> path = os.path.join(tempfile.mkdtemp(), "saved")
            >>> rx.data.Dataset.range(4).save(path, shard_func=lambda x: x % 2)
            >>> [int(x) for x in rx.data.Dataset.load(path)]
            [0, 1, 2, 3]
            >>> one_by_one = lambda files: files.flat_map(lambda file: file)
            >>> [int(x) for x in rx.data.Dataset.load(path, reader_func=one_by_one)]
            [0, 2, 1, 3]
        """
        check_compression(compression, "load")
        if wait:
            raise InvalidArgumentError(
                "load(wait=True) is not supported: the dataset is complete when `save` returns."
                " Call `load` after that."
            )
        parts = saved_parts(user_path(path), element_spec)
        if len(parts) == 1 and reader_func is None:
            return cls._wrap(parts[0])
        files = cls._wrap(files_of(parts, cls._wrap))
        if reader_func is not None:
            return reader_func(files)
        whole = _in_turn(files)
        return cls._wrap(PromisedNode(whole.node, sum(part.cardinality for part in parts)))


def _in_turn(files: "Dataset[Any]") -> "Dataset[Any]":
    """Interleave the datasets of several files."""
    return files.interleave(lambda file: file)


def _check_checkpoint_args(args: Any) -> None:
    if not isinstance(args, Mapping) or "directory" not in args or set(args) - _CHECKPOINT_ARGS:
        raise InvalidArgumentError(
            f"save(checkpoint_args={args!r:.100}): give a dict with a 'directory', and any of"
            f" {sorted(_CHECKPOINT_ARGS)}; or leave it out, as it has no effect."
        )
