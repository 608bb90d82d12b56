"""Contracts with Keras and Flax: what replicax needs of them, and what a changed library loses."""

import faulthandler
import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import replicax as rx

# isort: split
import flax.nnx  # noqa: F401 - replicax attaches to it now
import keras  # noqa: F401

# isort: split
from replicax._contract import Contract, LibraryFeature, PrivatePart, never
from replicax.integrations import _flax_private, _keras_private
from tests.integrations.changed_library import FLAX, KERAS, PROGRAMS, REST

ROOT = Path(__file__).parents[2]
MODULES = {"keras": _keras_private, "flax": _flax_private}
CONTRACTS = {name: module.CONTRACT for name, module in MODULES.items()}
PARTS = [
    pytest.param(name, part, id=f"{contract.library}-{contract.version}-{part.place}")
    for name, contract in CONTRACTS.items()
    for part in contract.parts
]
CHECKED_BY_US = ("VARIABLES", "SAVED_MODEL", "RESTORED_SLOTS")
FUNCTIONS = [param for param in PARTS if param.values[1].parameters is not None]


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


@functools.cache
def results(library, kind, is_all):
    """What programs say after one part was changed, for each part; all run in one process."""
    contract, names = CONTRACTS[library], titles(library)
    jobs, keys, seen = [], [], set()
    for part in contract.parts:
        if part.feature in seen and not is_all:
            continue
        if part.parameters is None and kind != "renamed":
            continue
        seen.add(part.feature)
        use = names[part.feature]
        rest = [name for name in REST[library] if name != use]
        jobs.append((library, [part.place], kind, [use, *rest]))
        keys.append(part)
    return dict(zip(keys, run(jobs), strict=True))


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


def first_of_features(params):
    """Leave one part of each feature among the tests that are not slow."""
    seen = set()
    for param in params:
        feature = param.values[1].feature
        marks = [pytest.mark.slow] if feature in seen else []
        seen.add(feature)
        yield pytest.param(*param.values, id=param.id, marks=marks)


@pytest.mark.parametrize(
    ("kind", "library", "part"),
    [
        pytest.param(kind, *param.values, id=f"{kind}-{param.id}", marks=param.marks)
        for kind, params in [("required", FUNCTIONS), ("renamed", PARTS)]
        for param in first_of_features(params)
    ],
)
def test_changed_part_loses_its_feature_alone(kind, library, part, request):
    contract, use = CONTRACTS[library], titles(library)[part.feature]
    is_slow = request.node.get_closest_marker("slow") is not None

    found = results(library, kind, is_slow)[part]

    # Two features may need the same place.
    sharing = {p.feature for p in contract.parts if p.place == part.place}
    assert found["lost"] == sorted(feature.name for feature in sharing), found
    told = found[use]
    if part.feature.when is never and use not in CHECKED_BY_US:
        assert told == "works"
    else:
        assert told.startswith("refused: "), told
        (named,) = [feature for feature in sharing if feature.name in told]
        assert f"{contract.library} {contract.version}" in told
        assert part.name in told
        assert named.instead in told
        assert f"Install {contract.library} {contract.tested}" in told
    if part.feature is not contract.storage:
        lost = {titles(library)[feature] for feature in sharing}
        rest = {name: found[name] for name in REST[library] if name not in lost}
        assert {name: told for name, told in rest.items() if told != "works"} == {}
