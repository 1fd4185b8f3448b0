"""Runs a fault script under `model-check run`, times the finding, and says what is wrong with it.

`python tests/faults/faultrun.py --all` prints the whole table; names of faults or controls run those alone.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from expectations import FAULTS, HEALTHY, HERE, Control, Fault, Form, Stdin
from fault_endpoints import silent_server, tiny_hub

BIN = Path(sys.executable).parent
STANDINS = HERE / "standins" / "site-packages"
CHECKOUT = HERE.parents[1]  # what is tested is this tree, whichever one the environment has installed
START_LIMIT_S = 120.0  # from the launch to the fault, on a busy machine
END_LIMIT_S = 20.0  # from an error finding, or our SIGTERM, to the launcher's exit
PLAIN_END_S = 60.0  # from the first result of a plain run to its end
POLL_S = 0.02
# A rate may be low on a busy machine, and is told; what these say of the numbers is true or false anywhere.
SHOWN = re.compile(r"(error|warning|info)\[(MC\d+)\]: (.*)")
EARLY_WARNINGS = frozenset({"MC410", "MC413", "MC414", "MC415", "MC416", "MC705"})


@dataclass
class Launched:
    """A launcher at work, and how to find every process that came from it."""

    process: subprocess.Popen[bytes]
    mark: str
    folder: Path
    started: float

    @property
    def run_dir(self) -> Path:
        return self.folder / "run"

    @property
    def output(self) -> str:
        return (self.folder / "output.txt").read_text(errors="replace")

    def verdict(self) -> dict[str, Any]:
        try:
            value = json.loads((self.run_dir / "verdict.json").read_text())
        except (FileNotFoundError, ValueError):
            return {}
        return value if isinstance(value, dict) else {}

    def fired_at(self) -> float | None:
        try:
            lines = (self.folder / "clock").read_text().split()
        except FileNotFoundError:
            return None
        return min(map(float, lines)) if lines else None

    def wait(self, seconds: float) -> bool:
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True


@dataclass
class Observation:
    """What was seen of one run."""

    finding: dict[str, Any] | None = None
    seconds: float | None = None  # from the fault to the finding
    exit_code: int | None = None
    ended_by_us: bool = False
    verdict: dict[str, Any] = field(default_factory=dict)
    leftovers: list[str] = field(default_factory=list)
    output: str = ""
    problems: list[str] = field(default_factory=list)


def processes_with(mark: str) -> dict[int, str]:
    """Every live process that carries the mark in its environment, with its command line."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if mark.encode() in (entry / "environ").read_bytes():
                found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue  # gone, or a kernel thread
    return found


def leftovers_of(mark: str, grace_s: float = 3.0) -> list[str]:
    """What still lives after the launcher's exit; it is ended here so that the next run is not disturbed."""
    deadline = time.monotonic() + grace_s
    while (left := processes_with(mark)) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    while processes_with(mark):
        time.sleep(POLL_S)
    return [f"{pid}: {command}" for pid, command in left.items()]


def command_of(
    form: Form,
    nproc: int,
    run_dir: Path | None,
    script: Path,
    arguments: list[str],
    flags: tuple[str, ...] = (),
) -> list[str]:
    """The command line; without a run directory the same job as a user starts it today."""
    torchrun = [
        str(BIN / "torchrun"),
        f"--nproc-per-node={nproc}",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=localhost:0",
    ]
    job = [str(script), *arguments]
    ours = [str(BIN / "model-check"), "run", "--run-dir", str(run_dir), *flags]
    if form == "python":
        return [*([*ours, "--"] if run_dir else []), sys.executable, *job]
    if form == "torchrun":
        return [*([*ours, "--"] if run_dir else []), *torchrun, *job]
    # torchrun's own `python -u` would write every word of a print by itself, and mix those of two ranks.
    return [*ours, "--nproc", str(nproc), *job] if run_dir else [*torchrun, "--no-python", sys.executable, *job]


@contextmanager
def launched(
    command: list[str], folder: Path, environment: dict[str, str], stdin: Stdin = "null", cores: int | None = None
) -> Iterator[Launched]:
    """Starts the command with its output in a file; whatever happens, nothing of it survives the block."""
    mark = f"FAULT_RUN={uuid.uuid4().hex}"
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONUNBUFFERED", "RANK", "WORLD_SIZE")}
    env |= {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{STANDINS}{os.pathsep}{CHECKOUT}",
        "FAULT_CLOCK": str(folder / "clock"),
    }
    # Sockets are made under TMPDIR, and 107 characters are all a socket's path may have: never below a test's folder.
    temporary = tempfile.mkdtemp(prefix="fault-")
    env |= {"HF_HOME": str(folder / "hf"), "TMPDIR": temporary, **environment}
    env |= dict([mark.split("=")])
    reading, writing = os.pipe()

    def prepare() -> None:
        if stdin == "closed":
            os.close(0)
        if cores:
            os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])

    with (folder / "output.txt").open("wb") as output, open(os.devnull, "rb") as nothing:
        process = subprocess.Popen(
            command,
            env=env,
            cwd=folder,
            stdin=reading if stdin == "open" else nothing,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=prepare,
        )
    job = Launched(process, mark, folder, time.monotonic())
    try:
        yield job
    finally:
        os.close(reading)
        os.close(writing)
        if process.poll() is None:
            process.kill()
            process.wait()
        leftovers_of(mark, grace_s=0)
        shutil.rmtree(temporary, ignore_errors=True)


def _matching(verdict: dict[str, Any], fault: Fault) -> dict[str, Any] | None:
    """The root cause, if it is the expected one."""
    for finding in verdict.get("findings", [])[:1]:
        if finding.get("code") in fault.codes and (fault.ranks is None or finding.get("ranks") == list(fault.ranks)):
            return dict(finding)
    return None


def _filled(text: str, values: dict[str, str]) -> str:
    return re.sub(r"\{(\w+)\}", lambda m: values.get(m[1], m[0]), text)


def observe_fault(fault: Fault, folder: Path) -> Observation:
    """Runs the fault to its end and judges everything the table promises about it."""
    seen = Observation()
    with ExitStack() as stack:
        silent = stack.enter_context(silent_server())
        hub = stack.enter_context(tiny_hub())
        values = {"silent": str(silent), "port": str(silent), "hub": str(hub), "holder": str(os.getpid())}
        values["cgroup"] = os.environ.get("FAULT_CGROUP", "")
        arguments = [_filled(a, values) for a in fault.arguments]
        environment = {k: _filled(v, values) for k, v in fault.environment.items()}
        command = command_of(fault.form, fault.nproc, folder / "run", fault.path, arguments, fault.flags)
        job = stack.enter_context(launched(command, folder, environment, fault.stdin, fault.cores))
        _watch(job, fault, seen)
        _end(job, seen)
        seen.verdict, seen.output = job.verdict(), job.output
    seen.problems = problems_of(fault, seen, values)
    return seen


def _watch(job: Launched, fault: Fault, seen: Observation) -> None:
    """Polls the verdict until it names the fault. Past the promise it goes on a little, to say how late it was."""
    while True:
        ended = job.process.poll() is not None
        seen.finding = _matching(job.verdict(), fault)
        fired, now = job.fired_at(), time.monotonic()
        if seen.finding or ended:
            break
        if now > (fired + fault.within_s + 8 if fired else job.started + START_LIMIT_S):
            break
        time.sleep(POLL_S)
    if seen.finding and fired:
        seen.seconds = now - fired
    if not fired:
        seen.problems.append("the fault never fired")


def _end(job: Launched, seen: Observation) -> None:
    """An error ends the job by itself; a warning leaves it running, so that we end it as a user would."""
    if (seen.finding or {}).get("severity") != "error" or not job.wait(END_LIMIT_S):
        seen.ended_by_us = job.process.poll() is None
        job.process.send_signal(signal.SIGTERM)
        if not job.wait(END_LIMIT_S):
            seen.problems.append(f"the launcher was still there {END_LIMIT_S:.0f} s after SIGTERM")
            job.process.kill()
            job.process.wait()
    seen.exit_code = job.process.returncode
    seen.leftovers = leftovers_of(job.mark)


def problems_of(fault: Fault, seen: Observation, values: dict[str, str]) -> list[str]:
    problems = list(seen.problems)
    if seen.leftovers:
        problems.append(f"left behind: {seen.leftovers}")
    if seen.finding is None:
        findings = [(f.get("code"), f.get("ranks"), f.get("location")) for f in seen.verdict.get("findings", [])]
        expected = f"{'/'.join(sorted(fault.codes))} on {fault.ranks}"
        return [*problems, f"expected {expected}; {seen.verdict.get('outcome')}, findings {findings}"]
    final = _matching(seen.verdict, fault)
    if final is None:
        first = [(f.get("code"), f.get("ranks")) for f in seen.verdict.get("findings", [])]
        problems.append(f"the finding was there and then was the root cause no more: {first}")
        final = seen.finding
    if seen.seconds is not None and seen.seconds > fault.within_s:
        problems.append(f"found after {seen.seconds:.1f} s, promised {fault.within_s:.0f} s")
    problems += _wrong_in(final, fault, values)
    expected_exit = 143 if seen.ended_by_us else fault.exit_code
    if expected_exit is not None and seen.exit_code != expected_exit:
        problems.append(f"exit code {seen.exit_code}, expected {expected_exit}")
    if final.get("severity") == "error" and seen.exit_code == 0:
        problems.append("exit code 0 for an error")
    outcome = "interrupted" if seen.ended_by_us else "failed" if final.get("severity") == "error" else "completed"
    if seen.verdict.get("outcome") != outcome:
        problems.append(f"outcome {seen.verdict.get('outcome')}, expected {outcome}")
    return problems


def _wrong_in(finding: dict[str, Any], fault: Fault, values: dict[str, str]) -> list[str]:
    """What the finding itself gets wrong: severity, victims, line, cause, facts, words."""
    problems = []
    if fault.cause and finding.get("cause") != fault.cause:
        problems.append(f"cause {finding.get('cause')!r} instead of {fault.cause!r}")
    if fault.tensor not in (finding.get("tensor") or ""):
        problems.append(f"tensor {finding.get('tensor')!r} instead of {fault.tensor!r}")
    facts = finding.get("facts", {})
    problems += [
        f"fact {key} is {facts.get(key)!r} instead of {value!r}"
        for key, value in fault.facts.items()
        if not _holds(facts.get(key), value)
    ]
    words = [_filled(word, values) for word in fault.says]
    if fault.severity and finding.get("severity") != fault.severity:
        problems.append(f"severity {finding.get('severity')}, expected {fault.severity}")
    if set(finding.get("victims", [])) & set(finding.get("ranks", [])):
        problems.append(f"ranks {finding['ranks']} are both guilty and victims {finding['victims']}")
    if lines := fault.lines():
        allowed = {f"{fault.path.name}:{line}" for line in lines}
        if Path(finding.get("location") or "nowhere").name not in allowed:
            problems.append(f"location {finding.get('location')}, expected one of {sorted(allowed)}")
        words += sorted(allowed) if fault.every_line else []
    if not finding.get("fix") or not finding.get("evidence"):
        problems.append("a finding needs evidence and a fix")
    said = json.dumps([finding.get(k) for k in ("title", "location", "evidence", "fix")], ensure_ascii=False).lower()
    missing = [word for word in words if word.lower() not in said]
    if missing:
        problems.append(f"does not say {missing}")
    return problems


def _holds(found: Any, promised: Any) -> bool:
    """Whether a fact is the promised one; of an object, the promised keys."""
    if isinstance(found, dict) and isinstance(promised, dict):
        return all(_holds(found.get(key), value) for key, value in promised.items())
    return found == promised


def results_in(output: str) -> list[str]:
    """The RESULT lines of a control, whatever prefix the launcher puts in front, in a fixed order."""
    return sorted(match.rstrip() for match in re.findall(r"RESULT (?:(?!RESULT).)*", output))


def observe_control(control: Control, folder: Path) -> Observation:
    """Runs the control under the black box and compares it with itself under the plain launcher, both at once."""
    seen = Observation()
    command = command_of(control.form, control.nproc, folder / "run", control.path, [])
    with ThreadPoolExecutor(1) as beside, launched(command, folder, {}, control.stdin) as job:
        plain_run = beside.submit(_plain_results, control, folder / "plain")
        if not job.wait(control.seconds + START_LIMIT_S):
            seen.problems.append(f"did not end within {control.seconds + START_LIMIT_S:.0f} s")
            job.process.kill()
            job.process.wait()
        seen.exit_code, seen.leftovers = job.process.returncode, leftovers_of(job.mark)
        seen.verdict, seen.output = job.verdict(), job.output
    plain, plain_output = plain_run.result()
    seen.problems += control_problems(control, seen, plain)
    if not plain:
        seen.output += f"\n--- the plain run said:\n{plain_output}"
    return seen


def _plain_results(control: Control, folder: Path) -> tuple[list[str], str]:
    folder.mkdir()
    command = command_of(control.form, control.nproc, None, control.path, [])
    with launched(command, folder, {"CONTROL_PAUSE": "0"}, control.stdin) as job:
        deadline = time.monotonic() + control.seconds + START_LIMIT_S
        while job.process.poll() is None and time.monotonic() < deadline:
            if results_in(job.output):
                # Without us a script may stand still at its very end: DDP's reducer, freed last, holds the GIL while
                # it waits for a thread of gloo that wants it. What it had to say it has said.
                job.wait(PLAIN_END_S)
                break
            time.sleep(POLL_S)
        return results_in(job.output), job.output


def control_problems(control: Control, seen: Observation, plain: list[str]) -> list[str]:
    problems = []
    findings = seen.verdict.get("findings", [])
    wrong = [f for f in findings if f.get("severity") == "error" and f.get("code") not in control.error_codes]
    standing = [f for f in findings if str(f.get("code")).startswith("MC2")]
    trends = [f for f in findings if f.get("code") in EARLY_WARNINGS]
    for what, found in (("error findings", wrong), ("stalls not withdrawn", standing), ("early warnings", trends)):
        if found:
            problems.append(f"{what}: {[(f.get('code'), f.get('ranks'), f.get('title')) for f in found]}")
    # A warning that is withdrawn later was still a false alarm for its reader.
    shown = {code: title for _, code, title in SHOWN.findall(seen.output)}
    if told := {code: shown[code] for code in shown.keys() - control.may_tell - control.error_codes}:
        problems.append(f"shown while it ran: {told}")
    outcome = "failed" if control.exit_code else "completed"
    if seen.verdict.get("outcome") != outcome:
        problems.append(f"outcome {seen.verdict.get('outcome')}, expected {outcome}")
    if seen.exit_code != control.exit_code:
        problems.append(f"exit code {seen.exit_code}, expected {control.exit_code}")
    if not plain or results_in(seen.output) != plain:
        problems.append(f"results {results_in(seen.output)} differ from the plain run's {plain}")
    if control.waits and control.waits not in seen.output:
        problems.append(f"never said {control.waits!r} while the ranks waited")
    if control.never_says and control.never_says in seen.output:
        problems.append(f"said {control.never_says!r}")
    if seen.leftovers:
        problems.append(f"left behind: {seen.leftovers}")
    return problems


def why_not_here(needs: str) -> str:
    """Why a fault cannot be planted on this machine; empty: it can."""
    if needs == "gpu" and not Path("/dev/nvidiactl").exists():
        return "needs a CUDA device"
    if needs == "cgroup" and not os.environ.get("FAULT_CGROUP"):
        return "needs FAULT_CGROUP: a control group of ours with a memory limit"
    return ""


def _row(name: str, seen: Observation) -> str:
    finding = seen.finding or next(iter(seen.verdict.get("findings", [])), {})
    location = Path(finding.get("location") or "-").name
    seconds = f"{seen.seconds:.1f}" if seen.seconds is not None else "-"
    verdict = "ok" if not seen.problems else "NO: " + "; ".join(seen.problems)
    ranks = ",".join(map(str, finding.get("ranks", []))) or "-"
    return f"| {name} | {finding.get('code', '-')} | {ranks} | {location} | {seconds} | {verdict} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="faults or controls to run")
    parser.add_argument("--all", action="store_true", help="every fault and every control")
    parser.add_argument("--keep", type=Path, help="keep the run directories under this folder")
    args = parser.parse_args()
    every: tuple[Fault | Control, ...] = (*FAULTS, *HEALTHY)
    wanted = [case for case in every if args.all or case.name in args.names]
    if not wanted:
        parser.error("name a fault or a control, or say --all")
    print("| fault | code | rank | line | seconds | |\n|---|---|---|---|---|---|", flush=True)
    failed = 0
    for case in wanted:
        if isinstance(case, Fault) and (reason := why_not_here(case.needs)):
            print(f"| {case.name} | - | - | - | - | skipped: {reason} |", flush=True)
            continue
        with tempfile.TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True) as scratch:
            folder = (args.keep or Path(scratch)) / case.name
            folder.mkdir(parents=True)
            seen = observe_fault(case, folder) if isinstance(case, Fault) else observe_control(case, folder)
        print(_row(case.name, seen), flush=True)
        failed += bool(seen.problems)
    print(f"\n{len(wanted) - failed} of {len(wanted)} as promised")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
