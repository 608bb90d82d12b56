"""A URL of another file system is refused wherever a path is taken; nothing is written locally."""

import os
import pathlib
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import replicax as rx

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


DATA = rx.data.Dataset.range(3)
# Everything that takes a path, with a path to give it.
TAKES = {
    "Checkpoint.save": lambda p: checkpoint().save(p),
    "Checkpoint.write": lambda p: checkpoint().write(p),
    "Checkpoint.restore": lambda p: checkpoint().restore(p),
    "Checkpoint.read": lambda p: checkpoint().read(p),
    "CheckpointManager": lambda p: rx.train.CheckpointManager(checkpoint(), p, max_to_keep=1),
    "Resumable": lambda p: rx.train.Resumable(p, every=1, v=rx.Variable(1.0)).__enter__(),
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


@pytest.mark.parametrize("name", TAKES)
@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    scheme=st.sampled_from(["gs", "s3", "hdfs", "memory", "GS", "abfs+ssl", "r2"]),
    kind=st.sampled_from([str, pathlib.PurePosixPath]),
)
def test_url_is_refused_and_writes_nothing(name, scheme, kind):
    with pytest.raises(rx.errors.UnimplementedError, match=re.escape(scheme)):
        TAKES[name](kind(f"{scheme}://bucket/run/ckpt"))

    assert os.listdir() == []


def test_file_url_is_a_local_path(tmp_path):
    path = checkpoint().write(f"file://{tmp_path}/ckpt")

    assert path == f"{tmp_path}/ckpt"
    assert rx.train.list_variables(f"file://{tmp_path}/ckpt")


def test_local_folder_with_a_colon_can_be_named():
    rx.io.gfile.makedirs("./gs:/bucket")

    assert os.listdir() == ["gs:"]
    assert rx.io.gfile.exists("C:stays") is False
