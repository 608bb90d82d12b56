"""A compiled function gives for every argument what a function that never saw another one gives."""

import array
import collections
import contextlib
import dataclasses
import datetime
import decimal
import enum
import fractions
import itertools
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
from replicax._src.functions.cache_keys import unstable_part
from replicax._src.functions.reachable import Edge, ReachableObjects


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


class Measure(float):
    """A number that shows itself rounded."""

    def __repr__(self):
        return f"{self:.0f} m"


class Ratio(fractions.Fraction):
    def __str__(self):
        return "a ratio"


class Value:
    """Equal by its content, by Python's wide equality."""

    def __init__(self, a):
        self.a = a

    def __eq__(self, other):
        return isinstance(other, Value) and self.a == other.a

    def __hash__(self):
        return hash(self.a)


class Named:
    """Equal by a name, whatever else it holds."""

    def __init__(self, a):
        self.name, self.a = "x", a

    def __eq__(self, other):
        return isinstance(other, Named) and self.name == other.name

    def __hash__(self):
        return hash(self.name)


class Slotted:
    """Equal by its content, without a hash or a `__dict__`."""

    __slots__ = ("__a",)

    def __init__(self, a):
        self.a = a

    @property
    def a(self):
        return self.__a

    @a.setter
    def a(self, value):
        self.__a = value

    def __eq__(self, other):
        return isinstance(other, Slotted) and self.a == other.a

    __hash__ = None


class Labelled(list):
    """A list with a slot."""

    __slots__ = ("a",)

    def __init__(self, a):
        super().__init__([1])
        self.a = a


class Words(collections.UserDict):
    pass


class Hidden:
    """Equal by its content, of which nothing is known."""

    def __init__(self, a):
        self._held = memoryview(repr(a).encode())
        self.a = a

    def __hash__(self):
        raise TypeError("unhashable")


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


class Derived(Box):
    """Keeps a value that is no field."""

    def __init__(self, b):
        super().__init__(1)
        self.b = b


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
    [Measure(1.25), Measure(1.5), Measure(1.25)],
    [Ratio(1, 2), Ratio(1, 3)],
    [Value(1), Value(1.0), Value(True), Value(0.0), Value(-0.0), Value(False)],
    [datetime.timezone(datetime.timedelta(0), name) for name in "ab"],
    [{"a": 1}.get, {"a": 1.0}.get, {"a": True}.get],
    [datetime.datetime(2020, 1, 1, 1, tzinfo=UTC), datetime.datetime(2020, 1, 1, 2, tzinfo=EAST),
     datetime.datetime(2020, 1, 1, 1, tzinfo=UTC, fold=1)],
]  # fmt: skip
# NumPy's numbers are arrays for a compiled function, which stand for any value.
PYTHON_ALIKE = [[x for x in xs if not isinstance(x, np.generic)] for xs in ALIKE]
HASHABLE = {
    "tuple": lambda x: (x,),
    "row": lambda x: Row([x]),
    "frozen": Frozen,
    "frozenset": lambda x: frozenset([x]),
    "value": Value,
    "named": Named,
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
    "derived": Derived,
    "slotted": Slotted,
    "labelled": Labelled,
    "words": lambda x: Words({"k": x}),
    "hidden": Hidden,
    "namespace": lambda x: types.SimpleNamespace(a=x),
    "aux value": lambda x: WithAux(1.5, Value(x)),
    "box": Box,
    "box of a dict": lambda x: Box({x: [x]}),
    "tree": lambda x: Tree(x, x),
    "aux": lambda x: WithAux(1.5, x),
    "slice": lambda x: slice(x, None, x),
    "object array": lambda x: np.array([x, None], object),
}
ORDERED = [
    lambda xs: dict.fromkeys(xs, 1.5),
    lambda xs: [({"a": dict.fromkeys(xs, 1.5)},)],
    lambda xs: collections.defaultdict(list, dict.fromkeys(xs, 1.5)),
    lambda xs: Tree({str(x): x for x in xs}),
    lambda xs: Box(dict.fromkeys(xs)),
    lambda xs: Table(dict.fromkeys(xs)),
    lambda xs: set(xs),
    lambda xs: frozenset(xs),
    lambda xs: collections.deque(xs),
    lambda xs: collections.OrderedDict.fromkeys(xs),
]


OBJECTS = (WithAux, Value, Named, Hidden, types.SimpleNamespace)


def described(x):  # noqa: C901 - one case for each kind
    """Everything that Python tells about a value: types, order, signs."""
    if isinstance(x, jax.Array):
        return f"array{x.shape}{x.dtype}{x.weak_type}"
    if isinstance(x, np.ndarray):
        return f"{x.dtype}{x.shape}{[described(v) for v in x.ravel().tolist()]}"
    if isinstance(x, dict | types.MappingProxyType | collections.UserDict):
        held = [(described(k), described(v)) for k, v in x.items()]
    elif isinstance(x, list | tuple | set | frozenset | collections.deque):
        held = [described(v) for v in x]
    elif dataclasses.is_dataclass(x) or isinstance(x, OBJECTS):
        held = {k: described(v) for k, v in vars(x).items() if k != "_held"}
    elif isinstance(x, Slotted):
        held = described(x.a)
    elif isinstance(x, types.BuiltinMethodType):
        held = x.__name__, described(x.__self__)
    elif isinstance(x, float | complex):
        held = struct.pack("<2d", x.real, x.imag).hex() + str(np.asarray(x).dtype)
    elif isinstance(x, datetime.timezone):
        held = x.tzname(None)
    elif isinstance(x, fractions.Fraction):
        held = x.numerator, x.denominator
    elif isinstance(x, range | slice):
        held = [described(v) for v in (x.start, x.stop, x.step)]
    else:
        held = repr(x), getattr(x, "tag", None)
    own = described(x.a) if isinstance(x, Labelled) else ""
    return f"{type(x).__name__}:{held}{own}"


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

    return ReachableObjects(Edge("reads", reads))


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


@settings(max_examples=60)
@given(alike_trees())
def test_each_argument_gets_its_own_answer(trees):
    compiled = rx.function(revealing, reduce_retracing=True)
    for tree in (*trees, *trees):
        assert outcome(compiled, tree) == outcome(rx.function(revealing), tree)


def plainly(*args):
    """What the function gives in Python, where JAX can flatten the arguments."""
    jax.tree.leaves(args)
    return revealing(*args)


@st.composite
def arguments(draw):
    """Two nests of containers, of one shape, with values that are alike, and dicts in any order."""
    pair = st.sampled_from(PYTHON_ALIKE).flatmap(lambda xs: st.tuples(*[st.sampled_from(xs)] * 2))
    names = st.sampled_from(sorted(CONTAINERS))

    def wrapped(held):
        def both(name, xs, count, backwards):
            if name not in CONTAINERS:
                keys = "ba"[:count]
                sides = zip(*xs[:count], strict=True)
                made = [dict(zip(keys, side, strict=True)) for side in sides]
                return made[0], dict(reversed(made[1].items())) if backwards else made[1]
            try:
                return tuple(CONTAINERS[name](x) for x in xs[0])
            except TypeError:  # it cannot be hashed
                return tuple([x] for x in xs[0])

        items = st.lists(held, min_size=2, max_size=2)
        return st.builds(both, names | st.just("named items"), items, st.just(2), st.booleans())

    return draw(st.recursive(pair, wrapped, max_leaves=4))


def change(x, random):
    """Change something that can be changed, somewhere in ``x``; say whether there was something."""
    inside = list(x) if isinstance(x, list | tuple | collections.deque) else []
    inside += list(x.values()) if isinstance(x, dict | collections.UserDict) else []
    if isinstance(x, OBJECTS) or dataclasses.is_dataclass(x):
        inside += list(vars(x).values())
    random.shuffle(inside)
    if random.random() < 0.7 and any(change(y, random) for y in inside):
        return True
    if isinstance(x, list | collections.deque):
        x.append(random.choice([0.0, -0.0, 0, False]))
    elif isinstance(x, set):
        x.add(random.choice([2, "b"]))
    elif isinstance(x, collections.UserDict) or type(x) in (dict, Table):
        if "k" in x and random.random() < 0.5:  # to the end
            x["k"] = x.pop("k")
        x["new"] = random.choice([0.0, -0.0])
    elif isinstance(x, Slotted | Box | Hidden | types.SimpleNamespace):
        x.a = random.choice([0.0, -0.0])
    else:
        return any(change(y, random) for y in inside)
    return True


@settings(max_examples=25)
@given(arguments(), st.randoms())
def test_a_compiled_function_gives_what_python_gives(pair, random):
    one, other = pair
    compiled = rx.function(revealing, reduce_retracing=True)
    for tree in (one, other, one):
        assert outcome(compiled, tree) == outcome(plainly, tree)
    with contextlib.suppress(TypeError):  # keys of other types
        change(one, random)
    for tree in (one, other):
        assert outcome(compiled, tree) == outcome(plainly, tree)


@settings(max_examples=25)
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
        assert outcome(compiled, tree) == outcome(plainly, tree)


@settings(max_examples=60)
@given(alike_trees())
def test_reach_tells_values_apart(trees):
    one, other = map(reached, trees)
    assert (one.key != other.key) or described(trees[0]) == described(trees[1])
    if unstable_part(one.key) is None:
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
    "words": (lambda: Words(a=1.0), lambda x: x.update(a=6.0)),
    "method": (lambda: {"a": 1.0}.get, lambda x: x.__self__.update(a=6.0)),
    "slotted": (lambda: Slotted(1.0), lambda x: setattr(x, "a", 6.0)),
    "hidden": (lambda: Hidden(1.0), lambda x: setattr(x, "a", 6.0)),
    "box of a set": (lambda: Box({1.0}), lambda x: x.a.update({2.0, 3.0})),
}


def _total(x):
    if isinstance(x, types.BuiltinMethodType):
        return jnp.float32(x("a"))
    if isinstance(x, Words):
        return jnp.float32(x["a"])
    if isinstance(x, Slotted | Hidden):
        return jnp.float32(x.a)
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
    assert ReachableObjects(Edge("x", value)).key != ReachableObjects(Edge("x", other)).key
    assert ReachableObjects(Edge("x", value)).key == ReachableObjects(Edge("x", value)).key


def test_equal_arguments_share_a_program():
    compiled = rx.function(revealing)
    for _ in range(3):
        compiled({1.0, 2.0}, Table(a=1), {"b": 1, "a": 2.5}, Tree(1.5, (1, NAN)), WithAux(2.5, "x"))
        compiled({1.0, 2.0}, Table(a=1), {"b": 1, "a": 2.5}, Tree(1.5, (1, NAN)), WithAux(2.5, "x"))
        compiled(Value((1, -0.0)), Frozen({"a": 1}), datetime.UTC, np.dtype("f4"))
        compiled(Value((1, -0.0)), Frozen({"a": 1}), datetime.UTC, np.dtype("f4"))
    assert compiled.experimental_get_tracing_count() == 2


def test_an_iterator_is_read_by_every_call():
    compiled = rx.function(lambda numbers: jnp.float32(next(numbers)))
    numbers, steps = iter([1.0, 2.0, 3.0]), itertools.count(5)
    assert [float(compiled(numbers)) for _ in range(3)] == [1.0, 2.0, 3.0]
    assert [float(compiled(steps)) for _ in range(2)] == [5.0, 6.0]


def test_the_warning_names_an_iterator(caplog):
    compiled = rx.function(lambda numbers: jnp.float32(next(numbers)))
    numbers = itertools.count()
    for _ in range(6):
        compiled(numbers)
    assert "argument 'numbers' is or holds a count, which may change" in caplog.text


def _keys_in_order(items):
    return {"z": jnp.stack([jnp.asarray(v) for v in items.values()]), "a": jnp.float32(0)}


RUNS = {
    "a function": lambda strategy, x: rx.function(_keys_in_order)(x),
    "keywords": lambda strategy, x: rx.function(lambda **items: _keys_in_order(items))(**x),
    "a run": lambda strategy, x: strategy.run(_keys_in_order, (x,)),
    "a compiled run": lambda strategy, x: rx.function(lambda y: strategy.run(_keys_in_order, (y,)))(
        x
    ),
    "a run of a function": lambda strategy, x: strategy.run(rx.function(_keys_in_order), (x,)),
    "a merge call": lambda strategy, x: strategy.run(
        lambda y: rx.distribute.get_replica_context().merge_call(
            lambda s, z: _keys_in_order(s.experimental_local_results(z)[0]), (y,)
        ),
        (x,),
    ),
}


@pytest.mark.parametrize("way", sorted(RUNS))
def test_dicts_keep_their_order(way):
    strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    found = RUNS[way](strategy, {"b": jnp.float32(2), "a": jnp.float32(1)})
    assert list(found) == ["z", "a"]
    first = strategy.experimental_local_results(found["z"])[0]
    assert np.asarray(first).tolist() == [2.0, 1.0]


def test_replicas_keep_the_sign_of_zero():
    strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])

    def step():
        number = rx.distribute.get_replica_context().replica_id_in_sync_group
        return -0.0 if number else 0.0

    assert repr(strategy.experimental_local_results(strategy.run(step))) == "(0.0, -0.0)"


@dataclasses.dataclass
class Noted:
    a: int = 1


@pytest.mark.parametrize("name", ["a", "b", "_b", "__b"])
def test_every_attribute_of_a_users_dataclass_counts(name):
    compiled = rx.function(lambda noted, x: x * getattr(noted, name))
    noted = Noted()
    for value in (2.0, 3.0, -0.0):
        setattr(noted, name, value)
        assert float(compiled(noted, jnp.ones(()))) == value
