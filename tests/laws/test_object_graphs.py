"""A checkpoint of any object graph is refused, or brings every variable back."""

import collections
import dataclasses
import enum
import functools
import itertools
import queue
import re
import tempfile
import types
import weakref
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
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


class Told(rx.train.experimental.PythonState):
    """An object with a state of its own, and parts."""

    def __init__(self, number, held):
        self.number, self.held = number, held

    def __float__(self):
        return self.number

    def serialize(self):
        return str(self.number)

    def deserialize(self, string_value):
        self.number = float(string_value)


class Holder:
    def __init__(self, held):
        self.held = held

    def get(self):
        return self.held


class HoldingError(Exception):
    pass


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
    "queue": lambda held: _put(queue.Queue(), held),
    "default factory": lambda held: collections.defaultdict(functools.partial(list, held)),
    "closure": lambda held: lambda: held,
    "nested closure": lambda held: (lambda: lambda: held)(),
    "default argument": lambda held: lambda x=held, *, y=held: (x, y),
    "function attribute": lambda held: _with_attributes(lambda: None, held),
    "method": lambda held: Data(held).__eq__,
    "bound method": lambda held: Holder(held).get,
    "builtin method": lambda held: list(held).append,
    "wrapped": lambda held: functools.wraps(print)(lambda: held),
}
UNNAMED = {
    "set": lambda held: {Plain(x) for x in held},
    "frozenset": lambda held: frozenset(Plain(x) for x in held),
    "values": lambda held: dict(enumerate(held)).values(),
    "items": lambda held: dict(enumerate(held)).items(),
    "simple queue": lambda held: _put(queue.SimpleQueue(), held),
    "iterator": iter,
    "reversed": reversed,
    "enumerate": enumerate,
    "zip": lambda held: zip(held, strict=True),
    "map": lambda held: map(id, held),
    "cycle": itertools.cycle,
    "generator": lambda held: _running(held),
    "generator in a closure": lambda held: (lambda: (x for _ in [1] for x in held))(),
    "exception": lambda held: HoldingError(held),
    "cache": lambda held: _cached(held),
    "cell": types.CellType,
    "class attribute": lambda held: type("Local", (), {"held": held})(),
    "class": lambda held: type("Local", (), {"held": held}),
    "class of a class": lambda held: type("Local", (), {"Inner": type("Inner", (), {"x": held})}),
    "key": lambda held: {Plain(held): 1},
    "hidden attribute": lambda held: _shadowed(held),
    "hidden attribute of a function": lambda held: _captured_twice(held),
}
WITH_PARTS = ["variable with parts", "state with parts"]
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


def _put(made, held):
    for x in held:
        made.put(x)
    return made


def _running(held):
    def generate():
        for x in held:
            yield x
            yield x

    made = generate()
    next(made)
    return made


def _cached(held):
    given = [held]
    made = functools.lru_cache(lambda: given.pop())  # only the cached result has it afterwards
    made()
    return made


def _with_attributes(function, held, name="held"):
    setattr(function, name, held)
    return function


def _captured_twice(held):
    extra = None
    return _with_attributes(lambda: extra, held, "extra")


def _shadowed(held):
    made = with_attribute(MyDict, held)
    made["extra"] = 1
    return made


def graphs(keys, holders):
    """Descriptions of object graphs."""

    def inner(children):
        held = st.lists(children, min_size=1, max_size=3)
        return st.one_of(
            st.tuples(st.sampled_from([*sorted(holders), *WITH_PARTS]), held),
            st.tuples(
                st.sampled_from(sorted(MAPPINGS)), st.lists(st.tuples(keys, children), max_size=3)
            ),
        )

    leaf = st.sampled_from(["variable", "variable", "variable", "words", "shared"])
    return st.recursive(leaf, inner, max_leaves=8)


class Built:
    """An object graph, and everything in it that a checkpoint saves."""

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
        made = self._built(*description)
        self._made.append(made)
        return made

    def _built(self, kind, held):
        if kind in MAPPINGS:
            items = {}
            for key, child in held:
                if key not in items:
                    items[key] = self._build(child)
            return MAPPINGS[kind](items)
        if kind == "variable with parts":
            made = self._variable()
            made.held = [self._build(child) for child in held]
            return made
        if kind == "state with parts":
            made = Told(float(next(self._values)), [self._build(child) for child in held])
            self.variables.append(made)
            return made
        # A fixed number of parts: what a holder leaves out is not in the graph.
        return {**NAMED, **UNNAMED}[kind]([self._build(child) for child in held[:2]])

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
    assert re.search(r"(Variable|Told) at content", refusal)
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


@settings(max_examples=80)
@given(
    graphs(st.sampled_from(["a", "b", 1]), NAMED),
    graphs(st.sampled_from(["a", "b", 1]), {**NAMED, **UNNAMED}),
    st.sampled_from(["before", "after", "instead"]),
)
def test_a_changed_graph_is_restored_as_far_as_the_status_says(before, after, made):
    saved_graph, live = Built(before, 1), Built(after, 0)
    path = saved(saved_graph)
    assert path is not None
    later = live.root.content
    if made != "before":
        live.root.content = None if made == "after" else Built(before, 0).root.content
    try:
        status = rx.train.Checkpoint(live.root).restore(path)
        live.root.content = later
        is_consumed = holds(status.assert_consumed)
        is_matched = holds(status.assert_existing_objects_matched)
    except rx.errors.VariableError:  # a variable where an object with a state was, or vice versa
        assert not any(live.values)
        return
    is_whole = all(live.values)
    assert is_matched == is_whole
    is_used = made == "instead" or set(saved_graph.values) <= set(live.values)
    assert is_consumed == (is_whole and is_used)


def test_one_variable_for_two_saved_ones_leaves_one_unused(tmp_path):
    path = rx.train.Checkpoint(a=rx.Variable(1.0), b=rx.Variable(2.0)).save(f"{tmp_path}/ckpt")
    v = rx.Variable(0.0)
    status = rx.train.Checkpoint(a=v, b=v).restore(path).assert_existing_objects_matched()
    assert float(v) == 1.0
    with pytest.raises(rx.errors.CheckpointError, match="b/"):
        status.assert_consumed()


def test_a_variable_that_replaced_a_restored_one_is_missing(tmp_path):
    path = rx.train.Checkpoint(v=[rx.Variable(1.0)]).save(f"{tmp_path}/ckpt")
    held = [rx.Variable(0.0)]
    checkpoint = rx.train.Checkpoint(v=held)
    status = checkpoint.restore(path).assert_consumed()
    held[0] = rx.Variable(5.0)
    with pytest.raises(rx.errors.CheckpointError, match="v/0"):
        status.assert_existing_objects_matched()
    assert float(held[0]) == 5.0


def holds(check):
    try:
        check()
    except rx.errors.CheckpointError:
        return False
    return True


@pytest.mark.parametrize("kind", sorted(UNNAMED))
def test_parts_without_a_name_are_refused_and_count_as_missing(kind, tmp_path):
    assert not brings_back((kind, ["variable", "variable"]))

    path = rx.train.Checkpoint(x=rx.Variable(1.0)).save(f"{tmp_path}/ckpt")
    status = rx.train.Checkpoint(
        x=rx.Variable(0.0), other=Built((kind, ["variable"]), 0).root
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


def test_weak_references_and_globals_of_functions_are_not_searched(tmp_path):
    elsewhere = rx.Variable(1.0)
    model = types.SimpleNamespace(
        weight=rx.Variable(2.0),
        weak=weakref.ref(elsewhere),
        caches=weakref.WeakKeyDictionary({elsewhere: 1}),
        builtin=print,
        module=collections,
        uses_globals=_reads_a_global,
    )
    path = rx.train.Checkpoint(model=model).save(f"{tmp_path}/ckpt")
    assert [name for name, _ in rx.train.list_variables(path)] == [
        "model/weight/.ATTRIBUTES/VARIABLE_VALUE",
        "save_counter/.ATTRIBUTES/VARIABLE_VALUE",
    ]


GLOBAL = rx.Variable(1.0)


def _reads_a_global():
    return GLOBAL + 1


@pytest.mark.parametrize("is_called", [False, True])
def test_variables_of_a_compiled_function_come_back(is_called, tmp_path):
    def build(start):
        v = rx.Variable(start)
        step = rx.function(lambda x: v.assign_add(x))
        if is_called:
            step(0.0)
        return types.SimpleNamespace(step=step), v

    path = rx.train.Checkpoint(model=build(3.0)[0]).save(f"{tmp_path}/ckpt")
    model, v = build(0.0)
    rx.train.Checkpoint(model=model).restore(path).assert_consumed()
    assert float(v) == 3.0


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


@pytest.mark.parametrize("start", [1.0, Told(1.0, [])], ids=["variable", "state"])
def test_the_root_itself_is_saved(start, tmp_path):
    root = start if isinstance(start, Told) else rx.Variable(start)
    path = rx.train.Checkpoint(root).save(f"{tmp_path}/ckpt")
    other = Told(0.0, []) if isinstance(start, Told) else rx.Variable(0.0)
    rx.train.Checkpoint(other).restore(path).assert_consumed()
    assert float(other) == 1.0


@pytest.mark.parametrize("how", ["argument", "root"])
@pytest.mark.parametrize(
    "make",
    [
        lambda v: lambda: 1,
        lambda v: print,
        lambda v: Plain,
        lambda v: iter([v]),
        lambda v: (x for x in [v]),
        lambda v: enumerate(iter(rx.data.Dataset.range(3))),
    ],
    ids=["function", "builtin", "class", "iterator", "generator", "enumerate"],
)
def test_code_and_iterators_without_state_are_refused(make, how):
    x = make(rx.Variable(1.0))
    with pytest.raises(ValueError, match="no state to save in a"):
        rx.train.Checkpoint(x) if how == "root" else rx.train.Checkpoint(x=x)


@pytest.mark.parametrize(
    ("x", "path"),
    [
        (3, "x is 3"),
        ({"step": 3}, "x['step'] is 3"),
        ({"w": [np.ones(2)]}, "x['w'][0] is array"),
        (Pair(1.0, jnp.ones(2)), "x.a is 1.0"),
        (optax.adam(1.0).init({"w": jnp.ones(2)}), "x[0].count is Array"),
        ([rx.Variable(1.0), {"w": jnp.ones(2)}], "x[1]['w'] is Array"),
        ([jax.random.key(1)], "x[0] is Array"),
    ],
    ids=str,
)
def test_plain_values_in_containers_are_refused(x, path):
    with pytest.raises(ValueError, match=re.escape(path)):
        rx.train.Checkpoint(x=x)
    with pytest.raises(ValueError, match=re.escape(path.replace("x", "root", 1))):
        rx.train.Checkpoint(x)


def test_arrays_that_a_container_gets_later_are_refused(tmp_path):
    state = {"step": rx.Variable(0)}
    checkpoint = rx.train.Checkpoint(state=state)
    state["params"] = jnp.ones(2)
    with pytest.raises(ValueError, match=r"state\['params'\] is Array"):
        checkpoint.save(f"{tmp_path}/ckpt")


@pytest.mark.parametrize(
    "x",
    [
        [],
        None,
        ["words"],
        {"v": rx.Variable(1.0), "units": 3},
        types.SimpleNamespace(v=rx.Variable(1.0), table=np.ones(2)),
        object_array([rx.Variable(1.0)]),
        rx.data.Dataset.range(3),
    ],
    ids=str,
)
def test_containers_to_be_filled_and_constants_of_objects_are_accepted(x, tmp_path):
    rx.train.Checkpoint(x=x).save(f"{tmp_path}/ckpt")


@pytest.mark.parametrize("name", ["save", "save_counter", "_root", "_objects"])
def test_names_that_a_checkpoint_has_itself_are_refused(name):
    with pytest.raises(ValueError, match=f"attribute '{name}' of its own"):
        rx.train.Checkpoint(**{name: rx.Variable(1.0)})


def test_deleted_attributes_are_not_saved(tmp_path):
    checkpoint = rx.train.Checkpoint(a=rx.Variable(1.0), b=rx.Variable(2.0))
    del checkpoint.b
    path = checkpoint.save(f"{tmp_path}/ckpt")
    assert [name.partition("/")[0] for name, _ in rx.train.list_variables(path)] == [
        "a",
        "save_counter",
    ]


def test_random_keys_of_nnx_come_back(tmp_path):
    rngs = nnx.Rngs(3)
    drawn = [rngs(), rngs()]
    path = rx.train.Checkpoint(rngs=rngs).save(f"{tmp_path}/ckpt")
    drawn.append(rngs())
    other = nnx.Rngs(0)
    rx.train.Checkpoint(rngs=other).restore(path).assert_consumed()
    assert (jax.random.key_data(other()) == jax.random.key_data(drawn[2])).all()


@pytest.mark.parametrize("kind", sorted({**NAMED, **UNNAMED}))
def test_placement_shows_every_variable(kind):
    built = Built((kind, ["variable", "variable"]), 1)
    assert len(rx.debug.placement(built.root).placed) == 2
