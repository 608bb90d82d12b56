"""A compiled function gives for every argument what a function that never saw another one gives."""

import array
import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import struct
import types
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import replicax as rx
from replicax.functions._reach import Edge, Reach


class Number(enum.IntEnum):
    ZERO = 0
    ONE = 1


class Letter(enum.StrEnum):
    A = "a"


class Text(str):
    __slots__ = ()


class Data(bytes):
    pass


class Tagged(str):
    """Text with an attribute."""

    __slots__ = ("__dict__",)

    def __new__(cls, text, tag):
        made = super().__new__(cls, text)
        made.tag = tag
        return made


class Pair(NamedTuple):
    a: Any
    b: Any


class Row(tuple):
    __slots__ = ()


class Table(dict):
    pass


class Items(list):
    pass


@dataclasses.dataclass
class Box:
    a: Any


@dataclasses.dataclass(frozen=True)
class Frozen:
    a: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Tree:
    a: Any
    fixed: Any = dataclasses.field(metadata={"static": True}, default=None)


class WithAux:
    """A pytree that keeps a value beside its leaves."""

    def __init__(self, a, aux):
        self.a, self.aux = a, aux


jax.tree_util.register_pytree_node(
    WithAux, lambda x: ((x.a,), x.aux), lambda aux, held: WithAux(*held, aux)
)

NAN = float("nan")
UTC, EAST = datetime.UTC, datetime.timezone(datetime.timedelta(hours=1))
# Values that Python takes for equal, or that look alike.
ALIKE = [
    [1, True, 1.0, 1 + 0j, decimal.Decimal(1), decimal.Decimal("1.0"), fractions.Fraction(1),
     Number.ONE, np.float32(1), np.float16(1), np.int32(1), np.bool_(True), np.complex64(1)],
    [0, False, 0.0, -0.0, 0j, complex(0.0, -0.0), complex(-0.0, 0.0), decimal.Decimal("-0"),
     decimal.Decimal(0), Number.ZERO, np.float32(-0.0), np.float32(0.0), fractions.Fraction(0)],
    [NAN, -NAN, complex(NAN, 0), decimal.Decimal("NaN"), np.float32("nan"), float("inf")],
    ["a", Text("a"), Letter.A, np.str_("a"), Tagged("a", 1), Tagged("a", 2), Tagged("a", True)],
    [b"a", Data(b"a"), np.bytes_(b"a")],
    [range(0), range(1, 1), (), range(0, 0, 2)],
    [datetime.datetime(2020, 1, 1, 1, tzinfo=UTC), datetime.datetime(2020, 1, 1, 2, tzinfo=EAST),
     datetime.datetime(2020, 1, 1, 1, tzinfo=UTC, fold=1)],
]  # fmt: skip
HASHABLE = {
    "tuple": lambda x: (x,),
    "row": lambda x: Row([x]),
    "frozen": Frozen,
    "frozenset": lambda x: frozenset([x]),
}
CONTAINERS = {
    **HASHABLE,
    "list": lambda x: [x],
    "dict": lambda x: {"k": x},
    "key": lambda x: {x: 1.5},
    "keys": lambda x: {x: 1, "zz": 2},
    "ordered": lambda x: collections.OrderedDict({x: 1}),
    "default": lambda x: collections.defaultdict(list, {x: x}),
    "table": lambda x: Table({x: x}),
    "items": lambda x: Items([x]),
    "set": lambda x: {x},
    "deque": lambda x: collections.deque([x]),
    "proxy": lambda x: types.MappingProxyType({x: x}),
    "user dict": lambda x: collections.UserDict({"k": x}),
    "pair": lambda x: Pair(x, x),
    "box": Box,
    "box of a dict": lambda x: Box({x: [x]}),
    "tree": lambda x: Tree(x, x),
    "aux": lambda x: WithAux(1.5, x),
    "slice": lambda x: slice(x, None, x),
    "object array": lambda x: np.array([x, None], object),
}
ORDERED = [
    lambda xs: Box(dict.fromkeys(xs)),
    lambda xs: Table(dict.fromkeys(xs)),
    lambda xs: set(xs),
    lambda xs: frozenset(xs),
    lambda xs: collections.deque(xs),
    lambda xs: collections.OrderedDict.fromkeys(xs),
]


def described(x):
    """Everything that Python tells about a value: types, order, signs."""
    if isinstance(x, jax.Array):
        return f"array{x.shape}{x.dtype}{x.weak_type}"
    if isinstance(x, np.ndarray):
        return f"{x.dtype}{x.shape}{[described(v) for v in x.ravel().tolist()]}"
    if isinstance(x, dict | types.MappingProxyType | collections.UserDict):
        held = [(described(k), described(v)) for k, v in x.items()]
    elif isinstance(x, list | tuple | set | frozenset | collections.deque):
        held = [described(v) for v in x]
    elif dataclasses.is_dataclass(x) or isinstance(x, WithAux):
        held = {k: described(v) for k, v in vars(x).items()}
    elif isinstance(x, float | complex):
        held = struct.pack("<2d", x.real, x.imag).hex() + str(np.asarray(x).dtype)
    elif isinstance(x, range | slice):
        held = [described(v) for v in (x.start, x.stop, x.step)]
    else:
        held = repr(x), getattr(x, "tag", None)
    return f"{type(x).__name__}:{held}"


def revealing(*args):
    return jnp.asarray(np.frombuffer(described(args).encode(), np.uint8))


def outcome(function, *args):
    """The answer; for an argument that JAX cannot flatten, the kind of error."""
    try:
        return bytes(np.asarray(function(*args))).decode()
    except ValueError as error:
        return str(error)[:40]


def reached(x):
    """What a function can come to that may read every attribute of ``x``."""

    def reads():
        return getattr(x, "any name")

    return Reach(Edge("reads", reads))


@st.composite
def alike_trees(draw):
    """Two trees of one shape, with values that are alike."""
    values = draw(st.sampled_from(ALIKE))
    one, other = draw(st.sampled_from(values)), draw(st.sampled_from(values))
    names = draw(st.lists(st.sampled_from(sorted(HASHABLE)), max_size=1))
    names += draw(st.lists(st.sampled_from(sorted(CONTAINERS)), max_size=2))
    for i, name in enumerate(names):
        name = name if i in (0, len(names) - 1) else "list"
        try:
            one, other = CONTAINERS[name](one), CONTAINERS[name](other)
        except (TypeError, decimal.InvalidOperation):  # it cannot be hashed
            one, other = [one], [other]
    return one, other


@settings(max_examples=200)
@given(alike_trees())
def test_each_argument_gets_its_own_answer(trees):
    compiled = rx.function(revealing, reduce_retracing=True)
    for tree in (*trees, *trees):
        assert outcome(compiled, tree) == outcome(rx.function(revealing), tree)


@settings(max_examples=60)
@given(
    st.sampled_from(ORDERED),
    st.lists(st.sampled_from([0, 8, 16, 1, 9]), unique=True, max_size=4),
    st.randoms(),
)
def test_the_order_of_items_counts(made, items, random):
    other = list(items)
    random.shuffle(other)
    compiled = rx.function(revealing, reduce_retracing=True)
    for tree in (made(items), made(other)):
        assert outcome(compiled, tree) == outcome(rx.function(revealing), tree)


@settings(max_examples=200)
@given(alike_trees())
def test_reach_tells_values_apart(trees):
    one, other = map(reached, trees)
    assert (one.key != other.key) or described(trees[0]) == described(trees[1])
    assert one.key == reached(trees[0]).key
    assert one.is_unchanged()


CHANGES = {
    "set": (lambda: {1.0}, lambda x: x.update({2.0, 3.0})),
    "deque": (lambda: collections.deque([1.0]), lambda x: x.extend([2.0, 3.0])),
    "table": (lambda: Table({1.0: 1}), lambda x: x.update({5.0: 1})),
    "items": (lambda: Items([1.0]), lambda x: x.append(5.0)),
    "user list": (lambda: collections.UserList([1.0]), lambda x: x.append(5.0)),
    "bytearray": (lambda: bytearray(b"\x01"), lambda x: x.extend(b"\x05")),
    "array": (lambda: array.array("d", [1.0]), lambda x: x.append(5.0)),
    "view": (lambda: memoryview(bytearray(b"\x01")), lambda x: x.__setitem__(0, 6)),
    "objects": (lambda: np.array([1.0], object), lambda x: x.__setitem__(0, 6.0)),
    "box of a set": (lambda: Box({1.0}), lambda x: x.a.update({2.0, 3.0})),
}


def _total(x):
    return jnp.float32(sum(x.a if isinstance(x, Box) else x))


@pytest.mark.parametrize("kind", sorted(CHANGES))
def test_a_changed_argument_is_traced_again(kind):
    make, change = CHANGES[kind]
    x, compiled = make(), rx.function(_total)
    assert float(compiled(x)) == 1.0
    change(x)
    assert float(compiled(x)) == 6.0


@pytest.mark.parametrize("kind", sorted(CHANGES))
def test_a_changed_value_in_a_loop_is_traced_again(kind):
    make, change = CHANGES[kind]
    x, found = make(), []
    strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])

    def step(batch):
        return _total(x) + 0 * batch

    @rx.function
    def epoch(dataset):
        for batch in dataset:
            found.append(strategy.experimental_local_results(strategy.run(step, (batch,)))[0])

    data = rx.data.Dataset.from_tensor_slices(np.zeros(4, np.float32)).batch(4)
    batches = strategy.experimental_distribute_dataset(data)
    epoch(batches)
    change(x)
    epoch(batches)
    assert [float(v[0]) for v in found] == [1.0, 6.0]


def test_attributes_of_a_container_count_in_a_loop():
    reaches = []
    for scale in (1.0, 2.0):
        held = Items([1])
        held.scale = scale
        reaches.append(reached(held))
    assert reaches[0].key != reaches[1].key
    assert reaches[1].is_unchanged()
    held.scale = 3.0
    assert not reaches[1].is_unchanged()


@pytest.mark.parametrize("value", [fractions.Fraction(1, 3), datetime.date(2020, 1, 1)], ids=repr)
def test_standard_values_are_found_by_value(value):
    other = fractions.Fraction(2, 3) if isinstance(value, fractions.Fraction) else datetime.date.max
    assert Reach(Edge("x", value)).key != Reach(Edge("x", other)).key
    assert Reach(Edge("x", value)).key == Reach(Edge("x", value)).key


def test_equal_arguments_share_a_program():
    compiled = rx.function(revealing)
    for _ in range(3):
        compiled({1.0, 2.0}, Table(a=1), {"b": 1, "a": 2.5}, Tree(1.5, (1, NAN)), WithAux(2.5, "x"))
        compiled({1.0, 2.0}, Table(a=1), {"a": 2.5, "b": 1}, Tree(1.5, (1, NAN)), WithAux(2.5, "x"))
    assert compiled.experimental_get_tracing_count() == 1
