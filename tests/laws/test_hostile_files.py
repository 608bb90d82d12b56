"""Files that were damaged, or made by an enemy, give values or an error of ours, within bounds."""

import gc
import json
import shutil
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import replicax as rx
from replicax._src.base.errors import ReplicaxError
from tests.fresh_process import run_fresh
from tests.replicas import mirrored

SRC = Path(rx.__file__).parents[1]
ROOT = Path(__file__).parents[2]

MUCH = 64 * 2**20  # bytes; the files here have a few thousand


def cached(folder, *, read):
    dataset = rx.data.Dataset.from_tensor_slices({"x": np.arange(60.0), "t": [b"abc"] * 60})
    return [np.asarray(e["x"]) for e in dataset.cache(str(folder / "cache")).as_numpy_iterator()]


def saved(folder, *, read):
    if not read:
        rx.data.Dataset.from_tensor_slices((np.arange(60.0), [b"abc"] * 60)).save(str(folder))
    return [e[0] for e in rx.data.Dataset.load(str(folder)).as_numpy_iterator()]


def records(folder, *, read):
    path = str(folder / "records")
    if not read:
        with rx.io.TFRecordWriter(path) as writer:
            for i in range(20):
                writer.write(bytes([i]) * 40)
    return list(rx.data.TFRecordDataset(path).as_numpy_iterator())


def checkpoints(folder, *, read):
    with mirrored(2).scope():
        v = rx.Variable(np.arange(40.0))
    numbers = iter(rx.data.Dataset.range(50).shuffle(7, seed=3))
    checkpoint = rx.train.Checkpoint(v=v, numbers=numbers)
    if not read:
        next(numbers)
        checkpoint.save(str(folder / "c"))
        return None
    checkpoint.restore(rx.train.latest_checkpoint(str(folder)))
    return v.numpy(), int(next(numbers))


FORMATS = [cached, saved, records, checkpoints]


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    made = {}
    for form in FORMATS:
        made[form] = tmp_path_factory.mktemp(form.__name__)
        form(made[form], read=False)
    return made


DAMAGE = st.tuples(
    st.sampled_from(["flip", "cut", "insert", "remove", "fill"]),
    st.integers(0, 10**6),
    st.integers(0, 10**6),
    st.binary(min_size=1, max_size=12)
    | st.sampled_from([b"\xff" * 8, b"\x00" * 8, b"9" * 30, b"[" * 3000, b'"\\ud800"']),
)


def damaged(data, how, at, length, text):
    at %= len(data) + 1
    end = at + length % 64
    match how:
        case "flip":
            return (
                data[:at] + bytes(b ^ 1 << length % 8 for b in data[at : at + 1]) + data[at + 1 :]
            )
        case "cut":
            return data[:at]
        case "insert":
            return data[:at] + text + data[at:]
        case "remove":
            return data[:at] + data[end:]
    return data[:at] + text + data[at + len(text) :]


@pytest.mark.parametrize("form", FORMATS, ids=lambda f: f.__name__)
@settings(
    max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(which=st.integers(0, 99), damage=DAMAGE)
def test_a_damaged_file_gives_its_values_or_our_error(form, originals, tmp_path, which, damage):
    folder = tmp_path / "copy"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(originals[form], folder)
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    victim = files[which % len(files)]
    victim.write_bytes(damaged(victim.read_bytes(), *damage))

    _reads_in_bounds(lambda: form(folder, read=True))


@pytest.mark.parametrize("name", ["..", "../../outside", "{outside}", "", "a/b"])
def test_the_list_of_a_saved_dataset_leads_nowhere_else(originals, tmp_path, name):
    (tmp_path / "outside").mkdir()
    folder = tmp_path / "a" / "saved"
    shutil.copytree(originals[saved], folder)
    (path,) = (p for p in folder.iterdir() if p.is_file())
    told = json.loads(path.read_text())
    path.write_text(json.dumps(told | {"folder": name.format(outside=tmp_path / "outside")}))

    with pytest.raises(rx.errors.DataLossError):
        saved(folder, read=True)
    with pytest.raises(rx.errors.DataLossError):
        saved(folder, read=False)
    assert (tmp_path / "outside").exists()


@settings(max_examples=400, deadline=None)
@example(b"", ("flip", 322, 1, b"\0"))  # a number where floats are expected
@given(st.binary(max_size=80), DAMAGE)
def test_damaged_examples_give_their_values_or_our_error(noise, damage):
    whole = rx.train.Example(
        features=rx.train.Features(
            feature={
                "a": rx.train.Feature(int64_list=rx.train.Int64List(value=[1, 2, 3])),
                "b": rx.train.Feature(bytes_list=rx.train.BytesList(value=[b"text"])),
                "c": rx.train.Feature(float_list=rx.train.FloatList(value=[0.5])),
            }
        )
    ).SerializeToString()
    features = {
        "a": rx.io.FixedLenFeature([3], "int64"),
        "b": rx.io.VarLenFeature(bytes),
        "c": rx.io.FixedLenFeature([], "float32"),
    }
    for data in (noise, damaged(whole, *damage)):
        _reads_in_bounds(lambda data=data: rx.train.Example.FromString(data))
        _reads_in_bounds(lambda data=data: rx.io.parse_single_example(data, features))


def _reads_in_bounds(read):
    gc.collect(0)
    tracemalloc.start()
    try:
        read()
    except ReplicaxError:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < MUCH


AUDITED = """
    import sys, tempfile
    from pathlib import Path
    from tests.laws import test_hostile_files as files
    forbidden = ("pickle.find_class", "exec", "compile", "marshal.loads", "import", "os.system",
                 "subprocess.Popen", "os.exec", "os.posix_spawn", "ctypes.dlopen")
    seen = set()

    def note(event, args):
        # NumPy reads the header of an array with `ast.literal_eval`: parsed, and never evaluated.
        is_header = event == "compile" and args[0] and bytes(args[0]).startswith(b"{'descr'")
        if event in forbidden and not is_header:
            seen.add((event, str(args)[:200]))

    with tempfile.TemporaryDirectory() as name:
        folders = {form: Path(name, form.__name__) for form in files.FORMATS}
        for form, folder in folders.items():
            folder.mkdir()
            form(folder, read=False)
            form(folder, read=True)  # imports and compiles what code needs, whatever is in the file
        sys.addaudithook(note)
        for form, folder in folders.items():
            form(folder, read=True)
    print(sorted(seen))
"""


def test_reading_files_unpickles_evaluates_and_imports_nothing():
    done = run_fresh(AUDITED, PYTHONPATH=f"{SRC}:{ROOT}", REPLICAX_CPU_DEVICES="2")

    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
