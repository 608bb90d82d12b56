"""Flax's own tests of NNX pass beside replicax and in a scope, but for a short list.

They run by `make test-flax`. `FLAX_TESTS` names the folder of the tests; without it pip downloads
the sdist of the Flax that is installed.
"""

import faulthandler
import sys

import pytest

from tests.foreign import flax_own

pytestmark = [pytest.mark.foreign, pytest.mark.slow]


def test_flax_own_tests_pass_beside_replicax_and_in_a_scope(subtests):
    faulthandler.cancel_dump_traceback_later()  # a file takes longer than any other test
    groups = flax_own.groups()
    assert len(groups) >= 29, f"the tests of NNX are not all in {flax_own.folder()}"
    for group in groups:
        with subtests.test(group):
            compared = flax_own.SUITE.compare(group)
            sys.stdout.write("\n".join([compared.row, *compared.notes, ""]))  # `-rP` shows it
            assert compared.unexplained == {}
