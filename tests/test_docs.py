"""The documentation site: its reference, its drawings, and what its start page promises."""

import re
import runpy
from pathlib import Path

from tests.fresh_process import run_fresh

DOCS = Path(__file__).parents[1] / "docs"

REFERENCE = f"""
import runpy
import types
import replicax as rx
site = runpy.run_path({str(DOCS / "conf.py")!r})
pages, known = site["_public"](rx, "replicax", {{}}), {{}}
made = {{name: site["_page"](name, module, known) for name, module in pages.items()}}
texts = {{name: text for name, (text, _) in made.items()}}
for path, value in (pair for _, classes in made.values() for pair in classes):
    assert path in site["_class_page"](path, value, known), path
path = "replicax.distribute.MultiWorkerMirroredStrategy"
page = site["_class_page"](path, rx.distribute.MultiWorkerMirroredStrategy, known)
_, _, left_out = page.partition(":exclude-members: ")
assert "run" in left_out.split("\\n")[0].split(", "), page
assert "on_resize" not in page  # of a private base class: it has no other page
assert ":obj:`~replicax.distribute.Strategy.run`" in page
path = "replicax.distribute.experimental.MultiWorkerMirroredStrategy"
page = site["_class_page"](path, rx.distribute.experimental.MultiWorkerMirroredStrategy, known)
assert ":obj:`~replicax.distribute.Strategy.run`" in page
assert ":obj:`~replicax.distribute.MultiWorkerMirroredStrategy.on_resize`" in page
names = [(place, name) for place, module in pages.items() for name in module.__all__]
for place, name in names:
    value = getattr(pages[place], name)
    if isinstance(value, types.ModuleType):
        assert value in pages.values() or name == "keras", f"{{place}}.{{name}} has no page"
    else:
        assert f"{{place}}.{{name}}" in texts[place], f"{{place}}.{{name}} has no entry"
print(len(names))
"""


def test_the_reference_has_every_public_name():
    result = run_fresh(REFERENCE)

    assert result.returncode == 0, result.stderr
    assert int(result.stdout) > 400


def test_the_drawings_are_those_that_the_program_makes():
    for name, draw in runpy.run_path(str(DOCS / "make_drawings.py"))["DRAWINGS"].items():
        assert (DOCS / "_static" / f"{name}.svg").read_text() == draw(), (
            f"{name}.svg is not what it was made by: `python docs/make_drawings.py`"
        )


def test_every_cell_that_compares_leads_to_where_it_is_shown():
    page = (DOCS / "index.md").read_text().partition("## How it compares")[2]
    _, _, *rows = [line for line in page.splitlines() if line.startswith("|")]

    for row in rows:
        _, what, *cells, _ = row.split("|")
        for cell in cells:
            target = re.fullmatch(r" \[.*\]\((.*)\) ", cell)
            assert target, f"{what}: {cell!r} has no link"
            path = target[1].partition("#")[0]
            assert path.startswith("https://") or (DOCS / path).exists(), path
    assert len(rows) >= 9


def test_every_example_is_short_and_in_the_table():
    folder = DOCS.parent / "examples"
    table = (folder / "README.md").read_text()
    for path in folder.glob("**/*.py"):
        assert len(path.read_text().splitlines()) < 200, path
        assert (path.name if path.parent == folder else path.parent.name) in table, path


def test_the_diff_of_a_port_is_that_of_the_example():
    block = re.search(r"```diff\n(.*?)```", (DOCS / "porting.md").read_text(), re.DOTALL)
    folder = DOCS.parent / "examples" / "from_tensorflow"
    before, after = (
        (folder / name).read_text().splitlines() for name in ("tensorflow_program.py", "ported.py")
    )

    for line in block[1].splitlines():
        if line.strip() and line != " ...":
            assert line[0] == "+" or line[1:] in before, line
            assert line[0] == "-" or line[1:] in after, line
