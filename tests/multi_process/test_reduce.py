"""`strategy.reduce` between processes."""

import pytest

from tests.multi_process.gang import Gang

pytestmark = pytest.mark.multi_process


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_reduce_gives_numpys_results(tmp_path, size):
    with Gang(tmp_path, size, REPLICAX_JOIN_TIMEOUT="120") as gang:
        for index in range(size):
            gang.start(index, program="reduced")
        gang.wait(seconds=300)

        for worker in gang.workers:
            assert "COMPARED=9" in worker.text, worker.text
