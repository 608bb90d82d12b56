"""Servers of clouds on the loopback address: a Kubernetes API with pods and a Job, GCE metadata."""

import contextlib
import json
import ssl
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlparse

METADATA = "/computeMetadata/v1/instance/attributes/"


@contextlib.contextmanager
def serving(answer, certificate=None):
    """Answer GET requests by ``answer(path, query, headers)``: a text or an object, or None.

    Yields:
        The port.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            parts = urlparse(self.path)
            query = {name: values[0] for name, values in parse_qs(parts.query).items()}
            found = answer(parts.path, query, self.headers)
            body = found if isinstance(found, str) else json.dumps(found or {"code": 404})
            self.send_response(200 if found is not None else 404)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body.encode())))
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def gce_metadata(index, hosts):
    """Serve the metadata of one host of a TPU pod."""
    attributes = {
        "agent-worker-number": str(index),
        "worker-network-endpoints": ",".join(f"unknown:unknown:{host}" for host in hosts),
        "tpu-env": "ACCELERATOR_TYPE: 'v4-16'\n",
    }

    def answer(path, _, headers):
        if headers.get("Metadata-Flavor") != "Google":
            return None
        return attributes.get(path.removeprefix(METADATA))

    return serving(answer)


class Kubernetes:
    """An API with an Indexed Job ``train``, maybe of a JobSet, whose pods have these addresses.

    Attributes:
        secrets: A folder as the one that Kubernetes puts into pods.
        phases: The phase of each pod.
    """

    def __init__(self, folder, hosts, *, jobset):
        self.secrets = folder / "serviceaccount"
        self.secrets.mkdir()
        self.phases = ["Running"] * len(hosts)
        self._hosts = hosts
        self._labels = {"jobset.sigs.k8s.io/jobset-name": "train"} if jobset else {}
        self._token = "a-token"
        certificate, self._key = self.secrets / "ca.crt", folder / "key"
        name = ["-subj", "/CN=fake", "-addext", "subjectAltName=IP:127.0.0.1"]
        files = ["-keyout", str(self._key), "-out", str(certificate), "-days", "2", "-nodes"]
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "rsa:2048", *files, *name],
            check=True,
            capture_output=True,
        )
        (self.secrets / "token").write_text(self._token)
        (self.secrets / "namespace").write_text("ml")

    def serve(self):
        """Serve the API; see `serving`."""
        return serving(self._answer, (str(self.secrets / "ca.crt"), str(self._key)))

    def _answer(self, path, query, headers):
        if headers.get("Authorization", "").lower() != f"bearer {self._token}":
            return None
        if path == "/apis/batch/v1/namespaces/ml/jobs/train":
            meta = {"name": "train", "namespace": "ml", "labels": self._labels}
            template = {"spec": {"containers": [{"name": "worker"}]}}
            return {"metadata": meta, "spec": {"parallelism": 2, "template": template}}
        pods = [self._pod(index) for index in range(len(self._hosts))]
        if path == "/api/v1/namespaces/ml/pods":
            address = query["fieldSelector"].removeprefix("status.podIP=")
            return {"items": [pod for pod in pods if pod["status"]["podIP"] == address]}
        if path == "/api/v1/pods" and query["labelSelector"] == "app=train":
            return {"items": pods[::-1]}  # in no order
        return None

    def _pod(self, index):
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": "train", "uid": "u"}
        host = self._hosts[index]
        return {
            "metadata": {
                "name": f"train-{index}",
                "labels": {"job-name": "train", "app": "train"},
                "ownerReferences": [{**owner, "controller": True}],
            },
            "spec": {"subdomain": "pods", "containers": [{"name": "worker"}]},
            "status": {"phase": self.phases[index], "podIP": host, "hostIP": host},
        }
