"""Part of `Dataset`: elements that are kept, in memory and on disk."""

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from replicax._basics import T_co
from replicax.data._errors import InvalidArgumentError
from replicax.data._functions import ElementFunction
from replicax.data._known import fingerprint_of
from replicax.data._node import INFINITE_CARDINALITY, Root
from replicax.data._nodes._cache import CacheNode
from replicax.data._nodes._promised import PromisedNode
from replicax.data._nodes._snapshot import SnapshotNode, files_of
from replicax.data._paths import user_path
from replicax.data._saved import check_compression, save_elements, saved_parts
from replicax.data._seeds import Seeds

if TYPE_CHECKING:
    from replicax.data._dataset import Dataset


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


class Kept(Root[T_co]):
    """Transformations and sources that keep elements."""

    def cache(
        self, filename: str | os.PathLike[str] = "", name: str | None = None
    ) -> "Dataset[T_co]":
        """Elements kept after the first complete pass.

        A `shuffle` before the cache is kept with it: put it after, for a new order in each pass.

        Args:
            filename: A file to keep them in, for later processes too; in memory if empty. Workers
                that a strategy gives different files to read add their number to the name.
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
        """Make all elements now and keep them in a folder, for `Dataset.load`.

        Args:
            path: The folder; what `save` left there before is replaced when all is written.
            compression: Accepted, without effect.
            shard_func: Takes an element, returns the number of the file that it goes to.
            checkpoint_args: Accepted, without effect: a dict with the arguments of TensorFlow's
                checkpoint manager. Elements appear under their path when all are written, and a
                saving that is stopped starts again.

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
        """Elements kept on disk after the first complete pass, for later processes too.

        A pipeline that was changed does not find what another one has kept: files are named by its
        `fingerprint`. So neither do functions that refer to objects which have no value of their
        own, in another process.

        Args:
            path: A folder.
            compression: Accepted, without effect.
            reader_func: Takes a dataset of one dataset for each file, returns the dataset of their
                elements; several files are read in turn if None.
            shard_func: Takes an element, returns the number of the file that it goes to. With one
                of these two functions, all elements are made and kept before the first is given.
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
        """A number that datasets share only if they give the same elements.

        Arrays and numbers count by value, functions by their code and what they refer to, seeds
        that were given too; any other object only as itself. What is random without a seed is not
        the same in every pass anyway, and counts as the same. Datasets that give the same elements
        in another way may have different numbers.

        Returns:
            The number.

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
        """The elements that `save` has kept.

        Args:
            path: The folder that was given to `save`.
            element_spec: How elements are built; needed only if they are of classes of your own.
            compression: Accepted, without effect.
            reader_func: Takes a dataset of one dataset for each file, returns the dataset of their
                elements; several files are read in turn if None.
            wait: Must be False: what was saved is there when `save` returns.

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
                "load(wait=True) is not supported: what was saved is there when `save` returns."
                " Call it then."
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
    """Read several files in turn."""
    return files.interleave(lambda file: file)


def _check_checkpoint_args(given: Any) -> None:
    if not isinstance(given, Mapping) or "directory" not in given or set(given) - _CHECKPOINT_ARGS:
        raise InvalidArgumentError(
            f"save(checkpoint_args={given!r:.100}): give a dict with a 'directory', and any of"
            f" {sorted(_CHECKPOINT_ARGS)}; or leave it out, as it has no effect."
        )
