"""The spec of a dataset that is itself a part of an element."""

from typing import Any

from replicax._tensor_spec import TypeSpec


class DatasetSpec(TypeSpec):
    """What is known of a nested dataset, such as a window.

    Args:
        element_spec: The spec of its elements.
        dataset_shape: Accepted for TensorFlow's sake: a nested dataset is one.

    Example:
        >>> rx.data.Dataset.range(7).window(3).element_spec
        DatasetSpec(TensorSpec(shape=(), dtype=dtype('int64'), name=None))
    """

    __slots__ = ("_element_spec",)

    def __init__(self, element_spec: Any, dataset_shape: Any = ()) -> None:
        self._element_spec = element_spec

    @property
    def element_spec(self) -> Any:
        """The spec of the nested dataset's elements.

        Example:
            >>> rx.data.Dataset.range(7).window(3).element_spec.element_spec.dtype
            dtype('int64')
        """
        return self._element_spec

    def is_compatible_with(self, spec_or_value: Any, /) -> bool:
        """Whether a nested dataset may stand here.

        Args:
            spec_or_value: A `DatasetSpec` or a dataset.

        Returns:
            True if the specs of the elements are equal.

        Example:
            >>> spec = rx.data.DatasetSpec(rx.TensorSpec([], np.int64))
            >>> spec.is_compatible_with(rx.data.Dataset.range(3))
            True
        """
        return bool(getattr(spec_or_value, "element_spec", None) == self._element_spec)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DatasetSpec):
            return NotImplemented
        return bool(self._element_spec == other.element_spec)

    def __hash__(self) -> int:
        return hash(repr(self._element_spec))

    def __repr__(self) -> str:
        return f"DatasetSpec({self._element_spec!r})"
