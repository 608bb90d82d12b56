"""Emulators of S3 and of Google Cloud Storage on loopback, behind a proxy that makes faults."""

import http.client
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

from replicax._src.workers.wire import free_ports
from tests.stores.proxy import Proxy

BUCKET = "bucket"
# What each scheme needs.
MODULES = {"s3": ("moto", "s3fs"), "gs": ("gcp_storage_emulator", "gcsfs")}


class Emulator:
    """A store that programs reach by its proxy."""

    def __init__(self, scheme, proxy, environment):
        self.scheme, self.proxy, self.environment = scheme, proxy, environment

    def fresh(self):
        """The URL of a folder that nobody has used."""
        return f"{self.scheme}://{BUCKET}/run{time.time_ns()}"


@contextmanager
def started(scheme):
    """An emulator with one bucket, as long as the block lasts."""
    (port,) = free_ports(1)
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
    process = subprocess.Popen(_commands(port)[scheme], **quiet)
    try:
        _wait(port, process)
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        if scheme == "s3":
            connection.request("PUT", f"/{BUCKET}")
        else:
            body, kind = f'{{"name": "{BUCKET}"}}', {"Content-Type": "application/json"}
            connection.request("POST", "/storage/v1/b?project=test", body, kind)
        assert connection.getresponse().status == 200
        proxy = Proxy(port)
        yield Emulator(scheme, proxy, _environment(scheme, proxy.url))
        proxy.shutdown()
        proxy.server_close()
    finally:
        process.kill()
        process.wait()


def _wait(port, process):
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        assert process.poll() is None, "the emulator has ended"
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            connection.request("GET", "/")
            connection.getresponse().read()
        except OSError:
            time.sleep(0.1)
        else:
            return
    raise AssertionError("the emulator does not answer")


def _commands(port):
    emulator = shutil.which("gcp-storage-emulator", path=str(Path(sys.executable).parent)) or ""
    return {
        "s3": [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        "gs": [emulator, "start", "--host", "127.0.0.1", "--port", str(port), "--in-memory"],
    }


def _environment(scheme, url):
    if scheme == "gs":
        return {
            "STORAGE_EMULATOR_HOST": url,
            "FSSPEC_GS_TOKEN": "anon",
            "NO_GCE_CHECK": "true",  # there is no metadata server
            # Or gcsfs asks Google's control plane, by gRPC, what kind of bucket it is.
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
        }
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "hunter2",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_MAX_ATTEMPTS": "3",  # and s3fs tries five times itself
    }
