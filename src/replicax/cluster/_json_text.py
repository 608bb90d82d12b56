"""Strict JSON from an environment variable, with errors that point at the character or the key."""

import difflib
import json
import re
from collections.abc import Iterable

from replicax.cluster._errors import ClusterError, ClusterTypeError
from replicax.cluster._values import show

_CONTEXT = 30  # characters shown on each side of a mistake


def read_object(text: str, name: str) -> dict[str, object]:
    """Parse the text of a variable that must hold a JSON object.

    Args:
        text: The text.
        name: The variable, for error messages.

    Returns:
        The object as a dictionary.

    Raises:
        ClusterError: The text is no JSON, or a key stands in it twice.
        ClusterTypeError: It is JSON, but no object.

    Example:
        >>> from replicax.cluster._json_text import read_object
        >>> read_object('{"task": {"index": 1}}', "TF_CONFIG")
        {'task': {'index': 1}}
        >>> read_object("{'task': 1}", "TF_CONFIG")
        Traceback (most recent call last):
            ...
        replicax.cluster._errors.ClusterError: TF_CONFIG is not JSON: expecting property name
        enclosed in double quotes at character 1:
            {'task': 1}
             ^
        JSON wants double quotes: make the text with json.dumps, not with str.
    """
    value = _parse(text, name)
    if not isinstance(value, dict):
        raise ClusterTypeError(
            f"{name} is {show(value)}, a {type(value).__name__}; it must be a JSON object, such as"
            ' {"cluster": {"worker": ["localhost:12345", "localhost:23456"]},'
            ' "task": {"type": "worker", "index": 0}}.'
        )
    return value


def _parse(text: str, name: str) -> object:
    def refuse(constant: str) -> object:
        raise ClusterError(f"{name} contains {constant}, which is not JSON; write a number.")

    try:
        return json.loads(
            text, object_pairs_hook=lambda pairs: _unique(pairs, name), parse_constant=refuse
        )
    except ClusterError:
        raise
    except json.JSONDecodeError as error:
        raise ClusterError(_describe_syntax(error, name)) from None
    except RecursionError:
        raise ClusterError(f"{name} is nested too deeply to be a cluster.") from None
    except ValueError as error:  # a number of thousands of digits
        raise ClusterError(f"{name} cannot be read: {error}.") from None


def _unique(pairs: list[tuple[str, object]], name: str) -> dict[str, object]:
    unique: dict[str, object] = {}
    for key, value in pairs:
        if key in unique:
            raise ClusterError(f"{name} has the key {show(key)} twice; keep one of them.")
        unique[key] = value
    return unique


def _describe_syntax(error: json.JSONDecodeError, name: str) -> str:
    if not error.doc.strip():
        return (
            f"{name} is set, but empty. Unset it to run without a cluster, or write a JSON object"
            ' such as {"cluster": {"worker": ["localhost:12345"]},'
            ' "task": {"type": "worker", "index": 0}}.'
        )
    start = max(0, error.pos - _CONTEXT)
    before, after = error.doc[start : error.pos], error.doc[error.pos : error.pos + _CONTEXT]
    shown = _printable(("..." if start else "") + before)
    message = error.msg[:1].lower() + error.msg[1:]
    lines = [
        f"{name} is not JSON: {message} at character {error.pos}:",
        f"    {shown}{_printable(after)}",
        f"    {' ' * len(shown)}^",
        _hint(error.doc, error.pos),
    ]
    return "\n".join(line for line in lines if line)


def _printable(text: str) -> str:
    # One column for each character, so that the caret stays below its own.
    return "".join(c if c.isprintable() else " " for c in text)


def _hint(text: str, position: int) -> str:
    rest = text[position:]
    if "'" in rest[:1] or text.lstrip()[:1] == "'":
        return "JSON wants double quotes: make the text with json.dumps, not with str."
    if rest.startswith(("True", "False", "None")):
        return "JSON writes true, false and null: make the text with json.dumps, not with str."
    # Python 3.13 points at the comma, earlier ones at the bracket.
    if re.search(r",\s*$", text[: position + 1].rstrip("}]")) and re.match(r",?\s*[}\]]", rest):
        return "A comma before a closing bracket is not allowed in JSON."
    if not rest:
        return "The text ends too early; is a closing bracket or quote missing?"
    return "Make the text with json.dumps, so that it is always valid."


def refuse_misspelt(keys: Iterable[str], known: tuple[str, ...], where: str) -> None:
    """Raise for a key that looks like a known one; leave keys of other programs alone.

    Example:
        >>> from replicax.cluster._json_text import refuse_misspelt
        >>> refuse_misspelt(["clutser"], ("cluster", "task"), "TF_CONFIG")
        Traceback (most recent call last):
            ...
        replicax.cluster._errors.ClusterError: TF_CONFIG has a key 'clutser'; did you mean
        'cluster'? As it stands, the key would be ignored.
    """
    for key in keys:
        if key in known:
            continue
        alike = difflib.get_close_matches(key[:50].strip().lower(), known, n=1, cutoff=0.75)
        if alike:
            raise ClusterError(
                f"{where} has a key {show(key)}; did you mean {alike[0]!r}?"
                " As it stands, the key would be ignored."
            )
