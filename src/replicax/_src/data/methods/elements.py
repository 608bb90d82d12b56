"""`Dataset` methods that call a user's function on elements: map, filter, reduce and others."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from replicax._src.base.ops import T_co
from replicax._src.base.tf_errors import ArgumentTypeError, InvalidArgumentError, StructureError
from replicax._src.data.leaves import leaf_spec, private_copy, to_leaf
from replicax._src.data.node import AUTOTUNE, Root, to_int
from replicax._src.data.nodes.flat_map import FlatMapNode, InterleaveNode
from replicax._src.data.nodes.map import FilterNode, MapNode
from replicax._src.data.nodes.sequential import ResampleNode, ScanNode, TakeWhileNode
from replicax._src.data.seeds import Seeds, is_in_function
from replicax._src.data.structure import flatten
from replicax._src.data.user_functions import ElementFunction

if TYPE_CHECKING:
    from replicax._src.data.dataset import Dataset

U = TypeVar("U")

# Fixed, unlike TensorFlow's default, which is the number of cores: an order that depends on the
# machine could not be restored on another.
_DEFAULT_CYCLE = 16


class Elements(Root[T_co]):
    """The methods of `Dataset` that call a user's function."""

    def map(  # noqa: PLR0913
        self,
        map_func: Callable[..., U],
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,  # noqa: FBT001
        synchronous: bool | None = None,  # noqa: FBT001
        use_unbounded_threadpool: bool = False,  # noqa: FBT001, FBT002
        name: str | None = None,
        *,
        vectorize: bool = False,
    ) -> "Dataset[U]":
        """Apply a function to each element.

        The function is called with NumPy values on the host, once for each element, in order. A
        function of whole arrays is much faster after `batch`: ``dataset.batch(n).map(f)``. Random
        numbers inside the function are not seeded by the dataset: seed them in the function, with
        the worker index if workers must differ.

        Closure and global variables keep the values that they have at this call, except those that
        the function assigns (``global``, ``nonlocal``). Objects are not copied: the function sees
        later changes to a list or an attribute.

        Args:
            map_func: Takes an element; the components of a tuple are separate arguments.
            num_parallel_calls: The number of threads, which help if the function waits or releases
                the GIL. ``rx.data.AUTOTUNE`` decides by the duration of the first calls.
            deterministic: Ignored: results are always in the order of the input.
            synchronous: Ignored.
            use_unbounded_threadpool: Ignored.
            name: Ignored.
            vectorize: Whether the function accepts any number of elements at once, stacked along a
                leading axis, which each result must have too.

        Returns:
            A dataset of the results.

        Example:
            >>> dataset = rx.data.Dataset.range(3).map(lambda x: x * 2)
            >>> [int(x) for x in dataset]
            [0, 2, 4]
        """
        del deterministic, synchronous, use_unbounded_threadpool, name
        function = ElementFunction(map_func, "map", vectorize=vectorize)
        return self._wrap(MapNode(self.node, function, _workers(num_parallel_calls, "map")))

    def filter(self, predicate: Callable[..., Any], name: str | None = None) -> "Dataset[T_co]":
        """Keep the elements for which a predicate is true.

        Args:
            predicate: Takes an element, returns one bool.
            name: Ignored.

        Returns:
            A dataset of the selected elements.

        Example:
            >>> [int(x) for x in rx.data.Dataset.range(6).filter(lambda x: x % 2 == 1)]
            [1, 3, 5]
        """
        del name
        return self._wrap(FilterNode.of(self.node, ElementFunction(predicate, "filter")))

    def take_while(self, predicate: Callable[..., Any], name: str | None = None) -> "Dataset[T_co]":
        """Keep the elements before the first one for which a predicate is false.

        Args:
            predicate: Takes an element, returns one bool.
            name: Ignored.

        Returns:
            A dataset of the selected elements.

        Example:
            >>> [int(x) for x in rx.data.Dataset.range(6).take_while(lambda x: x < 2)]
            [0, 1]
        """
        del name
        return self._wrap(TakeWhileNode.of(self.node, ElementFunction(predicate, "take_while")))

    def flat_map(
        self, map_func: Callable[..., "Dataset[U]"], name: str | None = None
    ) -> "Dataset[U]":
        """Map each element to a dataset, and concatenate the results.

        Args:
            map_func: Takes an element, returns a `Dataset`.
            name: Ignored.

        Returns:
            A dataset of the elements of the returned datasets.

        Example:
            >>> dataset = rx.data.Dataset.range(3).flat_map(rx.data.Dataset.range)
            >>> [int(x) for x in dataset]
            [0, 0, 1]
        """
        del name
        node = FlatMapNode(self.node, ElementFunction(map_func, "flat_map"), Seeds(None))
        return self._wrap(node.checked())

    def interleave(  # noqa: PLR0913
        self,
        map_func: Callable[..., "Dataset[U]"],
        cycle_length: int | None = None,
        block_length: int | None = None,
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,  # noqa: FBT001
        name: str | None = None,
    ) -> "Dataset[U]":
        """Map each element to a dataset, and interleave the results.

        Args:
            map_func: Takes an element, returns a `Dataset`.
            cycle_length: The number of datasets to read from at a time; 16 if None or
                ``rx.data.AUTOTUNE``.
            block_length: The number of consecutive elements to take from each; 1 if None.
            num_parallel_calls: Any value but None and 1 reads each dataset in its own thread.
            deterministic: Ignored: the order is always deterministic.
            name: Ignored.

        Returns:
            A dataset of the elements of the returned datasets.

        Example:
            >>> def tens(k):
            ...     return rx.data.Dataset.range(10 * k, 10 * k + 3)
            >>> [int(x) for x in rx.data.Dataset.range(2).interleave(tens, cycle_length=2)]
            [0, 10, 1, 11, 2, 12]
        """
        del deterministic, name
        cycle = _DEFAULT_CYCLE if cycle_length in (None, AUTOTUNE) else cycle_length
        node = InterleaveNode(
            self.node,
            ElementFunction(map_func, "interleave"),
            Seeds(None),
            to_int(cycle, "interleave", "cycle_length", least=1),
            to_int(
                1 if block_length is None else block_length, "interleave", "block_length", least=1
            ),
            _workers(num_parallel_calls, "interleave"),
        )
        return self._wrap(node.checked())

    def reduce(
        self, initial_state: Any, reduce_func: Callable[..., Any], name: str | None = None
    ) -> Any:
        """Fold all elements into one value.

        Args:
            initial_state: The initial state.
            reduce_func: Takes the state and an element, returns the next state.
            name: Ignored.

        Returns:
            The final state.

        Example:
            >>> int(rx.data.Dataset.range(5).reduce(np.int64(0), lambda total, x: total + x))
            10
        """
        del name
        state = initial_state
        structure, leaves = flatten(initial_state)
        for element in self._wrap(self.node):
            state = reduce_func(state, element)
            parts: list[Any] = []
            try:
                structure.collect(state, parts, state)
            except StructureError as error:
                raise StructureError(
                    f"The next state of reduce() must be built like its initial_state: {error}."
                ) from None
            for old, new in zip(leaves, parts, strict=True):
                _check_state_dtype(old, new)
        return state

    def scan(
        self, initial_state: Any, scan_func: Callable[..., Any], name: str | None = None
    ) -> "Dataset[Any]":
        """Apply a function that carries a state from one element to the next.

        Args:
            initial_state: The state for the first element; later states must have its dtypes.
            scan_func: Takes the state and an element (a tuple is one argument); returns the next
                state and an output.
            name: Ignored.

        Returns:
            A dataset of the outputs.

        Example:
            >>> dataset = rx.data.Dataset.range(5)
            >>> [int(x) for x in dataset.scan(np.int64(0), lambda s, x: (s + x, s + x))]
            [0, 1, 3, 6, 10]
        """
        del name
        nesting, leaves = flatten(initial_state)
        state = tuple(private_copy(to_leaf(leaf)) for leaf in leaves)
        node = ScanNode(self.node, ElementFunction(scan_func, "scan"), state, nesting)
        if not is_in_function():
            _ = node.outcome  # raises if the function returns no pair
        return self._wrap(node)

    def rejection_resample(
        self,
        class_func: Callable[..., Any],
        target_dist: Sequence[float],
        initial_dist: Sequence[float] | None = None,
        seed: int | None = None,
        name: str | None = None,
    ) -> "Dataset[Any]":
        """Drop elements at random to approximate a target distribution of classes.

        Args:
            class_func: Takes an element, returns its class: a non-negative int.
            target_dist: The target probability of each class, up to a common factor.
            initial_dist: The probability of each class in the input; estimated while reading if
                None.
            seed: The seed of the draws.
            name: Ignored.

        Returns:
            A dataset of pairs of a class and an element. No element is repeated.

        Example:
            >>> dataset = rx.data.Dataset.range(6)
            >>> [int(x) for label, x in dataset.rejection_resample(lambda x: x % 2, [0, 1], seed=1)]
            [1, 3, 5]
        """
        del name
        target = _distribution(target_dist, "target_dist")
        initial = None if initial_dist is None else _distribution(initial_dist, "initial_dist")
        if initial is not None and len(initial) != len(target):
            raise InvalidArgumentError(
                f"rejection_resample() got {len(target)} numbers in target_dist and {len(initial)}"
                " in initial_dist; there is one for each class in both."
            )
        function = ElementFunction(class_func, "rejection_resample")
        return self._wrap(ResampleNode(self.node, function, target, initial, Seeds(seed)))

    def apply(self, transformation_func: Callable[["Dataset[T_co]"], "Dataset[U]"]) -> "Dataset[U]":
        """Apply a function to the whole dataset.

        Args:
            transformation_func: Takes this dataset, returns another.

        Returns:
            The dataset that the function returns.

        Example:
            >>> [int(x) for x in rx.data.Dataset.range(5).apply(lambda d: d.take(2))]
            [0, 1]
        """
        if not callable(transformation_func):
            raise StructureError(
                f"apply() needs a function of a dataset, got {transformation_func!r:.60}. Write"
                " `apply(lambda dataset: dataset.take(2))`."
            )
        result = transformation_func(self._wrap(self.node))
        if not isinstance(result, Root):
            raise StructureError(
                f"The function given to apply() must return a Dataset, but it returned"
                f" {result!r:.60} of type {type(result).__name__}. Return the transformed dataset,"
                " or call the function without `apply`."
            )
        return result


def _check_state_dtype(old: Any, new: Any) -> None:
    """Raise if the dtype of a leaf of the state of `reduce` has changed."""
    if new is old:
        return
    before, after = leaf_spec(to_leaf(old)), leaf_spec(to_leaf(new))
    dtypes = [getattr(spec, "dtype", None) for spec in (before, after)]
    # A Python number may take the dtype of the elements that are added to it.
    is_free = isinstance(old, (bool, int, float)) and dtypes[1] is not None
    kinds = "biufc" if is_free else ""
    if dtypes[0] != dtypes[1] and (dtypes[1] is None or dtypes[1].kind not in kinds):
        raise StructureError(
            f"The next state of reduce() must have the dtypes of its initial_state: it was"
            f" {before} and is {after}. Begin with a value of that dtype, such as np.float32(0), or"
            " convert it in the function."
        )


def _distribution(values: Sequence[float], name: str) -> tuple[float, ...]:
    """Return non-negative `values` scaled to a sum of 1."""
    if isinstance(values, (str, bytes)) or not hasattr(values, "__len__"):
        raise ArgumentTypeError(
            f"rejection_resample({name}={values!r:.60}): give a list with a number for each class."
        )
    parts = [float(value) for value in values]
    if not parts or min(parts) < 0 or not sum(parts) > 0:
        raise InvalidArgumentError(
            f"rejection_resample({name}={values!r}): give a number for each class, none negative"
            " and not all zero."
        )
    return tuple(part / sum(parts) for part in parts)


def _workers(num_parallel_calls: int | None, verb: str) -> int | None:
    if num_parallel_calls is None or num_parallel_calls == AUTOTUNE:
        return num_parallel_calls
    return to_int(num_parallel_calls, verb, "num_parallel_calls", least=1)
