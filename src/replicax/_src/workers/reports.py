"""Texts of the reports and errors about workers: refused joins, lost workers, mismatches."""

import sys
import threading
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from replicax._src.workers.wire import Message, WireError


@dataclass(frozen=True)
class Report:
    """Why the group cannot continue.

    Attributes:
        kind: "lost" for a worker that failed, "resize" for one without whom the others go on in an
            elastic run, "left" for one that finished, "mismatch" for workers
            that ran different collectives, "hub" for a lost coordinator; in a worker also "fork"
            and "over" for a forked or departed process.
        index: The worker in question, or None.
        text: The full explanation, in sentences.
        count: The number of collectives in which a worker that left took part.
    """

    kind: str
    index: int | None
    text: str
    count: int = 0

    def to_message(self) -> dict[str, Any]:
        """Return the report as a wire message."""
        return {"report": asdict(self)}

    @classmethod
    def from_message(cls, message: dict[str, Any]) -> "Report":
        """Return the report in a wire message."""
        fields = message["report"]
        return cls(str(fields["kind"]), fields["index"], str(fields["text"]), int(fields["count"]))


def say(text: str) -> None:
    """Write a line to standard error; ignore a stream that is closed or has no reader."""
    with suppress(OSError, ValueError, AttributeError):  # a broken pipe; closed; None
        sys.stderr.write(f"replicax: {text}\n")
        sys.stderr.flush()


def stacks(excluded: set[int | None]) -> str:
    """Return the stack traces of this process's threads, except those with ids in ``excluded``."""
    names = {t.ident: t.name for t in threading.enumerate()}
    lines = []
    for ident, frame in sys._current_frames().items():  # noqa: SLF001 - the documented way
        if ident not in excluded:
            lines.append(f"thread {names.get(ident, ident)}:")
            lines += [line.rstrip() for line in traceback.format_stack(frame)[-8:]]
    return "\n".join(lines)


def name(index: int, address: str | None, pid: Any = None) -> str:
    """Return a worker's name for messages."""
    details = ", ".join(x for x in (address or "", f"pid {pid}" if pid is not None else "") if x)
    return f"worker {index} ({details})" if details else f"worker {index}"


def gone(who: str, step: str, why: str) -> str:
    """Return the message about a lost worker."""
    return (
        f"{who} is gone, {step}: {why}. Look at its own output for the cause; this worker cannot go"
        " on without it. Start all workers again, from the last checkpoint."
    )


def shrunk(who: str, step: str, why: str, left: int) -> str:
    """Return the message about a lost worker without whom the others go on."""
    return f"{who} is gone, {step}: {why}. The other {left} worker(s) go on without it."


def joined(who: str, size: int) -> str:
    """Return the message about a worker that takes part from now on."""
    return f"{who} has joined: there are {size} workers."


def parted(who: str, left: int) -> str:
    """Return the message about a preempted worker that has left the others."""
    return f"{who} was preempted, and has left. The other {left} worker(s) go on without it."


def must_wait(least: int, seconds: float) -> str:
    """Return the message that the workers that are left must wait for others."""
    return f" As at least {least} are needed, they wait up to {seconds:g} s for others to join."


def too_few(left: int, least: int, seconds: float) -> str:
    """Return the message that not enough workers have joined in time."""
    return (
        f"Only {left} of at least {least} worker(s) are left, and no other has joined within"
        f" {seconds:g} s. The state is saved; start the run again to go on from it."
    )


def cannot_join(why: str) -> str:
    """Return the message that a worker cannot join a run."""
    return f"This worker was started to join a running elastic run, but cannot: {why}"


def cannot_go_on(cause: str, who: str, why: str) -> str:
    """Return the message that a survivor of an elastic run cannot go on."""
    return f"{cause} But {who} cannot: {why} Start all workers again, from the last checkpoint."


def hangs(what: str, seconds: float) -> str:
    """Return the reason for giving up a worker whose file I/O has stalled."""
    return (
        f"it is {what}, and has made no progress for {seconds:.0f} s: the disk or file system hangs"
        " there, or is very slow; REPLICAX_DISK_TIMEOUT sets the seconds"
    )


def keeper_gone(pid: int, why: str) -> str:
    """Return the message that the process with JAX's coordination service was lost."""
    return (
        f"The process that runs JAX's coordination service for all workers (pid {pid}, a child of"
        f" the coordinator) is gone: {why}. Start all workers again, from the last checkpoint."
    )


def ended_early(story: str) -> str:
    """Return the message that a worker exited before all workers had joined."""
    return f"{story[:1].upper()}{story[1:]} before all workers had joined. Start all workers again."


def no_service(place: str, why: str) -> str:
    """Return the message that JAX's coordination service could not start."""
    return (
        f"JAX's coordination service cannot listen at {place}: {why}. If another program holds the"
        " port, stop it or set REPLICAX_SERVICE_PORT to a free one, or unset it for any; if the"
        " address is not this machine's, correct the cluster or REPLICAX_BIND_ADDRESS."
    )


def hub_ended(pid: int, why: str) -> str:
    """Return the message that the hub was shut down."""
    return (
        f"The coordinator of all workers (pid {pid}) has ended: {why}. Start all workers again,"
        " from the last checkpoint."
    )


def different(number: int, calls: dict[str, str]) -> str:
    """Return the message that two workers ran different collectives as number ``number``.

    Args:
        number: The number of the collective.
        calls: The collective that each of the two workers ran, by the worker's name.
    """
    (a, first), (b, second) = calls.items()
    found = (
        f"As collective {number}, {a} calls {first}, and {b} calls {second}."
        if first != second
        else f"Before collective {number} ({first}), {a} and {b} called different ones."
    )
    return (
        f"The workers run different programs. {found} All workers must call the same functions,"
        " reductions and variable creations, with the same shapes and the same Python numbers, in"
        " the same order; do not put them under an `if` that depends on the worker."
    )


def slow(who: str, times: float, seconds: float, cause: str) -> str:
    """Return the message that the others wait for a slow worker.

    Args:
        who: The worker's name.
        times: How many times as long as the median worker it takes for a step.
        seconds: Its time for a step.
        cause: "input" or "host".
    """
    causes = {
        "input": "Its input is slow: look at its disk, its share of the files and its `map`s",
        "host": "Its time goes to Python or to operations outside of compiled steps: look at what"
        " else runs on its machine, and at what the program does on this worker alone",
    }
    return (
        f"{who.capitalize()} is slow: {seconds:.3g} s for a step, {times:.1f} times the median, and"
        f" the others wait for it. {causes[cause]}."
    )


def at_step(count: int, what: str) -> str:
    """Return a description of a worker's progress."""
    if not count:
        return "before its first step"
    return f"last seen at collective {count}" + (f", {what}" if what else "")


def name_of(facts: Message) -> str:
    """Return a worker's name for messages, from the facts that it sent when joining."""
    return name(facts["index"], facts.get("address"), facts.get("pid"))


def refusal(facts: Message, present: dict[int, Message], size: int, *, is_over: bool) -> str:
    """Return why a worker cannot join; "" if it can.

    Args:
        facts: The facts that the worker sent.
        present: The facts of the workers that have joined, by index.
        size: The number of workers in the cluster.
        is_over: Whether the roll call is over.
    """
    who = name_of(facts)
    if facts["size"] != size:
        return (
            f"{who} was started for a cluster of {facts['size']} workers, and worker 0 for one"
            f" of {size}: give all workers the same cluster."
        )
    if facts["index"] >= size:
        return f"{who} is not one of the workers 0 to {size - 1} of this cluster."
    if other := present.get(facts["index"]):
        return (
            f"The index {facts['index']} is claimed twice: by {name_of(other)} and by {who}. Give"
            " every worker an index of its own (the task index in TF_CONFIG). If one process"
            " started the other (multiprocessing imports the program again), create the strategy"
            " under `if __name__ == '__main__':`."
        )
    if is_over:
        return f"{who} came too late: all {size} workers had joined already, or one had left again."
    return _other_versions(facts, present)


def _other_versions(facts: Message, present: dict[int, Message]) -> str:
    """Return an error message if a worker runs other versions than those present."""
    for _, other in sorted(present.items()):
        for what, mine in facts["versions"].items():
            theirs = other["versions"].get(what)
            if mine != theirs:
                return (
                    f"{name_of(facts)} runs {what} {mine}, and {name_of(other)} runs {what}"
                    f" {theirs}. All workers must run the same versions."
                )
    return ""


def join_refusal(
    facts: Message, present: dict[int, Message], size: int, *, is_elastic: bool
) -> str:
    """Return why a worker cannot join a run that has begun; "" if it can.

    Args:
        facts: The facts that the worker sent.
        present: The facts of the workers that take part or are joining, by index.
        size: The most workers of the run.
        is_elastic: Whether the run is elastic.
    """
    if not is_elastic:
        return cannot_join("the run was not started with --elastic.")
    if facts["size"] != size or facts["index"] >= size:
        return cannot_join(f"it is worker {facts['index']} of a run of at most {size}.")
    if other := present.get(facts["index"]):
        return cannot_join(f"{name_of(other)} has its place.")
    for _, other in sorted(present.items()):
        if facts.get("cpu_devices") != other.get("cpu_devices"):
            return cannot_join(
                f"it has {facts.get('cpu_devices')} CPU device(s), and {name_of(other)} has"
                f" {other.get('cpu_devices')}. Give --devices-per-worker as for the run."
            )
    return _other_versions(facts, present)


def checked_facts(facts: Any) -> Message:
    """Return the facts that a joining worker sent, after validating them.

    Raises:
        WireError: If they are malformed.
    """
    match facts:
        case {
            "index": int(index),
            "size": int(size),
            "address": str() | None,
            "pid": int(),
            "versions": dict(versions),
        } if index >= 0 and size > 0 and all(isinstance(v, str) for v in versions.values()):
            return dict(facts)
    raise WireError("malformed facts in a join message")
