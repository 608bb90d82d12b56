"""The entry point of the processes that `run_in_processes` starts."""

import faulthandler
import functools
import importlib
import os
import pickle
import runpy
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from replicax._src.workers import group as _group


def main() -> None:
    """Run the pickled call in the folder ``argv[1]``, and write its pickled outcome there."""
    folder, index = Path(sys.argv[1]), int(sys.argv[2])
    faulthandler.register(signal.SIGUSR1)
    outcome: dict[str, Any]
    try:
        call = pickle.loads((folder / "call").read_bytes())
        outcome = {"value": _function(call)(*call["args"])}
        packed = pickle.dumps(outcome)
    except BaseException as error:
        if (group := _group.current()) is not None:
            group.report_failure(error)
        packed = _packed(error)
        outcome = {}
    partial = folder / f"partial{index}"
    partial.write_bytes(packed)
    os.replace(partial, folder / f"result{index}")
    sys.exit(0 if outcome else 1)


def _function(call: dict[str, Any]) -> Any:
    if call["main"] is not None:
        names: Any = runpy.run_path(call["main"], run_name="__replicax_worker__")
        return functools.reduce(
            getattr, call["name"].split(".")[1:], names[call["name"].split(".")[0]]
        )
    module = importlib.import_module(call["module"])
    return functools.reduce(getattr, call["name"].split("."), module)


def _packed(error: BaseException) -> bytes:
    outcome: dict[str, Any] = {
        "error": error,
        "text": f"{type(error).__name__}: {error}",
        "traceback": "".join(traceback.format_exception(error)),
        "time": time.time(),
    }
    try:
        packed = pickle.dumps(outcome)
        pickle.loads(packed)
    except Exception:  # an error that cannot be pickled is sent as text only
        return pickle.dumps({**outcome, "error": None})
    return packed
