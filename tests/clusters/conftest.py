"""A Slurm cluster of one node on this machine, for the tests of this folder."""

import os
import shutil
import socket
import subprocess
import time

import pytest


@pytest.fixture(scope="session")
def slurm(tmp_path_factory):
    """Start munged, slurmctld and slurmd; return the environment of clients."""
    for command in ("munged", "slurmctld", "slurmd", "srun", "sbatch"):
        if shutil.which(command, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None:
            pytest.skip(f"{command} is not installed: make test-clusters installs it")
    if os.geteuid() != 0:
        pytest.skip("starting Slurm's daemons needs root")
    folder = tmp_path_factory.mktemp("slurm")
    folder.chmod(0o755)
    host = socket.gethostname().partition(".")[0]
    control, node = _free_port(), _free_port()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    socket_file = folder / "munge.socket"
    config = folder / "slurm.conf"
    config.write_text(
        f"""ClusterName=test
SlurmctldHost={host}
SlurmctldPort={control}
SlurmdPort={node}
AuthType=auth/munge
AuthInfo=socket={socket_file}
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
ReturnToService=2
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
NodeName={host} CPUs=8 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""
    )
    for name in ("state", "spool"):
        (folder / name).mkdir()
    environment = {**os.environ, "SLURM_CONF": str(config)}
    files = ("--key-file", key, "--socket", socket_file, "--pid-file", folder / "munge.pid")
    logs = ("--log-file", folder / "munge.log", "--seed-file", folder / "munge.seed")
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
    daemons = [
        subprocess.Popen(command, env=environment, **quiet)
        for command in (
            ["/usr/sbin/munged", "--foreground", "--force", *map(str, files + logs)],
            ["/usr/sbin/slurmctld", "-D", "-f", str(config)],
            ["/usr/sbin/slurmd", "-D", "-f", str(config)],
        )
    ]
    try:
        _wait_until_idle(environment, folder)
        yield environment
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            daemon.wait(30)


def _wait_until_idle(environment, folder):
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        asked = subprocess.run(
            ["sinfo", "-h", "-o", "%T"], env=environment, capture_output=True, text=True
        )
        if asked.stdout.strip() == "idle":
            return
        time.sleep(0.5)
    logs = [path.read_text()[-2000:] for path in folder.glob("*.log")]
    raise RuntimeError(f"Slurm did not start: {asked.stdout} {asked.stderr} {logs}")


def _free_port():
    with socket.socket() as free:
        free.bind(("", 0))
        return free.getsockname()[1]
