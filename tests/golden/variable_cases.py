"""The table of variables: what every kind of write and read leaves behind, in every context.

The same code runs on TensorFlow (`make_variables.py`, which records `variables.json`) and on
replicax (`tests/state/test_policy.py`). Both are asked only for names that they share.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

SYNCHRONIZATIONS = ("AUTO", "ON_WRITE", "ON_READ")
AGGREGATIONS = ("NONE", "SUM", "MEAN", "ONLY_FIRST_REPLICA")
CONTEXTS = ("replica", "cross", "outside")
VERBS = ("assign", "assign_add", "assign_sub")
SCATTERS = (
    "scatter_add",
    "scatter_sub",
    "scatter_mul",
    "scatter_div",
    "scatter_max",
    "scatter_min",
    "scatter_update",
)
START = 12
ERRORS = (NotImplementedError, ValueError, RuntimeError, TypeError)


@dataclass(frozen=True)
class Case:
    """One cell: a variable, one operation, where it happens and how it is run."""

    replicas: int
    dtype: str
    synchronization: str
    aggregation: str
    context: str
    operation: str
    compiled: bool

    @property
    def name(self) -> str:
        mode = "compiled" if self.compiled else "eager"
        return "-".join(
            (
                f"{self.replicas}x{self.dtype}",
                self.synchronization,
                self.aggregation,
                self.context,
                self.operation,
                mode,
            )
        )


def all_cases() -> Iterator[Case]:
    """Every combination for two replicas and float32; the core of it for others."""
    both = (False, True)
    kinds = list(itertools.product(("ON_WRITE", "ON_READ"), AGGREGATIONS))
    numbers = tuple(f"{v}:number" for v in VERBS)
    for (s, a), c, o, m in itertools.product(kinds, CONTEXTS, (*VERBS, *numbers, "read"), both):
        yield Case(2, "float32", s, a, c, o, m)
    for a, c, o, m in itertools.product(AGGREGATIONS, CONTEXTS, ("assign", "read"), both):
        yield Case(2, "float32", "AUTO", a, c, o, m)
    others = ((1, "float32"), (4, "float32"), (2, "int32"), (4, "bfloat16"))
    for (n, d), (s, a), c, o, m in itertools.product(
        others, kinds, ("replica", "cross"), ("assign", "assign_add", "read"), both
    ):
        yield Case(n, d, s, a, c, o, m)
    for (s, a), c, o, m in itertools.product(kinds, ("replica", "cross"), SCATTERS, both):
        yield Case(2, "float32", s, a, c, o, m)


@dataclass(frozen=True)
class Library:
    """What the table needs of a library beside its common names."""

    module: Any
    strategy: Callable[[int], Any]
    constant: Callable[[Any, str], Any]


def outcome(library: Library, case: Case) -> dict[str, Any]:
    """What happened: an error's built-in type, or each copy and the value across replicas."""
    strategy = library.strategy(case.replicas)
    try:
        variable = _variable(library, strategy, case)
    except ERRORS as error:
        return {"creation": _kind(error)}
    seen: dict[str, Any] = {}
    try:
        seen["returned"] = _operate(library, strategy, variable, case)
    except ERRORS as error:
        seen["raised"] = _kind(error)
    seen["copies"] = [_listed(c) for c in strategy.experimental_local_results(variable)]
    try:
        with strategy.scope():
            seen["value"] = _listed(variable.read_value())
    except ERRORS as error:
        seen["value"] = _kind(error)
    return seen


def _variable(library: Library, strategy: Any, case: Case) -> Any:
    module = library.module
    start: Any = START if not case.operation.startswith("scatter") else [START] * 3
    with strategy.scope():
        variable = module.Variable(
            library.constant(start, case.dtype),
            synchronization=getattr(module.VariableSynchronization, case.synchronization),
            aggregation=getattr(module.VariableAggregation, case.aggregation),
        )
    if case.synchronization == "ON_READ":
        # The copies differ from the start, so that it matters which are read.
        own = _per_replica(library, strategy, case, 10)
        strategy.run(lambda x: variable.assign(x), args=(own,))
    return variable


def _operate(library: Library, strategy: Any, variable: Any, case: Case) -> Any:
    change = _change(library, variable, case)
    wrap = library.module.function if case.compiled else lambda f: f
    if case.context == "replica":
        own = _per_replica(library, strategy, case, 1)
        result = wrap(lambda x: strategy.run(change, args=(x,)))(own)
        return [_listed(x) for x in strategy.experimental_local_results(result)]
    given = library.constant(6, case.dtype)
    if case.context == "outside":
        return _listed(wrap(change)(given))
    with strategy.scope():
        return _listed(wrap(change)(given))


def _change(library: Library, variable: Any, case: Case) -> Callable[[Any], Any]:
    verb, _, number = case.operation.partition(":")
    if verb == "read":
        return lambda _: variable.read_value() + 0
    if verb.startswith("scatter"):

        def scatter(x: Any) -> Any:
            values = library.constant([2, 4], case.dtype) * x
            indices = library.constant([0, 2], "int32")
            getattr(variable, verb)(library.module.IndexedSlices(values, indices))
            return x

        return scatter

    def write(x: Any) -> Any:
        getattr(variable, verb)(6 if number else x)
        return x

    return write


def _per_replica(library: Library, strategy: Any, case: Case, scale: int) -> Any:
    shape = [1] * 3 if case.operation.startswith("scatter") and scale > 1 else 1
    return strategy.experimental_distribute_values_from_function(
        lambda context: library.constant(
            np.multiply(shape, scale * (context.replica_id_in_sync_group + 1)).tolist(), case.dtype
        )
    )


def _kind(error: Exception) -> str:
    return next(kind.__name__ for kind in ERRORS if isinstance(error, kind))


def _listed(x: Any) -> Any:
    return np.asarray(x.numpy() if hasattr(x, "numpy") else x, np.float64).tolist()
