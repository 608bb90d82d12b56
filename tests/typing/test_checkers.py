"""What mypy and pyright say: of programs that are right, and of each line that is wrong."""

import importlib
import inspect
import json
import keyword
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.test_structure import existing_namespaces, public_members

ROOT = Path(__file__).parents[2]
PROGRAMS = [Path(__file__).with_name(f"{name}.py") for name in ("accepted", "rejected")]
MARK = "# wrong"


def mypy(files: list[Path], folder: Path) -> Iterator[tuple[Path, int, str]]:
    """What it objects to."""
    options = ["--config-file", ROOT / "pyproject.toml", "--follow-imports=silent"]
    said = run("mypy", *options, "--no-error-summary", *files, MYPYPATH=str(ROOT / "src"))
    for line in said.splitlines():
        if found := re.match(r"(.*?):(\d+): error: (.*)", line):
            yield (ROOT / found[1]).resolve(), int(found[2]), found[3]


def pyright(files: list[Path], folder: Path) -> Iterator[tuple[Path, int, str]]:
    """What it objects to."""
    settings = {
        "include": [file.name for file in files],
        "extraPaths": [str(ROOT / "src")],
        "pythonVersion": "3.11",
        "typeCheckingMode": "standard",
    }
    config = folder / "pyrightconfig.json"
    config.write_text(json.dumps(settings))
    python = ["--pythonpath", sys.executable]
    told = json.loads(run("pyright", "-p", config, *python, "--outputjson"))
    for one in told["generalDiagnostics"]:
        if one["severity"] == "error":
            line = one["range"]["start"]["line"] + 1
            yield Path(one["file"]).resolve(), line, one["message"]


def run(checker: str, *arguments: object, **environment: str) -> str:
    """What a checker prints."""
    result = subprocess.run(
        [sys.executable, "-m", checker, *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1", **environment},
        capture_output=True,
        text=True,
    )
    assert result.returncode in (0, 1), result.stdout + result.stderr
    return result.stdout


@pytest.mark.parametrize("checker", [mypy, pyright])
def test_type_checkers_know_every_public_name_and_reject_what_is_wrong(checker, tmp_path):
    names = tmp_path / "names.py"
    names.write_text("\n".join(["import replicax as rx", *lines_of_names()]) + "\n")
    files = [names, *(Path(shutil.copy(program, tmp_path)) for program in PROGRAMS)]

    objected: dict[tuple[str, int], str] = {}
    for path, line, message in checker(files, tmp_path):
        objected.setdefault((path.name, line), message)

    wrong = {(file.name, line): text for file in files for line, text in marked(file)}
    refused = [f"{place}: {objected[place]}" for place in sorted(objected.keys() - wrong.keys())]
    accepted = [f"{place}: {wrong[place]}" for place in sorted(wrong.keys() - objected.keys())]
    assert not [*refused, *accepted], "\n".join(["refused:", *refused, "accepted:", *accepted])
    assert len(wrong) > 1000


def marked(file: Path) -> Iterator[tuple[int, str]]:
    """The lines that must be rejected."""
    for number, line in enumerate(file.read_text().splitlines(), start=1):
        if line.endswith(MARK):
            yield number, line


def lines_of_names() -> Iterator[str]:
    """A line for each public name and member, and one for each with a letter lost."""
    for namespace in existing_namespaces():
        module = importlib.import_module(namespace)
        place = namespace.replace("replicax", "rx", 1)
        yield from accesses(place, module.__all__)
        for name in module.__all__:
            one = getattr(module, name)
            if inspect.isclass(one) and one.__module__.startswith("replicax"):
                members = {member for member, _ in public_members(one)} | declared(one)
                argument = f"{place}.{name}".replace(".", "_")
                yield f"def of_{argument}(it: {place}.{name}) -> None:"
                yield "    del it" if not members else "    # its members"
                yield from (f"    {line}" for line in accesses("it", members))
            assert not isinstance(one, ModuleType) or name == "keras" or one.__all__


def declared(kind: type) -> set[str]:
    """The fields of options and messages, which no descriptor of the class shows."""
    tables = (getattr(kind, table, ()) for table in ("_fields", "_aliases", "_parts"))
    return {name for table in tables for name in table}


def accesses(place: str, names: Iterable[str]) -> Iterator[str]:
    """The names of a place, each right and each wrong."""
    known = set(names)
    for name in sorted(known):
        yield f"{place}.{name}"
        yield f"{place}.{misspelt(name, known)}  {MARK}"


def misspelt(name: str, known: set[str]) -> str:
    """The name with a letter lost, or doubled if that makes another name."""
    middle = len(name) // 2
    lost = name[:middle] + name[middle + 1 :]
    is_wrong_name = len(lost) > 1 and lost not in known and not keyword.iskeyword(lost)
    return lost if is_wrong_name else name[: middle + 1] + name[middle:]
