"""The printed manifests are YAML, and their variables make every pod a worker of one cluster."""

import subprocess
import sys
import textwrap

import pytest
import yaml

from replicax._src.cli.main import main
from replicax._src.cluster.detection import resolve_cluster
from replicax._src.train.preemption import PREEMPTED

KINDS = ("job", "jobset", "pod", "trainjob")


@pytest.fixture
def printed(capsys):
    """Print manifests, and read them again."""

    def manifests(kind, *arguments):
        status = main(["manifest", kind, "--image", "registry/train:1", *arguments])
        captured = capsys.readouterr()
        assert status == 0, captured.err
        return list(yaml.safe_load_all(captured.out))

    return manifests


def pods(documents):
    """Yield the pods' specs, and the names that their hosts get, in the order of the workers."""
    for document in documents:
        name, spec = document["metadata"]["name"], document["spec"]
        if document["kind"] == "Pod":
            yield spec, f"{spec['hostname']}.{spec['subdomain']}"
        if document["kind"] == "Job":
            pod = spec["template"]["spec"]
            for index in range(spec["completions"]):
                yield pod, f"{name}-{index}.{pod['subdomain']}"
        if document["kind"] == "JobSet":
            (job,) = spec["replicatedJobs"]
            inner = job["template"]["spec"]
            for index in range(inner["completions"]):
                yield inner["template"]["spec"], f"{name}-{job['name']}-0-{index}.{name}"


@pytest.mark.parametrize("kind", ["job", "jobset", "pod"])
def test_every_pod_is_a_worker_of_one_cluster(printed, monkeypatch, kind):
    found = list(pods(printed(kind, "--workers", "3", "--name", "mnist", "/app/train.py")))

    assert len(found) == 3
    for index, (spec, _) in enumerate(found):
        (container,) = spec["containers"]
        variables = {v["name"]: v.get("value", str(index)) for v in container["env"]}
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        facts = resolve_cluster()
        assert (facts.index, facts.num_workers) == (index, 3)
        assert facts.coordinator == f"{found[0][1]}:7000"
        assert facts.addresses[index] in (None, f"{found[index][1]}:7000")


@pytest.mark.parametrize("kind", ["job", "jobset"])
def test_a_preemption_costs_no_restart(printed, kind):
    spec = printed(kind, "/app/train.py")[-1]["spec"]
    job = spec["replicatedJobs"][0]["template"]["spec"] if kind == "jobset" else spec
    condition, codes = job["podFailurePolicy"]["rules"]

    assert condition["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert codes["onExitCodes"]["values"] == [PREEMPTED]
    if kind == "jobset":
        (rule,) = spec["failurePolicy"]["rules"]
        assert rule["onJobFailureReasons"] == ["PodFailurePolicy"]
        assert {condition["action"], codes["action"]} == {"FailJob"}
    else:
        assert {condition["action"], codes["action"]} == {"Ignore"}


@pytest.mark.parametrize("kind", KINDS)
def test_arguments_of_the_program_stay_text(printed, kind):
    words = ["on", "1e3", "a: b", "- x", "#", "null", "", "ü", "'\"", "a\nb"]
    document = printed(kind, "--gpus", "2", "-m", "my.program", "--", *words)[-1]

    text = yaml.safe_dump(document)
    assert "nvidia.com/gpu: 2" in text
    command = find(document, "command")
    assert command == ["python", "-u", "-m", "my.program", *words]


def find(value, key):
    if isinstance(value, dict):
        if key in value:
            return value[key]
        value = list(value.values())
    if isinstance(value, list):
        return next((found for item in value if (found := find(item, key)) is not None), None)
    return None


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["--name", "My_Run"], "--name is 'My_Run'"),
        (["--workers", "0"], "--workers is 0; it must be at least 1"),
    ],
)
def test_invalid_arguments_are_refused(capsys, arguments, fault):
    assert main(["manifest", "job", "--image", "x", *arguments, "x.py"]) == 2
    assert fault in capsys.readouterr().err


def test_manifests_need_no_jax():
    program = textwrap.dedent("""
        import sys
        from replicax_command import entry
        try:
            entry()
        finally:
            assert not {"jax", "numpy", "yaml"} & set(sys.modules)
    """)
    arguments = ["manifest", "pod", "--image", "x", "x.py"]
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True)

    assert done.returncode == 0, done.stderr
