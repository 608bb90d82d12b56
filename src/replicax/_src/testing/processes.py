"""`run_in_processes`: run a function in several local processes that form a cluster.

`fault_point` marks places in the function where a test can inject a fault into a worker.
"""

import dataclasses
import json
import os
import pickle
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from replicax._src.base.errors import ReplicaxError
from replicax._src.cluster.checks import WorkerLostError
from replicax._src.cluster.detection import resolve_cluster
from replicax._src.workers.sessions import Guard, send
from replicax._src.workers.wire import free_ports

VARIABLE = "REPLICAX_FAULTS"

_passed: Counter[str] = Counter()


class InjectedFaultError(ReplicaxError, RuntimeError):
    """The exception that a fault of kind ``"raise"`` raises.

    Example:
        >>> issubclass(rx.testing.InjectedFaultError, RuntimeError)
        True
    """


@dataclass(frozen=True)
class Fault:
    """A fault to inject into a worker at a `fault_point`; an argument of `run_in_processes`.

    Args:
        point: The name of the fault point.
        worker: The index of the worker.
        count: The pass of the point, counted from 1, at which the fault is injected.
        kind: ``"kill"`` kills the process immediately, like the loss of a machine; ``"raise"``
            raises an `InjectedFaultError`; ``"exit"`` calls ``sys.exit(1)``; ``"hang"`` blocks the
            worker indefinitely.

    Raises:
        ValueError: The kind is unknown, or the count is not positive.

    Example:
        >>> rx.testing.Fault("after_step", worker=1, count=3)
        Fault(point='after_step', worker=1, count=3, kind='kill')
    """

    point: str
    worker: int = 0
    count: int = 1
    kind: str = "kill"

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise ValueError(f"kind={self.kind!r} is not one of {', '.join(map(repr, _KINDS))}.")
        if self.count < 1:
            raise ValueError(f"count={self.count} must be 1 or more: the first pass is 1.")


def fault_point(name: str) -> None:
    """Mark a place where a test can inject a `Fault`; outside of such a test, do nothing.

    Example:
        >>> rx.testing.fault_point("after_step")
    """
    if VARIABLE not in os.environ:
        return
    _passed[name] += 1
    for fields in json.loads(os.environ[VARIABLE]):
        fault = Fault(**fields)
        if (fault.point, fault.count) != (name, _passed[name]):
            continue
        if fault.worker == resolve_cluster().index:
            _KINDS[fault.kind](f"{fault} was injected here.")


def as_text(faults: Sequence[Fault]) -> str:
    """Serialize faults for the environment of a worker."""
    return json.dumps([dataclasses.asdict(fault) for fault in faults])


def _kill(text: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _raise(text: str) -> NoReturn:
    raise InjectedFaultError(text)


def _exit(text: str) -> NoReturn:
    sys.exit(1)


def _hang(text: str) -> NoReturn:
    while True:
        time.sleep(3600)


_KINDS: dict[str, Callable[[str], None]] = {
    "kill": _kill,
    "raise": _raise,
    "exit": _exit,
    "hang": _hang,
}


_GRACE = 10.0  # seconds for the other workers to end after one has failed
_DEVICE_COUNT = re.compile(r"--xla_force_host_platform_device_count[= ]\d+")
_OTHERS = (
    "TF_CONFIG",
    "SLURM_",
    "JAX_COORDINATOR_",
    "JAX_NUM_CPU_DEVICES",
    "REPLICAX_HUB",
    "REPLICAX_ALONE",
)


def run_in_processes(  # noqa: PLR0913 - five of them have a default
    fn: Callable[..., Any],
    n: int,
    devices_per_process: int = 1,
    *,
    args: Sequence[Any] = (),
    env: Mapping[str, str] | None = None,
    timeout: float = 120.0,
    faults: Sequence[Fault] = (),
) -> list[Any]:
    """Call ``fn(*args)`` in each of ``n`` new processes, the workers of one cluster.

    Inside, `rx.distribute.MultiWorkerMirroredStrategy()` finds the others. The processes use this
    machine's CPU and loopback address, and all have ended when this returns.

    Args:
        fn: An importable function, defined at the top level of a module.
        n: The number of workers.
        devices_per_process: The number of virtual CPU devices of each worker.
        args: The arguments of ``fn``, the same for all; arguments and results are pickled.
        env: Additional environment variables.
        timeout: Seconds after which the workers are killed.
        faults: Faults to inject at the `fault_point` calls of ``fn``.

    Returns:
        The results of all workers, in the order of the workers.

    Raises:
        Exception: The first exception that ``fn`` raised in a worker, with its traceback as a note.
        TimeoutError: The timeout has passed; the message has the stack of each worker.

    Example:
        >>> import os
        >>> rx.testing.run_in_processes(os.getenv, 2, 3, args=("REPLICAX_CPU_DEVICES",))
        ['3', '3']
    """
    with tempfile.TemporaryDirectory(prefix="replicax-test-") as name:
        folder = Path(name)
        (folder / "call").write_bytes(_packed(fn, args))
        addresses = [f"127.0.0.1:{port}" for port in free_ports(n)]
        common = {**_environment(devices_per_process), **(env or {})}
        common.setdefault("REPLICAX_TOKEN", secrets.token_hex(16))
        if faults:
            common[VARIABLE] = as_text(faults)
        processes: list[subprocess.Popen[bytes]] = []
        guard = Guard(0.0)
        try:
            guard.remove_later(folder)
            for index in range(n):
                environment = {**common, **_place(index, addresses)}
                processes.append(_started(folder, index, environment))
                guard.watch(processes[-1].pid)
            _wait(processes, folder, time.monotonic() + timeout, timeout)
            _end(processes)
            return _results(processes, folder)
        finally:
            _end(processes)
            guard.end()


def _packed(fn: Callable[..., Any], args: Sequence[Any]) -> bytes:
    module, name = getattr(fn, "__module__", None), getattr(fn, "__qualname__", "")
    if not module or "<" in name:
        raise ValueError(
            f"run_in_processes needs a function that a new process can import, got {fn!r}. Define"
            " it at the top level of a module, not inside another function, and pass its inputs in"
            " `args`."
        )
    main = getattr(sys.modules["__main__"], "__file__", None) if module == "__main__" else None
    return pickle.dumps({"module": module, "name": name, "main": main, "args": tuple(args)})


def _environment(devices: int) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(_OTHERS)}
    kept["XLA_FLAGS"] = _DEVICE_COUNT.sub("", kept.get("XLA_FLAGS", "")).strip()
    kept["PYTHONPATH"] = os.pathsep.join(p or os.getcwd() for p in sys.path)
    return {
        **kept,
        "REPLICAX_CPU_DEVICES": str(devices),
        "JAX_PLATFORMS": "cpu",
        "PYTHONFAULTHANDLER": "1",
    }


def _place(index: int, addresses: list[str]) -> dict[str, str]:
    if len(addresses) == 1:
        return {}
    task = {"type": "worker", "index": index}
    return {"TF_CONFIG": json.dumps({"cluster": {"worker": addresses}, "task": task})}


def _started(folder: Path, index: int, env: dict[str, str]) -> subprocess.Popen[bytes]:
    with (folder / f"output{index}").open("wb") as output:
        return subprocess.Popen(
            [
                *(sys.executable, "-c", "from replicax._src.testing.child import main; main()"),
                *(str(folder), str(index)),
            ],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # to kill it together with its child processes
        )


def _wait(
    processes: list[subprocess.Popen[bytes]], folder: Path, deadline: float, timeout: float
) -> None:
    failed_at: float | None = None
    while any(p.poll() is None for p in processes):
        now = time.monotonic()
        if failed_at is None and any(p.poll() not in (None, 0) for p in processes):
            failed_at = now
        if failed_at is not None and now - failed_at > _GRACE:
            return
        if now > deadline:
            raise TimeoutError(_stacks(processes, folder, timeout))
        time.sleep(0.02)


def _stacks(processes: list[subprocess.Popen[bytes]], folder: Path, timeout: float) -> str:
    late = [i for i, p in enumerate(processes) if p.poll() is None]
    for i in late:
        processes[i].send_signal(signal.SIGUSR1)
    time.sleep(1.0)
    shown = "\n".join(f"Worker {i}:\n{_output(folder, i)}" for i in late)
    return (
        f"Workers {late} did not end within {timeout:g} s. Their last output and stacks:\n{shown}"
    )


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    """Kill the processes that still run, with their child processes."""
    for process in processes:
        if process.poll() is None:
            send(signal.SIGKILL, [process.pid])
        process.wait()


def _results(processes: list[subprocess.Popen[bytes]], folder: Path) -> list[Any]:
    results: list[Any] = []
    failures: list[tuple[bool, float, int, BaseException]] = []
    for index, process in enumerate(processes):
        path = folder / f"result{index}"
        outcome = pickle.loads(path.read_bytes()) if path.exists() else None
        if outcome is not None and "value" in outcome:
            results.append(outcome["value"])
            continue
        error = _error(outcome, index, process.returncode, folder)
        when = outcome["time"] if outcome is not None else path.parent.stat().st_mtime
        failures.append((isinstance(error, WorkerLostError), when, index, error))
    if failures:
        # A worker that only reports the loss of another one is not the cause.
        raise min(failures, key=lambda f: f[:3])[3]
    return results


def _error(outcome: Any, index: int, code: int, folder: Path) -> BaseException:
    if outcome is None:
        how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        return ReplicaxError(
            f"Worker {index} ended {how} and returned nothing. Its last output:\n"
            + _output(folder, index)
        )
    error: BaseException = outcome["error"]
    if not isinstance(error, Exception):  # it could not be pickled, or would end the caller
        error = ReplicaxError(f"Worker {index} raised {outcome['text']}")
    error.add_note(f"Raised in worker {index}:\n{outcome['traceback']}")
    return error


def _output(folder: Path, index: int, lines: int = 40) -> str:
    text = (folder / f"output{index}").read_text(errors="replace")
    return "\n".join(text.splitlines()[-lines:])
