"""What reading and writing a variable means, against what TensorFlow answered."""

import inspect
import json
from functools import cache
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import replicax as rx
from replicax._src.base.errors import DivergenceError, ScopeError, VariableError
from tests.golden.variable_cases import Library, all_cases, outcome
from tests.replicas import mirrored

ANSWERS = json.loads(Path(__file__).parents[1].joinpath("golden", "variables.json").read_text())
NONE, SUM, MEAN, FIRST = (
    rx.VariableAggregation.NONE,
    rx.VariableAggregation.SUM,
    rx.VariableAggregation.MEAN,
    rx.VariableAggregation.ONLY_FIRST_REPLICA,
)
ON_READ = rx.VariableSynchronization.ON_READ
LIBRARY = Library(rx, cache(mirrored), lambda x, dtype: jnp.asarray(x, dtype))


def expected(case):
    """TensorFlow's answer, but for what replicax does otherwise on purpose."""
    answer = dict(ANSWERS[case.name])
    writes = case.operation != "read"
    start = [12.0] * 3 if case.operation.startswith("scatter") else 12.0
    if case.synchronization != "ON_READ":
        differs = case.replicas > 1 and case.context == "replica" and ":" not in case.operation
        if case.aggregation == "NONE" and writes and differs:
            # TensorFlow lets the copies of a mirrored variable go apart.
            # What counts is the value that would be written, not what it is made of.
            equal = all(copy == answer["copies"][0] for copy in answer["copies"])
            unchanged = {"copies": [start] * case.replicas, "value": start}
            return answer if equal else {"raised": "ValueError", **unchanged}
    elif case.replicas == 1:
        # One copy is an ordinary variable: there is nothing to aggregate, and nothing to refuse.
        old, new = 10.0, 1.0 if case.context == "replica" else 6.0
        copy = {"read": old, "assign": new, "assign_add": old + new}[case.operation]
        returned = copy if case.operation == "read" else new
        wrap = [returned] if case.context == "replica" else returned
        return {"returned": wrap, "copies": [copy], "value": copy}
    elif case.aggregation == "NONE" and case.context != "replica" and case.operation[0] == "a":
        # TensorFlow writes every copy, then fails to read them for the result of the assignment.
        eager = case.name.replace("compiled", "eager")
        return {"returned": 6.0, "copies": ANSWERS[eager]["copies"], "value": "ValueError"}
    return answer


def cases():
    quick_scatters = ("scatter_add", "scatter_max", "scatter_update")
    for case in all_cases():
        rare = (
            ":number" in case.operation
            or case.operation == "assign_sub"
            or (case.replicas, case.operation) == (4, "assign")
            or (case.context, case.operation) == ("outside", "assign_add")
            or case.replicas == 1
            or case.dtype == "int32"
            or (case.operation.startswith("scatter") and case.operation not in quick_scatters)
        )
        slow = [pytest.mark.slow] if rare and case.compiled else []
        yield pytest.param(case, id=case.name, marks=slow)


@pytest.mark.parametrize("case", list(cases()))
def test_a_cell_of_the_table_is_as_in_tensorflow(case):
    seen, wanted = outcome(LIBRARY, case), expected(case)

    assert seen.keys() == wanted.keys()
    for key, value in wanted.items():
        if isinstance(value, str):
            assert seen[key] == value
        else:
            np.testing.assert_allclose(seen[key], value, rtol=1e-6)


def test_the_recorded_answers_cover_the_table():
    assert set(ANSWERS) == {case.name for case in all_cases()}


def replica_id():
    return rx.distribute.get_replica_context().replica_id_in_sync_group


def assign_from_replicas(strategy, mode, v, values):
    """Let replica i assign ``values[i]``."""
    table = jnp.asarray(values)

    def step(table):
        v.assign(table[replica_id()])

    mode(lambda t: strategy.run(step, args=(t,)))(table)


def test_replicas_that_assign_different_values_get_an_error_that_names_the_variable(two, mode):
    with two.scope():
        v = rx.Variable(jnp.zeros(2), name="weight")

    with pytest.raises(DivergenceError, match=r"'weight'.*NONE.*all_reduce.*aggregation=") as info:
        assign_from_replicas(two, mode, v, [[1.0, 2.0], [1.0, 3.0]])

    assert isinstance(info.value, ValueError)
    assert [c.numpy().tolist() for c in v.components] == [[0.0, 0.0]] * 2
    assign_from_replicas(two, mode, v, [[1.0, 2.0], [1.0, 2.0]])
    assert v.numpy().tolist() == [1.0, 2.0]


def test_the_error_names_the_line_that_assigned_and_has_gradients_added_up(two, mode):
    with two.scope():
        w = rx.variables({"dense": {"kernel": jnp.zeros(2)}}, name="model")["dense"]["kernel"]
    lines, start = inspect.getsourcelines(assign_from_replicas)
    line = start + next(i for i, text in enumerate(lines) if "v.assign" in text)

    with pytest.raises(DivergenceError) as info:
        assign_from_replicas(two, mode, w, [[1.0, 2.0], [1.0, 3.0]])

    message = "".join([str(info.value), *getattr(info.value, "__notes__", ())])
    assert "'model/dense/kernel'" in message
    assert f"{__file__}:{line}" in message
    assert message.index('all_reduce("SUM", gradients)') < message.index("MEAN")


def test_the_eager_error_shows_what_each_replica_assigned(two):
    with two.scope():
        v = rx.Variable(0.0)

    with pytest.raises(DivergenceError, match=r"replica 0: 3\.0, replica 1: 4\.0"):
        assign_from_replicas(two, lambda f: f, v, [3.0, 4.0])


@pytest.mark.parametrize(
    "values",
    [[7.0, 7.0], [float("nan")] * 2, [float("inf")] * 2, [0.0, -0.0]],
    ids=["equal", "nan", "inf", "zeros"],
)
def test_replicas_may_assign_values_that_are_equal(two, mode, values):
    with two.scope():
        v = rx.Variable(1.0)

    assign_from_replicas(two, mode, v, values)

    np.testing.assert_equal(v.numpy(), np.float32(values[0]))
    rx.debug.check_in_sync([v])


def test_other_writes_of_a_refused_compiled_call_are_undone_too(two):
    with two.scope():
        v, w = rx.Variable(0.0), rx.Variable(0.0)

    @rx.function
    def step():
        w.assign_add(1.0)
        two.run(lambda: v.assign(replica_id().astype(jnp.float32)))

    with pytest.raises(DivergenceError):
        step()

    assert (float(v), float(w)) == (0.0, 0.0)


def test_every_turn_of_a_scan_is_checked(two):
    with two.scope():
        v = rx.Variable(1.0)

    def turn(carry, x):
        # Only the first turn writes different values.
        two.run(lambda: v.assign(jnp.where(x == 0, replica_id(), 5).astype(jnp.float32)))
        return carry, None

    with pytest.raises(DivergenceError):
        rx.function(lambda: rx.scan(turn, 0.0, jnp.arange(2)))()

    assert float(v) == 1.0


def test_a_per_replica_value_assigned_across_replicas_must_agree_too(two, mode):
    with two.scope():
        v = rx.Variable(1.0)

    def store(values):
        v.assign(two.run(lambda t: t[replica_id()], args=(values,)))

    with pytest.raises(DivergenceError):
        mode(store)(jnp.array([1.0, 2.0]))
    assert float(v) == 1.0
    mode(store)(jnp.array([4.0, 4.0]))
    assert float(v) == 4.0


def test_a_per_replica_value_of_the_wrong_shape_is_refused(two, mode):
    with two.scope():
        v = rx.Variable(1.0, aggregation=MEAN)

    def store():
        v.assign(two.run(lambda: jnp.ones(3)))

    with pytest.raises(ValueError, match=r"shape \(3,\).*shape \(\)"):
        mode(store)()
    assert float(v) == 1.0


def test_a_plain_number_from_every_replica_is_ambiguous_for_a_sum(two, mode):
    with two.scope():
        v = rx.Variable(1.0, name="total", aggregation=SUM)

    with pytest.raises(VariableError, match=r"number 2\.0.*'total'.*SUM.*jnp\.asarray\(2\.0\)"):
        mode(lambda: two.run(lambda: v.assign_add(2.0)))()


def test_an_on_read_variable_without_aggregation_says_how_to_look_at_it(two):
    with two.scope():
        v = rx.Variable(1.0, name="local", synchronization=ON_READ)

    with pytest.raises(VariableError, match=r"'local'.*experimental_local_results"):
        v.read_value()


def test_a_variable_of_another_strategy_can_be_read_but_not_written(two, four, mode):
    with four.scope():
        v = rx.Variable(3.0, name="theirs")

    assert [float(x) for x in two.run(lambda: v * 2).values] == [6.0, 6.0]
    with pytest.raises(ScopeError, match=r"'theirs'.*4 replicas.*2 replicas"):
        two.run(lambda: v.assign(jnp.ones(())))
    assert float(v) == 3.0


def test_additions_to_a_plain_variable_add_up_over_replicas(two, mode):
    v = rx.Variable(10.0)

    mode(lambda: two.run(lambda: v.assign_add(1.0)))()
    mode(lambda: two.run(lambda: v.assign_sub(replica_id().astype(jnp.float32))))()

    assert float(v) == 11.0


def test_replicas_must_agree_on_what_they_assign_to_a_plain_variable(two, mode):
    v = rx.Variable(10.0, name="plain")

    with pytest.raises(DivergenceError, match="'plain'"):
        assign_from_replicas(two, mode, v, [1.0, 2.0])
    assert float(v) == 10.0
    assign_from_replicas(two, mode, v, [2.0, 2.0])
    assert float(v) == 2.0


@pytest.mark.parametrize(
    ("aggregation", "result"), [(SUM, 10.0), (MEAN, 2.5), (FIRST, 1.0)], ids=["sum", "mean", "1st"]
)
def test_merge_call_sees_an_on_read_variable_as_one_value(four, mode, aggregation, result):
    with four.scope():
        v = rx.Variable(0.0, synchronization=ON_READ, aggregation=aggregation)

    def step():
        v.assign(replica_id().astype(jnp.float32) + 1)
        return rx.distribute.get_replica_context().merge_call(lambda _: v.read_value())

    seen = mode(lambda: four.run(step))()

    assert [float(x) for x in four.experimental_local_results(seen)] == [result] * 4


def test_merge_call_writes_all_copies_of_an_on_read_variable(two, mode):
    with two.scope():
        v = rx.Variable(0.0, synchronization=ON_READ, aggregation=SUM)

    def step():
        rx.distribute.get_replica_context().merge_call(lambda _: v.assign(jnp.float32(8)))

    mode(lambda: two.run(step))()

    assert [float(c) for c in v.components] == [4.0, 4.0]
    assert float(v) == 8.0


@settings(deadline=None, max_examples=40)
@given(
    kind=st.sampled_from(["float32", "bfloat16", "float16", "int32", "uint8", "complex64"]),
    replicas=st.sampled_from([2, 3, 4, 7]),
    wraps=st.sampled_from([lambda f: f, rx.function]),
    data=st.data(),
)
def test_what_is_assigned_across_replicas_is_what_their_shares_add_up_to(
    kind, replicas, wraps, data
):
    numbers = st.integers(0, 255) if kind == "uint8" else st.integers(-(2**20), 2**20)
    if kind not in ("uint8", "int32"):
        numbers = st.floats(width=16, allow_subnormal=False).map(lambda x: x * 1.1)
    strategy, value = mirrored(replicas), np.asarray(data.draw(numbers)).astype(jnp.dtype(kind))
    with strategy.scope():
        v = rx.Variable(jnp.zeros((), kind), synchronization=ON_READ, aggregation=SUM)

    wraps(lambda: v.assign(jnp.asarray(value)))()

    read = np.asarray(v.read_value()).astype(value.dtype)
    np.testing.assert_array_equal(read.astype("complex64"), value.astype("complex64"))
    parts = [np.asarray(c.read_value()).astype("complex64") for c in v.components]
    unit = max(abs(complex(value)) * 0.02, replicas)  # as equal as they can be
    if np.isfinite(value):
        assert max(abs(p - parts[1]) for p in parts) <= unit
