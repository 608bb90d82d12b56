"""The contract with Orbax: what replicax needs of it to save, and what a changed Orbax gives."""

import pytest

from replicax._src.train.orbax_private import CONTRACT
from tests.fresh_process import run_fresh

PARTS = [
    pytest.param(part, id=f"{CONTRACT.library}-{CONTRACT.version}-{part.place}")
    for part in CONTRACT.parts
]
FUNCTIONS = [param for param in PARTS if param.values[0].parameters is not None]


@pytest.mark.parametrize("part", PARTS)
def test_orbax_has_part(part):
    fault = CONTRACT.fault(part)

    assert not fault, f"Orbax {CONTRACT.version} {fault}"


SAVE = """
    import inspect, os, sys, tempfile
    import jax.numpy as jnp
    import orbax.checkpoint
    import replicax as rx
    from replicax._src.train.orbax_private import CONTRACT

    def change(part, **default):
        owner, name = CONTRACT.find(part.place)
        found = getattr(owner, name)
        signature = inspect.signature(found)
        new = inspect.Parameter("a_new_one", inspect.Parameter.KEYWORD_ONLY, **default)
        known = list(signature.parameters.values())
        at = len(known) - (known[-1].kind is new.VAR_KEYWORD)
        changed = signature.replace(parameters=[*known[:at], new, *known[at:]])
        if isinstance(found, type):
            found.__signature__ = changed
        else:
            found.__signature__ = changed

    def save():
        v = rx.Variable(1.0)
        checkpoint = rx.train.Checkpoint(v=v)
        path = checkpoint.save(tempfile.mkdtemp() + "/c")
        v.assign(2.0)
        checkpoint.restore(path)
        return float(v.numpy())

    functions = [part for part in CONTRACT.parts if part.parameters is not None]
"""


def test_new_optional_parameters_change_nothing():
    result = run_fresh(f"""{SAVE}
    for part in functions:
        change(part, default=None)
    print(save())
    """)

    assert result.stdout.split() == ["1.0"], result.stderr


def test_changed_part_refuses_to_save_and_still_reads():
    result = run_fresh(f"""{SAVE}
    v = rx.Variable(1.0)
    path = rx.train.Checkpoint(v=v).save(tempfile.mkdtemp() + "/c")
    from replicax._src.train import orbax_private as _orbax_private
    for part in functions:
        owner, name = CONTRACT.find(part.place)
        found = getattr(owner, name)
        before = inspect.signature(found)
        change(part)
        _orbax_private._checked.cache_clear()
        folder = tempfile.mkdtemp()
        try:
            rx.train.Checkpoint(v=v).save(folder + "/c")
        except Exception as error:
            told = str(error)
            assert "saving of checkpoints" in told and "Orbax" in told, told
            assert part.place in told and orbax.checkpoint.__version__ in told, told
            assert os.listdir(folder) == [], os.listdir(folder)
            v.assign(2.0)
            rx.train.Checkpoint(v=v).restore(path)
            print(part.place, float(v.numpy()))
        else:
            print(part.place, "saved")
        found.__signature__ = before
    """)

    wanted = [f"{param.values[0].place} 1.0" for param in FUNCTIONS]
    assert result.stdout.splitlines() == wanted, result.stderr
