"""Two hosts, played by two launchers that meet on loopback: one job, and one end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from launch_jobs import wait_until

from model_check.rundir import read_jsonl
from tests.conftest import BIN, TINY, Shell

_HOST = socket.gethostname().split(".")[0]


class Node:
    """One launcher with one rank, in a folder of its own."""

    def __init__(self, folder: Path, port: int, steps: int) -> None:
        folder.mkdir()
        self.run_dir = folder / "run"
        self._said = folder / "said"
        sets = [word for value in (*TINY, "system.device=cpu", "checkpoint.interval=0") for word in ("--set", value)]
        job = ["train", "--preset", "debug", "--run-dir", "run", "--max-steps", str(steps)]
        meet = ["--nproc", "1", "--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{port}"]
        with self._said.open("wb") as said:
            self.process = subprocess.Popen(
                [str(BIN / "model-check"), *job, *meet, *sets],
                cwd=folder,
                env=Shell(folder).environment(GLOO_SOCKET_IFNAME="lo"),
                stdout=said,
                stderr=subprocess.STDOUT,
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


@pytest.fixture
def nodes(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[list[Node]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = [Node(tmp_path / name, port, request.param) for name in ("first", "second")]
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
