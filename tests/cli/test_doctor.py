"""replicax doctor: a line for everything that a training program needs."""

import json

import pytest

from replicax._src.cli import doctor
from replicax._src.cli.main import main
from tests.multi_process.gang import Gang


@pytest.fixture(autouse=True)
def usual(monkeypatch, tmp_path):
    for name in ("TF_CONFIG", "KERAS_BACKEND"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("KERAS_HOME", str(tmp_path / "keras"))


def findings(capsys, *words):
    status = main(["doctor", "--json", *words])
    found = {one["name"]: one for one in json.loads(capsys.readouterr().out)}
    assert status == (0 if all(one["ok"] for one in found.values()) else 1)
    return found


def test_a_machine_that_is_well_has_a_line_for_everything(capsys, tmp_path):
    found = findings(capsys, "--checkpoints", str(tmp_path / "new" / "folder"))

    assert list(found) == ["versions", "keras", "cluster", "devices", "cores", "checkpoints"]
    assert all(one["ok"] for one in found.values())
    assert "jax " in found["versions"]["said"]
    assert found["devices"]["said"] == "cpu: 8 x cpu"
    assert list((tmp_path / "new" / "folder").iterdir()) == []


def test_the_lines_say_ok_or_not_and_what_to_do(capsys, monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "torch")

    assert main(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("ok  versions    replicax ") for line in lines)
    at = lines.index("NOT keras       KERAS_BACKEND names 'torch'")
    assert lines[at + 1].strip() == "-> Set KERAS_BACKEND=jax in the environment."


def test_another_backend_in_the_file_of_keras_is_reported(capsys, tmp_path):
    (tmp_path / "keras").mkdir()
    (tmp_path / "keras" / "keras.json").write_text('{"backend": "tensorflow"}')

    keras = findings(capsys)["keras"]

    assert keras["ok"]
    assert "names 'tensorflow'" in keras["said"]
    assert "KERAS_BACKEND=jax" in keras["advice"]


def test_a_mistake_in_tf_config_is_pointed_at(capsys, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", '{"cluster": {"worker": ["a:1" "b:2"]}}')

    cluster = findings(capsys, "--cluster")

    assert "workers" not in cluster  # nobody is met by a wrong list
    rows = cluster["cluster"]["said"].splitlines()
    assert rows[2].index("^") == rows[1].index('"b:2"')


def test_a_host_that_does_not_exist_is_named(capsys, monkeypatch):
    config = {
        "cluster": {"worker": ["localhost:1234", "no-such-host.invalid:1234"]},
        "task": {"type": "worker", "index": 0},
    }
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))

    cluster = findings(capsys)["cluster"]

    assert not cluster["ok"]
    assert "no such host: no-such-host.invalid:1234" in cluster["said"]


def test_a_place_where_no_checkpoint_can_be_written_is_reported(capsys, tmp_path):
    (tmp_path / "file").write_text("in the way")

    checkpoints = findings(capsys, "--checkpoints", str(tmp_path / "file"))["checkpoints"]

    assert not checkpoints["ok"]
    assert "FileExistsError" in checkpoints["said"]


@pytest.mark.multi_process
def test_workers_that_ask_together_meet_and_add_up(tmp_path):
    with Gang(tmp_path, 2) as gang:
        for index in range(2):
            gang.start(index, program="patient")
        workers = gang.wait()

    for worker in workers:
        assert worker.process.returncode == 0, worker.text
        found = {one["name"]: one for one in json.loads(worker.text)}
        assert found["workers"]["said"].startswith("2 replicas met in ")
        assert "ms" in found["workers"]["said"]


@pytest.mark.multi_process
def test_two_workers_of_one_index_are_reported(tmp_path):
    with Gang(tmp_path, 2, REPLICAX_JOIN_TIMEOUT="8") as gang:
        for _ in range(2):
            gang.start(0, program="patient")
        workers = gang.wait()

    assert [worker.process.returncode for worker in workers] == [1, 1]
    said = " ".join(worker.text for worker in workers)
    assert "index 0" in said


def test_checkpoints_without_orbax_are_reported(capsys, tmp_path, monkeypatch):
    known = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda n: None if "orbax" in n else known(n))

    found = findings(capsys, "--checkpoints", str(tmp_path))["checkpoints"]

    assert not found["ok"]
    assert "replicax[checkpoint]" in found["advice"]
