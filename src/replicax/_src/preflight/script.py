"""Runs a training script until its training step is traced, and captures that step."""

from __future__ import annotations

import functools
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.core

from replicax._src.base.errors import TracingError
from replicax._src.base.origin import is_library
from replicax._src.functions.program import watched_by
from replicax._src.preflight.trace import Step


class ScriptError(Exception):
    """The script failed; the message contains its traceback."""


class NoStepError(TracingError):
    """The script ended without tracing a training step."""


class _Stop(BaseException):
    """Ends the script once its step was captured; a BaseException passes ``except Exception``."""


def preflight_script(
    path: str, args: Sequence[str], function: str | None, use: Callable[[Step], Any]
) -> Any:
    """Run a script until it has traced its training step; return ``use`` of that step.

    The training step is the first function that runs on a strategy's replicas and changes
    variables; or the one with the given name, which may also be compiled by `jax.jit`.

    Args:
        path: The script.
        args: Its command line.
        function: The name of the step, or None.
        use: Called with the step in place of the script's first call, after which the script
            ends.

    Raises:
        NoStepError: If the script ended without such a function.
        ScriptError: If the script failed.
    """
    results: list[Any] = []
    failures: list[Exception] = []
    seen: list[str] = []

    def stop_at(step: Step) -> None:
        try:
            results.append(use(step))
        except Exception as error:  # not a failure of the script: raise it outside
            failures.append(error)
        raise _Stop

    def watch(traced: Any, arguments: Any, program: Any) -> None:
        seen.append(program.name)
        changes = any(not cell.transient and cell.guards is None for cell in program.written)
        is_step = program.topology is not None and changes
        if program.name == function or (function is None and is_step):
            stop_at(Step(traced.python_function, arguments))

    jitted: list[str] = []
    try:
        with watched_by(watch), _watch_jit(function, jitted, stop_at):
            run_script(path, args, " before its training step was traced")
    except _Stop:
        if failures:
            raise failures[0] from None
        return results[0]
    raise _no_step_error(path, function, seen, jitted)


@contextmanager
def _watch_jit(
    function: str | None, names: list[str], stop_at: Callable[[Step], None]
) -> Iterator[None]:
    """Patch `jax.jit` to record the names of its functions, and to capture ``function``."""
    original: Any = jax.jit

    def jit(*args: Any, **options: Any) -> Any:
        if not args:  # used as `@jax.jit(...)`: the function follows
            return functools.partial(jit, **options)
        compiled, name = original(*args, **options), getattr(args[0], "__name__", "")
        if str(getattr(args[0], "__module__", "")).startswith(("replicax.", "jax.")):
            return compiled
        names.append(name)
        return _stop_at_call(compiled, stop_at) if name and name == function else compiled

    jax.jit = jit
    try:
        yield
    finally:
        jax.jit = original


def _stop_at_call(compiled: Any, stop_at: Callable[[Step], None]) -> Any:
    @functools.wraps(compiled)
    def call(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((args, kwargs))):
            return compiled(*args, **kwargs)  # it is being traced as a part of another function
        return stop_at(Step.of(compiled, args, kwargs))

    return call


def run_script(path: str, args: Sequence[str], when: str = "") -> None:
    """Run a script to its end.

    Args:
        path: The script.
        args: Its command line.
        when: A phrase to add to the error message if it fails.

    Raises:
        ScriptError: If it failed.
    """
    argv, first = sys.argv, sys.path[0]
    sys.argv, sys.path[0] = [path, *args], str(Path(path).resolve().parent)
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            raise ScriptError(f"{path} ended with the exit status {end.code!r}.") from end
    except Exception as error:
        raise ScriptError(_format_failure(path, error, when)) from error
    finally:
        sys.argv, sys.path[0] = argv, first


def _format_failure(path: str, error: Exception, when: str) -> str:
    """Return a message with the script's traceback: its own frames, and the innermost one."""
    summary = traceback.TracebackException.from_exception(error)
    first = next((i for i, frame in enumerate(summary.stack) if frame.filename == path), 0)
    frames = summary.stack[first:]
    shown = [f for f in frames if f is frames[-1] or not is_library(f.filename)]
    summary.stack = traceback.StackSummary.from_list(shown)
    notes = getattr(summary, "__notes__", None) or ()
    summary.__notes__ = [
        note for note in notes if "JAX has removed its internal frames" not in note
    ]
    left = len(frames) - len(shown)
    note = f"(Without {left} lines of libraries in between.)\n" if left else ""
    return f"{path} failed{when}.\n\n{''.join(summary.format())}{note}"


def _no_step_error(
    path: str, function: str | None, seen: Sequence[str], jitted: Sequence[str]
) -> NoStepError:
    wanted = f"a function {function!r}" if function else "a training step"
    traced = f"It traced {', '.join(dict.fromkeys(seen))}." if seen else "It traced no function."
    others = ", ".join(dict.fromkeys(filter(None, jitted)))
    also = f" It gave jax.jit the functions {others}." if others else ""
    return NoStepError(
        f"{path} ended without {wanted}. {traced}{also} A training step is an rx.function that"
        " calls `strategy.run` and changes variables; `--function NAME` chooses another, also one"
        " that jax.jit compiles."
    )
