"""Helpers of ``replicax port``: facts about a program, call arguments, and imports."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import libcst as cst
import libcst.matchers as m

from replicax._src.port.paths import ROOTS
from replicax._src.port.table import Row

IMPORTS = {
    "jax": "import jax",
    "jnp": "import jax.numpy as jnp",
    "np": "import numpy as np",
    "rx": "import replicax as rx",
    "tf": "from replicax.compat import tf",
}
# The names that are imported in place of those above if the program uses them for something else.
_SPARE_NAMES = {"jax": "jax_", "jnp": "jax_numpy", "np": "numpy_", "rx": "replicax_", "tf": "tf_"}
_ELEMENT_METHODS = frozenset(
    [
        "bucket_by_sequence_length",
        "filter",
        "flat_map",
        "group_by_window",
        "interleave",
        "map",
        "reduce",
        "rejection_resample",
        "scan",
        "take_while",
    ]
)
# TensorFlow functions that return floats, and functions that keep the dtype of their arguments.
_FLOATS = frozenset(
    ["cos", "exp", "log", "log1p", "rsqrt", "sigmoid", "sin", "softplus", "sqrt", "tanh"]
)
_DTYPE_PRESERVING = frozenset(
    [
        "abs",
        "add",
        "divide",
        "maximum",
        "matmul",
        "minimum",
        "multiply",
        "negative",
        "pow",
        "reduce_max",
        "reduce_mean",
        "reduce_min",
        "reduce_sum",
        "reshape",
        "square",
        "squared_difference",
        "squeeze",
        "subtract",
        "transpose",
    ]
)
# Arguments that TensorFlow converts to tensors; others are shapes, axes and lists of tensors.
TENSORS = frozenset(
    (
        "a",
        "b",
        "bias",
        "condition",
        "features",
        "indices",
        "input",
        "input_tensor",
        "labels",
        "logits",
        "params",
        "repeats",
        "t",
        "tensor",
        "x",
        "y",
    )
)
# Arguments with the same names in JAX, which may be passed by keyword there.
_SAME_NAMES = ("axes", "axis", "dtype", "shape")


class Facts(cst.CSTVisitor):
    """Facts about a program, collected before it is rewritten.

    Attributes:
        bound: The kind of each name's first binding.
        element_functions: The names of functions that a dataset applies to elements.
        lambdas: The lambdas among such functions.
        values: The expressions assigned to each name.
        read: The names that are read.
        top_imports: The imports at the top level of the module.
        functions: The names of functions and methods that the program defines.
        is_for_tensorflow: Whether the program imports TensorFlow.

    Args:
        element_functions: Functions of this program that a dataset of another file applies.
    """

    def __init__(self, element_functions: Iterable[str] = ()) -> None:
        self.bound: dict[str, str] = {}
        self.element_functions: set[str] = set(element_functions)
        self._origins: dict[str, tuple[str, ...]] = {}  # imported names -> module, name in it
        self._element_attributes: set[tuple[str, str]] = set()
        self.lambdas: set[cst.CSTNode] = set()
        self.values: dict[str, list[cst.BaseExpression]] = {}
        self.read: set[str] = set()
        self.top_imports: set[str] = set()
        self.functions: set[str] = set()
        self.is_for_tensorflow = False

    def visit_Call(self, node: cst.Call) -> None:  # noqa: N802
        """Collect functions that are passed to a dataset's methods."""
        func = node.func
        if isinstance(func, cst.Attribute) and func.attr.value in _ELEMENT_METHODS:
            for argument in node.args:
                if isinstance(argument.value, cst.Name):
                    self.element_functions.add(argument.value.value)
                elif isinstance(argument.value, cst.Lambda):
                    self.lambdas.add(argument.value)
                elif m.matches(argument.value, m.Attribute(m.Name())):
                    base, _, name = code_of(argument.value).partition(".")
                    self._element_attributes.add((base, name))

    def foreign_element_functions(self) -> set[tuple[str, str]]:
        """Return the module and name of each function from another file that a dataset applies."""
        origins = self._origins
        named = [origins[name] for name in self.element_functions if name in origins]
        # `from package import module` binds a module: its last name is the file.
        dotted = [(origins[b][-1], name) for b, name in self._element_attributes if b in origins]
        return {(pair[0], pair[1]) for pair in [*named, *dotted] if len(pair) == 2}

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:  # noqa: N802
        """Collect names of functions."""
        self.functions.add(node.name.value)
        self.bound.setdefault(node.name.value, "def")

    def visit_ClassDef(self, node: cst.ClassDef) -> None:  # noqa: N802
        """Collect names of classes."""
        self.bound.setdefault(node.name.value, "class")

    def visit_Name(self, node: cst.Name) -> None:  # noqa: N802
        """Collect the names that occur."""
        self.read.add(node.value)

    def visit_Module(self, node: cst.Module) -> None:  # noqa: N802
        """Collect the imports at the top level."""
        lines = (line.body for line in node.body if isinstance(line, cst.SimpleStatementLine))
        for small in (part for line in lines for part in line):
            if isinstance(small, cst.Import | cst.ImportFrom):
                self.top_imports.add(code_of(small).rstrip(" ;"))

    def visit_For(self, node: cst.For) -> None:  # noqa: N802
        """Mark the variables of loops as unknown."""
        for name in m.findall(node.target, m.Name()):
            assert isinstance(name, cst.Name)
            self.bound.setdefault(name.value, "variable")
            self.values.setdefault(name.value, []).append(name)

    def visit_Param(self, node: cst.Param) -> None:  # noqa: N802
        """Collect parameters, whose values are unknown."""
        self.bound.setdefault(node.name.value, "parameter")
        self.values.setdefault(node.name.value, []).append(node.name)

    def visit_AssignTarget(self, node: cst.AssignTarget) -> None:  # noqa: N802
        """Collect names that an assignment binds, also in tuples."""
        for name in m.findall(node.target, m.Name()):
            assert isinstance(name, cst.Name)
            self.bound.setdefault(name.value, "variable")

    def visit_Assign(self, node: cst.Assign) -> None:  # noqa: N802
        """Collect assigned values."""
        for target in node.targets:
            self._add_values(target.target, node.value)

    def _add_values(self, target: cst.CSTNode, value: cst.BaseExpression) -> None:
        match target, value:
            case cst.Name(), _:
                self.values.setdefault(target.value, []).append(value)
            case cst.Tuple(elements=names), cst.Tuple(elements=values):
                for name, each in zip(names, values, strict=False):
                    self._add_values(name.value, each.value)

    def visit_AugAssign(self, node: cst.AugAssign) -> None:  # noqa: N802
        """Mark a name that is changed in place as unknown."""
        if isinstance(node.target, cst.Name):
            self.values.setdefault(node.target.value, []).append(node.target)

    def visit_Import(self, node: cst.Import) -> None:  # noqa: N802
        """Collect names of modules."""
        for alias in node.names:
            text = code_of(alias.with_changes(comma=cst.MaybeSentinel.DEFAULT))
            name = alias.evaluated_alias or alias.evaluated_name
            self.is_for_tensorflow |= is_root(alias.evaluated_name)
            self._origins.setdefault(name, (alias.evaluated_name.rpartition(".")[2],))
            self.bound.setdefault(name.split(".")[0], f"import {text}")

    def visit_ImportFrom(self, node: cst.ImportFrom) -> None:  # noqa: N802
        """Collect names from modules; check for imports from TensorFlow."""
        home = code_of(node.module)
        self.is_for_tensorflow |= is_root(home) and not node.relative
        if isinstance(node.names, cst.ImportStar):
            return
        for alias in node.names:
            name = alias.evaluated_alias or alias.evaluated_name
            tail = home.rpartition(".")[2]
            self._origins.setdefault(name, (tail, alias.evaluated_name))
            self.bound.setdefault(name, f"from {home} import {name}")

    def names(self) -> dict[str, str]:
        """Return the name to use for each import, unlike all other names of the program."""
        found = {}
        for name, line in IMPORTS.items():
            taken = self.bound.get(name, line)
            is_free = taken == line or is_root(taken.partition(" ")[2])
            found[name] = name if is_free else _SPARE_NAMES[name]
        return found


def is_root(name: str) -> bool:
    """Whether a module is TensorFlow's."""
    return name.partition(" ")[0].split(".")[0] in ROOTS


def is_float(
    node: cst.BaseExpression,
    facts: Facts,
    path_of: Callable[[cst.CSTNode], str | None],
    known: dict[str, bool] | None = None,
) -> bool:
    """Whether TensorFlow, which never mixes dtypes, certainly computes an expression in floats.

    Args:
        node: The expression.
        facts: Facts about the program.
        path_of: Returns the path of a name of TensorFlow.
        known: The answers for names. Each is asked about once: a name that is assigned many times
            from itself would take exponential time.
    """
    known = {} if known is None else known

    def each(nodes: Iterable[cst.BaseExpression]) -> list[bool]:
        return [is_float(n, facts, path_of, known) for n in nodes]

    match node:
        case cst.Float():
            return True
        case cst.BinaryOperation():
            return isinstance(node.operator, cst.Divide) or any(each((node.left, node.right)))
        case cst.UnaryOperation():
            return any(each([node.expression]))
        case cst.Name():
            if node.value not in known:
                known[node.value] = False  # until it is proved
                values = facts.values.get(node.value, ())
                known[node.value] = bool(values) and all(each(values))
            return known[node.value]
        case cst.Call():
            return _returns_float(node, facts, path_of, each)
    return False


def _returns_float(node: cst.Call, facts: Facts, path_of: Any, each: Any) -> bool:
    path = path_of(node.func)
    if path is None:
        made = facts.values.get(code_of(node.func), ())
        paths = [path_of(v.func) or "" if isinstance(v, cst.Call) else "" for v in made]
        return bool(paths) and all(p.startswith("keras.losses.") for p in paths)
    if path == "cast":
        return len(node.args) > 1 and "float" in (path_of(node.args[1].value) or "")
    if path.startswith(("nn.", "keras.losses.")) or path.rpartition(".")[2] in _FLOATS:
        return True
    return path.rpartition(".")[2] in _DTYPE_PRESERVING and any(each([a.value for a in node.args]))


def code_of(node: cst.CSTNode | None) -> str:
    """Return the source text of a node."""
    return "" if node is None else cst.Module([]).code_for_node(node)


def statement(text: str) -> cst.BaseSmallStatement:
    """Parse a simple statement."""
    line = cst.parse_statement(text)
    assert isinstance(line, cst.SimpleStatementLine)
    return line.body[0]


def bound(args: Sequence[cst.Arg], row: Row) -> dict[str, Any] | str:
    """Return the arguments of a call by their names in ``row``, or why that is impossible."""
    arguments: dict[str, Any] = {}
    places = [name for name in row.parameters if name not in row.by_keyword]
    for place, argument in enumerate(args):
        name = argument.keyword.value if argument.keyword else None
        if name == "name":
            continue
        if name is None and place >= len(places) and row.rest:
            arguments.setdefault(row.rest, []).append(argument)
            continue
        if argument.star:
            return f"Its arguments cannot be identified. Write `{row.target}`."
        name = name or (places[place] if place < len(places) else "so many arguments")
        if name not in row.parameters:
            return f"With {name} it means something else than `{row.target}`."
        arguments[name] = argument
    missing = [n for n, default in row.parameters.items() if default is None and n not in arguments]
    if missing:
        return f"Without {', '.join(missing)} it means something else than `{row.target}`."
    return arguments


def fill_call(
    target: cst.Call,
    arguments: dict[str, Any],
    row: Row,
    old: cst.Call,
    defaults: Callable[[str], Any],
) -> cst.BaseExpression:
    """Return the call of the table with the program's arguments, in the program's own layout."""
    if any(not isinstance(slot.value, cst.Name) and slot.keyword is None for slot in target.args):
        found = target.visit(_Substitution(arguments))
        assert isinstance(found, cst.BaseExpression)
        return found
    args = [a for slot in target.args for a in _fill_slot(slot, arguments, row, defaults)]
    args = _positional_first(args, [slot.keyword is not None for slot in target.args])
    if args and old.args:
        args[-1] = args[-1].with_changes(
            comma=old.args[-1].comma, whitespace_after_arg=old.args[-1].whitespace_after_arg
        )
    return old.with_changes(func=target.func, args=args)


def _positional_first(args: list[cst.Arg], is_keyword: list[bool]) -> list[cst.Arg]:
    """Drop the keywords of arguments that stand before a positional one."""
    places = [place for place, arg in enumerate(args) if arg.keyword is None and not arg.star]
    last = places[-1] if places else -1
    if any(is_keyword[:last]):  # the table passes it by keyword, so that it has no place
        return args
    return [
        arg.with_changes(keyword=None, equal=cst.MaybeSentinel.DEFAULT) if place < last else arg
        for place, arg in enumerate(args)
    ]


def _fill_slot(
    slot: cst.Arg, arguments: dict[str, Any], row: Row, defaults: Callable[[str], Any]
) -> Iterable[cst.Arg]:
    """Yield the program's arguments for one argument of the table's call."""
    name = slot.value.value if isinstance(slot.value, cst.Name) else ""
    if slot.star:
        yield from arguments.get(name, ())
    elif name in arguments:
        argument: cst.Arg = arguments[name]
        if isinstance(argument.value, cst.List) and name == "axis":  # NumPy takes tuples only
            wrapped = cst.Tuple(argument.value.elements)
            argument = argument.with_changes(value=wrapped)
        elif isinstance(argument.value, cst.List | cst.Tuple) and name in TENSORS:
            wrapped = defaults("jnp.asarray(x)").with_changes(args=[cst.Arg(argument.value)])
            argument = argument.with_changes(value=wrapped)  # JAX rejects lists in place of arrays
        if slot.keyword is None and argument.keyword is not None and name in _SAME_NAMES:
            yield argument
        else:
            yield argument.with_changes(keyword=slot.keyword, equal=slot.equal)
    elif name not in row.parameters:
        yield slot
    elif slot.keyword is None:
        yield cst.Arg(defaults(row.parameters[name] or ""))


class _Substitution(cst.CSTTransformer):
    """Replaces names by the arguments of a call."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        super().__init__()
        self._arguments = arguments

    def leave_Name(  # noqa: N802
        self, original_node: cst.Name, updated_node: cst.Name
    ) -> cst.BaseExpression:
        argument = self._arguments.get(original_node.value)
        if argument is None:
            return updated_node
        value: cst.BaseExpression = argument.value
        if isinstance(value, cst.Name | cst.Attribute | cst.Call | cst.Subscript) or value.lpar:
            return value
        return value.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])


def with_imports(
    module: cst.Module, needs: Iterable[str], facts: Facts, names: dict[str, str]
) -> cst.Module:
    """Return the module with the required imports in place of TensorFlow's."""
    lines: list[Any] = [
        cst.parse_statement(import_line(name, names))
        for name in sorted(needs)
        if name == "rx" or import_line(name, names) not in facts.top_imports
    ]
    if not lines:
        return module
    body: list[Any] = list(module.body)
    ours = import_line("rx", names)
    is_ours = [_is_line(line, ours) for line in body]
    is_next = [mine or _is_from_us(line) for line, mine in zip(body, is_ours, strict=True)]
    place = is_next.index(True) if any(is_next) else _after_docstring(body)
    place = max(place, _after_future_imports(body))
    if any(is_next) and place < len(body):
        lines[0] = lines[0].with_changes(leading_lines=body[place].leading_lines)
        body[place] = body[place].with_changes(leading_lines=())
    kept = [line for line, mine in zip(body[:place], is_ours[:place], strict=True) if not mine]
    after = [line for line, mine in zip(body[place:], is_ours[place:], strict=True) if not mine]
    return module.with_changes(body=[*kept, *lines, *after])


def import_line(name: str, names: dict[str, str]) -> str:
    """Return the import of ``name``, under the name that the program has free for it."""
    line, own = IMPORTS[name], names[name]
    if own == name:
        return line
    return f"{line.partition(' as ')[0]} as {own}"


def _after_future_imports(body: list[Any]) -> int:
    places = [p for p, line in enumerate(body) if "from __future__ import" in code_of(line)]
    return places[-1] + 1 if places else 0


def _is_line(node: cst.CSTNode, text: str) -> bool:
    if not isinstance(node, cst.SimpleStatementLine):
        return False
    return code_of(node.with_changes(leading_lines=())).partition("#")[0].strip() == text


def _is_from_us(node: cst.CSTNode) -> bool:
    return m.matches(node, m.SimpleStatementLine(body=[m.Assign()])) and " = rx." in code_of(node)


def _after_docstring(body: list[Any]) -> int:
    place = 0
    for line in body:
        is_text = m.matches(line, m.SimpleStatementLine(body=[m.Expr(m.SimpleString())]))
        if not (is_text or "from __future__ import" in code_of(line)):
            break
        place += 1
    return place


def unsupported_keywords(value: Any, arguments: list[str]) -> list[str]:
    """Return the names in ``arguments`` that a function or class does not take as keywords."""
    known = parameters_of(value)
    if not known or any(p.kind is p.VAR_KEYWORD for p in known.values()):
        return []
    return [name for name in arguments if name not in known]


def parameters_of(value: Any) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a function or class; none if they are not known."""
    if not (inspect.isroutine(value) or inspect.isclass(value)):
        return {}
    try:
        return inspect.signature(value).parameters
    except (TypeError, ValueError):
        return {}
