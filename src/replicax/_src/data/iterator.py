"""`DatasetIterator`: one pass over a dataset, with a position that can be saved and restored."""

import sys
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Iterator as AnyIterator
from itertools import zip_longest
from operator import length_hint
from typing import Any, Generic, TypeVar, overload

import numpy.typing as npt

from replicax._src.base.ops import NamedFields, Numbers, T_co
from replicax._src.base.tf_errors import EndOfSequenceError, InvalidArgumentError
from replicax._src.compat.jax import at_rest, traced
from replicax._src.data.element_blocks import NewArray
from replicax._src.data.node import Node, Stream, discard_elements, walk
from replicax._src.data.nodes.batch import ends_in_batches
from replicax._src.data.optional import (
    Ahead,
    Failed,
    as_state,
    begin_loop,
    counted,
    is_driven,
    take_in_function,
)
from replicax._src.data.seeds import Origin, Run, Seeds

_ROWS_AHEAD = 256
_STATE_VERSION = 3
_PATIENCE = 1.0  # seconds for which `close` waits for a thread that is producing an element
_FROM = " < "

K = TypeVar("K")
# Leaves on the host are NumPy arrays, or NumPy scalars for rank 0. The union with Any lets type
# checkers complete the members of arrays and still accept operations that only scalars support.
OnHost = npt.NDArray[Any] | Any


class DatasetIterator(Ahead, Generic[T_co]):
    """An iterator over the elements of a dataset, returned by ``iter(dataset)``.

    If producing an element fails, `next` raises, and the following call continues with the next
    element, as in TensorFlow. Prefetching threads end with the iterator: at the end of the dataset,
    on `close`, or when the iterator is garbage collected.

    Example:
        >>> iterator = iter(rx.data.Dataset.range(3))
        >>> int(next(iterator))
        0
    """

    def __init__(self, node: Node, new: NewArray | None = None) -> None:
        Ahead.__init__(self)
        self._node = node
        self._new = new if ends_in_batches(node) else None
        self._seeds = _seeds_of(node)
        self._origins = [seeds.begin() for seeds in self._seeds]
        self._limit = 1 if node.calls_user_code else _ROWS_AHEAD
        self._stream: Stream | None = None
        # Elements already produced. A list iterator, because its `next` is atomic between threads.
        self._ready: AnyIterator[Any] = iter(())
        self._num_ready = 0  # elements of `_ready` that `_position` does not count yet
        self._is_done = False

    def __iter__(self) -> "DatasetIterator[T_co]":
        begin_loop()
        return self

    @overload
    def __next__(self: "DatasetIterator[NamedFields]") -> Any: ...

    @overload
    def __next__(self: "DatasetIterator[Numbers]") -> OnHost: ...

    @overload
    def __next__(self: "DatasetIterator[tuple[Numbers, Numbers]]") -> tuple[OnHost, OnHost]: ...

    @overload
    def __next__(
        self: "DatasetIterator[tuple[Numbers, Numbers, Numbers]]",
    ) -> tuple[OnHost, OnHost, OnHost]: ...

    @overload
    def __next__(self: "DatasetIterator[Mapping[K, Numbers]]") -> dict[K, OnHost]: ...

    @overload
    def __next__(self: "DatasetIterator[Any]") -> Any: ...

    def __next__(self) -> Any:
        if traced.value is not at_rest or is_driven():
            return take_in_function(self)
        if not self._peeked:
            for element in self._ready:  # the fast path, without a call or a lock
                return element
        return self.take()

    @property
    def origin(self) -> Node:
        """The last node of the pipeline."""
        return self._node

    def take(self) -> Any:
        """Return the next element; for code that is not traced."""
        with self.lock:
            if self._peeked:
                return Ahead.take(self)
            element = self._fetch()
            if type(element) is Failed:
                self._errors += 1
                element.raise_stored()
            self._position += 1
            return element

    def _fetch(self) -> Any:
        for element in self._ready:
            self._num_ready -= 1
            return element
        if self._stream is None or self._is_done:
            self._begin()
            assert self._stream is not None
        try:
            block = self._stream.pull(self._limit)
            elements = None if block is None else block.elements()
        except Exception as error:
            return Failed(error)
        except BaseException:
            # An interrupt may have left the stream in any state: the next call opens a new one.
            self._stop()
            raise
        if elements is None or self._is_done:  # another thread may have closed the iterator
            self._is_done = True
            self._begin()
        assert elements is not None
        if self._limit == 1:
            return elements[0]
        self._position += self._num_ready  # all of them were taken through the fast path
        self._num_ready = len(elements) - 1
        ready = iter(elements)
        element = next(ready)
        self._ready = ready
        return element

    def _count_taken(self) -> None:
        """Add to the position the elements of `_ready` that were taken without the lock."""
        taken = self._num_ready - length_hint(self._ready)
        self._num_ready -= taken
        self._position += taken

    @property
    def element_spec(self) -> Any:
        """The spec of the elements.

        Example:
            >>> iter(rx.data.Dataset.range(3)).element_spec
            TensorSpec(shape=(), dtype=dtype('int64'), name=None)
        """
        return self._node.element_spec

    def save_state(self) -> dict[str, Any]:
        """Return the position of this iterator as a small JSON-serializable dict.

        It contains the number of elements produced so far and all seeds, including randomly drawn
        ones. Restoring is exact, also with `shuffle` and `repeat`. It reads files up to the
        position and generators from their start, and calls no `map` function for skipped elements.

        Returns:
            The state, for `restore_state` of an iterator over the same pipeline.

        Example:
            >>> dataset = rx.data.Dataset.range(10).shuffle(10).repeat(2)
            >>> iterator = iter(dataset)
            >>> _ = [next(iterator) for _ in range(7)]
            >>> state = iterator.save_state()
            >>> rest = list(iterator)
            >>> again = iter(dataset)
            >>> again.restore_state(state)
            >>> list(again) == rest
            True
        """
        graph = _describe(self._node)
        with self.lock:
            self._count_taken()
            return {
                "version": _STATE_VERSION,
                "position": self._position,
                "errors": self._errors,
                "seeds": [list(origin) for origin in self._origins],
                "graph": graph,
            }

    def restore_state(self, state: dict[str, Any]) -> None:
        """Restore a position that `save_state` returned.

        Later passes over the dataset are shuffled as they would have been in the saved program.
        The pipeline must have the same transformations, with the same batch, window and interleave
        sizes; functions and the contents of files are not compared.

        Args:
            state: The dict that `save_state` returned, in this or another process.

        Raises:
            InvalidArgumentError: The state is invalid or belongs to another pipeline.

        Example:
            >>> iterator = iter(rx.data.Dataset.range(10))
            >>> iterator.restore_state({**iterator.save_state(), "position": 8})
            >>> [int(x) for x in iterator]
            [8, 9]
        """
        graph = _describe(self._node)
        saved = as_state(state)
        if saved.get("version") != _STATE_VERSION:
            raise InvalidArgumentError(
                f"This state is of version {saved.get('version')!r:.20}, and this replicax reads"
                f" version {_STATE_VERSION}. Begin a new pass with `iter(dataset)`."
            )
        if saved.get("graph") != graph:
            saved_node, node = _difference(str(saved.get("graph")), graph)
            raise InvalidArgumentError(
                f"This state was saved by another pipeline, which had {saved_node:.200} where this"
                f" one has {node}: its position does not apply here. Build the dataset as it was"
                " when the state was saved, or begin a new pass with `iter(dataset)`."
            )
        position, errors = counted(state, "position", "errors")
        origins = _origins(state.get("seeds"), len(self._seeds))
        with self.lock:
            self.close()
            self._is_done = False
            for seeds, *change in zip(self._seeds, origins, self._origins, strict=True):
                seeds.resume(*change)
            self._position, self._errors, self._origins = position, errors, origins
            self._stream = self._open()

    def close(self) -> None:
        """End the pass and its threads; no element follows.

        Example:
            >>> iterator = iter(rx.data.Dataset.range(3).prefetch(2))
            >>> iterator.close()
            >>> list(iterator)
            []
        """
        self._is_done = True
        # A thread that is producing an element, which may take any time, ends the pass itself.
        if self.lock.acquire(timeout=_PATIENCE):
            try:
                self._peeked.clear()
                self._stop()
            finally:
                self.lock.release()

    def __del__(self, is_over: Callable[[], bool] = sys.is_finalizing) -> None:
        # At interpreter exit the threads have ended already, and modules may have been cleared.
        if not is_over() and getattr(self, "_stream", None) is not None:
            self._stop()

    def _end(self) -> str:
        with self.lock:
            self._count_taken()
        return (
            f"End of sequence: the dataset has given all its {self._position} elements. Iterate"
            " with `for element in dataset`, or start again with `iter(dataset)`."
        )

    def _begin(self) -> None:
        """Open a stream at the current position; raise `EndOfSequenceError` at the end."""
        if self._is_done:
            self._stop()
            raise EndOfSequenceError(self._end())
        self._stream = self._open()

    def _open(self) -> Stream:
        """Return a new stream, advanced to the current position."""
        origins = dict(zip(self._seeds, self._origins, strict=True))
        stream = self._node.open(Run(origins, new=self._new))
        wanted = self._position + self._errors + len(self._peeked)
        # `skip` does not produce elements, so it cannot count failed ones: produce them again.
        has_no_errors = not self._errors and not self._is_failing()
        found = stream.skip(wanted) if has_no_errors else discard_elements(stream, wanted)
        if found < wanted:
            stream.close()
            raise InvalidArgumentError(
                f"The state stands after {wanted} elements, but the dataset has only {found} now:"
                " its files or arrays have changed."
            )
        return stream

    def _stop(self) -> None:
        stream, self._stream = self._stream, None
        self._count_taken()
        self._ready, self._num_ready = iter(()), 0
        if stream is not None:
            stream.close()


Iterator = DatasetIterator  # TensorFlow's name


def _seeds_of(node: Node) -> Sequence[Seeds]:
    """Return the distinct seeds of all random nodes of the graph, in the order of `walk`."""
    return list(dict.fromkeys(seeds for part in walk(node) if (seeds := part.random) is not None))


def _origins(stored: Any, count: int) -> list[Origin]:
    """Return the `count` origins of a saved state; raise `InvalidArgumentError` if malformed."""
    parts: list[Any] = list(stored) if isinstance(stored, Sequence) else []
    parts = parts if len(parts) == count else [()]
    forms = [[type(x) for x in part] if isinstance(part, Sequence) else [] for part in parts]
    if any(form not in ([int, int, int], [int, int, type(None)]) for form in forms):
        raise InvalidArgumentError(
            f"The seeds of a saved state are {count} lists of a seed, a number and a global seed or"
            f" None; got {stored!r:.200}. Pass what `save_state()` returned."
        )
    return [Origin(*part) for part in parts]


def _describe(node: Node) -> str:
    # Saved states contain this text: renaming a node class or an argument in `grouping` makes them
    # unreadable.
    return _FROM.join(map(_describe_node, walk(node)))


def _describe_node(part: Node) -> str:
    kind = type(part).__name__.removesuffix("Node")
    arguments = ", ".join(f"{name}={getattr(part, name)!r}" for name in part.grouping)
    return f"{kind}({arguments})" if arguments else kind


def _difference(saved: str, graph: str) -> tuple[str, str]:
    """Return the first pair of nodes in which two graph descriptions differ."""
    parts = zip_longest(saved.split(_FROM), graph.split(_FROM), fillvalue="nothing")
    return next((first, second) for first, second in parts if first != second)
