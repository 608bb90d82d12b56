"""Static analysis of dataset graphs, in two parts.

- Inference of the specs that user functions return: by tracing, or else from one real element.
- `fingerprint_of`: a hash of a graph; equal fingerprints mean equal elements.
"""

import dis
import functools
import hashlib
import itertools
import sys
import weakref
from collections import deque, namedtuple
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import partial
from importlib.util import resolve_name
from types import (
    CodeType,
    EllipsisType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any

import numpy as np

from replicax._src.base.closures import UNSET, captured
from replicax._src.base.origin import is_library, is_library_module
from replicax._src.base.tf_errors import InvalidArgumentError
from replicax._src.base.types import TensorSpec, TypeSpec
from replicax._src.data.deep_pipelines import needs_stack, on_new_stack
from replicax._src.data.leaves import DatasetSpec, leaf_spec, to_leaf
from replicax._src.data.node import Node
from replicax._src.data.seeds import Run, Seeds
from replicax._src.data.structure import Structure, flatten, map_leaves
from replicax._src.data.tracing import TraceOutcome, Verdict, traced
from replicax._src.data.user_functions import ElementFunction, all_codes


class Known:
    """A lazily computed property of a node: the spec of its elements, or its nested graph.

    Args:
        value: A spec that the user declared, if any.
    """

    def __init__(self, value: Any = None) -> None:
        self.value = value
        self._is_declared = value is not None
        self._traced = None if value is None else TraceOutcome(Verdict.PROVED, value)

    def elsewhere(self) -> "Known":
        """Return the property of a copy of the node with other inputs: unknown unless declared."""
        return self if self._is_declared else Known()

    def get(self, learn: Callable[[], Any]) -> Any:
        """Return the value, computed with `learn` at the first call."""
        if self.value is None:
            self.value = learn()
        return self.value

    def traced(self, attempt: Callable[[], TraceOutcome]) -> TraceOutcome:
        """Return the outcome of a trace, computed with `attempt` at the first call."""
        if self._traced is None:
            self._traced = attempt()
        return self._traced


class NoElementError(InvalidArgumentError):
    """Raised if a spec can only be inferred from an element and the dataset is empty."""


def first_element(node: Node, verb: str) -> tuple[Structure, list[Any]]:
    """Return the structure and leaves of the first element, in the order before any shuffle.

    Raises:
        NoElementError: If the dataset is empty; the message names the transformation `verb`.
    """
    stream = node.peeked.open(Run())
    try:
        block = stream.pull(1)
    finally:
        stream.close()
    if block is None:
        raise NoElementError(
            f"The result of the function given to {verb}() is known only when it is called, and"
            " the dataset has no element to call it on: its element_spec is unknown."
        )
    return block.structure, list(block.rows()[0])


def traced_on(node: Node, function: ElementFunction) -> TraceOutcome:
    """Trace `function` on the elements of `node`, if their spec is certain."""
    if not node.is_spec_sure:
        return TraceOutcome(Verdict.UNPROVED)
    if not function.vectorize:
        return traced(function.function, node.element_spec, is_tuple=True)
    stacked = map_leaves(_with_axis, node.element_spec)
    outcome = traced(function.function, stacked, is_tuple=True)
    if outcome.verdict is not Verdict.PROVED:
        return outcome
    leaves = flatten(outcome.result)[1]
    if any(not isinstance(leaf, TensorSpec) or not leaf.shape for leaf in leaves):
        return TraceOutcome(Verdict.UNPROVED)
    return TraceOutcome(
        Verdict.PROVED,
        map_leaves(lambda leaf: TensorSpec(leaf.shape[1:], leaf.dtype), outcome.result),
    )


def _with_axis(spec: Any) -> Any:
    """Return the spec of a block of elements of `spec`: a leading axis of unknown size."""
    if not isinstance(spec, TensorSpec) or spec.shape is None:
        return spec
    return TensorSpec((None, *spec.shape), spec.dtype)


def mapped_spec(node: Node, function: ElementFunction, outcome: TraceOutcome) -> Any:
    """Return the spec of the results: that of the trace, or of a call on the first element."""
    if outcome.verdict is Verdict.PROVED:
        return outcome.result
    structure, leaves = first_element(node, function.name)
    leaf_specs = structure.leaves_of(node.element_spec)
    if function.vectorize:
        leaves = [np.asarray(leaf)[None] for leaf in leaves]
    nesting, results = flatten(function.call(structure.unflatten(leaves), 0))
    input_specs = {id(leaf): spec for leaf, spec in zip(leaves, leaf_specs, strict=True)}
    is_open = outcome.verdict is Verdict.VALUE or has_open_axis(node.element_spec)
    specs: list[Any] = []
    for result in results:
        found = leaf_spec(to_leaf(np.asarray(result)[0] if function.vectorize else result))
        # A leaf that the function returns unchanged keeps its spec; other sizes may vary.
        specs.append(input_specs.get(id(result), with_unknown_sizes(found)) if is_open else found)
    return nesting.unflatten(specs)


def with_unknown_sizes(spec: Any) -> Any:
    """Return `spec` with every size unknown: other elements may differ in size."""
    if isinstance(spec, DatasetSpec):
        return DatasetSpec(map_leaves(with_unknown_sizes, spec.element_spec))
    if not isinstance(spec, TensorSpec) or spec.shape is None:
        return spec
    return TensorSpec((None,) * len(spec.shape), spec.dtype)


def first_spec(node: Node) -> Any:
    """Return the spec of the first element only, in the order before any shuffle."""
    structure, leaves = first_element(node, "map")
    return structure.unflatten([leaf_spec(leaf) for leaf in leaves])


def has_open_axis(spec: Any) -> bool:
    """Whether elements of this spec may differ in size, such as a partial last batch."""
    return any(
        isinstance(leaf, TensorSpec) and (leaf.shape is None or None in leaf.shape)
        for leaf in flatten(spec)[1]
    )


_serial = itertools.count()
_tokens: dict[int, tuple[weakref.ref[Any], str]] = {}  # by identity: equal objects may differ
_pinned: list[Any] = []  # objects without weak references, kept alive so their ids stay unique
_COMPOSITE = (MethodType, partial, Node, ElementFunction, Seeds)
_WITH_REPR = (bool, int, float, complex, str, bytes, np.dtype, EllipsisType)
# With these, the code of a function does not show which members of a module it uses.
_DYNAMIC_LOOKUPS = frozenset({"getattr", "vars", "__dict__", "eval", "exec"})
# Fields of nodes that are caches or describe the elements rather than determine them.
_IGNORED_FIELDS = frozenset({"known_spec", "known_inner", "memory", "last", "wrap", "declared"})


def fingerprint_of(node: Node) -> np.uint64:
    """Return a hash that two graphs share only if they produce the same elements.

    Values are hashed by value, functions and classes by their code and the objects they reference:
    of a user's module, the members that the code names. Libraries are hashed by their version. Any
    other object is hashed by identity, so a different object or process gives a different hash.
    """
    digest = hashlib.sha256()
    hasher = _GraphHasher(digest)
    hasher.add(node)
    hasher.finish()
    return np.uint64(int.from_bytes(digest.digest()[:8], "little"))


class _GraphHasher:
    """Feeds a graph of Python objects, which may have cycles, into a hash."""

    def __init__(self, digest: Any) -> None:
        self._digest = digest
        self._visited: dict[int, int] = {}
        self._waiting: deque[Any] = deque()
        self._alive: list[Any] = []  # keeps visited objects alive, so ids are not reused

    def add(self, value: Any) -> None:
        """Hash `value` and everything it contains."""
        self._update(type(value).__qualname__)
        if value is None or isinstance(value, _WITH_REPR):
            self._update(repr(value))
        elif isinstance(value, (np.ndarray, np.generic)):
            self._add_array(np.asarray(value))
        elif id(value) in self._visited:
            self._update(f"seen {self._visited[id(value)]}")
        else:
            self._visited[id(value)] = len(self._visited)
            self._alive.append(value)
            if isinstance(value, (FunctionType, type)):
                self._waiting.append(value)  # a chain of calls may be deeper than Python's stack
            elif isinstance(value, Node) and needs_stack(value):
                on_new_stack(partial(self._add_parts, value))
            else:
                self._add_parts(value)

    def finish(self) -> None:
        """Hash the functions and classes that were found, and those that they reference."""
        while self._waiting:
            self._add_parts(self._waiting.popleft())

    def _add_parts(self, value: Any) -> None:  # noqa: C901 - one case for each kind of value
        if not _is_of_library(type(value)):
            self.add(type(value))
        if isinstance(value, (tuple, list)):
            self._add_all(value)
        elif isinstance(value, (set, frozenset)):
            self._add_all(sorted(value, key=repr))
        elif isinstance(value, dict):
            self._add_all(part for pair in value.items() for part in pair)
        elif name := _installed_name(value):
            self._update(name)
        elif isinstance(value, FunctionType):
            self._add_function(value)
        elif isinstance(value, CodeType):
            self._add_all((value.co_code, value.co_names, value.co_consts, value.co_varnames))
        elif isinstance(value, _COMPOSITE) or isinstance(getattr(value, "node", None), Node):
            self._add_all(_parts_of(value))
        elif isinstance(value, TypeSpec):
            self._update(repr(value))
        elif isinstance(value, type):
            self._add_class(value)
        elif isinstance(value, ModuleType) and is_library_module(value.__name__):
            self._update(value.__name__)
        elif is_dataclass(value):
            self._add_all(getattr(value, field.name) for field in fields(value))
        else:
            self._update(_token(value))

    def _add_all(self, parts: Any) -> None:
        count = 0
        for part in parts:
            self.add(part)
            count += 1
        self._update(f"{count} parts")

    def _add_array(self, array: np.ndarray[Any, Any]) -> None:
        self._update(f"{array.dtype} {array.shape}")
        if array.dtype == object:
            self._add_all(array.reshape(-1).tolist())
        else:
            self._digest.update(np.ascontiguousarray(array).tobytes())

    def _add_function(self, function: FunctionType) -> None:
        scope, code = function.__globals__, function.__code__
        names = _all_names(code)
        self._add_all((code, function.__defaults__, function.__kwdefaults__))
        found = [x for x in captured(function).values() if x is not UNSET]
        found += [scope[name] for name in names if name in scope]
        found += _imported(code, scope)
        self._update(f"{len(found)} references")
        for x in found:
            self._add_used(x, names, set())

    def _add_used(self, value: Any, names: Sequence[str], modules: set[int]) -> None:
        """Hash an object that a function references; of a user's module, the members it names."""
        if not isinstance(value, ModuleType) or is_library_module(value.__name__):
            self.add(value)
        elif id(value) not in modules:
            modules.add(id(value))
            self._update(value.__name__)
            members = {name: vars(value)[name] for name in names if name in vars(value)}
            if not members or not _DYNAMIC_LOOKUPS.isdisjoint(names):
                self._update(_token(value))
            for name, member in members.items():
                self._update(name)
                self._add_used(member, names, modules)

    def _add_class(self, kind: Any) -> None:
        self._update(f"{kind.__module__}.{kind.__qualname__}")
        if _is_of_library(kind):
            return
        self._add_all(kind.__bases__)
        if issubclass(kind, Enum):
            self._add_all((x.name, x.value) for x in kind)
        for field in fields(kind) if is_dataclass(kind) else getattr(kind, "__attrs_attrs__", ()):
            found = (field.name, field.default, getattr(field, "default_factory", MISSING))
            self._add_all(map(_default, found))
        for name, value in _written_members(kind).items():
            self._update(name)
            if isinstance(value, (staticmethod, classmethod)):
                self.add(value.__func__)
            elif isinstance(value, property):
                self._add_all((value.fget, value.fset, value.fdel))
            else:
                self.add(value.func if isinstance(value, functools.cached_property) else value)

    def _update(self, text: str) -> None:
        data = text.encode()
        # The length prefix makes the encoding of a sequence of texts unambiguous.
        self._digest.update(len(data).to_bytes(8, "little") + data)


def _parts_of(value: Any) -> tuple[Any, ...]:
    """Return the parts that determine the behaviour of a `_COMPOSITE` object or a dataset."""
    if isinstance(value, MethodType):
        return value.__func__, value.__self__
    if isinstance(value, partial):
        return value.func, value.args, value.keywords
    if isinstance(value, ElementFunction):
        return value.name, value.function, value.vectorize
    if isinstance(value, Seeds):
        return ("free" if value.is_free else value.seed), value.global_seed, value.reshuffle
    if not isinstance(value, Node):
        return (value.node,)
    if not is_dataclass(value):
        return (_token(value),)
    parts = (getattr(value, f.name) for f in fields(value) if f.name not in _IGNORED_FIELDS)
    return tuple(vars(part) if type(part).__name__ == "ArraySource" else part for part in parts)


def _is_of_library(kind: type) -> bool:
    return is_library_module(str(kind.__module__))


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# What Python adds to the table of a class.
_RECORDS = _words(
    """
    __dict__ __weakref__ __doc__ __module__ __qualname__ __annotations__ __annotate__
    __annotate_func__ __annotations_cache__ __conditional_annotations__ __dataclass_fields__
    __dataclass_params__ __firstlineno__ __static_attributes__ __parameters__ __orig_bases__
    __type_params__ __abstractmethods__ _abc_impl __attrs_attrs__ __attrs_props__
    __attrs_own_setattr__ __attrs_base_of_slotted__
    """
)
# The methods that are generated for dataclasses, attrs classes, named tuples and enums.
_GENERATED = _words(
    """
    __init__ __new__ __repr__ __eq__ __lt__ __le__ __gt__ __ge__ __hash__ __setattr__ __delattr__
    __replace__ __getnewargs__ __getstate__ __setstate__ __reduce_ex__ __format__ __str__
    _make _replace _asdict
    """
)
_FIELD_DESCRIPTORS = (
    MemberDescriptorType,
    GetSetDescriptorType,
    type(namedtuple("_", "field").field),  # type: ignore[attr-defined]
)


def _written_members(kind: Any) -> dict[str, Any]:
    """Return what the body of a class defines, without what Python generates."""
    is_enum = issubclass(kind, Enum)
    is_named_tuple = issubclass(kind, tuple) and hasattr(kind, "_fields")
    has_fields = is_named_tuple or is_dataclass(kind) or hasattr(kind, "__attrs_attrs__")
    generated = _GENERATED if is_enum or has_fields else frozenset()
    left_out = _RECORDS | (frozenset(kind.__members__) if is_enum else frozenset())
    return {
        name: x
        for name, x in vars(kind).items()
        if name not in left_out
        and not isinstance(x, _FIELD_DESCRIPTORS)
        and not (is_enum and name.startswith("_") and not isinstance(x, FunctionType))
        and not (name in generated and _is_generated(x))
    }


def _default(x: Any) -> Any:
    """Return the default of a field of a dataclass or an attrs class."""
    if x is MISSING or not type(x).__module__.startswith(("attr.", "attrs.")):
        return None if x is MISSING else x
    return getattr(x, "factory", None)  # without it, x is attrs' mark for no default


def _is_generated(x: Any) -> bool:
    function = getattr(x, "__func__", x)
    return not isinstance(function, FunctionType) or is_library(function.__code__.co_filename)


def _imported(code: CodeType, scope: Mapping[str, Any]) -> list[Any]:
    """Return the modules that a function imports when it runs."""
    found: list[Any] = []
    for part in all_codes(code):
        steps = [x for x in dis.get_instructions(part) if x.opname != "EXTENDED_ARG"]
        for i, step in enumerate(steps):
            if step.opname != "IMPORT_NAME":
                continue
            level, name = steps[i - 2].argval, str(step.argval)
            with suppress(ImportError):  # the import itself will fail
                name = resolve_name("." * level + name, scope.get("__package__"))
            module = sys.modules.get(name)
            if module is not None:
                found.append(module)
            elif name.partition(".")[0] not in sys.stdlib_module_names:
                found.append(_token(part))  # not imported yet
    return found


def _all_names(code: CodeType) -> list[str]:
    inside = (_all_names(part) for part in code.co_consts if isinstance(part, CodeType))
    return sorted({*code.co_names, *(name for names in inside for name in names)})


def _installed_name(value: Any) -> str:
    """Return the qualified name and version of a library function; "" for user code."""
    module = str(getattr(value, "__module__", None))
    home = sys.modules.get(module)
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", "")
    if home is None or home is sys.modules.get("__main__") or not callable(value):
        return ""
    if not is_library_module(module):
        return ""
    found: Any = home
    for part in str(name).split("."):
        found = getattr(found, part, None)
    version = getattr(sys.modules.get(home.__name__.partition(".")[0]), "__version__", "")
    return f"{home.__name__}.{name} {version}" if found is value else ""


def _token(value: Any) -> str:
    """Return a name unique to this object across processes."""
    known = _tokens.get(id(value))
    if known is not None and known[0]() is value:
        return known[1]
    try:
        reference = weakref.ref(value)
    except TypeError:
        _pinned.append(value)
        return f"{_PROCESS} at {id(value)}"
    token = f"{_PROCESS} {next(_serial)}"
    _tokens[id(value)] = reference, token
    weakref.finalize(value, _tokens.pop, id(value), None)
    return token


_PROCESS = hashlib.sha256(np.random.default_rng().bytes(32)).hexdigest()
