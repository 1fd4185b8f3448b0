"""Kills ranks of a training run again and again, also inside saves, resumes each time, and compares with a run that
nobody disturbed: no committed checkpoint may be lost, no loss may differ in a single bit.

    python benchmarks/crash_torture.py --kills 50 --ranks 2

Every life is a whole `model-check train`, forked from one process that has imported it, which saves most of its time.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import json
import os
import random
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from result_file import write_result

from model_check.record.ring import read_header

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


class Job:
    """One `model-check train`, forked from the server; its output goes to a file."""

    def __init__(self, server: subprocess.Popen[str], output: Path, arguments: list[str]) -> None:
        self._server = server
        self._output = output
        self._code: int | None = None
        assert server.stdin is not None
        server.stdin.write(json.dumps({"output": str(output), "arguments": arguments}) + "\n")
        server.stdin.flush()

    def ended(self, patience_s: float = 0.0) -> bool:
        assert self._server.stdout is not None
        if self._code is None and select.select([self._server.stdout], [], [], patience_s)[0]:
            self._code = int(self._server.stdout.readline())
        return self._code is not None

    def finish(self, patience_s: float = 300.0) -> tuple[int, str]:
        if not self.ended(patience_s) or self._code is None:
            raise SystemExit(f"a job did not end within {patience_s} s:\n{self.output}")
        return self._code, self.output

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace") if self._output.exists() else ""


def serve() -> None:
    """Forks a launcher for each line of standard input; answers with its exit code. Imports only: ranks are forked."""
    from model_check.cli.main import main as model_check_main

    for module in ("diagnose", "prepare", "summary", "supervision", "train"):
        importlib.import_module(f"model_check.cli.{module}")
    for module in ("engine.rank", "checkpoint.saver"):
        importlib.import_module(f"model_check.{module}")
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                handle = os.open(order["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                os.dup2(handle, 1)
                os.dup2(handle, 2)
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                model_check_main(order["arguments"])
            except SystemExit as exit_:
                code = exit_.code if isinstance(exit_.code, int) else 1
            finally:
                sys.stdout.flush()
                os._exit(code)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


class Torture:
    """The run that is killed, in a folder of its own."""

    def __init__(self, folder: Path, ranks: int, steps: int, dice: random.Random) -> None:
        self.folder = folder
        self.ranks = ranks
        self.steps = steps
        self.dice = dice
        self.run_dir = folder / "live"
        self._server = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), "--serve"],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).resolve().parent.parent)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def close(self) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait()

    def start(self, run_dir: Path, *more: str) -> Job:
        sets = [word for value in SETTINGS for word in ("--set", value)]
        command = ["train", "--debug", "--nproc", str(self.ranks), "--max-steps", str(self.steps), *sets, *more]
        return Job(self._server, self.folder / "output", [*command, "--run-dir", str(run_dir)])

    def undisturbed(self) -> dict[int, float]:
        job = self.start(self.folder / "undisturbed", "--set", "checkpoint.dir=elsewhere")
        code, out = job.finish()
        if code:
            raise SystemExit(f"the undisturbed run failed:\n{out}")
        return {record["step"]: record["loss"] for record in records(self.folder / "undisturbed")}

    def live_and_die(self, number: int) -> Life:
        """One attempt, ended at a random moment."""
        committed = self.newest_committed()
        had, leftovers = len(records(self.run_dir)), self._staging()
        began = time.monotonic()
        job = self.start(self.run_dir, "--resume", "auto")
        pids = self._wait(job, self._pids_of_attempt(number))
        moment = self.dice.choice(MOMENTS)
        if moment == "start":
            # Wait no longer than until the first step: a fast machine could finish training within that second.
            until = time.monotonic() + self.dice.uniform(0, 1.0)
            self._wait(job, lambda: time.monotonic() >= until or len(records(self.run_dir)) > had)
        elif moment == "save":
            self._wait(job, lambda: len(records(self.run_dir)) > had)
            seen: set[str] = set()
            for _ in range(self.dice.choice((1, 2, 3, 4))):
                seen |= self._wait(job, functools.partial(self._new_staging, seen))
            time.sleep(self.dice.uniform(0, 0.04))
        else:
            wanted = had + self.dice.randint(1, 14)
            self._wait(job, lambda: len(records(self.run_dir)) >= wanted)
            time.sleep(self.dice.uniform(0, 0.05))
        victims = self.dice.sample(sorted(pids), self.dice.choice((1, 1, self.ranks)))
        os.kill(pids[victims[0]], signal.SIGKILL)
        for rank in victims[1:]:
            # The launcher may have ended it already, because the first one is gone.
            with contextlib.suppress(ProcessLookupError):
                os.kill(pids[rank], signal.SIGKILL)
        code, out = job.finish()
        if code != 128 + signal.SIGKILL:
            raise SystemExit(f"life {number} ended with {code} instead of 137:\n{out}")
        match = CONTINUED.search(out)
        return Life(
            number,
            moment,
            victims,
            int(match[1]) if match else None,
            committed,
            len(records(self.run_dir)) - had,
            bool(self._staging() - leftovers),
            time.monotonic() - began,
        )

    def finish(self) -> str:
        code, out = self.start(self.run_dir, "--resume", "auto").finish(600)
        if code:
            raise SystemExit(f"the last attempt failed with {code}:\n{out}")
        return out

    def _new_staging(self, seen: set[str]) -> set[str]:
        return self._staging() - seen

    def _staging(self) -> set[str]:
        return {f"{path.parent.name}/{path.name}" for path in self.saved(".staging-*")}

    def saved(self, pattern: str) -> list[Path]:
        """A life that dies before its first commit leaves nothing to go on from: the next has a folder of its own."""
        return sorted((self.folder / ".checkpoints").glob(f"{self.run_dir.name}*/{pattern}"))

    def newest_committed(self) -> int | None:
        steps = [int(path.name.removeprefix("step_")) for path in self.saved("step_*")]
        return max(steps, default=None)

    def _pids_of_attempt(self, number: int) -> Any:
        """The pids of this attempt's ranks; evidence of earlier attempts is moved away by then.

        Each rank writes its pid into its ring before its first step. The launcher's journal may name it only later,
        when a fast machine has nearly finished the run.
        """

        def pids() -> dict[int, int]:
            if number > 1 and not (self.run_dir / "attempts" / str(number - 1) / "events").is_dir():
                return {}
            headers = [read_header(self.run_dir / "blackbox" / f"rank-{rank:05d}.ring") for rank in range(self.ranks)]
            return {rank: header.pid for rank, header in enumerate(headers)} if all(headers) else {}

        return pids

    def _wait(self, job: Job, condition: Any) -> Any:
        while not (value := condition()):
            if job.ended(POLL_S):
                raise SystemExit(f"a job ended by itself:\n{job.output}")
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
    for path in torture.saved("step_*"):
        try:
            verify(path)
        except CheckpointError as error:
            faults.append(str(error))
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=None, help="steps of the whole run (default 30 a kill)")
    parser.add_argument("--seed", type=int, default=2026)
    parser.add_argument("--json", type=Path, default=None, help="also write the result here")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve()
        return 0
    # More than all lives do together, even where kills come late: training must not end before the last one.
    steps = arguments.steps or max(60, 30 * arguments.kills)
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
        torture.close()
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
        write_result(arguments.json, {**result, "lives": [asdict(life) for life in lives]})
    return 1 if lost or faults or wrong or missing or final != expected[steps - 1] else 0


if __name__ == "__main__":
    sys.exit(main())
