"""The page of TensorFlow's names shows what the port makes of each."""

from pathlib import Path

from tests.port_symbols import page

PAGE = Path(__file__).parents[2] / "docs" / "symbols.md"


def test_the_page_of_names_is_that_of_the_port():
    assert PAGE.read_text() == page(), "python -m tests.port_symbols > docs/symbols.md"


def test_few_names_are_unknown():
    rows = PAGE.read_text().splitlines()
    unknown = [row for row in rows if row.endswith("| unknown |")]

    assert len(rows) > 1000
    assert len(unknown) <= 0.03 * len(rows)
