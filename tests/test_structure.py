"""The rules of the tree: layers, sizes, public lists, documented names."""

import ast
import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import replicax
from tests.fresh_process import run_fresh

ROOT = Path(__file__).parents[1]
PACKAGE = Path(replicax.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
EXAMPLES = sorted((ROOT / "examples").rglob("*.py"))

MOST_LINES_OF_AN_EXAMPLE = 200
LONGER = {"transformer_tpu.py": 210}  # a whole model, with its layouts

# Packages that are there for users: lists of names. All others are private.
NAMESPACES = (
    "replicax",
    "replicax.compat",
    "replicax.compat.preprocessing",
    "replicax.compat.tf",
    "replicax.compat.tf.bitwise",
    "replicax.compat.tf.debugging",
    "replicax.compat.tf.image",
    "replicax.compat.tf.linalg",
    "replicax.compat.tf.lookup",
    "replicax.compat.tf.math",
    "replicax.compat.tf.nn",
    "replicax.compat.tf.signal",
    "replicax.compat.tf.strings",
    "replicax.compat.tfds",
    "replicax.compat.v1",
    "replicax.compat.v1.data",
    "replicax.compat.v1.distribute",
    "replicax.compat.v1.distribute.experimental",
    "replicax.compat.v1.logging",
    "replicax.compat.v1.losses",
    "replicax.compat.v1.train",
    "replicax.config",
    "replicax.config.experimental",
    "replicax.data",
    "replicax.data.experimental",
    "replicax.debug",
    "replicax.distribute",
    "replicax.distribute.cluster_resolver",
    "replicax.distribute.coordinator",
    "replicax.distribute.experimental",
    "replicax.errors",
    "replicax.extend",
    "replicax.integrations",
    "replicax.integrations.ray",
    "replicax.io",
    "replicax.io.gfile",
    "replicax.metrics",
    "replicax.nest",
    "replicax.nn",
    "replicax.random",
    "replicax.random.experimental",
    "replicax.saved_model",
    "replicax.summary",
    "replicax.summary.experimental",
    "replicax.testing",
    "replicax.tpu",
    "replicax.tpu.experimental",
    "replicax.train",
    "replicax.train.experimental",
)

OPTIONAL_PACKAGES = ("flax", "keras", "optax", "rich", "sklearn", "tensorflow", "torch")


def relative(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def existing_namespaces() -> list[str]:
    inits = {module_name(path) for path in MODULES if path.name == "__init__.py"}
    return [name for name in NAMESPACES if name in inits]


def public_objects(namespace: str) -> Iterator[tuple[str, Any]]:
    """Classes and functions of ours in the list of a namespace, with their full names."""
    module = importlib.import_module(namespace)
    for name in getattr(module, "__all__", ()):
        obj = getattr(module, name, None)
        if isinstance(obj, ModuleType) or not (inspect.isclass(obj) or inspect.isroutine(obj)):
            continue
        if (obj.__module__ or "").startswith("replicax"):
            yield f"{namespace}.{name}", obj


def public_members(cls: type) -> Iterator[tuple[str, Any]]:
    """Methods and properties that the class and its bases of ours define."""
    for base in cls.__mro__:
        if base.__module__.startswith("replicax"):
            for name, member in vars(base).items():
                plain = inspect.unwrap(getattr(member, "__func__", member))
                is_member = inspect.isroutine(plain) or inspect.isdatadescriptor(plain)
                if not name.startswith("_") and is_member:
                    yield name, getattr(cls, name)


ALL_PUBLIC = [pair for namespace in existing_namespaces() for pair in public_objects(namespace)]


def test_imports_point_down_the_layers():
    result = subprocess.run(
        [sys.executable, "-c", "from importlinter import cli; cli.lint_imports_command()"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )

    assert result.returncode == 0, result.stdout + result.stderr


SETTERS = ("set_execution", "set_iteration", "set_default")


def test_one_module_alone_provides_implementations_to_lower_layers():
    """A layer that installs itself into a lower one at import hides a call upward."""
    calling = {
        (node.func.id, relative(path))
        for path in MODULES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }

    assert {c for c in calling if c[0] in SETTERS} == {(s, "_src/wiring.py") for s in SETTERS}


# Which objects of a higher layer a lower one calls in a training step, and what it knows of them.
HIGHER_OBJECTS = {
    ("state", "StrategyBase"): "the protocol AmbientStrategy of context",
    ("context", "StrategyBase"): "the protocol AmbientStrategy of context",
    ("context", "CompiledLink"): "the protocol Link of context",
    ("context", "ThreadLink"): "the protocol Link of context",
    ("base", "Strategy"): "the method that the decorator `requires` wraps",
    ("compat", "SharedPrograms"): "the argument `make` of surround_compiler",
    ("data", "BufferPool"): "the argument `new` of a source",
    ("values", "_Plan"): "the argument `fn` of apply_in_body",
}


def test_lower_layers_call_only_the_interfaces_of_higher_ones():
    """The import linter cannot see that a lower layer calls an object of a higher one."""
    result = run_fresh(
        f"""
        import sys
        sys.path.insert(0, {str(ROOT)!r})
        from benchmarks import layers
        for calls in layers.paths().values():
            for caller, _, function in layers.methods(layers.upward(calls)):
                print(layers.package(caller), function.split(".")[0])
        """,
        REPLICAX_CPU_DEVICES="2",
    )
    found = {tuple(line.split()) for line in result.stdout.splitlines()}

    assert result.returncode == 0, result.stderr
    assert found == set(HIGHER_OBJECTS)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_no_example_is_long(path):
    most = LONGER.get(path.name, MOST_LINES_OF_AN_EXAMPLE)

    assert len(path.read_text().splitlines()) <= most


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_one_module_alone_touches_the_internals_of_jax(path):
    text = path.read_text()

    assert relative(path) == "_src/compat/jax.py" or "jax._src" not in text
    assert relative(path) == "_src/compat/jaxlib.py" or not re.search(
        r"jaxlib(\._jax| import)", text
    )


def test_what_the_page_on_the_architecture_names_is_there():
    folder = ROOT / "docs"
    page = (folder / "architecture.md").read_text()
    linked = re.findall(r"\]\(([^)#:]+)\)", page)
    italic = set(re.findall(r"(?<!\*)\*([a-z][a-z -]*)\*(?!\*)", page)) - {"italics"}
    words = re.findall(r"^\| ([a-z -]+) \|", page[page.index("## Glossary") :], re.M)

    assert [name for name in linked if not (folder / name).exists()] == []
    assert len(linked) > 25
    assert italic <= set(words)


PARTS_OF_JAXPRS = re.compile(
    r"\b(ClosedJaxpr|Jaxpr|JaxprEqn|DropVar|jaxpr_as_fun|jaxprs_in_params|eval_jaxpr"
    r"|eqns|invars|outvars|constvars)\b|jax\.extend\.core import [^\n]*(Literal|Var)\b"
)


def test_one_package_alone_reads_and_rewrites_jaxprs():
    touching = [relative(p) for p in MODULES if PARTS_OF_JAXPRS.search(p.read_text())]

    elsewhere = {p for p in touching if not p.startswith("_src/functions/jaxpr/")}
    # It reads one to see whether this JAX takes variables as arrays.
    assert elsewhere == {"_src/compat/jax.py"}


PRIVATE_PARTS = {
    "_src/integrations/keras_private.py": re.compile(r"\bkeras\.src\b"),
    "_src/integrations/flax_private.py": re.compile(r"\bflax\.nnx\.|from flax\.nnx import"),
    "_src/train/orbax_private.py": re.compile(r"\borbax\.checkpoint\b|\b_ocp\b|\btensorstore\b"),
}


@pytest.mark.parametrize("home", PRIVATE_PARTS)
def test_one_module_alone_names_the_private_parts_of_a_library(home):
    naming = [relative(p) for p in MODULES if PRIVATE_PARTS[home].search(p.read_text())]

    assert set(naming) <= {home}


@pytest.mark.parametrize("library", ["keras", "flax"])
def test_private_attributes_of_a_library_are_in_its_contract(library):
    """Whatever integration code reads of other objects by a private name is a part."""
    stem = {"keras": "keras", "flax": "nnx"}[library]
    importlib.import_module({"keras": "keras", "flax": "flax.nnx"}[library])
    contract = importlib.import_module(f"replicax._src.integrations.{library}_private").CONTRACT
    parts = {part.name for part in contract.parts}
    for path in PACKAGE.glob(f"_src/integrations/{stem}*.py"):
        tree = ast.parse(path.read_text())
        used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        used |= _looked_up(tree)
        private = {name for name in used if re.match("_[^_]", name)}

        assert private - _own_names(tree) - {"_rx"} <= parts, path.name


def _looked_up(tree: ast.Module) -> set[str]:
    """The names by which a module looks into the dicts of objects."""
    keys: list[ast.expr] = [n.slice for n in ast.walk(tree) if isinstance(n, ast.Subscript)]
    keys += [n.left for n in ast.walk(tree) if isinstance(n, ast.Compare)]
    keys += [a for n in ast.walk(tree) if isinstance(n, ast.Call) for a in n.args[:2]]
    return {x.value for x in keys if isinstance(x, ast.Constant) and isinstance(x.value, str)}


def _own_names(tree: ast.Module) -> set[str]:
    """The attributes and methods that classes of a module define."""
    found = set()
    for cls in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        for node in ast.walk(cls):
            if isinstance(node, ast.FunctionDef):
                found.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found |= {node.attr} if getattr(node.value, "id", "") == "self" else set()
    return found


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_no_module_prints_or_leaves_something_to_do(path):
    text = path.read_text()
    calls = [node.func for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]

    assert not [f for f in calls if isinstance(f, ast.Name) and f.id == "print"]
    assert "TODO" not in text
    assert "FIXME" not in text


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_every_module_says_what_it_is(path):
    assert ast.get_docstring(ast.parse(path.read_text()))


@pytest.mark.parametrize(
    "path", [path for path in MODULES if path.name == "__init__.py"], ids=relative
)
def test_a_package_is_a_list_of_names(path):  # noqa: C901 - one case for each kind of line
    for node in ast.parse(path.read_text()).body[1:]:
        match node:
            case ast.Import() | ast.ImportFrom():
                continue
            case ast.Assign(targets=[ast.Name(id="__all__" | "__version__")]):
                continue
            case ast.Assign(targets=[ast.Name()], value=ast.Name()):  # a second name for the same
                continue
            # Where names are that are imported on demand, and what to use in place of names of
            # TensorFlow that are left out.
            case ast.Assign(targets=[ast.Name(id="_HOMES" | "_CONTROL" | "_ABSENT")]):
                continue
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                continue
            # Type checkers see every name by its import, and no other.
            case ast.If(
                test=ast.UnaryOp(op=ast.Not(), operand=ast.Name(id="TYPE_CHECKING")),
                body=[
                    ast.Assign(
                        targets=[ast.Name(id="__getattr__")],
                        value=ast.Call(func=ast.Name(id="on_demand")),
                    )
                    | ast.ImportFrom(names=[ast.alias(asname="__getattr__")])
                ],
            ):
                continue
            case ast.Assign(targets=[ast.Name(id="__dir__")], value=ast.Attribute(attr="copy")):
                continue
            case ast.Expr(
                value=ast.Call(
                    func=ast.Name(
                        id="prepare_environment"
                        | "refuse_shadow"
                        | "connect_layers"
                        | "install_handler"
                        | "join_libraries"
                        | "accept_symbolic"
                    )
                )
            ):
                continue
        pytest.fail(f"line {node.lineno} is neither an import nor the list of names")


def test_modules_with_code_are_in_src():
    code = [relative(path) for path in MODULES if path.name != "__init__.py"]

    assert [name for name in code if not name.startswith("_src/")] == ["__main__.py"]


def test_every_list_of_names_is_a_known_namespace():
    lists = [
        module_name(path)
        for path in MODULES
        if path.name == "__init__.py" and "__all__" in path.read_text()
    ]

    assert set(lists) <= set(NAMESPACES)


@pytest.mark.parametrize("namespace", existing_namespaces())
def test_the_names_of_a_namespace_exist_and_are_sorted(namespace):
    module = importlib.import_module(namespace)
    names = list(getattr(module, "__all__", ()))

    assert [name for name in names if not hasattr(module, name)] == []
    assert names == sorted(set(names), key=_list_order)


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_docstrings_are_sentences(path):
    nodes = [
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    ]

    assert [n.name for n in nodes if ast.get_docstring(n) in ("None.", "Nothing.", "...")] == []


def test_the_modules_that_the_pages_name_are_there():
    pages = [ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md"), *ROOT.glob("docs/adr/*.md")]
    path = re.compile(r"`(?:src/replicax/)?(_src/(?:[a-z_0-9]+/)+[a-z_0-9]+\.py)`")
    named = {(page.name, name) for page in pages for name in path.findall(page.read_text())}

    assert named
    assert [pair for pair in sorted(named) if not (PACKAGE / pair[1]).is_file()] == []


def test_no_two_classes_have_one_name_but_those_that_users_know_by_it():
    places: dict[str, list[str]] = {}
    for path in MODULES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(module_name(path))
    public = {(obj.__name__, obj.__module__) for _, obj in ALL_PUBLIC}

    assert {
        name: homes
        for name, homes in places.items()
        if len(homes) > 1 and not all((name, home) in public for home in homes)
    } == {}


def test_no_package_is_also_a_function():
    packages = [path.parent.name for path in PACKAGE.glob("*/__init__.py")]

    assert [name for name in packages if callable(getattr(replicax, name, None))] == []


@pytest.mark.parametrize("namespace", existing_namespaces())
def test_completion_shows_the_names_of_a_namespace_and_no_others(namespace):
    module = importlib.import_module(namespace)

    assert dir(module) == sorted(module.__all__)


def _list_order(name: str) -> tuple[int, str]:
    """Constants, then classes, then functions: the order that ruff keeps too."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2), name


@pytest.mark.parametrize(("name", "obj"), ALL_PUBLIC, ids=[name for name, _ in ALL_PUBLIC])
def test_a_public_name_is_documented_with_an_example(name, obj):
    text = inspect.getdoc(obj) or ""

    assert text, f"{name} has no docstring"
    assert not text.startswith(f"{name.rpartition('.')[2]}("), f"{name} has a generated docstring"
    assert ">>>" in text, f"{name} has no example"


@pytest.mark.parametrize(
    ("name", "cls"),
    [(name, obj) for name, obj in ALL_PUBLIC if inspect.isclass(obj)],
    ids=[name for name, obj in ALL_PUBLIC if inspect.isclass(obj)],
)
def test_every_method_of_a_public_class_is_documented(name, cls):
    assert [member for member, value in public_members(cls) if not inspect.getdoc(value)] == []


def test_importing_needs_no_optional_package():
    result = run_fresh(f"""
        import sys
        import replicax
        print(*(set(sys.modules) & {set(OPTIONAL_PACKAGES)}))
    """)

    assert (result.returncode, result.stdout.split()) == (0, []), result.stderr
