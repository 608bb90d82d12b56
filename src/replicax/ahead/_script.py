"""Script: a training program -> its training step, caught before it first runs."""

from __future__ import annotations

import runpy
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from replicax._errors import TracingError
from replicax.ahead._trace import Step
from replicax.functions._modes import watched_by


class ScriptError(Exception):
    """The script failed; the text has its traceback."""


class NoStepError(TracingError):
    """The script ended, and nothing that it traced was the step."""


class _Stop(BaseException):
    """Ends the script once its step was caught; no ``except Exception`` holds it up."""


def preflight_script(
    path: str, args: Sequence[str], function: str | None, use: Callable[[Step], Any]
) -> Any:
    """Run a script until it has traced its training step, and give that to ``use``.

    The training step is the first function that runs on a strategy's replicas and changes
    variables; or the one with the given name.

    Args:
        path: The script.
        args: Its command line.
        function: The name of the step.
        use: Called with the step, where the script would have run it. The script ends then.

    Raises:
        NoStepError: The script ended without such a function.
        ScriptError: It failed.
    """
    results: list[Any] = []
    seen: list[str] = []

    def watch(traced: Any, arguments: Any, program: Any) -> None:
        seen.append(program.name)
        changes = any(not cell.transient and cell.guards is None for cell in program.written)
        is_step = program.topology is not None and changes
        if program.name == function or (function is None and is_step):
            results.append(use(Step(traced.python_function, arguments)))
            raise _Stop

    try:
        with watched_by(watch):
            _run(path, args)
    except _Stop:
        return results[0]
    raise _nothing_found(path, function, seen)


def _run(path: str, args: Sequence[str]) -> None:
    argv, first = sys.argv, sys.path[0]
    sys.argv, sys.path[0] = [path, *args], str(Path(path).resolve().parent)
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            raise ScriptError(f"{path} ended with the exit status {end.code!r}.") from end
    except Exception as error:
        raise ScriptError(_told(path, error)) from error
    finally:
        sys.argv, sys.path[0] = argv, first


def _told(path: str, error: Exception) -> str:
    """The traceback of a script, from its own first line on."""
    where = error.__traceback__
    while where is not None and where.tb_frame.f_code.co_filename != path:
        where = where.tb_next
    lines = traceback.format_exception(type(error), error, where or error.__traceback__)
    return f"{path} failed before its training step was traced.\n\n{''.join(lines)}"


def _nothing_found(path: str, function: str | None, seen: Sequence[str]) -> NoStepError:
    wanted = f"a function {function!r}" if function else "a training step"
    traced = f"It traced {', '.join(dict.fromkeys(seen))}." if seen else "It traced no function."
    return NoStepError(
        f"{path} ended without {wanted}. {traced} A training step is an rx.function that calls"
        " `strategy.run` and changes variables; `--function NAME` chooses another."
    )
