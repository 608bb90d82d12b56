"""What a process of run_in_processes does."""

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

from replicax.workers import _group


def main() -> None:
    """Make the call that the folder holds, and leave its outcome there."""
    folder, index = Path(sys.argv[1]), int(sys.argv[2])
    faulthandler.register(signal.SIGUSR1)
    told: dict[str, Any]
    try:
        call = pickle.loads((folder / "call").read_bytes())
        told = {"value": _function(call)(*call["args"])}
        packed = pickle.dumps(told)
    except BaseException as error:
        if (group := _group.current()) is not None:
            group.tell(error)
        packed = _packed(error)
        told = {}
    partial = folder / f"partial{index}"
    partial.write_bytes(packed)
    os.replace(partial, folder / f"result{index}")
    sys.exit(0 if told else 1)


def _function(call: dict[str, Any]) -> Any:
    if call["main"] is not None:
        names: Any = runpy.run_path(call["main"], run_name="__replicax_worker__")
        return functools.reduce(
            getattr, call["name"].split(".")[1:], names[call["name"].split(".")[0]]
        )
    module = importlib.import_module(call["module"])
    return functools.reduce(getattr, call["name"].split("."), module)


def _packed(error: BaseException) -> bytes:
    told: dict[str, Any] = {
        "error": error,
        "text": f"{type(error).__name__}: {error}",
        "traceback": "".join(traceback.format_exception(error)),
        "time": time.time(),
    }
    try:
        packed = pickle.dumps(told)
        pickle.loads(packed)
    except Exception:  # an error that cannot travel is told in words
        return pickle.dumps({**told, "error": None})
    return packed
