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

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
]
myst_enable_extensions = ["colon_fence"]
# Copies of code have no prompts and no output.
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True
exclude_patterns = ["_build", "adr/0000-template.md"]
myst_heading_anchors = 3
suppress_warnings = ["myst.header", "ref.python"]  # two strategies of one name: v1 and today's
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_inherit_docstrings = True
python_maximum_signature_line_length = 88  # longer ones have a line for each argument
toc_object_entries_show_parents = "hide"
napoleon_google_docstring = True
napoleon_use_ivar = True
default_role = "code"

html_theme = "furo"
html_title = "replicax"
html_static_path = ["_static"]
html_favicon = "_static/favicon.svg"
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

# Members for other modules of replicax, which no program needs.
_INTERNAL = frozenset(
    """across add_rows admit allows_dynamic_batch backend_cls between_graph cell compiles_runs
    component components consume devices_or_default divided follows for_variables form
    has_logical_devices has_rows is_local_mean is_uneven is_used is_written left_out meeting_port
    node note_local_mean note_read of origin overlay peek position reaches record reduce_value sheet
    total_of train_func_context whole wraps_single""".split()
)


def _skip(app: Any, what: str, name: str, value: Any, skip: bool, options: Any) -> bool | None:
    """Leave internal members out of the reference."""
    found = getattr(value, "fget", value)
    is_ours = str(getattr(found, "__module__", "replicax._src")).startswith("replicax._src")
    return True if is_ours and name in _INTERNAL else None


def _base(value: type, known: dict[int, str]) -> type | None:
    """Return the documented base class of a class, whose page has the inherited members."""
    return next((b for b in value.__mro__[1:] if id(b) in known), None)


def _from_others(value: type, base: type) -> list[str]:
    """Return the public members of a class that it takes from a base class or its bases."""
    order = value.__mro__
    names = (name for name in dir(base) if not name.startswith("_"))
    return [n for n in names if order.index(_defining(value, n)) >= order.index(base)]


def _inherited(value: type, base: type, known: dict[int, str]) -> list[str]:
    """Name the members that other pages describe, with links to them."""
    kinds = (types.FunctionType, property, classmethod, staticmethod)
    members = {name: inspect.getattr_static(base, name) for name in _from_others(value, base)}
    names = [
        name
        for name, member in members.items()
        if isinstance(member, kinds)
        and name not in _INTERNAL
        and _defining(base, name).__module__.startswith("replicax")
        and inspect.getdoc(member)
    ]
    pages = {name: known[id(_described_by(base, name, known))] for name in names}
    links = ", ".join(f":obj:`~{page}.{name}`" for name, page in pages.items())
    return [f"Members of :class:`~{known[id(base)]}`{': ' if links else ''}{links}.", ""]


def _defining(value: type, name: str) -> type:
    return next(base for base in value.__mro__ if name in vars(base))


def _described_by(value: type, name: str, known: dict[int, str]) -> type:
    """Return the class whose page describes a member of a class."""
    base, order = _base(value, known), value.__mro__
    if base is None or order.index(_defining(value, name)) < order.index(base):
        return value
    return _described_by(base, name, known)


def _class_page(path: str, value: Any, known: dict[int, str]) -> str:
    value.__name__ = path.rpartition(".")[2]  # what users call it; or it counts as an alias
    base = _base(value, known)
    head = [":nosearch:", ""] if ".compat." in path else []  # search finds today's form instead
    lines = [*head, value.__name__, "=" * len(value.__name__), ""]
    lines += [f".. autoclass:: {path}", "   :members:"]
    # Members of private bases belong here; those of the documented one are on its page.
    lines += [f"   :inherited-members: {_BASES}"]
    if base is not None:
        lines += [f"   :exclude-members: {', '.join(_from_others(value, base))}"]
    lines += [""]
    if base is not None:
        lines += _inherited(value, base, known)
    return "\n".join(lines)


def _entry(name: str, value: Any) -> list[str]:
    if callable(value):
        return [f".. autofunction:: {name}", ""]
    return [f".. autodata:: {name}", "   :no-value:", ""]


def _foreign_name(value: Any) -> str | None:
    """Return the full name of a class or function of another library: it documents them."""
    if not callable(value) or value.__module__.startswith("replicax"):
        return None
    package, name = value.__module__.partition(".")[0], value.__name__.rpartition(".")[2]
    is_public = getattr(sys.modules.get(package), name, None) is value
    return f"{package if is_public else value.__module__}.{name}"


def _page(name: str, module: Any, known: dict[int, str]) -> tuple[str, list[tuple[str, Any]]]:
    """Return the page of a namespace, and the classes that get pages of their own."""
    title = name.replace("replicax", "rx", 1)
    head = [":nosearch:", ""] if ".compat" in name else []
    lines = [*head, title, "=" * len(title), "", inspect.getdoc(module) or "", ""]
    classes: list[tuple[str, Any]] = []
    for child in sorted(module.__all__):
        value, path = getattr(module, child), f"{name}.{child}"
        if isinstance(value, types.ModuleType):
            continue
        first = known.setdefault(id(value), path) if callable(value) else path
        if first != path:
            lines += [f"`{path}` is :obj:`{first}`.", ""]
        elif (origin := _foreign_name(value)) is not None:
            lines += [f"`{path}` is `{origin}`.", ""]
        elif inspect.isclass(value):
            classes.append((path, value))
        else:
            lines += _entry(path, value)
    if classes:
        tree = "\n".join(f"   {path}" for path, _ in classes)
        lines += [".. toctree::", "   :maxdepth: 1", "", tree, ""]
    return "\n".join(lines), classes


def _write_reference(app: Any) -> None:
    """One page for each public namespace and each class, made from the lists of names."""
    folder = HERE / "api"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    pages = _public(rx, "replicax", {})
    known: dict[int, str] = {}
    classes: list[tuple[str, Any]] = []
    for name, module in pages.items():
        text, own = _page(name, module, known)
        (folder / f"{name}.rst").write_text(text)
        classes += own
    for path, value in classes:
        (folder / f"{path}.rst").write_text(_class_page(path, value, known))
    tree = "\n".join(f"   {name}" for name in pages)
    (folder / "index.rst").write_text(
        "API reference\n=============\n\nEvery public name.\n\n.. toctree::\n   :maxdepth: 1\n"
        f"\n{tree}\n"
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
    app.connect("autodoc-skip-member", _skip)
