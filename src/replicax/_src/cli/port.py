"""``replicax port train.py``: rewrite a TensorFlow program for replicax."""

import argparse
import contextlib
import difflib
import importlib.util
import os
import shutil
import sys
import tempfile
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

_rewrite = LazyModule("replicax._src.port.rewrite")  # it needs LibCST, an extra


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this subcommand."""
    parser.add_argument("program", nargs="+", type=local_file, help="the programs to port; without"
        " --output and --in-place they are only analyzed")  # fmt: skip
    parser.add_argument("--diff", action="store_true", help="show every changed line")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("-o", "--output", type=local_file, metavar="FILE", help="write the port of"
        " one program there; an existing file is not replaced")  # fmt: skip
    where.add_argument("--in-place", action="store_true", help="replace the programs; each original"
        " is kept next to its port as NAME.orig")  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Port each program and print a summary; return 1 if something is left to do."""
    if importlib.util.find_spec("libcst") is None:
        raise ModuleNotFoundError("This needs LibCST: `pip install 'replicax[port]'`.")
    problem = _invalid_options(options)
    if problem:
        sys.stderr.write(f"replicax port: {problem}\n")
        return 2
    texts = {path: path.read_text() for path in options.program}
    ports = {path: _rewrite.port(text, str(path)) for path, text in texts.items()}
    console, status = Console(), OK
    for path, ported in ports.items():
        if options.diff:
            _show_diff(console, path, texts[path], ported.code)
        _show_summary(console, path, ported)
        if any(mark.is_left for mark in ported.marks):
            status = SOMETHING_LEFT
    for path, ported in ports.items():
        if ported.code != texts[path]:
            _write(path, ported.code, options)
    return status


def _invalid_options(options: argparse.Namespace) -> str:
    if options.output and len(options.program) > 1:
        return "--output names one file, and several programs are given. Use --in-place."
    if options.output and options.output.exists():
        return f"{options.output} exists. Remove it, or choose another --output."
    backups = [
        _backup_path(path)
        for path in options.program
        if options.in_place and _backup_path(path).exists()
    ]
    if backups:
        return f"{backups[0]} exists: an earlier port keeps its program there. Move it away first."
    return ""


def _backup_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.orig")


def _write(path: Path, code: str, options: argparse.Namespace) -> None:
    """Write the port atomically."""
    target = options.output or (path if options.in_place else None)
    if target is None:
        return
    descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with open(descriptor, "w") as file:
            file.write(code)
        shutil.copymode(path, name)
        if options.in_place:
            shutil.copy2(path, _backup_path(path))
        os.replace(name, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        raise


def _show_diff(console: Console, path: Path, old: str, new: str) -> None:
    lines = difflib.unified_diff(
        old.splitlines(keepends=True), new.splitlines(keepends=True), str(path), f"{path} (ported)"
    )
    text = "".join(lines)
    if console.is_terminal:
        console.print(Syntax(text, "diff", theme="ansi_dark", background_color="default"))
    else:
        sys.stdout.write(text)


def _show_summary(console: Console, path: Path, ported: Any) -> None:
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
        what = f"left: {mark.words}" if mark.is_left else f"look: {mark.words}"
        table.add_row(str(mark.line), Text(mark.name, style), Text(what))
    console.print(table)
