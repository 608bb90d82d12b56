"""Writing arrays with Orbax, and the contract with the parts of Orbax that this relies on.

Orbax writes the metadata and lays out the files; `_serialize` writes the bytes, in every process
and without copying them. Checkpoints are read without Orbax, so only saving depends on it.
"""

import contextlib
import logging
import os
import threading
from collections.abc import Iterator
from functools import cache
from typing import Any

import jax

from replicax._src.base.contract import Contract, LibraryFeature, PrivatePart
from replicax._src.base.lazy import LazyModule
from replicax._src.workers.watchdog import disk

_AT_ONCE = 64 << 20  # bytes per write, after which progress is reported
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
    """Return the path of the single, uncompressed chunk of a zarr array."""
    return f"{name}/{'.'.join('0' * max(ndim, 1))}"


def save(directory: str, tree: dict[str, Any], kind: type, *, metadata_only: bool = False) -> None:
    """Write arrays into a new directory, from this process only.

    Args:
        directory: The directory; its parent must exist.
        tree: Arrays by name, each with ``parts`` that are written back to back.
        kind: The type of the arrays.
        metadata_only: Write every file except the arrays' chunks.

    Raises:
        ImportError: Orbax is not installed, or its version is unsupported.
    """
    with _quiet(), _checkpointer(kind, metadata_only=metadata_only) as checkpointer:
        checkpointer.save(directory, tree)


@cache
def _checked() -> None:
    CONTRACT.lost = CONTRACT.faults()
    CONTRACT.require(SAVING)


def _checkpointer(kind: type, *, metadata_only: bool) -> Any:
    _ocp.Checkpointer  # noqa: B018 - raises with what to install, if Orbax is missing
    _checked()
    # Each worker writes its own directory, so Orbax must not wait for the others.
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
                "context": {"file_io_sync": False},  # all files are synced together later
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
                    disk.note_progress()
    return []


@cache
def _handler(metadata_only: bool) -> Any:  # noqa: FBT001 - argument of a cached function
    """Return a subclass of Orbax's NumPy handler that writes arrays with `_serialize`."""
    handler = _ocp.type_handlers.NumpyHandler
    serialize = _serialize_metadata if metadata_only else _serialize
    return type(handler.__name__, (handler,), {"serialize": serialize})


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress Orbax's log messages below the level of errors."""
    log = logging.getLogger("absl")  # absl's logger ignores filters, so change the level
    with _quieting:
        before = log.level
        log.setLevel(logging.ERROR)
        try:
            yield
        finally:
            log.setLevel(before)
