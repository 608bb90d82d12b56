"""Sweep: one step on several slices, as a table and as a plot."""

from __future__ import annotations

import importlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from replicax.ahead._report import PreflightReport

_BLUE, _ORANGE, _GREY = "#1f5fa8", "#c8601a", "#777777"


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

    def plot(self, path: str | Path) -> None:
        """Draw memory and communication of a device over the number of devices.

        Args:
            path: Where to; the ending chooses the kind: ``.png``, ``.svg``, ``.pdf``.

        Raises:
            ImportError: matplotlib is not installed.

        Example:
            >>> sweep = rx.tpu.preflight_sweep(step, (batch,))  # doctest: +SKIP
            >>> sweep.plot("scaling.png")  # doctest: +SKIP
        """
        figure_module, agg = _matplotlib()
        figure = figure_module.Figure(figsize=(9, 3.6), layout="constrained")
        agg.FigureCanvasAgg(figure)
        left, right = figure.subplots(1, 2)
        done = sorted(self.reports, key=lambda r: r.num_devices)
        devices = [r.num_devices for r in done]
        left.plot(devices, [r.memory.total / 2**30 for r in done], "o-", color=_BLUE)
        for limit in sorted({(r.hbm / 2**30, r.topology.split(":")[0]) for r in done}):
            left.axhline(limit[0], color=_GREY, linestyle="--", linewidth=1)
            left.annotate(f"memory of a {limit[1]} device", (devices[0], limit[0]), va="top")
        _finish(left, devices, "GiB", "memory of a device")
        compiled = [r for r in done if r.compiles]
        sent = [r.communication_bytes / 2**20 for r in compiled]
        right.plot([r.num_devices for r in compiled], sent, "o-", color=_ORANGE)
        _finish(right, devices, "MiB", "sent by a device in a step")
        figure.savefig(path, dpi=150)

    def __rich__(self) -> Any:
        return importlib.import_module("replicax.ahead._tables").sweep_table(self)


def _matplotlib() -> tuple[Any, Any]:
    try:
        return (
            importlib.import_module("matplotlib.figure"),
            importlib.import_module("matplotlib.backends.backend_agg"),
        )
    except ImportError as error:
        raise ImportError(
            "A plot needs matplotlib, which is not installed:\n\n    pip install 'replicax[plot]'\n"
        ) from error


def _finish(axes: Any, devices: list[int], unit: str, title: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(devices, [f"{n:,}" for n in devices])
    axes.set_ylim(0, 1.1 * axes.get_ylim()[1])
    axes.set(xlabel="devices", ylabel=unit, title=title)
    axes.grid(visible=True, alpha=0.3)
