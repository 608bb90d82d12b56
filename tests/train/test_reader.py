"""What a folder of checkpoints holds, and options of saving, as TensorFlow 2.21 has them."""

import threading

import numpy as np
import pytest

import replicax as rx


@pytest.fixture
def saved(tmp_path):
    checkpoint = rx.train.Checkpoint(v=rx.Variable([1.0, 2.0]))
    manager = rx.train.CheckpointManager(checkpoint, str(tmp_path), max_to_keep=2)
    return [manager.save() for _ in range(3)][1:]


def test_the_state_of_a_folder_names_all_checkpoints(saved, tmp_path):
    state = rx.train.get_checkpoint_state(str(tmp_path))

    assert state.model_checkpoint_path == saved[-1]
    assert state.all_model_checkpoint_paths == saved
    assert state.all_model_checkpoint_timestamps == sorted(state.all_model_checkpoint_timestamps)
    assert rx.train.get_checkpoint_state(str(tmp_path), "other") is None
    assert rx.train.get_checkpoint_state("/no/such/folder") is None


def test_one_value_is_loaded_by_name(saved, tmp_path):
    name = "v/.ATTRIBUTES/VARIABLE_VALUE"

    assert rx.train.load_variable(str(tmp_path), name).tolist() == [1, 2]
    assert rx.train.load_variable(saved[0], name).tolist() == [1, 2]
    with pytest.raises(rx.errors.NotFoundError):
        rx.train.load_variable(saved[0], "w")
    with pytest.raises(rx.errors.NotFoundError, match="no checkpoint"):
        rx.train.load_variable(str(tmp_path / "no"), name)


def test_new_checkpoints_are_given_as_they_appear(saved, tmp_path):
    looked = rx.train.checkpoints_iterator(str(tmp_path), timeout=20)
    assert next(looked) == saved[-1]
    another = rx.train.Checkpoint(v=rx.Variable(3.0))

    writer = threading.Thread(target=another.save, args=(str(tmp_path / "other"),))
    writer.start()

    assert next(looked) == str(tmp_path / "other-1")
    writer.join()


def test_after_the_time_is_over_a_function_says_whether_to_wait_on(saved, tmp_path):
    asked = []
    looked = rx.train.checkpoints_iterator(
        str(tmp_path), timeout=0, timeout_fn=lambda: asked.append(1) or len(asked) == 2
    )

    assert list(looked) == saved[-1:]
    assert len(asked) == 2
    assert list(rx.train.checkpoints_iterator(str(tmp_path / "none"), timeout=0)) == []


def test_a_save_may_continue_beside_the_training(tmp_path):
    v = rx.Variable(np.ones(4, np.float32))
    checkpoint = rx.train.Checkpoint(v=v)

    path = checkpoint.save(
        str(tmp_path / "c"), options=rx.train.CheckpointOptions(enable_async=True)
    )
    v.assign(np.zeros(4, np.float32))
    checkpoint.sync()

    assert rx.train.load_variable(path, "v/.ATTRIBUTES/VARIABLE_VALUE").tolist() == [1] * 4


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        (rx.train.CheckpointOptions, "experimental_write_callbacks", [print]),
        (rx.train.CheckpointOptions, "experimental_skip_slot_variables", True),
        (rx.train.CheckpointOptions, "experimental_sharding_callback", print),
        (rx.saved_model.LoadOptions, "experimental_skip_checkpoint", True),
    ],
)
def test_an_option_that_would_change_the_result_is_refused(kind, field, value):
    with pytest.raises(NotImplementedError, match=field):
        kind(**{field: value})


def test_a_folder_holds_a_saved_model_or_not(saved, tmp_path):
    double = rx.function(lambda x: x * 2, input_signature=[rx.TensorSpec([], "float32")])
    rx.saved_model.save(double, str(tmp_path / "model"))

    assert rx.saved_model.contains_saved_model(str(tmp_path / "model"))
    assert not rx.saved_model.contains_saved_model(saved[0])
    assert not rx.saved_model.contains_saved_model(str(tmp_path))


def test_a_python_state_without_its_two_methods_says_so(tmp_path):
    checkpoint = rx.train.Checkpoint(p=rx.train.experimental.PythonState())

    with pytest.raises(NotImplementedError, match=r"serialize\(\)"):
        checkpoint.save(str(tmp_path / "c"))
