"""``replicax launch --workers 4 train.py``: start and supervise the workers of a cluster."""

import argparse
import contextlib
import json
import os
import secrets
import shlex
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from replicax._src.base.lazy import LazyModule
from replicax._src.cli import ssh
from replicax._src.cli.council_seat import CouncilSeat
from replicax._src.cli.gang import Gang, GangPlan, Log, Worker
from replicax._src.cli.membership import Membership
from replicax._src.cli.report import Reporter
from replicax._src.cluster.checks import ClusterError, parse_address
from replicax._src.cluster.detection import ALONE, others
from replicax._src.cluster.spec import ClusterFacts
from replicax._src.files.paths import local_file
from replicax._src.workers import leases, run_registry
from replicax._src.workers.join import HubProcess, hub_options, statuses
from replicax._src.workers.run_registry import FOLDER, TOKEN_FILE
from replicax._src.workers.sessions import Guard
from replicax._src.workers.settings import (
    HUB_VARIABLE,
    JOIN_VARIABLE,
    METRICS_VARIABLE,
    TOKEN_FILE_VARIABLE,
    TOO_FEW,
    Settings,
    read_token,
)
from replicax._src.workers.wire import WireError, free_ports

if TYPE_CHECKING:
    from replicax._src.cli import top
else:
    top = LazyModule("replicax._src.cli.top")  # needed for --join only

_SHOWN = 20
_SHOWN_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "CUDA_VISIBLE_DEVICES",
    "REPLICAX_CPU_DEVICES",
)
_QUICK_FAILURE = 3.0  # seconds; failures faster than this increase the pause before a restart
_LONGEST_PAUSE = 30.0
_OTHER_HOSTS = 60.0  # seconds for the workers of other hosts to learn of a failure
_LOOPBACK = "127.0.0.1"
_PROGRAMS = "JAX_COMPILATION_CACHE_DIR"
_GPUS = "CUDA_VISIBLE_DEVICES"
# glibc returns blocks of more than 32 MiB to the kernel and maps new ones every time. This tunable
# makes it request huge pages where available, with 500 times fewer page faults. Versions before
# 2.35 ignore it.
WORKERS_MEMORY = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"} if sys.platform == "linux" else {}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this subcommand."""
    add = parser.add_argument
    add("--workers", required=True, metavar="N", help="workers on all hosts, or MIN:MAX of them")
    add("--min-workers", type=int, metavar="N", help="the fewest workers to restart with")
    add("--elastic", action="store_true", help="go on without a lost worker, and let it join again")
    add("--join", metavar="PID", help="add workers to the elastic run of this launcher")
    add(
        "--wait",
        type=float,
        default=60.0,
        metavar="S",
        help="seconds for which fewer than MIN workers of an elastic run wait for others",
    )
    add("--devices-per-worker", type=int, metavar="K", help="virtual CPU devices of each worker")
    add("--gpus-per-worker", type=int, metavar="N", help="GPUs of each; by default an equal share")
    add(
        "--max-restarts", type=int, default=0, metavar="R", help="restart all workers up to R times"
    )
    add("--hosts", metavar="H1,H2", help="the machines; run this command on each of them")
    add("--host-index", type=int, default=0, metavar="I", help="the index of this host, from 0")
    add("--ssh", action="store_true", help="run this command on all --hosts over ssh")
    add("--remote", action="store_true", help=argparse.SUPPRESS)  # added by --ssh, on each host
    add("--port", type=int, metavar="P", help="the first port; needed with --hosts")
    add(
        "--token-file",
        type=local_file,
        metavar="F",
        help="the run's shared secret; needed with --hosts",
    )
    add("--metrics-port", type=int, metavar="P", help="serve Prometheus metrics at this port")
    add("--log-dir", type=local_file, metavar="DIR", help="write the output of each worker there")
    add(
        "--grace", type=float, default=15.0, metavar="S", help="seconds to exit before being killed"
    )
    add("--env", action="append", default=[], metavar="K=V", help="for the workers; repeatable")
    add(
        "--report",
        type=local_file,
        metavar="FILE",
        help="at the end, write an HTML report of the run",
    )
    add("--dry-run", action="store_true", help="show the commands without running them")
    add("-m", action="store_true", dest="is_module", help="the program is a module")
    add("program", help="the training program")
    add("arguments", nargs=argparse.REMAINDER, help="the program's arguments")


def run(options: argparse.Namespace) -> int:
    """Launch the workers, and restart them up to ``--max-restarts`` times.

    Returns:
        The exit code of the worker that failed first, or 0; 128 plus the signal that ended the
        launcher.
    """
    if options.join is not None:
        return _join(options)
    options.members = Membership.of(options.workers, options.min_workers, len(_all_hosts(options)))
    _check(options)
    if options.dry_run and options.ssh and not options.remote:
        sys.stdout.writelines(f"{shlex.join(c)}\n" for c in ssh.remote_commands(options))
        return 0
    if options.dry_run:
        _show(_plans(options, 0, Path("TOKEN")))
        return 0
    _require_only_launcher(options)
    try:
        options.warning = _Warning()
        if options.ssh and not options.remote:
            with _signals_as_interrupts(options.warning):
                return ssh.launch(options, _configured_token(options))
        with _signals_as_interrupts(options.warning), _guarded(options.grace) as (guard, folder):
            options.token = _token(options)
            with _reported(options) as reporter:
                return _attempts(options, guard, folder, reporter)
    except KeyboardInterrupt as interrupt:
        return 128 + (interrupt.args[0] if interrupt.args else signal.SIGINT)


def _require_only_launcher(options: argparse.Namespace) -> None:
    """Raise if another launcher starts this one several times, each with a model of its own."""
    if not options.hosts and (found := others(is_launcher=True)):
        raise ClusterError(
            "This `replicax launch` seems to be one of several processes, each of which would train"
            f" a model of its own with --workers {options.workers}. {found} To train one model,"
            " start the program without `replicax launch`, or give all launchers the same --hosts"
            f" and --port and each its --host-index. For separate models set {ALONE}=1."
        )


@contextmanager
def _guarded(grace: float) -> Iterator[tuple[Guard, Path]]:
    """Yield a guard and a run folder; the guard removes both workers and folder at the end.

    It does so however the launcher ends, even if it is killed.
    """
    guard = Guard(grace)
    try:
        # Register the folder before it exists, so that it is removed in any case.
        folder = run_registry.temporary_folder() / f"{FOLDER}{secrets.token_hex(8)}"
        guard.remove_later(folder)
        yield guard, folder
    finally:
        guard.end()


@contextmanager
def _reported(options: argparse.Namespace) -> Iterator[Reporter | None]:
    """Yield a reporter if the user asked for a report, and write its page even after an error."""
    if options.report is None:
        yield None
        return
    reporter = Reporter(options.report, options.program)
    try:
        reporter.write()  # fail now, not at the end, if the path is not writable
    except OSError as error:
        raise ClusterError(
            f"--report {options.report} cannot be written: {error.strerror}. Give a file in a"
            " folder that exists and is yours."
        ) from error
    try:
        yield reporter
    finally:
        with contextlib.suppress(OSError):
            reporter.write()
            _say(f"wrote {options.report}")


def _join(options: argparse.Namespace) -> int:
    """Start workers that join a running elastic run; return their exit code."""
    _check_join(options)
    chosen = top.find_run(options.join)
    status = top.current_status(chosen)
    workers = {int(row["index"]): row for row in status["workers"]}
    free = [i for i in range(status["most"]) if workers[i]["state"] not in ("here", "joining")]
    if len(free) < int(options.workers):
        raise ClusterError(
            f"The run of process {options.join} has room for {len(free)} worker(s), not"
            f" {options.workers}: it is elastic with at most {status['most']}, as --workers MIN:MAX"
            " of its launcher says."
            if status["most"]
            else f"The run of process {options.join} was not started with --elastic."
        )
    options.members = Membership.of(str(status["most"]), None, 1)
    addresses = [chosen.address, *(workers[i]["address"] for i in range(1, status["most"]))]
    options.warning = _Warning()
    try:
        with _signals_as_interrupts(options.warning), _guarded(options.grace) as (guard, folder):
            run_registry.write_token(chosen.token, folder)
            plans = _plans(options, 0, folder / TOKEN_FILE, addresses)
            plans = [_joining(plans[i]) for i in free[: int(options.workers)]]
            gang = Gang(
                plans,
                [_log(options.log_dir, plan, ".join") for plan in plans],
                guard,
                leases=folder,
                least=1,
                waits=True,
                is_whole=False,
            )
            try:
                options.warning.pass_on(gang)
                culprit = gang.wait(options.grace)
            except KeyboardInterrupt as interrupt:
                _end(gang, options.grace, interrupt)
                raise
            if culprit:
                _say(_story(culprit, gang.workers))
            return culprit.code if culprit else 0
    except KeyboardInterrupt as interrupt:
        return 128 + (interrupt.args[0] if interrupt.args else signal.SIGINT)


def _joining(plan: GangPlan) -> GangPlan:
    return replace(plan, environment={**plan.environment, JOIN_VARIABLE: "1"})


def _check_join(options: argparse.Namespace) -> None:
    """Raise for options that do not apply to workers that join."""
    others = {
        "--elastic": options.elastic,
        "--hosts": options.hosts,
        "--ssh": options.ssh,
        "--port": options.port,
        "--token-file": options.token_file,
        "--min-workers": options.min_workers,
        "--max-restarts": options.max_restarts,
        "--metrics-port": options.metrics_port,
        "--report": options.report,
        "--dry-run": options.dry_run,
    }
    if given := [name for name, value in others.items() if value]:
        raise ClusterError(f"--join takes the run as it is: omit {', '.join(given)}.")
    if not options.workers.isdecimal() or int(options.workers) < 1:
        raise ClusterError("--join needs the number of workers to add: --workers 1.")
    if not _exists(options):
        raise ClusterError(f"There is no program {options.program!r}; a module needs -m.")


def _attempts(
    options: argparse.Namespace, guard: Guard, folder: Path, reporter: Reporter | None
) -> int:
    """Run the workers until they succeed, or no restart is left."""
    failures, attempt = 0, 0  # failures: how many in a row were quick
    while True:
        began = time.monotonic()
        options.may_restart = attempt < options.max_restarts
        code = _attempt(options, attempt, guard, folder, reporter)
        if code == 0 or not options.may_restart:
            return code
        attempt += 1
        failures = failures + 1 if time.monotonic() - began < _QUICK_FAILURE else 0
        pause = min(_LONGEST_PAUSE, 2.0 ** (failures - 1) - 1) if failures else 0.0
        after = f" in {pause:g} s" if pause else ""
        _say(f"starting all workers again{after} (restart {attempt} of {options.max_restarts})")
        time.sleep(pause)


def _attempt(
    options: argparse.Namespace, attempt: int, guard: Guard, folder: Path, reporter: Reporter | None
) -> int:
    """Run the workers once; return the exit code."""
    run_registry.write_token(options.token, folder)
    plans = _plans(options, attempt, folder / TOKEN_FILE)
    logs = _logs(options.log_dir, plans, attempt)
    is_first = options.host_index == 0 and options.members.size > 1
    hub = _start_hub(plans[0], options) if is_first else None
    address = plans[0].environment[HUB_VARIABLE]
    run_registry.note(folder, address, options.program, run_registry.BY_LAUNCHER, os.getpid())
    if reporter is not None:
        reporter.begin(address, (folder / TOKEN_FILE).read_text())
    code, story, is_over = 0, "", False
    seat = _seat(options, address)
    go_on = partial(_go_on_without, options, address)
    try:
        several = len(_hosts(options)) > 1
        if several and not is_first and go_on([]):
            plans = [_joining(plan) for plan in plans]  # this launcher was started again
        gang = Gang(
            plans,
            logs,
            guard,
            _exit_reporter(hub, seat),
            folder,
            _least_here(options),
            waits=options.wait > 0,
            is_whole=is_first or not options.elastic,
            others=go_on,
            rejoins=options.max_restarts,
            new_log=lambda plan, count: _log(
                options.log_dir, plan, f"{_suffix(attempt)}.join-{count}"
            ),
        )
        try:
            options.warning.pass_on(gang)
            _require_hub(hub, gang, plans[0])
            culprit = gang.wait(options.grace)
        except KeyboardInterrupt as interrupt:
            _end(gang, options.grace, interrupt)
            options.may_restart = False
            _agree(seat, options, 128 + (interrupt.args[0] if interrupt.args else signal.SIGINT))
            _wait_for_others(hub, options, has_failed=True)  # other hosts need the hub to save
            raise
        code, story = _settle(culprit, gang, hub, seat, options)
        _warn_of_separate(gang, options.members.size, folder)
        is_over = True
    finally:
        for part in (seat, hub):
            if part is not None:
                part.end()
        if reporter is not None:
            reporter.end(code if is_over else None, story)
    if story:
        _say(story)
    return code


def _settle(
    culprit: Worker | None,
    gang: Gang,
    hub: HubProcess | None,
    seat: CouncilSeat | None,
    options: argparse.Namespace,
) -> tuple[int, str]:
    """Settle what follows when no worker of this launcher is left; return exit code and story."""
    code, story = (culprit.code, _story(culprit, gang.workers)) if culprit else (0, "")
    address = gang.workers[0].plan.environment[HUB_VARIABLE]
    is_left = culprit is not None and _go_on_without(options, address, gang.workers)
    options.may_restart = options.may_restart and not is_left
    story += _agree(seat, options, code) + _leave_out(culprit, gang, options)
    if hub is not None and is_left:
        hub.wait(None)
    _wait_for_others(hub, options, has_failed=culprit is not None)
    return code, story


def _least_here(options: argparse.Namespace) -> int:
    """Return the fewest workers of this host that go on without the others; 0 if all end."""
    if not options.elastic:
        return 0
    # The run may go on with the workers of any host.
    return 1 if len(_hosts(options)) > 1 else int(options.members.least)


def _go_on_without(options: argparse.Namespace, address: str, mine: Collection[Worker]) -> bool:
    """Whether workers other than ``mine`` take part in the elastic run with its hub there."""
    if not options.elastic:
        return False
    own = {(worker.plan.index, worker.process.pid) for worker in mine}
    with contextlib.suppress(OSError, ClusterError, WireError, StopIteration):
        status = next(statuses(address, options.token))
        here = {(row["index"], row["pid"]) for row in status["workers"] if row["state"] == "here"}
        return bool(status["membership"] and here - own)
    return False


def _seat(options: argparse.Namespace, address: str) -> CouncilSeat | None:
    """Join the agreement among the launchers, if there are several hosts."""
    several = len(_hosts(options)) > 1
    return CouncilSeat(address, options.token, _position(options)) if several else None


def _exit_reporter(hub: HubProcess | None, seat: CouncilSeat | None) -> Callable[[str], None]:
    """Return a callback that reports a worker's exit to the hub, on this host or another."""
    if hub is not None:
        return hub.report_exit
    return seat.report_exit if seat is not None else lambda story: None


def _agree(seat: CouncilSeat | None, options: argparse.Namespace, code: int) -> str:
    """Agree with the other launchers on whether to restart; return a message to print."""
    is_final = code == TOO_FEW or bool(options.warning.number)
    options.may_restart = bool(code and options.may_restart and not is_final)
    if seat is None:
        return ""
    would = options.may_restart
    why, hosts = seat.decide(code, again=would)
    options.may_restart = not why
    if would and why:
        return f"\nNot starting the workers again: {why}."
    without = "" if why or hosts is None else options.members.keep_hosts(hosts)
    return f"\n{without.capitalize()}." if without else ""


def _leave_out(first: Worker | None, gang: Gang, options: argparse.Namespace) -> str:
    """Leave out a worker that keeps failing, if there is a restart; return a message to print."""
    if first is None or not options.may_restart:
        return ""
    position = gang.workers.index(_culprit(first, gang.workers))
    without = options.members.blame(options.members.slots[position])
    return f"\n{without.capitalize()}." if without else ""


def _warn_of_separate(gang: Gang, size: int, folder: Path) -> None:
    """Warn if workers have completed the program without looking for the others."""
    done = [w for w in gang.workers if w.process.returncode == 0]
    alone = [w for w in done if not leases.has_looked(folder, w.process.pid)]
    if alone and size > 1:
        _say(
            f"WARNING: {len(alone)} of {size} workers have completed the program"
            " without a strategy that connects them. If it trains, each has trained a separate"
            " model. For one model, create rx.distribute.MultiWorkerMirroredStrategy() first, and"
            " the model in its scope; for separate ones, write alone=True."
        )


def _end(gang: Gang, grace: float, interrupt: KeyboardInterrupt) -> None:
    """End the workers after an interrupt; a second interrupt kills them."""
    _say("ending all workers; a second signal ends them at once")
    try:
        gang.end(grace, interrupt.args[0] if interrupt.args else signal.SIGINT)
    except KeyboardInterrupt:
        gang.end(0.0)
    for worker in gang.workers:
        if worker.kill_reason:
            _say(f"{worker.story()}.")


def _wait_for_others(
    hub: HubProcess | None, options: argparse.Namespace, *, has_failed: bool
) -> None:
    """Keep the hub running for the workers of other hosts."""
    if hub is not None and options.hosts:
        hub.wait(_OTHER_HOSTS if has_failed else None)


def _logs(folder: Path | None, plans: list[GangPlan], attempt: int) -> list[Log]:
    """Open a log for each worker; the logs of earlier attempts are kept."""
    return [_log(folder, plan, _suffix(attempt)) for plan in plans]


def _suffix(attempt: int) -> str:
    return f".restart-{attempt}" if attempt else ""


def _log(folder: Path | None, plan: GangPlan, suffix: str) -> Log:
    """Open the log of one worker."""
    if folder is None:
        return Log(None)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return Log(folder / f"worker-{plan.index}{suffix}.log")
    except OSError as error:
        raise ClusterError(
            f"--log-dir {folder} cannot be written to: {error.strerror}. Give a folder of your own,"
            " or one that does not exist yet."
        ) from error


def _plans(
    options: argparse.Namespace, attempt: int, token: Path, addresses: list[str] | None = None
) -> list[GangPlan]:
    """Return the command and environment of each worker of this host."""
    addresses = _addresses(options) if addresses is None else addresses
    slots, position = options.members.slots, _position(options)
    each = len(slots)
    indices = range(position * each, (position + 1) * each)
    module = ["-m"] if options.is_module else []
    program = [*module, options.program, *options.arguments, *options.rest]
    common = {
        **WORKERS_MEMORY,
        **{name: value for name, value in os.environ.items() if name != ALONE},
        **dict(pair.split("=", 1) for pair in options.env),
        HUB_VARIABLE: addresses[0],
        TOKEN_FILE_VARIABLE: str(token),
        "REPLICAX_RESTART": str(attempt),
        leases.VARIABLE: str(token.parent),
        "PYTHONUNBUFFERED": "1",
    }
    common.pop("REPLICAX_TOKEN", None)
    if options.max_restarts and not options.hosts and _PROGRAMS not in common:
        # Reuse compiled programs after a restart. Not on several hosts: their caches would differ,
        # and workers that must compile together would not all do so.
        common[_PROGRAMS] = str(token.parent / "compiled")
        common.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    if options.metrics_port is not None:
        common[METRICS_VARIABLE] = str(options.metrics_port)
    if options.devices_per_worker:
        common["REPLICAX_CPU_DEVICES"] = str(options.devices_per_worker)
    return [
        GangPlan(
            index,
            addresses[index],
            (sys.executable, *program),
            {
                **common,
                "TF_CONFIG": _tf_config(addresses, index),
                **_ranks(index, local, options.members.size, each),
                **_gpus(options.gpus_per_worker, slots[local], common),
            },
        )
        for local, index in enumerate(indices)
    ]


def _ranks(index: int, local: int, workers: int, local_workers: int) -> dict[str, str]:
    """Return the variables of PyTorch's launchers, which many programs and tools read."""
    return {
        "RANK": str(index),
        "LOCAL_RANK": str(local),
        "WORLD_SIZE": str(workers),
        "LOCAL_WORLD_SIZE": str(local_workers),
    }


def _gpus(count: int | None, local: int, common: dict[str, str]) -> dict[str, str]:
    """Return the variable that shows a worker its own GPUs only, if ``count`` is given."""
    if count is None:
        return {}
    shown = common.get(_GPUS)
    known = [name.strip() for name in shown.split(",") if name.strip()] if shown else None
    mine = range(local * count, (local + 1) * count)
    if known is not None and mine.stop > len(known):
        raise ClusterError(
            f"--gpus-per-worker {count} gives worker {local} of this machine the GPUs {mine.start}"
            f" to {mine.stop - 1}, but {_GPUS}={shown} shows {len(known)}. Start fewer workers,"
            " give each fewer GPUs, or show more."
        )
    return {_GPUS: ",".join(known[i] if known is not None else str(i) for i in mine)}


def _hosts(options: argparse.Namespace) -> list[str]:
    """Return the hosts that take part in the next attempt."""
    hosts = _all_hosts(options)
    return [hosts[i] for i in options.members.hosts]


def _position(options: argparse.Namespace) -> int:
    """Return the position of this host among those that take part."""
    position: int = options.members.hosts.index(options.host_index)
    return position


def _all_hosts(options: argparse.Namespace) -> list[str]:
    hosts: list[str] = options.hosts.split(",") if options.hosts else [_LOOPBACK]
    hosts = [host.rpartition("@")[2] for host in hosts]  # --ssh takes user@host
    return [f"[{h}]" if ":" in h and not h.startswith("[") else h for h in hosts]


def _addresses(options: argparse.Namespace) -> list[str]:
    if options.port is None:
        return [f"{_LOOPBACK}:{port}" for port in free_ports(options.members.size)]
    each = len(options.members.slots)
    return [f"{host}:{options.port + i}" for host in _hosts(options) for i in range(each)]


def _tf_config(addresses: list[str], index: int) -> str:
    task = {"type": "worker", "index": index}
    return json.dumps({"cluster": {"worker": addresses}, "task": task})


def _configured_token(options: argparse.Namespace) -> str | None:
    """Return the user's token, or None; warn if others can read its file."""
    environment = dict(os.environ)
    if options.token_file:
        environment = {TOKEN_FILE_VARIABLE: str(options.token_file)}
    token = read_token(environment)
    if (path := environment.get(TOKEN_FILE_VARIABLE)) and local_file(path).stat().st_mode & 0o077:
        _say(f"others on this machine can read the token in {path}: `chmod 600 {path}`")
    return token


def _token(options: argparse.Namespace) -> str:
    """Return the token of this run: a configured one, or a new one."""
    token = ssh.read_starter_token() if options.remote else _configured_token(options)
    if token is None and options.hosts:
        raise ClusterError(
            "The launchers of several machines need a shared secret, so that no one else can join"
            " or end the run. Make one, with `python -c 'import secrets;"
            " print(secrets.token_hex())' > token`, copy it to each machine (`chmod 600 token`),"
            " and add `--token-file token`; or set REPLICAX_TOKEN there; or let `--ssh` start all."
        )
    return token or secrets.token_hex(32)


def _start_hub(plan: GangPlan, options: argparse.Namespace) -> HubProcess:
    """Start the hub with the settings in the first worker's environment."""
    config = json.loads(plan.environment["TF_CONFIG"])
    facts = ClusterFacts.of_processes(
        0, tuple(config["cluster"]["worker"]), coordinator=plan.address, source="replicax launch"
    )
    settings = Settings.read(facts, plan.environment)
    hub = hub_options(facts, settings, plan.address, "the launcher")
    hosts, members = _hosts(options), options.members
    hub = replace(
        hub,
        hosts=tuple(hosts) if len(hosts) > 1 else (),
        least_workers=members.least if options.elastic else 0,
        wait=options.wait,
        least_hosts=members.least_hosts if members.may_shrink else 0,
    )
    try:
        return HubProcess(hub)
    except OSError as error:
        raise _no_hub(plan, error.strerror or str(error)) from error


def _require_hub(hub: HubProcess | None, gang: Gang, plan: GangPlan) -> None:
    """Check that the hub is up. Call after launching the workers, which start concurrently."""
    if hub is not None and (fault := hub.fault()):
        gang.end(0.0)
        raise _no_hub(plan, fault)


def _no_hub(plan: GangPlan, fault: str) -> ClusterError:
    return ClusterError(
        f"The launcher cannot listen at {plan.address}: {fault}. Choose another --port, or check"
        " that the first of --hosts is this machine."
    )


def _check(options: argparse.Namespace) -> None:
    """Raise for options that are invalid or contradict each other."""
    hosts = _hosts(options)
    members = options.members
    faults = {
        f"{members.least} to {members.size} workers are for restarts: add --max-restarts": (
            members.may_shrink and options.max_restarts == 0 and not options.elastic
        ),
        "--elastic needs the fewest workers to go on with: --workers MIN:MAX": (
            options.elastic
            and members.size > 1
            and ":" not in options.workers
            and options.min_workers is None
        ),
        "--elastic cannot serve metrics: omit --metrics-port": (
            options.elastic and options.metrics_port is not None
        ),
        "--ssh needs --hosts, and --host-index must not be given with it": options.ssh
        and (not options.hosts or (bool(options.host_index) and not options.remote)),
        "--hosts needs --port, the same on all hosts": bool(options.hosts) and options.port is None,
        f"--host-index {options.host_index} is not one of 0 to {len(hosts) - 1}": (
            not 0 <= options.host_index < len(hosts)
        ),
        "--env takes NAME=VALUE": any("=" not in pair for pair in options.env),
        "--max-restarts, --grace and --wait cannot be negative": (
            options.max_restarts < 0 or options.grace < 0 or options.wait < 0
        ),
        "--devices-per-worker must be at least 1": (
            options.devices_per_worker is not None and options.devices_per_worker < 1
        ),
        "--gpus-per-worker must be at least 1": (
            options.gpus_per_worker is not None and options.gpus_per_worker < 1
        ),
    }
    for fault, is_there in faults.items():
        if is_there:
            raise ClusterError(f"{fault}.")
    for index, address in enumerate(_addresses(options) if options.port is not None else ()):
        parse_address(address, f"By --port and --hosts, worker {index}")
    if not _exists(options):
        raise ClusterError(f"There is no program {options.program!r}; a module needs -m.")


def _exists(options: argparse.Namespace) -> bool:
    """Whether the program's file exists; True if that is unknown (modules, ssh, dry runs)."""
    is_elsewhere = options.ssh and not options.remote
    if options.is_module or options.dry_run or is_elsewhere:
        return True
    return Path(options.program).exists()


def _show(plans: list[GangPlan]) -> None:
    for plan in plans:
        variables = {
            name: plan.environment[name]
            for name in ("TF_CONFIG", *_SHOWN_VARIABLES, HUB_VARIABLE, *WORKERS_MEMORY)
            if name in plan.environment
        }
        words = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
        sys.stdout.write(f"[worker {plan.index}] {' '.join(words)} {shlex.join(plan.command)}\n")


def _story(first: Worker, workers: list[Worker]) -> str:
    """Describe which worker failed first, with its last output, and how the others ended."""
    culprit = _culprit(first, workers)
    blamed = culprit if culprit is not first else None
    last = list(culprit.lines)[-_SHOWN:]
    if blamed:
        lines = [f"{blamed.story()}.", f"{first.story().capitalize()}:", f"    {first.blames}"]
    elif first.blames:
        lines = [f"no worker of this machine failed by itself. {first.story().capitalize()}:"]
        lines += [f"    {first.blames}"]
    else:
        lines = [f"{first.story()}; it is the first that failed."]
        lines += ["Its last lines:" if last else "It wrote nothing."]
        lines += [f"    {line}" for line in last]
    others = [w for w in workers if w not in (culprit, first) and w.code]
    lines += [f"Then {w.story()}." for w in others]
    return "\n".join(lines)


def _culprit(first: Worker, workers: list[Worker]) -> Worker:
    """Return the worker that broke the attempt: ``first``, or the stuck one that it blames."""
    blamed = (w for w in workers if w.plan.index == first.blamed and w.kill_reason)
    return next(blamed, first)


def _say(text: str) -> None:
    sys.stderr.write(f"replicax launch: {text}\n")
    sys.stderr.flush()


class _Warning:
    """A handler that forwards SIGUSR1 or SIGUSR2, Slurm's advance warning, to the workers.

    Workers that save exit afterwards, and the launcher does not restart them.
    """

    def __init__(self) -> None:
        self.number = 0
        self._gang: Gang | None = None

    def pass_on(self, gang: Gang) -> None:
        """Forward the signal to the workers of ``gang``, at once if it has arrived already."""
        self._gang = gang
        if self.number:
            gang.notify(self.number)

    def __call__(self, number: int, _: FrameType | None) -> None:
        """Handle the signal."""
        self.number = number
        if self._gang is not None:
            self._gang.notify(number)


@contextmanager
def _signals_as_interrupts(warning: _Warning) -> Iterator[None]:
    """Treat SIGTERM and SIGHUP like Ctrl-C, with the signal's number as the argument."""

    def interrupt(number: int, _: FrameType | None) -> None:
        raise KeyboardInterrupt(number)

    warnings = (signal.SIGUSR1, signal.SIGUSR2)
    ends = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = {n: signal.getsignal(n) for n in (*ends, *warnings)}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:  # `nohup` ignores SIGHUP
            signal.signal(number, warning if number in warnings else interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
