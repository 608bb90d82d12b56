"""`Dataset` constructors: from arrays, generators, files, ranges and other datasets."""

import builtins
import os
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, overload

import numpy as np
from numpy.typing import DTypeLike

from replicax._src.base.ops import T_co
from replicax._src.base.tf_errors import ArgumentTypeError, InvalidArgumentError, StructureError
from replicax._src.base.types import TensorSpec, TypeSpec
from replicax._src.data.leaves import private_copy
from replicax._src.data.node import Root, node_of, to_int
from replicax._src.data.nodes.choose import (
    ChooseNode,
    RandomChoiceNode,
    RandomNode,
    WeighedChoiceNode,
)
from replicax._src.data.nodes.combine import ZipNode, require_known_alike
from replicax._src.data.nodes.shuffle import ShuffleNode
from replicax._src.data.nodes.source import GeneratorNode, RangeNode, SlicesNode, TensorsNode
from replicax._src.data.records.gfile import matching
from replicax._src.data.seeds import Seeds
from replicax._src.data.structure import flatten, parts_like
from replicax._src.files import storage
from replicax._src.files.paths import user_path

if TYPE_CHECKING:
    from replicax._src.data.dataset import Dataset

A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")


class Sources(Root[T_co]):
    """The class methods of `Dataset` that create datasets."""

    @classmethod
    def range(
        cls, *args: int, output_type: DTypeLike = np.int64, name: str | None = None
    ) -> "Dataset[np.number[Any]]":
        """Create a dataset of integers, with the arguments of Python's ``range``.

        Args:
            *args: ``stop``, or ``start, stop``, or ``start, stop, step``.
            output_type: The dtype of the numbers.
            name: Ignored; accepted for compatibility with TensorFlow.

        Returns:
            A dataset of scalars.

        Example:
            >>> [int(x) for x in rx.data.Dataset.range(2, 10, 3)]
            [2, 5, 8]
        """
        del name
        numbers = [to_int(arg, "range", "start, stop or step") for arg in args]
        if not 1 <= len(numbers) <= 3 or (len(numbers) == 3 and numbers[2] == 0):
            raise InvalidArgumentError(
                f"range{args} needs stop, or start and stop, or start, stop and a step"
                " that is not 0."
            )
        span = builtins.range(*numbers)
        return cls._wrap(RangeNode(span.start, span.stop, span.step, np.dtype(output_type)))

    @classmethod
    def from_tensors(cls, tensors: A, name: str | None = None) -> "Dataset[A]":
        """Create a dataset of one element.

        Args:
            tensors: The element: an array, or arrays in tuples and dicts.
            name: Ignored.

        Returns:
            A dataset of that one element.

        Example:
            >>> list(rx.data.Dataset.from_tensors([1, 2]))
            [array([1, 2], dtype=int32)]
        """
        del name
        return cls._wrap(TensorsNode.of(tensors))

    @classmethod
    def from_tensor_slices(cls, tensors: A, name: str | None = None) -> "Dataset[A]":
        """Create a dataset of the slices of arrays along their first axis.

        Writable arrays are copied, so later writes to them do not change the dataset. Read-only
        arrays are not copied: open a large file with ``np.load(path, mmap_mode="r")``, or call
        ``array.setflags(write=False)`` on an array that you will not modify.

        Args:
            tensors: Arrays with the same first axis, in tuples and dicts.
            name: Ignored.

        Returns:
            A dataset with one element for each index of the first axis.

        Example:
            >>> images, labels = np.zeros((3, 28, 28)), np.arange(3)
            >>> dataset = rx.data.Dataset.from_tensor_slices((images, labels))
            >>> [int(label) for image, label in dataset]
            [0, 1, 2]
        """
        del name
        return cls._wrap(SlicesNode.of(tensors))

    @classmethod
    def from_generator(  # noqa: PLR0913
        cls,
        generator: Callable[..., Iterable[Any]],
        output_types: Any = None,
        output_shapes: Any = None,
        args: Sequence[Any] | None = None,
        output_signature: Any = None,
        name: str | None = None,
    ) -> "Dataset[Any]":
        """Create a dataset from a function that returns an iterable.

        Args:
            generator: A function, called once for each pass; not a generator object, which could
                be used only once.
            output_types: Dtypes, in the structure of elements; superseded by
                ``output_signature``.
            output_shapes: Shapes for ``output_types``.
            args: Arguments for ``generator``; arrays are copied.
            output_signature: Specs, in the structure of elements. If None, the first access to
                ``element_spec`` infers them from the first element.
            name: Ignored.

        Returns:
            A dataset of the elements that the iterable yields. A restored iterator replays it from
            the start.

        Example:
            >>> def squares():
            ...     for x in range(3):
            ...         yield x * x
            >>> [int(x) for x in rx.data.Dataset.from_generator(squares)]
            [0, 1, 4]
        """
        del name
        if not callable(generator):
            raise StructureError(
                f"from_generator() needs a function that makes a new iterable for each pass, got"
                f" {type(generator).__name__}, which could be used only once. Write"
                " `from_generator(lambda: make_items())`."
            )
        signature = _declared(output_types, output_shapes, output_signature)
        arguments = tuple(private_copy(argument) for argument in args or ())
        return cls._wrap(GeneratorNode(generator, arguments, signature))

    @overload
    @classmethod
    def zip(cls, a: "Dataset[A]", b: "Dataset[B]", /) -> "Dataset[tuple[A, B]]": ...

    @overload
    @classmethod
    def zip(
        cls, a: "Dataset[A]", b: "Dataset[B]", c: "Dataset[C]", /
    ) -> "Dataset[tuple[A, B, C]]": ...

    @overload
    @classmethod
    def zip(cls, pair: "tuple[Dataset[A], Dataset[B]]", /) -> "Dataset[tuple[A, B]]": ...

    @overload
    @classmethod
    def zip(cls, *args: Any, datasets: Any = None, name: str | None = None) -> "Dataset[Any]": ...

    @classmethod
    def zip(cls, *args: Any, datasets: Any = None, name: str | None = None) -> "Dataset[Any]":
        """Combine the elements of several datasets, until the shortest one ends.

        Args:
            *args: Datasets, or one nested structure of them.
            datasets: The structure, as a keyword; superseded by ``*args``.
            name: Ignored.

        Returns:
            A dataset of elements in the structure of the arguments.

        Example:
            >>> a, b = rx.data.Dataset.range(3), rx.data.Dataset.range(10, 20)
            >>> [(int(x), int(y)) for x, y in rx.data.Dataset.zip(a, b)]
            [(0, 10), (1, 11), (2, 12)]
        """
        del name
        nested = datasets if datasets is not None else (args[0] if len(args) == 1 else args)
        if isinstance(nested, list):
            raise StructureError(
                "zip() needs datasets in a tuple or dict, got a list. Write `zip(a, b)`."
            )
        nesting, leaves = flatten(nested)
        if not leaves:
            raise StructureError("zip() needs at least one dataset. Write `zip(a, b)`.")
        return cls._wrap(ZipNode(tuple(node_of(leaf, "zip") for leaf in leaves), nesting))

    @classmethod
    def list_files(
        cls,
        file_pattern: str | os.PathLike[str] | Sequence[str],
        shuffle: bool | None = None,  # noqa: FBT001
        seed: int | None = None,
        name: str | None = None,
    ) -> "Dataset[bytes]":
        """Create a dataset of the names of files that match a pattern.

        Args:
            file_pattern: A pattern such as ``"data/*.tfrecord"``, or several. Wildcards match a
                leading dot too.
            shuffle: False for sorted names; otherwise they are shuffled in each pass.
            seed: The seed of the shuffle.
            name: Ignored.

        Returns:
            A dataset of names, as bytes.

        Example:
            >>> rx.data.Dataset.list_files("/no/such/*.tfrecord")  # doctest: +ELLIPSIS
            Traceback (most recent call last):
            ...
            replicax.errors.InvalidArgumentError: No files match ...
        """
        del name
        is_single = isinstance(file_pattern, (str, bytes, os.PathLike))
        raw_patterns: list[Any] = [file_pattern] if is_single else list(file_pattern)  # type: ignore[arg-type]
        patterns = [user_path(pattern) for pattern in raw_patterns]
        names = sorted(path for pattern in patterns for path in matching(pattern))
        if not names:
            raise InvalidArgumentError(
                f"No files match {patterns}{storage.here(''.join(patterns[:1]))}."
            )
        node = SlicesNode.of(names)
        if shuffle is False:
            return cls._wrap(node)
        return cls._wrap(ShuffleNode(node, len(names), Seeds(seed)))

    @classmethod
    def choose_from_datasets(
        cls,
        datasets: Sequence["Dataset[A]"],
        choice_dataset: "Dataset[Any]",
        stop_on_empty_dataset: bool = True,  # noqa: FBT001, FBT002
    ) -> "Dataset[A]":
        """Take each next element from the dataset that a dataset of indices selects.

        Args:
            datasets: Datasets whose elements have the same structure and dtypes.
            choice_dataset: A dataset of int64 indices into ``datasets``.
            stop_on_empty_dataset: Whether to stop when a selected dataset is exhausted; otherwise
                its index is ignored from then on.

        Returns:
            A dataset of the chosen elements.

        Example:
            >>> a, b = rx.data.Dataset.range(3), rx.data.Dataset.range(10, 13)
            >>> choices = rx.data.Dataset.from_tensor_slices(np.array([0, 1, 1, 0]))
            >>> [int(x) for x in rx.data.Dataset.choose_from_datasets([a, b], choices)]
            [0, 10, 11, 1]
        """
        branches = [node_of(dataset, "choose_from_datasets") for dataset in datasets]
        if not branches:
            raise InvalidArgumentError("choose_from_datasets() needs at least one dataset.")
        choices = node_of(choice_dataset, "choose_from_datasets")
        if choices.is_spec_known and choices.element_spec != TensorSpec((), np.int64):
            raise StructureError(
                "choose_from_datasets() needs a choice_dataset of int64 scalars, and the elements"
                f" of this one are {choices.element_spec}. Convert them:"
                " `choice_dataset.map(lambda x: np.int64(x))`."
            )
        require_known_alike(branches, "choose_from_datasets")
        return cls._wrap(ChooseNode((choices, *branches), stop_on_empty_dataset))

    @classmethod
    def sample_from_datasets(
        cls,
        datasets: Sequence["Dataset[A]"],
        weights: "Sequence[float] | Dataset[Any] | None" = None,
        seed: int | None = None,
        stop_on_empty_dataset: bool = False,  # noqa: FBT001, FBT002
        rerandomize_each_iteration: bool | None = None,  # noqa: FBT001
    ) -> "Dataset[A]":
        """Take each next element from a dataset that is drawn at random.

        Args:
            datasets: Datasets whose elements have the same structure and dtypes.
            weights: The relative probability of each dataset; equal if None. A dataset of weight
                vectors provides the weights of each draw, and ends the result when it ends.
            seed: The seed of the draws.
            stop_on_empty_dataset: Whether to stop when a drawn dataset is exhausted.
            rerandomize_each_iteration: Whether to make new draws in each pass.

        Returns:
            A dataset of the elements of ``datasets`` in random order of the datasets.

        Example:
            >>> a, b = rx.data.Dataset.range(2), rx.data.Dataset.range(10, 12)
            >>> sorted(int(x) for x in rx.data.Dataset.sample_from_datasets([a, b], seed=1))
            [0, 1, 10, 11]
        """
        branches = [node_of(dataset, "sample_from_datasets") for dataset in datasets]
        require_known_alike(branches, "sample_from_datasets")
        seeds = Seeds(seed, reshuffle=bool(rerandomize_each_iteration))
        if isinstance(weights, Root):
            drawn = WeighedChoiceNode(weights.node, seeds, len(branches))
            return cls._wrap(ChooseNode((drawn, *branches), stop_on_empty_dataset))
        parts = [1.0] * len(branches) if weights is None else [float(w) for w in weights]
        if len(parts) != len(branches) or not branches or min(parts) < 0 or not sum(parts):
            raise InvalidArgumentError(
                f"sample_from_datasets() got {len(branches)} datasets and weights {weights!r}:"
                " give one weight for each dataset, none negative and not all zero."
            )
        # A dataset of weight zero is never drawn, so it would never be found to have ended.
        drawable = [(node, w) for node, w in builtins.zip(branches, parts, strict=True) if w > 0]
        choices = RandomChoiceNode(tuple(w for _, w in drawable), seeds)
        nodes = (choices, *(node for node, _ in drawable))
        return cls._wrap(ChooseNode(nodes, stop_on_empty_dataset))

    @classmethod
    def random(
        cls,
        seed: int | None = None,
        rerandomize_each_iteration: bool | None = None,  # noqa: FBT001
        name: str | None = None,
    ) -> "Dataset[np.int64]":
        """Create an infinite dataset of random int64 scalars from 0 to 2**32 - 1.

        Args:
            seed: The seed; drawn once if None.
            rerandomize_each_iteration: Whether to draw new numbers in each pass.
            name: Ignored.

        Returns:
            A dataset of scalars.

        Example:
            >>> dataset = rx.data.Dataset.random(seed=4).take(3)
            >>> list(dataset) == list(dataset)
            True
        """
        del name
        return cls._wrap(RandomNode(Seeds(seed, reshuffle=bool(rerandomize_each_iteration))))

    @classmethod
    def counter(
        cls, start: int = 0, step: int = 1, dtype: DTypeLike = np.int64, name: str | None = None
    ) -> "Dataset[np.number[Any]]":
        """Create an infinite dataset of numbers that count up or down.

        Args:
            start: The first number.
            step: The difference between consecutive numbers.
            dtype: The dtype of the numbers.
            name: Ignored.

        Returns:
            A dataset of scalars.

        Example:
            >>> [int(x) for x in rx.data.Dataset.counter(5, 2).take(3)]
            [5, 7, 9]
        """
        del name
        first, by = to_int(start, "counter", "start"), to_int(step, "counter", "step")
        stop = (1 << 62) if by > 0 else -(1 << 62)
        return cls._wrap(RangeNode(first, stop, by, np.dtype(dtype), is_endless=True))


def _declared(types: Any, shapes: Any, signature: Any) -> Any:
    """Return the signature that was declared for a generator, or None."""
    if types is None and shapes is None:
        wrong = [leaf for leaf in flatten(signature)[1] if not isinstance(leaf, TypeSpec)]
        if wrong:
            raise ArgumentTypeError(
                f"from_generator(output_signature=...) has {wrong[0]!r:.60} where a spec belongs."
                " Give one for each part of an element, such as rx.TensorSpec([None], np.int64)."
            )
        return signature
    if signature is not None or types is None:
        raise ArgumentTypeError(
            "from_generator() takes either output_signature, or output_types with output_shapes."
            " Write `output_signature=rx.TensorSpec(shape, dtype)` alone."
        )
    return _signature(types, shapes)


def _signature(types: Any, shapes: Any) -> Any:
    """Return the specs of `output_types` and `output_shapes`."""
    structure, dtypes = flatten(types)
    if shapes is None:
        return structure.unflatten([TensorSpec(None, dtype) for dtype in dtypes])
    try:
        parts = parts_like(structure, shapes)
    except StructureError as error:
        raise StructureError(
            f"from_generator() got output_shapes={shapes!r} for output_types={types!r}, which are"
            f" not nested alike: {error}. Give one shape for each type."
        ) from None
    specs = [TensorSpec(s, d) for s, d in builtins.zip(parts, dtypes, strict=True)]
    return structure.unflatten(specs)
