"""Importing replicax and using a strategy break none of JAX's own tests, but for a short list."""

import faulthandler
import sys

import pytest

from tests.foreign import jax_own

pytestmark = [
    pytest.mark.foreign,
    pytest.mark.slow,
    pytest.mark.skipif(jax_own.source() is None, reason="JAX_SOURCE names no checkout of JAX"),
]


@pytest.mark.parametrize("group", jax_own.GROUPS)
def test_jax_own_tests_pass_with_replicax(group):
    faulthandler.cancel_dump_traceback_later()  # a group takes longer than any other test
    compared = jax_own.SUITE.compare(group)
    sys.stdout.write("\n".join([compared.row, *compared.notes, ""]))  # `-rP` shows it

    assert compared.unexplained == {}
