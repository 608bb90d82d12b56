"""Step timelines from a trace of JAX's profiler.

The trace contains every operation on a CPU device, with its device and program, and the waits for
elements of distributed datasets.
"""

import contextlib
import itertools
import re
import tempfile
import warnings
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import jax

from replicax._src.base.errors import ScopeError
from replicax._src.base.rendering import Drawing, Sheet, page
from replicax._src.files.paths import local_path
from replicax._src.input.distributed_dataset import INPUT_MARK

KINDS: tuple[str, ...] = ("input", "compute", "collective", "idle")
_COLOURS = {"input": "#e0a458", "compute": "#5b8fd0", "collective": "#b0608f", "idle": "#9995"}
_COLLECTIVE = re.compile(
    r"all.?reduce|all.?gather|reduce.?scatter|all.?to.?all|collective|psum|pmin|pmax|ppermute"
)
_RENDEZVOUS = "Rendezvous"  # the event of a CPU device inside a collective
_END = "end: "  # the prefix of events at which asynchronous operations are done
_MANY_CALLS = 4
_MOST_STEPS, _MOST_DEVICES, _PIXELS = 20, 32, 900
MEASURED = (
    "At each moment a device counts as in a collective if a collective is all that runs on it, with"
    " the wait for other replicas; else as computing if a program runs on it, with the gaps between"
    " its operations; else as waiting for input if the program waits for the next element of a"
    " distributed dataset; else as idle: Python and dispatch. Times are wall-clock: virtual devices"
    " that share cores slow each other down, and recording costs time too."
)

Span = tuple[float, float]


class Event(NamedTuple):
    """An event of a trace: its thread, name, begin and end in seconds, and statistics."""

    thread: str
    name: str
    begin: float
    end: float
    facts: dict[str, Any]


@dataclass(frozen=True)
class RecordedStep:
    """One recorded step.

    Attributes:
        begin: The start, in seconds of the recording.
        end: The start of the next step.
        seconds: For each device, the seconds of each kind; they add up to the step's length.
    """

    begin: float
    end: float
    seconds: dict[str, dict[str, float]]


@dataclass
class Timeline:
    """The activity of each device in each step; created by `rx.debug.timeline`.

    Attributes:
        steps: The steps that were recorded completely.
        spans: For each device, when it computed, was in a collective, or waited for input.
        unit: A sentence on what counts as a step.

    Example:
        >>> rx.debug.Timeline().steps
        []
    """

    steps: list[RecordedStep] = field(default_factory=list)
    spans: dict[str, dict[str, list[Span]]] = field(default_factory=dict)
    unit: str = ""

    @classmethod
    def from_trace(cls, folder: str | PathLike[str]) -> "Timeline":
        """Read the newest trace that `jax.profiler.trace` has written to a folder.

        Raises:
            FileNotFoundError: If the folder contains no trace.

        Example:
            >>> rx.debug.Timeline.from_trace("nowhere")
            Traceback (most recent call last):
            FileNotFoundError: There is no trace of JAX's profiler (*.xplane.pb) in 'nowhere'.
        """
        found = sorted(
            Path(local_path(folder)).rglob("*.xplane.pb"), key=lambda p: p.stat().st_mtime
        )
        if not found:
            raise FileNotFoundError(
                f"There is no trace of JAX's profiler (*.xplane.pb) in {str(folder)!r}."
            )
        return cls._of(_events(jax.profiler.ProfileData.from_file(str(found[-1]))))

    @classmethod
    def _of(cls, events: Iterable[Event]) -> "Timeline":
        """Build the timeline from the events of a trace."""
        # jaxlib creates a type that triggers a warning, and aborts if warnings are errors.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            known = list(events)
        operations, waits = _operations(known), [e for e in known if e.name == INPUT_MARK]
        inputs = _merge((e.begin, e.end) for e in waits)
        spans: dict[str, dict[str, list[Span]]] = {}
        for device, kinds in sorted(operations.items()):
            meets = _subtract(_merge(kinds["collective"]), _merge(kinds["compute"]))
            busy = _merge(kinds["program"])
            computes, alone = _subtract(busy, meets), _subtract(inputs, busy)
            spans[device] = {"compute": computes, "collective": meets, "input": alone}
        marks, unit = _marks(known, sorted(e.begin for e in waits))
        steps = [
            RecordedStep(
                begin, end, {d: _split_step(kinds, (begin, end)) for d, kinds in spans.items()}
            )
            for begin, end in itertools.pairwise(marks)
        ]
        for device in [d for d in spans if not any(_is_busy(s.seconds[d]) for s in steps)]:
            del spans[device]
            for step in steps:
                del step.seconds[device]
        return cls(steps, spans, unit)

    @property
    def mean(self) -> dict[str, dict[str, float]]:
        """For each device, the mean seconds of each kind per step."""
        count = len(self.steps)
        return {
            device: {k: sum(s.seconds[device][k] for s in self.steps) / count for k in KINDS}
            for device in (self.spans if count else {})
        }

    def sheet(self) -> Sheet:
        """Return the averages as a table."""
        rows = []
        for device, kinds in self.mean.items():
            whole = sum(kinds.values())
            shown = [f"{1e3 * kinds[k]:.1f} ms {100 * kinds[k] / whole:3.0f} %" for k in KINDS]
            rows.append((device, f"{1e3 * whole:.1f} ms", *shown))
        columns = ("device", ">a step", *(f">{k}" for k in KINDS))
        note = f"Averages of {len(self.steps)} steps. {self.unit}" if self.steps else _NOTHING
        return Sheet("Where the time of a step goes", (), columns, tuple(rows), (note,))

    def html(self) -> str:
        """Return a self-contained HTML page with a strip for each device."""
        legend = "".join(
            f'<span><span class="swatch" style="background:{_COLOURS[k]}"></span>{k}</span>'
            for k in KINDS
        )
        body = [f'<p class="legend">{legend}</p>', self.sheet().to_html()]
        if self.steps:
            shown = self.steps[-_MOST_STEPS:]
            body += [f"<h2>The last {len(shown)} steps</h2>", self._strips(shown)]
        return page("Timeline", "\n".join([*body, f'<p class="soft">{MEASURED}</p>']))

    def __rich__(self) -> Sheet:
        return self.sheet()

    def __str__(self) -> str:
        return str(self.sheet())

    def _repr_html_(self) -> str:
        return self.sheet().to_html()

    def _strips(self, steps: Sequence[RecordedStep]) -> str:
        """Return an SVG drawing of the last steps."""
        begin, end = steps[0].begin, steps[-1].end
        left, high = 70.0, 26.0
        devices = list(self.spans)[:_MOST_DEVICES]
        drawing = Drawing(left + _PIXELS + 30, high * (len(devices) + 1) + 10)
        for row, device in enumerate(devices):
            top = high * row
            drawing.text(0, top + 16, device)
            for x, wide, kind in _pixels(self.spans[device], begin, end):
                tooltip = f"{device}: {kind}, {1e3 * wide * (end - begin) / _PIXELS:.2f} ms"
                drawing.rect(left + x, top + 2, wide, high - 6, _COLOURS[kind], tooltip=tooltip)
        bottom, labelled = high * len(devices), 0.0
        for number, step in enumerate(steps):
            x = left + _PIXELS * (step.begin - begin) / (end - begin)
            drawing.line([(x, 0), (x, bottom + 4)], "#888")
            where = len(self.steps) - len(steps) + number
            if x - labelled > 24:
                drawing.text(x + 2, bottom + 16, f"{where}", soft=True)
                labelled = x
        drawing.text(left + _PIXELS, bottom + 16, f"{1e3 * (end - begin):.1f} ms", anchor="end")
        return str(drawing)


_NOTHING = (
    "No step was recorded: no program ran twice on CPU devices. Record several steps, after the"
    " first has compiled."
)


@contextlib.contextmanager
def timeline(path: str | PathLike[str] | None = None) -> Iterator[Timeline]:
    """Record the activity of each device while the block runs: input, compute, collective, idle.

    This records the CPU devices of this process. For accelerators, use a trace of `jax.profiler`
    and its tools.

    Args:
        path: The HTML file to write; none by default.

    Yields:
        A `Timeline` that is filled when the block ends.

    Raises:
        RuntimeError: If a trace of JAX's profiler is being recorded already.

    Example:
        >>> strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> step = rx.function(lambda x: strategy.reduce("SUM", x, axis=0))
        >>> batches = rx.data.Dataset.from_tensor_slices(np.ones((8, 4), "f")).batch(2)
        >>> with rx.debug.timeline() as seen:
        ...     for batch in strategy.experimental_distribute_dataset(batches):
        ...         total = step(batch)
        >>> len(seen.steps), sorted(seen.mean)
        (3, ['CPU:0', 'CPU:1'])
    """
    seen = Timeline()
    with tempfile.TemporaryDirectory(prefix="replicax-timeline-") as folder:
        start_recording(folder)
        try:
            yield seen
        finally:
            stop_recording()
        found = Timeline.from_trace(folder)
    vars(seen).update(vars(found))
    if path is not None:
        Path(local_path(path)).write_text(seen.html())


def start_recording(folder: str) -> None:
    """Start JAX's profiler, with operations but without Python calls."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    options.host_tracer_level = 1
    try:
        jax.profiler.start_trace(folder, profiler_options=options)
    except RuntimeError as error:
        raise ScopeError(
            f"The timeline cannot be recorded: {error}. Only one recording can run at a time; end"
            " the other one first."
        ) from error


def stop_recording() -> None:
    """Stop JAX's profiler after the devices have finished their queues."""
    for device in jax.local_devices():
        jax.block_until_ready(jax.device_put(0, device) + 1)
    jax.profiler.stop_trace()


def _events(data: Any) -> Iterator[Event]:
    for plane in data.planes:
        for number, line in enumerate(plane.lines):
            thread = f"{plane.name} {number}"
            for e in line.events:
                begin = e.start_ns * 1e-9
                yield Event(thread, e.name, begin, begin + e.duration_ns * 1e-9, dict(e.stats))


def _operations(events: list[Event]) -> dict[str, dict[str, list[Span]]]:
    """Return when programs, collectives and other operations ran, by device.

    An operation that hands its work to other threads ends, in the trace, at that point. A second
    event marks its completion, but may come after the next operations have begun. The second event
    therefore determines the end of a program, but not the end of the operation.
    """
    ends = {e.facts["_c"]: e.end for e in events if e.name.startswith(_END) and "_c" in e.facts}
    rendezvous: dict[str, list[Span]] = defaultdict(list)
    for e in events:
        if e.name == _RENDEZVOUS:
            insort(rendezvous[e.thread], (e.begin, e.end))
    found: dict[str, dict[str, list[Span]]] = {}
    programs: dict[tuple[str, Any], Span] = {}
    for e in events:
        if "hlo_op" not in e.facts or "device_ordinal" not in e.facts:
            continue
        device = f"CPU:{e.facts['device_ordinal']}"
        kinds = found.setdefault(device, {"compute": [], "collective": [], "program": []})
        inner = rendezvous.get(e.thread, [])
        at = bisect_left(inner, (e.begin, 0.0))
        meets = _COLLECTIVE.search(str(e.facts["hlo_op"])) or (
            at < len(inner) and inner[at][1] <= e.end
        )
        kinds["collective" if meets else "compute"].append((e.begin, e.end))
        call = device, e.facts.get("run_id")
        begin, end = programs.get(call, (e.begin, e.end))
        done = max(e.end, ends.get(e.facts.get("_p"), e.end))
        programs[call] = min(begin, e.begin), max(end, done)
    for (device, _), span in programs.items():
        found[device]["program"].append(span)
    return found


def _marks(events: list[Event], waits: list[float]) -> tuple[list[float], str]:
    """Return when the steps begin, and a sentence on what counts as a step.

    The step's program is the one with the most time. Its calls mark the steps, rather than the
    waits for elements, because Python runs ahead of the devices. With many calls per element, as in
    eager code, the waits for elements mark the steps.
    """
    spent: dict[Any, float] = defaultdict(float)
    begins: dict[tuple[Any, Any], float] = {}
    names: dict[Any, str] = {}
    for e in events:
        if "hlo_op" in e.facts:
            program, call = e.facts.get("program_id"), e.facts.get("run_id")
            names[program] = str(e.facts.get("hlo_module"))
            spent[program] += e.end - e.begin
            begins[program, call] = min(e.begin, begins.get((program, call), e.begin))
    if not spent:
        return [], ""
    most = max(spent, key=spent.__getitem__)
    calls = sorted(begin for (program, _), begin in begins.items() if program == most)
    if len(waits) > 1 and len(calls) > _MANY_CALLS * len(waits):
        return waits, "A step goes from one wait for an element of a dataset to the next."
    return calls, f"A step goes from one call of the program {names[most]} to the next."


def _merge(spans: Iterable[Span]) -> list[Span]:
    """Merge overlapping and adjacent spans."""
    joined: list[Span] = []
    for begin, end in sorted(s for s in spans if s[0] < s[1]):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((begin, end))
    return joined


def _subtract(spans: list[Span], others: list[Span]) -> list[Span]:
    """Return ``spans`` minus ``others``, both as from `_merge`."""
    left, at = [], 0
    for begin, end in spans:
        while at < len(others) and others[at][1] <= begin:
            at += 1
        place = at
        while place < len(others) and others[place][0] < end:
            if begin < others[place][0]:
                left.append((begin, others[place][0]))
            begin = max(begin, others[place][1])
            place += 1
        if begin < end:
            left.append((begin, end))
    return left


def _split_step(kinds: dict[str, list[Span]], step: Span) -> dict[str, float]:
    """Return the seconds of each kind within a step."""
    found = {}
    for kind, spans in kinds.items():
        first = max(0, bisect_left(spans, (step[0], 0.0)) - 1)
        inside = spans[first : bisect_left(spans, (step[1], 0.0))]
        found[kind] = sum(max(0.0, min(e, step[1]) - max(b, step[0])) for b, e in inside)
    found["idle"] = max(0.0, step[1] - step[0] - sum(found.values()))
    return found


def _is_busy(seconds: dict[str, float]) -> bool:
    return seconds["compute"] + seconds["collective"] > 0


def _pixels(
    kinds: dict[str, list[Span]], begin: float, end: float
) -> Iterator[tuple[float, float, str]]:
    """Yield the runs of one colour in a strip, as (x, width, kind), at most one per pixel."""
    scale = _PIXELS / (end - begin)
    filled = [dict.fromkeys(KINDS, 0.0) for _ in range(_PIXELS)]
    for kind, spans in kinds.items():
        for first, last in spans:
            x, until = max(0.0, (first - begin) * scale), min(_PIXELS, (last - begin) * scale)
            while x < until:
                step = min(until, int(x) + 1.0)
                filled[int(x)][kind] += step - x
                x = step
    colours = []
    for pixel in filled:
        pixel["idle"] = 1.0 - sum(pixel.values())
        colours.append(max(pixel, key=pixel.__getitem__))
    start = 0
    for i in range(1, _PIXELS + 1):
        if i == _PIXELS or colours[i] != colours[start]:
            yield float(start), float(i - start), colours[start]
            start = i
