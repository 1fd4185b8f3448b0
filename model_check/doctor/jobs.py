"""Starts a small job through the real commands, in a folder of its own, and leaves nothing behind."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from model_check.doctor.probe import Answer, call

_FOREIGN = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "GPU_RANK",
    "NUM_GPUS",
)
_SCHEDULER = "SLURM_"


@dataclass(frozen=True)
class Job:
    """A finished job: how its command ended, and the run directory it wrote."""

    answer: Answer
    run_dir: Path

    @property
    def problem(self) -> str:
        """The first finding of its verdict, which knows more than the last line of a command."""
        if not self.answer.problem:
            return ""
        try:
            first = json.loads((self.run_dir / "verdict.json").read_text())["findings"][0]
        except (OSError, ValueError, LookupError, TypeError):
            return self.answer.problem
        evidence = f" ({first['evidence'][0]})" if first.get("evidence") else ""
        return f"[{first['code']}] {first['title']}{evidence}"


@contextmanager
def scratch_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="model-check-doctor-") as name:
        yield Path(name)


@contextmanager
def finished_job(
    command: Sequence[str],
    arguments: Sequence[str],
    folder: Path,
    *,
    limit_s: float,
    environ: Mapping[str, str],
    cwd: Path | None = None,
) -> Iterator[Job]:
    """Runs `command --run-dir FOLDER/run ARGUMENTS`; the logs of its ranks are removed on the way out.

    `cwd`: where the paths among the arguments begin (default: the folder).
    """
    run_dir = folder / "run"
    alone = {k: v for k, v in environ.items() if k not in _FOREIGN and not k.startswith(_SCHEDULER)}
    try:
        words = [*command, "--run-dir", str(run_dir), *arguments]
        yield Job(call(words, limit_s=limit_s, environ=alone, cwd=cwd or folder), run_dir)
    finally:
        logs = run_dir / "logs"
        if logs.is_symlink() and logs.resolve().name.startswith("model_check_logs_"):
            shutil.rmtree(logs.resolve(), ignore_errors=True)
