"""TensorFlow's own files, written by tests/golden/make_checkpoints.py, are the oracle."""

import json
import pathlib
import shutil

import numpy as np
import pytest

import replicax as rx

FILES = pathlib.Path(__file__).parents[1] / "golden" / "checkpoints"
SUFFIX = "/.ATTRIBUTES/VARIABLE_VALUE"


def test_every_kind_of_tensor_has_the_value_that_tensorflow_wrote():
    reader = rx.train.load_checkpoint(str(FILES / "variables-1"))

    def read(name):
        return reader.get_tensor(name + SUFFIX)

    np.testing.assert_array_equal(read("v"), [[0, 1, 2], [3, 4, 5]])
    np.testing.assert_array_equal(read("w"), [1, -2])
    assert read("s").tolist() == [b"a", b"bcd", b""]
    np.testing.assert_array_equal(read("h").astype("float32"), [1.5, -2.5])
    assert read("b").tolist() == [True, False]
    assert read("e").shape == (0, 3)
    assert (read("lst/0"), read("lst/1/x")) == (1.0, 2.0)


def test_shapes_and_dtypes_are_listed_by_name():
    reader = rx.train.load_checkpoint(str(FILES / "variables-1"))

    assert dict(rx.train.list_variables(str(FILES / "variables-1")))["v" + SUFFIX] == [2, 3]
    assert str(reader.get_variable_to_dtype_map()["h" + SUFFIX]) == "bfloat16"
    assert reader.has_tensor("w" + SUFFIX)
    assert not reader.has_tensor("nope")


def test_a_tensor_that_was_saved_in_parts_comes_out_whole():
    reader = rx.train.load_checkpoint(str(FILES / "parts"))

    assert rx.train.list_variables(str(FILES / "parts")) == [("big/w", [300, 3]), ("q", [])]
    np.testing.assert_array_equal(reader.get_tensor("big/w"), np.load(FILES / "parts.npy"))
    assert reader.get_tensor("q") == 3.5


def test_the_newest_checkpoint_of_a_folder_is_the_one_that_tensorflow_noted():
    assert rx.train.latest_checkpoint(str(FILES)) == str(FILES / "variables-1")
    assert rx.train.load_checkpoint(str(FILES)).has_tensor("v" + SUFFIX)


def test_variables_are_restored_by_the_names_that_lead_to_them():
    v, x = rx.Variable(np.zeros((2, 3), np.float32)), rx.Variable(0.0)
    w = rx.Variable([0, 0])  # int32, where TensorFlow had int64

    status = rx.train.Checkpoint(v=v, w=w, lst=[rx.Variable(0.0), {"x": x}]).restore(
        str(FILES / "variables-1")
    )

    assert v.numpy().tolist() == [[0, 1, 2], [3, 4, 5]]
    assert w.numpy().tolist() == [1, -2]
    assert float(x) == 2.0
    status.assert_existing_objects_matched().expect_partial()
    with pytest.raises(rx.errors.CheckpointError, match="h/"):
        status.assert_consumed()


@pytest.mark.parametrize("name", ["variables-1", "parts", "keras-1"])
def test_no_flipped_bit_gives_other_values(tmp_path, name):
    """Every byte of both files, damaged: the same values, or an error that says so."""
    for file in FILES.glob(f"{name}.*"):
        if file.suffix != ".npy":
            shutil.copy(file, tmp_path)
    good = _all_values(tmp_path / name)
    rng = np.random.default_rng(0)
    for file in tmp_path.glob(f"{name}.*"):
        data = bytearray(file.read_bytes())
        for at in sorted(rng.choice(len(data), min(len(data), 150), replace=False).tolist()):
            bit = 1 << int(rng.integers(8))
            data[at] ^= bit
            file.write_bytes(data)
            try:
                found = _all_values(tmp_path / name)
            except (rx.errors.DataLossError, rx.errors.NotFoundError):
                found = good
            assert json.dumps(found) == json.dumps(good), (file.name, at)
            data[at] ^= bit
        file.write_bytes(data)


def test_a_file_that_is_cut_off_or_missing_is_named(tmp_path):
    for file in FILES.glob("variables-1.*"):
        shutil.copy(file, tmp_path)
    data = tmp_path / "variables-1.data-00000-of-00001"
    data.write_bytes(data.read_bytes()[:30])
    reader = rx.train.load_checkpoint(str(tmp_path / "variables-1"))
    with pytest.raises(rx.errors.DataLossError, match="cut off"):
        reader.get_tensor("w" + SUFFIX)
    data.unlink()
    with pytest.raises(rx.errors.DataLossError, match="lacks its file"):
        reader.get_tensor("w" + SUFFIX)
    with pytest.raises(rx.errors.NotFoundError, match="no checkpoint"):
        rx.train.load_checkpoint(str(tmp_path / "nothing"))


def test_a_checkpoint_of_names_alone_says_how_to_read_it():
    with pytest.raises(rx.errors.NotFoundError, match="get_tensor"):
        rx.train.Checkpoint(q=rx.Variable(0.0)).restore(str(FILES / "parts"))


def _all_values(prefix):
    reader = rx.train.load_checkpoint(str(prefix))
    return {
        name: repr(reader.get_tensor(name).tolist()) for name in reader.get_variable_to_shape_map()
    }
