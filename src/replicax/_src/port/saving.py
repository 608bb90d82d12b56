"""Paths of saved models and weights, which end in ``.keras`` and ``.weights.h5`` in Keras 3.

Keras 2 also wrote TensorFlow's formats, whose paths have no ending. A path to which the program
saves gets the ending of Keras 3, and so does the same expression where the program loads it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import libcst as cst
import libcst.matchers as m

from replicax._src.port.parts import Facts, code_of

_WEIGHTS, _MODEL = ".weights.h5", ".keras"
_OLD_ENDINGS = (".h5", ".hdf5", ".ckpt", ".tf")
_CALLBACK = "ModelCheckpoint"
UNKNOWN = (
    "Keras 3 saves models to paths that end in `.keras`, and weights to paths that end in"
    ' `.weights.h5`: write `f"{path}.weights.h5"` here and where they are loaded.'
)
_LOADERS = {"load_weights": _WEIGHTS, "load_model": _MODEL}
# Arguments that choose a format of TensorFlow.
_DROPPED = frozenset(["options", "save_format", "save_traces"])


class SavedPaths:
    """The paths to which a program saves models and weights.

    Args:
        facts: Facts about the program.

    Attributes:
        unknown: The calls that save to a path whose ending is unknown.
    """

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self.unknown: set[cst.Call] = set()
        # The source of each path, the ending that it needs, and the path in the new program.
        self._new: dict[tuple[str, str], Any] = {}

    def collect(self, module: cst.Module, path_of: Callable[[Any], str | None]) -> None:
        """Find the paths to which the program saves.

        Args:
            module: The program.
            path_of: Returns the path of a name of TensorFlow.
        """
        calls: Any = m.findall(module, m.Call())
        others = {
            code_of(arg.value)
            for call in calls
            if (path_of(call.func) or "").startswith(("saved_model.", "lite."))
            for arg in call.args
        }
        for call in calls:
            ending, place = _ending(call), _place(call)
            if ending is None or place is None or _name(call) in _LOADERS:
                continue
            value = call.args[place].value
            if _name(call) in self._facts.functions or code_of(value) in others:
                continue
            new = self._with_ending(value, ending)
            if new is None:
                self.unknown.add(call)
            elif code_of(new) != code_of(value):
                self._new[code_of(value), ending] = new

    def rewritten(self, node: cst.Call, call: cst.Call) -> cst.Call:
        """Return a call that saves or loads with the path and the arguments that Keras 3 takes.

        Args:
            node: The call in the old program.
            call: The same call, whose names were rewritten.
        """
        ending, place = _ending(node), _place(node)
        if ending is None or place is None:
            return call
        value = node.args[place].value
        new = self._new.get((code_of(value), ending))
        if new is None or code_of(value) != code_of(call.args[place].value):
            return call
        args = list(call.args)
        args[place] = args[place].with_changes(value=new)
        kept = [arg for arg in args if not (arg.keyword and arg.keyword.value in _DROPPED)]
        kept[-1] = kept[-1].with_changes(comma=args[-1].comma)
        return call.with_changes(args=kept)

    def _with_ending(self, node: Any, ending: str) -> Any:
        """Return a path with an ending, the same one if it has it; None if that is unknown."""
        match node:
            case cst.SimpleString():
                text = f"{node.prefix}{node.quote}{_ended(node.raw_value, ending)}{node.quote}"
                return node.with_changes(value=text)
            case cst.FormattedString(parts=[*first, cst.FormattedStringText() as last]):
                return node.with_changes(
                    parts=[*first, last.with_changes(value=_ended(last.value, ending))]
                )
            case cst.BinaryOperation(operator=cst.Add() | cst.Divide()):
                right = self._with_ending(node.right, ending)
                return right and node.with_changes(right=right)
            case cst.BinaryOperation(operator=cst.Modulo()):
                left = self._with_ending(node.left, ending)
                return left and node.with_changes(left=left)
            case cst.Call(func=cst.Attribute()):
                return self._call_with_ending(node, ending)
            case cst.Name():
                return self._name_with_ending(node, ending)
        return None

    def _call_with_ending(self, node: Any, ending: str) -> Any:
        """Return ``"text".format(...)`` or ``os.path.join(..., "text")`` with an ending."""
        name, args = node.func.attr.value, list(node.args)
        if name == "format":
            text = self._with_ending(node.func.value, ending)
            return text and node.with_changes(func=node.func.with_changes(value=text))
        end = self._with_ending(args[-1].value, ending) if name == "join" and args else None
        if end is not None:
            args[-1] = args[-1].with_changes(value=end)
        return end and node.with_changes(args=args)

    def _name_with_ending(self, node: cst.Name, ending: str) -> Any:
        """Return a path in a variable with an ending, if all its values are known."""
        values = self._facts.values.get(node.value, ())
        made: list[Any] = [v is not node and self._with_ending(v, ending) for v in values]
        if not made or not all(made):
            return None
        fits = [code_of(v) == code_of(w) for v, w in zip(values, made, strict=True)]
        if any(fits):
            return node if all(fits) else None
        return cst.parse_expression(f'f"{{{node.value}}}{ending}"')


def _ended(text: str, ending: str) -> str:
    """Return a path with Keras 3's file ending in place of Keras 2's; unchanged if it fits."""
    if text.endswith(ending) or (ending == _MODEL and text.endswith((".h5", ".hdf5"))):
        return text
    old = next((each for each in _OLD_ENDINGS if text.endswith(each)), "")
    return text.removesuffix(old).rstrip("/") + ending


def _name(call: cst.Call) -> str:
    return code_of(call.func).rpartition(".")[2]


def _ending(call: cst.Call) -> str | None:
    """Return the ending of the path in a call that saves or loads; None if it does not."""
    name, receiver = _name(call), code_of(call.func).rpartition(".")[0].lower()
    if name == _CALLBACK:
        flags = [a.value for a in call.args if a.keyword and a.keyword.value == "save_weights_only"]
        is_positional = sum(arg.keyword is None for arg in call.args) > 2
        if is_positional or any(arg.star for arg in call.args):
            return None
        return {"True": _WEIGHTS, "False": _MODEL}.get(code_of(flags[0]) if flags else "False")
    if name == "save_weights":
        return _WEIGHTS
    if name == "save" and "model" in receiver.rpartition(".")[2] and "saved_model" not in receiver:
        return _MODEL
    return _LOADERS.get(name)


def _place(call: cst.Call) -> int | None:
    """Return the place of the path among the arguments of a call."""
    for place, arg in enumerate(call.args):
        name = arg.keyword.value if arg.keyword else ""
        if name in ("filepath", "path") or (place == 0 and not name and not arg.star):
            return place
    return None
