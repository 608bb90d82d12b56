"""`replicax verify` checks numbers, and its steps compile for TPUs and GPUs."""

import json

import numpy as np
import pytest

import replicax as rx
from replicax._src.cli import verify
from replicax._src.cli.main import main
from tests.preflight.needs import needs_compiler, needs_cuda
from tests.replicas import mirrored


def test_all_checks_pass_and_are_written_to_post_them(tmp_path, capsys):
    path = tmp_path / "verify.json"

    assert main(["verify", "--devices", "CPU:0,CPU:1", "--json", str(path)]) == 0

    found = json.loads(path.read_text())
    assert found["replicas"] == 2
    assert found["devices"] == [f"/job:localhost/replica:0/task:0/device:CPU:{i}" for i in (0, 1)]
    assert {check["status"] for check in found["checks"]} == {"ok"}
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == f"{len(found['checks'])} checks, 0 failed"
    assert all(len(line) <= 80 for line in lines)


@pytest.mark.parametrize(
    ("compute", "words"),
    [
        (lambda: (np.ones(3), np.array([1, 1, 1.001])), "differs by 1.0e-03"),
        (lambda: (np.array([1, np.nan]), np.ones(2)), "differs by nan"),
        (lambda: 1 / 0, "ZeroDivisionError: division by zero"),
    ],
)
def test_a_wrong_number_and_an_error_are_failures(compute, words):
    check = verify._check("all_reduce", compute)

    assert (check.status, check.said) == ("FAILED", words)


def test_a_library_that_is_missing_is_skipped():
    check = verify._check("other", lambda: (1, 2), "no_such_library")

    assert (check.status, check.said) == ("skipped", "no_such_library is not installed")


@pytest.mark.slow
@pytest.mark.parametrize(
    "topology",
    [pytest.param("v5e:2x2", marks=needs_compiler), pytest.param("h100:1x4", marks=needs_cuda)],
)
def test_every_step_compiles_for_accelerators(topology):
    """Each compiled step goes through the real compiler before it runs on CPU devices."""
    reports = []

    def compiled(step):
        step = rx.function(step)

        def compile_and_run(*args):
            if step.experimental_get_tracing_count() == 0:
                reports.append(rx.preflight(step, args, topology=topology))
            return step(*args)

        return compile_and_run

    checks = list(verify._checks(mirrored(2), compiled))

    assert {check.status for check in checks} == {"ok"}, checks
    assert len(reports) >= 10
    assert all(report.fits for report in reports)
