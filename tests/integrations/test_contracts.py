"""Contracts with Keras and Flax: what replicax needs of them, and what a changed library loses."""

import faulthandler
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import replicax as rx

# isort: split
import flax.nnx  # noqa: F401 - replicax attaches to it now
import keras

# isort: split
from replicax._src.base.contract import Contract, LibraryFeature, PrivatePart, never
from replicax._src.integrations import flax_private, keras_private
from tests.integrations.changed_library import FLAX, KERAS, PROGRAMS, REST

ROOT = Path(__file__).parents[2]
MODULES = {"keras": keras_private, "flax": flax_private}
CONTRACTS = {name: module.CONTRACT for name, module in MODULES.items()}
PARTS = [
    pytest.param(name, part, id=f"{contract.library}-{contract.version}-{part.place}")
    for name, contract in CONTRACTS.items()
    for part in contract.parts
]
CHECKED_BY_US = ("VARIABLES", "SAVED_MODEL", "RESTORED_SLOTS")


def titles(library: str) -> dict[LibraryFeature, str]:
    """The features of a library, by the names of their programs."""
    named = {x: name for name, x in vars(MODULES[library]).items() if isinstance(x, LibraryFeature)}
    flows = {
        p.feature: name for name, p in vars(MODULES[library]).items() if isinstance(p, PrivatePart)
    }
    return {feature: named.get(feature, flows[feature]) for feature in CONTRACTS[library].features}


@pytest.mark.parametrize(("library", "part"), PARTS)
def test_library_has_part(library, part):
    contract = CONTRACTS[library]
    fault = contract.fault(part)

    assert not fault, f"{contract.library} {contract.version} {fault}"


def test_keras_has_the_records_that_checkpoints_skip():
    assert vars(keras.layers.Dense(1)).keys() >= keras_private.RECORDS


def test_every_feature_has_a_program():
    assert sorted(titles("keras").values()) == sorted(KERAS)
    assert sorted(titles("flax").values()) == sorted(FLAX)


@pytest.mark.parametrize("library", CONTRACTS)
def test_gates_exist(library):
    contract = CONTRACTS[library]

    for feature in contract.features:
        for place in feature.gates:
            owner, name = contract.find(place)
            assert callable(getattr(owner, name)), place


def take(a, b, c=1, *, d=2, **rest):
    """A function of a library, as the contract below knows it."""
    return a, b, c, d, rest


def contract_on(parameters, is_transparent=False):
    feature = LibraryFeature("taking", "give", (), lambda *_, **__: True)
    part = PrivatePart("test_contracts:take", feature, parameters, is_transparent)
    return Contract("tests", "pytest", "tests.integrations", "1", feature, [part]), part


FITTING = [
    "a, b, c, *, d, **rest",
    "a, b, c=1, *, d=2, **rest",
    "a, b, **rest",  # c and d are new and optional
    "a, b, c, **rest",
    "a, b, /, c, **rest",
]
UNFIT = [
    "b, a, c, *, d, **rest",
    "a, b, c, d, **rest",  # d cannot be passed by position
    "a, b, c, e, *, d, **rest",
    "a, **rest",  # b is new and required
    "a, b, c=2, *, d, **rest",
    "a, c, **rest",
    "b, c, **rest",
    "a, b, c, *more, **rest",
]


@pytest.mark.parametrize("parameters", FITTING + UNFIT)
def test_function_fits_if_new_parameters_are_optional(parameters, monkeypatch):
    contract, part = contract_on(parameters)
    monkeypatch.setattr(contract, "find", lambda place: (sys.modules[__name__], "take"))

    assert (contract.fault(part) == "") == (parameters in FITTING)
    if parameters in UNFIT:
        assert part.place in contract.fault(part)
        assert f"take({parameters})" in contract.fault(part)


@pytest.mark.parametrize("is_transparent", [True, False])
def test_unknown_argument_is_passed_through_or_refused(is_transparent, monkeypatch):
    contract, part = contract_on("a, b", is_transparent)
    monkeypatch.setattr(contract, "find", lambda place: (sys.modules[__name__], "take"))
    monkeypatch.setattr(contract, "storage", None)
    monkeypatch.setattr(sys.modules[__name__], "take", take)  # put back at the end

    contract.attach([(part, lambda original: lambda a, b: ("ours", *original(a, b)))])
    changed = sys.modules[__name__].take

    assert changed(3, b=4) == ("ours", 3, 4, 1, 2, {})
    assert changed(3, 4, 1, d=2) == ("ours", 3, 4, 1, 2, {})  # the defaults
    if is_transparent:
        assert changed(3, 4, 5, d=6, e=7) == ("ours", 3, 4, 5, 6, {"e": 7})
    else:
        for unknown in ({"c": 5}, {"d": 6}, {"e": 7}):
            with pytest.raises(rx.errors.ScopeError, match=r"taking.*was given"):
                changed(3, 4, **unknown)


# A changed library, in fresh processes.


def run(jobs):
    # The first test of a kind waits for the programs of all: longer than a test may take.
    faulthandler.cancel_dump_traceback_later()
    result = subprocess.run(
        [sys.executable, "-m", "tests.integrations.changed_library"],
        input=json.dumps(jobs),
        env=os.environ
        | {
            "PYTHONPATH": f"{Path(rx.__file__).parents[1]}:{ROOT}",
            "KERAS_BACKEND": "jax",
            "JAX_PLATFORMS": "cpu",
        },
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=3000,
    )
    lines = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == len(jobs), result.stderr
    return lines


@pytest.mark.parametrize("library", CONTRACTS)
def test_new_optional_parameters_everywhere_change_nothing(library):
    places = sorted({p.place for p in CONTRACTS[library].parts if p.parameters is not None})

    (found,) = run([(library, places, "optional", sorted(PROGRAMS[library]))])

    assert found.pop("lost") == []
    assert {name: told for name, told in found.items() if told != "works"} == {}


def changes(library, kind, *, every):
    """Yield a job for one part of each feature, or for every part."""
    seen = set()
    for part in CONTRACTS[library].parts:
        is_function = part.parameters is not None
        if (every or part.feature not in seen) and (is_function or kind == "renamed"):
            seen.add(part.feature)
            use = titles(library)[part.feature]
            rest = [name for name in REST[library][: None if every else 1] if name != use]
            yield part, (library, [part.place], kind, [use, *rest])


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", [pytest.param("required", marks=pytest.mark.slow), "renamed"])
@pytest.mark.parametrize("library", CONTRACTS)
def test_changed_part_loses_its_feature_alone(library, kind, every, subtests):
    parts, jobs = zip(*changes(library, kind, every=every), strict=True)

    # One process for all of them: what takes the time is to import the libraries.
    for part, found in zip(parts, run(jobs), strict=True):
        with subtests.test(part.place):
            check_loss(CONTRACTS[library], library, part, found)


def check_loss(contract, library, part, found):
    # Two features may need the same place.
    sharing = {p.feature for p in contract.parts if p.place == part.place}
    assert found.pop("lost") == sorted(feature.name for feature in sharing), found
    lost = {titles(library)[feature] for feature in sharing}
    use = titles(library)[part.feature]
    if part.feature.when is never and use not in CHECKED_BY_US:
        assert found[use] == "works"
    else:
        assert found[use].startswith("refused: "), found[use]
        (named,) = [feature for feature in sharing if feature.name in found[use]]
        assert f"{contract.library} {contract.version}" in found[use]
        assert part.name in found[use]
        assert named.instead in found[use]
        assert f"Install {contract.library} {contract.tested}" in found[use]
    if part.feature is not contract.storage:
        rest = {name: told for name, told in found.items() if name not in lost}
        assert {name: told for name, told in rest.items() if told != "works"} == {}
