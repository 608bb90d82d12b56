"""``replicax port train.py``: rewrite a TensorFlow program for replicax."""

import argparse
import contextlib
import difflib
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from replicax._src.base.lazy import LazyModule
from replicax._src.files.paths import local_file

# The exit statuses; 2 is reserved for invalid commands.
OK, SOMETHING_LEFT = 0, 1

# These need LibCST, an extra.
_rewrite = LazyModule("replicax._src.port.rewrite")
_notebooks = LazyModule("replicax._src.port.notebooks")

_SUFFIXES = (".py", ".ipynb")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this subcommand."""
    parser.add_argument("program", nargs="+", type=local_file, help="programs, notebooks and"
        " folders to port; without --output and --in-place they are only analyzed")  # fmt: skip
    parser.add_argument("--diff", action="store_true", help="show every changed line")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("-o", "--output", type=local_file, metavar="PATH", help="write the port of"
        " one program to a file, or of a folder to a new folder")  # fmt: skip
    where.add_argument("--in-place", action="store_true", help="replace the programs; each original"
        " is kept next to its port as NAME.orig")  # fmt: skip
    where.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a"
        " program uses TensorFlow")  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Port each program and print a summary; return 1 if something is left to do."""
    if importlib.util.find_spec("libcst") is None:
        raise ModuleNotFoundError("This needs LibCST: `pip install 'replicax[port]'`.")
    files = [file for path in options.program for file in _files(path)]
    problem = _invalid_options(options, files)
    if problem:
        sys.stderr.write(f"replicax port: {problem}\n")
        return 2
    is_alone = options.program == files
    elements = _element_functions(files)
    results = {
        path: _port(path, elements.get(path.stem, set()), is_alone=is_alone) for path in files
    }
    ports = {path: ported for path, ported in results.items() if not isinstance(ported, str)}
    failures = {path: words for path, words in results.items() if isinstance(words, str)}
    if options.json:
        sys.stdout.write(json.dumps(_as_json(ports, failures), indent=1) + "\n")
    else:
        _show(Console(), ports, failures, options)
    _write_all(ports, options)
    if options.check:
        return SOMETHING_LEFT if failures or any(p.uses for p in ports.values()) else OK
    is_left = any(mark.is_left for ported in ports.values() for mark in ported.marks)
    return SOMETHING_LEFT if is_left or failures else OK


def _files(path: Path) -> Iterator[Path]:
    """Yield the programs and notebooks of a folder, or the file itself."""
    if not path.is_dir():
        yield path
        return
    for inner in sorted(path.rglob("*")):
        is_hidden = any(part.startswith(".") for part in inner.relative_to(path).parts)
        if inner.suffix in _SUFFIXES and inner.is_file() and not is_hidden:
            yield inner


def _element_functions(files: list[Path]) -> dict[str, set[str]]:
    """Return, for each module, its functions that datasets of other files apply to elements."""
    found: dict[str, set[str]] = {}
    programs = [path for path in files if path.suffix == ".py"] if len(files) > 1 else []
    for path in programs:
        text = path.read_text(encoding="utf-8", errors="replace")
        for module, name in _rewrite.foreign_element_functions(text):
            found.setdefault(module, set()).add(name)
    return found


def _port(path: Path, element_functions: set[str], *, is_alone: bool) -> Any:
    """Return the port of a file, or why there is none if it is one of a folder."""
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".ipynb":
            return _notebooks.port_notebook(text, str(path))
        return _rewrite.port(text, str(path), element_functions)
    except (_rewrite.PortError, UnicodeDecodeError) as error:
        if is_alone:
            raise
        return str(error)


def _invalid_options(options: argparse.Namespace, files: list[Path]) -> str:
    [first, *others] = options.program
    if options.output and others:
        return "--output names one file, and several programs are given. Use --in-place."
    if options.output and options.output.exists():
        return f"{options.output} exists. Remove it, or choose another --output."
    if not files:
        return f"{first} has no programs: no files *.py or *.ipynb."
    backups = [
        _backup_path(path) for path in files if options.in_place and _backup_path(path).exists()
    ]
    if backups:
        return f"{backups[0]} exists: an earlier port keeps its program there. Move it away first."
    return ""


def _backup_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.orig")


def _write_all(ports: dict[Path, Any], options: Any) -> None:
    """Write the ported programs; the port of a folder includes copies of its other files."""
    [first, *_] = options.program
    output: Path | None = options.output
    folder = output if first.is_dir() else None
    if folder:
        shutil.copytree(first, folder)
    for path, ported in ports.items():
        if ported.code == path.read_text(encoding="utf-8"):
            continue
        if folder:
            _write(path, ported.code, folder / path.relative_to(first))
        elif output:
            _write(path, ported.code, output)
        elif options.in_place:
            shutil.copy2(path, _backup_path(path))
            _write(path, ported.code, path)


def _write(path: Path, code: str, target: Path) -> None:
    """Write the port atomically."""
    descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(code)
        shutil.copymode(path, name)
        os.replace(name, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        raise


def _show(
    console: Console, ports: dict[Path, Any], failures: dict[Path, str], options: Any
) -> None:
    for path, ported in ports.items():
        if options.diff:
            _show_diff(console, path, path.read_text(encoding="utf-8"), ported.code)
        _show_marks(console, path, ported)
    for path, words in failures.items():
        console.print(Text(f"{path}: not ported: {words}", "red"), soft_wrap=True)
    _show_summary(console, ports)


def _show_diff(console: Console, path: Path, old: str, new: str) -> None:
    lines = difflib.unified_diff(
        old.splitlines(keepends=True), new.splitlines(keepends=True), str(path), f"{path} (ported)"
    )
    text = "".join(lines)
    if console.is_terminal:
        console.print(Syntax(text, "diff", theme="ansi_dark", background_color="default"))
    else:
        sys.stdout.write(text)


def _show_marks(console: Console, path: Path, ported: Any) -> None:
    if not (ported.changes or ported.marks):
        console.print(Text(f"{path}: nothing of TensorFlow is in it."), soft_wrap=True)
        return
    left = [mark for mark in ported.marks if mark.is_left]
    looks = [mark for mark in ported.marks if not mark.is_left]
    changed = sum(ported.changes.values())
    to_jax = sum(n for (_, new), n in ported.changes.items() if not new.startswith("rx."))
    console.print(
        Text(
            f"{path}: {changed} places are rewritten, {changed - to_jax} for replicax and {to_jax}"
            f" for JAX or NumPy; {len(looks)} to look at, {len(left)} left."
        ),
        soft_wrap=True,
    )
    if not ported.marks:
        return
    table = Table("line", "name", "what to know", show_lines=False)
    for mark in ported.marks:
        style = "red" if mark.is_left else "yellow"
        what = f"{'left' if mark.is_left else 'look'}: {mark.words}"
        what += f"\n{mark.code}" if mark.code else ""
        table.add_row(str(mark.line), Text(mark.name, style), Text(what))
    console.print(table)


def _counts(ported: Any) -> dict[str, int]:
    """Return how many uses of TensorFlow have each outcome, and how many places to look at."""
    found = Counter(use.outcome for use in ported.uses)
    looks = sum(not mark.is_left for mark in ported.marks)
    return {
        "rewritten": found["rewritten"],
        "look": looks,
        "answered": found["answered"],
        "unknown": found["unknown"],
    }


def _show_summary(console: Console, ports: dict[Path, Any]) -> None:
    table = Table("program", "rewritten", "to look at", "left, with an answer", "left, unknown")
    total: Counter[str] = Counter()
    for path, ported in ports.items():
        counts = _counts(ported)
        total.update(counts)
        if any(counts.values()):
            table.add_row(str(path), *map(str, counts.values()))
    if len(ports) > 1:
        table.add_row(
            "all", *(str(total[name]) for name in ("rewritten", "look", "answered", "unknown"))
        )
    if table.row_count:
        console.print(table)


def _as_json(ports: dict[Path, Any], failures: dict[Path, str]) -> dict[str, Any]:
    programs = [
        {
            "program": str(path),
            **_counts(ported),
            "marks": [
                {
                    "line": m.line,
                    "name": m.name,
                    "left": m.is_left,
                    "words": m.words,
                    "code": m.code,
                }
                for m in ported.marks
            ],
        }
        for path, ported in ports.items()
    ]
    names = ("rewritten", "look", "answered", "unknown")
    total = {name: sum(int(str(p[name])) for p in programs) for name in names}
    failed = [{"program": str(path), "words": words} for path, words in failures.items()]
    return {"total": total, "programs": programs, "failed": failed}
