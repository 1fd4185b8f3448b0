"""The hub: a quick and clear answer when it is away, refuses us or does not know a name; downloads when it is there.

The libraries read their settings once, at import, so every case runs in a process of its own.
"""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from model_check.config.endpoint import reachable, silent
from model_check.data.tokenizer import BUILTIN

SECRET = "hf_do_not_print_me"
UNROUTABLE = "http://192.0.2.1"  # TEST-NET-1: packets go nowhere
COMMIT = "0123456789012345678901234567890123456789"

TRY = """
import json, os, sys, time
import huggingface_hub  # its import is not what is measured
if sys.argv[1] == "dataset":
    import datasets
from model_check.data import DataSpec, hub, load_tokenizer, prepare
from model_check.errors import DataError
hub.ANSWER_SECONDS = float(os.environ.get("MODEL_CHECK_TEST_PATIENCE", hub.ANSWER_SECONDS))
started = time.perf_counter()
try:
    if sys.argv[1] == "tokenizer":
        tokenizer = load_tokenizer(sys.argv[2])
        answer = {"ids": tokenizer.encode(" old river"), "eos": tokenizer.decode([tokenizer.eos_id])}
    else:
        more = json.loads(sys.argv[3])
        data = prepare(DataSpec(dataset=sys.argv[2], context_length=16, **more))
        answer = {"tokens": data.train.read(0, data.train.tokens).tolist()}
except DataError as error:
    answer = {"error": type(error).__name__, "code": error.code, "text": str(error)}
print(json.dumps({**answer, "seconds": time.perf_counter() - started}))
"""


@dataclass
class Hub:
    """A stand-in for the hub: path -> (status, headers, body); all else is `missing`. Remembers what was asked."""

    url: str = ""
    missing: str = "RepoNotFound"
    answers: dict[str, tuple[int, dict[str, str], bytes]] = field(default_factory=dict)
    asked: list[tuple[str, str | None]] = field(default_factory=list)

    def serve_file(self, path: str, body: bytes) -> None:
        self.answers[path] = (200, {"ETag": f'"{len(body)}"', "X-Repo-Commit": COMMIT}, body)


@pytest.fixture
def hub() -> Iterator[Hub]:
    stand_in = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            stand_in.asked.append((path, self.headers.get("Authorization")))
            status, headers, body = stand_in.answers.get(path, (404, {"X-Error-Code": stand_in.missing}, b"{}"))
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, format: str, *args: object) -> None:
            """Quiet: the test's output is not the server's log."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    stand_in.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield stand_in
    server.shutdown()
    thread.join()
    server.server_close()


def _try(
    tmp_path: Path, kind: str, name: str, endpoint: str, spec: dict[str, object] | None = None, **environment: str
) -> dict[str, object]:
    clean = {k: v for k, v in os.environ.items() if not k.upper().endswith("_PROXY") and not k.startswith("HF_")}
    more = {"cache_dir": str(tmp_path / "packed"), "samples": 40, "tokenizer": "bytes", **(spec or {})}
    done = subprocess.run(
        [sys.executable, "-c", TRY, kind, name, json.dumps(more)],
        env={**clean, "HF_HOME": str(tmp_path / "hub"), "HF_ENDPOINT": endpoint, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert SECRET not in done.stdout + done.stderr
    assert done.returncode == 0, done.stderr
    answer: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return answer


@pytest.mark.parametrize("kind", ["tokenizer", "dataset"])
def test_no_network_is_answered_within_two_seconds(tmp_path: Path, kind: str) -> None:
    answer = _try(tmp_path, kind, "owner/name", UNROUTABLE)
    assert (answer["error"], answer["code"]) == ("HubUnavailable", "MC905")
    assert "does not answer within 1 s" in str(answer["text"])
    assert ("data.tokenizer=builtin" if kind == "tokenizer" else "data.dataset=synthetic") in str(answer["text"])
    assert float(str(answer["seconds"])) < 2.0


def test_offline_mode_does_not_even_try(tmp_path: Path, hub: Hub) -> None:
    answer = _try(tmp_path, "tokenizer", "owner/name", hub.url, HF_HUB_OFFLINE="1")
    assert (answer["error"], answer["code"]) == ("HubUnavailable", "MC905")
    assert "HF_HUB_OFFLINE" in str(answer["text"])
    assert hub.asked == []


@pytest.mark.parametrize("kind", ["tokenizer", "dataset"])
@pytest.mark.parametrize("status", [401, 403])
def test_a_refusal_speaks_of_the_token_and_never_shows_it(tmp_path: Path, hub: Hub, kind: str, status: int) -> None:
    refusal = (status, {"X-Error-Code": "GatedRepo"}, b'{"error": "gated"}')
    hub.answers["/owner/name/resolve/main/tokenizer.json"] = refusal
    hub.answers["/api/datasets/owner/name"] = refusal
    answer = _try(tmp_path, kind, "owner/name", hub.url, HF_TOKEN=SECRET)
    assert (answer["error"], answer["code"]) == ("HubUnavailable", "MC905")
    assert f"HTTP {status}" in str(answer["text"])
    assert "export HF_TOKEN" in str(answer["text"])
    assert ("Bearer " + SECRET) in {sent for _, sent in hub.asked}


@pytest.mark.parametrize(("kind", "code"), [("tokenizer", "MC907"), ("dataset", "MC906")])
def test_an_unknown_name_is_named(tmp_path: Path, hub: Hub, kind: str, code: str) -> None:
    answer = _try(tmp_path, kind, "owner/typo", hub.url)
    assert (answer["error"], answer["code"]) == ("DataError", code)
    assert f"there is no {kind} 'owner/typo' on the hub" in str(answer["text"])


def test_a_tokenizer_is_downloaded_once_and_then_found_without_the_hub(tmp_path: Path, hub: Hub) -> None:
    hub.serve_file("/owner/name/resolve/main/tokenizer.json", BUILTIN.read_bytes())
    hub.serve_file("/owner/name/resolve/main/tokenizer_config.json", b'{"eos_token": "!"}')
    first = _try(tmp_path, "tokenizer", "owner/name", hub.url)
    assert first["eos"] == "!"
    assert len(first["ids"]) == 2  # type: ignore[arg-type]
    second = _try(tmp_path, "tokenizer", "owner/name", UNROUTABLE)
    assert second["ids"] == first["ids"]
    assert second["eos"] == "!"


@pytest.fixture
def documents(hub: Hub) -> list[str]:
    """What the hub serves as dataset owner/name."""
    texts = [f"document {i} of the hub " * 3 for i in range(50)]
    table = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), table)
    description = {"id": "owner/name", "sha": COMMIT, "tags": [], "siblings": [{"rfilename": "train.parquet"}]}
    files = [{"type": "file", "path": "train.parquet", "size": len(table.getvalue()), "oid": "a" * 40}]
    hub.missing = "EntryNotFound"
    for path, answer in {
        "/api/datasets/owner/name": description,
        f"/api/datasets/owner/name/revision/{COMMIT}": description,
        f"/api/datasets/owner/name/tree/{COMMIT}": files,
        f"/api/datasets/owner/name/paths-info/{COMMIT}": files,
    }.items():
        hub.answers[path] = (200, {"Content-Type": "application/json"}, json.dumps(answer).encode())
    hub.serve_file(f"/datasets/owner/name/resolve/{COMMIT}/train.parquet", table.getvalue())
    return texts


def _bytes_of(texts: list[str]) -> list[int]:
    return [id_ for text in texts for id_ in [*text.encode(), 256]]


@pytest.mark.slow
def test_a_dataset_is_streamed_up_to_the_samples_asked_for(tmp_path: Path, hub: Hub, documents: list[str]) -> None:
    answer = _try(tmp_path, "dataset", "owner/name", hub.url, {"samples": 40, "validation_fraction": 0.0})
    assert answer["tokens"] == _bytes_of(documents[:40])


@pytest.mark.slow
def test_a_downloaded_dataset_is_used_without_the_hub(tmp_path: Path, hub: Hub, documents: list[str]) -> None:
    whole = {"samples": None, "validation_fraction": 0.0}
    first = _try(tmp_path, "dataset", "owner/name", hub.url, whole)
    assert first["tokens"] == _bytes_of(documents)
    elsewhere = {**whole, "cache_dir": str(tmp_path / "other")}
    second = _try(tmp_path, "dataset", "owner/name", UNROUTABLE, elsewhere)
    assert second["tokens"] == first["tokens"]
    no_network = {**whole, "text_field": "body"}
    third = _try(tmp_path, "dataset", "owner/name", UNROUTABLE, no_network)
    assert "no column 'body'" in str(third["text"])


@pytest.fixture
def silent_hub() -> Iterator[str]:
    """Accepts connections, as a proxy in front of a dead server does, and never says a word."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize("kind", ["tokenizer", "dataset"])
def test_a_hub_that_accepts_and_says_nothing_is_asked_once(tmp_path: Path, kind: str, silent_hub: str) -> None:
    """The libraries ask it five times, ten seconds each, and print every attempt."""
    answer = _try(tmp_path, kind, "owner/name", silent_hub, MODEL_CHECK_TEST_PATIENCE="0.5")
    assert (answer["error"], answer["code"]) == ("HubUnavailable", "MC905")
    assert f"{silent_hub} does not answer within 0.5 s" in str(answer["text"])


def test_a_refusal_is_an_answer(hub: Hub, silent_hub: str) -> None:
    assert not silent(hub.url, 30.0)  # 404
    assert silent(silent_hub, 0.2)


def test_an_endpoint_that_is_none_is_not_reachable() -> None:
    assert not reachable("http://127.0.0.1:99999")
    assert not reachable("not a url", seconds=5.0)


def test_a_port_without_a_listener_is_not_reachable(hub: Hub) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        assert not reachable(f"http://127.0.0.1:{unused.getsockname()[1]}")
    assert reachable(hub.url)


def test_a_proxy_is_asked_instead_of_the_hub(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", hub.url)
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    assert reachable(UNROUTABLE)
    monkeypatch.setenv("no_proxy", "192.0.2.1")
    assert not reachable(UNROUTABLE, seconds=0.2)
