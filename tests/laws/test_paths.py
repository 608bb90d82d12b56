"""A URL is never taken for a local name: each function uses it, or refuses it with words."""

import argparse
import importlib
import inspect
import os
import pathlib
import re
import sys
import tempfile

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import replicax as rx
from replicax._src.cli.main import VERBS, main
from replicax._src.files.paths import is_url, local_file, local_path, user_path
from replicax._src.preflight.compiler import Compiling, compile_program
from replicax._src.preflight.plan import Plan, read_prices
from replicax._src.workers.settings import read_token
from tests.object_store import store
from tests.test_structure import ALL_PUBLIC, public_members

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


def preempt(path):
    rx.train.PreemptionCheckpointHandler(None, checkpoint(), path).close()


DATA = rx.data.Dataset.range(3)


# Everything that takes a path, with a path to give it.
def vocabulary(path):
    from replicax.compat import tf  # noqa: PLC0415

    return tf.lookup.TextFileInitializer(path, bytes, -2, "int32", -1).items()


def track(path):
    rx.train.track("tensorboard", folder=path)
    rx.train.track(folder=tempfile.mkdtemp())  # ends it


TAKES = {
    "Checkpoint.save": lambda p: checkpoint().save(p),
    "Checkpoint.write": lambda p: checkpoint().write(p),
    "Checkpoint.restore": lambda p: checkpoint().restore(p),
    "Checkpoint.read": lambda p: checkpoint().read(p),
    "CheckpointManager": lambda p: rx.train.CheckpointManager(checkpoint(), p, max_to_keep=1),
    "Resumable": resume,
    "latest_checkpoint": rx.train.latest_checkpoint,
    "TextFileInitializer": vocabulary,
    "load_checkpoint": rx.train.load_checkpoint,
    "list_variables": rx.train.list_variables,
    "load_variable": lambda p: rx.train.load_variable(p, "v"),
    "get_checkpoint_state": rx.train.get_checkpoint_state,
    "checkpoints_iterator": lambda p: list(rx.train.checkpoints_iterator(p, timeout=0)),
    "CheckpointReader": rx.train.CheckpointReader,
    "open_safetensors": rx.train.open_safetensors,
    "load_safetensors": lambda p: rx.train.load_safetensors(p, {"v": rx.Variable(1.0)}),
    "save_safetensors": lambda p: rx.train.save_safetensors(p, {"v": rx.Variable(1.0)}),
    "track": track,
    "PreemptionCheckpointHandler": preempt,
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
    "FixedLengthRecordDataset": lambda p: list(rx.data.FixedLengthRecordDataset(p, 1)),
    "make_csv_dataset": lambda p: rx.data.experimental.make_csv_dataset(p, 1),
    "make_batched_features_dataset": lambda p: rx.data.experimental.make_batched_features_dataset(
        p, 1, {"x": rx.io.FixedLenFeature([], "float32")}
    ),
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
    "gfile.rename to": lambda p: rx.io.gfile.rename("bucket/run/ckpt", p),
    "gfile.rename": lambda p: rx.io.gfile.rename(p, "x"),
    "experimental.save": lambda p: rx.data.experimental.save(DATA, p),
    "experimental.load": rx.data.experimental.load,
    "experimental.TFRecordWriter": lambda p: rx.data.experimental.TFRecordWriter(p).write(
        DATA.map(str)
    ),
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


NEARLY_URLS = [
    "gs:bucket/x",
    "S3:bucket/x",
    " gs://bucket/x",
    "my_fs://bucket/x",
    "gs:///x",
    "s3://",
    "{here}/gs:/bucket/x",  # what os.path.abspath and Path.absolute make of gs://bucket/x
    "runs/s3://bucket/x",
    "./runs/my_fs://bucket/x",
]


@pytest.mark.parametrize("name", TAKES)
@pytest.mark.parametrize("url", NEARLY_URLS)
def test_near_miss_of_a_url_is_refused_and_writes_nothing(name, url):
    with pytest.raises(rx.errors.UnimplementedError):
        TAKES[name](url.format(here=os.getcwd()))

    assert os.listdir() == []


UNFILLED = [
    "~/run/x",
    "{here}/~/x",  # what os.path.abspath makes of ~/x
    "$HOME/x",
    "runs/$SLURM_JOB_ID/x",
    "runs/job-${{JOB}}/x",
    "$(BUCKET)/x",  # of a Kubernetes manifest
    "gs://$BUCKET/x",
    "memory://bucket/{{run}}/x",  # of a string that should have been an f-string
    "{{{{ ds }}}}/x",
]


@pytest.mark.parametrize("name", TAKES)
def test_unfilled_variable_is_refused_and_writes_nothing(name):
    for path in UNFILLED:
        with pytest.raises(rx.errors.InvalidArgumentError, match=r"write \./"):
            TAKES[name](path.format(here=os.getcwd()))

    assert os.listdir() == []


@pytest.mark.parametrize(
    "path", ["x/Foo$Bar.class", "~$doc.docx", "price_$usd", "{a,b}", "step-{step:03d}", "a~", "$1"]
)
def test_names_that_resemble_variables_are_taken(path):
    assert user_path(path) == local_path(path) == path


@pytest.mark.parametrize("path", ["./~/x", "/data/./$HOME/x", "./{run}"])
def test_folder_that_is_called_like_a_variable_can_be_named(path):
    assert user_path(path) == local_path(path) == path


class Named:
    """A path-like object that is no `pathlib` path."""

    def __init__(self, name):
        self.name = name

    def __fspath__(self):
        return self.name


@pytest.mark.parametrize("name", TAKES)
@pytest.mark.parametrize("kind", [os.fsencode, Named, lambda url: Named(os.fsencode(url))])
def test_urls_are_refused_in_every_type_of_paths(name, kind):
    for url in ("r2d2://bucket/x", "gs:bucket/x", f"{os.getcwd()}/gs:/bucket/x"):
        with pytest.raises(rx.errors.UnimplementedError):
            TAKES[name](kind(url))

    assert os.listdir() == []


@given(text=st.text(alphabet="gs3:/. _a", max_size=12))
def test_local_name_never_has_a_folder_that_ends_like_a_scheme(text):
    """Whatever is accepted as a local name creates no folder called ``gs:`` but after ``./``."""
    try:
        name = user_path(text)
    except (rx.errors.UnimplementedError, ModuleNotFoundError):
        return
    if not is_url(name):
        assert not re.search(r"(^|(?<!^\.)(?<!/\.)/)(gs|s3):/", name)


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


def timeline(path):
    with rx.debug.timeline(path):
        pass


LOCAL = {
    "Timeline.from_trace": rx.debug.Timeline.from_trace,
    "timeline": timeline,
    "Sweep.plot": lambda p: rx.tpu.Sweep(()).plot(p),
    "Plan.plot": lambda p: Plan(()).plot(p),
    "prices": read_prices,
    "cache of preflight": lambda p: compile_program({}, b"", Compiling(cache=p)),
    "executable of preflight": lambda p: compile_program({}, b"", Compiling(executable=p)),
    "token": lambda p: read_token({"REPLICAX_TOKEN_FILE": p}),
}


@pytest.mark.parametrize("take", [local_path, local_file, *LOCAL.values()])
def test_url_is_refused_where_only_local_files_are_taken(take):
    with pytest.raises(rx.errors.UnimplementedError, match="local files only"):
        take("gs://bucket/x")
    with pytest.raises(rx.errors.UnimplementedError, match="behind a local folder"):
        take(f"{os.getcwd()}/gs:/bucket/x")

    for path in ("~/x", "runs/$RUN/x"):
        with pytest.raises(rx.errors.InvalidArgumentError, match=r"write \./"):
            take(path)

    assert os.listdir() == []
    assert local_path("file:///tmp/x") == "/tmp/x"


def test_file_url_is_a_local_path(tmp_path):
    path = checkpoint().write(f"file://{tmp_path}/ckpt")

    assert path == f"{tmp_path}/ckpt"
    assert rx.train.list_variables(f"file://{tmp_path}/ckpt")


def test_local_folder_with_a_colon_can_be_named():
    rx.io.gfile.makedirs("./gs:/bucket")

    assert os.listdir() == ["gs:"]
    assert rx.io.gfile.exists(f"{os.getcwd()}/./gs:/bucket")
    assert rx.io.gfile.exists("C:stays") is False


# Parameters of public functions that are names of files, and those that only look like it.
FILE_PARAMETER = re.compile(r"path|file|dir|folder|pattern|prefix$|^(src|dst|top|logdir)$")
NO_FILES = {
    "create_file_writer.filename_suffix",
    "FileStatistics.is_directory",
    "argsort.direction",
    "compat.path_to_str.path",  # only text
    "enable_check_numerics.path_length_limit",
    "sort.direction",
    "strings.regex_full_match.pattern",
    "strings.regex_replace.pattern",
    "get_checkpoint_state.latest_filename",  # a name in the folder
    "GFile.write.file_content",
    "gfile.join.path",  # only text
    "gfile.join.paths",
    "latest_checkpoint.latest_filename",
    "StoredTensor",  # has been opened
    "SummaryWriter.open_file",  # a function
}


def parameters_of(function):
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # a property, or an exception
        return ()


def file_parameters():
    """The public functions and methods that take files, as `module.function.parameter`."""
    seen = {}
    for name, obj in ALL_PUBLIC:
        members = public_members(obj) if inspect.isclass(obj) else ()
        for full, function in [(name, obj), *((f"{name}.{m}", f) for m, f in members)]:
            plain = inspect.unwrap(getattr(function, "__func__", function))
            for parameter in parameters_of(plain):
                if FILE_PARAMETER.search(parameter):
                    seen.setdefault((plain, parameter), f"{full}.{parameter}")
    return list(seen.values())


def test_every_public_function_with_a_file_is_under_the_law():
    known = [*(f"{name.removesuffix(' to')}." for name in [*TAKES, *LOCAL]), *NO_FILES]
    missing = [
        found for found in file_parameters() if not any(f".{name}" in f".{found}" for name in known)
    ]

    assert missing == []


def commands():
    """Each option of the command line that names a file, with the other words that it needs."""
    for verb in VERBS:
        parser = argparse.ArgumentParser()
        importlib.import_module(f"replicax._src.cli.{verb}").add_arguments(parser)
        needed = []
        program = [] if all(action.option_strings for action in parser._actions) else ["program.py"]
        for action in parser._actions:
            if action.required and action.option_strings:
                needed += [action.option_strings[0], "1"]
        for action in parser._actions:
            if action.metavar in ("FILE", "DIR", "F") and action.nargs != 0:
                yield verb, [action.option_strings[-1], "gs://bucket/x", *needed, *program]


def options():
    return [pytest.param(*found, id=" ".join([found[0], found[1][0]])) for found in commands()]


@pytest.mark.parametrize(("verb", "words"), options())
def test_url_is_refused_by_the_command_line(verb, words, capsys):
    open("program.py", "w").close()

    assert main([verb, *words]) == 2
    assert "takes local files only" in capsys.readouterr().err
    assert os.listdir() == ["program.py"]


def test_no_argument_of_the_command_line_is_a_bare_path():
    for verb in VERBS:
        parser = argparse.ArgumentParser()
        importlib.import_module(f"replicax._src.cli.{verb}").add_arguments(parser)
        assert [a.dest for a in parser._actions if a.type is pathlib.Path] == []
