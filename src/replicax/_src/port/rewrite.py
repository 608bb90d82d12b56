"""The source rewriter of ``replicax port``."""

import ast
import difflib
import re
import sys
import textwrap
import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import libcst as cst
import libcst.matchers as m
from libcst.metadata import (
    MetadataWrapper,
    ParentNodeProvider,
    PositionProvider,
    QualifiedNameProvider,
    QualifiedNameSource,
)

from replicax._src.base.errors import ReplicaxError
from replicax._src.port.autograph import Note, convert
from replicax._src.port.functional import symbolic_calls
from replicax._src.port.imports import normalized
from replicax._src.port.methods import is_empty, rewritten_attribute, rewritten_call
from replicax._src.port.parts import (
    IMPORTS,
    TENSORS,
    Facts,
    bound,
    code_of,
    fill_call,
    import_line,
    is_float,
    is_root,
    parameters_of,
    statement,
    unsupported_keywords,
    with_imports,
)
from replicax._src.port.paths import RELATED, REPLACED, ROOTS
from replicax._src.port.rules import WIDE, Rules, Same, Untranslated, left_out_methods
from replicax._src.port.saving import UNKNOWN, SavedPaths
from replicax._src.port.table import Row

_WIDTH = 100
_ON_THE_HOST = ("io.", "data.", "TensorSpec", "train.")
# Arguments of version 1 that version 2 calls by another name.
_OLDER_ARGUMENTS = {
    "keep_dims": "keepdims",
    "reduction_indices": "axis",
    "squeeze_dims": "axis",
    "fn1": "true_fn",
    "fn2": "false_fn",
}
# The same, where the function of version 2 has no parameter of the old name.
_OLDER_NAMES = {"dim": "axis", "dimension": "axis", "filter": "filters", "value": "input"}
# Functions that give a shape if they are given one.
_SHAPE_MATH = frozenset(
    [
        "add",
        "cast",
        "concat",
        "constant",
        "convert_to_tensor",
        "gather",
        "identity",
        "maximum",
        "minimum",
        "multiply",
        "reverse",
        "slice",
        "stack",
        "strided_slice",
        "subtract",
        "unstack",
    ]
)
# Functions of replicax that take no symbolic tensors, on such tensors.
_ON_SYMBOLIC = {
    "add": Row({"x": None, "y": None}, "rx.keras.ops.add(x, y)"),
    "math.add": Row({"x": None, "y": None}, "rx.keras.ops.add(x, y)"),
    "identity": Row({"input": None}, "rx.keras.ops.copy(input)"),
}
_NO_CONVERSION = frozenset(["autograph.experimental.do_not_convert", "autograph.do_not_convert"])
_LOOP = (
    "the loop is unrolled, and its bound must be a Python number. `rx.scan` compiles one turn for"
    " all."
)


_SHAPE = m.Arg(m.Attribute(attr=m.Name("shape")))


class PortError(ReplicaxError, ValueError):
    """A file that is not a Python 3 program."""


@dataclass(frozen=True)
class Mark:
    """A place in the program that a human must check.

    Attributes:
        line: The line in the original program.
        name: The name that the mark is about.
        words: A caveat, or advice on a replacement.
        is_left: Whether the name was left unchanged; else its translation may differ in meaning.
        code: Lines to write in place of the statement, if they are known.
    """

    line: int
    name: str
    words: str
    is_left: bool
    code: str = ""

    @property
    def comment(self) -> str:
        """The text of the comment above the line."""
        what = f"{self.name} is left as it was." if self.is_left else f"look at {self.name}:"
        return f"replicax port: {what} {self.words}"


@dataclass(frozen=True)
class Use:
    """A TensorFlow name in the program.

    Attributes:
        line: The line in the original program.
        path: The name below ``tf``.
        outcome: "rewritten"; "answered" if a mark says what to write; or "unknown".
    """

    line: int
    path: str
    outcome: str


@dataclass
class Ported:
    """The result of porting a program.

    Attributes:
        code: The program for replicax.
        changes: How often each pair of an old and a new name occurred.
        marks: The places to check, in the order of their lines.
        uses: The TensorFlow names of the program, in the order of their lines.
    """

    code: str
    changes: dict[tuple[str, str], int] = field(default_factory=dict)
    marks: list[Mark] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)


def port(code: str, name: str = "the program", element_functions: Iterable[str] = ()) -> Ported:
    """Rewrite a program.

    Args:
        code: The program for TensorFlow.
        name: Its name, for messages.
        element_functions: Functions of it that datasets of other files apply to elements.

    Raises:
        PortError: If it is not Python.
    """
    try:
        module = cst.parse_module(code)
    except cst.ParserSyntaxError as error:
        raise PortError(f"{name} is not Python, line {error.raw_line}: {error.message}") from None
    except (SyntaxError, ValueError, RecursionError) as error:
        raise PortError(f"{name} is not Python: {error}") from None
    _check_version(code, name)
    module.visit(facts := Facts(element_functions))
    if not facts.is_for_tensorflow:
        return Ported(code)
    rules = Rules()
    wrapper = MetadataWrapper(normalized(module, facts, rules))
    wrapper.visit(facts := Facts(element_functions))
    converted = convert(wrapper, facts)
    lines, notes = _Lines(code, code), []
    if converted is not None:
        lines = _Lines(wrapper.module.code, converted.code)
        notes = [_ported_note(note, facts) for note in converted.notes]
        wrapper = MetadataWrapper(cst.parse_module(converted.code))
        wrapper.visit(facts := Facts(element_functions))
    rewriter = _Rewriter(facts, lines, notes, rules)
    ported = wrapper.visit(rewriter)
    marks = sorted(rewriter.found, key=lambda mark: (mark.line, mark.name))
    uses = sorted(rewriter.uses, key=lambda use: (use.line, use.path))
    new = with_imports(ported, rewriter.needs, facts, rewriter.names).code
    return Ported(new, rewriter.changes, marks, uses)


def _check_version(code: str, name: str) -> None:
    """Raise an error for what LibCST reads and this Python does not: `except A, b:` of Python 2."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(code)
    except SyntaxError as error:
        version = ".".join(map(str, sys.version_info[:2]))
        raise PortError(
            f"{name} is not Python {version}, line {error.lineno}: {error.msg}"
        ) from None


def foreign_element_functions(code: str) -> set[tuple[str, str]]:
    """Return the module and name of each function of other files that datasets of a program apply.

    Example:
        >>> foreign_element_functions("from data import parse; train = train.map(parse)")
        {('data', 'parse')}
    """
    try:
        cst.parse_module(code).visit(facts := Facts())
    except (cst.ParserSyntaxError, SyntaxError, ValueError, RecursionError):
        return set()
    return facts.foreign_element_functions()


class _Lines:
    """A map from the lines of a program with converted control flow to those of the original."""

    def __init__(self, old: str, new: str) -> None:
        self._old: dict[int, int] = {}
        if old == new:
            return
        pairs = difflib.SequenceMatcher(None, old.splitlines(), new.splitlines(), autojunk=False)
        for _, i1, i2, j1, j2 in pairs.get_opcodes():
            for j in range(j1, j2):
                self._old[j + 1] = min(i1 + j - j1, max(i1, i2 - 1)) + 1

    def original(self, line: int) -> int:
        """Return the line in the original program."""
        return self._old.get(line, line)


def _ported_note(note: Note, facts: Facts) -> Note:
    """Return a note with its code ported."""
    if not note.code:
        return note
    names = [f"import {text}" for kind, text in _modules(facts)]
    code = port("\n".join([*names, "", note.code])).code
    kept = [line for line in code.splitlines() if not line.startswith(("import ", "from "))]
    return replace(note, code="\n".join(kept).strip())


def _modules(facts: Facts) -> list[tuple[str, str]]:
    """Return the names that imports of modules bind, with the path of each module."""
    kinds = [(name, kind.partition(" ")) for name, kind in facts.bound.items()]
    return [(name, text) for name, (kind, _, text) in kinds if kind == "import"]


class _Rewriter(cst.CSTTransformer):
    """Replaces TensorFlow names and calls, and collects the marks."""

    METADATA_DEPENDENCIES = (ParentNodeProvider, PositionProvider, QualifiedNameProvider)

    def __init__(self, facts: Facts, lines: _Lines, notes: Sequence[Note], rules: Rules) -> None:
        super().__init__()
        self._facts = facts
        self._lines = lines
        self._notes = {(note.line, note.name): note for note in notes}
        self._rules = rules
        self._methods = left_out_methods()
        self._paths = SavedPaths(facts)
        self._in_elements = [False]
        self._answers: dict[
            cst.CSTNode, Same | Row | Untranslated | None
        ] = {}  # for called functions
        # tf.range(...) as the iterable of a for statement -> whether a mark speaks of the loop.
        self._loops: dict[cst.CSTNode, bool] = {}
        self._symbolic: set[cst.Call] = set()  # calls in functional models of Keras
        self._imported: dict[str, str] = {}  # names from `from tensorflow...` -> their names in rx
        self._marks: dict[cst.CSTNode, list[Mark]] = {}
        self.names = facts.names()
        self.needs: set[str] = set()
        self.uses: list[Use] = []
        self.found: list[Mark] = []
        self.changes: dict[tuple[str, str], int] = {}

    def _path(self, node: cst.CSTNode) -> str | None:
        """Return ``data.Dataset`` for ``tf.data.Dataset``; None for names from elsewhere."""
        inner = node
        while isinstance(inner, cst.Attribute):
            inner = inner.value
        if not isinstance(inner, cst.Name):
            return None
        names: Any = self.get_metadata(QualifiedNameProvider, node, set())
        for name in names:
            if name.source is QualifiedNameSource.IMPORT:
                root, _, path = name.name.partition(".")
                if root in ROOTS:
                    return ".".join(part for part in (ROOTS[root], str(path)) if part)
        return None

    def visit_Module(self, node: cst.Module) -> None:  # noqa: N802
        self._symbolic = symbolic_calls(node, self._path)
        self._paths.collect(node, self._path)

    def _line(self, node: cst.CSTNode) -> int:
        position: Any = self.get_metadata(PositionProvider, node)
        return self._lines.original(int(position.start.line))

    def _parents(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        while (node := self.get_metadata(ParentNodeProvider, node, None)) is not None:  # type: ignore[assignment]
            yield node

    def _mark(
        self, node: cst.CSTNode, name: str, words: str, *, is_left: bool, code: str = ""
    ) -> None:
        """Add a mark to the statement that contains ``node``."""
        mark = Mark(self._line(node), name, words, is_left, code)
        kinds = (cst.SimpleStatementLine, cst.BaseCompoundStatement)
        statement = next(n for n in (node, *self._parents(node)) if isinstance(n, kinds))
        marks = self._marks.setdefault(statement, [])
        if mark.comment not in [other.comment for other in marks]:
            marks.append(mark)
            self.found.append(mark)

    def _count(self, old: str, new: str) -> None:
        self.changes[old, new] = self.changes.get((old, new), 0) + 1

    def _use(self, node: cst.CSTNode, path: str, outcome: str) -> None:
        self.uses.append(Use(self._line(node), path, outcome))

    def _expression(self, text: str) -> cst.BaseExpression:
        """Parse an expression of the new program, in NumPy inside element functions."""
        if self._in_elements[-1]:
            text = text.replace("jnp.", "np.")
        text = text.replace("jax.numpy.", "jnp.")
        found = {head for head in IMPORTS if re.search(rf"(?<![\w.]){head}\b(?!=)", text)}
        self.needs |= found
        for head in found:
            text = re.sub(rf"(?<![\w.]){head}\b(?!=)", self.names[head], text)
        return cst.parse_expression(text)

    # Functions that a dataset applies to elements, which run in NumPy.

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:  # noqa: N802
        is_one = node.name.value in self._facts.element_functions
        self._in_elements.append(self._in_elements[-1] or is_one)

    def leave_FunctionDef(  # noqa: N802
        self, original_node: cst.FunctionDef, updated_node: cst.FunctionDef
    ) -> cst.FunctionDef:
        self._in_elements.pop()
        return updated_node

    def visit_Lambda(self, node: cst.Lambda) -> None:  # noqa: N802
        self._in_elements.append(self._in_elements[-1] or node in self._facts.lambdas)

    def leave_Lambda(  # noqa: N802
        self, original_node: cst.Lambda, updated_node: cst.Lambda
    ) -> cst.Lambda:
        self._in_elements.pop()
        return updated_node

    def leave_Decorator(  # noqa: N802
        self, original_node: cst.Decorator, updated_node: cst.Decorator
    ) -> Any:
        """Remove `@tf.autograph.experimental.do_not_convert`: nothing is converted at run time."""
        path = self._path(original_node.decorator)
        return cst.RemoveFromParent() if path in _NO_CONVERSION else updated_node

    # Names.

    def leave_Name(  # noqa: N802
        self, original_node: cst.Name, updated_node: cst.Name
    ) -> Any:
        return self._translate_name(original_node, updated_node)

    def leave_Attribute(  # noqa: N802
        self, original_node: cst.Attribute, updated_node: cst.Attribute
    ) -> Any:
        return self._translate_name(original_node, updated_node)

    def _translate_name(self, node: cst.CSTNode, updated: Any) -> Any:
        """Return the translation of a name that is not called."""
        parent: Any = self.get_metadata(ParentNodeProvider, node, None)
        is_inner = isinstance(parent, cst.Attribute)
        is_label = getattr(parent, "keyword", None) is node or getattr(parent, "name", None) is node
        if is_label or node in self._answers:
            return updated
        if is_inner:
            return self._known_attribute(node, updated)
        path = self._path(node)
        if path is None:
            return self._known_attribute(node, updated)
        if path in _NO_CONVERSION and isinstance(parent, cst.Decorator):
            self._use(node, path, "rewritten")
            self._count(f"@tf.{path}", "nothing")
            return updated
        answer = self._rules.of(path)
        if isinstance(answer, Row):
            answer = self._as_value(path, answer)
        return self._replace_name(node, updated, path, answer)

    def _known_attribute(self, node: cst.CSTNode, updated: Any) -> Any:
        """Return an attribute of a shape or an optimizer under its name in JAX or Keras 3."""
        if not isinstance(updated, cst.Attribute) or self._path(node) is not None:
            return updated
        new = rewritten_attribute(updated)
        if new is None:
            return updated
        self.needs |= {"jnp"} & {code_of(new).partition(".")[0]}
        self._count(f".{updated.attr.value}", code_of(new).partition("(")[0].rpartition(".")[2])
        return new

    def _as_value(self, path: str, row: Row) -> Same | Untranslated:
        """Return a function for a name that is used as a value, or called in an unusual way."""
        if row.bare and not self._in_elements[-1]:
            return Same(row.bare, caveat=row.caveat)
        return self._rules.function(path) or Untranslated(f"Write `{row.target}`.")

    def _replace_name(
        self, node: cst.CSTNode, updated: Any, path: str, answer: Same | Untranslated
    ) -> Any:
        """Return the new name in place of the old one; add a mark where it may be wrong."""
        if isinstance(answer, Untranslated):
            self._use(node, path, "answered" if answer.is_answer else "unknown")
            self._mark(node, f"tf.{path}" if path else "tf", answer.words, is_left=True)
            return updated
        self._use(node, path, "rewritten")
        if answer.caveat and not self._is_harmless(node, answer.caveat):
            self._mark(node, answer.text, answer.caveat, is_left=False)
        written = code_of(updated)
        head, _, tail = written.partition(".")
        imported = self._imported.get(head)
        if imported is not None and answer.text == (f"{imported}.{tail}" if tail else imported):
            return updated
        new = self._expression(answer.text)
        self._count(f"tf.{path}", code_of(new))
        return new.with_changes(lpar=updated.lpar, rpar=updated.rpar)

    def _is_harmless(self, node: cst.CSTNode, caveat: str) -> bool:
        """Whether a 64-bit dtype stays on the host, where it is kept."""
        if caveat != WIDE:
            return False
        calls = (n.func for n in self._parents(node) if isinstance(n, cst.Call))
        paths = (self._path(f) or "" for f in calls)
        return self._in_elements[-1] or any(p.startswith(_ON_THE_HOST) for p in paths)

    # Calls.

    def visit_If(self, node: cst.If) -> None:  # noqa: N802
        self._add_note(node, "if")

    def visit_While(self, node: cst.While) -> None:  # noqa: N802
        self._add_note(node, "while")

    def _add_note(self, node: cst.CSTNode, kind: str) -> bool:
        """Add the mark of a statement whose control flow was not converted, if there is one."""
        note = self._notes.pop((self._line(node), kind), None)
        if note is not None:
            self._mark(node, kind, note.words, is_left=note.is_left, code=note.code)
        return note is not None

    def visit_For(self, node: cst.For) -> None:  # noqa: N802
        has_note = self._add_note(node, "for")
        if isinstance(node.iter, cst.Call) and self._path(node.iter.func) == "range":
            self._loops[node.iter] = has_note

    def visit_Call(self, node: cst.Call) -> None:  # noqa: N802
        path = self._path(node.func)
        if node in self._paths.unknown:
            self._mark(node, code_of(node.func), UNKNOWN, is_left=False)
        if path is not None:
            special = _ON_SYMBOLIC.get(path) if node in self._symbolic else None
            self._answers[node.func] = special or self._rules.of(path)
        elif self._is_left_out(node):
            assert isinstance(node.func, cst.Attribute)
            made = self._facts.values.get(code_of(node.func.value), ())
            paths = [self._path(v.func) or "" for v in made if isinstance(v, cst.Call)]
            if not any(path.startswith("compat.v1.") for path in paths):  # these have such methods
                name = node.func.attr.value
                self._mark(node, f".{name}", self._methods[name], is_left=False)

    def _is_left_out(self, node: cst.Call) -> bool:
        """Whether a call is of a method that replicax's classes lack, and stays as it is."""
        if not (isinstance(node.func, cst.Attribute) and node.func.attr.value in self._methods):
            return False
        functions = self._facts.functions
        parent: Any = self.get_metadata(ParentNodeProvider, node)
        if isinstance(parent, cst.Expr) and is_empty(node, functions):
            return False
        return rewritten_call(node, functions) is None

    def leave_Expr(  # noqa: N802
        self, original_node: cst.Expr, updated_node: cst.Expr
    ) -> cst.Expr | cst.RemovalSentinel:
        if not is_empty(original_node.value, self._facts.functions):
            return updated_node
        self._count("x.set_shape(...)", "nothing")
        return cst.RemoveFromParent()

    def leave_Call(  # noqa: N802
        self, original_node: cst.Call, updated_node: cst.Call
    ) -> Any:
        answer = self._answers.get(original_node.func)
        updated_node = self._paths.rewritten(original_node, updated_node)
        if answer is None:
            return self._method(original_node, updated_node)
        path = self._path(original_node.func) or ""
        if isinstance(answer, Row):
            return self._by_row(original_node, updated_node, path, answer)
        return self._call(original_node, updated_node, path, answer)

    def _call(
        self, node: cst.Call, updated: cst.Call, path: str, answer: Same | Untranslated
    ) -> cst.Call:
        """Return the call of another function with the arguments of the program."""
        args = _renamed(updated.args, path)
        if isinstance(answer, Same):
            args = _under_new_names(args, parameters_of(answer.value))
            keywords = [a.keyword.value for a in args if a.keyword is not None]
            if refused := unsupported_keywords(answer.value, keywords):
                answer = Untranslated(f"`{answer.text}` takes no {', '.join(refused)}.")
        func = self._replace_name(node.func, updated.func, path, answer)
        is_new = isinstance(answer, Same)
        return updated.with_changes(func=func, args=args if is_new else updated.args)

    def _method(self, node: cst.Call, updated: cst.Call) -> cst.BaseExpression:
        """Rewrite the call of a method that only TensorFlow's and Keras 2's objects have."""
        if not isinstance(node.func, cst.Attribute):
            return updated
        # `x.numpy()` inside of `x.numpy().decode()` is rewritten with the latter.
        parent: Any = self.get_metadata(ParentNodeProvider, node)
        if m.matches(parent, m.Attribute(attr=m.Name("decode"))):
            return updated
        new = rewritten_call(updated, self._facts.functions)
        if new is None:
            return self._as_numpy(node, updated)
        self.needs |= {"np"} & set(re.split(r"\W", code_of(new))[:2])
        self._count(f".{node.func.attr.value}", code_of(new).partition("(")[0].rpartition(".")[2])
        return new

    def _as_numpy(self, node: cst.Call, updated: cst.Call) -> cst.BaseExpression:
        """Rewrite ``x.numpy()`` as ``np.array(x)``, which may be written to, as TensorFlow's."""
        if not m.matches(node, m.Call(m.Attribute(attr=m.Name("numpy")), args=[])):
            return updated
        if "numpy" in self._facts.functions:
            words = "A class here has such a method. For an array write `np.array(x)`."
            self._mark(node, ".numpy()", words, is_left=True)
            return updated
        self._count("x.numpy()", "np.array(x)")
        self.needs.add("np")
        receiver = updated.func.value  # type: ignore[attr-defined]
        if not isinstance(receiver, cst.Tuple):
            receiver = receiver.with_changes(lpar=[], rpar=[])
        return cst.parse_expression("np.array(x)").with_changes(args=[cst.Arg(receiver)])

    def _by_row(self, node: cst.Call, updated: cst.Call, path: str, row: Row) -> Any:
        """Rewrite a call by a row of the table, or mark it."""
        if node in self._loops and not any(a.keyword or a.star for a in node.args):
            return self._as_python_range(node, updated, path)
        if node in self._symbolic and not self._in_elements[-1]:
            function = self._rules.function(path)
            if function is not None:
                return self._call(node, updated, path, function)
        args = _under_new_names(_renamed(updated.args, path), row.parameters)
        arguments = bound(args, row)
        problem = arguments if isinstance(arguments, str) else self._refused(node, path)
        if isinstance(arguments, str) or problem:
            answer = self._rules.function(path) or Untranslated(problem)
            return self._call(node, updated, path, answer)
        if row.caveat and not self._is_certain(node, row):
            self._mark(node, row.target.partition("(")[0], row.caveat, is_left=False)
        self._use(node, path, "rewritten")
        new = self._expression(row.target)
        self._count(f"tf.{path}", code_of(new).partition("(")[0])
        if not isinstance(new, cst.Call):
            return new
        arguments = {name: self._as_array(name, a) for name, a in arguments.items()}
        return fill_call(new, arguments, row, updated, self._expression)

    def _as_python_range(self, node: cst.Call, updated: cst.Call, path: str) -> cst.Call:
        """Rewrite ``tf.range(n)`` as the iterable of a Python loop."""
        is_known = all(isinstance(a.value, cst.Integer) for a in node.args)
        if not is_known and not self._loops[node]:
            self._mark(node, "range", _LOOP, is_left=False)
        self._use(node, path, "rewritten")
        self._count("for i in tf.range(n)", "for i in range(n)")
        return updated.with_changes(func=cst.Name("range"))

    def _as_array(self, parameter: str, argument: Any) -> Any:
        """Return an argument as an array if it may be a list, which JAX rejects."""
        value = getattr(argument, "value", None)
        if self._in_elements[-1] or parameter not in TENSORS:
            return argument
        if parameter == "repeats" and isinstance(value, cst.List | cst.Tuple):
            array = self._expression("np.asarray(x)")  # known in a trace: their sum is a size
        elif isinstance(value, cst.Name) and self._may_be_list(value.value):
            array = self._expression("jnp.asarray(x)")
        else:
            return argument
        return argument.with_changes(value=array.with_changes(args=[cst.Arg(value)]))

    def _may_be_list(self, name: str) -> bool:
        lists = cst.List | cst.ListComp
        return any(isinstance(value, lists) for value in self._facts.values.get(name, ()))

    def _refused(self, node: cst.Call, path: str) -> str:
        """Return why JAX's function cannot replace this call; "" if it can."""
        if path.rpartition(".")[2] == "shape":
            parent: Any = self.get_metadata(ParentNodeProvider, node)
            is_number = m.matches(
                parent,
                m.Subscript(slice=[m.SubscriptElement(slice=m.Index())]),
            )
            return "" if is_number else "A shape is a tuple of numbers: write `x.shape`."
        if not self._in_elements[-1] and _has_inner_list(node, path):
            return "JAX rejects lists in place of arrays."
        is_of_shape = any(self._is_shape(argument.value) for argument in node.args)
        if path.rpartition(".")[2].startswith("reduce_"):
            is_of_shape |= m.matches(node, m.Call(args=[_SHAPE, m.ZeroOrMore()]))
        return "Its argument is a shape, which is a tuple of numbers." if is_of_shape else ""

    def _is_shape(self, node: cst.CSTNode, known: dict[str, bool] | None = None) -> bool:
        """Whether an expression is computed from shapes, which are known in a trace.

        Args:
            node: The expression.
            known: The answers for names, each of which is asked about once.
        """
        known = {} if known is None else known
        match node:
            case cst.Call():
                path = self._path(node.func) or ""
                if path.rpartition(".")[2] in ("shape", "TensorShape"):
                    return True
                of_shape = any(self._is_shape(a.value, known) for a in node.args)
                return of_shape and path.rpartition(".")[2] in _SHAPE_MATH
            case cst.Subscript():
                is_slice = not m.matches(node, m.Subscript(slice=[m.SubscriptElement(m.Index())]))
                return is_slice and self._is_shape(node.value, known)
            case cst.List() | cst.Tuple():
                return any(self._is_shape(element.value, known) for element in node.elements)
            case cst.BinaryOperation():
                return self._is_shape(node.left, known) or self._is_shape(node.right, known)
            case cst.Name():
                if node.value not in known:
                    known[node.value] = False
                    values = self._facts.values.get(node.value, ())
                    is_called_so = node.value == "shape" or node.value.endswith("_shape")
                    known[node.value] = is_called_so or any(
                        self._is_shape(value, known) for value in values
                    )
                return known[node.value]
        return False

    def _is_certain(self, node: cst.Call, row: Row) -> bool:
        """Whether the caveat of a row certainly does not apply here."""
        if "gradient" in row.caveat:
            return self._in_elements[-1]  # gradients are not taken there
        is_mean = "floats" in row.caveat
        return is_mean and bool(node.args) and is_float(node.args[0].value, self._facts, self._path)

    # Imports, and comments above lines.

    def leave_Import(  # noqa: N802
        self, original_node: cst.Import, updated_node: cst.Import
    ) -> Any:
        for alias in updated_node.names:
            self._mark_related_import(original_node, alias.evaluated_name)
        theirs = [a for a in updated_node.names if is_root(a.evaluated_name)]
        replaced = [self._replacement(a) for a in updated_node.names]
        names = [
            alias
            for alias, new in zip(updated_node.names, replaced, strict=True)
            if new is None and alias not in theirs
        ]
        if len(names) == len(updated_node.names):
            return updated_node
        if theirs:
            self.needs.add("rx")
        lines: list[cst.BaseSmallStatement] = [new for new in replaced if new is not None]
        if names:
            names[-1] = names[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
            lines.insert(0, updated_node.with_changes(names=names))
        return cst.FlattenSentinel(lines) if lines else cst.RemoveFromParent()

    def _replacement(self, alias: cst.ImportAlias) -> cst.BaseSmallStatement | None:
        """Return the import of replicax's module in place of another package."""
        if alias.evaluated_name not in REPLACED:
            return None
        home, name = REPLACED[alias.evaluated_name]
        own = alias.evaluated_alias or alias.evaluated_name
        self._count(f"import {alias.evaluated_name}", f"from {home} import {name}")
        return statement(f"from {home} import {name}" + (f" as {own}" if own != name else ""))

    def _brought_in(self, node: cst.ImportFrom) -> list[tuple[str, str]]:
        """Return the names that an import binds, each with its path below ``tf``."""
        home = code_of(node.module)
        root, _, inner = home.partition(".")
        base = [part for part in (ROOTS[root], inner) if part]
        if isinstance(node.names, cst.ImportStar):  # the program uses none of its names
            return []
        return [
            (alias.evaluated_alias or alias.evaluated_name, ".".join([*base, alias.evaluated_name]))
            for alias in node.names
        ]

    def visit_ImportFrom(self, node: cst.ImportFrom) -> None:  # noqa: N802
        if node.relative or not is_root(code_of(node.module)):
            return
        for name, path in self._brought_in(node):
            answer = self._rules.of(path)
            if isinstance(answer, Same) and answer.text.startswith(("rx.", "tf.")):
                self._imported[name] = answer.text

    def leave_ImportFrom(  # noqa: N802
        self, original_node: cst.ImportFrom, updated_node: cst.ImportFrom
    ) -> Any:
        home = code_of(original_node.module)
        if original_node.relative or not is_root(home):
            self._mark_related_import(original_node, home)
            return updated_node
        self.needs.add("rx")
        lines: list[cst.BaseSmallStatement] = []
        for name, path in self._brought_in(original_node):
            if name in self._imported:
                new = code_of(self._expression(self._imported[name]))
                self._count(f"from {home} import {path.rpartition('.')[2]}", new)
                if name != new:
                    lines.append(statement(f"{name} = {new}"))
        return cst.FlattenSentinel(lines) if lines else cst.RemoveFromParent()

    def _mark_related_import(self, node: cst.CSTNode, name: str) -> None:
        words = RELATED.get(name.split(".")[0])
        if words is not None and "substrates" not in name:
            self._mark(node, name, words, is_left=False)

    def on_leave(self, original_node: Any, updated_node: Any) -> Any:
        result: Any = super().on_leave(original_node, updated_node)
        if isinstance(result, cst.SimpleStatementLine) and not result.body:
            return self._empty_statement(original_node)
        marks = self._marks.get(original_node, ())
        if not marks or not hasattr(result, "leading_lines"):
            return result
        position: Any = self.get_metadata(PositionProvider, original_node)
        width = _WIDTH - position.start.column - 2
        texts = [
            line
            for mark in marks
            for line in [
                *textwrap.wrap(mark.comment, width),
                *(f"    {line}" for line in mark.code.splitlines()),
            ]
        ]
        comments = [cst.EmptyLine(comment=cst.Comment(f"# {text}")) for text in texts]
        return result.with_changes(leading_lines=[*result.leading_lines, *comments])

    def _empty_statement(self, node: cst.SimpleStatementLine) -> Any:
        """Return the replacement of a statement that becomes empty: none, an import or ``pass``."""
        parent: Any = self.get_metadata(ParentNodeProvider, node)
        is_outermost = isinstance(parent, cst.Module)
        is_import = m.matches(node.body[0], m.Import() | m.ImportFrom())
        if not is_import and (is_outermost or len(parent.body) > 1) and not node.leading_lines:
            return cst.RemoveFromParent()
        text = import_line("rx", self.names) if is_outermost else "pass"
        return node.with_changes(body=[statement(text)])


def _has_inner_list(call: cst.Call, path: str) -> bool:
    """Whether a list stands where JAX takes an array: ``tf.stack([[1], [2]])``."""
    if path not in ("concat", "stack"):
        return False
    values = [arg.value for arg in call.args[:1] if not arg.keyword]
    values += [arg.value for arg in call.args if arg.keyword and arg.keyword.value == "values"]
    lists = [value for value in values if isinstance(value, cst.List | cst.Tuple)]
    parts = [element.value for value in lists for element in value.elements]
    return any(isinstance(part, cst.List | cst.Tuple) for part in parts)


def _renamed(args: Sequence[cst.Arg], path: str) -> Sequence[cst.Arg]:
    """Return arguments under their names in version 2 of TensorFlow, and Keras 3."""
    names = dict(_OLDER_ARGUMENTS)
    if "optimizers" in path:
        names["lr"] = "learning_rate"
    return [
        arg.with_changes(keyword=cst.Name(names[arg.keyword.value]))
        if arg.keyword is not None and arg.keyword.value in names
        else arg
        for arg in args
    ]


def _under_new_names(args: Sequence[cst.Arg], parameters: Collection[str]) -> Sequence[cst.Arg]:
    """Return arguments under the names that a function has for those of version 1."""

    def renamed(arg: cst.Arg) -> cst.Arg:
        old = arg.keyword.value if arg.keyword is not None else ""
        new = _OLDER_NAMES.get(old, "")
        is_known = new in parameters and old not in parameters
        return arg.with_changes(keyword=cst.Name(new)) if is_known else arg

    return [renamed(arg) for arg in args]
