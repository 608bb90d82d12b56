"""The documentation site: `make docs` writes it to docs/_build; warnings are errors."""

import inspect
import shutil
import sys
import types
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "src"))

import replicax as rx  # noqa: E402 - after its path

project = "replicax"
author = project_copyright = "the replicax authors"
version = release = rx.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build", "adr/0000-template.md"]
myst_heading_anchors = 3
suppress_warnings = ["myst.header", "ref.python"]  # two strategies of one name: v1 and today's
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_inherit_docstrings = True
napoleon_google_docstring = True
napoleon_use_ivar = True
default_role = "code"

html_theme = "furo"
html_title = "replicax"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_theme_options = {"sidebar_hide_name": False, "navigation_with_keys": True}


def _public(module: Any, name: str, found: dict[str, Any]) -> dict[str, Any]:
    """Every public namespace, by its public name; the older forms of the API last."""
    found.setdefault(name, module)
    for child in sorted(module.__all__, key=lambda n: (n == "compat", n == "experimental", n)):
        value = getattr(module, child)
        is_ours = isinstance(value, types.ModuleType) and value.__name__.startswith("replicax")
        if is_ours and value not in found.values():
            _public(value, f"{name}.{child}", found)
    return found


_BASES = "object, int, str, tuple, Exception, BaseException, Enum, IntEnum"


def _entry(name: str, value: Any) -> list[str]:
    if inspect.isclass(value):
        value.__name__ = name.rpartition(".")[2]  # what users call it; or it counts as an alias
        return [f".. autoclass:: {name}", "   :members:", f"   :inherited-members: {_BASES}", ""]
    if callable(value):
        return [f".. autofunction:: {name}", ""]
    return [f".. autodata:: {name}", "   :no-value:", ""]


def _page(name: str, module: Any, known: dict[int, str]) -> str:
    title = name.replace("replicax", "rx", 1)
    lines = [title, "=" * len(title), "", inspect.getdoc(module) or "", ""]
    for child in sorted(module.__all__):
        value, path = getattr(module, child), f"{name}.{child}"
        if isinstance(value, types.ModuleType):
            continue
        first = known.setdefault(id(value), path) if callable(value) else path
        lines += _entry(path, value) if first == path else [f"`{path}` is :obj:`{first}`.", ""]
    return "\n".join(lines)


def _write_reference(app: Any) -> None:
    """One page for each public namespace, made from its list of names."""
    folder = HERE / "api"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    pages = _public(rx, "replicax", {})
    known: dict[int, str] = {}
    for name, module in pages.items():
        (folder / f"{name}.rst").write_text(_page(name, module, known))
    tree = "\n".join(f"   {name}" for name in pages)
    (folder / "index.rst").write_text(
        f"API reference\n=============\n\nEvery public name.\n\n.. toctree::\n\n{tree}\n"
    )


def _without_last_blank_lines(app: Any, name: str, source: list[str]) -> None:
    """Remove the trailing blank lines in examples, which only doctest needs."""
    lines: list[str] = []
    is_open = False
    for line in source[0].split("\n"):
        if line.startswith("```"):
            while is_open and not lines[-1].strip():
                lines.pop()
            is_open = not is_open
        lines.append(line)
    source[0] = "\n".join(lines)


def setup(app: Any) -> None:
    """Make the pages of the reference before Sphinx looks for pages."""
    _write_reference(app)
    app.connect("source-read", _without_last_blank_lines)
