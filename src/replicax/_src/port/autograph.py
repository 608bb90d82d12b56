"""AutoGraph's control flow: ``if``, ``while`` and ``for`` on tensors become calls.

The calls are `tf.cond`, `tf.while_loop` and `tf.foldl`.

This runs before names are rewritten: its result is a TensorFlow program with the same meaning. A
statement is rewritten if its condition is certainly a tensor and the result is certainly the same;
else it stays, with a mark that gives the reason.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import libcst as cst
import libcst.matchers as m
from libcst.metadata import (
    MetadataWrapper,
    PositionProvider,
    QualifiedNameProvider,
    QualifiedNameSource,
)

from replicax._src.port.flow import (
    contains,
    defined_after,
    else_of,
    is_plain_target,
    live_before,
    reads,
    statements,
    target_names,
    writes,
)
from replicax._src.port.parts import Facts, code_of
from replicax._src.port.paths import ROOTS, candidates
from replicax._src.port.table import ROWS

# Statements that a function of a branch, or of a turn of a loop, cannot contain.
_LEAVING = {
    "break": m.Break(),
    "continue": m.Continue(),
    "raise": m.Raise(),
    "global": m.Global() | m.Nonlocal(),
    "yield": m.Yield() | m.Await(),
    "del": m.Del(),
    ":=": m.NamedExpr(),
    "import": m.Import() | m.ImportFrom(),
    "try": m.Try(),
}
_ADVICE = {
    "break": " Keep a flag `done` in place of it, and test it in the condition of the loop.",
    "continue": " Write the rest of the loop in an `else`.",
    "raise": " Write `tf.debugging.Assert`, or check before the call.",
}
# Methods that Keras compiles.
_KERAS_METHODS = frozenset(["call", "train_step", "test_step", "predict_step"])
# Functions whose results are Python numbers after the port.
_STATIC = frozenset(
    ["rank", "shape", "size", "range", "keras.backend.int_shape", "keras.backend.get_value"]
)
# Functions that make a tensor of a Python number.
_WRAPPERS = frozenset(["constant", "convert_to_tensor"])
_TENSORS = frozenset(name for name in ROWS if name not in _STATIC) | {"constant", "Variable"}
_FAMILIES = ("random.", "math.", "nn.", "linalg.", "image.")
# Attributes and methods whose values are tensors for every object that has them.
_TENSOR_ATTRIBUTES = frozenset(["iterations"])
_TENSOR_METHODS = frozenset(["result", "read_value"])
# Methods that change Python's containers, while both branches are traced.
_MUTATORS = frozenset(
    ["add", "append", "clear", "extend", "insert", "pop", "remove", "setdefault", "update"]
)
# Calls that a turn of a compiled loop cannot make: each is traced once.
_INPUT_CALLS = m.Call(m.Name("next") | m.Attribute(attr=m.Name("get_next") | m.Name("run")))
# Values that are not the state of a compiled loop.
_NO_STATE = (
    m.Name("None") | m.List() | m.Dict() | m.Tuple() | m.ListComp() | m.BaseString()
)  # fmt: skip
_WHOLE = m.Integer() | m.UnaryOperation(m.Minus(), m.Integer())
_ORDER = m.LessThan() | m.LessThanEqual() | m.GreaterThan() | m.GreaterThanEqual()


@dataclass(frozen=True)
class Note:
    """A statement of control flow that the user must check.

    Attributes:
        line: The line in the original program.
        name: "if", "while" or "for".
        words: Why it was not rewritten, and what to write.
        code: The rewritten statement, if there is one.
        is_left: Whether the statement cannot run as it is.
    """

    line: int
    name: str
    words: str
    code: str = ""
    is_left: bool = True


@dataclass
class Converted:
    """The program with control flow as calls, and the statements that the user must check."""

    code: str
    notes: list[Note] = field(default_factory=list)


class _RefusedError(Exception):
    """Why a statement cannot be rewritten."""


def convert(wrapper: MetadataWrapper, facts: Facts) -> Converted | None:
    """Rewrite the control flow of compiled functions; None if there is nothing to rewrite."""
    collector = _Collector()
    wrapper.visit(collector)
    compiled = collector.compiled(facts) if collector.alias is not None else set()
    if not compiled:
        return None
    converter = _Converter(collector, facts, compiled)
    new = wrapper.module.visit(converter)
    if not converter.changed and not converter.notes:
        return None
    return Converted(new.code if converter.changed else wrapper.module.code, converter.notes)


class _Collector(cst.CSTVisitor):
    """Finds the functions of a module, which of them are compiled, and the paths of names."""

    METADATA_DEPENDENCIES = (PositionProvider, QualifiedNameProvider)

    def __init__(self) -> None:
        self.alias: str | None = None
        self.functions: list[cst.FunctionDef] = []
        self.roots: set[cst.FunctionDef] = set()
        self.paths: dict[cst.CSTNode, str] = {}
        self.lines: dict[cst.CSTNode, int] = {}
        self._root_names: set[str] = set()
        self._in_keras = [False]

    def on_visit(self, node: cst.CSTNode) -> bool:
        if isinstance(node, cst.Name | cst.Attribute):
            path = self._path(node)
            if path is not None:
                self.paths[node] = path
        elif isinstance(node, cst.If | cst.While | cst.For | cst.IfExp):
            position: Any = self.get_metadata(PositionProvider, node)
            self.lines[node] = position.start.line
        return super().on_visit(node)

    def _path(self, node: cst.CSTNode) -> str | None:
        names: Any = self.get_metadata(QualifiedNameProvider, node, set())
        for name in names:
            root, _, path = name.name.partition(".")
            if name.source is QualifiedNameSource.IMPORT and root in ROOTS:
                path = ".".join(part for part in (ROOTS[root], path) if part)
                return path.removeprefix("compat.v2.")
        return None

    def visit_Import(self, node: cst.Import) -> None:  # noqa: N802
        for alias in node.names:
            if alias.evaluated_name == "tensorflow" or alias.evaluated_name.endswith("compat.v2"):
                self.alias = self.alias or alias.evaluated_alias or alias.evaluated_name

    def visit_ClassDef(self, node: cst.ClassDef) -> None:  # noqa: N802
        bases = [self._path(arg.value) or "" for arg in node.bases]
        self._in_keras.append(any(base.startswith("keras.") for base in bases))

    def leave_ClassDef(self, original_node: cst.ClassDef) -> None:  # noqa: N802
        self._in_keras.pop()

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:  # noqa: N802
        self.functions.append(node)
        decorators = [d.decorator for d in node.decorators]
        paths = [self._path(d.func if isinstance(d, cst.Call) else d) for d in decorators]
        is_method = self._in_keras[-1] and node.name.value in _KERAS_METHODS
        if "function" in paths or is_method:
            self.roots.add(node)

    def visit_Call(self, node: cst.Call) -> None:  # noqa: N802
        if self._path(node.func) == "function" and node.args:
            value = node.args[0].value
            if isinstance(value, cst.Name | cst.Attribute):
                self._root_names.add(code_of(value).rpartition(".")[2])

    def loop_bounds(self) -> dict[str, tuple[list[str], set[str]]]:
        """Return, for compiled functions, their parameters and those that bound Python's loops.

        Functions with the same name as another are left out.
        """
        names = [function.name.value for function in self.functions]
        found: dict[str, tuple[list[str], set[str]]] = {}
        for function in self.roots:
            parameters = [p.name.value for p in _parameters(function) if p.annotation is None]
            loops = contains(statements(function.body), m.For(iter=m.Call()))
            ranges = [loop.iter for loop in loops if self.paths.get(loop.iter.func) == "range"]
            read = {code_of(arg.value) for call in ranges for arg in call.args}
            if read & set(parameters) and names.count(function.name.value) == 1:
                every = [p.name.value for p in _parameters(function)]
                found[function.name.value] = every, read & set(parameters)
        return found

    def compiled(self, facts: Facts) -> set[cst.FunctionDef]:
        """Return the functions that are compiled, and those that they use."""
        by_name: dict[str, list[cst.FunctionDef]] = {}
        for function in self.functions:
            by_name.setdefault(function.name.value, []).append(function)
        found: set[cst.FunctionDef] = set()
        named = [function for name in self._root_names for function in by_name.get(name, ())]
        waiting = [*self.roots, *named]
        while waiting:
            function = waiting.pop()
            if function in found or function.name.value in facts.element_functions:
                continue
            found.add(function)
            names = reads(function.body)
            names |= {code_of(a.attr) for a in m.findall(function.body, m.Attribute())}  # type: ignore[attr-defined]
            waiting += [used for name in names for used in by_name.get(name, ())]
        return found


class _Converter(cst.CSTTransformer):
    """Rewrites the bodies of compiled functions."""

    def __init__(self, collector: _Collector, facts: Facts, compiled: set[cst.FunctionDef]) -> None:
        super().__init__()
        self._found = collector
        self._facts = facts
        self._compiled = compiled
        self._bounds = collector.loop_bounds()
        self.notes: list[Note] = []
        self.changed = False

    def leave_Call(  # noqa: N802
        self, original_node: cst.Call, updated_node: cst.Call
    ) -> cst.Call:
        """Pass bounds of loops as Python numbers: ``f(5)`` for ``f(tf.constant(5))``."""
        name = original_node.func.value if isinstance(original_node.func, cst.Name) else ""
        parameters, bounds = self._bounds.get(str(name), ([], set()))
        args = list(updated_node.args)
        for place, arg in enumerate(original_node.args):
            if arg.star:
                break
            places = [arg.keyword.value] if arg.keyword else parameters[place : place + 1]
            number = self._number(arg.value)
            if number is not None and set(places) & bounds:
                args[place] = args[place].with_changes(value=number)
                self.changed = True
        return updated_node.with_changes(args=args)

    def _number(self, node: cst.BaseExpression) -> cst.BaseExpression | None:
        """Return the argument of ``tf.constant(number)``; None for other expressions."""
        if not isinstance(node, cst.Call) or self._found.paths.get(node.func) not in _WRAPPERS:
            return None
        is_plain = bool(node.args) and not any(arg.star for arg in node.args)
        first = node.args[0] if is_plain else None
        return first.value if first is not None and first.keyword is None else None

    def leave_FunctionDef(  # noqa: N802
        self, original_node: cst.FunctionDef, updated_node: cst.FunctionDef
    ) -> cst.FunctionDef:
        if original_node not in self._compiled:
            return updated_node
        body = _FunctionBody(original_node, self._found, self._facts)
        new = body.converted()
        self.notes += body.notes
        if not body.changed:
            return updated_node
        self.changed = True
        return updated_node.with_changes(body=new)

    def visit_FunctionDef(self, node: cst.FunctionDef) -> bool:  # noqa: N802
        return node not in self._compiled  # `_FunctionBody` converts nested functions too


class _FunctionBody:
    """The conversion of one function, and of the functions in it.

    Attributes:
        values: The expressions assigned to each name; None for unknown ones.
        tensors: The parameters that are tensors.
        notes: The statements to look at.
        changed: Whether a statement was converted.
    """

    def __init__(
        self,
        node: cst.FunctionDef,
        collector: _Collector,
        facts: Facts,
        outer: _FunctionBody | None = None,
    ) -> None:
        self._node = node
        self._found = collector
        self._facts = facts
        self._tf = collector.alias or "tf"
        self._parameters = [p.name.value for p in _parameters(node)]
        self.values = _assigned_values(node)
        self.tensors = {
            p.name.value
            for p in _parameters(node)
            if p.annotation and collector.paths.get(p.annotation.annotation) == "Tensor"
        }
        if outer is not None:
            known = {n: v for n, v in outer.values.items() if n not in self._parameters}
            self.values = known | self.values
            self.tensors |= outer.tensors - set(self._parameters)
        # Functions inside may be called at any later time, so the names that they read stay needed.
        self._inner = list(m.findall(node.body, m.FunctionDef() | m.Lambda()))
        self._captured = set().union(*(_free_names(function) for function in self._inner))
        self._declared = {
            item.name.value
            for each in m.findall(node.body, m.Global() | m.Nonlocal())
            for item in each.names  # type: ignore[attr-defined]
        }
        self.notes: list[Note] = []
        self.changed = False

    def converted(self) -> cst.BaseSuite:
        """Return the new body of the function."""
        if not isinstance(self._node.body, cst.IndentedBlock):
            return self._node.body
        defined = set(self._parameters)
        body = self._block(statements(self._node.body), defined, set(self._captured))
        return self._node.body.with_changes(body=body)

    # Blocks.

    def _block(self, body: Sequence[Any], defined: set[str], after: set[str]) -> list[Any]:
        """Return the statements of a block, converted; ``after`` are the names needed after it."""
        made: list[Any] = []
        for place, node in enumerate(body):
            rest = body[place + 1 :]
            new, takes_rest = self._statement(node, rest, defined, after)
            made += new
            if takes_rest:
                break
            ended = defined_after([node], defined)
            defined = defined if ended is None else ended
        return made

    def _statement(
        self, node: Any, rest: Sequence[Any], defined: set[str], after: set[str]
    ) -> tuple[list[Any], bool]:
        """Convert a statement; return it, and whether the result includes ``rest`` of the block."""
        live = live_before(rest, after)
        if isinstance(node, cst.If | cst.While) and self._is_tensor(node.test):
            try:
                if isinstance(node, cst.If):
                    made, takes_rest = self._if(node, rest, defined, after)
                else:
                    made, takes_rest = self._while(node, defined, live), False
            except _RefusedError as problem:
                self._note(node, "if" if isinstance(node, cst.If) else "while", str(problem))
            else:
                self.changed = True
                made[0] = made[0].with_changes(leading_lines=node.leading_lines)
                return made, takes_rest
        elif isinstance(node, cst.If) and self._may_be_tensor(node.test):
            self._propose(node, rest, defined, after)
        elif isinstance(node, cst.For):
            loop = self._for(node, defined, live)
            if loop is not None:
                self.changed = True
                loop[0] = loop[0].with_changes(leading_lines=node.leading_lines)
                return loop, False
        return [self._inside(node, defined, live)], False

    def _inside(self, node: Any, defined: set[str], live: set[str]) -> Any:
        """Return a statement that stays, with the blocks in it converted."""
        match node:
            case cst.SimpleStatementLine():
                return self._choices(node)
            case cst.If():
                body = self._suite(node.body, defined, live)
                return node.with_changes(body=body, orelse=self._else(node.orelse, defined, live))
            case cst.For() | cst.While():
                targets = target_names(node.target) if isinstance(node, cst.For) else []
                again = live | (live_before([node], live) if targets else reads(node))
                return node.with_changes(body=self._suite(node.body, defined | set(targets), again))
            case cst.With():
                inner = defined | set(writes(node.items))
                return node.with_changes(body=self._suite(node.body, inner, live))
            case cst.FunctionDef():
                return self._nested(node)
        return node

    def _else(self, node: cst.If | cst.Else | None, defined: set[str], live: set[str]) -> Any:
        """Return the converted ``else`` or ``elif`` part of an ``if`` that stays."""
        if node is None:
            return None
        if isinstance(node, cst.Else):
            return node.with_changes(body=self._suite(node.body, defined, live))
        made = self._block([node], defined, live)
        # A converted `elif` is several statements, which need an `else` of their own.
        is_same = len(made) == 1 and isinstance(made[0], cst.If)
        return made[0] if is_same else cst.Else(cst.IndentedBlock(made))

    def _nested(self, node: cst.FunctionDef) -> cst.FunctionDef:
        """Convert a nested function, given which names of the enclosing one are tensors."""
        if node.name.value in self._facts.element_functions:
            return node
        nested = _FunctionBody(node, self._found, self._facts, self)
        new = nested.converted()
        self.notes += nested.notes
        self.changed |= nested.changed
        return node.with_changes(body=new)

    def _suite(self, suite: Any, defined: set[str], live: set[str]) -> Any:
        if isinstance(suite, cst.SimpleStatementSuite):
            return suite
        return suite.with_changes(body=self._block(statements(suite), defined, live))

    def _choices(self, node: cst.SimpleStatementLine) -> Any:
        """Return a statement with ``a if tensor else b`` as calls."""
        if not m.findall(node, m.IfExp()):
            return node
        choices = _Choices(self)
        new = node.visit(choices)
        self.changed |= choices.changed
        return new

    def choice(self, node: cst.IfExp) -> str | None:
        """Return the condition of ``a if tensor else b``; None if it is no tensor."""
        return self._condition(node.test) if self._is_tensor(node.test) else None

    @property
    def alias(self) -> str:
        """The program's name for TensorFlow."""
        return self._tf

    # Statements.

    def _if(
        self, node: cst.If, rest: Sequence[Any], defined: set[str], after: set[str]
    ) -> tuple[list[Any], bool]:
        """Return the statements for an ``if``, and whether they contain the rest of the block."""
        body, other = statements(node.body), else_of(node)
        test = self._condition(node.test)
        if contains([*body, *other], m.Return()):
            return self._returning(test, body, other, rest, defined)
        self._check(body)
        self._check(other)
        live = live_before(rest, after)
        outs = [name for name in writes([*body, *other]) if name in live]
        for part in (body, other):
            known = defined_after(part, defined)
            missing = [name for name in outs if known is None or name not in known]
            if missing:
                raise _RefusedError(
                    f"{missing[0]} may be undefined after it: assign it before the `if`, then"
                    f" write `{missing[0]} = {self._tf}.cond(...)`."
                )
        short = self._short(test, body, other, outs)
        if short is not None:
            return [short], False
        made: list[Any] = []
        names = []
        for name, part in (("if_true", body), ("if_false", other)):
            if not part:
                names.append(f"lambda: {_tuple(outs)}")
                continue
            free = self._free(name)
            made.append(self._function(free, part, outs, defined))
            names.append(free)
        call = f"{self._tf}.cond({test}, {names[0]}, {names[1]})"
        made.append(_line(f"{', '.join(outs)} = {call}" if outs else call))
        return made, False

    def _short(self, test: str, body: Any, other: Any, outs: list[str]) -> Any:
        """Return ``y = tf.cond(c, lambda: a, lambda: b)`` if both branches only assign ``y``."""
        if len(outs) != 1:
            return None
        values = [_assigned_value(part, outs[0]) if part else outs[0] for part in (body, other)]
        if None in values:
            return None
        call = f"{self._tf}.cond({test}, lambda: {values[0]}, lambda: {values[1]})"
        return _line(f"{outs[0]} = {call}") if len(call) < 88 else None

    def _returning(
        self, test: str, body: list[Any], other: list[Any], rest: Sequence[Any], defined: set[str]
    ) -> tuple[list[Any], bool]:
        """Return ``return tf.cond(...)`` for an ``if`` whose branches return."""
        takes_rest = not other or defined_after(other, defined) is not None
        other = [*other, *rest] if takes_rest else other
        for part in (body, other):
            self._check([node for node in part if not _is_return(node)], returns=True)
            if defined_after(part, defined) is not None:
                raise _RefusedError("one way through it returns and another does not.")
        values = [_returned_value(part) for part in (body, other)]
        if None not in values and sum(map(len, map(str, values))) < 50:
            call = f"{self._tf}.cond({test}, lambda: {values[0]}, lambda: {values[1]})"
            return [_line(f"return {call}")], True
        one, two = self._free("if_true"), self._free("if_false")
        return [
            self._function(one, body, None, defined),
            self._function(two, other, None, defined),
            _line(f"return {self._tf}.cond({test}, {one}, {two})"),
        ], True

    def _while(self, node: cst.While, defined: set[str], after: set[str]) -> list[Any]:
        """Return the statements for a ``while``."""
        state, needed = self._loop_state(node, reads(node.test), defined, after)
        with self._known_tensors(state):
            test = self._condition(node.test)
            inner = self._loop_body(node, defined, needed)
        name = self._free("loop_body")
        if not state:  # it only changes variables
            inner.append(_line("return turn + 1"))
            return [
                _function(name, "turn", inner),
                _line(f"{self._tf}.while_loop(lambda turn: {test}, {name}, [0])"),
            ]
        arguments = ", ".join(state)
        values = f"({arguments},)" if len(state) == 1 else arguments
        inner.append(_line(f"return {values}"))
        call = f"{self._tf}.while_loop(lambda {arguments}: {test}, {name}, [{arguments}])"
        return [_function(name, arguments, inner), _line(f"{values} = {call}")]

    def _loop_state(
        self, node: Any, tested: set[str], defined: set[str], after: set[str]
    ) -> tuple[list[str], set[str]]:
        """Return the names that a loop changes from turn to turn, and the names that it needs.

        Raises:
            _RefusedError: If a function cannot express the loop.
        """
        body = statements(node.body)
        if node.orelse is not None:
            raise _RefusedError("its `else` has no equal.")
        self._check(body)
        needed = live_before(body, after | tested) | tested | after
        needed |= live_before(body, needed)
        state = [name for name in writes(body) if name in needed]
        missing = [name for name in state if name not in defined]
        if missing:
            raise _RefusedError(f"{missing[0]} may be undefined before it: assign it there.")
        for name in state:
            values = [value for value in self.values.get(name, ()) if value is not None]
            if any(m.matches(value, _NO_STATE) for value in values):
                raise _RefusedError(f"`{name}`, which it changes, is not always an array.")
        return state, needed

    @contextlib.contextmanager
    def _known_tensors(self, names: Sequence[str]) -> Iterator[None]:
        """Treat names as tensors: the state of a loop on tensors is made of tensors."""
        outer = self.tensors
        self.tensors = outer | set(names)
        try:
            yield
        finally:
            self.tensors = outer

    def _loop_body(self, node: Any, defined: set[str], needed: set[str]) -> list[Any]:
        body = statements(node.body)
        return self._block(body, defined | set(writes(body)), needed)

    def _for(self, node: cst.For, defined: set[str], after: set[str]) -> list[Any] | None:
        """Return the statements for a ``for`` over tensors; None if it stays.

        A loop over the rows of an array may stay: Python unrolls it. A loop up to a bound that is
        an array cannot.
        """
        bounds = self._bounds(node.iter)
        is_certain = self._is_one_tensor(node.iter) if bounds is None else self._has_tensor(bounds)
        names = self._unknown_numbers(bounds or ())
        if not is_certain and not names:
            return None
        before = self.changed, len(self.notes)
        try:
            if bounds is None:
                return self._row_loop(node, defined, after)
            made = self._range_loop(node, bounds, defined, after)
        except _RefusedError as problem:
            if bounds is not None and is_certain:
                words = (
                    f"Its bound is an array, and it cannot be rewritten: {problem} Make the bound a"
                    " Python number, then Python unrolls the loop."
                )
                self._add_note(Note(self._found.lines.get(node, 1), "for", words))
            return None
        if is_certain:
            return made
        self.changed = before[0]
        del self.notes[before[1] :]
        code = cst.Module([n.with_changes(leading_lines=()) for n in made]).code
        words = (
            f"If {' or '.join(f'`{name}`' for name in names)} is a Python number, the loop is"
            " unrolled. If it is an array, or large, write:"
        )
        line = self._found.lines.get(node, 1)
        self._add_note(Note(line, "for", words, code, is_left=False))
        return None

    def _range_loop(
        self, node: cst.For, bounds: Sequence[Any], defined: set[str], after: set[str]
    ) -> list[Any]:
        """Return the statements for ``for i in tf.range(...)``."""
        state, needed = self._for_state(node, defined, after)
        start, limit, step = _start_limit_step(bounds)
        changed = set(writes(statements(node.body)))
        made: list[Any] = []
        is_kept = isinstance(limit, cst.Name) or m.matches(limit, _WHOLE)
        if reads(limit) & changed or not is_kept:
            name = self._free("limit")
            made.append(_line(f"{name} = {code_of(limit)}"))
        else:
            name = code_of(limit)
        target = code_of(node.target)
        counter = self._free("turn") if target == "_" else target
        with self._known_tensors([*state, counter]):
            inner = self._loop_body(node, defined | {target}, needed)
        arguments = ", ".join([counter, *state])
        is_down = code_of(step).startswith("-")
        following = f"{counter} {'-' if is_down else '+'} {code_of(step).lstrip('- ')}"
        inner.append(_line(f"return {', '.join([following, *state])}"))
        test = f"{counter} {'>' if is_down else '<'} {name}"
        function = self._free("loop_body")
        first = ", ".join([code_of(start), *state])
        call = f"{self._tf}.while_loop(lambda {arguments}: {test}, {function}, [{first}])"
        made.append(_function(function, arguments, inner))
        made.append(_line(f"{arguments} = {call}" if state else call))
        return made

    def _row_loop(self, node: cst.For, defined: set[str], after: set[str]) -> list[Any]:
        """Return the statements for ``for x in tensor``."""
        state, needed = self._for_state(node, defined, after)
        target = code_of(node.target)
        rows = code_of(node.iter)
        with self._known_tensors([*state, target]):
            inner = self._loop_body(node, defined | {target}, needed)
        function = self._free("loop_body")
        if len(state) == 1:
            given, first, result = state[0], state[0], state[0]
        elif state:
            given, first, result = self._free("state"), _tuple(state), ", ".join(state)
            inner.insert(0, _line(f"{result} = {given}"))
        else:  # it only changes variables
            given, first, result = self._free("turn"), "0", ""
        inner.append(_line(f"return {result or given}"))
        call = f"{self._tf}.foldl({function}, {rows}, {first})"
        made = _function(function, f"{given}, {target}", inner)
        return [made, _line(f"{result} = {call}" if result else call)]

    def _for_state(
        self, node: cst.For, defined: set[str], after: set[str]
    ) -> tuple[list[str], set[str]]:
        """Return the changed and the needed names of a ``for`` loop; see `_loop_state`."""
        if not isinstance(node.target, cst.Name):
            raise _RefusedError("it assigns several names at every turn.")
        target = node.target.value
        if target in writes(statements(node.body)):
            raise _RefusedError(f"it assigns `{target}`.")
        if target in after and target != "_":
            raise _RefusedError(f"`{target}` is read after it.")
        calls = contains(statements(node.body), _INPUT_CALLS)
        if calls:
            name = code_of(calls[0].func)
            raise _RefusedError(f"it calls `{name}`, which a compiled loop would call once.")
        state, needed = self._loop_state(node, set(), defined | {target}, after)
        return [name for name in state if name != target], needed

    def _bounds(self, node: cst.BaseExpression) -> list[Any] | None:
        """Return the arguments of ``tf.range(...)``; None for other expressions."""
        is_range = isinstance(node, cst.Call) and self._found.paths.get(node.func) == "range"
        if not is_range or any(arg.keyword or arg.star for arg in node.args):  # type: ignore[attr-defined]
            return None
        return [arg.value for arg in node.args]  # type: ignore[attr-defined]

    def _has_tensor(self, nodes: Sequence[Any]) -> bool:
        return any(self._is_tensor(node) for node in nodes)

    def _unknown_numbers(self, nodes: Sequence[Any]) -> list[str]:
        """Return which of these loop bounds are parameters of a compiled function, by name."""
        if self._node not in self._found.roots:
            return []
        plain = {p.name.value for p in _parameters(self._node) if p.default is None} - {"self"}
        return [n.value for n in nodes if isinstance(n, cst.Name) and n.value in plain]

    def _is_one_tensor(self, node: Any) -> bool:
        """Whether an expression is certainly a tensor, and not a tuple of tensors."""
        match node:
            case cst.Call():
                path = self._found.paths.get(node.func, "")
                return path != "cond" and any(name in _TENSORS for name in candidates(path))
            case cst.Name():
                values = self.values.get(node.value, [])
                if node.value in self.tensors or node.value in self._parameters or not values:
                    return node.value in self.tensors
                return all(isinstance(v, cst.Call) and self._is_one_tensor(v) for v in values)
        return False

    def _function(
        self, name: str, body: Sequence[Any], outs: list[str] | None, defined: set[str]
    ) -> cst.FunctionDef:
        """Return a function of a branch; its parameters are the names it reads first."""
        mine = writes(body)
        needed = live_before(body, set(outs or ()))
        given = [n for n in mine if n in needed]
        missing = [n for n in given if n not in defined]
        if missing:
            raise _RefusedError(f"{missing[0]} may be undefined before it: assign it there.")
        inner = self._block(body, (defined - set(mine)) | set(given), set(outs or ()))
        if outs:
            inner.append(_line(f"return {_tuple(outs)}"))
        return _function(name, ", ".join(f"{n}={n}" for n in given), inner)

    def _check(self, body: Sequence[Any], *, returns: bool = False) -> None:
        """Raise if a branch or loop would behave differently as a function, as with ``break``.

        Raises:
            _RefusedError: If it does.
        """
        for word, matcher in (_LEAVING | ({} if returns else {"return": m.Return()})).items():
            if contains(body, matcher):
                raise _RefusedError(f"there is a `{word}` in it.{_ADVICE.get(word, '')}")
        assigns = contains(body, m.Assign() | m.AugAssign() | m.AnnAssign())
        for target in (target for assign in assigns for target in _targets(assign)):
            if not is_plain_target(target):
                raise _RefusedError(f"it assigns `{code_of(target)}`, which is not a local name.")
        for call in contains(body, m.Call(m.Attribute())):
            if call.func.attr.value in _MUTATORS and call.func not in self._found.paths:
                raise _RefusedError(f"it calls `{code_of(call.func)}`, which changes an object.")
        shared = [name for name in writes(body) if name in self._shared(body)]
        if shared:
            raise _RefusedError(f"it assigns `{shared[0]}`, which another function reads.")

    def _shared(self, body: Sequence[Any]) -> set[str]:
        """Return the names that functions outside of ``body`` read, and global names."""
        inside = {f for node in body for f in m.findall(node, m.FunctionDef() | m.Lambda())}
        outside = [function for function in self._inner if function not in inside]
        return self._declared.union(*(_free_names(function) for function in outside))

    # Marks.

    def _note(self, node: Any, name: str, problem: str) -> None:
        words = (
            f"Its condition is an array, and it cannot be rewritten: {problem} In a compiled"
            " function Python cannot branch on arrays."
        )
        self._add_note(Note(self._found.lines.get(node, 1), name, words))

    def _add_note(self, note: Note) -> None:
        if note not in self.notes:  # a branch may be tried twice
            self.notes.append(note)

    def _propose(
        self, node: cst.If, rest: Sequence[Any], defined: set[str], after: set[str]
    ) -> None:
        """Add a note with the rewritten ``if``, whose condition may be an array."""
        before = self.changed, len(self.notes)
        try:
            made, _ = self._if(node, rest, defined, after)
        except _RefusedError:
            return
        finally:
            self.changed = before[0]
            del self.notes[before[1] :]
        code = cst.Module([n.with_changes(leading_lines=()) for n in made]).code
        names = sorted(reads(node.test) & set(self._parameters))
        words = f"If {' or '.join(f'`{name}`' for name in names)} is an array, write:"
        self.notes.append(Note(self._found.lines.get(node, 1), "if", words, code, is_left=False))

    # Conditions.

    def _condition(self, node: cst.BaseExpression) -> str:
        """Return a condition without Python's ``and``, ``or``, ``not`` and chains on tensors."""
        match node:
            case cst.BooleanOperation() if self._is_tensor(node):
                name = "logical_and" if isinstance(node.operator, cst.And) else "logical_or"
                left, right = self._condition(node.left), self._condition(node.right)
                return f"{self._tf}.{name}({left}, {right})"
            case cst.UnaryOperation(operator=cst.Not()) if self._is_tensor(node):
                return f"{self._tf}.logical_not({self._condition(node.expression)})"
            case cst.Comparison() if len(node.comparisons) > 1 and self._is_tensor(node):
                first, chain = node.left, ""
                for target in node.comparisons:
                    part = code_of(
                        node.with_changes(left=first, comparisons=[target], lpar=(), rpar=())
                    )
                    chain = f"{self._tf}.logical_and({chain}, {part})" if chain else part
                    first = target.comparator
                return chain
        return code_of(node)

    def _may_be_tensor(self, node: cst.BaseExpression) -> bool:
        """Whether a condition is an order comparison with a parameter of a compiled function."""
        if self._node not in self._found.roots or not isinstance(node, cst.Comparison):
            return False
        plain = {p.name.value for p in _parameters(self._node) if p.default is None} - {"self"}
        is_order = all(m.matches(target.operator, _ORDER) for target in node.comparisons)
        operands = [node.left, *(target.comparator for target in node.comparisons)]
        return is_order and any(isinstance(x, cst.Name) and x.value in plain for x in operands)

    def _is_tensor(self, node: Any, known: dict[str, bool] | None = None) -> bool:
        """Whether an expression is certainly a tensor, and not a shape.

        Args:
            node: The expression.
            known: The answers for names, each of which is asked about once.
        """
        known = {} if known is None else known
        match node:
            case cst.Attribute():
                return node.attr.value in _TENSOR_ATTRIBUTES
            case cst.Name():
                if node.value not in known:
                    known[node.value] = node.value in self.tensors
                    known[node.value] = self._is_tensor_name(node.value, known)
                return known[node.value]
            case cst.Call():
                return self._is_tensor_call(node, known)
        return any(self._is_tensor(operand, known) for operand in _operands(node))

    def _is_tensor_name(self, name: str, known: dict[str, bool]) -> bool:
        values = self.values.get(name, [])
        if name in self.tensors or not values or name in self._parameters:
            return name in self.tensors
        others = [v for v in values if not (v is not None and name in reads(v))]
        return bool(others) and all(v is not None and self._is_tensor(v, known) for v in others)

    def _is_tensor_call(self, node: cst.Call, known: dict[str, bool]) -> bool:
        path = self._found.paths.get(node.func)
        if path is None:
            func = node.func
            is_method = isinstance(func, cst.Attribute) and not node.args
            return is_method and func.attr.value in _TENSOR_METHODS  # type: ignore[attr-defined]
        names = list(candidates(path))
        if not any(n in _TENSORS or n.startswith(_FAMILIES) for n in names):
            return False
        values = [arg.value for arg in node.args]
        if any(self._is_tensor(value, known) for value in values):
            return True
        return not any(self._is_static(value) for value in values)

    def _is_static(self, node: Any) -> bool:
        """Whether an expression is computed from shapes, which are numbers once ported."""
        values = [v for name in reads(node) for v in self.values.get(name, ()) if v is not None]
        return any(self._reads_shape(each) for each in (node, *values))

    def _reads_shape(self, node: Any) -> bool:
        calls: Sequence[Any] = m.findall(node, m.Call())
        attributes: Sequence[Any] = m.findall(node, m.Attribute())
        is_call = any(self._found.paths.get(call.func, "") in _STATIC for call in calls)
        return is_call or any(each.attr.value in ("shape", "ndim") for each in attributes)

    def _free(self, name: str) -> str:
        """Return a name that the program does not use."""
        while name in self._facts.bound or name in self._facts.read:
            name += "_"
        return name


class _Choices(cst.CSTTransformer):
    """Rewrites ``a if tensor else b``."""

    def __init__(self, body: _FunctionBody) -> None:
        super().__init__()
        self._body = body
        self.changed = False

    def leave_IfExp(  # noqa: N802
        self, original_node: cst.IfExp, updated_node: cst.IfExp
    ) -> cst.BaseExpression:
        test = self._body.choice(original_node)
        if test is None:
            return updated_node
        self.changed = True
        one, other = code_of(updated_node.body), code_of(updated_node.orelse)
        return cst.parse_expression(
            f"{self._body.alias}.cond({test}, lambda: {one}, lambda: {other})"
        )


def _parameters(node: cst.FunctionDef | cst.Lambda) -> Iterator[cst.Param]:
    yield from (*node.params.posonly_params, *node.params.params, *node.params.kwonly_params)
    for star in (node.params.star_arg, node.params.star_kwarg):
        if isinstance(star, cst.Param):
            yield star


def _assigned_values(node: cst.FunctionDef) -> dict[str, list[Any]]:
    """Return the expressions assigned to each name of a function; None for unknown ones."""
    found: dict[str, list[Any]] = {}
    nodes = contains(statements(node.body), m.Assign() | m.AugAssign() | m.AnnAssign() | m.For())
    for each in nodes:
        is_value = isinstance(each, cst.Assign | cst.AnnAssign)
        for target in _targets(each):
            for name in target_names(target):
                is_plain = is_value and isinstance(target, cst.Name)
                if isinstance(each, cst.AugAssign):
                    found.setdefault(name, []).append(
                        cst.BinaryOperation(target, cst.Add(), each.value)
                    )
                else:
                    found.setdefault(name, []).append(each.value if is_plain else None)
    return found


def _operands(node: Any) -> list[cst.BaseExpression]:
    """Return the operands of an expression that is a tensor if one of them is."""
    match node:
        case cst.Comparison():
            is_test = m.Is() | m.IsNot() | m.In() | m.NotIn()
            if any(m.matches(target.operator, is_test) for target in node.comparisons):
                return []
            return [node.left, *(target.comparator for target in node.comparisons)]
        case cst.BinaryOperation() | cst.BooleanOperation():
            return [node.left, node.right]
        case cst.UnaryOperation():
            return [node.expression]
        case cst.Subscript():
            return [
                node.value,
                *(e.slice.value for e in node.slice if isinstance(e.slice, cst.Index)),
            ]
    return []


def _targets(node: Any) -> list[Any]:
    """Return the targets of an assignment."""
    return [t.target for t in node.targets] if isinstance(node, cst.Assign) else [node.target]


def _start_limit_step(bounds: Sequence[Any]) -> tuple[Any, Any, Any]:
    """Return the three bounds of a range.

    Raises:
        _RefusedError: If its direction, or the number of its turns, is unknown.
    """
    if any(m.matches(bound, m.Float()) for bound in bounds):
        raise _RefusedError("it counts in fractions.")
    zero, one = cst.Integer("0"), cst.Integer("1")
    start, limit, step = {1: [zero, *bounds, one], 2: [*bounds, one], 3: [*bounds]}[len(bounds)]
    if not m.matches(step, _WHOLE):
        raise _RefusedError(f"the sign of `{code_of(step)}` is unknown.")
    return start, limit, step


def _free_names(function: Any) -> set[str]:
    """Return the names that a function or lambda reads from outside."""
    parameters = {p.name.value for p in _parameters(function)}
    own = set(writes(statements(function.body))) if isinstance(function, cst.FunctionDef) else set()
    return reads(function.body) - parameters - own


def _is_return(node: Any) -> bool:
    return m.matches(node, m.SimpleStatementLine(body=[m.Return()]))


def _returned_value(body: Sequence[Any]) -> str | None:
    """Return the expression of a single ``return`` without a comment, which would be lost."""
    if len(body) != 1 or not _is_return(body[0]) or "#" in code_of(body[0]):
        return None
    value = body[0].body[0].value
    return None if value is None else code_of(value)


def _assigned_value(body: Sequence[Any], name: str) -> str | None:
    """Return the expression of a single assignment to ``name`` without a comment."""
    if len(body) != 1 or "#" in code_of(body[0]):
        return None
    one = m.SimpleStatementLine(body=[m.Assign(targets=[m.AssignTarget(m.Name(name))])])
    return code_of(body[0].body[0].value) if m.matches(body[0], one) else None


def _tuple(names: Sequence[str]) -> str:
    """Return the value of a branch: None, one name, or a tuple of names."""
    return f"({', '.join(names)})" if len(names) > 1 else names[0] if names else "None"


def _line(text: str) -> Any:
    return cst.parse_statement(text)


def _function(name: str, parameters: str, body: list[Any]) -> cst.FunctionDef:
    empty: Any = cst.parse_statement(f"def {name}({parameters}): pass")
    made: cst.FunctionDef = empty.with_changes(body=cst.IndentedBlock(body))
    return made
