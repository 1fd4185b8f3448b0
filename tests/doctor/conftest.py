"""What makes a machine unwell on purpose: namespaces, limits, servers, packages."""

from __future__ import annotations

import http.server
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from email.utils import formatdate
from pathlib import Path

import pytest

from model_check.doctor import Check, Settings

HERE = Path(__file__).resolve().parent
TOKEN = "hf_" + "x" * 34


def confined(*words: str, unshare: str = "") -> Check:
    """Runs tests/doctor/confined.py WORDS, in namespaces of its own where named, and reads the check it prints."""
    return _confined(words, unshare)[-1]


def confined_stages(*words: str, unshare: str = "") -> list[Check]:
    """The same for whole stages: every check of them."""
    return _confined(("stages", *words), unshare)


def _confined(words: Sequence[str], unshare: str) -> list[Check]:
    prefix = ["unshare", "-r", unshare] if unshare else []
    if prefix and subprocess.run([*prefix, "true"], capture_output=True).returncode:
        pytest.skip(f"unshare {unshare} is not permitted here")
    command = [*prefix, sys.executable, str(HERE / "confined.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=HERE.parents[1])
    assert done.returncode == 0, done.stderr
    return [Check(**json.loads(line)) for line in done.stdout.splitlines()]


class Hub(http.server.ThreadingHTTPServer):
    """A hub on loopback that knows one token; `says` is what stands in its place, a status and a body."""

    skew_s = 0.0
    silent = False
    says: tuple[int, bytes] | None = None
    told_elsewhere: str | None = None  # the token, should it follow a redirect to another host


class _Answers(http.server.BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        if self.server.silent:
            time.sleep(5)
            return
        known = self.headers.get("Authorization") == f"Bearer {TOKEN}" and self.path == "/api/whoami-v2"
        body = json.dumps({"name": "ada"} if known else {"error": "Invalid username or password."}).encode()
        status = 200 if known else 401
        if self.server.says is not None and self.path != "/elsewhere":
            status, body = self.server.says
        elif self.path == "/elsewhere":
            status, body = 200, b'{"name": "eve"}'
            self.server.told_elsewhere = self.headers.get("Authorization")
        self.send_response_only(status)
        if status == 302:
            self.send_header("Location", f"http://localhost:{self.server.server_address[1]}/elsewhere")
        self.send_header("Date", formatdate(time.time() - self.server.skew_s, usegmt=True))
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        """Requests are not the test's output."""


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub(("127.0.0.1", 0), _Answers) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        yield server
        server.shutdown()


@pytest.fixture
def package(tmp_path: Path) -> Callable[[str, str], dict[str, str]]:
    """A package with this source in front of all others: the environment to import it in."""

    def make(name: str, source: str) -> dict[str, str]:
        folder = tmp_path / "packages" / name
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text(source)
        return {**Settings().environ, "PYTHONPATH": str(tmp_path / "packages")}

    return make
