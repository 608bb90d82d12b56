"""Sweep: one step on several slices, as a table and as a plot."""

from __future__ import annotations

import importlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from replicax.ahead._report import PreflightReport

_ORANGE, _RED, _GREY = "#c8601a", "#b02a2a", "#777777"
_PARTS = {"arguments": "#1f5fa8", "outputs": "#5b9bd5", "temporaries": "#9dc3e6", "code": "#444444"}


@dataclass(frozen=True)
class Sweep:
    """Reports of one step on several slices. Print it, ask `to_json`, or `plot` it.

    Attributes:
        reports: One for each slice.

    Example:
        >>> rx.tpu.Sweep(()).to_json()
        '[]'
    """

    reports: tuple[PreflightReport, ...]

    def to_json(self) -> str:
        """All reports as JSON text."""
        return json.dumps([json.loads(report.to_json()) for report in self.reports], indent=2)

    @classmethod
    def from_json(cls, text: str) -> Sweep:
        """The reports that `to_json` wrote; or the one that a report's own `to_json` did.

        Example:
            >>> rx.tpu.Sweep.from_json("[]")
            Sweep(reports=())
        """
        read = json.loads(text)
        rows = read if isinstance(read, list) else [read]
        return cls(tuple(PreflightReport.from_json(json.dumps(row)) for row in rows))

    def plot(self, path: str | Path) -> None:
        """Draw what fills the memory of a device, and what it sends, for each slice.

        Args:
            path: Where to; the ending chooses the kind: ``.png``, ``.svg``, ``.pdf``.

        Raises:
            ImportError: matplotlib is not installed.

        Example:
            >>> sweep = rx.tpu.preflight_sweep(step, (batch,))  # doctest: +SKIP
            >>> sweep.plot("scaling.png")  # doctest: +SKIP
        """
        figure_module, agg = drawing()
        figure = figure_module.Figure(figsize=(9, 3.6), layout="constrained")
        agg.FigureCanvasAgg(figure)
        left, right = figure.subplots(1, 2)
        done = sorted(self.reports, key=lambda r: r.num_devices)
        labels = [f"{r.topology}\n{r.num_devices:,}" for r in done]
        _stack(left, labels, done)
        compiled = [r for r in done if r.compiles]
        sent = [r.communication_bytes / 2**20 for r in compiled]
        right.bar([labels[done.index(r)] for r in compiled], sent, 0.6, color=_ORANGE)
        _finish(right, "MiB", "sent by a device in a step")
        figure.savefig(path, dpi=150)

    def __rich__(self) -> Any:
        return importlib.import_module("replicax.ahead._tables").sweep_table(self)


def drawing() -> tuple[Any, Any]:
    """Matplotlib's figures and what paints them.

    Raises:
        ImportError: It is not installed.
    """
    try:
        return (
            importlib.import_module("matplotlib.figure"),
            importlib.import_module("matplotlib.backends.backend_agg"),
        )
    except ImportError as error:
        raise ImportError(
            "A plot needs matplotlib, which is not installed:\n\n    pip install 'replicax[plot]'\n"
        ) from error


def _stack(axes: Any, labels: list[str], reports: list[PreflightReport]) -> None:
    """What the memory of a device holds, part upon part, below what there is."""
    base = [0.0] * len(reports)
    for part, colour in _PARTS.items():
        sizes = [getattr(r.memory, part) / 2**30 for r in reports]
        axes.bar(labels, sizes, 0.6, bottom=base, label=part, color=colour)
        base = [a + b for a, b in zip(base, sizes, strict=True)]
    unknown = [max(0.0, r.memory.total / 2**30 - b) for r, b in zip(reports, base, strict=True)]
    if max(unknown, default=0.0) > 1e-3:  # the compiler refused it, and says the total only
        axes.bar(labels, unknown, 0.6, bottom=base, label="does not fit", color=_RED)
    limits = [r.hbm / 2**30 for r in reports]
    axes.scatter(labels, limits, marker="_", s=600, color=_GREY, label="there is")
    _finish(axes, "GiB", "memory of a device")
    axes.legend(fontsize=7)


def _finish(axes: Any, unit: str, title: str) -> None:
    axes.set_ylim(0, 1.1 * axes.get_ylim()[1])
    axes.set(xlabel="devices", ylabel=unit, title=title)
    axes.tick_params(axis="x", labelsize=7)
    axes.grid(visible=True, axis="y", alpha=0.3)
