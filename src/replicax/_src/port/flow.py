"""Names that statements read and write: liveness and definite assignment within one function."""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import libcst as cst
import libcst.matchers as m

_SCOPES = (cst.FunctionDef, cst.Lambda, cst.ClassDef)


def reads(node: cst.CSTNode | None) -> set[str]:
    """Return the names that an expression or statement may read, in nested functions too."""
    return set() if node is None else set(_names(node)[0])


@lru_cache(maxsize=10_000)  # statements are asked about once for each that precedes them
def _names(node: cst.CSTNode) -> tuple[frozenset[str], tuple[str, ...]]:
    """Return the names that a node reads, and those that it assigns."""
    finder = _NameFinder()
    node.visit(finder)
    return frozenset(finder.read), tuple(finder.written)


def writes(nodes: Iterable[cst.CSTNode]) -> list[str]:
    """Return the names that statements may assign, outside of nested functions, in order."""
    return list(dict.fromkeys(name for node in nodes for name in _names(node)[1]))


class _NameFinder(cst.CSTVisitor):
    """Collects names that are read, and names that are assigned outside of nested scopes."""

    def __init__(self) -> None:
        self.read: set[str] = set()
        self.written: list[str] = []
        self._depth = 0

    def on_visit(self, node: cst.CSTNode) -> bool:
        if isinstance(node, cst.FunctionDef | cst.ClassDef) and not self._depth:
            self.written.append(node.name.value)
        self._depth += isinstance(node, _SCOPES)
        return super().on_visit(node)

    def on_leave(self, original_node: cst.CSTNode) -> None:
        self._depth -= isinstance(original_node, _SCOPES)
        super().on_leave(original_node)

    def visit_Name(self, node: cst.Name) -> None:  # noqa: N802
        self.read.add(node.value)

    def visit_Attribute(self, node: cst.Attribute) -> bool:  # noqa: N802
        node.value.visit(self)
        return False

    def visit_Arg(self, node: cst.Arg) -> bool:  # noqa: N802
        node.value.visit(self)
        return False

    def visit_AssignTarget(self, node: cst.AssignTarget) -> bool:  # noqa: N802
        return self._target(node.target)

    def visit_AnnAssign(self, node: cst.AnnAssign) -> bool:  # noqa: N802
        if node.value is not None:
            node.value.visit(self)
            self._target(node.target)
        return False

    def visit_AugAssign(self, node: cst.AugAssign) -> bool:  # noqa: N802
        node.target.visit(self)
        node.value.visit(self)
        self._target(node.target)
        return False

    def visit_NamedExpr(self, node: cst.NamedExpr) -> bool:  # noqa: N802
        node.value.visit(self)
        return self._target(node.target)

    def visit_For(self, node: cst.For) -> None:  # noqa: N802
        self._target(node.target)

    def visit_AsName(self, node: cst.AsName) -> bool:  # noqa: N802
        return self._target(node.name)

    def visit_ImportAlias(self, node: cst.ImportAlias) -> bool:  # noqa: N802
        if not self._depth:
            self.written.append((node.evaluated_alias or node.evaluated_name).split(".")[0])
        return False

    def _target(self, target: cst.CSTNode) -> bool:
        for name in target_names(target):
            if not self._depth:
                self.written.append(name)
        if not is_plain_target(target):  # `x[i] = 1` and `x.y = 1` read x
            target.visit(self)
        return False


def target_names(target: cst.CSTNode) -> list[str]:
    """Return the names that a target of an assignment binds."""
    match target:
        case cst.Name():
            return [target.value]
        case cst.Tuple() | cst.List():
            return [name for element in target.elements for name in target_names(element.value)]
    return []


def is_plain_target(target: cst.CSTNode) -> bool:
    """Whether a target consists of names only."""
    match target:
        case cst.Name():
            return True
        case cst.Tuple() | cst.List():
            return all(is_plain_target(element.value) for element in target.elements)
    return False


def statements(suite: Any) -> list[Any]:
    """Return the statements of a body; those of a line after a colon as one line."""
    if isinstance(suite, cst.SimpleStatementSuite):
        return [cst.SimpleStatementLine(suite.body)]
    return list(suite.body)


def else_of(node: Any) -> list[Any]:
    """Return the statements of the ``else`` or ``elif`` part of an ``if``."""
    if node.orelse is None:
        return []
    if isinstance(node.orelse, cst.If):
        return [node.orelse]
    return statements(node.orelse.body)


def live_before(body: Sequence[Any], after: set[str]) -> set[str]:
    """Return the names that must have values before ``body``, given those needed after it."""
    live = set(after)
    for node in reversed(body):
        live = _live_before(node, live)
    return live


def _live_before(node: Any, live: set[str]) -> set[str]:
    match node:
        case cst.SimpleStatementLine():
            return _live_before_line(node, live)
        case cst.If():
            inner = live_before(statements(node.body), live) | live_before(else_of(node), live)
            return inner | reads(node.test)
        case cst.With():
            inner = live_before(statements(node.body), live) - set(writes(node.items))
            return inner.union(*(reads(item) for item in node.items))
        case cst.For():
            return _live_before_for(node, live)
        case cst.FunctionDef():
            return (live - {node.name.value}) | reads(node)
    return live | reads(node)


def _live_before_line(node: cst.SimpleStatementLine, live: set[str]) -> set[str]:
    for small in reversed(node.body):
        if isinstance(small, cst.Return | cst.Raise):
            live = set()
        if isinstance(small, cst.Assign | cst.AnnAssign):
            live = live - set(writes([small]))
        live = live | reads(small)
    return live


def _live_before_for(node: cst.For, live: set[str]) -> set[str]:
    assigned, head = set(target_names(node.target)), set(live)
    for _ in range(2):  # the second turn needs what the first one leaves
        head |= live_before(statements(node.body), head) - assigned
    return head | reads(node.iter) | reads(node.orelse)


def defined_after(body: Sequence[Any], before: set[str]) -> set[str] | None:
    """Return the names that are certainly assigned after ``body``; None if it never ends."""
    names: set[str] | None = set(before)
    for node in body:
        if names is None:
            return None
        names = _defined_after(node, names)
    return names


_LEAVES = (cst.Return, cst.Raise, cst.Break, cst.Continue)


def _defined_after(node: Any, names: set[str]) -> set[str] | None:
    match node:
        case cst.SimpleStatementLine():
            is_end = any(isinstance(small, _LEAVES) for small in node.body)
            return None if is_end else names | set(writes([node]))
        case cst.If():
            parts = (statements(node.body), else_of(node))
            ends = [way for p in parts if (way := defined_after(p, names)) is not None]
            return set.intersection(*ends) if ends else None
        case cst.With():
            return defined_after(statements(node.body), names | set(writes(node.items)))
        case cst.FunctionDef() | cst.ClassDef():
            return names | {node.name.value}
    return names


def contains(nodes: Iterable[cst.CSTNode], matcher: Any) -> list[Any]:
    """Return what matches in statements, outside of nested functions."""
    found: list[Any] = []

    class _Search(cst.CSTVisitor):
        def on_visit(self, node: cst.CSTNode) -> bool:
            if isinstance(node, _SCOPES):
                return False
            if m.matches(node, matcher):
                found.append(node)
            return True

    for node in nodes:
        node.visit(_Search())
    return found
