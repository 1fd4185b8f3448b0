"""Starts a small job through the real commands, in a folder of its own, and leaves nothing behind."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from model_check.doctor.probe import Answer, call
from model_check.doctor.settings import Settings
from model_check.record import RunDir, Verdict
from model_check.record.metrics import StepMetrics, read_metrics

_FOREIGN = {
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "GPU_RANK",
    "NUM_GPUS",
}


@dataclass(frozen=True)
class Job:
    """A finished job: how its command ended, the folder it ran in, and the run directory it wrote there."""

    answer: Answer
    folder: Path
    run_dir: Path

    @property
    def problem(self) -> str:
        """The first finding of its verdict, which knows more than the last line of a command."""
        verdict = Verdict.read(self.run_dir / "verdict.json") if self.answer.problem else None
        if verdict is None or not verdict.findings:
            return self.answer.problem
        first = verdict.findings[0]
        evidence = f" ({first.evidence[0]})" if first.evidence else ""
        return f"[{first.code}] {first.title}{evidence}"

    @property
    def metrics(self) -> tuple[StepMetrics, ...]:
        return read_metrics(RunDir(self.run_dir).metrics, all_steps=True)


@contextmanager
def scratch_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="model-check-doctor-") as name:
        yield Path(name)


@contextmanager
def finished_job(
    command: Sequence[str],
    arguments: Sequence[str],
    settings: Settings,
    *,
    limit_s: float | None = None,
    cwd: Path | None = None,
) -> Iterator[Job]:
    """Runs `command --run-dir FOLDER/run ARGUMENTS` in a folder that goes on the way out, with the logs of its ranks.

    `cwd`: where the paths among the arguments begin (default: the folder).
    """
    alone = {k: v for k, v in settings.environ.items() if k not in _FOREIGN and not k.startswith("SLURM_")}
    with scratch_folder() as folder:
        run_dir = folder / "run"
        words = [*command, "--run-dir", str(run_dir), *arguments]
        try:
            answer = call(words, limit_s=limit_s or settings.limits.job_limit_s, environ=alone, cwd=cwd or folder)
            yield Job(answer, folder, run_dir)
        finally:
            logs = run_dir / "logs"
            if logs.is_symlink() and logs.resolve().name.startswith("model_check_logs_"):
                shutil.rmtree(logs.resolve(), ignore_errors=True)
