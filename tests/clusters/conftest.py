"""A Slurm cluster of two nodes on this machine, for the tests of this folder."""

import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest


class Nodes(dict):
    """The environment of clients; `start` and `kill` are for the daemon of one node."""

    def __init__(self, environment, config):
        super().__init__(environment)
        self._config = config
        self._daemons = {}

    def start(self, name):
        command = ["/usr/sbin/slurmd", "-D", "-f", self._config, "-N", name]
        self._daemons[name] = _daemon(command, self)

    def kill(self, name):
        """Kill a node's daemon, as if its machine were gone."""
        self._daemons[name].kill()
        self._daemons.pop(name).wait(300)

    def end(self):
        for daemon in self._daemons.values():
            daemon.terminate()
            daemon.wait(300)


def _daemon(command, environment):
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
    return subprocess.Popen([*map(str, command)], env=environment, **quiet)


@pytest.fixture(scope="session")
def slurm(tmp_path_factory):
    """Start munged, slurmctld and slurmd; return the environment of clients."""
    yield from _cluster(tmp_path_factory.mktemp("slurm"))


@pytest.fixture(scope="session")
def slurm_with_cgroups(tmp_path_factory):
    """A cluster whose nodes put the processes of each step into a cgroup.

    Two nodes of one machine would use the same cgroups, so there is one.
    """
    folder = tmp_path_factory.mktemp("cgroups")
    is_v2 = Path("/sys/fs/cgroup/cgroup.controllers").exists()
    if not is_v2 and not os.access("/sys/fs/cgroup/freezer", os.W_OK):
        pytest.skip("the kernel, or this container, has no cgroup of the freezer that is writable")
    (folder / "cgroup.conf").write_text(
        f"CgroupPlugin=cgroup/v{2 if is_v2 else 1}\nCgroupMountpoint=/sys/fs/cgroup\n"
        + ("IgnoreSystemd=yes\n" if is_v2 else "")
        + "ConstrainCores=yes\n"
    )
    yield from _cluster(folder, names=1, track="cgroup")


def _cluster(folder, names=2, track="linuxproc"):
    is_constrained = track == "cgroup"  # then each task sees its own cores only
    tasks = "task/cgroup,task/affinity" if is_constrained else "task/none"
    cpus = os.cpu_count() if is_constrained else 8
    for command in ("munged", "slurmctld", "slurmd", "srun", "sbatch"):
        if shutil.which(command, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None:
            pytest.skip(f"{command} is not installed: make test-clusters installs it")
    if os.geteuid() != 0:
        pytest.skip("starting Slurm's daemons needs root")
    folder.chmod(0o755)
    host = socket.gethostname().partition(".")[0]
    control = _free_port()
    nodes = {name: _free_port() for name in (host, "localhost")[:names]}  # names of this machine
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    socket_file = folder / "munge.socket"
    config = folder / "slurm.conf"
    config.write_text(
        f"""ClusterName=test
SlurmctldHost={host}
SlurmctldPort={control}
AuthType=auth/munge
AuthInfo=socket={socket_file},cred_expire=5
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/{track}
TaskPlugin={tasks}
ReturnToService=2
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
JobRequeue=1
SlurmdTimeout=10
KillWait=60
UnkillableStepTimeout=60
MinJobAge=600
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""
        + "".join(
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={cpus}\n"
            for name, port in nodes.items()
        )
    )
    for name in ("state", *(f"spool-{node}" for node in nodes)):
        (folder / name).mkdir()
    environment = {**os.environ, "SLURM_CONF": str(config)}
    files = ("--key-file", key, "--socket", socket_file, "--pid-file", folder / "munge.pid")
    logs = ("--log-file", folder / "munge.log", "--seed-file", folder / "munge.seed")
    daemons = [
        _daemon(["/usr/sbin/munged", "--foreground", "--force", *files, *logs], environment),
        _daemon(["/usr/sbin/slurmctld", "-D", "-f", config], environment),
    ]
    cluster = Nodes(environment, config)
    try:
        for name in nodes:
            cluster.start(name)
        wait_until_idle(environment, folder, names)
        yield cluster
    finally:
        cluster.end()
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            daemon.wait(300)


def wait_until_idle(environment, folder, names=2):
    """Wait until all nodes can take jobs."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        asked = subprocess.run(
            ["sinfo", "-h", "-N", "-o", "%T"], env=environment, capture_output=True, text=True
        )
        if asked.stdout.split() == ["idle"] * names:
            return
        time.sleep(0.5)
    logs = [path.read_text()[-2000:] for path in folder.glob("*.log")]
    raise RuntimeError(f"Slurm did not start: {asked.stdout} {asked.stderr} {logs}")


def _free_port():
    with socket.socket() as free:
        free.bind(("", 0))
        return free.getsockname()[1]
