"""``replicax launch --report``: an HTML page on a run: steps, waits, restarts, failures."""

import contextlib
import math
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from replicax._src.base.rendering import Drawing, escaped, html_table, page, show_bytes
from replicax._src.cluster.checks import RollCallError
from replicax._src.workers.join import statuses
from replicax._src.workers.wire import Message

_MOST_SAMPLES = 1000  # per worker and attempt; beyond that, every second sample is dropped
_MOST_DRAWN = 32
_RETRY = 0.2
_COLOURS = ("#3b76c4", "#c4703b", "#3f9a5f", "#a0508f", "#8a7a2f", "#3f8f9a", "#b0485a", "#6b6f8a")


@dataclass
class Samples:
    """Samples of one worker: seconds since the launch, steps, and seconds of input wait."""

    points: list[tuple[float, float, float]] = field(default_factory=list)
    every: int = 1
    seen: int = 0
    last: Message = field(default_factory=dict)

    def add(self, seconds: float, worker: Message) -> None:
        """Add the worker's current status."""
        self.last = worker
        self.seen += 1
        if self.seen % self.every == 0:
            self.points.append((seconds, worker.get("steps", 0.0), worker.get("waited", 0.0)))
        if len(self.points) > _MOST_SAMPLES:
            self.points, self.every = self.points[::2], 2 * self.every


@dataclass
class Attempt:
    """One start of all workers.

    Attributes:
        began: Seconds from the launch to its start.
        ended: Seconds from the launch to its end.
        code: The exit code; None while it runs.
        cause: The launcher's explanation of a failure.
        news: The hub's reports on workers that were lost, left, or ran something else.
        slow: The hub's reports on workers for which the others waited.
        membership: The workers of an elastic run over time; see `MembershipLog`.
        workers: The samples of each worker, by index.
    """

    began: float
    ended: float = 0.0
    code: int | None = None
    cause: str = ""
    news: list[str] = field(default_factory=list)
    slow: list[str] = field(default_factory=list)
    membership: list[Message] = field(default_factory=list)
    workers: dict[int, Samples] = field(default_factory=dict)


class Reporter:
    """Collects the status of a run's hub, like `replicax top`, and writes the page."""

    def __init__(self, path: Path, program: str) -> None:
        self._path = path
        self._program = program
        self._launched = time.time()
        self._began = time.monotonic()
        self.attempts: list[Attempt] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, address: str, token: str) -> None:
        """Start a new attempt, and poll its hub at ``address``."""
        attempt = Attempt(self._now())
        self.attempts.append(attempt)
        self._stop = threading.Event()
        arguments = (attempt, address, token, self._stop)
        self._thread = threading.Thread(target=self._listen, args=arguments, daemon=True)
        self._thread.start()

    def end(self, code: int | None, cause: str = "") -> None:
        """End the current attempt."""
        attempt = self.attempts[-1]
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=5.0)
        attempt.ended, attempt.code, attempt.cause = self._now(), code, cause

    def write(self) -> None:
        """Write the page, atomically replacing an older one."""
        draft = self._path.with_name(f".{self._path.name}.draft")
        draft.write_text(self.page())
        draft.replace(self._path)

    def _now(self) -> float:
        return time.monotonic() - self._began

    def _listen(self, attempt: Attempt, address: str, token: str, stop: threading.Event) -> None:
        while not stop.is_set():
            with contextlib.suppress(OSError, RollCallError):
                for status in statuses(address, token):
                    self._add_status(attempt, status)
            stop.wait(_RETRY)

    def _add_status(self, attempt: Attempt, status: Message) -> None:
        attempt.news = [str(text) for text in status["news"]]
        attempt.slow += [t for t in map(str, status.get("slow", ())) if t not in attempt.slow]
        attempt.membership = status["membership"] if status.get("most") else []
        for worker in status["workers"]:
            samples = attempt.workers.setdefault(int(worker["index"]), Samples())
            samples.add(self._now(), worker)

    def page(self) -> str:
        """Return the HTML page."""
        last = self.attempts[-1] if self.attempts else Attempt(0.0)
        ends = {0: "ended well", None: "was interrupted"}
        how = ends.get(last.code, f"failed with exit code {last.code}")
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self._launched))
        restarts = len(self.attempts) - 1
        body = [
            f'<p class="soft">Launched {when}; {how} after {last.ended:.0f} s,'
            f" with {restarts} restart{'s' if restarts != 1 else ''}.</p>",
            f'<p class="soft">{_long(_shares(self.attempts))}</p>',
            self._causes(),
            self._slow(),
            "<h2>Steps of each worker</h2>",
            _chart(self.attempts, 1, "steps"),
            "<h2>Seconds that each worker waited for its input</h2>",
            _chart(self.attempts, 2, "seconds waited"),
            "<h2>Workers</h2>",
            html_table(_WORKER_COLUMNS, _worker_rows(self.attempts)),
            self._membership(),
            "<h2>Attempts</h2>",
            html_table(_ATTEMPT_COLUMNS, map(_attempt_row, range(99), self.attempts)),
            f'<p class="soft">{_MEASURED}</p>',
        ]
        return page(f"Run of {self._program}", "\n".join(body))

    def _membership(self) -> str:
        rows = [
            (
                *(str(number), str(e["steps"]), f"{e['seconds']:.1f} s", str(len(e["workers"]))),
                *(" ".join(map(str, e["workers"])), str(e["cause"])),
            )
            for number, attempt in enumerate(self.attempts)
            for e in attempt.membership
        ]
        return f"<h2>Membership</h2>{html_table(_MEMBERSHIP_COLUMNS, rows)}" if rows else ""

    def _causes(self) -> str:
        sections = []
        for number, attempt in enumerate(self.attempts):
            texts = [attempt.cause, *(n for n in attempt.news if attempt.code != 0)]
            text = "\n\n".join(t for t in texts if t)
            if text:
                title = (
                    "The root cause" if len(self.attempts) == 1 else f"Why attempt {number} ended"
                )
                sections.append(f"<h2>{title}</h2><pre>{_long(text)}</pre>")
        return "".join(sections)

    def _slow(self) -> str:
        texts = [text for attempt in self.attempts for text in attempt.slow]
        return f"<h2>Slow workers</h2><pre>{_long(chr(10).join(texts))}</pre>" if texts else ""


def _shares(attempts: list[Attempt]) -> str:
    """Return the goodput of the whole run, and its MFU if a worker knows its flops."""
    whole = max((a.ended for a in attempts), default=0.0)
    productive, rates = 0.0, []
    for attempt in attempts:
        last = [s.last for s in attempt.workers.values() if s.last.get("goodput")]
        if last:
            # A worker's share is of its own time, which begins with its import of replicax.
            mean = sum(float(w["goodput"]) for w in last) / len(last)
            productive += mean * (attempt.ended - attempt.began)
        rates += [float(w["mfu"]) for w in last if w.get("mfu")]
    if not productive or not whole:
        return ""
    text = f"Goodput: {100 * productive / whole:.0f} % of the time went to steps after the first"
    text += " of each attempt, without waiting for input; steps that a restart repeats count too."
    return text + (f" MFU: {100 * sum(rates) / len(rates):.1f} %." if rates else "")


_MEASURED = (
    "A step is a call of a function, or a run outside of one, that all workers finish together."
    " Waiting for input is the time in"
    " which the program waited for the next element of a distributed dataset; where workers must"
    " agree on an element, it has the time until all have one. Memory is what the process holds."
    " The figures are those of the last second in which the worker was heard."
)
_WORKER_COLUMNS = (
    *("attempt", "worker", "machine", "state", ">steps", ">steps/s, all over"),
    *(">waited", ">of its time", ">memory"),
)
_MEMBERSHIP_COLUMNS = (
    *("attempt", ">after steps", ">after", ">number", "workers from then on", "~cause"),
)
_ATTEMPT_COLUMNS = ("attempt", ">began", ">lasted", "exit code")


_NO_DATA = (
    "No worker reported: a single worker has no hub, and workers that never joined have no status."
)


def _long(text: str) -> str:
    return "\n".join(escaped(line, 1000) for line in text.splitlines()[:200])


def _worker_rows(attempts: list[Attempt]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for number, attempt in enumerate(attempts):
        for index, samples in sorted(attempt.workers.items())[:1000]:
            w = samples.last
            steps, waited = float(w.get("steps", 0)), float(w.get("waited", 0))
            span = samples.points[-1][0] - samples.points[0][0] if samples.points else 0.0
            first = samples.points[0] if samples.points else (0.0, 0.0, 0.0)
            rate = f"{(steps - first[1]) / span:.2f}" if span > 0 else "-"
            share = f"{100 * (waited - first[2]) / span:.0f} %" if span > 0 else "-"
            machine = f"{w.get('host') or w.get('address')} pid {w.get('pid')}"
            memory = show_bytes(float(w.get("memory", 0)))
            rows.append(
                (
                    *(str(number), str(index), machine, str(w.get("state")), f"{steps:.0f}", rate),
                    *(f"{waited:.1f} s", share, memory),
                )
            )
    return rows


def _attempt_row(number: int, attempt: Attempt) -> tuple[str, ...]:
    code = "interrupted" if attempt.code is None else str(attempt.code)
    lasted = attempt.ended - attempt.began
    return str(number), f"{attempt.began:.1f} s", f"{lasted:.1f} s", code


def _chart(attempts: list[Attempt], figure: int, unit: str) -> str:
    """Return an SVG chart of a figure over time, with a line per worker."""
    points = [p for a in attempts for s in a.workers.values() for p in s.points]
    if not points:
        return f'<p class="soft">{_NO_DATA}</p>'
    left, wide, high = 60.0, 820.0, 220.0
    times = _ticks(max(*(p[0] for p in points), *(a.ended for a in attempts), 1e-3))
    heights = _ticks(max(*(p[figure] for p in points), 1e-3))
    until, most = times[-1], heights[-1]
    drawing = Drawing(left + wide + 90, high + 40)
    for value in heights:
        y = high - high * value / most + 10
        drawing.line([(left, y), (left + wide, y)], "#8884")
        drawing.text(left - 6, y + 4, f"{value:.4g}", anchor="end", soft=True)
    for value in times:
        x = left + wide * value / until
        drawing.text(x, high + 28, f"{value:.4g} s", anchor="middle", soft=True)
    for attempt in attempts[1:]:
        x = left + wide * attempt.began / until
        drawing.line([(x, 10), (x, high + 10)], "#c0392b", tooltip="started again")
    for attempt in attempts:
        for index, samples in sorted(attempt.workers.items())[:_MOST_DRAWN]:
            path = [
                (left + wide * p[0] / until, high + 10 - high * p[figure] / most)
                for p in samples.points
            ]
            colour = _COLOURS[index % len(_COLOURS)]
            drawing.line(path, colour, tooltip=f"worker {index}")
    known = sorted({i for a in attempts for i in a.workers})[:_MOST_DRAWN]
    legend = "".join(
        f'<span><span class="swatch" style="background:{_COLOURS[i % len(_COLOURS)]}"></span>'
        f"worker {i}</span>"
        for i in known
    )
    legend += f'<span class="soft">{escaped(unit)} over seconds since the launch'
    legend += "; red: started again</span>" if attempts[1:] else "</span>"
    return f'{drawing}<p class="legend">{legend}</p>'


def _ticks(most: float) -> list[float]:
    """Return at most seven round numbers from zero on, the last of which is at least ``most``."""
    size = 10.0 ** math.floor(math.log10(most / 5))
    step = next(size * by for by in (1, 2, 5, 10) if size * by >= most / 5)
    return [step * i for i in range(math.ceil(most / step - 1e-9) + 1)]
