"""Servers on the loopback that the fault scripts talk to: one that never answers, and a hub with one file."""

from __future__ import annotations

import hashlib
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

FILE = b'{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}'


@contextmanager
def silent_server() -> Iterator[int]:
    """A port that takes connections (the kernel does) and never says a word. This process is its holder."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        yield listener.getsockname()[1]


class _HubHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._headers()

    def do_GET(self) -> None:
        self._headers()
        self.wfile.write(FILE)

    def _headers(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(FILE)))
        self.send_header("ETag", f'"{hashlib.sha256(FILE).hexdigest()}"')
        self.send_header("X-Repo-Commit", "0123456789abcdef0123456789abcdef01234567")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Quiet: the requests are the script's business."""


@contextmanager
def tiny_hub() -> Iterator[int]:
    """Answers every file request of the hub's client with the same small file."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _HubHandler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
