"""The speed table of the core: one run, one table of ratios.

    python benchmarks/core.py [--tensorflow PYTHON] [--quick]

``PYTHON`` is an interpreter that can import tensorflow; by default this one. Without TensorFlow its
rows are left out. What each row means is in docs/benchmarks.md.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

import replicax as rx  # noqa: E402
from benchmarks._models import (  # noqa: E402
    DEEP,
    MLP,
    MODELS,
    POOLED_CNN,
    SMALL_DEEP,
    SMALL_MLP,
    Model,
)
from benchmarks._steps import by_hand, products, with_iterator, with_replicax  # noqa: E402
from benchmarks._timing import Block, Comparison, Spread, block, compare, of_thread  # noqa: E402


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    what: str
    measured: Spread
    target: float | None
    times: tuple[float, float]
    unit: str = ""

    def cells(self) -> tuple[str, ...]:
        scale, digits = (1e6, 0) if self.unit else (1, 2)
        shown = [f"{v * scale:.{digits}f}" for v in vars(self.measured).values()]
        sign = "+" if self.unit else ""
        target = "" if self.target is None else f"{sign}{self.target * scale:.{digits}f}{self.unit}"
        verdict = "" if self.target is None else "ok" if self.holds else "MISSED"
        ours, theirs = map(_seconds, self.times)
        median, low, high = shown
        return (
            self.what,
            f"{sign}{median}{self.unit}",
            f"{low}..{high}",
            target,
            verdict,
            ours,
            theirs,
        )

    @property
    def holds(self) -> bool:
        return self.target is not None and self.measured.median <= self.target


def main() -> None:
    parser = argparse.ArgumentParser(description="The speed table of the core.")
    parser.add_argument("--tensorflow", default=sys.executable, metavar="PYTHON")
    parser.add_argument("--quick", action="store_true", help="a tenth of the pairs, to try it out")
    options = parser.parse_args()
    console, share = Console(width=None if sys.stdout.isatty() else 118), 10 if options.quick else 1
    rows: list[Row] = []
    for part in (_imports, _first_calls):
        with console.status(part.__doc__ or ""):
            rows += part(share)
    strategy = _two_replicas()
    with console.status("Steps against hand-written JAX"):
        rows += _against_hand(strategy, share)
    with console.status("Values that are not from a dataset"):
        rows += _pieces(strategy, share)
    with console.status("Loops over an iterator"):
        rows += _loops(strategy, share)
    with console.status("Against TensorFlow"), tensorflow(options.tensorflow) as answer:
        if answer is None:
            console.print("No TensorFlow: give an interpreter that has it with --tensorflow.")
        else:
            rows += _against_tensorflow(strategy, answer, share)
    with console.status("The CNN"), tensorflow(options.tensorflow, **PLAIN_KERNELS) as answer:
        if answer is not None:
            rows.append(_step(strategy, answer, POOLED_CNN, 0.7, share))
            rows[-1] = replace(rows[-1], what=f"{rows[-1].what}, its plain kernels")
    console.print(_table(rows))


# TensorFlow's own kernels, as on processors without AVX512-VNNI; on others it takes oneDNN's.
PLAIN_KERNELS = {"TF_ENABLE_ONEDNN_OPTS": "0"}


def _two_replicas() -> rx.distribute.Strategy:
    [cpu] = rx.config.list_physical_devices("CPU")
    rx.config.set_logical_device_configuration(cpu, [rx.config.LogicalDeviceConfiguration()] * 2)
    return rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def _against_hand(strategy: rx.distribute.Strategy, share: int) -> list[Row]:
    devices = jax.devices()[:2]
    rows = []
    for model in MODELS:
        found = compare(with_replicax(strategy, model), by_hand(devices, model), pairs=60 // share)
        rows.append(_ratio(f"step of {model.name} / hand-written", found, 1.03))
    found = compare(with_replicax(strategy, MLP), products(devices, MLP), pairs=60 // share)
    rows.append(_ratio("step of MLP / its matrix products alone", found, 1.15))
    ours, theirs = empty_steps(strategy, devices)
    by_clock = compare(ours, theirs, pairs=200 // share, seconds=0.02)
    in_thread = compare(of_thread(ours), of_thread(theirs), pairs=200 // share, seconds=0.01)
    for what, found, target in (
        ("empty step - hand-written", by_clock, None),
        ("empty step - hand-written, thread time", in_thread, 25e-6),
    ):
        rows.append(Row(what, found.difference, target, _medians(found), unit=" us"))
    return rows


def _pieces(strategy: rx.distribute.Strategy, share: int) -> list[Row]:
    """Steps that are given new pieces of JAX or NumPy, where a dataset gives its batch."""
    host = [np.full((64, 784), i, np.float32) for i in range(2)]
    placed = jax.block_until_ready([jnp.asarray(x) for x in host])
    rows_of = rx.data.Dataset.from_tensors(np.concatenate(host))
    [batch] = strategy.experimental_distribute_dataset(rows_of)
    step = rx.function(lambda x: strategy.run(jnp.sum, args=(x,)))

    def given(values: list | None) -> Block:
        # What the calling thread does: the devices compute the same.
        def run(steps: int) -> float:
            taken = [
                strategy.experimental_distribute_values_from_function(
                    lambda ctx: values[ctx.replica_id_in_sync_group]
                )
                if values
                else batch
                for _ in range(steps)
            ]
            began = time.thread_time()
            for value in taken:
                last = step(value)
            took = time.thread_time() - began
            jax.block_until_ready(last)
            return took

        return run

    rows = []
    for kind, values, target in (("jnp", placed, 60e-6), ("NumPy", host, None)):
        found = compare(given(values), given(None), pairs=100 // share, seconds=0.004)
        what = f"step given pieces of {kind} - a dataset's batch, thread time"
        rows.append(Row(what, found.difference, target, _medians(found), unit=" us"))
    return rows


def _loops(strategy: rx.distribute.Strategy, share: int) -> list[Row]:
    """100 steps in one call, and 100 calls, which take their batches from an iterator."""
    rows = []
    for model in (SMALL_MLP, SMALL_DEEP):
        one, by_one = with_iterator(strategy, model, 100), with_iterator(strategy, model, 1)
        found = compare(one, lambda n, calls=by_one: calls(100 * n), pairs=20 // share)
        rows.append(_ratio(f"100 steps of {model.name} in one call / 100 calls", found, None))
    return rows


def empty_steps(strategy: rx.distribute.Strategy, devices: list[jax.Device]) -> tuple[Block, Block]:
    """One scalar and no work: what a call costs."""
    with strategy.scope():
        count = rx.Variable(0.0)

    def replica_step() -> None:
        count.assign_add(1.0)

    step = rx.function(lambda: strategy.run(replica_step))
    mesh, same = Mesh(devices, ("replica",)), PartitionSpec()
    hand = jax.jit(
        jax.shard_map(lambda x: x + 1, mesh=mesh, in_specs=same, out_specs=same, check_vma=False),
        donate_argnums=0,
    )
    state = [jax.device_put(0.0, NamedSharding(mesh, same))]

    def hand_step() -> None:
        state[0] = hand(state[0])

    return (
        block(step, lambda: jax.block_until_ready(count.cell.value)),
        block(hand_step, lambda: jax.block_until_ready(state[0])),
    )


def _against_tensorflow(strategy: rx.distribute.Strategy, answer, share: int) -> list[Row]:
    targets = {MLP: 0.5, POOLED_CNN: 0.7, DEEP: 0.5, SMALL_MLP: 0.5, SMALL_DEEP: 0.5}
    rows = [_step(strategy, answer, model, target, share) for model, target in targets.items()]

    def total(x: jax.Array) -> jax.Array:
        return rx.distribute.get_replica_context().all_reduce("SUM", x * 2)

    for name, fn in (("eager", lambda x: x * 2 + 1), ("eager all_reduce", total)):
        x = strategy.experimental_distribute_values_from_function(lambda _: jnp.ones(4))
        theirs = lambda steps, name=name: answer(name, steps)  # noqa: E731
        found = compare(_eager(strategy, fn, x), theirs, pairs=60 // share)
        rows.append(_ratio(f"{name.replace('eager', 'eager run')} / TensorFlow", found, 0.7))
    return rows


def _step(strategy, answer, model: Model, target: float, share: int) -> Row:
    theirs = lambda steps: answer(model.name, steps)  # noqa: E731
    found = compare(with_replicax(strategy, model), theirs, pairs=60 // share)
    return _ratio(f"step of {model.name} / TensorFlow", found, target)


def _eager(strategy: rx.distribute.Strategy, fn, x) -> Block:
    last = [None]

    def step() -> None:
        last[0] = strategy.run(fn, args=(x,))

    return block(step, lambda: jax.block_until_ready(last[0]))


@contextmanager
def tensorflow(
    python: str, program: str = "_tensorflow.py", **environment: str
) -> Iterator[object]:
    """A function that has TensorFlow do a block, or None where there is none."""
    child = subprocess.Popen(
        [python, ROOT / "benchmarks" / program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **environment},
        text=True,
    )
    assert child.stdin
    assert child.stdout

    def answer(name: str, steps: int) -> float:
        print(name, steps, file=child.stdin, flush=True)
        return float(child.stdout.readline())

    try:
        yield answer if child.stdout.readline() == "ready\n" else None
    finally:
        child.kill()
        child.wait()


def _first_calls(share: int) -> list[Row]:
    """Tracing with 64 and with 2 replicas, and whole first calls with 2."""
    found = json.loads(_child(["-m", "benchmarks._first_call", str(max(2, 12 // share))]))
    traces = Comparison(found["64"]["trace"], found["2"]["trace"])
    compiled = found["64"]["compile"], found["2"]["compile"]
    ratio = compiled[0] / compiled[1]
    return [
        _ratio("trace, 64 replicas / 2 (50 layers)", traces, 1.3),
        Row("compile, 64 replicas / 2 (once)", Spread(ratio, ratio, ratio), None, compiled),
        _ratio("first call, 50 layers with Adam / hand-written", Comparison(*found["adam"]), 1.2),
        _ratio("first call, 1,000 variables / hand-written", Comparison(*found["many"]), 1.2),
    ]


def _imports(share: int) -> list[Row]:
    """`import replicax` and `import jax` in fresh processes."""
    with tempfile.TemporaryDirectory() as bytecode:
        # With bytecode, as after an installation; processor time, as neighbours disturb it less.
        def seconds(module: str) -> float:
            code = f"import time, {module}; print(time.process_time())"
            return float(_child(["-c", code], bytecode=bytecode))

        def repeated(module: str) -> Block:
            return lambda steps: sum(seconds(module) for _ in range(steps))

        bare = seconds("sys")
        found = compare(repeated("replicax"), repeated("jax"), pairs=max(4, 20 // share), seconds=0)
    ours, theirs = ([t - bare for t in side] for side in (found.ours, found.theirs))
    return [_ratio("import replicax / import jax", Comparison(ours, theirs), 1.25)]


def _child(arguments: list[str], *, bytecode: str | None = None) -> str:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]),
    }
    if bytecode:
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        environment["PYTHONPYCACHEPREFIX"] = bytecode
    ran = subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True
    )
    if ran.returncode:
        raise SystemExit(ran.stderr)
    return ran.stdout


def _ratio(what: str, found: Comparison, target: float | None) -> Row:
    return Row(what, found.ratio, target, _medians(found))


def _medians(found: Comparison) -> tuple[float, float]:
    return Spread.of(found.ours).median, Spread.of(found.theirs).median


def _seconds(t: float) -> str:
    return f"{t:.2f} s" if t >= 1 else f"{t * 1e3:.2f} ms" if t >= 1e-3 else f"{t * 1e6:.0f} us"


def _table(rows: list[Row]) -> Table:
    table = Table(title="replicax: ratios, medians of neighbouring pairs")
    for name in ("what", "measured", "quartiles", "at most", "", "ours", "theirs"):
        table.add_column(name, justify="left" if name in ("what", "") else "right")
    for row in rows:
        table.add_row(*row.cells())
    return table


if __name__ == "__main__":
    main()
