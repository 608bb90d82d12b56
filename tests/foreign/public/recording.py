"""Record the numbers that a program computes, in the order in which it computes them."""

import contextlib
import dataclasses
import functools
import importlib
import io
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np

_ELEMENTS = 4096  # of an array that are compared
_LINES = 400  # of the output
# Printed lines that show times, which are no results.
_TIME = re.compile(r"\btime|second|elapsed|\bms\b|\d+m?s/|it/s|per sec", re.IGNORECASE)
_DECIMAL = re.compile(r"[-+]?(?:\d+\.\d*(?:[eE][-+]?\d+)?|\d+[eE][-+]?\d+|nan|inf)")
_OTHER_REPLICA = re.compile(r"^  [1-9]\d*: ")  # a component of a per-replica value that is shown
_OWN = {"BatchNorm", "Dropout"}
_SKIPPED_NAMES = re.compile(r"time|start|\bend\b|elapsed|duration|^_", re.IGNORECASE)


@dataclasses.dataclass
class Recorder:
    """The numbers of a run.

    Attributes:
        arrays: Arrays by a key that says where they come from: "fit 0: loss".
        errors: The first line of the error of each statement that failed, by its line.
        own: The layers that compute with each replica's own rows or numbers in `strategy.run`.
        devices: On how many devices the arrays of models are, at most.
        trained: How many `fit`s and updates of optimizers there were.
    """

    arrays: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    errors: dict[int, str] = dataclasses.field(default_factory=dict)
    missing: str | None = None
    own: set[str] = dataclasses.field(default_factory=set)
    devices: int = 0
    trained: int = 0
    counts: dict[str, int] = dataclasses.field(default_factory=dict)
    models: list = dataclasses.field(default_factory=list)

    def add(self, kind: str, tree: object) -> None:
        """Record the floating-point numbers of a tree."""
        number = self.counts.get(kind, 0)
        self.counts[kind] = number + 1
        for path, leaf in _leaves(tree):
            array = _sample(leaf)
            if array is not None:
                self.arrays[f"{kind} {number}{path}"] = array

    def see_devices(self, tree: object) -> None:
        """Note on how many devices the arrays of a tree are, and which layers it has."""
        self.own |= _OWN & set(_classes(tree))
        leaves = importlib.import_module("jax").tree.leaves(tree)
        self.devices = max([self.devices, *map(_devices, leaves)])

    def save(self, path: Path) -> None:
        """Write everything for the process that compares."""
        np.savez(
            path.with_suffix(".npz"), **{f"a{i}": a for i, a in enumerate(self.arrays.values())}
        )
        report = {
            "keys": [*self.arrays],
            "errors": self.errors,
            "missing": self.missing,
            "own": sorted(self.own),
            "devices": self.devices,
            "trained": self.trained,
        }
        path.write_text(json.dumps(report))


def _leaves(tree: object, path: str = "") -> Iterator[tuple[str, object]]:
    if isinstance(tree, Mapping):
        for key in tree:
            yield from _leaves(tree[key], f"{path}: {key}")
    elif isinstance(tree, (list, tuple)):
        if tree and all(isinstance(x, (float, np.floating)) for x in tree):
            yield path, np.array(tree)
        else:
            for i, value in enumerate(tree):
                yield from _leaves(value, f"{path}[{i}]")
    else:
        yield from _module_leaves(tree, path)


def _module_leaves(tree: object, path: str) -> Iterator[tuple[str, object]]:
    names = {f"{t.__module__.split('.')[0]}.{t.__name__}" for t in type(tree).__mro__}
    if "flax.Module" in names or "flax.Pytree" in names:
        nnx = importlib.import_module("flax.nnx")
        with contextlib.suppress(Exception):
            pure = nnx.to_pure_dict(nnx.state(tree))
            yield from _leaves(_keyed(pure), path)
    elif "equinox.Module" in names or "flax.State" in names:
        jax = importlib.import_module("jax")
        yield from _leaves(dict(enumerate(jax.tree.leaves(tree))), path)
    else:
        yield path, tree


def _keyed(tree: object) -> object:
    return {str(k): _keyed(v) for k, v in tree.items()} if isinstance(tree, Mapping) else tree


def _sample(leaf: object) -> np.ndarray | None:
    """Return at most some elements of an array of floating-point numbers, else None."""
    if not isinstance(leaf, (float, np.floating)) and not hasattr(leaf, "__array__"):
        return None
    try:
        array = np.asarray(leaf)
    except Exception:  # such as a key, a deleted buffer or a tensor of Keras
        return None
    if array.dtype.kind == "V" or array.dtype.name in ("bfloat16", "float16"):
        array = array.astype(np.float32)
    if array.dtype.kind != "f" or array.size == 0:
        return None
    flat = array.reshape(-1)
    return np.append(flat[:: -(-flat.size // _ELEMENTS)], np.abs(flat).mean(dtype=np.float64))


class Printed(io.TextIOBase):
    """Standard output that keeps the decimal numbers of its lines; of replicas, the first one's."""

    def __init__(self, recorder: Recorder):
        self._recorder = recorder
        self._line = ""
        self._numbers: list[float] = []
        self._is_distributed = self._is_other = False

    def write(self, text: str) -> int:
        """Take output."""
        sys.__stdout__.write(text)
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            self._take(line)
        if text.endswith("\n"):
            self._end()
        return len(text)

    def _take(self, line: str) -> None:
        if line.startswith("}"):
            self._is_distributed = self._is_other = False
        self._is_other |= self._is_distributed and _OTHER_REPLICA.match(line) is not None
        self._is_distributed |= line.endswith("PerReplica:{")
        if self._is_other or _TIME.search(line):
            return
        self._numbers += [float(number) for number in _DECIMAL.findall(line)]

    def _end(self) -> None:
        """Record the numbers of a `print`: replicas and one array break lines at other places."""
        if self._numbers and self._recorder.counts.get("printed", 0) < _LINES:
            self._recorder.add("printed", self._numbers)
        self._numbers = []

    def flush(self) -> None:
        """Flush the real output."""
        sys.__stdout__.flush()


def record_keras(recorder: Recorder) -> None:
    """Record the results of the methods of Keras models."""
    model = importlib.import_module("keras").Model
    for name in ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch"):
        setattr(model, name, _recording(recorder, name, getattr(model, name)))
    model.__call__ = _tracking(recorder, model.__call__)


def _recording(recorder: Recorder, name: str, method: Callable) -> Callable:
    @functools.wraps(method)
    def call(self, *args, **kwargs):
        _track(recorder, self)
        result = method(self, *args, **kwargs)
        _track(recorder, self)
        recorder.add(name, result.history if name == "fit" else result)
        recorder.trained += name in ("fit", "train_on_batch")
        return result

    return call


def _tracking(recorder: Recorder, call: Callable) -> Callable:
    @functools.wraps(call)
    def track(self, *args, **kwargs):
        _track(recorder, self)
        return call(self, *args, **kwargs)

    return track


def _track(recorder: Recorder, model: object) -> None:
    if not any(known is model for known in recorder.models):
        recorder.models.append(model)


def record_nnx(recorder: Recorder) -> None:
    """Keep the optimizers that a program makes, to record their state at its end."""
    nnx = importlib.import_module("flax.nnx")
    init = nnx.Optimizer.__init__

    @functools.wraps(init)
    def make(self, model, *args, **kwargs):
        init(self, model, *args, **kwargs)
        recorder.models += [model, self]

    nnx.Optimizer.__init__ = make


def finish(recorder: Recorder, names: Mapping[str, object]) -> None:
    """Record the models and the variables that the program leaves."""
    for model in recorder.models:
        weights = getattr(model, "weights", None)
        if isinstance(weights, list):
            recorder.see_devices(weights)
            recorder.add("weights", [w.numpy() for w in weights if _is_weight(w)])
            recorder.own |= {"random layers" for w in model.variables if "seed_gen" in w.path}
        else:
            recorder.add("state", model)
            recorder.see_devices(model)
    for name in sorted(names):
        if not _SKIPPED_NAMES.search(name) and _is_result(names[name]):
            recorder.add(f"variable {name}", names[name])
            recorder.see_devices(names[name])


def _classes(x: object, depth: int = 6) -> Iterator[str]:
    yield type(x).__name__
    if depth and isinstance(x, (list, tuple)):
        parts = [*x]
    elif depth and any(t.__module__.startswith(("flax", "equinox")) for t in type(x).__mro__):
        parts = [*getattr(x, "__dict__", {}).values()]
    else:
        parts = []
    for part in parts:
        yield from _classes(part, depth - 1)


def _devices(x: object) -> int:
    try:
        array = getattr(x, "value", x)
    except Exception:  # such as a variable without a value
        return 0
    return len(getattr(getattr(array, "sharding", None), "device_set", ()))


def _is_weight(weight) -> bool:
    return "seed" not in weight.path and "float" in str(weight.dtype)


def _is_result(value: object) -> bool:
    module = type(value).__module__.split(".")[0]
    if module in ("jaxlib", "numpy", "jax", "flax", "equinox", "replicax"):
        return True
    if isinstance(value, (type, Callable)):
        return any(t.__module__.startswith(("flax", "equinox")) for t in type(value).__mro__)
    return isinstance(value, (float, list, tuple, dict)) or any(
        t.__module__.startswith(("flax", "equinox")) for t in type(value).__mro__
    )
