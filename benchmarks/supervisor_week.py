"""Cost of a supervisor check over a simulated week of eight ranks: memory and CPU must stay flat.

    python benchmarks/supervisor_week.py --out benchmarks/results/DATE-supervisor-week.json

Writes the files that a launcher and its ranks would write (a sample every 30 s, losses, gradients of 150 parameters)
and examines them with the real rules: once per simulated hour, and 41 more times at the end of each day with nothing
new, of which the median counts. The number of function calls in a look is the same on any machine, however busy it is.
"""

import argparse
import cProfile
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

from result_file import write_result

from model_check.diagnose import Examiner
from model_check.record import JsonlWriter, RunDir

RANKS = 8
DAYS = 7
HOUR_S = 3600


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        days = simulate(RunDir.create(Path(folder) / "run"))
    body = {"ranks": RANKS, "days": days}
    if options.out:
        write_result(options.out, body, ())
    json.dump(body, sys.stdout, indent=1)


def simulate(run_dir: RunDir) -> list[dict[str, float]]:
    launcher = JsonlWriter(run_dir.supervisor_events)
    ranks = [JsonlWriter(run_dir.events(rank)) for rank in range(RANKS)]
    examiner = Examiner(run_dir)
    launcher.write({"event": "job_started", "t": 0.0, "nproc": RANKS})
    days = []
    for hour in range(1, 24 * DAYS + 1):
        write_hour(launcher, ranks, hour * HOUR_S)
        examiner.update(live=True, now=float(hour * HOUR_S))
        if hour % 24 == 0:
            now = float(hour * HOUR_S)
            days.append(
                {
                    "day": hour // 24,
                    "calls_a_look": calls_of_a_look(examiner, now),
                    "cpu_s_a_look": round(statistics.median(cpu_of_a_look(examiner, now) for _ in range(41)), 4),
                    "resident_mib": round(resident_mib(), 1),
                }
            )
    return days


def calls_of_a_look(examiner: Examiner, now: float) -> int:
    profile = cProfile.Profile()
    profile.runcall(examiner.update, live=True, now=now)
    return sum(row.callcount for row in profile.getstats())


def cpu_of_a_look(examiner: Examiner, now: float) -> float:
    began = time.process_time()
    examiner.update(live=True, now=now)
    return time.process_time() - began


def write_hour(launcher: JsonlWriter, ranks: list[JsonlWriter], until: int) -> None:
    for t in range(until - HOUR_S, until, 30):
        one = {
            "pid": 7,
            "state": "S",
            "cpu_s": t * 0.9,
            "rss": 4 << 30,
            "threads": 30,
            "wchan": "futex",
            "children": [],
        }
        launcher.write({"event": "sample", "t": float(t), "ranks": {str(rank): one for rank in range(RANKS)}})
    for rank in ranks:
        for t in range(until - HOUR_S, until, 60):
            norms = {f"layers.{n // 9}.part.{n % 9}.weight": 0.123456 + n for n in range(150)}
            rank.write({"event": "gradients", "t": float(t), "step": t * 10, "norms": norms, "parameters": 150})
            rank.write({"event": "losses", "t": float(t), "steps": [t * 10], "values": [2.0 + 1 / (1 + t)]})


if __name__ == "__main__":
    main()
