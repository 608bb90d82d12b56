"""TensorFlow's public names beside replicax's: which are there, which say what to use instead.

Prints the table of docs/porting.md:

    python -m tests.golden.public_names
"""

import ast
import inspect
import json
import re
import sys
from collections.abc import Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import replicax as rx

PUBLIC = json.loads(Path(__file__).with_name("public_names.json").read_text())
HEAD = ("| namespace | exist | work | say what to use |", "| --- | --- | --- | --- |")


def found(path: str, name: str) -> tuple[Any, str | None]:
    """What a name of TensorFlow is in replicax, or the words with which it is refused."""
    namespace: Any = rx
    for part in [*path.split("."), name]:
        try:
            namespace = getattr(namespace, part)
        except AttributeError as error:
            return None, str(error)
    return namespace, None


def table() -> list[str]:
    """How many names exist, work and are refused, as rows of a table."""
    rows = []
    for path, names in PUBLIC.items():
        refused = sum(found(path, name)[1] is not None for name in names)
        rows.append((f"`tf.{path}`", len(names), len(names) - refused, refused))
    total = ("all", *(sum(row[i] for row in rows) for i in (1, 2, 3)))
    return [*HEAD, *("| " + " | ".join(map(str, row)) + " |" for row in [*rows, total])]


def differences(ours: Any, theirs: dict[str, Any]) -> Iterator[str]:
    """Where something of ours would not take, have or be what TensorFlow's does."""
    if "value" in theirs:
        if ours != theirs["value"]:
            yield f"is {ours!r}, not {theirs['value']!r}"
    elif "members" in theirs or "fields" in theirs:
        names = theirs.get("members") or theirs["fields"]
        yield from (f"has no {name}" for name in names if not has(ours, name))
    else:
        yield from takes_less(ours, theirs["takes"])
        for name, arguments in theirs.get("has", {}).items():
            member = inspect.getattr_static(ours, name, None)
            if not has(ours, name):
                yield f"has no {name}"
            elif arguments is not None and callable(getattr(ours, name, None)):
                inner = (
                    member.__func__ if isinstance(member, classmethod | staticmethod) else member
                )
                yield from (f".{name} {problem}" for problem in takes_less(inner, arguments))


def has(kind: type, name: str) -> bool:
    """Whether objects of a class have an attribute, or say what to use in its place."""
    fields = [field for base in kind.__mro__ for field in vars(base).get("__annotations__", ())]
    try:
        written = re.findall(r"self\.(\w+)(?:: [^=]*)? = ", inspect.getsource(kind))
    except OSError:  # a class made by a call of `type`
        written = []
    if name in (*dir(kind), *fields, *written, *getattr(kind, "left_out", ())):
        return True
    try:
        return hasattr(kind(), name)
    except (TypeError, ValueError):  # it is not made without arguments
        return False


def takes_less(ours: Any, arguments: Sequence[str] | None) -> Iterator[str]:
    """Which of TensorFlow's arguments a function of ours does not take in their place."""
    if arguments is None or (isinstance(ours, type) and issubclass(ours, Enum)):
        return  # Python makes members, with other parameters in each version
    found = inspect.signature(ours).parameters.values()
    mine = {p.name: p for p in found if p.name not in ("self", "cls")}
    places = list(mine)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in mine.values())
    theirs = dict(argument.partition("=")[::2] for argument in arguments if argument[0] != "*")
    for place, (name, default) in enumerate(theirs.items()):
        p = mine.get(name)
        if p is None:
            yield from () if takes_any else (f"does not take {name}",)
        else:
            yield from _differs(p, places, place, default)
    for name, p in mine.items():
        stars = p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        if name not in theirs and p.default is p.empty and not stars:
            yield f"needs {name}"


def _differs(
    p: inspect.Parameter, places: Sequence[str], place: int, default: str
) -> Iterator[str]:
    """How a parameter of ours differs from TensorFlow's of the same name."""
    if p.kind is p.POSITIONAL_ONLY:
        yield f"does not take {p.name} by keyword"
    elif p.kind is not p.KEYWORD_ONLY and places[place : place + 1] != [p.name]:
        yield f"takes {p.name} in place {places.index(p.name)}, not {place}"
    elif default not in ("", "...") and p.default != ast.literal_eval(default):
        yield f"has {p.name}={p.default!r}, not {default}"


if __name__ == "__main__":
    sys.stdout.write("\n".join(table()) + "\n")
