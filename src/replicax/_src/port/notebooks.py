"""Porting of notebooks: all code cells are ported as one program, magics are kept."""

import io
import json
import re
import tokenize
from typing import Any

import libcst as cst

from replicax._src.port.rewrite import Mark, Ported, PortError, port

_CELL = "__replicax_cell__"
_MAGIC = "pass  # replicax magic"
# Magics of whole cells whose other lines are Python.
_OF_PYTHON = re.compile(r"\s*%%(capture|prun|python3?|time|timeit)\b")
_IS_MAGIC = re.compile(r"^(\s*)([!%?].*|\w[\w, ]*=\s*[!%].*|\S+\?\??)$")
_USES_TENSORFLOW = re.compile(r"\btf\.|\btensorflow\b|\bkeras\b")


def port_notebook(text: str, name: str = "the notebook") -> Ported:
    """Rewrite the code cells of a notebook.

    Cells in another language, and cells that are not Python, are kept as they are. Those of the
    latter that use TensorFlow get a mark.

    Args:
        text: The notebook, in Jupyter's format.
        name: Its name, for messages.

    Raises:
        PortError: If it is not a notebook.
    """
    try:
        notebook = json.loads(text)
        cells = [cell for cell in notebook["cells"] if cell.get("cell_type") == "code"]
        sources = ["".join(cell["source"]) for cell in cells]
    except (ValueError, KeyError, TypeError) as error:
        raise PortError(f"{name} is not a notebook: {type(error).__name__}: {error}") from None
    magics: list[str] = []
    parts = {i: code for i, s in enumerate(sources) if (code := _as_python(s, magics)) is not None}
    program = "".join(f"{_CELL} = {i}\n{code}\n" for i, code in parts.items())
    ported = port(program, name)
    for i, code in _split(ported.code).items():
        _replace(cells[i], sources[i], _with_magics(code, magics))
    indent = 1 if re.match(r'\{\n "', text) else 2
    made = json.dumps(notebook, indent=indent, ensure_ascii=False) + "\n" * text.endswith("\n")
    is_same = ported.code == program
    marks = [*ported.marks, *_unread(sources, parts)]
    return Ported(text if is_same else made, ported.changes, marks, ported.uses)


def _unread(sources: list[str], parts: dict[int, str]) -> list[Mark]:
    """Return marks for the cells that are neither Python nor in another language."""
    line, marks = 1, []
    for number, source in enumerate(sources):
        is_foreign = source.lstrip().startswith("%%")
        if number not in parts and not is_foreign and _USES_TENSORFLOW.search(source):
            words = "It is not Python, so nothing in it was rewritten."
            marks.append(Mark(line, f"code cell {number + 1}", words, is_left=True))
        line += parts[number].count("\n") + 2 if number in parts else 0
    return marks


def _as_python(source: str, magics: list[str]) -> str | None:
    """Return a cell with placeholders for its magics; None if it is not Python."""
    if source.lstrip().startswith("%%") and not _OF_PYTHON.match(source):
        return None
    start = len(magics)
    lines: list[str] = []
    rest = iter(source.splitlines())
    for line in rest:
        found = _IS_MAGIC.match(line)
        if found and not _is_open(lines):
            lines.append(f"{found[1]}{_MAGIC} {len(magics)}")
            magics.append(line.lstrip())
            while magics[-1].endswith("\\"):  # `!pip install \` goes on in the next line
                magics[-1] += "\n" + next(rest, "")
        else:
            lines.append(line)
    code = "\n".join(lines)
    try:
        cst.parse_module(code)
    except (cst.ParserSyntaxError, ValueError, RecursionError):
        del magics[start:]
        return None
    return code


def _is_open(lines: list[str]) -> bool:
    """Whether the statement or text of the last line goes on in the next one."""
    if lines and lines[-1].endswith("\\"):
        return True
    try:
        for _ in tokenize.generate_tokens(io.StringIO("\n".join(lines) + "\n").readline):
            pass
    except tokenize.TokenError as error:
        return any(part in str(error) for part in ("multi-line", "triple-quoted"))
    except SyntaxError:
        pass
    return False


def _with_magics(code: str, magics: list[str]) -> str:
    made = re.sub(rf"{re.escape(_MAGIC)} (\d+)", lambda found: magics[int(found[1])], code)
    first = re.search(r"^%%.*\n", made, flags=re.MULTILINE)  # it must stay the first line
    return made if first is None else first[0] + made[: first.start()] + made[first.end() :]


def _split(program: str) -> dict[int, str]:
    """Return the code of each cell of a ported program."""
    head, *rest = re.split(rf"^{_CELL} = (\d+)\n", program, flags=re.MULTILINE)
    found = {int(i): code for i, code in zip(rest[::2], rest[1::2], strict=True)}
    if head.strip() and found:  # imports that have no other place
        first = next(iter(found))
        found[first] = head + found[first]
    return found


def _replace(cell: dict[str, Any], old: str, new: str) -> None:
    if new.endswith("\n") and not old.endswith("\n"):
        new = new[:-1]
    if new != old:
        is_list = isinstance(cell["source"], list)
        cell["source"] = new.splitlines(keepends=True) if is_list else new
        cell["outputs"], cell["execution_count"] = [], None
