"""Closures of Python functions: the names that a function captures, and their values."""

from types import CellType, FunctionType
from typing import Any

UNSET: Any = object()  # the value of a name that has none yet


def content(cell: CellType) -> Any:
    """Return the value of a captured name, or `UNSET` if it has none yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return UNSET


def captured(function: FunctionType) -> dict[str, Any]:
    """Return the values that a function captures, by name; `UNSET` for names without one."""
    names = function.__code__.co_freevars
    return dict(zip(names, map(content, function.__closure__ or ()), strict=True))
