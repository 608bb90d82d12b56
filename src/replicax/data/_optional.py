"""A value that may be missing."""

from typing import Any

import numpy as np

from replicax.data._errors import InvalidArgumentError
from replicax.data._leaves import leaf_spec, to_leaf
from replicax.data._structure import map_leaves

_MISSING = object()


class Optional:
    """An element, or nothing: what `get_next_as_optional` returns.

    Example:
        >>> optional = rx.data.Optional.from_value(np.float32(2))
        >>> bool(optional.has_value()), float(optional.get_value())
        (True, 2.0)
    """

    def __init__(self, value: Any = _MISSING) -> None:
        self._value = value

    @classmethod
    def from_value(cls, value: Any) -> "Optional":
        """An optional that holds a value.

        Args:
            value: Any element.

        Returns:
            The optional.

        Example:
            >>> bool(rx.data.Optional.from_value(1).has_value())
            True
        """
        return cls(value)

    @classmethod
    def empty(cls, element_spec: Any = None) -> "Optional":
        """An optional without a value.

        Args:
            element_spec: What a value would look like; for the reader.

        Returns:
            The optional.

        Example:
            >>> bool(rx.data.Optional.empty().has_value())
            False
        """
        del element_spec
        return cls()

    def has_value(self, name: str | None = None) -> np.bool_:
        """Whether there is a value.

        Returns:
            A NumPy bool.

        Example:
            >>> bool(rx.data.Optional.empty().has_value())
            False
        """
        return np.bool_(self._value is not _MISSING)

    def get_value(self, name: str | None = None) -> Any:
        """The value.

        Returns:
            The element.

        Raises:
            InvalidArgumentError: There is none.

        Example:
            >>> rx.data.Optional.from_value(3).get_value()
            3
        """
        if self._value is _MISSING:
            raise InvalidArgumentError(
                "The optional has no value: the dataset has ended. Ask `has_value()` first."
            )
        return self._value

    @property
    def element_spec(self) -> Any:
        """The spec of the value.

        Example:
            >>> rx.data.Optional.from_value(np.zeros(2)).element_spec.shape
            (2,)
        """
        return map_leaves(lambda leaf: leaf_spec(to_leaf(leaf)), self.get_value())
