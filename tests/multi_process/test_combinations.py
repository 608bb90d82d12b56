"""Replicate x shard x tensor on two workers of four devices: the numbers of one device."""

import numpy as np
import pytest

from tests.combinations import COMBINATIONS, Model
from tests.multi_process.gang import Gang
from tests.replicas import mirrored

pytestmark = pytest.mark.multi_process
PATIENT = {
    "REPLICAX_CPU_DEVICES": "4",
    "REPLICAX_JOIN_TIMEOUT": "300",
    "REPLICAX_PING_TIMEOUT": "60",
    "REPLICAX_STEP_TIMEOUT": "300",
}
# Each combination that fits into workers of four devices, and the one in which it goes on.
NAMES = [n for n in COMBINATIONS if n != "tensor 8"]
PAIRS = list(zip(NAMES, [*NAMES[3:], *NAMES[:3]], strict=True))
QUICK = "replicate 2 shard 2 tensor 2"


@pytest.fixture(scope="module")
def one():
    model = Model(mirrored(1))
    losses = [*model.train(), *model.train(seed=2)]
    return losses, model.numbers()


@pytest.mark.parametrize(
    ("name", "other"),
    [p if p[0] == QUICK else pytest.param(*p, marks=pytest.mark.slow) for p in PAIRS],
)
def test_combination_on_workers_has_the_numbers_of_one_device(one, name, other, tmp_path):
    with Gang(tmp_path, 2, **PATIENT) as gang:
        for index in range(2):
            gang.start(index, name, other, tmp_path, program="combined")
        for worker in gang.wait(seconds=600):
            assert worker.code == 0, worker.text

    losses, weights = one
    found = np.load(tmp_path / "found.npz")
    np.testing.assert_allclose(found["losses"], losses, rtol=1e-4)
    for n, value in weights.items():
        np.testing.assert_allclose(
            found[n.replace("/", ".")], value, rtol=1e-3, atol=1e-5, err_msg=n
        )
