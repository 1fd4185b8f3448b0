"""Real Python processes with the black box injected, as the launcher starts them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model_check.numerics.bootstrap import inject_path
from model_check.record import RunDir, read_jsonl
from model_check.record.ring import Crumb, RingReading, read_ring


@dataclass(frozen=True)
class Outcome:
    """What a script left behind."""

    codes: list[int]
    outputs: list[str]
    errors: list[str]
    run_dir: RunDir

    def ring(self, rank: int = 0) -> RingReading:
        return read_ring(self.run_dir.ring(rank))

    def crumbs(self, rank: int = 0, **wanted: object) -> list[Crumb]:
        return [c for c in self.ring(rank).crumbs if all(getattr(c, k) == v for k, v in wanted.items())]

    def events(self, name: str, rank: int = 0) -> list[dict[str, Any]]:
        return [e for e in read_jsonl(self.run_dir.events(rank)).records if e["event"] == name]


def plain_environment() -> dict[str, str]:
    drop = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MODEL_CHECK_RUN_DIR", "MODEL_CHECK_RANK_PID", "PYTHONPATH")
    return {**{k: v for k, v in os.environ.items() if k not in drop}, "OMP_NUM_THREADS": "1"}


def injected_environment(run_dir: RunDir) -> dict[str, str]:
    return {**plain_environment(), "MODEL_CHECK_RUN_DIR": str(run_dir.root), "PYTHONPATH": inject_path()}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def rank_environment(rank: int, world: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


Runner = Callable[..., Outcome]


def run_ranks(
    path: Path,
    run_dir: RunDir,
    *,
    world: int | None,
    inject: bool = True,
    env: Mapping[str, str] | None = None,
    stdin: str | None = None,
    python: str = sys.executable,
    timeout: float = 120,
) -> Outcome:
    """Starts `world` ranks of the script (None: one process that is told no rank) from its own folder."""
    base = {**(injected_environment(run_dir) if inject else plain_environment()), **(env or {})}
    port = free_port()
    ranks = [{}] if world is None else [rank_environment(rank, world, port) for rank in range(world)]
    processes = [
        subprocess.Popen(
            [python, path.name],
            cwd=path.parent,
            env={**base, **variables},
            stdin=subprocess.PIPE if stdin is not None else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for variables in ranks
    ]
    try:
        said = [process.communicate(stdin, timeout=timeout) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return Outcome([p.returncode for p in processes], [out for out, _ in said], [err for _, err in said], run_dir)


def last_json(text: str) -> Any:
    return json.loads(text.strip().splitlines()[-1])
