"""A checkpoint of any object graph is refused, or brings every variable back."""

import collections
import dataclasses
import enum
import functools
import itertools
import tempfile
import types
import weakref
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import replicax as rx


class Colour(enum.Enum):
    RED = 1
    GREEN = 2


class Level(enum.IntEnum):
    LOW = 1


class Plain:
    def __init__(self, *held):
        for i, x in enumerate(held):
            setattr(self, f"part{i}", x)


class Slots:
    __slots__ = ("__hidden", "__weakref__", "first", "unset")

    def __init__(self, first=None, second=None):
        self.first, self.__hidden = first, second


class SlotsAndMore(Slots):
    def __init__(self, first=None, second=None, third=None):
        super().__init__(first, second)
        self.third = third


@dataclasses.dataclass(eq=False)
class Data:
    a: Any = None
    b: Any = None


@dataclasses.dataclass(eq=False, slots=True, frozen=True)
class SlotData:
    a: Any = None
    b: Any = None


class Pair(NamedTuple):
    a: Any
    b: Any = None


class MyList(list):
    pass


class MyDict(dict):
    pass


class MySequence(collections.abc.Sequence):
    def __init__(self, items):
        self._items = items

    def __getitem__(self, i):
        return self._items[i]

    def __len__(self):
        return len(self._items)


class MyMapping(collections.abc.Mapping):
    def __init__(self, items):
        self._items = items

    def __getitem__(self, key):
        return self._items[key]

    def __iter__(self):
        return iter(self._items)

    def __len__(self):
        return len(self._items)


def with_attribute(kind, held):
    made = kind(held[1:]) if kind is MyList else kind({f"k{i}": x for i, x in enumerate(held[1:])})
    made.extra = held[0]
    return made


def object_array(held):
    made = np.empty((len(held), 1), object)
    made[:, 0] = held
    return made


# How to hold some objects, in ways that have names and in ways that have none.
NAMED = {
    "list": list,
    "tuple": tuple,
    "deque": collections.deque,
    "plain": lambda held: Plain(*held),
    "slots": lambda held: Slots(*held[:2]),
    "slots and more": lambda held: SlotsAndMore(*held[:3]),
    "data": lambda held: Data(*held[:2]),
    "slot data": lambda held: SlotData(*held[:2]),
    "namedtuple": lambda held: Pair(*held[:2]),
    "namespace": lambda held: types.SimpleNamespace(x=held),
    "partial": lambda held: functools.partial(print, held[0], *held[1:2], k=held[2:]),
    "user list": collections.UserList,
    "list subclass": lambda held: with_attribute(MyList, held),
    "dict subclass": lambda held: with_attribute(MyDict, held),
    "sequence": MySequence,
    "object array": object_array,
}
UNNAMED = {
    "set": lambda held: {Plain(x) for x in held},
    "frozenset": lambda held: frozenset(Plain(x) for x in held),
    "values": lambda held: dict(enumerate(held)).values(),
    "key": lambda held: {Plain(held): 1},
    "hidden attribute": lambda held: _shadowed(held),
}
MAPPINGS = {
    "dict": dict,
    "ordered": collections.OrderedDict,
    "default": lambda items: collections.defaultdict(list, items),
    "proxy": types.MappingProxyType,
    "user dict": collections.UserDict,
    "mapping": MyMapping,
    "chain": lambda items: collections.ChainMap({}, items),
}
NAMES = st.one_of(st.text(max_size=3), st.integers(-2, 2), st.sampled_from(["1", "0", "a/b", "."]))
KEYS = st.one_of(
    NAMES,
    st.booleans(),
    st.floats(),
    st.binary(max_size=2),
    st.sampled_from([*Colour, *Level, None, (), ("a", 1), frozenset({1}), np.int64(1)]),
)


def _shadowed(held):
    made = with_attribute(MyDict, held)
    made["extra"] = 1
    return made


def graphs(keys, holders):
    """Descriptions of object graphs."""

    def inner(children):
        held = st.lists(children, min_size=1, max_size=3)
        return st.one_of(
            st.tuples(st.sampled_from(sorted(holders)), held),
            st.tuples(
                st.sampled_from(sorted(MAPPINGS)), st.lists(st.tuples(keys, children), max_size=3)
            ),
        )

    leaf = st.sampled_from(["variable", "variable", "variable", "words", "shared"])
    return st.recursive(leaf, inner, max_leaves=8)


class Built:
    """An object graph, and every variable in it."""

    def __init__(self, description, start):
        self.variables = []
        self._values = itertools.count(start) if start else itertools.repeat(0)
        self._made = []
        self.root = Plain()
        self.root.content = self._build(description)
        self.root.itself = self.root

    def _variable(self):
        self.variables.append(rx.Variable(float(next(self._values))))
        return self.variables[-1]

    def _build(self, description):
        if description == "words":
            return {"a set": {"of", "words"}, "numbers": {1.5: 2, (1, 2): "x"}, "none": None}
        if description == "variable" or (description == "shared" and not self._made):
            self._made.append(self._variable())
            return self._made[-1]
        if description == "shared":
            return self._made[len(self._made) // 2]
        kind, held = description
        if kind in MAPPINGS:
            items = {}
            for key, child in held:
                if key not in items:
                    items[key] = self._build(child)
            made = MAPPINGS[kind](items)
        else:
            # A fixed number of parts: what a holder leaves out is not in the graph.
            made = {**NAMED, **UNNAMED}[kind]([self._build(child) for child in held[:2]])
        self._made.append(made)
        return made

    @property
    def values(self):
        return [float(v) for v in self.variables]


def saved(built):
    """The path of a checkpoint; None if it was refused, by the paths of variables."""
    folder = tempfile.mkdtemp()
    try:
        return rx.train.Checkpoint(built.root).save(f"{folder}/ckpt")
    except ValueError as error:
        refusal = str(error)
    assert "have no name in the checkpoint" in refusal
    assert "Variable at content" in refusal
    return None


def brings_back(description):
    """Whether a graph can be saved; if so, that all of it comes back."""
    before, after = Built(description, 1), Built(description, 0)
    path = saved(before)
    if path is None:
        return False
    status = rx.train.Checkpoint(after.root).restore(path)
    assert after.values == before.values
    status.assert_consumed()
    return True


@settings(max_examples=150)
@given(graphs(KEYS, {**NAMED, **UNNAMED}))
def test_every_variable_comes_back_or_save_refuses(description):
    brings_back(description)


@settings(max_examples=100)
@given(graphs(st.text(max_size=3), NAMED))
def test_graphs_with_names_are_saved(description):
    assert brings_back(description)


@pytest.mark.parametrize("kind", sorted(UNNAMED))
def test_parts_without_a_name_are_refused_and_count_as_missing(kind, tmp_path):
    assert not brings_back((kind, ["variable", "variable"]))

    path = rx.train.Checkpoint(x=rx.Variable(1.0)).save(f"{tmp_path}/ckpt")
    status = rx.train.Checkpoint(
        x=rx.Variable(0.0), content=Built((kind, ["variable"]), 0).root.content
    ).restore(path)
    with pytest.raises(rx.errors.CheckpointError, match="content"):
        status.assert_existing_objects_matched()


@pytest.mark.parametrize(
    "keys", [[("a", 1)], [Colour.RED], [1.5], [b"x"], [None], [1, "1"], [True, "True"]], ids=repr
)
def test_keys_that_are_no_names_are_refused(keys):
    assert not brings_back(("dict", [(key, "variable") for key in keys]))


def test_variables_with_another_way_to_them_are_saved(tmp_path):
    def build(start):
        layers = [rx.Variable(start), rx.Variable(start + 1)]
        return types.SimpleNamespace(layers=layers, frozen={layers[0]}, rates={layers[1]: 0.5})

    path = rx.train.Checkpoint(model=build(1.0)).save(f"{tmp_path}/ckpt")
    model = build(0.0)
    rx.train.Checkpoint(model=model).restore(path).assert_consumed()
    assert [float(v) for v in model.layers] == [1.0, 2.0]


def test_code_and_weak_references_hold_nothing(tmp_path):
    elsewhere = rx.Variable(1.0)
    model = types.SimpleNamespace(
        weight=rx.Variable(2.0),
        closure=lambda: elsewhere + 1,
        weak=weakref.ref(elsewhere),
        method=elsewhere.assign,
        running=(v for v in [elsewhere]),
        caches=weakref.WeakKeyDictionary({elsewhere: 1}),
    )
    path = rx.train.Checkpoint(model=model).save(f"{tmp_path}/ckpt")
    assert [name for name, _ in rx.train.list_variables(path)] == [
        "model/weight/.ATTRIBUTES/VARIABLE_VALUE",
        "save_counter/.ATTRIBUTES/VARIABLE_VALUE",
    ]


@pytest.mark.parametrize("how", ["keyword", "save_counter"])
def test_parts_of_the_root_that_lose_their_name_are_refused(how, tmp_path):
    root = types.SimpleNamespace(v=rx.Variable(1.0), save_counter=rx.Variable(7))
    if how == "keyword":
        del root.save_counter
    objects = {"v": rx.Variable(2.0)} if how == "keyword" else {}
    with pytest.raises(ValueError, match="another object of this name"):
        rx.train.Checkpoint(root, **objects).save(f"{tmp_path}/ckpt")


def test_names_that_begin_with_an_underscore_and_empty_names_are_saved(tmp_path):
    def build(start):
        a, b, c = (rx.Variable(start + i) for i in range(3))
        return [a, b, c], rx.train.Checkpoint({"": {"a": a}, "a": b}, _c=c)

    _, checkpoint = build(1.0)
    path = checkpoint.save(f"{tmp_path}/ckpt")
    variables, checkpoint = build(0.0)
    checkpoint.restore(path).assert_consumed()
    assert [float(v) for v in variables] == [1.0, 2.0, 3.0]
