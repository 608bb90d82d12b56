"""Reports: who may join and why not, and what became of a worker, in the words that are raised."""

import sys
import threading
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from replicax.workers._wire import Message, WireError


@dataclass(frozen=True)
class Report:
    """Why the group cannot go on.

    Attributes:
        kind: "lost" for a worker that is gone, "left" for one that came to its end, "mismatch" for
            workers that do different things, "hub" for a lost coordinator.
        index: The worker, if it is one's.
        text: The whole story, in sentences.
        count: How many collectives one that left has taken part in.
    """

    kind: str
    index: int | None
    text: str
    count: int = 0

    def to_message(self) -> dict[str, Any]:
        """The report as a message for the wire."""
        return {"report": asdict(self)}

    @classmethod
    def from_message(cls, message: dict[str, Any]) -> "Report":
        """The report of a message from the wire."""
        told = message["report"]
        return cls(str(told["kind"]), told["index"], str(told["text"]), int(told["count"]))


def say(text: str) -> None:
    """Write to standard error, if somebody still reads it: nothing else may depend on that."""
    with suppress(OSError, ValueError, AttributeError):  # a pipe without a reader, closed, none
        sys.stderr.write(f"replicax: {text}\n")
        sys.stderr.flush()


def stacks(besides: set[int | None]) -> str:
    """Where the threads of this process are, except for some."""
    names = {t.ident: t.name for t in threading.enumerate()}
    lines = []
    for ident, frame in sys._current_frames().items():  # noqa: SLF001 - the documented way
        if ident not in besides:
            lines.append(f"thread {names.get(ident, ident)}:")
            lines += [line.rstrip() for line in traceback.format_stack(frame)[-8:]]
    return "\n".join(lines)


def name(index: int, address: str | None, pid: Any = None) -> str:
    """A worker, for a message."""
    details = ", ".join(x for x in (address or "", f"pid {pid}" if pid is not None else "") if x)
    return f"worker {index} ({details})" if details else f"worker {index}"


def gone(who: str, step: str, why: str) -> str:
    """A worker that is gone."""
    return (
        f"{who} is gone, {step}: {why}. Look at its own output for the cause; this worker cannot go"
        " on without it. Start all workers again, from the last checkpoint."
    )


def hangs(what: str, seconds: float) -> str:
    """A worker whose disk does nothing for it any more."""
    return (
        f"it is {what}, and that has not got on for {seconds:.0f} s: the disk or file system hangs"
        " there, or is very slow; REPLICAX_DISK_TIMEOUT sets the seconds"
    )


def keeper_gone(pid: int, why: str) -> str:
    """The process that holds JAX's coordination service is gone."""
    return (
        f"The process that keeps JAX's coordination service for all workers (pid {pid}, beside the"
        f" coordinator) is gone: {why}. Start all workers again, from the last checkpoint."
    )


def ended_early(story: str) -> str:
    """A worker of the launcher's has ended, and will not come."""
    return f"{story[:1].upper()}{story[1:]} before all workers had come. Start all workers again."


def no_service(place: str, why: str) -> str:
    """Say that JAX's coordination service could not start."""
    return (
        f"JAX's coordination service cannot listen at {place}: {why}. If another program holds the"
        " port, stop it or set REPLICAX_SERVICE_PORT to a free one, or unset it for any; if the"
        " address is not this machine's, correct the cluster or REPLICAX_BIND_ADDRESS."
    )


def hub_ended(pid: int, why: str) -> str:
    """The hub was made to end."""
    return (
        f"The coordinator of all workers (pid {pid}) has ended: {why}. Start all workers again,"
        " from the last checkpoint."
    )


def different(number: int, calls: dict[str, str]) -> str:
    """Two workers call different things as the collective ``number``."""
    (a, first), (b, second) = calls.items()
    when = "as" if first != second else "some time before"
    return (
        f"The workers run different programs: {when} collective {number}. There, {a} calls {first},"
        f" and {b} calls {second}. All workers must call the same functions, reductions and"
        " variable creations, with the same shapes and the same Python numbers, in the same order;"
        " do not put them under an `if` that depends on the worker."
    )


def at_step(count: int, what: str) -> str:
    """How far a worker came."""
    if not count:
        return "before its first step"
    return f"last seen at collective {count}" + (f", {what}" if what else "")


def name_of(facts: Message) -> str:
    """A worker, by what it said of itself."""
    return name(facts["index"], facts.get("address"), facts.get("pid"))


def refusal(facts: Message, present: dict[int, Message], size: int, *, is_over: bool) -> str:
    """Why a worker cannot join; nothing if it can.

    Args:
        facts: What it says of itself.
        present: What those said that have joined, by their index.
        size: How many workers there are to be.
        is_over: Whether all had come already.
    """
    who = name_of(facts)
    if facts["size"] != size:
        return (
            f"{who} was started for a cluster of {facts['size']} workers, and worker 0 for one"
            f" of {size}: all workers must be given the same cluster."
        )
    if facts["index"] >= size:
        return f"{who} is not one of the workers 0 to {size - 1} of this cluster."
    if other := present.get(facts["index"]):
        return (
            f"The index {facts['index']} is claimed twice: by {name_of(other)} and by {who}. Give"
            " every worker an index of its own (the task index in TF_CONFIG)."
        )
    if is_over:
        return f"{who} came when all {size} workers had already joined, or one had left again."
    for _, other in sorted(present.items()):
        for what, mine in facts["versions"].items():
            theirs = other["versions"].get(what)
            if mine != theirs:
                return (
                    f"{who} runs {what} {mine}, and {name_of(other)} runs {what} {theirs}. All"
                    " workers must run the same versions."
                )
    return ""


def checked_facts(facts: Any) -> Message:
    """What a worker says of itself, if it is what workers say.

    Raises:
        WireError: If it is not.
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
    raise WireError("what it says of itself is not what workers say")
