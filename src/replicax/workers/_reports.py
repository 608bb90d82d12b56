"""Reports: what became of a worker, in the words in which the others raise it."""

from dataclasses import asdict, dataclass
from typing import Any


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
        """As it travels."""
        return {"report": asdict(self)}

    @classmethod
    def from_message(cls, message: dict[str, Any]) -> "Report":
        """As it arrived."""
        told = message["report"]
        return cls(str(told["kind"]), told["index"], str(told["text"]), int(told["count"]))


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


def at_step(count: int, what: str) -> str:
    """How far a worker came."""
    if not count:
        return "before its first step"
    return f"last seen at collective {count}" + (f", {what}" if what else "")
