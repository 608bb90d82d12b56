"""The command ``replicax``.

``replicax launch`` starts processes and watches them, ``replicax top`` shows them, and ``replicax
manifest`` describes them to Kubernetes. They do not need JAX, whose import would take longer
than all their work, so they are imported without the package's ``__init__``. The other
subcommands import all of replicax.
"""

import sys
from importlib.util import find_spec
from types import ModuleType


def entry() -> None:
    """Run the installed command."""
    if sys.argv[1:2] in (["launch"], ["manifest"], ["top"]):
        _enter_without_init("replicax")
    from replicax._src.cli.main import entry as enter  # noqa: PLC0415 - from here on, not before

    enter()


def _enter_without_init(name: str) -> None:
    spec = find_spec(name)
    assert spec is not None
    package = ModuleType(name)
    package.__path__ = spec.submodule_search_locations or []
    sys.modules[name] = package
