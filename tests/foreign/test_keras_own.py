"""What passes of Keras's own tests passes in the scope of a strategy too, but for a short list."""

import pytest

from tests.foreign import keras_own

pytestmark = [pytest.mark.foreign, pytest.mark.slow]


@pytest.mark.parametrize("group", keras_own.GROUPS)
def test_keras_own_tests_pass_in_a_scope(group):
    lost = []
    for path in keras_own.files(group):
        within = keras_own.outcomes(path, in_scope=True)
        if "failed" in within.values():
            without = keras_own.outcomes(path, in_scope=False)
            lost += [t for t, r in within.items() if r == "failed" and without.get(t) == "passed"]

    assert [test for test in lost if not keras_own.is_excepted(test)] == []
