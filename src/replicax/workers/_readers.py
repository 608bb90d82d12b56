"""Readers: those who know the token and only look are told once a second how the run is.

A reader proves itself in another role than a worker, and what it says after that ends its
connection. The hub never waits for one: what a reader does not take in is kept until it does, one
message at most.
"""

import json
import time
from collections.abc import Callable
from typing import Any

from replicax.workers._wire import Door, Message, Visitor

EVERY = 1.0
_LONGEST = 300  # letters of a text that a worker gave


class Readers:
    """All readers of a hub."""

    def __init__(self, door: Door) -> None:
        self._door = door
        self._told = 0.0

    def tell(self, status: Callable[[], Message], *, at_once: bool = False) -> None:
        """Tell the readers the status, if there are any and it is time."""
        if not (readers := self._door.readers()):
            return
        now = time.monotonic()
        news = b""
        if at_once or now - self._told >= EVERY:
            self._told = now
            news = json.dumps({"status": status()}).encode() + b"\n"
        for visitor in readers:
            self._send(visitor, news)

    def _send(self, visitor: Visitor, news: bytes) -> None:
        data = visitor.unsent or news
        try:
            visitor.wire.socket.setblocking(False)
            sent = visitor.wire.socket.send(data) if data else 0
        except BlockingIOError:
            sent = 0
        except OSError:
            self._door.show_out(visitor)
            return
        visitor.unsent = data[sent:]


def row(facts: Message, progress: Any, state: str) -> Message:
    """One worker, as readers are told of it.

    Args:
        facts: What it said of itself when it joined.
        progress: What it said since.
        state: "here", "left" at its end, or "lost".
    """
    return {
        "index": facts["index"],
        "address": str(facts.get("address") or "")[:_LONGEST],
        "host": str(facts.get("host") or "")[:_LONGEST],
        "pid": facts["pid"],
        "state": state,
        "collectives": progress.count,
        "doing": progress.what[:_LONGEST] if progress.inside else "",
        "silent": time.monotonic() - progress.heard,
        **progress.load,
    }
