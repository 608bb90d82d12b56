"""The example for SkyPilot, and KubernetesClusterResolver with an API on the loopback address."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from replicax._src.workers.wire import free_ports
from tests.clusters.test_real import PROGRAM, PYTHON, ROOT, SECONDS, environment, started, sums
from tests.multi_process.servers import Kubernetes

pytestmark = [pytest.mark.slow, pytest.mark.clusters]
HOSTS = ["127.0.0.1", "127.0.0.2"]


def test_sky_pilot_example(tmp_path):
    example = yaml.safe_load((ROOT / "examples" / "clusters" / "sky.yaml").read_text())
    (tmp_path / "train.py").write_text(PROGRAM.read_text().replace("sys.argv[1] if", "'' if"))
    common = environment(
        SKYPILOT_NUM_NODES=str(example["num_nodes"]),
        SKYPILOT_NODE_IPS="\n".join(HOSTS),
        SKYPILOT_TASK_ID=str(tmp_path),
        REPLICAX_TOKEN="a secret",
        PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    )
    workers = [
        started(
            ["sh", "-c", f"cd {tmp_path}\n{example['run']}"],
            {**common, "SKYPILOT_NODE_RANK": str(index)},
        )
        for index in range(2)
    ]

    assert [sums(worker) for worker in workers] == [["2"], ["2"]]


def can_mount():
    if not shutil.which("unshare") or os.getuid() != 0:
        return False
    return subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode == 0


needs_kubernetes = pytest.mark.skipif(
    importlib.util.find_spec("kubernetes") is None or not can_mount(),
    reason="needs the Kubernetes client, root and mount namespaces",
)


def in_pod(index, folder, api, how):
    """Start a worker with the files and names of a pod."""
    names = folder / "hosts"
    names.write_text("127.0.0.1 localhost train-0 train-0.pods train-0.train\n127.0.0.2 train-1\n")
    secrets = "/run/secrets/kubernetes.io"
    script = (
        f"mount -t tmpfs tmpfs /run && mkdir -p {secrets} && cp -r {folder}/serviceaccount"
        f' {secrets} && mount --bind {names} /etc/hosts && exec "$@"'
    )
    env = environment(
        KUBERNETES_SERVICE_HOST="127.0.0.1",
        KUBERNETES_SERVICE_PORT=str(api),
        HOSTNAME=f"train-{index}",
        **how,
    )
    program = [*PYTHON, "kubernetes" if "INDEX" in how else "environment"]
    return started(["unshare", "-m", "sh", "-c", script, "sh", *program], env)


@needs_kubernetes
def test_resolver_lists_the_nodes_of_labelled_pods(tmp_path):
    port = str(free_ports(1)[0])
    with Kubernetes(tmp_path, HOSTS, jobset=False).serve() as api:
        workers = [in_pod(i, tmp_path, api, {"INDEX": str(i), "PORT": port}) for i in range(2)]
        assert [sums(worker) for worker in workers] == [["2"], ["2"]]


@needs_kubernetes
def test_resolver_fails_on_a_pending_pod(tmp_path):
    cluster = Kubernetes(tmp_path, HOSTS, jobset=False)
    cluster.phases[1] = "Pending"
    with cluster.serve() as api:
        worker = in_pod(0, tmp_path, api, {"INDEX": "0", "PORT": "7000"})
        output, _ = worker.communicate(timeout=SECONDS)

    assert worker.returncode == 1
    assert "Pod 'train-1' is not running, its phase is 'Pending'" in output
