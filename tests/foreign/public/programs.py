"""Public example programs: where they are, and their source as a list of statements."""

import ast
import importlib.util
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# A folder with these files is one program: `train.train_and_evaluate(config, workdir)`.
_FOLDER_PROGRAM = ("train.py", "configs/default.py")
# Lines of a notebook that are not Python.
_MAGIC = re.compile(r"^(\s*)[!%].*$", re.MULTILINE)
# Modules that a folder of programs imports; they train nothing.
_NOT_PROGRAMS = re.compile(r"(^|/)(__init__|conftest|\w+_test|test_\w+|launch_gce)\.py$")

_BACKEND = re.compile(r"""environ\[["']KERAS_BACKEND["']\]\s*=\s*["'](\w+)["']""")
_DEVICES = re.compile(r"""(?:platform_device_count=|jax_num_cpu_devices["'],\s*)(\d+)""")
# Packages that `sources` replaces: they download, or they show results to a person.
STAND_INS = (
    "tensorflow_datasets",
    "datasets",
    "torchvision",
    "IPython",
    "tensorboardX",
    "treescope",
)


@dataclass(frozen=True)
class Program:
    """A program of a library's documentation.

    Attributes:
        library: "keras", "flax" or "equinox".
        root: The folder that the user names.
        path: The file, or the folder of a program of several files, relative to ``root``.
    """

    library: str
    root: Path
    path: str

    @property
    def name(self) -> str:
        """A name that is unique among all libraries."""
        return f"{self.library}/{self.path}"

    @property
    def file(self) -> Path:
        """The file or folder."""
        return self.root / self.path

    def source(self) -> str:
        """Return the program as Python."""
        if self.file.is_dir():
            return _DRIVER
        text = self.file.read_text()
        return "\n".join(_cells(text)) if self.path.endswith(".ipynb") else text

    def folder(self) -> Path:
        """Return the folder that the program imports its own modules from."""
        return self.file if self.file.is_dir() else self.file.parent


# As the program's `main.py` does, without its command line.
_DRIVER = """\
import tempfile
import train
from configs import default
config = default.get_config()
train.train_and_evaluate(config, tempfile.mkdtemp())
"""


def _cells(text: str) -> Iterator[str]:
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        source = source.partition("\n")[2] if source.startswith("%%time") else source
        source = _MAGIC.sub(r"\1pass", source)
        if cell["cell_type"] == "code" and _parses(source):
            yield source


def _parses(source: str) -> bool:
    # IPython would show the error and go on with the next cell.
    try:
        ast.parse(source)
    except SyntaxError:
        return False
    return True


def missing_package(program: Program) -> str | None:
    """Return a package that the program imports at its top level and that is not installed."""
    for statement in statements(program).body:
        for name in _imported(statement):
            package = name.split(".")[0]
            local = program.folder() / package
            if local.exists() or local.with_suffix(".py").exists() or package in STAND_INS:
                continue
            if importlib.util.find_spec(package) is None:
                return package
    return None


def needs_other_backend(program: Program) -> str | None:
    """Return the backend of Keras that a program cannot do without, if it is not JAX."""
    if program.library != "keras":
        return None
    for node in ast.walk(statements(program)):
        if isinstance(node, ast.Attribute) and node.attr == "GradientTape":
            return "tensorflow"
    return "torch" if asked_backend(program) == "torch" else None


def asked_backend(program: Program) -> str | None:
    """Return the backend of Keras that a program sets."""
    found = _BACKEND.search(program.source())
    return found[1] if found else None


def asked_devices(program: Program) -> int:
    """Return how many virtual devices a program asks JAX for."""
    return max(map(int, _DEVICES.findall(program.source())), default=0)


def _imported(statement: ast.stmt) -> list[str]:
    if isinstance(statement, ast.Import):
        return [alias.name for alias in statement.names]
    if isinstance(statement, ast.ImportFrom) and not statement.level:
        return [statement.module or ""]
    return []


def statements(program: Program) -> ast.Module:
    """Parse a program."""
    return ast.parse(program.source(), filename=str(program.file))


def discover(library: str, root: Path) -> list[Program]:
    """Return the programs of a library: those written for JAX first, then the smallest."""
    return sorted(
        _FINDERS[library](root),
        key=lambda program: (
            asked_backend(program) not in (None, "jax"),
            len(program.source()),
            program.path,
        ),
    )


def _keras(root: Path) -> Iterator[Program]:
    # The notebooks of keras-io are made of its scripts.
    for part in ("examples", "guides"):
        yield from _scripts("keras", root, part)


def _flax(root: Path) -> Iterator[Program]:
    folders = sorted(p.parent for p in root.glob(f"examples/*/{_FOLDER_PROGRAM[0]}"))
    folders = [p for p in folders if all((p / name).exists() for name in _FOLDER_PROGRAM)]
    for folder in folders:
        yield Program("flax", root, str(folder.relative_to(root)))
    for program in _scripts("flax", root, "examples"):
        if not any(program.file.is_relative_to(folder) for folder in folders):
            yield program
    yield from _notebooks("flax", root, "docs_nnx")


def _equinox(root: Path) -> Iterator[Program]:
    examples = "docs/examples" if (root / "docs/examples").exists() else "examples"
    yield from _notebooks("equinox", root, examples)


def _scripts(library: str, root: Path, part: str) -> Iterator[Program]:
    for path in sorted((root / part).rglob("*.py")):
        if not _NOT_PROGRAMS.search(str(path)) and "configs" not in path.parts:
            yield Program(library, root, str(path.relative_to(root)))


def _notebooks(library: str, root: Path, part: str) -> Iterator[Program]:
    for path in sorted((root / part).rglob("*.ipynb")):
        yield Program(library, root, str(path.relative_to(root)))


_FINDERS = {"keras": _keras, "flax": _flax, "equinox": _equinox}
LIBRARIES = tuple(_FINDERS)
