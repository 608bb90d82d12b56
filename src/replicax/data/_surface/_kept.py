"""Part of `Dataset`: elements that are kept, in memory and on disk."""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from replicax._basics import T_co
from replicax.data._blocks import RowBlock
from replicax.data._errors import InvalidArgumentError
from replicax.data._functions import ElementFunction
from replicax.data._known import fingerprint_of
from replicax.data._leaves import DatasetSpec
from replicax.data._node import Root
from replicax.data._nodes._cache import CacheNode
from replicax.data._nodes._promised import PromisedNode
from replicax.data._nodes._window import BlockNode
from replicax.data._paths import local_path
from replicax.data._saved import check_compression, save_elements, saved_parts
from replicax.data._structure import LEAF

if TYPE_CHECKING:
    from replicax.data._dataset import Dataset


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
        return self._wrap(CacheNode(self.node, local_path(filename)))

    def save(
        self,
        path: str | os.PathLike[str],
        compression: str | None = None,
        shard_func: Callable[..., Any] | None = None,
        checkpoint_args: Any = None,
    ) -> None:
        """Make all elements now and keep them in a folder, for `Dataset.load`.

        Args:
            path: The folder; what `save` left there before is replaced when all is written.
            compression: Accepted, without effect.
            shard_func: Takes an element, returns the number of the file that it goes to.
            checkpoint_args: Must be None: a saving that is stopped starts again.

        Example:
            >>> import os, tempfile
            >>> path = os.path.join(tempfile.mkdtemp(), "saved")
            >>> rx.data.Dataset.range(3).save(path)
            >>> [int(x) for x in rx.data.Dataset.load(path)]
            [0, 1, 2]
        """
        check_compression(compression, "save")
        if checkpoint_args is not None:
            raise InvalidArgumentError(
                "save(checkpoint_args=...) is not supported: the elements appear under their path"
                " when all are written. Leave it out."
            )
        shard = None if shard_func is None else ElementFunction(shard_func, "save").call
        save_elements(self.node, local_path(path), shard)

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
            reader_func: Must be None; `save` and `load` take one.
            shard_func: Must be None; `save` takes one.
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
        """
        del name
        check_compression(compression, "snapshot")
        if reader_func is not None or shard_func is not None:
            raise InvalidArgumentError(
                "snapshot() keeps elements in one file and in their order, so that it takes neither"
                " reader_func nor shard_func. Write `dataset.save(path, shard_func=...)` and"
                " `Dataset.load(path, reader_func=...)`."
            )
        file = os.path.join(local_path(path), f"{int(fingerprint_of(self.node)):016x}")
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
        parts = saved_parts(local_path(path), element_spec)
        if len(parts) == 1 and reader_func is None:
            return cls._wrap(parts[0])
        spec = DatasetSpec(parts[0].element_spec)
        files = cls._wrap(BlockNode(RowBlock(LEAF, [(cls._wrap(part),) for part in parts]), spec))
        if reader_func is not None:
            return reader_func(files)
        whole = files.interleave(lambda file: file)
        return cls._wrap(PromisedNode(whole.node, sum(part.cardinality for part in parts)))
