"""Two hosts, played by two launchers that meet on loopback: one job, and one end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from launch_jobs import wait_until

from model_check.record import read_jsonl
from tests.conftest import BIN, TINY, Shell
from tests.signals import hear_signals

_HOST = socket.gethostname().split(".")[0]


class Node:
    """One launcher with one rank, in a folder of its own."""

    def __init__(self, folder: Path, endpoint: str, steps: int) -> None:
        folder.mkdir()
        self.run_dir = folder / "run"
        self._said = folder / "said"
        sets = [word for value in (*TINY, "system.device=cpu", "checkpoint.interval=0") for word in ("--set", value)]
        job = ["train", "--preset", "debug", "--run-dir", "run", "--max-steps", str(steps)]
        meet = ["--nproc", "1", "--nnodes", "2", "--rdzv-endpoint", endpoint]
        with self._said.open("wb") as said:
            self.process = subprocess.Popen(
                [str(BIN / "model-check"), *job, *meet, *sets],
                cwd=folder,
                env=Shell(folder).environment(GLOO_SOCKET_IFNAME="lo"),
                stdout=said,
                stderr=subprocess.STDOUT,
                preexec_fn=hear_signals,
            )

    @property
    def said(self) -> str:
        return self._said.read_text()

    def step_lines(self) -> list[str]:
        return [line for line in self.said.splitlines() if "] Step [" in line]

    def started(self) -> tuple[int, int] | None:
        """(rank, pid) of its one rank, once it has one."""
        events = read_jsonl(self.run_dir / "events" / "supervisor.jsonl").records
        return next(((event["rank"], event["pid"]) for event in events if event["event"] == "rank_started"), None)

    def verdict(self) -> dict[str, object]:
        return json.loads((self.run_dir / "verdict.json").read_text())  # type: ignore[no-any-return]


def _free_endpoint() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


@pytest.fixture
def nodes(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[list[Node]]:
    endpoint = _free_endpoint()
    started = [Node(tmp_path / name, endpoint, request.param) for name in ("first", "second")]
    yield started
    for node in started:
        node.process.kill()
        node.process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [3], indirect=True)
def test_two_hosts_train_one_model(nodes: list[Node]) -> None:
    assert [node.process.wait(timeout=120) for node in nodes] == [0, 0], nodes[0].said + nodes[1].said
    first, second = (node.step_lines() for node in nodes)
    assert len(first) == 3 and all(line.startswith(f"[{_HOST}:CPU0] Step [") for line in first), first
    told = [[line.partition(" | ETA")[0] for line in lines] for lines in (first, second)]
    assert told[0] == told[1], "the hosts do not agree on the losses"
    started = [node.started() for node in nodes]
    assert sorted(rank for rank, _ in filter(None, started)) == [0, 1]
    assert [(node.verdict()["outcome"], node.verdict()["world_size"]) for node in nodes] == [("completed", 2)] * 2


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [100_000], indirect=True)
def test_a_rank_that_dies_on_one_host_ends_the_job_on_both(nodes: list[Node]) -> None:
    wait_until(lambda: all(len(node.step_lines()) > 2 for node in nodes), 120.0)
    ranks = {started[0]: (node, started[1]) for node in nodes if (started := node.started())}
    node, pid = ranks[1]
    os.kill(pid, signal.SIGKILL)
    assert node.process.wait(timeout=60) == 137
    assert ranks[0][0].process.wait(timeout=60) != 0
    verdict = node.verdict()
    findings = verdict["findings"]
    assert isinstance(findings, list)
    assert (verdict["outcome"], verdict["exit_code"]) == ("failed", 137)
    assert (findings[0]["code"], findings[0]["ranks"]) == ("MC303", [1])
    assert "ended by SIGKILL" in node.said


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Callable[[str], Node]]:
    started: list[Node] = []

    def start(endpoint: str) -> Node:
        started.append(Node(tmp_path / "node", endpoint, 3))
        return started[-1]

    yield start
    for each in started:
        each.process.kill()
        each.process.wait()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("endpoint", "line"),
    [
        (None, "[model-check] waiting for hosts: 1 of 2 at {}; run the same command on each"),
        # An address reserved for documentation, which no host has.
        ("203.0.113.7:29400", "[model-check] waiting for hosts: nothing answers at {} yet"),
    ],
    ids=["as the first host", "before the first host"],
)
def test_a_host_that_waits_says_for_whom_and_ctrl_c_ends_it_at_once(
    node: Callable[[str], Node], endpoint: str | None, line: str
) -> None:
    endpoint = endpoint or _free_endpoint()
    waiting = node(endpoint)
    wait_until(lambda: waiting.said.count(line.format(endpoint)) >= 2, 90.0)
    asked_at = time.monotonic()
    waiting.process.send_signal(signal.SIGINT)
    assert waiting.process.wait(timeout=30) == 130, waiting.said
    assert time.monotonic() - asked_at < 5.0


_STRANGER = """\
import socket, sys, time
how, port = sys.argv[1], int(sys.argv[2])
server = socket.socket()
server.bind(("127.0.0.1", port))
if how != "never listens":
    server.listen()
print(flush=True)
callers = []
while how != "never listens":
    callers.append(server.accept()[0])
    if how == "hangs up":
        callers.pop().close()
    elif how == "speaks HTTP":
        callers[-1].recv(100)
        callers[-1].send(b"HTTP/1.1 400 Bad Request\\r\\n\\r\\n")
time.sleep(100)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["says nothing", "hangs up", "speaks HTTP", "never listens"])
def test_a_port_that_a_stranger_holds_is_named_in_seconds(node: Callable[[str], Node], how: str) -> None:
    endpoint = _free_endpoint()
    port = endpoint.partition(":")[2]
    stranger = subprocess.Popen([sys.executable, "-c", _STRANGER, how, port], stdout=subprocess.PIPE)
    try:
        assert stranger.stdout is not None and stranger.stdout.readline() == b"\n"
        started_at = time.monotonic()
        refused = node(endpoint)
        assert refused.process.wait(timeout=50) == 1, refused.said
        assert time.monotonic() - started_at < 40.0
    finally:
        stranger.kill()
        stranger.communicate()
    (said,) = [line for line in refused.said.splitlines() if "error" in line]
    by = "by another program" if how == "never listens" else f"by process {stranger.pid} ({sys.executable} -c "
    assert f"[MC103] port {port} of {endpoint}, where the hosts of the job meet, is taken {by}" in said
    assert "--rdzv-endpoint" in refused.said
    assert "Traceback" not in refused.said and "frame #" not in refused.said
    verdict = refused.verdict()
    assert (verdict["outcome"], verdict["exit_code"]) == ("failed", 1)
    assert [finding["code"] for finding in verdict["findings"]] == ["MC103"]  # type: ignore[attr-defined]
