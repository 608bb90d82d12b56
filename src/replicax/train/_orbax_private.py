"""The parts of Orbax that replicax relies on to write checkpoints, and how files are written.

Orbax writes the metadata and lays out the files; `_serialize` writes the bytes, in every process
and without a copy. Checkpoints are read without Orbax, so that these parts matter for saving only.
"""

import contextlib
import logging
import os
import threading
from collections.abc import Iterator
from functools import cache
from typing import Any

import jax

from replicax._contract import Contract, LibraryFeature, PrivatePart
from replicax._lazy import LazyModule
from replicax.workers._watch import disk

_AT_ONCE = 64 << 20  # bytes that are written in one go
_quieting = threading.Lock()
_ocp: Any = LazyModule("orbax.checkpoint", extra="checkpoint")
_ts: Any = LazyModule("tensorstore", extra="checkpoint")

SAVING = LibraryFeature("saving of checkpoints", "nothing; checkpoints can still be read")

CHECKPOINTER = PrivatePart(":Checkpointer", SAVING, "handler, *, multiprocessing_options")
SAVE = PrivatePart(":Checkpointer.save", SAVING, "self, directory, *args, **kwargs")
HANDLER = PrivatePart(
    ":PyTreeCheckpointHandler",
    SAVING,
    "*, use_ocdbt, multiprocessing_options, type_handler_registry",
)
OPTIONS = PrivatePart(
    ":options.MultiprocessingOptions", SAVING, "*, primary_host, active_processes"
)
REGISTRY = PrivatePart(":type_handlers.create_type_handler_registry", SAVING, "*handlers")
SERIALIZE = PrivatePart(
    ":type_handlers.NumpyHandler.serialize", SAVING, "self, values, infos, args"
)
AWAIT_PATH = PrivatePart(":type_handlers.ParamInfo.await_path_creation", SAVING, "self")
PATH_PARENT = PrivatePart(":type_handlers.ParamInfo.parent_dir", SAVING)
PATH_NAME = PrivatePart(":type_handlers.ParamInfo.name", SAVING)

CONTRACT = Contract(
    "Orbax",
    "orbax.checkpoint",
    "orbax.checkpoint",
    "0.12 (orbax-checkpoint>=0.12,<0.13)",
    SAVING,
    [part for part in vars().values() if isinstance(part, PrivatePart)],
    error=ImportError,
)


def chunk(name: str, ndim: int) -> str:
    """Return the file in which zarr puts an array that is one chunk and not compressed."""
    return f"{name}/{'.'.join('0' * max(ndim, 1))}"


def save(directory: str, tree: dict[str, Any], kind: type, *, metadata_only: bool = False) -> None:
    """Write arrays into a new directory, as this process alone.

    Args:
        directory: Where to write; its parent is there.
        tree: Arrays by name, each in ``parts`` that are written one after the other.
        kind: Their type.
        metadata_only: Write all files but those that hold the bytes of the arrays.

    Raises:
        ImportError: If Orbax is not installed, or is a version that cannot be used.
    """
    with _quiet(), _checkpointer(kind, metadata_only=metadata_only) as checkpointer:
        checkpointer.save(directory, tree)


@cache
def _checked() -> None:
    CONTRACT.lost = CONTRACT.faults()
    CONTRACT.require(SAVING)


def _checkpointer(kind: type, *, metadata_only: bool) -> Any:
    _ocp.Checkpointer  # noqa: B018 - says what to install, if Orbax is missing
    _checked()
    # Each worker writes its own, and Orbax must not wait for the others.
    process = jax.process_index()
    alone = _ocp.options.MultiprocessingOptions(primary_host=process, active_processes={process})
    registry = _ocp.type_handlers.create_type_handler_registry((kind, _handler(metadata_only)()))
    handler = _ocp.PyTreeCheckpointHandler(
        use_ocdbt=False, multiprocessing_options=alone, type_handler_registry=registry
    )
    return _ocp.Checkpointer(handler, multiprocessing_options=alone)


async def _describe(values: Any, infos: Any) -> list[tuple[Any, str]]:
    """Write the zarr metadata of each array; return the arrays and their paths."""
    pairs = []
    for joined, info in zip(values, infos, strict=True):
        await info.await_path_creation()
        place = os.fspath(info.parent_dir / info.name)
        await _ts.open(
            {
                "driver": "zarr",
                "kvstore": {"driver": "file", "path": place},
                "metadata": {"compressor": None, "chunks": joined.shape},
                "context": {"file_io_sync": False},  # files are settled later, all at once
            },
            create=True,
            dtype=joined.dtype,
            shape=joined.shape,
        )
        pairs.append((joined, place))
    return pairs


async def _serialize_metadata(_: Any, values: Any, infos: Any, args: Any = None) -> list[Any]:
    await _describe(values, infos)
    return []


async def _serialize(_: Any, values: Any, infos: Any, args: Any = None) -> list[Any]:
    for joined, place in await _describe(values, infos):
        with open(chunk(place, len(joined.shape)), "xb") as file:
            for part in joined.parts:
                for at in range(0, len(part), _AT_ONCE):
                    file.write(part[at : at + _AT_ONCE])
                    disk.got_on()
    return []


@cache
def _handler(metadata_only: bool) -> Any:  # noqa: FBT001 - of a cached function
    """Return Orbax's handler of NumPy arrays, with our way of writing them."""
    handler = _ocp.type_handlers.NumpyHandler
    serialize = _serialize_metadata if metadata_only else _serialize
    return type(handler.__name__, (handler,), {"serialize": serialize})


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep Orbax's remarks on its own internals from the user's screen; errors still show."""
    log = logging.getLogger("absl")  # which knows no filters
    with _quieting:
        before = log.level
        log.setLevel(logging.ERROR)
        try:
            yield
        finally:
            log.setLevel(before)
