"""Rendering of facts and tables: text for terminals, HTML for notebooks, self-contained pages.

All text is escaped and truncated, because names and values come from the user.
"""

from __future__ import annotations

import html
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich import console as _console
    from rich import table as _table
    from rich import text as _text
else:
    from replicax._src.base.lazy import LazyModule

    _console, _table, _text = map(LazyModule, ("rich.console", "rich.table", "rich.text"))

MOST_ROWS = 50
MOST_LETTERS = 120

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2330; --soft: #667085; --line: #d9dee7; --page: #fff;
  --panel: #f6f8fb; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ef; --soft: #98a2b3; --line: #3a4252;
  --page: #14171d; --panel: #1d222b; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page);
  max-width: 70rem; margin: 2rem auto; padding: 0 1.5rem; }
h1 { font-size: 1.5rem; margin-bottom: .25rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
p.soft, .soft { color: var(--soft); } pre { background: var(--panel); padding: .8rem 1rem;
  overflow-x: auto; border-radius: 6px; white-space: pre-wrap; overflow-wrap: anywhere; }
table { border-collapse: collapse; margin: .8rem 0; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .25rem .8rem .25rem 0; border-bottom: 1px solid var(--line); }
td.number, th.number { text-align: right; } svg { max-width: 100%; height: auto; display: block; }
svg text { fill: var(--ink); font: 12px system-ui, sans-serif; } svg .soft { fill: var(--soft); }
.swatch { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin: 0 .35em 0 0;
  vertical-align: baseline; } .legend > span { margin-right: 1.2em; }
"""


def show_bytes(count: float) -> str:
    """Format a number of bytes with a binary unit."""
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:,.2f} GiB"


def short(text: Any, most: int = MOST_LETTERS) -> str:
    """Return ``text`` as one line of at most ``most`` characters, without control characters."""
    plain = "".join(c if c.isprintable() else " " for c in str(text)[: most + 1])
    return plain if len(plain) <= most else plain[: most - 1] + "…"


def escaped(text: Any, most: int = MOST_LETTERS) -> str:
    """Return `short` of ``text``, escaped for HTML and SVG."""
    return html.escape(short(text, most))


def as_text(drawn: Any, width: int = 100) -> str:
    """Render a rich object as plain text."""
    text = io.StringIO()
    _console.Console(width=width, file=text, force_terminal=False).print(drawn)
    return text.getvalue()


def format_components(title: str, rows: Sequence[str]) -> str:
    """Format the repr of a distributed value or variable: a title and one row per component."""
    body = ",\n".join(f"  {i}: {row}" for i, row in enumerate(rows))
    return f"{title}:{{\n{body}\n}}"


@dataclass(frozen=True)
class Sheet:
    """Facts and a table, which print as text, and render as tables in rich and in notebooks.

    Attributes:
        title: The title.
        facts: Pairs of a name and a value.
        columns: The headers of the table; ``>`` marks a column of numbers, and ``~`` one of text
            that is truncated to one line if there is no room.
        rows: The rows of the table.
        notes: Sentences below the table.
    """

    title: str
    facts: tuple[tuple[str, str], ...] = ()
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    notes: tuple[str, ...] = ()

    def __rich_console__(self, console: Any, options: Any) -> Iterable[Any]:
        yield _text.Text(short(self.title), "bold")
        width = max((len(name) for name, _ in self.facts), default=0)
        for name, value in self.facts:
            yield _text.Text(f"  {short(name):<{width}}  ") + _text.Text(short(value), "cyan")
        if self.columns:
            # rich distributes the remaining width over columns only if the table expands.
            is_cut = any(column.startswith("~") for column in self.columns)
            table = _table.Table(box=None, header_style="bold", pad_edge=True, expand=is_cut)
            for column in self.columns:
                if column.startswith(">"):
                    table.add_column(column[1:], justify="right", no_wrap=True)
                elif column.startswith("~"):
                    table.add_column(column[1:], overflow="ellipsis", no_wrap=True, ratio=1)
                else:
                    table.add_column(column, overflow="fold")
            for row in self._shown():
                table.add_row(*(_text.Text(short(cell)) for cell in row))
            yield table
        for note in self._all_notes():
            yield _text.Text(short(note, 1000), "dim")

    def __str__(self) -> str:
        text = as_text(self)
        return "\n".join(line.rstrip() for line in text.splitlines())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return self.to_html()

    def to_html(self) -> str:
        """Render the sheet as an HTML fragment."""
        facts = [f"<tr><td>{escaped(n)}</td><td>{escaped(v)}</td></tr>" for n, v in self.facts]
        body = f"<table>{''.join(facts)}</table>" if facts else ""
        if self.columns:
            body += html_table(self.columns, self._shown())
        notes = "".join(f"<p>{escaped(note, 1000)}</p>" for note in self._all_notes())
        return f"<div><b>{escaped(self.title)}</b>{body}{notes}</div>"

    def _shown(self) -> tuple[tuple[str, ...], ...]:
        return self.rows[:MOST_ROWS]

    def _all_notes(self) -> tuple[str, ...]:
        left = len(self.rows) - MOST_ROWS
        return (*((f"... and {left:,} rows more",) if left > 0 else ()), *self.notes)


def html_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Render an HTML table; headers that begin with ``>`` are of columns of numbers."""
    kinds = [' class="number"' if c.startswith(">") else "" for c in columns]
    head = "".join(
        f"<th{k}>{escaped(c.lstrip('>~'))}</th>" for c, k in zip(columns, kinds, strict=True)
    )
    body = "".join(
        "<tr>"
        + "".join(f"<td{k}>{escaped(x, 400)}</td>" for x, k in zip(row, kinds, strict=True))
        + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def page(title: str, body: str) -> str:
    """Render a complete HTML page that needs no other file, script or network access."""
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escaped(title)}</title><style>{_STYLE}</style></head>"
        f"<body>\n<h1>{escaped(title)}</h1>\n{body}\n</body></html>\n"
    )


class Drawing:
    """An SVG image, built element by element."""

    def __init__(self, width: float, height: float) -> None:
        self._size = f"{width:.0f} {height:.0f}"
        self._width = width
        self._parts: list[str] = []

    def rect(  # noqa: PLR0913 - x, y, width and height are one thing
        self, x: float, y: float, width: float, height: float, fill: str, *, tooltip: str = ""
    ) -> None:
        """Add a rectangle; ``tooltip`` is shown on hover."""
        tip = f"<title>{escaped(tooltip, 400)}</title>" if tooltip else ""
        self._parts.append(
            f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}"'
            f' fill="{fill}">{tip}</rect>'
        )

    def text(
        self, x: float, y: float, said: Any, *, anchor: str = "start", soft: bool = False
    ) -> None:
        """Add a line of text."""
        kind = ' class="soft" fill-opacity="0.65"' if soft else ""
        self._parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{kind} fill="currentColor"'
            f' font-size="12" font-family="system-ui, sans-serif">{escaped(said)}</text>'
        )

    def line(
        self, points: Iterable[tuple[float, float]], colour: str, *, tooltip: str = ""
    ) -> None:
        """Add a line through points; ``tooltip`` is shown on hover."""
        tip = f"<title>{escaped(tooltip, 400)}</title>" if tooltip else ""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5">{tip}'
            "</polyline>"
        )

    def __str__(self) -> str:
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self._size}"'
            f' width="{self._width:.0f}">{"".join(self._parts)}</svg>'
        )
