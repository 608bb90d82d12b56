"""Deadlines and the token come from the environment, and nonsense is refused."""

import pytest

from replicax._src.cluster.checks import ClusterError
from replicax._src.cluster.spec import ClusterFacts
from replicax._src.workers.settings import Settings

FACTS = ClusterFacts.of_processes(0, ("a:1", "b:1"), coordinator="a:1", source="test")
OTHER = ClusterFacts.of_processes(0, ("a:1", "c:1"), coordinator="a:1", source="test")


def test_every_deadline_has_a_usual_value():
    settings = Settings.read(FACTS)

    assert (settings.join_timeout, settings.ping_timeout, settings.step_timeout) == (300, 20, 60)
    assert settings.disk_timeout == 600
    assert settings.name_timeout == 60
    assert settings.hub is None


@pytest.mark.parametrize("name", ["JOIN", "PING", "STEP", "DISK", "NAME"])
@pytest.mark.parametrize("text", ["soon", "-1", "0", "nan", "inf", "1e9"])
def test_a_deadline_that_is_not_a_number_of_seconds_is_refused(monkeypatch, name, text):
    monkeypatch.setenv(f"REPLICAX_{name}_TIMEOUT", text)

    with pytest.raises(ClusterError, match=f"REPLICAX_{name}_TIMEOUT={text!r} is not a number"):
        Settings.read(FACTS)


@pytest.mark.parametrize(
    ("environment", "seconds"),
    [
        ({}, 60),
        ({"REPLICAX_JOIN_TIMEOUT": "5"}, 5),
        ({"REPLICAX_NAME_TIMEOUT": "10"}, 10),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, 300),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "REPLICAX_NAME_TIMEOUT": "10"}, 10),
    ],
)
def test_names_of_pods_may_appear_until_all_workers_must_have_come(environment, seconds):
    assert Settings.read(FACTS, environment).name_timeout == seconds


@pytest.mark.parametrize("text", ["nonsense", "a:b", "a:70000", ":1", "a"])
def test_a_hub_that_is_not_an_address_is_refused(monkeypatch, text):
    monkeypatch.setenv("REPLICAX_HUB", text)

    with pytest.raises(ClusterError, match="The coordinator of REPLICAX_HUB has the address"):
        Settings.read(FACTS)


def test_workers_of_one_cluster_have_one_token_and_other_clusters_another():
    assert Settings.read(FACTS).token == Settings.read(FACTS).token
    assert Settings.read(FACTS).token != Settings.read(OTHER).token


def test_a_given_token_wins_and_a_file_may_hold_it(monkeypatch, tmp_path):
    path = tmp_path / "token"
    path.write_text("from a file\n")
    monkeypatch.setenv("REPLICAX_TOKEN_FILE", str(path))
    assert Settings.read(FACTS).token == "from a file"

    monkeypatch.setenv("REPLICAX_TOKEN", "given")
    assert Settings.read(FACTS).token == "given"


def test_only_a_token_that_somebody_chose_is_a_secret(monkeypatch):
    assert not Settings.read(FACTS).is_secret

    monkeypatch.setenv("REPLICAX_TOKEN", "given")
    assert Settings.read(FACTS).is_secret


def test_an_empty_token_file_is_refused(monkeypatch, tmp_path):
    (tmp_path / "token").write_text(" \n")
    monkeypatch.setenv("REPLICAX_TOKEN_FILE", str(tmp_path / "token"))

    with pytest.raises(ClusterError, match="it is empty"):
        Settings.read(FACTS)


def test_a_token_file_that_is_missing_is_named(monkeypatch):
    monkeypatch.setenv("REPLICAX_TOKEN_FILE", "/nowhere/token")

    with pytest.raises(ClusterError, match=r"/nowhere/token.*cannot be read"):
        Settings.read(FACTS)


@pytest.mark.parametrize("text", ["http", "0", "65536", "-1", "7001-7010"])
def test_a_service_port_that_is_not_a_port_is_refused(text):
    with pytest.raises(ClusterError, match=f"REPLICAX_SERVICE_PORT={text!r} is not a port"):
        Settings.read(FACTS, {"REPLICAX_SERVICE_PORT": text})


def test_addresses_to_listen_at_are_read():
    settings = Settings.read(
        FACTS, {"REPLICAX_SERVICE_PORT": "7001", "REPLICAX_BIND_ADDRESS": "[::]"}
    )

    assert (settings.bind, settings.service_port) == ("::", 7001)
    assert (Settings.read(FACTS, {}).bind, Settings.read(FACTS, {}).service_port) == (None, 0)
