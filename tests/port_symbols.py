"""The page of names that programs use, with what `replicax port` makes of each: docs/symbols.md.

python -m tests.port_symbols > docs/symbols.md
"""

import sys
from pathlib import Path

from replicax._src.port.rules import Rules, Same, Untranslated
from replicax._src.port.table import Row

NAMES = Path(__file__).parent / "golden" / "port" / "symbols.txt"
HEAD = """# Names of TensorFlow

This page lists names of TensorFlow that public programs use (`tests/golden/port/corpus.md`), and
what `replicax port` makes of each. `tf` on the right is `replicax.compat.tf`.
`python -m tests.port_symbols` prints this page.

| TensorFlow | replicax |
| --- | --- |
"""


def answer(rules: Rules, name: str) -> str:
    """What becomes of a name, as a cell of the table."""
    found = rules.of(name)
    if isinstance(found, Row):
        return f"`{found.target}`"
    if isinstance(found, Same):
        return f"`{found.text}`"
    assert isinstance(found, Untranslated)
    return found.words if found.is_answer else "unknown"


def page() -> str:
    rules = Rules()
    rows = [f"| `tf.{name}` | {answer(rules, name)} |" for name in NAMES.read_text().split()]
    return HEAD + "\n".join(row.replace("||", "\\|\\|") for row in rows) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
