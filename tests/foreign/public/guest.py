"""Run one program in this process, on one device or in the scope of a strategy.

With no replicas replicax is not imported. Statements run one by one; one that fails is recorded,
and the next runs, as a person goes on in a notebook.
"""

import ast
import contextlib
import importlib
import linecache
import os
import random
import re
import sys
import traceback
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tests.foreign.public import cuts, recording, sources
from tests.foreign.public.programs import Program, asked_devices, statements
from tests.foreign.public.steps import Distribute, Steps

LOG = "log.txt"
_SEED = 0


def main(program: Program, out: Path, replicas: int, options: tuple[str, ...]) -> None:
    """Run a program in this process, which is its own, and write what it computed."""
    _isolate(out)
    recorder = recording.Recorder()
    if replicas:
        # A program that asks JAX for virtual devices gets as many as without replicax.
        os.environ["REPLICAX_CPU_DEVICES"] = str(max(replicas, asked_devices(program)))
    if "perturb" in options:
        importlib.import_module("jax").config.update("jax_disable_most_optimizations", False)
    _prepare(program.library, recorder, options)
    with _scope(replicas) as strategy:
        steps = Steps(strategy) if "run" in options and replicas else None
        if replicas:
            _keep_devices()
        names = _run(program, recorder, steps)
        recording.finish(recorder, names)
        if steps is not None and steps.ran:
            recorder.devices = replicas
    # Otherwise the comparison would be of replicax with itself.
    assert ("replicax" in sys.modules) == (replicas > 0)
    recorder.save(out)
    # Threads of loaders must not keep the process; nothing is left to do.
    sys.stdout.flush()
    os._exit(0)


def _isolate(out: Path) -> None:
    """Give the process a group, a home, a working folder and a log of its own."""
    os.setsid()
    os.chdir(out.parent)
    os.environ |= {"HOME": str(out.parent), "KERAS_HOME": str(out.parent / ".keras")}
    log = os.open(out.with_name(LOG), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)


@contextlib.contextmanager
def _scope(replicas: int) -> Iterator[Any]:
    if not replicas:
        yield None
        return
    rx = importlib.import_module("replicax")
    strategy = rx.distribute.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])
    with strategy.scope():
        yield strategy


def _prepare(library: str, recorder: recording.Recorder, options: tuple[str, ...]) -> None:
    matplotlib = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    sources.install(library)
    random.seed(_SEED)
    np.random.seed(_SEED)
    default_rng = np.random.default_rng
    np.random.default_rng = lambda seed=None: default_rng(_SEED if seed is None else seed)
    if library == "keras":
        importlib.import_module("keras").utils.set_random_seed(_SEED)
        cuts.cut_keras()
        recording.record_keras(recorder)
        if "perturb" in options:
            _perturb_keras()
        if "no-dropout" in options:
            _drop_nothing(importlib.import_module("keras").layers, "rate")
    if library == "flax":
        recording.record_nnx(recorder)
        if "no-dropout" in options:
            _drop_nothing(importlib.import_module("flax.nnx"), "rate")
    if library == "equinox" and "no-dropout" in options:
        _drop_nothing(importlib.import_module("equinox").nn, "p")


def _keep_devices() -> None:
    """Ignore a program that asks for virtual devices: the strategy has made them."""
    config = importlib.import_module("jax").config
    update = type(config).update

    def change(self, name, value):
        if name != "jax_num_cpu_devices":
            update(self, name, value)

    config.update = types.MethodType(change, config)


def _perturb_keras() -> None:
    """Change each initial weight in its last bit, to see how far rounding spreads."""
    keras = importlib.import_module("keras")
    variable = keras.Variable
    initialize = variable._initialize

    def perturbed(self, value):
        initialize(self, value)
        if "float" in str(self.dtype):
            noise = np.random.default_rng(len(self.shape)).choice([-1, 1], self.shape)
            initialize(self, self._value * (1 + 1.2e-7 * noise).astype(np.float32))

    variable._initialize = perturbed


def _drop_nothing(module: types.ModuleType, rate: str) -> None:
    for name in ("Dropout", "SpatialDropout1D", "SpatialDropout2D", "GaussianDropout"):
        layer = getattr(module, name, None)
        if layer is not None:
            _zero(layer, rate)


def _zero(layer: type, rate: str) -> None:
    init = layer.__init__

    def make(self, value=0.0, **kwargs):
        kwargs.pop(rate, None)
        init(self, 0.0, **kwargs)

    layer.__init__ = make


def _run(program: Program, recorder: recording.Recorder, steps: Steps | None) -> dict:
    tree = cuts.Cut().visit(statements(program))
    module = types.ModuleType("__main__")
    if steps is not None:
        tree = Distribute().visit(tree)
        vars(module).update(steps.names())
        if program.library == "flax":
            steps.mend_optimizers()
    ast.fix_missing_locations(tree)
    source = program.source()
    filename = f"<{program.name}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    module.__dict__["__file__"] = str(program.file)
    module.__dict__["__few__"] = cuts.few
    module.__dict__["open"] = sources.open_file
    sys.modules["__main__"] = module
    sys.path.insert(0, str(program.folder()))
    with contextlib.redirect_stdout(recording.Printed(recorder)):
        for statement in tree.body:
            if not _step(statement, filename, module.__dict__, recorder):
                break
    return module.__dict__


def _step(statement: ast.stmt, filename: str, names: dict, recorder: recording.Recorder) -> bool:
    """Run a statement; return whether the program goes on."""
    try:
        if isinstance(statement, ast.Expr) and not isinstance(statement.value, ast.Constant):
            code = compile(ast.Expression(statement.value), filename, "eval")
            recorder.add("shown", eval(code, names))
        else:
            exec(compile(ast.Module([statement], []), filename, "exec"), names)
        _close_figures()
    except ImportError as error:
        recorder.missing = recorder.missing or _package(error)
        _failed(statement, error, recorder)
        # An import at the top decides whether the program can run at all.
        return not isinstance(statement, (ast.Import, ast.ImportFrom))
    except SystemExit:
        return False
    except Exception as error:
        _failed(statement, error, recorder)
        return not isinstance(error, sources.Unknown)
    return True


def _package(error: ImportError) -> str:
    package = (error.name or str(error)).split(".")[0]
    # An installed package may be of another version than the program's.
    return package if package not in sys.modules else str(error)


def _failed(statement: ast.stmt, error: Exception, recorder: recording.Recorder) -> None:
    traceback.print_exc()
    line = next((line for line in str(error).splitlines() if line.strip()), "")
    line = re.sub(r"0x[0-9a-f]+", "0x", line)
    recorder.errors[statement.lineno] = f"{type(error).__name__}: {line[:200]}"
    if isinstance(error, sources.Unknown):
        recorder.missing = recorder.missing or str(error)


def _close_figures() -> None:
    sys.modules["matplotlib.pyplot"].close("all") if "matplotlib.pyplot" in sys.modules else None
