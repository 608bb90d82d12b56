"""What values mean does not depend on how a function came by them, nor on how it is run."""

import io
import queue
import types
from dataclasses import dataclass
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import replicax as rx
from replicax._src.base.errors import TracingError
from tests.replicas import context, mirrored, per_replica, replica_id

D = rx.distribute
AGGREGATIONS = list(rx.VariableAggregation)
ON_READ, ON_WRITE = rx.VariableSynchronization.ON_READ, rx.VariableSynchronization.ON_WRITE
strategy_of = cache(mirrored)


def hosted(strategy, fn, *args):
    """``fn`` on every replica, in a function that loops over a dataset."""

    @rx.function
    def loop():
        for _ in strategy.experimental_distribute_dataset(rx.data.Dataset.range(2).batch(2)):
            result = strategy.run(fn, args=args)
        return result

    return loop()


WAYS = {
    "eager": lambda s, fn, *args: s.run(fn, args=args),
    "function in run": lambda s, fn, *args: s.run(rx.function(fn), args=args),
    "run in function": lambda s, fn, *args: rx.function(lambda *a: s.run(fn, args=a))(*args),
    "loop": hosted,
}

# Each makes a per-replica value, in another form.
MAKERS = {
    "arrays": lambda s, rows: per_replica(s, rows),
    "by hand": lambda s, rows: D.PerReplica(rows),
    "NumPy": lambda s, rows: D.PerReplica([np.asarray(r) for r in rows]),
    "a result": lambda s, rows: WAYS["run in function"](s, lambda x: x, per_replica(s, rows)),
    "a batch": lambda s, rows: next(
        iter(
            s.experimental_distribute_dataset(
                rx.data.Dataset.from_tensor_slices(np.concatenate(rows)).batch(sum(map(len, rows)))
            )
        )
    ),
    "ragged": lambda s, rows: D.PerReplica([r[: len(r) - i] for i, r in enumerate(rows)]),
    "numbers": lambda s, rows: D.PerReplica([float(r[0]) for r in rows]),
}

USES = {
    "jnp": lambda x: jnp.add(x, 1),
    "operators": lambda x: 2 * x - x / 4,
    "comparison": lambda x: (x == 1) | (x > 2),
    "gradient": lambda x: jax.grad(lambda w: jnp.sum(w * x))(2.0),
    "loop": lambda x: jax.lax.fori_loop(0, 3, lambda _, c: c + jnp.sum(x), 0.0),
    "branch": lambda x: rx.cond(jnp.sum(x) > 2, lambda: jnp.sum(x), lambda: -jnp.sum(x)),
    "collective": lambda x: context().all_reduce("SUM", jnp.sum(x)),
    "itself": lambda x: x,
    "tree": lambda x: jax.tree.map(jnp.sin, {"a": [x]})["a"][0],
    "merge": lambda x: context().merge_call(
        lambda s, v: s.reduce("SUM", v, axis=None), (jnp.sum(x),)
    ),
}

VERBS = {
    "reduce": lambda s, x: s.reduce("SUM", x, axis=None),
    "mean of rows": lambda s, x: s.reduce("MEAN", x, axis=0),
    "gather": lambda s, x: s.gather(x, axis=0),
    "local_results": lambda s, x: s.experimental_local_results(x),
    "run": lambda s, x: s.run(lambda v: v * 2, args=(x,)),
    "nothing": lambda s, x: x,
}


def seen(strategy, fn):
    """What came out, as plain Python; or the kind of error."""
    try:
        result = fn()
    except (TypeError, ValueError) as error:
        return type(error)
    leaves = jax.tree.leaves(strategy.experimental_local_results(result))
    assert not any(isinstance(x, jax.core.Tracer) for x in leaves)
    return [np.asarray(x).tolist() for x in leaves]


@settings(deadline=None, max_examples=30)
@given(
    st.sampled_from(list(MAKERS)),
    st.sampled_from(list(USES)),
    st.sampled_from(list(WAYS)),
    st.sampled_from([2, 3]),
)
def test_in_a_replica_a_captured_value_is_the_same_as_an_argument(maker, use, way, replicas):
    strategy, fn = strategy_of(replicas), USES[use]
    value = MAKERS[maker](strategy, [jnp.arange(4.0) + i for i in range(replicas)])

    captured = seen(strategy, lambda: WAYS[way](strategy, lambda: fn(value)))
    given_eagerly = seen(strategy, lambda: strategy.run(fn, args=(value,)))

    assert captured == given_eagerly


@settings(deadline=None, max_examples=25)
@given(st.sampled_from(list(MAKERS)), st.sampled_from(list(VERBS)), st.sampled_from([2, 3]))
def test_a_function_sees_a_captured_value_as_plain_python_does(maker, verb, replicas):
    strategy, fn = strategy_of(replicas), VERBS[verb]
    value = MAKERS[maker](strategy, [jnp.arange(4.0) + i for i in range(replicas)])

    plain = seen(strategy, lambda: fn(strategy, value))

    assert seen(strategy, rx.function(lambda: fn(strategy, value))) == plain
    with strategy.scope():
        assert seen(strategy, lambda: rx.function(lambda x: fn(strategy, x))(value)) == plain


def test_a_captured_value_is_an_input_and_not_a_copy_in_the_program():
    strategy = strategy_of(2)
    value = per_replica(strategy, [jnp.arange(1000.0), jnp.arange(1000.0)])

    f = rx.function(lambda: strategy.reduce("SUM", strategy.run(lambda: value * 3), axis=None))

    assert "f32[1,1000]" in f.get_concrete_function().as_text()  # a shard, not a constant
    assert f()[1] == 6


def test_a_distributed_value_is_not_one_value_outside_of_replicas():
    value = D.PerReplica([1.0, 2.0])

    for use in (
        lambda: value + 1,
        lambda: jnp.add(value, 1),
        lambda: bool(value),
        lambda: value[0],
    ):
        with pytest.raises(TypeError, match="one value for each replica"):
            use()
    assert value in [value]
    assert value != D.PerReplica([1.0, 2.0])
    assert not hasattr(value, "shape")


def assigned(aggregation, synchronization, way, verb, amount):
    strategy = strategy_of(2)
    with strategy.scope():
        v = rx.Variable(0.0, synchronization=synchronization, aggregation=aggregation)
    returned = WAYS[way](strategy, lambda: getattr(v, verb)(amount()))
    total = float(strategy.reduce("SUM", returned, axis=None))
    return [float(x) for x in returned.values], total


# What TensorFlow 2.21 answers: always a per-replica value, of what each replica's copy has become.
RETURNED = {
    (ON_READ, "assign"): {key: [0.0, 1.0] for key in AGGREGATIONS},
    (ON_READ, "assign_add"): {key: [1.0, 1.0] for key in AGGREGATIONS},
    (ON_WRITE, "assign"): dict(
        zip(AGGREGATIONS[1:], ([1.0] * 2, [0.5] * 2, [0.0] * 2), strict=True)
    ),
    (ON_WRITE, "assign_add"): dict(
        zip(AGGREGATIONS, ([1.0] * 2, [2.0] * 2, [1.0] * 2, [1.0] * 2), strict=True)
    ),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", RETURNED, ids=lambda c: f"{c[0].name} {c[1]}")
def test_an_assignment_that_is_returned_is_each_replicas_value(way, case):
    synchronization, verb = case
    amount = replica_id if verb == "assign" else lambda: jnp.float32(1)
    for aggregation, values in RETURNED[case].items():
        expected = (values, sum(values))
        assert assigned(aggregation, synchronization, way, verb, amount) == expected, aggregation


@pytest.mark.parametrize("way", WAYS)
def test_a_number_that_all_replicas_add_is_returned_too(way):
    none = rx.VariableAggregation.NONE
    assert assigned(none, ON_WRITE, way, "assign_add", lambda: 1.0) == ([1.0, 1.0], 2.0)


SETTINGS = {"rate": 0.0}
GLOBAL = 0.0
MODULE = types.ModuleType("settings_of_the_user")


def helper():
    """Reads a global of this module."""
    return GLOBAL


class Trainer:
    """Has a setting, and other attributes that its replica function does not read."""

    default = 0.0

    def __init__(self):
        self.rate, self.seen, self.parts = 0.0, 0, [0.0, {"deep": 0.0}]

    def setting(self):
        """Through one more method."""
        return self.rate

    def step(self, x):
        """A method for replicas."""
        return x * 0 + self.setting()


@dataclass
class Config:
    """A dataclass that changes."""

    rate: float = 0.0


class Number(float):
    """Has its value in C, and a dictionary."""


class Slotted:
    """Has no dictionary."""

    __slots__ = ("rate",)


def keyword(x, *, rate=0.0):
    """Has a keyword-only default."""
    return x * 0 + rate


def readers():
    """How a replica function may come by a Python number, and how the number is changed."""
    trainer, config, numbers, slotted, table = Trainer(), Config(), [0.0], Slotted(), np.zeros(1)
    slotted.rate = MODULE.rate = Trainer.default = 0.0

    def in_module(value):
        globals()["GLOBAL"] = value

    def in_cell(value):
        nonlocal cell
        cell = value

    cell = 0.0
    return {
        "global": (lambda x: x * 0 + helper(), in_module),
        "cell": (lambda x: x * 0 + cell, in_cell),
        "helper's cell": (lambda x: (lambda: x * 0 + cell)(), in_cell),
        "dictionary": (lambda x: x * 0 + SETTINGS["rate"], lambda v: SETTINGS.update(rate=v)),
        "list": (lambda x: x * 0 + numbers[0], lambda v: numbers.__setitem__(0, v)),
        "longer list": (
            lambda x: x * 0 + sum(numbers),
            lambda v: numbers.__setitem__(slice(None), [v]),
        ),
        "method": (trainer.step, lambda v: setattr(trainer, "rate", v)),
        "object": (lambda x: x * 0 + trainer.rate, lambda v: setattr(trainer, "rate", v)),
        "deep": (
            lambda x: x * 0 + trainer.parts[1]["deep"],
            lambda v: trainer.parts[1].update(deep=v),
        ),
        "class": (lambda x: x * 0 + trainer.default, lambda v: setattr(Trainer, "default", v)),
        "getattr": (
            lambda x: x * 0 + getattr(trainer, "ra" + "te"),
            lambda v: setattr(trainer, "rate", v),
        ),
        "dataclass": (lambda x: x * 0 + config.rate, lambda v: setattr(config, "rate", v)),
        "slots": (lambda x: x * 0 + slotted.rate, lambda v: setattr(slotted, "rate", v)),
        "module": (lambda x: x * 0 + MODULE.rate, lambda v: setattr(MODULE, "rate", v)),
        "file": (lambda x: x * 0 + float(cell.getvalue()), lambda v: in_cell(io.StringIO(str(v)))),
        "subclass of float": (lambda x: x * 0 + cell, lambda v: in_cell(Number(v))),
        "exception": (lambda x: x * 0 + cell.args[0], lambda v: in_cell(ValueError(v))),
        "keyword": (keyword, lambda v: keyword.__kwdefaults__.update(rate=v)),
        "partial": (
            partial(lambda c, x: x * 0 + c.rate, config),
            lambda v: setattr(config, "rate", v),
        ),
        "NumPy": (lambda x: x * 0 + float(trainer.table[0]), lambda v: table.__setitem__(0, v)),
    }, (trainer, table)


@settings(deadline=None, max_examples=20)
@given(
    st.sampled_from(list(readers()[0])),
    st.lists(st.sampled_from([0.0, 1.0, 2.0]), min_size=4, max_size=4),
)
def test_a_python_value_that_changed_is_seen_by_the_next_step(reader, rates):
    strategy = strategy_of(2)
    bodies = queue.SimpleQueue()  # counts traces; not a value that programs depend on
    ways, (trainer, table) = readers()
    read, change = ways[reader]
    trainer.table = table

    @rx.function
    def loop(dataset):
        results = []
        for rate, batch in zip(rates, dataset, strict=True):
            change(rate)
            trainer.seen += 1  # nothing that the replicas read

            def step(x):
                bodies.put(None)
                return read(x)

            results.append(strategy.reduce("MEAN", strategy.run(step, args=(batch,)), axis=0))
        return results

    dataset = rx.data.Dataset.range(8).map(np.float32).batch(2)
    results = loop(strategy.experimental_distribute_dataset(dataset))

    assert [float(r) for r in results] == rates
    # Code that looks for attributes by names which it makes may read any of them, and files and
    # exceptions are compared by identity.
    has_more = reader in ("getattr", "file", "exception")
    assert bodies.qsize() == len(set(rates)) or has_more


def test_a_dataclass_that_changed_is_another_argument():
    config = Config()
    f = rx.function(lambda c: jnp.float32(c.rate))

    assert [float(f(config)), float(f(config))] == [0.0, 0.0]
    config.rate = 3.0
    assert float(f(config)) == 3.0
    assert float(f(Config())) == 0.0
    assert f.experimental_get_tracing_count() == 2


def test_one_replica_is_in_replica_context_in_functions_of_both_kinds():
    strategy = D.OneDeviceStrategy("CPU:0")
    asked = rx.function(lambda: jnp.float32(D.in_cross_replica_context()))

    with strategy.scope():
        assert float(asked()) == 1.0
        assert float(strategy.run(lambda: asked())) == 0.0
        assert float(asked()) == 1.0


@dataclass
class Pair:
    """A container that JAX was not told of."""

    name: str
    value: object
    inner: object = None


class Plain:
    """An object that holds something."""

    def __init__(self, **held):
        self.__dict__.update(held)


@pytest.mark.parametrize("way", WAYS)
def test_dataclasses_and_slices_that_replicas_return_come_out_as_values(way):
    strategy = strategy_of(2)

    def step(x):
        inner = rx.IndexedSlices(x * 2, jnp.arange(2))
        return {"pair": Pair("a", x, [Pair("b", x + 1), inner]), "plain": Pair("c", 5)}

    result = WAYS[way](strategy, step, per_replica(strategy, [jnp.ones(2), jnp.zeros(2)]))

    first, second = strategy.experimental_local_results(result)
    assert (first["pair"].name, first["pair"].inner[0].name) == ("a", "b")
    assert [r["pair"].value.tolist() for r in (first, second)] == [[1, 1], [0, 0]]
    assert second["pair"].inner[0].value.tolist() == [1, 1]
    assert first["pair"].inner[1].values.tolist() == [2, 2]
    assert (first["plain"].name, int(first["plain"].value)) == ("c", 5)


def test_dataclasses_that_functions_return_come_out_as_values():
    result = rx.function(lambda x: (Pair("a", x * 2), rx.IndexedSlices(x, jnp.arange(2))))(
        jnp.ones(2)
    )

    assert (result[0].name, result[0].value.tolist()) == ("a", [2, 2])
    assert result[1].indices.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("make", "place"),
    [
        (lambda x: Plain(layer=Plain(kernel=x)), "result['m'].layer.kernel"),
        (lambda x: Plain(parts=[1, {"w": x}]), "result['m'].parts[1]['w']"),
        (lambda x: lambda: x + 1, "x"),
    ],
)
def test_other_objects_that_hold_a_traced_value_are_refused_by_name(make, place):
    f = rx.function(lambda x: {"m": make(x)})

    with pytest.raises(TypeError) as error:
        f(jnp.ones(2))

    assert f"`{place}`" in str(error.value)


STATE = Plain(layer=Plain(kernel=jnp.zeros(()), log=[]))


@pytest.mark.parametrize("way", ["function in run", "run in function", "loop"])
@pytest.mark.parametrize(
    ("write", "place"),
    [
        (lambda s, x: setattr(s.layer, "kernel", x), ".layer.kernel"),
        (lambda s, x: s.layer.log.append(x), ".layer.log[0]"),
        (lambda s, x: s.layer.__dict__.update(grads={"w": [x]}), ".layer.grads['w'][0]"),
    ],
)
@pytest.mark.parametrize("by", ["closure", "global"])
def test_state_that_a_compiled_replica_function_writes_to_python_objects_is_refused(
    way, write, place, by
):
    state = Plain(layer=Plain(kernel=jnp.zeros(()), log=[]))
    STATE.__dict__.update(layer=Plain(kernel=jnp.zeros(()), log=[]))

    def by_closure():
        write(state, replica_id())
        return replica_id()

    def by_global():
        write(STATE, replica_id())
        return replica_id()

    name = {"closure": "state", "global": "STATE"}[by]
    with pytest.raises(TracingError) as error:
        WAYS[way](strategy_of(2), by_closure if by == "closure" else by_global)

    assert f"`{name}{place}`" in str(error.value)
    assert "rx.Variable" in str(error.value)


LARGE = 1_000_000


def doors(strategy):
    """What takes an array of NumPy, and gives what the replicas have of it."""
    with strategy.scope():
        variable = rx.Variable(np.zeros(LARGE, np.float32))
        model = rx.keras.Sequential([rx.keras.layers.Identity()])
    local = strategy.experimental_local_results
    from_function = strategy.experimental_distribute_values_from_function
    compiled = rx.function(lambda x: strategy.run(lambda x: x * 1, args=(x,)))
    assigned = rx.function(lambda x: variable.assign(x))
    return {
        "argument": lambda x: local(compiled(x)),
        "argument without a strategy": rx.function(lambda x: [x * 1]),
        "values from a function": lambda x: local(compiled(from_function(lambda _: x))),
        "assign": lambda x: local(variable.assign(x)),
        "assign_add": lambda x: local(variable.assign(jnp.zeros(LARGE)).assign_add(x)),
        "assign of a part": lambda x: [variable[5:].assign(x[5:])[5:]],
        "variable": lambda x: [rx.Variable(x).read_value()],
        "variable of truths": lambda x: [rx.Variable(x == 1).read_value()],
        "assign in a function": lambda x: [assigned(x), *local(variable)],
        "per_replica": lambda x: local(strategy.per_replica(x.reshape(2, -1))),
        "predict_on_batch": lambda x: [model.predict_on_batch(x.reshape(2, -1))],
    }


def test_what_its_owner_does_to_an_array_afterwards_changes_nothing():
    for door, enter in doors(strategy_of(2)).items():
        for _ in range(10):
            x = np.ones(LARGE, np.float32)
            given = enter(x)
            x[:] = 0
            assert all((np.asarray(value) == 1).all() for value in given), door


def taken(strategy):
    """What takes integers of NumPy, and gives them back as one device or all have them."""
    local = strategy.experimental_local_results
    from_function = strategy.experimental_distribute_values_from_function
    compiled = rx.function(lambda x: strategy.run(lambda x: x + 0, args=(x,)))

    def fed(x):
        dataset = rx.data.Dataset.from_tensors(np.stack([x, x]))
        (batch,) = strategy.experimental_distribute_dataset(dataset)
        return [piece[0] for piece in local(batch)]

    def pulled(x):
        iterator = iter(strategy.experimental_distribute_dataset(rx.data.Dataset.from_tensors(x)))
        return [strategy.gather(rx.function(lambda i: next(i))(iterator), 0)]

    return {
        "argument": lambda x: local(compiled(x)),
        "argument without a strategy": rx.function(lambda x: [x + 0]),
        "values from a function": lambda x: local(compiled(from_function(lambda _: x))),
        "variable": lambda x: [rx.Variable(x).read_value()],
        "assign": lambda x: [rx.Variable(jnp.zeros(x.shape, jnp.int32)).assign(x).read_value()],
        "dataset": fed,
        "dataset in a function": pulled,
        "reduce": lambda x: [strategy.reduce("SUM", from_function(lambda _: x), axis=None) // 2],
        "gather": lambda x: [strategy.gather(from_function(lambda _: x), 0)[: len(x)]],
        "per_replica": lambda x: local(strategy.per_replica(np.stack([x, x]))),
    }


DOORS = tuple(taken(strategy_of(2)))


@pytest.mark.parametrize("door", DOORS)
@settings(max_examples=20)
@given(
    number=st.integers(-(2**63), 2**63 - 1) | st.integers(-9, 9) | st.integers(2**31 - 2, 2**31 + 2)
)
def test_an_integer_arrives_as_it_is_or_is_refused(door, number):
    x = np.array([number, 0])
    if -(2**30) <= number < 2**30:
        for piece in taken(strategy_of(2))[door](x):
            assert np.asarray(piece).tolist() == [number, 0]
    elif not -(2**31) <= number < 2**31:
        with pytest.raises(OverflowError, match=r"does not fit into int32.*JAX_ENABLE_X64=1"):
            taken(strategy_of(2))[door](x)
