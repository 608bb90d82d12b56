"""A proxy on loopback between a program and an emulator of an object store, which makes faults."""

import http.client
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

DROP = "drop"  # no answer at all; the request was not carried out
LOSE = "lose"  # the request was carried out, and its answer is lost
BUSY = "busy"  # 503, as a store that has too much to do
SLOWLY = "slowly"
LATE = "late"  # a listing is the first that was ever seen of the same names
_BUSY = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
_HEAD = 600  # bytes of a body that may have the name of the object


class Proxy(ThreadingHTTPServer):
    """Passes requests on to ``port``; ``rule(method, what)`` chooses the fault of each, or None."""

    daemon_threads = True

    def __init__(self, port):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.backend = port
        self.rule = lambda method, what: None
        self.seen = []
        self.listings = {}
        self.lock = threading.Lock()
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request, client_address):
        """A client that was killed is no news."""


def is_listing(path):
    """Whether a request of S3 or Google Cloud Storage asks for the names of objects."""
    return "list-type=" in path or path.partition("?")[0].endswith("/o")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        """Say nothing."""

    def _pass(self):
        body = self._body()
        what = unquote(self.path) + " " + body[:_HEAD].decode("latin-1")
        with self.server.lock:
            self.server.seen.append((self.command, what))
            fault = self.server.rule(self.command, what)
        if fault == BUSY:
            self._answer(503, [("Content-Type", "application/xml")], _BUSY)
            return
        if fault == SLOWLY:
            time.sleep(0.2)
        if fault != DROP:
            status, headers, data = self._listed(fault) or self._forward(body)
        if fault in (DROP, LOSE):
            self.close_connection = True
            return
        self._answer(status, headers, data)

    def _listed(self, fault):
        """Return the old answer to a request for a listing, if it is to be late."""
        if self.command != "GET" or not is_listing(self.path):
            return None
        with self.server.lock:
            found = self.server.listings.get(self.path)
        if found is None:
            found = self._forward(b"")
            with self.server.lock:
                self.server.listings[self.path] = found
        return found if fault == LATE else None

    def _body(self):
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        while self.rfile.readline().strip():
            pass
        return b"".join(parts)

    def _forward(self, body):
        connection = http.client.HTTPConnection("127.0.0.1", self.server.backend, timeout=60)
        skipped = {"transfer-encoding", "content-length", "connection", "expect"}
        headers = {k: v for k, v in self.headers.items() if k.lower() not in skipped}
        headers["Content-Length"] = str(len(body))
        connection.request(self.command, self.path, body, headers)
        answer = connection.getresponse()
        data = answer.read()
        kept = [(k, v) for k, v in answer.getheaders() if k.lower() not in skipped]
        if self.command == "HEAD" and (size := answer.getheader("Content-Length")):
            kept.append(("Content-Length", size))
        connection.close()
        return answer.status, kept, data

    def _answer(self, status, headers, data):
        self.send_response_only(status)
        for name, value in headers:
            self.send_header(name, value)
        if self.command != "HEAD":
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(b"" if self.command == "HEAD" else data)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = do_PATCH = _pass  # noqa: N815
