"""Measure `replicax port` on folders of programs that are not part of the project.

    python -m tests.port_corpus FOLDER...

Prints, for each folder, how many uses of TensorFlow's names are rewritten, answered with what to
write, and unknown; then the unknown names. Every output must parse. `tests/golden/port/corpus.md`
lists the programs that were measured.
"""

import ast
import sys
from collections import Counter
from pathlib import Path

from replicax._src.port.notebooks import port_notebook
from replicax._src.port.rewrite import Ported, PortError, port


def ported(path: Path) -> Ported | None:
    """The port of a program or notebook; None if it is not Python 3."""
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        result = (port_notebook if path.suffix == ".ipynb" else port)(text, path.name)
    except PortError:
        return None
    if path.suffix == ".py":
        ast.parse(result.code)
    return result


def measure(folder: Path) -> tuple[Counter[str], Counter[str]]:
    """How many uses have each outcome, and how often each unknown name occurs."""
    outcomes: Counter[str] = Counter()
    unknown: Counter[str] = Counter()
    for path in sorted(p for p in folder.rglob("*") if p.suffix in (".py", ".ipynb")):
        result = ported(path)
        outcomes["not Python 3" if result is None else "programs"] += 1
        for use in result.uses if result else ():
            outcomes[use.outcome] += 1
            unknown[use.path] += use.outcome == "unknown"
    return outcomes, +unknown


def main() -> None:
    for name in sys.argv[1:]:
        outcomes, unknown = measure(Path(name))
        total = sum(outcomes[k] for k in ("rewritten", "answered", "unknown")) or 1
        shares = {k: f"{outcomes[k] / total:.1%}" for k in ("rewritten", "answered", "unknown")}
        sys.stdout.write(f"{name}: {dict(outcomes)}, {shares}\n")
        for path, count in unknown.most_common():
            sys.stdout.write(f"  {count} tf.{path}\n")


if __name__ == "__main__":
    main()
