"""The source rewriter of ``replicax port``."""

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
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
from replicax._src.port.parts import (
    IMPORTS,
    ROOT,
    Facts,
    bound,
    code_of,
    fill_call,
    is_float,
    statement,
    unsupported_keywords,
    with_imports,
)
from replicax._src.port.rules import WIDE, Row, Rules, Same, Untranslated, left_out_methods

_WIDTH = 100
_ON_THE_HOST = (f"{ROOT}.io.", f"{ROOT}.data.", f"{ROOT}.TensorSpec", f"{ROOT}.train.")
_LOOP = (
    "the loop is unrolled, and its bound must be a Python number. `rx.scan` compiles one turn for"
    " all."
)


class PortError(ReplicaxError, ValueError):
    """A program that cannot be ported without changes."""


@dataclass(frozen=True)
class Mark:
    """A place in the program that a human must check.

    Attributes:
        line: The line in the original program.
        name: The name that the mark is about.
        words: A caveat, or advice on a replacement.
        is_left: Whether the name was left unchanged; else its translation may differ in meaning.
    """

    line: int
    name: str
    words: str
    is_left: bool

    @property
    def comment(self) -> str:
        """The text of the comment above the line."""
        what = f"{self.name} is left as it was." if self.is_left else f"look at {self.name}:"
        return f"replicax port: {what} {self.words}"


@dataclass
class Ported:
    """The result of porting a program.

    Attributes:
        code: The program for replicax.
        changes: How often each pair of an old and a new name occurred.
        marks: The places to check, in the order of their lines.
    """

    code: str
    changes: dict[tuple[str, str], int] = field(default_factory=dict)
    marks: list[Mark] = field(default_factory=list)


def port(code: str, name: str = "the program") -> Ported:
    """Rewrite a program.

    Args:
        code: The program for TensorFlow.
        name: Its name, for messages.

    Raises:
        PortError: If it is not Python, or binds a name that the port needs to something else.
    """
    try:
        module = cst.parse_module(code)
    except cst.ParserSyntaxError as error:
        raise PortError(f"{name} is not Python, line {error.raw_line}: {error.message}") from None
    wrapper = MetadataWrapper(module)
    wrapper.visit(facts := Facts())
    for own, what in facts.bound.items():
        if own in IMPORTS and what != IMPORTS[own]:
            raise PortError(
                f"{name} calls something else `{own}`, the name that `{IMPORTS[own]}` needs."
                " Rename it first."
            )
    if not facts.is_for_tensorflow:
        return Ported(code)
    rewriter = _Rewriter(facts)
    ported = wrapper.visit(rewriter)
    marks = sorted(rewriter.found, key=lambda mark: (mark.line, mark.name))
    return Ported(with_imports(ported, rewriter.needs, facts).code, rewriter.changes, marks)


class _Rewriter(cst.CSTTransformer):
    """Replaces TensorFlow names and calls, and collects the marks."""

    METADATA_DEPENDENCIES = (ParentNodeProvider, PositionProvider, QualifiedNameProvider)

    def __init__(self, facts: Facts) -> None:
        super().__init__()
        self._facts = facts
        self._rules = Rules()
        self._methods = left_out_methods()
        self._in_elements = [False]
        self._answers: dict[
            cst.CSTNode, Same | Row | Untranslated | None
        ] = {}  # for called functions
        self._loops: set[cst.CSTNode] = set()  # tf.range(...) as the iterable of a for statement
        self._imported: dict[str, str] = {}  # names from `from tensorflow...` -> their names in rx
        self._marks: dict[cst.CSTNode, list[Mark]] = {}
        self.needs: set[str] = set()
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
                if root == ROOT:
                    return str(path)
        return None

    def _line(self, node: cst.CSTNode) -> int:
        position: Any = self.get_metadata(PositionProvider, node)
        return int(position.start.line)

    def _parents(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        while (node := self.get_metadata(ParentNodeProvider, node, None)) is not None:  # type: ignore[assignment]
            yield node

    def _mark(self, node: cst.CSTNode, name: str, words: str, *, is_left: bool) -> None:
        """Add a mark to the statement that contains ``node``."""
        mark = Mark(self._line(node), name, words, is_left)
        kinds = (cst.SimpleStatementLine, cst.BaseCompoundStatement)
        statement = next(n for n in (node, *self._parents(node)) if isinstance(n, kinds))
        marks = self._marks.setdefault(statement, [])
        if mark.comment not in [other.comment for other in marks]:
            marks.append(mark)
            self.found.append(mark)

    def _count(self, old: str, new: str) -> None:
        self.changes[old, new] = self.changes.get((old, new), 0) + 1

    def _expression(self, text: str) -> cst.BaseExpression:
        """Parse an expression of the new program, in NumPy inside element functions."""
        if self._in_elements[-1]:
            text = text.replace("jnp.", "np.")
        text = text.replace("jax.numpy.", "jnp.")
        self.needs |= {text.split(".")[0]} & set(IMPORTS)
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
        if is_inner or is_label or node in self._answers:
            return updated
        path = self._path(node)
        if path is None:
            return updated
        answer = self._rules.of(path)
        if isinstance(answer, Row):
            answer = (
                Same(answer.bare, caveat=answer.caveat)
                if answer.bare
                else Untranslated(f"Write `{answer.target}`.")
            )
        return self._replace_name(node, updated, path, answer)

    def _replace_name(
        self, node: cst.CSTNode, updated: Any, path: str, answer: Same | Untranslated
    ) -> Any:
        """Return the new name in place of the old one; add a mark where it may be wrong."""
        if isinstance(answer, Untranslated):
            self._mark(node, f"tf.{path}" if path else "tf", answer.words, is_left=True)
            return updated
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
        paths = (f"{ROOT}.{self._path(f)}" for f in calls)
        return self._in_elements[-1] or any(p.startswith(_ON_THE_HOST) for p in paths)

    # Calls.

    def visit_For(self, node: cst.For) -> None:  # noqa: N802
        if isinstance(node.iter, cst.Call) and self._path(node.iter.func) == "range":
            self._loops.add(node.iter)

    def visit_Call(self, node: cst.Call) -> None:  # noqa: N802
        path = self._path(node.func)
        if path is not None:
            self._answers[node.func] = self._rules.of(path)
        elif isinstance(node.func, cst.Attribute) and node.func.attr.value in self._methods:
            made = self._facts.values.get(code_of(node.func.value), ())
            paths = [self._path(v.func) or "" for v in made if isinstance(v, cst.Call)]
            if not any(path.startswith("compat.v1.") for path in paths):  # these have such methods
                name = node.func.attr.value
                self._mark(node, f".{name}", self._methods[name], is_left=False)

    def leave_Call(  # noqa: N802
        self, original_node: cst.Call, updated_node: cst.Call
    ) -> Any:
        answer = self._answers.get(original_node.func)
        if answer is None:
            return self._as_numpy(original_node, updated_node)
        path = self._path(original_node.func) or ""
        if isinstance(answer, Row):
            return self._by_row(original_node, updated_node, path, answer)
        if isinstance(answer, Same):
            arguments = [a.keyword.value for a in original_node.args if a.keyword is not None]
            if refused := unsupported_keywords(answer.value, arguments):
                answer = Untranslated(f"`{answer.text}` takes no {', '.join(refused)}.")
        func = self._replace_name(original_node.func, updated_node.func, path, answer)
        return updated_node.with_changes(func=func)

    def _as_numpy(self, node: cst.Call, updated: cst.Call) -> cst.BaseExpression:
        """Rewrite ``x.numpy()`` as ``np.asarray(x)``."""
        if not m.matches(node, m.Call(m.Attribute(attr=m.Name("numpy")), args=[])):
            return updated
        parent: Any = self.get_metadata(ParentNodeProvider, node)
        if m.matches(parent, m.Attribute(attr=m.Name("decode"))):
            words = "A string is bytes already: write `x.decode()`."
            self._mark(node, ".numpy().decode", words, is_left=True)
            return updated
        if self._facts.has_numpy_method:
            words = "A class here has such a method. For an array write `np.asarray(x)`."
            self._mark(node, ".numpy()", words, is_left=True)
            return updated
        self._count("x.numpy()", "np.asarray(x)")
        self.needs.add("np")
        receiver = updated.func.value  # type: ignore[attr-defined]
        if not isinstance(receiver, cst.Tuple):
            receiver = receiver.with_changes(lpar=[], rpar=[])
        return cst.parse_expression("np.asarray(x)").with_changes(args=[cst.Arg(receiver)])

    def _by_row(self, node: cst.Call, updated: cst.Call, path: str, row: Row) -> Any:
        """Rewrite a call by a row of the table, or mark it."""
        if node in self._loops and not any(a.keyword or a.star for a in node.args):
            if not all(isinstance(a.value, cst.Integer) for a in node.args):
                self._mark(node, "range", _LOOP, is_left=False)
            self._count("for i in tf.range(n)", "for i in range(n)")
            return updated.with_changes(func=cst.Name("range"))
        is_indexed = isinstance(self.get_metadata(ParentNodeProvider, node), cst.Subscript)
        arguments = bound(updated.args, row)
        problem = arguments if isinstance(arguments, str) else ""
        if path == "shape" and not is_indexed:
            problem = "A shape is a tuple of numbers: write `x.shape`, or `x.shape[0]`."
        if isinstance(arguments, str) or problem:
            self._mark(node, f"tf.{path}", problem, is_left=True)
            return updated
        if row.caveat and not self._is_certain(node, row):
            self._mark(node, row.target.partition("(")[0], row.caveat, is_left=False)
        new = self._expression(row.target)
        self._count(f"tf.{path}", code_of(new).partition("(")[0])
        if not isinstance(new, cst.Call):
            return new
        return fill_call(new, arguments, row, updated, self._expression)

    def _is_certain(self, node: cst.Call, row: Row) -> bool:
        """Whether the caveat of a row certainly does not apply here."""
        if "gradient" in row.caveat:
            return self._in_elements[-1]  # gradients are not taken there
        is_mean = "floats" in row.caveat
        return is_mean and bool(node.args) and is_float(node.args[0].value, self._facts, self._path)

    # Imports, and comments above lines.

    def leave_Import(  # noqa: N802
        self, original_node: cst.Import, updated_node: cst.Import
    ) -> cst.Import | cst.RemovalSentinel:
        names = [a for a in updated_node.names if not _is_root(a.evaluated_name)]
        for alias in names:
            self._mark_related_import(original_node, alias.evaluated_name)
        if len(names) == len(updated_node.names):
            return updated_node
        self.needs.add("rx")
        if not names:
            return cst.RemoveFromParent()
        names[-1] = names[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
        return updated_node.with_changes(names=names)

    def visit_ImportFrom(self, node: cst.ImportFrom) -> None:  # noqa: N802
        home = code_of(node.module)
        if not _is_root(home) or isinstance(node.names, cst.ImportStar):
            return
        for alias in node.names:
            path = f"{home}.{alias.evaluated_name}".partition(".")[2]
            answer = self._rules.of(path)
            if isinstance(answer, Same) and answer.text.startswith("rx."):
                self._imported[alias.evaluated_alias or alias.evaluated_name] = answer.text

    def leave_ImportFrom(  # noqa: N802
        self, original_node: cst.ImportFrom, updated_node: cst.ImportFrom
    ) -> Any:
        home = code_of(original_node.module)
        if not _is_root(home):
            self._mark_related_import(original_node, home)
            return updated_node
        if isinstance(original_node.names, cst.ImportStar):
            words = "What it brings cannot be seen: import the names that are used."
            self._mark(original_node, f"from {home} import *", words, is_left=True)
            return updated_node
        self.needs.add("rx")
        lines: list[cst.BaseSmallStatement] = []
        for alias in original_node.names:
            name = alias.evaluated_alias or alias.evaluated_name
            if name in self._imported:
                self._count(f"from {home} import {alias.evaluated_name}", self._imported[name])
                lines.append(statement(f"{name} = {self._imported[name]}"))
        return cst.FlattenSentinel(lines) if lines else cst.RemoveFromParent()

    def _mark_related_import(self, node: cst.CSTNode, name: str) -> None:
        if name.startswith(f"{ROOT}_"):
            words = (
                "It brings TensorFlow along. Its datasets may be given to a strategy as they are."
            )
            self._mark(node, name, words, is_left=False)

    def on_leave(self, original_node: Any, updated_node: Any) -> Any:
        result: Any = super().on_leave(original_node, updated_node)
        if isinstance(result, cst.SimpleStatementLine) and not result.body:
            return self._fill_empty_statement(original_node)
        marks = self._marks.get(original_node, ())
        if not marks or not hasattr(result, "leading_lines"):
            return result
        position: Any = self.get_metadata(PositionProvider, original_node)
        width = _WIDTH - position.start.column - 2
        texts = [line for mark in marks for line in textwrap.wrap(mark.comment, width)]
        comments = [cst.EmptyLine(comment=cst.Comment(f"# {text}")) for text in texts]
        return result.with_changes(leading_lines=[*result.leading_lines, *comments])

    def _fill_empty_statement(self, node: cst.SimpleStatementLine) -> Any:
        is_outermost = isinstance(self.get_metadata(ParentNodeProvider, node), cst.Module)
        text = IMPORTS["rx"] if is_outermost else "pass"
        return node.with_changes(body=[statement(text)])


def _is_root(name: str) -> bool:
    return name.split(".")[0] == ROOT
