"""run: what goes in, what comes out, eager and compiled alike.

Runs in functions that Python drives.
"""

import dataclasses
import functools
from collections import namedtuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.sparse import BCOO

import replicax as rx
from replicax._src.strategy.run import LRUCache
from tests.replicas import (
    WAYS,
    compiled,
    components,
    context,
    eagerly,
    mirrored,
    per_replica,
    replica_id,
)

D = rx.distribute
Pair = namedtuple("Pair", "left right")


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Batch:
    x: jax.Array
    label: str = dataclasses.field(metadata={"static": True}, default="none")


@pytest.fixture
def strategy():
    return mirrored(2)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("count", [2, 4, 8])
def test_every_replica_runs_once(way, count):
    strategy = mirrored(count)

    result = way(strategy, lambda x: x * replica_id(), jnp.float32(2))

    assert isinstance(result, D.PerReplica)
    assert components(result) == [2.0 * i for i in range(count)]
    assert [v.devices() for v in result.values] == [{d} for d in jax.devices()[:count]]


@pytest.mark.parametrize("way", WAYS)
def test_one_replica_of_a_mirrored_strategy_gives_plain_values(way):
    result = way(mirrored(1), lambda x: {"a": x + replica_id()}, jnp.float32(2))

    assert float(result["a"]) == 2.0
    assert isinstance(result["a"], jax.Array)


@pytest.mark.parametrize("way", WAYS)
def test_structures_are_kept(strategy, way):
    def step(x):
        return {"t": (x + replica_id(), [x * replica_id()]), "p": Pair(x, None), "d": {"k": x}}

    out = way(strategy, step, jnp.float32(3))

    assert type(out["t"]) is tuple
    assert type(out["t"][1]) is list
    assert type(out["p"]) is Pair
    assert out["p"].right is None
    assert components(out["t"][0]) == [3.0, 4.0]
    assert components(out["t"][1][0]) == [0.0, 3.0]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("plain", [None, "text", (), [], {}, {"a": None, "b": ["x"]}])
def test_what_all_replicas_agree_on_stays_bare(strategy, way, plain):
    assert way(strategy, lambda: plain) == plain


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("number", [4, 2.5, True])
def test_an_equal_number_stays_one_number(strategy, way, number):
    result = way(strategy, lambda: number)

    assert not isinstance(result, D.DistributedValues)
    assert result == number


def test_different_python_values_become_per_replica_in_eager_code(strategy):
    numbers = strategy.run(lambda: int(context().replica_id_in_sync_group) * 3)
    texts = strategy.run(lambda: f"replica {context().replica_id_in_sync_group}")

    assert numbers.values == (0, 3)
    assert texts.values == ("replica 0", "replica 1")


def test_different_shapes_come_out_of_eager_code(strategy):
    result = strategy.run(lambda: jnp.ones(int(context().replica_id_in_sync_group) + 1))

    assert [v.shape for v in result.values] == [(1,), (2,)]


def test_different_structures_are_refused(strategy):
    with pytest.raises(ValueError, match="different structures"):
        strategy.run(lambda: [1] * (int(context().replica_id_in_sync_group) + 1))


@pytest.mark.parametrize("way", WAYS)
def test_distributed_arguments_are_found_deep_in_structures(strategy, way):
    own = per_replica(strategy, [jnp.float32(1), jnp.float32(2)])
    seen = []

    def step(tree, flag, scale):
        seen.append((flag, scale))
        return tree["x"][0] * 10 + tree["y"]

    result = way(strategy, lambda d: step(d, "on", 3), {"x": [own], "y": jnp.float32(100)})

    assert components(result) == [110.0, 120.0]
    assert seen[0] == ("on", 3)


@pytest.mark.parametrize("compile_it", [False, True])
def test_keyword_arguments_are_split_too(strategy, compile_it):
    own = per_replica(strategy, [jnp.float32(1), jnp.float32(2)])
    call = lambda v: strategy.run(  # noqa: E731
        lambda x, *, k, flag: x * k if flag else x, args=[v], kwargs={"k": v, "flag": True}
    )

    assert components((rx.function(call) if compile_it else call)(own)) == [1.0, 4.0]


def test_python_arguments_arrive_unchanged(strategy):
    marker = object()
    seen = []

    def step(*given):
        seen.append(given)
        return jnp.ones(())

    for run in (strategy.run, lambda *a, **k: rx.function(lambda: strategy.run(*a, **k))()):
        run(step, args=(2, 0.5, None, "text", marker, True))

    assert all(given == (2, 0.5, None, "text", marker, True) for given in seen)
    assert all(type(g[0]) is int and type(g[1]) is float and g[4] is marker for g in seen)


@pytest.mark.parametrize("way", WAYS)
def test_numpy_arguments_and_results_are_arrays(strategy, way):
    result = way(
        strategy,
        lambda x: np.asarray([1, 2]) if x is None else x + replica_id(),
        np.ones(2, np.float32),
    )

    assert components(result) == [[1.0, 1.0], [2.0, 2.0]]


@pytest.mark.parametrize("way", WAYS)
def test_registered_dataclasses_go_in_and_out(strategy, way):
    own = per_replica(strategy, [jnp.float32(1), jnp.float32(2)])

    result = way(strategy, lambda b: dataclasses.replace(b, x=b.x * 2), Batch(own, "train"))

    assert type(result) is Batch
    assert result.label == "train"
    assert components(result.x) == [2.0, 4.0]


@pytest.mark.parametrize("way", WAYS)
def test_sparse_matrices_go_in_and_out(strategy, way):
    matrix = BCOO.fromdense(jnp.eye(3) * 2)

    result = way(strategy, lambda m: m * (replica_id() + 1), matrix)

    assert type(result) is BCOO
    assert [np.asarray(v).tolist() for v in result.data.values] == [[2.0] * 3, [4.0] * 3]


@pytest.mark.parametrize("way", WAYS)
def test_results_are_arguments_of_the_next_run(strategy, way):
    value = way(strategy, lambda: replica_id() + 1)
    for _ in range(3):
        value = way(strategy, lambda x: x * 2, value)

    assert components(value) == [8.0, 16.0]


@pytest.mark.parametrize("way", WAYS)
def test_variables_are_arguments_and_closures(strategy, way):
    with strategy.scope():
        v = rx.Variable([1.0, 2.0])

    captured = way(strategy, lambda: jnp.sum(v * replica_id()))
    passed = strategy.run(lambda w: w * 2.0, args=(v,))

    assert components(captured) == [0.0, 3.0]
    assert components(passed) == [[2.0, 4.0]] * 2


class Callable:
    def __call__(self, x):
        return x + 1

    def method(self, x):
        return x + 2

    @rx.function
    def compiled_method(self, x):
        return x + 3


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (Callable(), 2.0),
        (Callable().method, 3.0),
        (Callable().compiled_method, 4.0),
        (functools.partial(lambda a, x: a + x, 4), 5.0),
        (rx.function(lambda x: x + 5), 6.0),
        (jnp.exp2, 2.0),
    ],
)
def test_any_callable_runs(strategy, fn, expected):
    assert components(strategy.run(fn, args=(jnp.float32(1),))) == [expected] * 2


@pytest.mark.parametrize("args", [None, "ab", 3, {"x": 1}])
def test_args_that_are_no_sequence_are_refused_with_the_cure(strategy, args):
    with pytest.raises(ValueError, match=r"write `args=\(x,\)`"):
        strategy.run(lambda x: x, args=args)


def test_kwargs_that_are_no_dictionary_are_refused(strategy):
    with pytest.raises(TypeError, match="kwargs must be a dictionary"):
        strategy.run(lambda: 1, kwargs=[1])


@pytest.mark.parametrize("fn", [3, None, "f"])
def test_what_is_not_a_function_is_refused(strategy, fn):
    with pytest.raises(TypeError, match=r"strategy\.run needs a function"):
        strategy.run(fn)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("way", WAYS)
def test_a_value_of_another_number_of_replicas_is_refused(strategy, way, count):
    with pytest.raises(ValueError, match=f"{count} components was used with 2 replicas"):
        way(strategy, lambda x: x, D.PerReplica([jnp.ones(2)] * count))


def test_options_are_accepted(strategy):
    options = D.RunOptions(experimental_enable_dynamic_batch_size=False)

    assert strategy.run(lambda: 4, options=options) == 4


def test_eager_code_is_called_once_for_each_replica_and_step(strategy):
    calls = []
    for _ in range(2):
        strategy.run(lambda: calls.append(int(context().replica_id_in_sync_group)))

    assert calls == [0, 1, 0, 1]


@pytest.mark.parametrize("count", [2, 8])
def test_compiled_code_is_traced_once_however_many_replicas(count):
    strategy, calls = mirrored(count), []

    def step(x):
        calls.append(1)
        return x + replica_id()

    function = rx.function(lambda x: strategy.run(step, args=(x,)))
    for k in range(3):
        function(jnp.float32(k))

    assert calls == [1]
    assert function.experimental_get_tracing_count() == 1


def test_a_function_given_to_run_is_traced_once_for_each_signature(strategy):
    calls = []

    @rx.function
    def step(x):
        calls.append(x.shape)
        return x + replica_id()

    results = [components(strategy.run(step, args=(jnp.float32(k),))) for k in range(3)]
    strategy.run(step, args=(jnp.ones(2),))

    assert results == [[k, k + 1.0] for k in range(3)]
    assert calls == [(), (2,)]


def test_a_function_given_to_run_takes_its_declared_signature(strategy):
    @rx.function(input_signature=[rx.TensorSpec([None], "float32")])
    def step(x):
        return x.sum()

    assert components(strategy.run(step, args=([1.0, 2.0],))) == [3.0, 3.0]
    with pytest.raises(TypeError, match="input_signature"):
        strategy.run(step, args=(jnp.ones((2, 2)),))


def test_two_runs_in_one_function_follow_each_other(strategy):
    with strategy.scope():
        v = rx.Variable(0.0, aggregation=rx.VariableAggregation.SUM)

    @rx.function
    def both():
        strategy.run(lambda: v.assign_add(replica_id() + 1))
        return strategy.run(lambda: v + replica_id())

    assert components(both()) == [3.0, 4.0]
    assert components(both()) == [6.0, 7.0]


def test_a_compiled_function_inside_an_eager_replica_may_synchronise(strategy):
    inner = rx.function(lambda x: context().all_reduce("SUM", x))

    assert components(strategy.run(lambda: inner(replica_id() + 1))) == [3.0, 3.0]


def test_an_exception_while_tracing_keeps_its_type_and_the_strategy(strategy):
    def broken():
        raise ZeroDivisionError("inside the replica")

    with pytest.raises(ZeroDivisionError, match="inside the replica"):
        compiled(strategy, broken)

    assert not D.has_strategy()
    assert components(eagerly(strategy, replica_id)) == [0.0, 1.0]


@pytest.mark.parametrize("way", WAYS)
def test_run_enters_the_scope_itself(strategy, way):
    made = []

    def step():
        if not made:
            made.append(rx.Variable(10.0))
        return made[0] + replica_id()

    result = way(strategy, step)

    assert components(result) == [10.0, 11.0]
    assert made[0] is made[-1]  # eager replicas create it together
    assert strategy.extended.variable_created_in_scope(made[0])
    assert len(made[0].components) == 2


def test_strings_that_differ_cannot_enter_one_program(strategy):
    texts = strategy.run(lambda: f"r{context().replica_id_in_sync_group}")

    with pytest.raises(TypeError, match=r"Run without `rx\.function`"):
        compiled(strategy, lambda t: jnp.float32(len(t)), texts)


def test_ragged_values_made_inside_a_function_are_refused_with_their_shapes(strategy):
    def step(x):
        return strategy.run(lambda x: x.sum(), args=(D.PerReplica([x[:1], x]),))

    with pytest.raises(ValueError, match=r"\(1,\), \(2,\)") as error:
        rx.function(step)(jnp.ones(2))

    assert "drop_remainder=True" in str(error.value)


def test_ragged_arguments_of_a_function_run_each_replica_by_itself(strategy):
    ragged = D.PerReplica([jnp.ones(1), jnp.ones(2)])
    step = rx.function(
        lambda v: strategy.run(lambda x: context().all_reduce("SUM", x.sum()), args=(v,))
    )

    assert components(step(ragged)) == [3.0, 3.0]


def test_no_distribution_without_run(strategy):
    with strategy.scope():
        result = jnp.ones(2) + 1

    assert isinstance(result, jax.Array)
    assert len(result.devices()) == 1


def test_a_numpy_batch_that_every_replica_gets_whole_is_explained_once(caplog, monkeypatch):
    monkeypatch.setattr("replicax._src.strategy.run._warned", False)
    two = mirrored(2)

    for batch in (np.ones((3, 2)), np.ones(()), np.ones((0, 2)), jnp.ones((4, 2)), 4):
        two.run(lambda x: x, args=(batch,))
    spread = per_replica(two, [np.ones(2)] * 2)
    two.run(lambda x, y: x, args=(np.ones((4, 2)), spread))
    mirrored(1).run(lambda x: x, args=(np.ones((4, 2)),))
    assert not caplog.records

    for _ in range(3):
        two.run(lambda batch: batch, kwargs={"batch": {"x": np.ones((4, 2))}})

    (record,) = caplog.records
    assert "shape (4, 2)" in record.getMessage()
    assert "every one of the 2 replicas gets all of it" in record.getMessage()


@pytest.fixture
def dist(strategy):
    x = np.arange(12, dtype=np.float32)
    return strategy.experimental_distribute_dataset(rx.data.Dataset.from_tensor_slices(x).batch(4))


def test_a_python_number_that_changes_is_not_kept_from_the_step_before(strategy, dist):
    totals = []

    @rx.function
    def epoch(dataset):
        for i, batch in enumerate(dataset):
            per_replica = strategy.run(lambda x: jnp.sum(x) + i, args=(batch,))  # noqa: B023
            totals.append(float(strategy.reduce("SUM", per_replica, axis=None)))

    epoch(dist)

    assert totals == [6 + 0, 22 + 2, 38 + 4]


def test_a_method_is_run_as_well_as_a_function(strategy, dist):
    class Model:
        def __init__(self):
            with strategy.scope():
                self.total = rx.Variable(0.0, aggregation=rx.VariableAggregation.SUM)

        def step(self, x):
            self.total.assign_add(jnp.sum(x))

        @rx.function
        def epoch(self, dataset):
            for batch in dataset:
                strategy.run(self.step, args=(batch,))

    model = Model()
    model.epoch(dist)

    assert float(model.total) == sum(range(12))


def test_default_arguments_that_change_are_seen(strategy, dist):
    totals = []

    @rx.function
    def epoch(dataset):
        for i, batch in enumerate(dataset):

            def fn(x, scale=i):
                return jnp.sum(x) * scale

            totals.append(float(strategy.reduce("SUM", strategy.run(fn, args=(batch,)), axis=None)))

    epoch(dist)

    assert totals == [0, 22, 76]


def test_the_body_runs_again_on_every_call_and_its_result_is_returned(strategy, dist):
    calls = []

    @rx.function
    def count(dataset):
        calls.append(1)
        return sum(1 for _ in dataset)

    assert [count(dist), count(dist)] == [3, 3]


def test_the_latest_used_things_are_kept():
    things = LRUCache()
    first = things.find("first", object)
    for i in range(300):
        things.find(i, object)
        assert things.find("first", object) is first
    kept = things.find(299, object)

    assert things.find(299, object) is kept
    assert len(things._entries) <= 256


@pytest.mark.parametrize(
    "make",
    [
        lambda: rx.distribute.MirroredStrategy(["CPU:0"]),
        lambda: rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"]),
        rx.distribute.TPUStrategy,
    ],
    ids=["one replica", "two replicas", "tpu"],
)
def test_functions_take_strings_beside_numbers(make):
    strategy = make()
    words = [b"a", b"bb", b"ccc", b"dddd", b"e"]
    dataset = rx.data.Dataset.from_tensor_slices((words, np.arange(5.0, dtype=np.float32)))
    dist = strategy.experimental_distribute_dataset(dataset.batch(4))  # the last is short

    def replica_fn(batch):
        words, x = batch
        return x.sum() + sum(map(len, words))

    def summed(value):
        return float(strategy.reduce("SUM", value, axis=None))

    outer = rx.function(lambda batch: strategy.run(replica_fn, args=(batch,)))
    inner = rx.function(replica_fn)
    pulling = rx.function(lambda it: strategy.run(replica_fn, args=(next(it),)))
    iterator = iter(dist)

    assert [summed(outer(x)) for x in dist] == [16.0, 5.0]
    assert [summed(strategy.run(inner, args=(x,))) for x in dist] == [16.0, 5.0]
    assert [summed(pulling(iterator)) for _ in range(2)] == [16.0, 5.0]
