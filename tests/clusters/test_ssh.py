"""``launch --ssh`` over a real sshd on the loopback address."""

import shlex
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from replicax._src.workers.wire import free_ports
from tests.cli.test_ssh import ended, hosts, wait_for_ranks  # noqa: F401 - a fixture

pytestmark = [pytest.mark.slow, pytest.mark.clusters]

needs_sshd = pytest.mark.skipif(
    not all(map(shutil.which, ("/usr/sbin/sshd", "ssh-keygen", "ssh"))), reason="no sshd here"
)


@needs_sshd
def test_all_hosts_end_with_the_command_over_real_ssh(hosts, tmp_path):  # noqa: F811
    port = free_ports(1)[0]
    keys = [tmp_path / "host", tmp_path / "own"]
    for key in keys:
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    allowed = tmp_path / "allowed"
    allowed.write_text((tmp_path / "own.pub").read_text())
    config = tmp_path / "sshd_config"
    settings = {
        "Port": port,
        "ListenAddress": "0.0.0.0",
        "HostKey": keys[0],
        "AuthorizedKeysFile": allowed,
        "PidFile": tmp_path / "sshd.pid",
        "UsePAM": "no",
        "StrictModes": "no",
        "PermitRootLogin": "prohibit-password",
        "PermitUserEnvironment": "no",
        "AcceptEnv": "*",
    }
    config.write_text("".join(f"{name} {value}\n" for name, value in settings.items()))
    Path("/run/sshd").mkdir(exist_ok=True)
    server = subprocess.Popen(["/usr/sbin/sshd", "-D", "-e", "-f", str(config)])
    options = ["-p", str(port), "-i", str(keys[1]), "-o", "StrictHostKeyChecking=no"]
    options += ["-o", f"UserKnownHostsFile={tmp_path / 'known'}", "-o", "LogLevel=ERROR"]
    options += ["-o", "BatchMode=yes", "-o", "SendEnv=PYTHONPATH JAX_PLATFORMS"]
    (tmp_path / "bin" / "ssh").rename(tmp_path / "fake")
    try:
        (tmp_path / "bin" / "ssh").write_text(
            f'#!/bin/sh\nexec {shutil.which("ssh")} {shlex.join(options)} "$@"\n'
        )
        (tmp_path / "bin" / "ssh").chmod(0o755)
        process = hosts("sleeps", names="127.0.0.1,127.0.0.2")
        wait_for_ranks(process)
        process.send_signal(signal.SIGTERM)
        code, out, err = ended(process)
    finally:
        server.terminate()
        server.wait()

    assert code == 143, out + err
