"""Kills ranks of a training run again and again, also inside saves, resumes each time, and compares with a run that
nobody disturbed: no committed checkpoint may be lost, no loss may differ in a single bit.

    python benchmarks/crash_torture.py --kills 50 --ranks 2
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SETTINGS = (
    "model.num_layers=1",
    "model.hidden_size=32",
    "model.intermediate_size=64",
    "data.tokenizer=bytes",
    "data.samples=2000",
    "training.context_length=32",
    "training.batch_size=2",
    "training.learning_rate=1e-3",
    "training.log_interval=1000",
    "logging.tensorboard=false",
    "checkpoint.interval=4",
    "launch.hang_kill_after_s=60",
)
MOMENTS = ("step", "save", "save", "start")
CONTINUED = re.compile(r"resume: continuing after step (\d+) from")
POLL_S = 0.002


@dataclass(frozen=True)
class Life:
    """One attempt and how it was ended."""

    number: int
    moment: str
    victims: list[int]
    continued_after: int | None
    committed_before: int | None
    steps: int
    half_written: bool
    seconds: float


class Torture:
    """The run that is killed, in a folder of its own."""

    def __init__(self, folder: Path, ranks: int, steps: int, dice: random.Random) -> None:
        self.folder = folder
        self.ranks = ranks
        self.steps = steps
        self.dice = dice
        self.run_dir = folder / "live"
        self.lineage = folder / ".checkpoints" / "live"

    def start(self, run_dir: Path, *more: str) -> subprocess.Popen[str]:
        sets = [word for value in SETTINGS for word in ("--set", value)]
        command = ["train", "--debug", "--nproc", str(self.ranks), "--max-steps", str(self.steps), *sets, *more]
        return subprocess.Popen(
            [sys.executable, "-m", "model_check.cli.main", *command, "--run-dir", str(run_dir)],
            cwd=self.folder,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def undisturbed(self) -> dict[int, float]:
        job = self.start(self.folder / "undisturbed", "--set", "checkpoint.dir=elsewhere")
        out, _ = job.communicate()
        if job.returncode:
            raise SystemExit(f"the undisturbed run failed:\n{out}")
        return {record["step"]: record["loss"] for record in records(self.folder / "undisturbed")}

    def live_and_die(self, number: int) -> Life:
        """One attempt, ended at a random moment."""
        committed = self.newest_committed()
        had = len(records(self.run_dir))
        began = time.monotonic()
        job = self.start(self.run_dir, "--resume", "auto")
        pids = self._wait(job, self._pids_of_attempt(number))
        moment = self.dice.choice(MOMENTS)
        if moment == "start":
            time.sleep(self.dice.uniform(0, 1.0))
        elif moment == "save":
            self._wait(job, lambda: len(records(self.run_dir)) > had)
            self._wait(job, lambda: any(self.lineage.glob(".staging-*")))
            time.sleep(self.dice.uniform(0, 0.04))
        else:
            wanted = had + self.dice.randint(1, 14)
            self._wait(job, lambda: len(records(self.run_dir)) >= wanted)
            time.sleep(self.dice.uniform(0, 0.05))
        victims = self.dice.sample(sorted(pids), self.dice.choice((1, 1, self.ranks)))
        for rank in victims:
            os.kill(pids[rank], signal.SIGKILL)
        out, _ = job.communicate(timeout=120)
        if job.returncode != 128 + signal.SIGKILL:
            raise SystemExit(f"life {number} ended with {job.returncode} instead of 137:\n{out}")
        match = CONTINUED.search(out)
        return Life(
            number,
            moment,
            victims,
            int(match[1]) if match else None,
            committed,
            len(records(self.run_dir)) - had,
            any(self.lineage.glob(".staging-*")),
            time.monotonic() - began,
        )

    def finish(self) -> str:
        job = self.start(self.run_dir, "--resume", "auto")
        out, _ = job.communicate(timeout=600)
        if job.returncode:
            raise SystemExit(f"the last attempt failed with {job.returncode}:\n{out}")
        return out

    def newest_committed(self) -> int | None:
        steps = [int(path.name.removeprefix("step_")) for path in self.lineage.glob("step_*")]
        return max(steps, default=None)

    def _pids_of_attempt(self, number: int) -> Any:
        """The pids of this attempt's ranks; the evidence of the earlier ones has been set aside by then."""

        def pids() -> dict[int, int]:
            if number > 1 and not (self.run_dir / "attempts" / str(number - 1)).is_dir():
                return {}
            path = self.run_dir / "events" / "supervisor.jsonl"
            lines = path.read_text().splitlines() if path.exists() else []
            started = [json.loads(line) for line in lines if '"rank_started"' in line]
            found = {record["rank"]: record["pid"] for record in started}
            return found if len(found) == self.ranks else {}

        return pids

    def _wait(self, job: subprocess.Popen[str], condition: Any) -> Any:
        while not (value := condition()):
            if job.poll() is not None:
                raise SystemExit(f"a job ended by itself with {job.returncode}:\n{job.stdout.read()}")  # type: ignore[union-attr]
            time.sleep(POLL_S)
        return value


def records(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / "metrics.jsonl"
    if not path.exists():
        return []
    whole = [line for line in path.read_text().split("\n")[:-1] if line]
    return [json.loads(line) for line in whole if line.endswith("}")]


def damaged(torture: Torture) -> list[str]:
    """Committed checkpoints that do not verify."""
    from model_check.checkpoint.verify import verify
    from model_check.errors import CheckpointError

    faults = []
    for path in sorted(torture.lineage.glob("step_*")):
        try:
            verify(path)
        except CheckpointError as error:
            faults.append(str(error))
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=None, help="steps of the whole run (default 8 a kill)")
    parser.add_argument("--seed", type=int, default=2026)
    parser.add_argument("--json", type=Path, default=None, help="also write the result here")
    arguments = parser.parse_args()
    steps = arguments.steps or max(60, 8 * arguments.kills)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="crash-torture-") as folder:
        torture = Torture(Path(folder), arguments.ranks, steps, random.Random(arguments.seed))
        expected = torture.undisturbed()
        print(f"undisturbed: {steps} steps, final loss {expected[steps - 1]!r}")
        print("kill  moment  ranks   continued after  newest committed  steps done  left half written")
        lives, faults = [], []
        for number in range(1, arguments.kills + 1):
            life = torture.live_and_die(number)
            lives.append(life)
            faults += damaged(torture)
            print(
                f"{life.number:4d}  {life.moment:6s}  {life.victims!s:6s}  {life.continued_after!s:>15}  "
                f"{life.committed_before!s:>16}  {life.steps:10d}  {'yes' if life.half_written else ''}",
                flush=True,
            )
        torture.finish()
        found = records(torture.run_dir)
    # A rank killed before it could say where it continues has lost nothing; the next one shows that.
    lost = [
        life
        for life in lives
        if life.steps and life.committed_before is not None and life.continued_after != life.committed_before
    ]
    wrong = [record["step"] for record in found if record["loss"] != expected[record["step"]]]
    missing = sorted(set(expected) - {record["step"] for record in found})
    final = [record["loss"] for record in found if record["step"] == steps - 1][-1]
    result = {
        "kills": len(lives),
        "moments": dict(Counter(life.moment for life in lives)),
        "kills_that_left_a_save_half_written": sum(life.half_written for life in lives),
        "ranks": arguments.ranks,
        "steps": steps,
        "checkpoints_lost": len(lost),
        "checkpoints_damaged": len(faults),
        "losses_wrong": len(wrong),
        "steps_missing": len(missing),
        "final_loss": final,
        "final_loss_undisturbed": expected[steps - 1],
        "seconds": round(time.monotonic() - began, 1),
    }
    print(json.dumps(result, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps({**result, "lives": [asdict(life) for life in lives]}, indent=1) + "\n")
    return 1 if lost or faults or wrong or missing or final != expected[steps - 1] else 0


if __name__ == "__main__":
    sys.exit(main())
