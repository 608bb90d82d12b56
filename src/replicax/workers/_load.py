"""Load: what this process has done, what it waited for, and what it holds.

The program counts; what speaks to the hub, mostly a thread, looks at the counts. Nothing is sent or
locked on the way of a step for them.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

_EVERY = 0.9  # seconds, so that who asks once a second gets new ones each time
_LATELY = 10  # looks over which rates are taken
_STATM = Path("/proc/self/statm")


class Load:
    """Counts of one process; as a context, it counts time in which the program waits for its input.

    Attributes:
        steps: Calls of functions, and runs outside of them, that all workers finished together.
        batches: Elements of distributed datasets that were waited for.
        waited: Seconds in which the program waited for such elements, those that are over.
        device_memory: How many bytes this process's accelerators hold.
    """

    def __init__(self) -> None:
        self.steps = self.batches = 0
        self.waited = 0.0
        self._lately: dict[str, float] = {}
        self.device_memory: Callable[[], float] = lambda: 0.0
        self._open: dict[int, float] = {}  # since when a thread waits
        self._looks: deque[tuple[float, int, float]] = deque(maxlen=_LATELY + 1)

    def __enter__(self) -> None:
        self._open[threading.get_ident()] = time.monotonic()

    def __exit__(self, *_: object) -> None:
        now = time.monotonic()
        self.waited += now - self._open.pop(threading.get_ident(), now)
        self.batches += 1

    def told(self) -> dict[str, float]:
        """The figures of now, by their names in `replicax.workers._watch.FIGURES`.

        Rates are those of the last ten seconds or so; they and the memory are found once a second.
        """
        now = time.monotonic()
        waited = self.waited + sum(now - since for since in list(self._open.values()))
        if not self._looks or now - self._looks[-1][0] >= _EVERY:
            self._looks.append((now, self.steps, waited))
            then, steps, before = self._looks[0]
            span = max(now - then, 1e-9)
            self._lately = {
                "rate": (self.steps - steps) / span,
                "waits": min(max((waited - before) / span, 0.0), 1.0),
                "memory": _resident(),
                "device_memory": self.device_memory(),
            }
        return {"steps": self.steps, "waited": waited, **self._lately}


def _resident() -> float:
    """How many bytes of memory this process holds; 0 where the system does not say."""
    try:
        return int(_STATM.read_text().split()[1]) * float(os.sysconf("SC_PAGE_SIZE"))
    except (OSError, ValueError, IndexError):
        return 0.0


load = Load()
