"""Keras's own tests pass beside replicax and in a scope, but for a short list."""

import faulthandler
import sys

import pytest

from tests.foreign import keras_own

pytestmark = [pytest.mark.foreign, pytest.mark.slow]


@pytest.mark.parametrize("group", keras_own.GROUPS)
def test_keras_own_tests_pass_beside_replicax_and_in_a_scope(group):
    faulthandler.cancel_dump_traceback_later()  # a group takes longer than any other test
    compared = keras_own.SUITE.compare(group)
    sys.stdout.write("\n".join([compared.row, *compared.notes, ""]))  # `-rP` shows it

    assert compared.unexplained == {}
