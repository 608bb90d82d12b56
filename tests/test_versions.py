"""The supported versions are the same wherever the project states them."""

import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import version
from itertools import product
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT, GROUPS = SETTINGS["project"], SETTINGS["dependency-groups"]
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
    lists = [PROJECT["dependencies"], *extras.values(), *GROUPS.values()]
    return [Requirement(line) for lines in lists for line in lines if isinstance(line, str)]


def listed(*groups: str) -> list[str]:
    command = [sys.executable, ROOT / ".ci" / "requirements", *groups]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


def test_dependency_groups_are_listed_with_those_that_they_include():
    assert listed("dev") == GROUPS["test"] + GROUPS["lint"]
    assert listed("test", "docs") == GROUPS["test"] + GROUPS["docs"]


def test_extras_that_groups_name_exist():
    ours = [r for r in requirements() if canonicalize_name(r.name) == "replicax"]

    assert {extra for r in ours for extra in r.extras} <= set(PROJECT["optional-dependencies"])


def test_an_unknown_dependency_group_is_refused():
    with pytest.raises(subprocess.CalledProcessError) as raised:
        listed("dvelopment")

    assert "No dependency group 'dvelopment'" in raised.value.stderr


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


def test_published_links_lead_to_the_tag_of_the_repository(tmp_path):
    if not (ROOT / ".ci" / "links").exists():
        pytest.skip("an sdist is already published")
    for name in ("README.md", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)

    links = [sys.executable, ROOT / ".ci" / "links", "https://example.org/x/", "1.2.3", tmp_path]
    subprocess.run(links, check=True)

    targets = re.findall(r"\]\(([^)]*)\)", (tmp_path / "README.md").read_text())
    assert all(target.startswith("https://") for target in targets)
    prefix = "https://example.org/x/blob/v1.2.3/"
    files = [target.removeprefix(prefix) for target in targets if target.startswith(prefix)]
    assert len(files) > 10
    assert all((ROOT / file.partition("#")[0]).exists() for file in files)
    urls = tomllib.loads((tmp_path / "pyproject.toml").read_text())["project"]["urls"]
    assert urls["Source"] == "https://example.org/x"
    assert (ROOT / urls["Changelog"].removeprefix(prefix)).exists()
