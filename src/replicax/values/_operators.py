"""Operators: objects that stand for a value in Python's arithmetic."""

import operator
from collections.abc import Callable
from typing import Any

_ARITHMETIC = ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"]
_BINARY = [*_ARITHMETIC, "and_", "or_", "xor", "lshift", "rshift"]
_COMPARING = ["lt", "le", "gt", "ge", "eq", "ne"]
_UNARY = ["neg", "pos", "abs", "invert"]
_CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "bool": bool,
    "int": int,
    "float": float,
    "index": operator.index,
    "len": len,
    "iter": iter,
}


def stands_for(kind: type, read: Callable[[Any], Any]) -> None:
    """Have Python's operators on objects of ``kind`` act on what ``read`` gives for them."""

    def operand(x: Any) -> Any:
        return read(x) if isinstance(x, kind) else x

    def put(name: str, method: Callable[..., Any]) -> None:
        method.__name__ = name
        method.__doc__ = f"``{name}`` of the value."
        setattr(kind, name, method)

    for name in [*_BINARY, *_COMPARING]:
        op, bare = getattr(operator, name), name.rstrip("_")
        put(f"__{bare}__", lambda self, other, op=op: op(read(self), operand(other)))
        if name in _BINARY:
            put(f"__r{bare}__", lambda self, other, op=op: op(operand(other), read(self)))
    for name in _UNARY:
        op = getattr(operator, name)
        put(f"__{name}__", lambda self, op=op: op(read(self)))
    for name, made in _CONVERSIONS.items():
        put(f"__{name}__", lambda self, made=made: made(read(self)))
    if not hasattr(kind, "__getitem__"):
        put("__getitem__", lambda self, key: read(self)[key])
