"""A run directory belongs to one job at a time: its hosts share it; another job is refused and changes nothing."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import BIN, ROOT, TINY, Outcome, Shell

# The answer of Lustre without -o flock and NFS without a lock daemon; the data cache is on another filesystem.
NO_LOCKS = """
import errno, fcntl, os
real = fcntl.flock
def flock(file, how):
    number = file if isinstance(file, int) else file.fileno()
    if "/run/" in os.readlink(f"/proc/self/fd/{number}"):
        raise OSError(errno.ENOLCK, "No locks available")
    real(file, how)
fcntl.flock = flock
"""


class Live:
    """`model-check train` in the background, in the shell's folder."""

    def __init__(self, shell: Shell, *arguments: str, name: str = "first", **env: str) -> None:
        self.said = shell.folder / f"{name}.said"
        with self.said.open("wb") as said:
            self.process = subprocess.Popen(
                command(*arguments),
                cwd=shell.folder,
                env=shell.environment(**env),
                stdout=said,
                stderr=subprocess.STDOUT,
            )

    def wait_for_step(self) -> None:
        wait_until(lambda: "] Step [" in self.said.read_text() or self.process.poll() is not None)
        assert self.process.poll() is None, self.said.read_text()


def wait_until(what: Callable[[], Any], deadline_s: float = 90.0) -> None:
    end = time.monotonic() + deadline_s
    while not what():
        assert time.monotonic() < end, f"{what} did not become true"
        time.sleep(0.02)


def command(*arguments: str) -> list[str]:
    sets = [word for value in (*TINY, "system.device=cpu") for word in ("--set", value)]
    return [
        str(BIN / "model-check"),
        "train",
        "--preset",
        "debug",
        "--nproc",
        "1",
        "--run-dir",
        "run",
        *sets,
        *arguments,
    ]


def second(shell: Shell, *arguments: str, **env: str) -> Outcome:
    return shell.run(*command("--max-steps", "4", "--resume", "auto", *arguments), **env)


@pytest.fixture
def live(shell: Shell) -> Iterator[Callable[..., Live]]:
    started: list[Live] = []

    def start(*arguments: str, **env: str) -> Live:
        started.append(Live(shell, *arguments, **env))
        return started[-1]

    yield start
    for run in started:
        run.process.kill()
        run.process.wait()


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.name.endswith(".tmp")}


def assert_refused(done: Outcome, holder: Live) -> None:
    assert done.code == 2, done.out + done.err
    sentences = [line for line in done.err.splitlines() if "run directory" in line or "--run-dir" in line]
    assert len(sentences) == 1, done.err
    assert f"host {socket.gethostname()}, pid {holder.process.pid}" in sentences[0]
    assert "--force" in sentences[0]


@pytest.mark.slow
@pytest.mark.parametrize("locks", [True, False], ids=["with locks", "without locks"])
def test_a_second_job_is_refused_while_the_first_lives_and_let_in_once_it_is_dead(
    shell: Shell, live: Callable[..., Live], locks: bool
) -> None:
    env = {}
    if not locks:
        (shell.folder / "site").mkdir()
        (shell.folder / "site" / "sitecustomize.py").write_text(NO_LOCKS)
        env["PYTHONPATH"] = f"{shell.folder / 'site'}:{ROOT}"
    first = live("--max-steps", "100000", "--set", "checkpoint.interval=0", **env)
    first.wait_for_step()
    run = shell.folder / "run"
    before, verdict = names(run), (run / "config.json").read_bytes()
    assert_refused(second(shell, **env), first)
    assert names(run) == before and (run / "config.json").read_bytes() == verdict
    os.kill(first.process.pid, signal.SIGKILL)
    first.process.wait()
    done = second(shell, **env)
    assert done.code == 0, done.out + done.err
    assert (run / "attempts" / "1" / "blackbox" / "rank-00000.ring").exists()


@pytest.mark.slow
def test_force_overrides(shell: Shell, live: Callable[..., Live]) -> None:
    first = live("--max-steps", "100000", "--set", "checkpoint.interval=0")
    first.wait_for_step()
    done = second(shell, "--force", "--set", "checkpoint.interval=0")
    assert done.code == 0, done.out + done.err


@pytest.mark.slow
def test_a_finished_run_leaves_its_directory_to_the_next(shell: Shell) -> None:
    assert shell.run(*command("--max-steps", "2")).code == 0
    done = second(shell)
    assert done.code == 0, done.out + done.err


@pytest.mark.slow
def test_two_hosts_of_one_job_share_a_run_directory(shell: Shell, live: Callable[..., Live]) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    meet = ("--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{port}", "--set", "checkpoint.interval=0")
    hosts = [live("--max-steps", "5", *meet, name=name, GLOO_SOCKET_IFNAME="lo") for name in ("first", "second")]
    codes = [host.process.wait(timeout=120) for host in hosts]
    assert codes == [0, 0], hosts[0].said.read_text() + hosts[1].said.read_text()
    run = shell.folder / "run"
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(5))
    assert not (run / "attempts").exists(), "one host took the other for an earlier attempt"


@pytest.mark.slow
def test_ranks_of_torchrun_share_a_run_directory_and_refuse_another_job(
    shell: Shell, live: Callable[..., Live]
) -> None:
    first = live("--max-steps", "100000", "--set", "checkpoint.interval=0")
    first.wait_for_step()
    before = names(shell.folder / "run")
    _, *train = [
        word for word in command("--max-steps", "3", "--set", "checkpoint.interval=0") if word not in ("--nproc", "1")
    ]
    torchrun = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2", "-m", "model_check", *train]
    refused = shell.run(*torchrun)
    assert refused.code != 0 and re.search(rf"pid {first.process.pid}\b", refused.err), refused.err
    assert names(shell.folder / "run") == before
    os.kill(first.process.pid, signal.SIGKILL)
    first.process.wait()
    done = shell.run(*torchrun)
    assert done.code == 0, done.out + done.err


def test_two_runs_of_a_script_cannot_both_take_an_empty_directory(shell: Shell) -> None:
    (shell.folder / "wait.py").write_text("import pathlib, time\npathlib.Path('up').touch()\ntime.sleep(60)\n")
    run = [str(BIN / "model-check"), "run", "--run-dir", "run", "wait.py"]
    first = subprocess.Popen(run, cwd=shell.folder, env=shell.environment())
    try:
        wait_until((shell.folder / "up").exists)
        refused = shell.run(*run)
    finally:
        first.terminate()
        first.wait()
    assert refused.code == 2 and f"pid {first.pid}" in refused.err, refused.err


@pytest.mark.parametrize(("flags", "mode"), [((), 0o700), (("--run-dir-mode", "2750"), 0o2750)])
def test_a_new_run_directory_and_its_logs_are_private_unless_asked(
    shell: Shell, flags: tuple[str, ...], mode: int
) -> None:
    (shell.folder / "script.py").write_text("print('hello')\n")
    done = shell.model_check("run", *flags, "--run-dir", "run", "script.py")
    assert done.code == 0, done.err
    folders = [shell.folder / "run", (shell.folder / "run" / "logs").resolve()]
    assert [folder.stat().st_mode & 0o7777 for folder in folders] == [mode, mode]


def test_an_existing_directory_keeps_its_mode_and_a_wrong_mode_is_refused(shell: Shell) -> None:
    (shell.folder / "script.py").write_text("print('hello')\n")
    (shell.folder / "run").mkdir(mode=0o755)
    assert shell.model_check("run", "--run-dir", "run", "script.py").code == 0
    assert (shell.folder / "run").stat().st_mode & 0o777 == 0o755
    refused = shell.model_check("run", "--run-dir", "other", "--run-dir-mode", "rwx", "script.py")
    assert refused.code == 2 and "--run-dir-mode rwx" in refused.err and not (shell.folder / "other").exists()
