"""Does a script notice us? Runs unchanged scripts under torchrun and under `model-check run`, in turns.

    python benchmarks/guest.py                        7 pairs of every guest whose packages are installed
    python benchmarks/guest.py --only fsdp2 trainer   some of them
    python benchmarks/guest.py --short                few steps, one pair, no judgement of CPU time

Both runs must have the same losses and final weights to the bit, the same exit codes, files, compiled graphs, graph
breaks and warnings, and no finding. After the warm-up, the CPU time of the ranks may differ by at most 3 % (median over
the pairs). The guests are in benchmarks/guests; they know nothing of Model Check and record these things themselves.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from result_file import write_result

GUESTS = Path(__file__).with_name("guests")
ROOT = Path(__file__).parents[1]
RANKS = 2
MOST_CPU = 1.03
LIMIT_S = 300
_PACKAGES = {"trainer": "transformers", "trl_sft": "trl", "lightning_fit": "lightning", "accelerate_loop": "accelerate"}
_LIBRARY = {"guestbook", "loop", "model"}
_EXIT_CODE = re.compile(r"exitcode\s*: (-?\d+)")
_ABORTED_EXIT = "terminate called without an active exception"
_WARNING = re.compile(r"warning|does not know how to trace", re.I)
_OUR_FINDING = re.compile(r"^(warning\[MC\d+\]: |failed, exit code )")  # what a failing guest deserves
# Files whose contents depend on the time, a path, hash seeds or thread order: only their names are compared.
_UNSTABLE = {".bin", ".json", ".metadata", ".distcp", ".ckpt", ".pth", ".md"}


@dataclass(frozen=True)
class Visit:
    """One run of a guest."""

    code: int
    notes: list[dict[str, Any]]
    files: dict[str, str]
    warnings: list[str]
    findings: list[str] = field(default_factory=list)
    said: str = ""

    @property
    def cpu_s(self) -> float:
        return sum(note["cpu_s"] for note in self.notes)

    def result(self) -> dict[str, Any]:
        """What must be the same with and without us."""
        notes = [{key: value for key, value in note.items() if key != "cpu_s"} for note in self.notes]
        return {"exit code": self.code, "notes": notes, "files": self.files, "warnings": self.warnings}


def names() -> list[str]:
    return sorted({path.stem for path in GUESTS.glob("*.py")} - _LIBRARY)


def missing(name: str) -> str | None:
    """The package that this guest needs but this environment lacks."""
    package = _PACKAGES.get(name)
    return package if package is not None and importlib.util.find_spec(package) is None else None


def visit(name: str, home: Path, *, watched: bool, cache: Path, environ: dict[str, str]) -> Visit:
    """Runs the guest in an empty folder of its own."""
    work, book, run_dir = home / "work", home / "book", home / "run"
    for folder in (work, book):
        folder.mkdir(parents=True)
    script = str(GUESTS / f"{name}.py")
    if watched:
        command = [sys.executable, "-m", "model_check", "run", "--nproc", str(RANKS), "--run-dir", str(run_dir), script]
    else:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}", script]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": path, **environ}
    env |= {"GUESTBOOK": str(book), "TORCHINDUCTOR_CACHE_DIR": str(cache)}
    log = home / "log"
    with log.open("w") as out:
        launcher = subprocess.Popen(command, cwd=work, env=env, stdout=out, stderr=out, start_new_session=True)
        try:
            if name == "interrupted":
                _interrupt(launcher, book)
            code = launcher.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(launcher.pid, signal.SIGKILL)
            launcher.wait()
            raise SystemExit(f"{name} did not end within {LIMIT_S} s:\n{log.read_text()[-3000:]}") from None
    said = log.read_text()
    notes = [json.loads(path.read_text()) for path in sorted(book.glob("rank-*.json"))]
    if len(notes) != RANKS:
        raise SystemExit(f"{name} ended without the notes of all ranks, exit code {code}:\n{said[-3000:]}")
    findings = _findings(run_dir / "verdict.json") if watched else []
    return Visit(_code_of_ranks(name, code, said, watched), notes, _files(work), _warnings(said), findings, said)


def _interrupt(launcher: subprocess.Popen[bytes], book: Path) -> None:
    """Sends Ctrl-C once every rank is waiting for it."""
    until = time.monotonic() + LIMIT_S
    while len(list(book.glob("waits-*"))) < RANKS and launcher.poll() is None:
        if time.monotonic() > until:
            raise subprocess.TimeoutExpired("interrupted", LIMIT_S)
        time.sleep(0.05)
    launcher.send_signal(signal.SIGINT)


def _code_of_ranks(name: str, code: int, said: str, watched: bool) -> int:
    """torchrun always exits with 1 and prints the codes of its ranks. If interrupted, it prints nothing."""
    if name == "interrupted":
        return 0
    found = _EXIT_CODE.findall(said)
    if watched or not found:
        return code
    # Torch aborts the exit of one plain run in a dozen: threads of gloo still run. We let them end first.
    return 0 if found[-1] == "-6" and _ABORTED_EXIT in said else int(found[-1])


def _files(folder: Path) -> dict[str, str]:
    found = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        stable = (path.suffix or path.name) not in _UNSTABLE
        found[str(path.relative_to(folder))] = hashlib.sha256(path.read_bytes()).hexdigest() if stable else "present"
    return found


def _warnings(said: str) -> list[str]:
    """Warning lines, stripped of their source, time and process; findings of ours are judged by the verdict."""
    lines = (re.sub(r"^\[[^\]]*\] ", "", line) for line in said.splitlines() if _WARNING.search(line))
    return sorted({re.sub(r"\d+", "N", line) for line in lines if not _OUR_FINDING.match(line)})


def _findings(verdict: Path) -> list[str]:
    return [f"{found['code']}: {found['title']}" for found in json.loads(verdict.read_text())["findings"]]


@dataclass(frozen=True)
class Compared:
    """All pairs of one guest."""

    name: str
    differences: list[str]
    ratios: list[float]
    cpu_s: float = 0.0
    judged: bool = True

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)

    @property
    def good(self) -> bool:
        return not self.differences and (not self.judged or self.ratio <= MOST_CPU)


def compare(name: str, pairs: int, *, short: bool, scratch: Path) -> Compared:
    environ = {"GUEST_STEPS": "6", "GUEST_WARM_UP": "2"} if short else {}
    cache = scratch / "compiled"
    if "compiled" in name:  # so that both sides find the same kernels
        visit(name, scratch / name / "first", watched=False, cache=cache, environ=environ)
    differences: list[str] = []
    ratios, plain_s = [], []
    for pair in range(pairs):
        seen = {}
        for watched in (False, True) if pair % 2 == 0 else (True, False):
            home = scratch / name / f"{pair}-{'watched' if watched else 'plain'}"
            seen[watched] = visit(name, home, watched=watched, cache=cache, environ=environ)
        differences += [said for said in _differences(seen[False], seen[True]) if said not in differences]
        ratios.append(seen[True].cpu_s / seen[False].cpu_s)
        plain_s.append(seen[False].cpu_s)
    return Compared(name, differences, ratios, statistics.median(plain_s), judged=not short)


def _differences(plain: Visit, watched: Visit) -> list[str]:
    theirs, ours = plain.result(), watched.result()
    told = [f"{what}: {_short(theirs[what], ours[what])}" for what in theirs if theirs[what] != ours[what]]
    unwanted = watched.findings if watched.code == 0 else []  # a failing guest deserves a finding
    return [*told, *(f"finding {found}" for found in unwanted)]


def _short(theirs: Any, ours: Any) -> str:
    """The first part that differs."""
    if isinstance(theirs, list) and isinstance(ours, list) and len(theirs) == len(ours):
        return next(f"[{n}] {_short(a, b)}" for n, (a, b) in enumerate(zip(theirs, ours, strict=True)) if a != b)
    if isinstance(theirs, dict) and isinstance(ours, dict):
        key = next(key for key in {**theirs, **ours} if theirs.get(key) != ours.get(key))
        return f"{key}: {_short(theirs.get(key), ours.get(key))}"
    return f"{theirs!r} without us, {ours!r} with us"[:400]


def _record(compared: list[Compared], skipped: dict[str, str]) -> dict[str, Any]:
    return {
        "guests": [
            {"name": c.name, "differences": c.differences, "cpu_s": c.cpu_s, "ratio": c.ratio, "ratios": c.ratios}
            for c in compared
        ],
        "skipped": skipped,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=7, help="runs of each kind, in turns (default 7)")
    parser.add_argument("--only", nargs="+", choices=names(), default=names(), metavar="NAME", help="some guests")
    parser.add_argument("--short", action="store_true", help="few steps, one pair, CPU time is not judged")
    parser.add_argument("--json", type=Path, help="writes the result to this file")
    options = parser.parse_args()
    skipped = {name: package for name in options.only if (package := missing(name)) is not None}
    for name, package in skipped.items():
        print(f"{name:16s} skipped: {package} is not installed")
    compared = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in (name for name in options.only if name not in skipped):
            pairs = 1 if options.short else options.pairs
            found = compare(name, pairs, short=options.short, scratch=Path(scratch))
            compared.append(found)
            cpu = f"CPU x{found.ratio:.3f} of {found.cpu_s:.2f} s" if found.judged else ""
            print(f"{name:16s} {'same' if not found.differences else 'DIFFERS'}  {cpu}", flush=True)
            for difference in found.differences:
                print(f"    {difference}")
    if options.json is not None:
        packages = ("torch", "transformers", "lightning", "accelerate", "trl")
        write_result(options.json, _record(compared, skipped), packages)
    return 0 if all(found.good for found in compared) else 1


if __name__ == "__main__":
    raise SystemExit(main())
