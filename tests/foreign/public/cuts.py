"""Make a program small: fewer epochs, steps and rows, by rules that know no program.

Numbers are cut where their name says that they count epochs, steps or rows of a batch; loops over
datasets end after a few batches; `fit`, `evaluate` and `predict` take a few batches of their data.
"""

import ast
import copy
import functools
import importlib
import itertools
import re
from collections.abc import Callable, Iterable

EPOCHS = 2
BATCHES = 3
ROWS = 16  # of a batch
STEPS = 6

# The first pattern that a name matches gives the largest value, and the least that it applies to.
_NUMBERS: tuple[tuple[re.Pattern[str], int, int], ...] = (
    (re.compile(r"time_?step|warm|max_?len|seq", re.IGNORECASE), 0, 1 << 62),  # a size of the model
    (re.compile(r"epochs?($|_)", re.IGNORECASE), EPOCHS, 0),
    (re.compile(r"batch_?size", re.IGNORECASE), ROWS, 0),
    (re.compile(r"(^|_)(every|interval|frequency)(_|$)", re.IGNORECASE), 2, 0),
    (
        re.compile(r"(^|_)(steps|iterations|iters|episodes|num_batches)($|_)", re.IGNORECASE),
        STEPS,
        20,
    ),
)
_WRAPPED_ITERABLES = {"enumerate", "zip", "tqdm", "iter"}


def limit(name: str, value: int) -> int:
    """Return the value that a number of this name gets."""
    for pattern, largest, least in _NUMBERS:
        if pattern.search(name):
            return min(value, largest) if value > least else value
    return value


class Cut(ast.NodeTransformer):
    """Rewrite the numbers and the loops of a program."""

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        """Cut ``EPOCHS = 100``, ``self.epochs = 100`` and ``EPOCHS, SIZE = 100, 3``."""
        self.generic_visit(node)
        for target in node.targets:
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                for name, value in zip(target.elts, node.value.elts, strict=False):
                    _cut_constant(_name(name), value)
            else:
                _cut_constant(_name(target), node.value)
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        """Cut ``epochs: int = 100``."""
        self.generic_visit(node)
        _cut_constant(_name(node.target), node.value)
        return node

    def visit_keyword(self, node: ast.keyword) -> ast.AST:
        """Cut ``f(epochs=100)``."""
        self.generic_visit(node)
        _cut_constant(node.arg or "", node.value)
        return node

    def visit_Dict(self, node: ast.Dict) -> ast.AST:
        """Cut ``{"epochs": 100}``."""
        self.generic_visit(node)
        for key, value in zip(node.keys, node.values, strict=True):
            if isinstance(key, ast.Constant):
                _cut_constant(str(key.value), value)
        return node

    def visit_arguments(self, node: ast.arguments) -> ast.AST:
        """Cut ``def f(epochs=100)``."""
        self.generic_visit(node)
        positional = [*node.posonlyargs, *node.args]
        defaults = zip(reversed(positional), reversed(node.defaults), strict=False)
        for argument, value in [*defaults, *zip(node.kwonlyargs, node.kw_defaults, strict=True)]:
            _cut_constant(argument.arg, value)
        return node

    def visit_For(self, node: ast.For) -> ast.AST:
        """End a loop over a dataset after a few batches."""
        self.generic_visit(node)
        node.iter = _few(node.iter)
        return node


def _name(target: ast.expr) -> str:
    if isinstance(target, ast.Name):
        return target.id
    return target.attr if isinstance(target, ast.Attribute) else ""


def _cut_constant(name: str, value: ast.expr | None) -> None:
    if isinstance(value, ast.Constant) and type(value.value) is int:
        value.value = limit(name, value.value)


def _few(iterable: ast.expr) -> ast.expr:
    if isinstance(iterable, ast.Call) and _name(iterable.func) in _WRAPPED_ITERABLES:
        iterable.args = [_few(argument) for argument in iterable.args]
        return iterable
    call = ast.Call(ast.Name("__few__", ast.Load()), [iterable], [])
    return ast.copy_location(call, iterable)


def few(iterable: Iterable) -> Iterable:
    """Return the first batches of a dataset; anything else, such as a list, is not cut."""
    # A range is cut by the name of its number only: it may count rows of an array.
    if _is_dataset(iterable):
        return itertools.islice(iterable, 2 * BATCHES)
    return iterable


def _is_dataset(x: object) -> bool:
    names = {f"{t.__module__}.{t.__name__}" for t in type(x).__mro__}
    return any(
        name.startswith(("tensorflow.python.data", "torch.utils.data"))
        or name.endswith((".PyDataset", "_NumpyIterator"))
        for name in names
    )


def cut_keras() -> None:
    """Let the methods of Keras models take a few batches."""
    keras = importlib.import_module("keras")
    for name, cut in (("fit", _cut_fit), ("evaluate", _cut_data), ("predict", _cut_data)):
        setattr(keras.Model, name, _cutting(getattr(keras.Model, name), cut))
    keras.Model.predict = _repeating(keras.Model.predict)


def _repeating(predict: Callable) -> Callable:
    """Compute a few predictions of a loop that generates, then repeat the last one."""
    calls: dict[tuple[int, str], list] = {}

    @functools.wraps(predict)
    def call(self, x, *args, **kwargs):
        if not _is_rows(x):
            return predict(self, x, *args, **kwargs)
        shapes = str([getattr(leaf, "shape", ()) for leaf in _flat(x)])
        known = calls.setdefault((id(self), shapes), [])
        if len(known) < 2 * BATCHES:
            known.append(predict(self, x, *args, **kwargs))
        return copy.deepcopy(known[-1])

    return call


def _flat(data) -> list:
    if isinstance(data, dict):
        return [leaf for value in data.values() for leaf in _flat(value)]
    if isinstance(data, (list, tuple)):
        return [leaf for value in data for leaf in _flat(value)]
    return [data]


def _cutting(method: Callable, cut: Callable[[dict], dict]) -> Callable:
    names = method.__code__.co_varnames[1 : method.__code__.co_argcount]
    names = names or _signature(method)

    @functools.wraps(method)
    def call(self, *args, **kwargs):
        given = dict(zip(names, args, strict=False)) | kwargs
        return method(self, **cut(given))

    return call


def _signature(method: Callable) -> tuple[str, ...]:
    import_inspect = importlib.import_module("inspect")
    return tuple(import_inspect.signature(method).parameters)[1:]


def _cut_fit(given: dict) -> dict:
    first = given.get("initial_epoch", 0) or 0
    given["epochs"] = min(given.get("epochs", 1), first + EPOCHS)
    given["verbose"] = 0
    if given.get("validation_steps"):
        given["validation_steps"] = min(given["validation_steps"], BATCHES)
    validation = given.get("validation_data")
    if isinstance(validation, tuple):
        given["validation_data"] = _rows(validation, given.get("batch_size") or 32)
    elif validation is not None:
        given |= _cut_source({"x": validation}, "validation_steps", rename="validation_data")
    return _cut_data(given, "steps_per_epoch")


def _cut_data(given: dict, steps: str = "steps") -> dict:
    given["verbose"] = 0
    size = given.get("batch_size") or 32
    given = _cut_source(given, steps)
    return given | {
        name: _rows(given[name], size)
        for name in ("x", "y", "sample_weight")
        if name in given and _is_rows(given[name])
    }


def _cut_source(given: dict, steps: str, rename: str = "x") -> dict:
    data = given.get("x")
    if given.get(steps):
        given[steps] = min(given[steps], BATCHES)
    elif hasattr(data, "take") and _is_dataset(data):
        given["x"] = data.take(BATCHES)
    elif data is not None and not _is_rows(data):
        given[steps] = min(_length(data), BATCHES)
    if rename != "x":
        given[rename] = given.pop("x")
    return given


def _length(data: object) -> int:
    try:
        return len(data)  # type: ignore[arg-type]
    except TypeError:
        return BATCHES


def _is_rows(data: object) -> bool:
    if isinstance(data, dict):
        return all(map(_is_rows, data.values()))
    if isinstance(data, (list, tuple)):
        return all(map(_is_rows, data))
    return hasattr(data, "shape") and hasattr(data, "__getitem__")


def _rows(data, size: int):
    """Return two batches."""
    if isinstance(data, dict):
        return {key: _rows(value, size) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return type(data)(_rows(value, size) for value in data)
    return data[: 2 * size] if _is_rows(data) else data
