"""The command ``replicax``.

``replicax launch`` starts processes and watches them, ``replicax top`` shows them, and ``replicax
manifest`` describes them to Kubernetes. They need nothing of JAX, whose import would take longer
than all the rest, so they enter the package without the package's ``__init__``.
The other verbs get everything.
"""

import sys
from importlib.util import find_spec
from types import ModuleType


def entry() -> None:
    """What the installed command calls."""
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
