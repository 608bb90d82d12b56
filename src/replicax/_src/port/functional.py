"""Calls of TensorFlow's functions on the symbolic tensors of Keras's functional models.

`jax.numpy` rejects these tensors, `replicax.compat.tf` takes them. A call is found if an argument
may come from `keras.Input`: through assignments, layers, and functions of the same file. If that is
wrong, the program still runs, since `replicax.compat.tf` takes arrays too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import libcst as cst
import libcst.matchers as m

from replicax._src.port.flow import target_names

_INPUTS = frozenset(["keras.Input", "keras.layers.Input"])
_MODELS = frozenset(["keras.Model", "keras.models.Model", "keras.Sequential"])
# Attributes of models and layers that are symbolic, and of tensors that are not.
_SYMBOLIC_ATTRIBUTES = frozenset(["output", "outputs"])
_KNOWN_ATTRIBUTES = frozenset(["dtype", "name", "ndim", "shape"])
_TURNS = 10  # how many calls a value is followed through


@dataclass(eq=False)
class _FunctionFlow:
    """The facts about symbolic tensors in one module or function, which grow until all are found.

    Attributes:
        outer: The function around it; None for modules and functions of modules.
        parameters: The names of its parameters.
        assigned: Targets, and the expressions whose values they take.
        calls: The calls in it.
        returned: The expressions that it returns.
        symbolic: Names that may be symbolic tensors.
        layers: Names of layers.
        gives_symbolic: Whether it may return a symbolic tensor.
    """

    outer: _FunctionFlow | None
    parameters: list[str] = field(default_factory=list)
    assigned: list[tuple[list[str], cst.BaseExpression]] = field(default_factory=list)
    calls: list[cst.Call] = field(default_factory=list)
    returned: list[cst.BaseExpression] = field(default_factory=list)
    symbolic: set[str] = field(default_factory=set)
    layers: set[str] = field(default_factory=set)
    gives_symbolic: bool = False

    def binds(self, name: str) -> bool:
        """Whether a name is a parameter or is assigned here."""
        return name in self.parameters or any(name in names for names, _ in self.assigned)

    def has_symbolic(self, name: str) -> bool:
        """Whether a name may be a symbolic tensor here."""
        if name in self.symbolic:
            return True
        return self.outer is not None and not self.binds(name) and self.outer.has_symbolic(name)

    def has_layer(self, name: str) -> bool:
        """Whether a name is a layer here."""
        return name in self.layers or (self.outer is not None and self.outer.has_layer(name))

    def size(self) -> int:
        """Return the number of facts found; the search ends when it stops growing."""
        return len(self.symbolic) + len(self.layers) + self.gives_symbolic


def symbolic_calls(module: cst.Module, path_of: Callable[[Any], str | None]) -> set[cst.Call]:
    """Return the calls of a program that may have a symbolic tensor among their arguments.

    Args:
        module: The program.
        path_of: Returns the path of a name of TensorFlow.
    """
    module.visit(collector := _FlowCollector())
    finder = _SymbolicCalls(collector.functions, path_of)
    known = -1
    for _ in range(_TURNS):
        for scope in collector.scopes:
            finder.follow(scope)
        before, known = known, sum(scope.size() for scope in collector.scopes)
        if known == before:
            break
    return {
        call
        for scope in collector.scopes
        for call in scope.calls
        if any(finder.is_symbolic(arg.value, scope) for arg in call.args)
    }


class _FlowCollector(cst.CSTVisitor):
    """Collects the scopes of a program; the bodies of lambdas are left out."""

    def __init__(self) -> None:
        self.scopes = [_FunctionFlow(None)]
        self.functions: dict[str, list[_FunctionFlow]] = {}
        self._open = [self.scopes[0]]

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:  # noqa: N802
        scope = _FunctionFlow(self._open[-1] if len(self._open) > 1 else None)
        listed = (*node.params.posonly_params, *node.params.params, *node.params.kwonly_params)
        scope.parameters = [p.name.value for p in listed]
        self.scopes.append(scope)
        self._open.append(scope)
        self.functions.setdefault(node.name.value, []).append(scope)

    def leave_FunctionDef(self, original_node: cst.FunctionDef) -> None:  # noqa: N802
        self._open.pop()

    def visit_Lambda(self, node: cst.Lambda) -> bool:  # noqa: N802
        return False

    def visit_Call(self, node: cst.Call) -> None:  # noqa: N802
        self._open[-1].calls.append(node)

    def visit_Return(self, node: cst.Return) -> None:  # noqa: N802
        if node.value is not None:
            self._open[-1].returned.append(node.value)

    def visit_Assign(self, node: cst.Assign) -> None:  # noqa: N802
        for target in node.targets:
            self._assign(target.target, node.value)

    def visit_AugAssign(self, node: cst.AugAssign) -> None:  # noqa: N802
        self._assign(node.target, node.value)

    def visit_For(self, node: cst.For) -> None:  # noqa: N802
        self._assign(node.target, node.iter)

    def visit_CompFor(self, node: cst.CompFor) -> None:  # noqa: N802
        self._assign(node.target, node.iter)

    def _assign(self, target: cst.CSTNode, value: cst.BaseExpression) -> None:
        self._open[-1].assigned.append((target_names(target), value))


class _SymbolicCalls:
    """Follows symbolic tensors through scopes."""

    def __init__(
        self, functions: dict[str, list[_FunctionFlow]], path_of: Callable[[Any], str | None]
    ) -> None:
        self._functions = functions
        self._path_of = path_of

    def follow(self, scope: _FunctionFlow) -> None:
        """Add the names that the statements of a scope bind to symbolic tensors or layers."""
        for names, value in scope.assigned:
            if self.is_symbolic(value, scope):
                scope.symbolic.update(names)
            if isinstance(value, cst.Call) and self._is_layer_class(value.func):
                scope.layers.update(names)
        for call in scope.calls:
            if self._is_layer(call.func, scope):  # what a layer takes in a function that builds
                names = [name for arg in call.args for name in _names(arg.value)]
                scope.symbolic.update(name for name in names if name in scope.parameters)
            for function in self._called(call):
                self._pass(call, scope, function)
        scope.gives_symbolic |= any(self.is_symbolic(value, scope) for value in scope.returned)

    def _pass(self, call: cst.Call, scope: _FunctionFlow, function: _FunctionFlow) -> None:
        """Mark the parameters that get symbolic tensors in a call."""
        first = function.parameters[:1] == ["self"] and isinstance(call.func, cst.Attribute)
        places = function.parameters[1:] if first else function.parameters
        for place, arg in enumerate(call.args):
            name = arg.keyword.value if arg.keyword else "".join(places[place : place + 1])
            if name in places and self.is_symbolic(arg.value, scope):
                function.symbolic.add(name)

    def _called(self, call: cst.Call) -> list[_FunctionFlow]:
        """Return the functions of the program that a call may call."""
        if isinstance(call.func, cst.Name):
            return self._functions.get(call.func.value, [])
        if m.matches(call.func, m.Attribute(m.Name("self"))):
            return self._functions.get(call.func.attr.value, [])  # type: ignore[attr-defined]
        return []

    def _is_layer_class(self, node: cst.BaseExpression) -> bool:
        return (self._path_of(node) or "").startswith("keras.layers.")

    def _is_layer(self, node: cst.BaseExpression, scope: _FunctionFlow) -> bool:
        if isinstance(node, cst.Call):
            return self._is_layer_class(node.func)
        return isinstance(node, cst.Name) and scope.has_layer(node.value)

    def is_symbolic(self, node: cst.CSTNode, scope: _FunctionFlow) -> bool:
        """Whether an expression may be a symbolic tensor, or have one in it."""
        match node:
            case cst.Name():
                return scope.has_symbolic(node.value)
            case cst.Lambda():
                return False
            case cst.Attribute():
                if node.attr.value in _SYMBOLIC_ATTRIBUTES:
                    return True
                is_known = node.attr.value in _KNOWN_ATTRIBUTES
                return not is_known and self.is_symbolic(node.value, scope)
            case cst.Call():
                path = self._path_of(node.func)
                if path in _INPUTS or path in _MODELS:
                    return path in _INPUTS
                if any(function.gives_symbolic for function in self._called(node)):
                    return True
                parts = [node.func, *(arg.value for arg in node.args)]
                return any(self.is_symbolic(part, scope) for part in parts)
        return any(self.is_symbolic(child, scope) for child in _expressions(node))


def _expressions(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    for child in node.children:
        if not isinstance(child, cst.BaseParenthesizableWhitespace | cst.Comma):
            yield child


def _names(node: cst.BaseExpression) -> list[str]:
    """Return the names in an argument that is a name, or a list of names."""
    if isinstance(node, cst.List | cst.Tuple):
        return [name for element in node.elements for name in _names(element.value)]
    return [node.value] if isinstance(node, cst.Name) else []
