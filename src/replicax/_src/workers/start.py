"""Startup of a worker: join the cluster, then initialize JAX across all of its processes."""

import contextlib
import json
import logging
import secrets
import socket
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import numpy as np

from replicax._src.base import cores
from replicax._src.base.errors import ScopeError
from replicax._src.base.fault_points import fault_point
from replicax._src.base.output import GLOO_GREETING, filter_output
from replicax._src.cluster.checks import RollCallError, WorkerLostError
from replicax._src.cluster.spec import ClusterFacts
from replicax._src.compat.jax import (
    backend_is_initialized,
    connect_distributed,
    disconnect_distributed,
    keep_programs_of_all,
    reset_backends,
    share_text,
)
from replicax._src.workers import elastic, gpus, sockets
from replicax._src.workers import group as _group
from replicax._src.workers import wire as _wire
from replicax._src.workers.group import Group
from replicax._src.workers.join import join
from replicax._src.workers.probe import listen_host, require_reachable
from replicax._src.workers.reports import cannot_join
from replicax._src.workers.settings import Settings
from replicax._src.workers.watchdog import load
from replicax._src.workers.wire import Message, Wire

_log = logging.getLogger("replicax")


def start(facts: ClusterFacts) -> Group:
    """Join the cluster and initialize JAX; later calls return the same group.

    Raises:
        RollCallError: If not all workers join, or they cannot reach each other.
        ScopeError: If JAX is already initialized, or this process belongs to another cluster.
    """
    group = _group.current()
    if group is not None:
        _require_same_cluster(_resolved[0], facts)
        return group
    _resolved[:] = [facts]
    settings = Settings.read(facts)
    if facts.is_connected:
        facts, settings = _agree_over_jax(facts, settings)
    elif backend_is_initialized():
        raise ScopeError(
            "The strategy of several workers was made after JAX had started, so its devices can"
            " no longer join the cluster. Make it at the top of the program,"
            " before the first array, variable or list of devices."
        )
    if facts.is_chief and not settings.is_secret and not is_local(facts):
        _log.warning(
            "No token was given, so anyone who can reach %s can join this run or end it. Set the"
            " same REPLICAX_TOKEN for all workers.",
            facts.coordinator,
        )
    wire, go = join(facts, settings, gpus.local_gpus())
    if settings.joins:
        return _start_alone(facts, wire, go)
    group = _start_group(facts, wire, go)
    if not go["same_program"] and facts.is_chief:
        _log.warning(
            "The workers were started from program files with different texts; they must call the"
            " same functions in the same order."
        )
    if not facts.is_connected:
        gpus.divide(go["members"], facts.index)
        cores.divide(go["members"], facts.index)
    _start_jax(group, go["service"])
    return group


def _start_group(facts: ClusterFacts, wire: Wire, go: Message) -> Group:
    group = Group(facts, wire, go)
    group.start()
    _group.set_current(group)
    if group.is_elastic:
        elastic.turn_on(partial(_reform, group))
    return group


def _start_alone(facts: ClusterFacts, wire: Wire, go: Message) -> Group:
    """Initialize JAX for a worker that joins, which is alone until it has the state.

    Raises:
        RollCallError: If it has other devices than CPUs.
    """
    address = go["members"][0]["address"]
    alone = replace(facts, num_workers=1, index=0, addresses=(address,), is_chief=False)
    group = _start_group(alone, wire, go)
    group.number = facts.index
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    keep_programs_of_all()
    if (kind := jax.local_devices()[0].platform) != "cpu":
        raise RollCallError(cannot_join(f"it has devices of the kind {kind}; only CPUs can."))
    return group


_resolved: list[ClusterFacts] = []  # this process's cluster, as first resolved


def _agree_over_jax(facts: ClusterFacts, settings: Settings) -> tuple[ClusterFacts, Settings]:
    """Agree on the hub's address and a secret token, over the existing JAX coordination service."""
    chosen = None
    if facts.index == 0:
        chosen = json.dumps([_free_address(facts), secrets.token_hex(32)])
    address, token = json.loads(share_text("replicax/hub", chosen, settings.join_timeout))
    facts = replace(facts, coordinator=address)
    return facts, replace(settings, hub=None, token=token, is_secret=True)


def _free_address(facts: ClusterFacts) -> str:
    """Return an address of this machine with a free port, on JAX's coordinator host if possible."""
    hosts = [_wire.split_address(facts.coordinator)[0]] if facts.coordinator else []
    for host in (*hosts, socket.gethostname()):
        shown = f"[{host}]" if ":" in host else host
        with contextlib.suppress(OSError), _wire.listen(f"{shown}:0") as free:
            return f"{shown}:{free.getsockname()[1]}"
    raise RollCallError(
        f"Worker 0 can listen neither at the host of JAX's coordinator ({facts.coordinator}) nor at"
        f" its own name ({socket.gethostname()}). Make one of them an address of this machine."
    )


def is_local(facts: ClusterFacts) -> bool:
    """Whether all workers listen on the loopback interface only."""
    hosts = {_wire.split_address(address)[0] for address in facts.addresses if address}
    return hosts <= {"localhost", "127.0.0.1", "::1"}


def _start_jax(group: Group, service: str) -> None:
    """Initialize JAX on all workers, and exchange their addresses and ports."""
    facts = group.facts
    if not backend_is_initialized():
        # Synchronous dispatch raises inside the collective, where the lost worker can be named.
        jax.config.update("jax_cpu_enable_async_dispatch", False)
    if is_local(facts):
        keep_programs_of_all()
    before = sockets.listening_ports()
    host = listen_host(group)
    if not facts.is_connected:
        require_reachable(group, service, host)
    with group.collective("the start of JAX"):
        fault_point("register")
        if not facts.is_connected and not connect_distributed(
            service, facts.index, facts.num_workers, host, 120
        ):
            _initialize_publicly(group, host)
        fault_point("registered")
        jax.devices()
    mine = sorted(sockets.listening_ports() - before)
    devices = jax.local_devices()
    answers = group.agree(
        "devices",
        {"ports": mine, "kind": devices[0].platform, "n": len(devices), "host": host},
    )
    group.facts = _with_addresses(facts, [one["host"] for one in answers])
    if devices[0].platform != "cpu":
        load.device_memory = lambda: sum(
            (d.memory_stats() or {}).get("bytes_in_use", 0) for d in devices
        )
    group.set_collective_ports([port for one in answers for port in one["ports"]])


def _reform(group: Group, commit: Callable[[], None] | None, before: int) -> bool:
    """Go on without a lost worker: agree on the last step, and start JAX again.

    Args:
        group: The workers.
        commit: Stores the results of the interrupted step; None if this worker has none.
        before: The collectives that this worker had completed before the step.

    Returns:
        Whether the step was committed.
    """
    go = group.reform(has_new=commit is not None, completed=before)
    if go["is_committed"]:
        assert commit is not None
        commit()
    is_committed = bool(go["is_committed"])
    _move(group, go)
    return is_committed


def _move(group: Group, go: Message) -> None:
    """Move everything that this process has to the workers of the next generation."""
    elastic.before.run()
    while not _is_started(group, go):
        go = group.reform(has_new=False)
    elastic.after.run()
    group.resume()


def regroup(group: Group, cause: str, prepare: Callable[[], str | None]) -> bool:
    """Re-form the group between two steps, at which all workers have agreed to be.

    Args:
        group: The workers.
        cause: The reason, for messages.
        prepare: Runs first; returns where workers that join find the state, or "", or on all
            workers None if the group stays as it is. A worker that is lost meanwhile only makes the
            next group smaller, as no worker has begun another step.

    Returns:
        Whether the group was re-formed.
    """
    completed, state = group.completed, ""
    try:
        if (place := prepare()) is None:
            return False
        state = place
    except WorkerLostError:
        if not group.may_resize:
            raise
    _move(group, group.reform(has_new=False, completed=completed, planned=cause, state=state))
    elastic.free_old_backends()
    return True


def take_over(group: Group, restore: Callable[[str], None]) -> None:
    """Take part in the run that this worker joins: restore the state of the others, and re-form.

    Args:
        group: The group of this worker alone.
        restore: Restores the state at a path.
    """
    path = group.wait_for_state()
    try:
        elastic.check.run()
        restore(path)
    except elastic.CannotResizeError as error:
        raise RollCallError(cannot_join(str(error))) from None
    _move(group, group.take_part())
    elastic.free_old_backends()


def _is_started(group: Group, go: Message) -> bool:
    """Start JAX for the next generation; return False if another worker was lost meanwhile."""
    reset_backends()
    group.enter(go)
    cores.divide(go["members"], group.facts.index)
    try:
        if group.facts.num_workers > 1:
            with group.aborting_on_loss(disconnect_distributed):
                _start_jax(group, go["service"])
                _connect_devices(group)
    except WorkerLostError:
        if not group.may_resize:
            raise
        disconnect_distributed()  # before the hub lets another process register in its place
        return False
    group.finish_start()
    return True


def _connect_devices(group: Group) -> None:
    """Connect the devices of all workers, by an all-reduce of one number each.

    Otherwise the first step would connect them, after it has been compiled.
    """
    devices = jax.devices()
    mesh = jax.sharding.Mesh(np.asarray(devices), ("all",))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("all"))
    one = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    with (
        group.collective("the connection of the devices"),
        filter_output(1, GLOO_GREETING),
    ):
        fault_point("connect")
        ones = jax.make_array_from_callback((len(devices),), rows, lambda _: np.ones(1, np.int32))
        jax.block_until_ready(jax.jit(jax.numpy.sum, out_shardings=one)(ones))


def _with_addresses(facts: ClusterFacts, hosts: list[str]) -> ClusterFacts:
    """Return ``facts`` with an address for every worker.

    As in schedulers' clusters, the workers of one host get consecutive ports. Only worker 0
    actually listens at its address.
    """
    assert facts.coordinator is not None
    port = _wire.split_address(facts.coordinator)[1]
    shown = [f"[{host}]" if ":" in host else host for host in hosts]
    addresses = tuple(
        known or f"{host}:{(port + shown[:i].count(host) - 1) % 65_535 + 1}"
        for i, (known, host) in enumerate(zip(facts.addresses, shown, strict=True))
    )
    return replace(facts, addresses=(facts.coordinator, *addresses[1:]))


def _initialize_publicly(group: Group, host: str) -> None:  # pragma: no cover - a JAX that moved
    """Initialize JAX with its public API, if its private one has changed."""
    facts = group.facts
    with _wire.listen(f"{host}:0") as free:
        mine = f"{host}:{free.getsockname()[1]}"
    chosen = group.exchange("coordinator", mine, lambda: False)[0]
    jax.config.update("jax_enable_recoverability", True)
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        chosen,
        facts.num_workers,
        facts.index,
        coordinator_bind_address=chosen,
        cluster_detection_method="deactivate",
    )


def check_equal_devices(group: Group, count: int, kind: str) -> None:
    """Raise if the workers have different numbers or kinds of devices.

    Raises:
        RollCallError: If they differ; it names two such workers.
    """
    answers = group.agree("the devices of each worker", [count, kind])
    for index, (n, what) in enumerate(answers):
        if [n, what] != answers[0]:
            raise RollCallError(
                f"Worker 0 has {answers[0][0]} {answers[0][1]} device(s), and"
                f" {group.describe(index)} has {n} {what} device(s). All workers must have the"
                " same number of devices of the same kind; on CPUs, set REPLICAX_CPU_DEVICES to the"
                " same number on all of them."
            )


def _require_same_cluster(old: ClusterFacts, new: ClusterFacts) -> None:
    if replace(old, source="") != replace(new, source=""):
        raise ScopeError(
            f"This process is {old.describe(old.index)} of a cluster of {old.num_workers} workers,"
            f" and cannot become {new.describe(new.index)} of another one of {new.num_workers}"
            f" ({new.source}). The cluster of a process is fixed when its first strategy of"
            " several workers is made."
        )
