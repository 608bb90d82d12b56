"""Count the calls between packages that five paths through replicax make, and those that go up.

    python -m benchmarks.layers          # a table
    python -m benchmarks.layers --up     # also where each call to a higher layer comes from

The import linter sees imports only. A lower layer can still call a higher one at run time: a
function that it was given, or a method of an object that it was given or that `_src/wiring.py` set.
"""

import argparse
import re
import sys
import threading
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import replicax as rx

PACKAGE = str(Path(rx.__file__).parent / "_src")
Calls = Counter[tuple[str, str, str]]  # the calling module, the module and the function called


def layers() -> list[list[str]]:
    """Return the packages of each layer of `_src`, the lowest first, as the linter knows them."""
    config = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    contracts = config["tool"]["importlinter"]["contracts"]
    (named,) = (c["layers"] for c in contracts if c["containers"] == ["replicax._src"])
    return [re.findall(r"\w+", layer) for layer in reversed(named)]


def module(frame: Any) -> str:
    """Return a module of replicax as ``package/module``; empty for the code of others."""
    path = frame.f_code.co_filename if frame is not None else ""
    return path[len(PACKAGE) + 1 : -len(".py")] if path.startswith(PACKAGE) else ""


@contextmanager
def counted(calls: Calls) -> Iterator[None]:
    """Count the direct calls between functions of replicax in all threads."""

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and (name := module(frame)) and (caller := module(frame.f_back)):
            calls[caller, name, frame.f_code.co_qualname] += 1

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def measured(path: Callable[[], Any]) -> tuple[Any, Calls]:
    """Return the result of a path and its calls."""
    calls: Calls = Counter()
    with counted(calls):
        result = path()
    return result, calls


def paths() -> dict[str, Calls]:
    """Return the calls of each path of a training step with variables on two replicas."""
    found = {}

    def start() -> Any:
        strategy = rx.distribute.MirroredStrategy(jax.devices()[:2])
        with strategy.scope():
            return strategy, rx.Variable(jnp.zeros(3), name="weights")

    (strategy, weights), found["start"] = measured(start)
    data = rx.data.Dataset.from_tensor_slices(np.ones((4096, 3), np.float32)).batch(8)
    distributed = strategy.experimental_distribute_dataset(data)

    def replica(x: Any) -> Any:
        loss, (change,) = rx.value_and_grad(lambda: jnp.sum(x @ weights), [weights])()
        change = rx.distribute.get_replica_context().all_reduce("SUM", change)
        weights.assign_sub(0.1 * change)
        return loss

    def eager(batch: Any) -> Any:
        return strategy.reduce("MEAN", strategy.run(replica, args=(batch,)), axis=None)

    step = rx.function(eager)

    batch, found["batch"] = measured(lambda: next(iter(distributed)))
    _, found["write"] = measured(lambda: weights.assign(jnp.ones(3)))
    _, found["first compiled step"] = measured(lambda: step(batch))
    _, found["warm compiled step"] = measured(lambda: step(batch))
    _, found["eager step"] = measured(lambda: eager(batch))
    return found


def package(name: str) -> str:
    """Return the package of a module."""
    return name.split("/")[0]


def between_packages(calls: Calls) -> Calls:
    """Return the calls from one package to another."""
    return Counter({c: n for c, n in calls.items() if package(c[0]) != package(c[1])})


def upward(calls: Calls) -> Calls:
    """Return the calls to a higher layer."""
    height = {name: layer for layer, names in enumerate(layers()) for name in names}
    is_up = lambda c: height[package(c[0])] < height[package(c[1])]  # noqa: E731
    return Counter({c: n for c, n in calls.items() if is_up(c)})


def methods(calls: Calls) -> Calls:
    """Return the calls of methods.

    A function of a higher layer can only have been given to the caller, which cannot import it. A
    method may belong to any object that the caller holds.
    """
    return Counter({c: n for c, n in calls.items() if "." in c[2] and "<" not in c[2]})


def main() -> None:
    """Print the table of the paths."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.layers", description=__doc__)
    parser.add_argument("--up", action="store_true", help="show each call to a higher layer")
    shown = parser.parse_args().up
    print("| path | calls | modules | between packages | up | methods of these |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, calls in paths().items():
        up = upward(calls)
        modules = {m for caller, called, _ in calls for m in (caller, called)}
        counts = (calls, between_packages(calls), up, methods(up))
        total, crossing, *rest = (c.total() for c in counts)
        print(f"| {name} | {total} | {len(modules)} | {crossing} | {rest[0]} | {rest[1]} |")
        for (caller, called, function), n in sorted(up.items()) if shown else ():
            print(f"    {n:3} {caller} -> {called}: {function}")


if __name__ == "__main__":
    main()
