"""A store of objects in this process, behind ``memory://``, whose requests can be made to fail."""

from contextlib import contextmanager
from typing import ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from replicax._src.files import storage
from replicax._src.train import checkpoint_files, object_store
from replicax._src.train import store as _store


class Killed(BaseException):
    """The process is gone: nothing of it reaches the store any more."""


class Store(MemoryFileSystem):
    """fsspec's memory, with faults; the state is the class's, as the store is one for all."""

    store: ClassVar[dict] = {}
    pseudo_dirs: ClassVar[list] = [""]
    protocol = "memory"
    requests: ClassVar[list[tuple[str, str]]] = []
    fault = None  # of the number of a write: what happens to it
    listed: set[str] | None = None  # what listings show, if they are late

    @classmethod
    def request(cls, verb, path, work):
        cls.requests.append((verb, path))
        act = cls.fault
        return work() if act is None else act(len(cls.requests), work)

    def pipe_file(self, path, value, **kwargs):
        return self.request("put", path, lambda: MemoryFileSystem.pipe_file(self, path, value))

    def _open(self, path, mode="rb", **kwargs):
        def work():
            return MemoryFileSystem._open(self, path, mode, **kwargs)

        is_put = mode == "rb" or kwargs.get("data") is not None
        return work() if is_put else self.request("open", path, work)

    def rm(self, path, **kwargs):
        return self.request("rm", path, lambda: MemoryFileSystem.rm(self, path, **kwargs))

    def rm_file(self, path):
        return self.request("rm_file", path, lambda: MemoryFileSystem.rm_file(self, path))

    def _rm(self, path):
        return MemoryFileSystem._rm(self, path)

    def ls(self, path, detail=True, **kwargs):
        if self.listed is None:
            return MemoryFileSystem.ls(self, path, detail, **kwargs)
        late = MemoryFileSystem(global_store=False, skip_instance_cache=True)
        late.store = dict.fromkeys(self.listed)
        for name in self.listed:
            late.pipe_file(name, b"?")
        return late.ls(path, detail, **kwargs)

    @classmethod
    def names(cls):
        return set(cls.store)


@pytest.fixture
def store(monkeypatch):
    """Put an empty `Store` in the place of fsspec's memory."""
    before = fsspec.get_filesystem_class("memory")
    monkeypatch.setattr(Store, "store", {})
    monkeypatch.setattr(Store, "pseudo_dirs", [""])
    monkeypatch.setattr(Store, "requests", [])
    monkeypatch.setattr(Store, "fault", None)
    monkeypatch.setattr(Store, "listed", None)
    fsspec.register_implementation("memory", Store, clobber=True)
    storage._instances.clear()
    yield Store
    fsspec.register_implementation("memory", before, clobber=True)
    storage._instances.clear()
    new_process()


def new_process():
    """Forget what a process knows of a store."""
    run = f"{int(checkpoint_files.RUN, 16) + 1 & (1 << 64) - 1:016x}"
    object_store._owned.clear()
    checkpoint_files._newest.clear()
    for module in (checkpoint_files, object_store, _store):
        module.RUN = run


@contextmanager
def faulty(store, act):
    """Let ``act(number, work)`` answer each write, numbered from 1."""
    store.requests.clear()
    store.fault = staticmethod(act)
    try:
        yield
    finally:
        store.fault = None
