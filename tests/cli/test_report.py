"""The page about a run: its axes."""

from hypothesis import given
from hypothesis import strategies as st

from replicax._src.cli.report import _ticks


@given(st.floats(1e-3, 1e9))
def test_an_axis_has_few_round_numbers_that_reach_over_all_values(most):
    ticks = _ticks(most)

    assert 3 <= len(ticks) <= 6
    assert ticks[0] == 0
    assert ticks[-1] >= most * (1 - 1e-6)
    assert f"{ticks[1]:.0e}"[0] in "125"
    assert all(abs(tick - i * ticks[1]) <= 1e-9 * most for i, tick in enumerate(ticks))
