"""The supported versions are the same wherever the project states them."""

import re
import tomllib
from importlib.metadata import version
from itertools import product
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PYTHONS = sorted(path.stem for path in (ROOT / "constraints").glob("*.txt"))

# The first Python on which a minor version of JAX installs, by the metadata of its wheel.
FIRST_PYTHON = {"0.10": "3.11", "0.11": "3.12", "0.12": "3.12"}


def pins(python: str) -> dict[str, str]:
    lines = (ROOT / "constraints" / f"{python}.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if not line.startswith("#")]
    return {canonicalize_name(name): pinned for name, pinned in pairs}


def pairs() -> set[tuple[str, str]]:
    return {(p, j) for p, (j, first) in product(PYTHONS, FIRST_PYTHON.items()) if p >= first}


def requirements() -> list[Requirement]:
    extras = PROJECT["optional-dependencies"]
    lines = PROJECT["dependencies"] + [line for name in extras for line in extras[name]]
    return [Requirement(line) for line in lines]


def test_constraints_cover_the_pythons_of_the_classifiers():
    found = re.findall(r":: (3\.\d+)", "\n".join(PROJECT["classifiers"]))

    assert sorted(found) == PYTHONS
    assert PROJECT["requires-python"] == f">={PYTHONS[0]}"


@pytest.mark.parametrize("python", PYTHONS)
def test_constraints_lie_within_the_ranges_of_pyproject(python):
    pinned = pins(python)

    for requirement in requirements():
        name = canonicalize_name(requirement.name)
        if name in pinned:
            assert requirement.specifier.contains(pinned[name]), (requirement, pinned[name])
    newest = max(jax for p, jax in pairs() if p == python)
    assert pinned["jax"].startswith(f"{newest}.")


def test_jax_range_is_the_minor_versions_that_are_tested():
    (jax,) = [Requirement(d) for d in PROJECT["dependencies"] if d.startswith("jax")]

    for minor in range(30):
        assert jax.specifier.contains(f"0.{minor}.0") == (f"0.{minor}" in FIRST_PYTHON)
    assert jax.specifier.contains(version("jax"), prereleases=True)


def test_workflow_runs_every_pair():
    yaml = pytest.importorskip("yaml")
    if not (ROOT / ".github").exists():
        pytest.skip("an sdist has no workflows")
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    matrix = jobs["jax"]["strategy"]["matrix"]
    added = {(pair["python-version"], pair["jax"]) for pair in matrix["include"]}

    assert set(product(matrix["python-version"], matrix["jax"])) | added == pairs()
    assert jobs["test"]["strategy"]["matrix"]["python-version"] == PYTHONS


def test_the_page_of_versions_has_every_pair():
    if not (ROOT / "docs").exists():
        pytest.skip("an sdist has no pages")
    rows = (ROOT / "docs" / "versions.md").read_text().splitlines()
    head = next(row for row in rows if row.startswith("| Python |"))
    jaxes = re.findall(r"JAX (\d+\.\d+)", head)
    cells = {row.split("|")[1].strip(): row.split("|")[2:-1] for row in rows if row[:4] == "| 3."}

    assert jaxes == list(FIRST_PYTHON)
    assert list(cells) == PYTHONS
    for python, found in cells.items():
        for jax, cell in zip(jaxes, found, strict=True):
            assert ("does not exist" in cell) == ((python, jax) not in pairs()), (python, jax)
