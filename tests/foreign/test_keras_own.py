"""What passes of Keras's own tests passes in the scope of a strategy too, but for a short list."""

import pytest

from tests.foreign import keras_own

pytestmark = [pytest.mark.foreign, pytest.mark.slow]


@pytest.mark.parametrize("group", keras_own.GROUPS)
def test_keras_own_tests_pass_in_a_scope(group):
    within = keras_own.outcomes(group, in_scope=True)
    without = keras_own.outcomes(group, in_scope=False)

    passed = [t for t, result in without.items() if result == "passed"]
    lost = {t: within.get(t) for t in passed if within.get(t) != "passed"}

    assert {t: why for t, why in lost.items() if not keras_own.why_excepted(t)} == {}
