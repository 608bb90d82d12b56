"""``replicax launch --workers 4 train.py``: start all workers of a cluster, and watch over them."""

import argparse
import json
import os
import secrets
import shlex
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from replicax.cli._gang import Gang, Plan, Worker
from replicax.cluster._errors import ClusterError
from replicax.cluster._facts import ClusterFacts
from replicax.workers._join import hub_options, start_hub
from replicax.workers._settings import HUB_VARIABLE, TOKEN_FILE_VARIABLE, Settings
from replicax.workers._wire import free_ports

_SHOWN = 20
_INTERRUPTED = 130
_LOOPBACK = "127.0.0.1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of this verb."""
    add = parser.add_argument
    add("--workers", type=int, required=True, metavar="N", help="how many, on all hosts together")
    add("--devices-per-worker", type=int, metavar="K", help="virtual CPU devices of each")
    add("--max-restarts", type=int, default=0, metavar="R", help="start all again so often")
    add("--hosts", metavar="H1,H2", help="the machines; run this command on each of them")
    add("--host-index", type=int, default=0, metavar="I", help="which of them this is, from 0")
    add("--port", type=int, metavar="P", help="the first port; needed with --hosts")
    add("--log-dir", type=Path, metavar="DIR", help="keep the output of each worker there")
    add("--grace", type=float, default=15.0, metavar="S", help="seconds to end by themselves")
    add("--env", action="append", default=[], metavar="K=V", help="for the workers; repeatable")
    add("--dry-run", action="store_true", help="show what would be started")
    add("-m", action="store_true", dest="is_module", help="the program is a module")
    add("program", help="the training program")
    add("arguments", nargs=argparse.REMAINDER, help="its own arguments")


def run(options: argparse.Namespace) -> int:
    """Launch, and restart if asked to.

    Returns:
        The exit code of the worker that failed first, or 0.
    """
    _check(options)
    attempt = 0
    while True:
        with tempfile.TemporaryDirectory(prefix="replicax-launch-") as folder:
            code = _attempt(options, attempt, Path(folder))
        if code in (0, _INTERRUPTED) or attempt == options.max_restarts:
            return code
        attempt += 1
        _say(f"starting all workers again (restart {attempt} of {options.max_restarts})")


def _attempt(options: argparse.Namespace, attempt: int, folder: Path) -> int:
    token = folder / "token"
    token.touch(mode=0o600)
    token.write_text(os.environ.get("REPLICAX_TOKEN") or _token(options))
    plans = _plans(options, attempt, token)
    if options.dry_run:
        _show(plans)
        return 0
    if options.host_index == 0:
        _start_hub(plans[0])
    if options.log_dir:
        options.log_dir.mkdir(parents=True, exist_ok=True)
    gang = Gang(plans, options.log_dir, sys.stdout)
    try:
        with _terminated_as_interrupt():
            culprit = gang.wait(options.grace)
    except KeyboardInterrupt as interrupt:
        _say("ending all workers")
        gang.end(options.grace, interrupt.args[0] if interrupt.args else signal.SIGINT)
        return _INTERRUPTED
    if culprit is None:
        return 0
    _report(culprit, gang.workers)
    return culprit.code


def _plans(options: argparse.Namespace, attempt: int, token: Path) -> list[Plan]:
    addresses = _addresses(options)
    each = options.workers // len(_hosts(options))
    own = range(options.host_index * each, (options.host_index + 1) * each)
    module = ["-m"] if options.is_module else []
    program = [*module, options.program, *options.arguments, *options.rest]
    common = {
        **os.environ,
        **dict(pair.split("=", 1) for pair in options.env),
        HUB_VARIABLE: addresses[0],
        TOKEN_FILE_VARIABLE: str(token),
        "REPLICAX_RESTART": str(attempt),
        "PYTHONUNBUFFERED": "1",
    }
    common.pop("REPLICAX_TOKEN", None)
    if options.devices_per_worker:
        common["REPLICAX_CPU_DEVICES"] = str(options.devices_per_worker)
    return [
        Plan(
            index,
            addresses[index],
            (sys.executable, *program),
            {**common, "TF_CONFIG": _tf_config(addresses, index)},
        )
        for index in own
    ]


def _hosts(options: argparse.Namespace) -> list[str]:
    hosts: list[str] = options.hosts.split(",") if options.hosts else [_LOOPBACK]
    return hosts


def _addresses(options: argparse.Namespace) -> list[str]:
    if not options.port:
        return [f"{_LOOPBACK}:{port}" for port in free_ports(options.workers)]
    hosts = _hosts(options)
    each = options.workers // len(hosts)
    return [f"{host}:{options.port + i}" for host in hosts for i in range(each)]


def _tf_config(addresses: list[str], index: int) -> str:
    task = {"type": "worker", "index": index}
    return json.dumps({"cluster": {"worker": addresses}, "task": task})


def _token(options: argparse.Namespace) -> str:
    # Launchers on several machines have no secret in common unless they are given one.
    return f"{options.hosts} {options.port}" if options.hosts else secrets.token_hex(32)


def _start_hub(plan: Plan) -> None:
    config = json.loads(plan.environment["TF_CONFIG"])
    facts = ClusterFacts.of_processes(
        0, tuple(config["cluster"]["worker"]), coordinator=plan.address, source="replicax launch"
    )
    settings = Settings.read(facts, plan.environment)
    if len(facts.addresses) > 1 and (
        fault := start_hub(hub_options(facts, settings, plan.address))
    ):
        raise ClusterError(
            f"The launcher cannot listen at {plan.address}: {fault}. Choose another --port, or"
            " check that the first of --hosts is this machine."
        )


def _check(options: argparse.Namespace) -> None:
    hosts = _hosts(options)
    faults = {
        "--workers must be at least 1": options.workers < 1,
        f"--workers {options.workers} cannot be divided evenly over {len(hosts)} hosts": (
            options.workers % len(hosts) != 0
        ),
        "--hosts needs --port, the same on all hosts": bool(options.hosts) and not options.port,
        f"--host-index {options.host_index} is not one of 0 to {len(hosts) - 1}": (
            not 0 <= options.host_index < len(hosts)
        ),
        "--env takes NAME=VALUE": any("=" not in pair for pair in options.env),
        "--max-restarts and --grace cannot be negative": (
            options.max_restarts < 0 or options.grace < 0
        ),
        "--devices-per-worker must be at least 1": (
            options.devices_per_worker is not None and options.devices_per_worker < 1
        ),
    }
    for fault, is_there in faults.items():
        if is_there:
            raise ClusterError(f"{fault}.")


def _show(plans: list[Plan]) -> None:
    for plan in plans:
        told = {
            name: plan.environment[name]
            for name in ("TF_CONFIG", "REPLICAX_CPU_DEVICES", HUB_VARIABLE)
            if name in plan.environment
        }
        words = [f"{name}={shlex.quote(value)}" for name, value in told.items()]
        sys.stdout.write(f"[worker {plan.index}] {' '.join(words)} {shlex.join(plan.command)}\n")


def _report(culprit: Worker, workers: list[Worker]) -> None:
    last = list(culprit.lines)[-_SHOWN:]
    if culprit.is_bystander:
        lines = [f"no worker of this machine failed by itself. {culprit.story().capitalize()}:"]
        lines += [f"    {culprit.blames}"]
    else:
        lines = [f"{culprit.story()}; it is the first that failed."]
        lines += ["Its last lines:" if last else "It wrote nothing."]
        lines += [f"    {line}" for line in last]
    lines += [f"Then {w.story()}." for w in workers if w is not culprit and w.process.returncode]
    _say("\n".join(lines))


def _say(text: str) -> None:
    sys.stderr.write(f"replicax launch: {text}\n")
    sys.stderr.flush()


@contextmanager
def _terminated_as_interrupt() -> Iterator[None]:
    """Treat SIGTERM like Ctrl-C, and hand the same signal on to the workers."""

    def interrupt(number: int, _: FrameType | None) -> None:
        raise KeyboardInterrupt(number)

    before = {n: signal.signal(n, interrupt) for n in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
