"""A URL is never taken for a local name: each function uses it, or refuses it with words."""

import importlib
import os
import pathlib
import re
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import replicax as rx
from replicax._src.files.paths import local_path
from tests.object_store import store

__all__ = ["store"]
pytestmark = pytest.mark.usefixtures("_empty_folder")


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def checkpoint():
    return rx.train.Checkpoint(v=rx.Variable(1.0))


def module():
    class Doubled:
        @rx.function(input_signature=[rx.TensorSpec([], "float32")])
        def double(self, x):
            return x * 2

    return Doubled()


def resume(path):
    with rx.train.Resumable(path, every=1, v=rx.Variable(1.0)):
        pass


DATA = rx.data.Dataset.range(3)
# Everything that takes a path, with a path to give it.
TAKES = {
    "Checkpoint.save": lambda p: checkpoint().save(p),
    "Checkpoint.write": lambda p: checkpoint().write(p),
    "Checkpoint.restore": lambda p: checkpoint().restore(p),
    "Checkpoint.read": lambda p: checkpoint().read(p),
    "CheckpointManager": lambda p: rx.train.CheckpointManager(checkpoint(), p, max_to_keep=1),
    "Resumable": resume,
    "latest_checkpoint": rx.train.latest_checkpoint,
    "load_checkpoint": rx.train.load_checkpoint,
    "list_variables": rx.train.list_variables,
    "saved_model.save": lambda p: rx.saved_model.save(module(), p),
    "saved_model.load": rx.saved_model.load,
    "contains_saved_model": rx.saved_model.contains_saved_model,
    "create_file_writer": rx.summary.create_file_writer,
    "Dataset.save": lambda p: DATA.save(p),
    "Dataset.load": rx.data.Dataset.load,
    "Dataset.cache": lambda p: list(DATA.cache(p)),
    "Dataset.snapshot": lambda p: list(DATA.snapshot(p)),
    "Dataset.list_files": rx.data.Dataset.list_files,
    "TFRecordDataset": lambda p: list(rx.data.TFRecordDataset(p)),
    "TextLineDataset": lambda p: list(rx.data.TextLineDataset(p)),
    "CsvDataset": lambda p: list(rx.data.experimental.CsvDataset(p, [0])),
    "TFRecordWriter": rx.io.TFRecordWriter,
    "read_file": rx.io.read_file,
    "write_file": lambda p: rx.io.write_file(p, "x"),
    "matching_files": lambda p: rx.io.matching_files(os.fspath(p)),
    "GFile": lambda p: rx.io.gfile.GFile(p, "w").write("x"),
    "gfile.exists": rx.io.gfile.exists,
    "gfile.glob": rx.io.gfile.glob,
    "gfile.isdir": rx.io.gfile.isdir,
    "gfile.listdir": rx.io.gfile.listdir,
    "gfile.makedirs": rx.io.gfile.makedirs,
    "gfile.mkdir": rx.io.gfile.mkdir,
    "gfile.remove": rx.io.gfile.remove,
    "gfile.rmtree": rx.io.gfile.rmtree,
    "gfile.stat": rx.io.gfile.stat,
    "gfile.walk": lambda p: list(rx.io.gfile.walk(p)),
    "gfile.copy": lambda p: rx.io.gfile.copy(p, "x"),
    "gfile.copy to": lambda p: rx.io.gfile.copy(__file__, p),
    "gfile.rename": lambda p: rx.io.gfile.rename(p, "x"),
}


SETTINGS = settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.mark.parametrize("name", TAKES)
@SETTINGS
@given(
    url=st.sampled_from(
        ["r2d2://bucket/x", "GSX://bucket/x", "abfs+ssl://b/x", "simplecache::memory://b/x", "a::b"]
    ),
    kind=st.sampled_from([str, pathlib.PurePosixPath]),
)
def test_unknown_scheme_is_refused_and_writes_nothing(name, url, kind):
    with pytest.raises(rx.errors.UnimplementedError, match=re.escape(url.split(":")[0])):
        TAKES[name](kind(url))

    assert os.listdir() == []


@pytest.mark.parametrize("name", TAKES)
@pytest.mark.parametrize(("scheme", "package"), [("gs", "gcsfs"), ("S3", "s3fs")])
def test_missing_package_is_named_with_its_extra(name, scheme, package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    monkeypatch.setattr(importlib.import_module("fsspec.registry"), "_registry", {})
    with pytest.raises(ModuleNotFoundError, match=rf"replicax\[{scheme.lower()}\]"):
        TAKES[name](f"{scheme}://bucket/run/ckpt")

    assert os.listdir() == []


def test_missing_fsspec_is_named_with_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(ModuleNotFoundError, match=r"replicax\[gs\]"):
        rx.train.latest_checkpoint("gs://bucket/run")
    with pytest.raises(ModuleNotFoundError, match="pip install 'fsspec'"):
        rx.train.latest_checkpoint("memory://bucket/run")


@pytest.mark.parametrize("name", TAKES)
@pytest.mark.parametrize("kind", [str, pathlib.PurePosixPath])
def test_url_is_never_a_local_folder(name, kind, store):
    try:
        TAKES[name](kind("memory://bucket/run/ckpt"))
    except (rx.errors.NotFoundError, rx.errors.InvalidArgumentError) as error:
        assert "bucket/run/ckpt" in str(error)  # noqa: PT017 - many have nothing to read

    assert os.listdir() == []


@pytest.mark.parametrize("name", TAKES)
@pytest.mark.parametrize(
    "url",
    ["s3://key:hunter2@bucket/x", "memory://u:hunter2@b/x", "https://host/x?sig=hunter2"],
)
def test_secrets_in_a_url_are_refused_and_not_shown(name, url, caplog, capfd):
    with pytest.raises(rx.errors.InvalidArgumentError) as caught:
        TAKES[name](url)

    assert "hunter2" not in str(caught.value) + caplog.text + "".join(capfd.readouterr())
    assert os.listdir() == []


@pytest.mark.parametrize("take", [local_path])
def test_url_is_refused_where_only_local_files_are_taken(take):
    with pytest.raises(rx.errors.UnimplementedError, match="local files only"):
        take("gs://bucket/x")
    assert take("file:///tmp/x") == "/tmp/x"


def test_file_url_is_a_local_path(tmp_path):
    path = checkpoint().write(f"file://{tmp_path}/ckpt")

    assert path == f"{tmp_path}/ckpt"
    assert rx.train.list_variables(f"file://{tmp_path}/ckpt")


def test_local_folder_with_a_colon_can_be_named():
    rx.io.gfile.makedirs("./gs:/bucket")

    assert os.listdir() == ["gs:"]
    assert rx.io.gfile.exists("C:stays") is False
