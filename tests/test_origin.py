"""Which code counts as a library: never the user's, wherever the user keeps it."""

import importlib
import json
import sys
import sysconfig
import zipfile
from pathlib import Path

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

import replicax as rx
from replicax._src.base import origin
from tests.fresh_process import run_fresh

PACKAGE = Path(rx.__file__).parent
NAMES = st.sampled_from(
    ["replicax", "replicax_app", "src", "site-packages", "dist-packages", "lib", "python3", "jax"]
)
SITE = sysconfig.get_path("purelib")
ROOTS = st.sampled_from(
    [
        sys.prefix,
        sys.base_prefix,
        f"{SITE}-notes",
        f"{PACKAGE}_app",
        "/home/me",
        str(PACKAGE.parent),
    ]
)


@given(ROOTS, st.lists(NAMES, max_size=3))
def test_a_file_outside_of_library_folders_is_the_users(root, folders):
    file = Path(root, "project", *folders, "train.py")

    assert not origin.is_library(str(file))


@pytest.mark.parametrize("module", [rx, jax, np, pytest, zipfile], ids=lambda m: m.__name__)
def test_installed_modules_are_libraries(module):
    assert origin.is_library(module.__file__)


def test_a_file_that_no_installed_distribution_ships_is_the_users():
    assert not origin.is_library(str(Path(SITE, "copied_by_hand", "train.py")))


def install(site: Path, name: str, *, from_folder: bool) -> Path:
    """Install a package as pip does: its files, and a record of where they come from."""
    info = site / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    info.joinpath("METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    info.joinpath("top_level.txt").write_text(f"{name}\n")
    if from_folder:
        info.joinpath("direct_url.json").write_text('{"url": "file:///x", "dir_info": {}}')
    file = site / f"{name}.py"
    file.write_text("scale = 2\ndef double(x):\n    return x * scale\n")
    return file


@pytest.mark.parametrize("from_folder", [True, False])
def test_a_project_installed_from_a_folder_is_the_users(tmp_path, monkeypatch, from_folder):
    file = install(tmp_path, f"project_{from_folder}".lower(), from_folder=from_folder)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(origin, "_site_folders", lambda: (str(tmp_path),))
    origin.is_library.cache_clear()
    origin._names_by_package.cache_clear()

    try:
        assert origin.is_library(str(file)) is not from_folder
    finally:
        origin.is_library.cache_clear()
        origin._names_by_package.cache_clear()


PROGRAM = """
import sys
sys.path.insert(0, {folder!r})
import helper, replicax as rx
print(int(rx.data.Dataset.range(3).map(helper.double).fingerprint()))
"""


@pytest.mark.parametrize("folder", ["inside_the_prefix", "replicax_app"])
def test_changed_code_in_a_project_under_a_librarys_prefix_is_seen(tmp_path, folder):
    # A process whose prefix is the folder that the project lives in.
    project = tmp_path / folder / "project"
    project.mkdir(parents=True)
    program = f"import sys; sys.prefix = {str(project.parent)!r}\n" + PROGRAM.format(
        folder=str(project)
    )
    seen = []
    for factor in (2, 3):
        (project / "helper.py").write_text(
            f"scale = {factor}\ndef double(x):\n    return x * scale\n"
        )
        done = run_fresh(program, PYTHONDONTWRITEBYTECODE="1")
        assert done.returncode == 0, done.stderr
        seen.append(int(done.stdout))

    assert seen[0] != seen[1]


REACHED = """
import {package} as helper, {package}.inner, json, replicax as rx
from {package} import (Color, Pair, Point, Row, Scale, Scaled, double, nested)
from {package}.inner import thrice

def imported(x):
    from {package} import double
    return double(x)

def imported_module(x):
    import {package}.inner
    return {package}.inner.thrice(x)

ways = {{
    "function": double,
    "function of a module": lambda x: helper.double(x),
    "function of an inner module": lambda x: helper.inner.thrice(x),
    "number of a module": lambda x: x * helper.scale,
    "static method": lambda x: Scale.double(x),
    "class of a module": lambda x: helper.Scale()(x),
    "method of a class": lambda x: Scale()(x),
    "base class": lambda x: Scaled()(x),
    "enum": lambda x: x * Color.RED.value,
    "dataclass": lambda x: Point(x)(),
    "instance of a dataclass": Point(2).times,
    "attrs class": lambda x: Pair(x).times(),
    "named tuple": lambda x: Row(x).double(),
    "function that calls a module": nested,
    "imported": imported,
    "imported module": imported_module,
    "ellipsis": lambda x: double(x)[..., None],
}}
found = {{k: rx.data.Dataset.range(3).map(way).fingerprint() for k, way in ways.items()}}
print(json.dumps({{name: int(value) for name, value in found.items()}}))
"""
HELPER = """
import attrs, dataclasses, enum, typing
from . import inner
scale = {factor}
def double(x):
    return x * {factor}
def nested(x):
    return inner.thrice(x)
class Scale:
    static = property(lambda self: 1)
    @staticmethod
    def double(x):
        return x * {factor}
    def __call__(self, x):
        return x * {factor}
class Scaled(Scale):
    pass
class Color(enum.Enum):
    RED = {factor}
@dataclasses.dataclass
class Point:
    at: object
    others: list = dataclasses.field(default_factory=list)
    def __call__(self):
        return self.at * {factor}
    def times(self, x):
        return x * self()
@attrs.define
class Pair:
    at: object
    others: list = attrs.Factory(list)
    def times(self):
        return self.at * {factor}
class Row(typing.NamedTuple):
    x: object
    def double(self):
        return self.x * {factor}
"""


def test_fingerprints_see_changed_code_however_a_function_reaches_it(tmp_path):
    package = "helping"
    (tmp_path / package).mkdir()

    def run(factor):
        folder = tmp_path / package
        (folder / "__init__.py").write_text(HELPER.format(factor=factor))
        (folder / "inner.py").write_text(f"def thrice(x):\n    return x * {factor}\n")
        program = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        done = run_fresh(program + REACHED.format(package=package), PYTHONDONTWRITEBYTECODE="1")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    first, same, other = run(2), run(2), run(3)

    assert same == first  # in another process
    assert [way for way in first if first[way] == other[way]] == []


def test_a_fingerprint_sees_the_end_of_a_long_chain_of_functions():
    def chain(end):
        made = {"end": lambda x: x * end}
        for i in range(300):
            following = f"f{i - 1}" if i else "end"
            exec(f"def f{i}(x): return {following}(x)", made)
        return rx.data.Dataset.range(3).map(made["f299"]).fingerprint()

    assert chain(2) == chain(2)
    assert chain(2) != chain(3)


@pytest.mark.parametrize("name", ["sched", "netrc"])
def test_a_users_module_may_have_a_name_of_the_standard_library(tmp_path, monkeypatch, name):
    (tmp_path / f"{name}.py").write_text(
        """
import collections
class Unit(float):
    __slots__ = ("scale",)
class Deck(collections.deque):
    __slots__ = ("scale",)
class Table(dict):
    __slots__ = ("scale",)
class Config:
    def __eq__(self, other):
        return isinstance(other, Config)
    def __hash__(self):
        return 1
"""
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, name, raising=False)
    users = importlib.import_module(name)
    monkeypatch.setitem(sys.modules, name, users)
    function = rx.function(lambda x, config: x * config.scale)
    strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    batches = strategy.experimental_distribute_dataset(rx.data.Dataset.range(8).batch(2))
    found, in_replicas = [], []

    for kind in (users.Unit, users.Deck, users.Table, users.Config):
        for scale in (2, 3):
            config = kind()
            config.scale = scale
            found.append(int(function(jnp.ones((), int), config)))

    @rx.function
    def epoch():
        config, iterator = users.Config(), iter(batches)
        for config.scale in (2, 3, 4):
            ones = strategy.run(lambda x: config.scale + x[:0].sum(), (next(iterator),))
            in_replicas.append(int(strategy.experimental_local_results(ones)[0]))

    epoch()

    assert not origin.is_standard_module(name)
    assert found == [2, 3] * 4
    assert in_replicas == [2, 3, 4]
