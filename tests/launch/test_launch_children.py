"""What a rank leaves behind: children of a clean rank live on, all others end, and no zombies remain."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from launch_jobs import StartJob, is_gone, wait_until

from model_check.launch.signals import KEY_REPEATED_WITHIN_S
from model_check.record import read_jsonl
from tests.conftest import BIN, Shell
from tests.signals import hear_signals

# Starts one child of each kind, such as an upload, notes their PIDs, and ends as the test wants.
_LEAVES = """\
import multiprocessing, os, subprocess, sys, time
rank = os.environ.get("RANK", "0")

def note(name, text=""):
    with open(f".{name}-{rank}", "w") as file:
        file.write(text)
    os.rename(f".{name}-{rank}", f"{name}-{rank}")

started = subprocess.Popen(["sleep", "100"])
forked = os.fork()
if forked == 0:
    time.sleep(100)
    os._exit(0)
process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(100,))
process.start()
note("children", f"{started.pid} {forked} {process.pid}")
"""
_LAUNCHES_ITSELF = """\
import os, subprocess, sys
variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
ranks = [
    subprocess.Popen([sys.executable, *sys.argv[1:]], env={**os.environ, **variables, "RANK": str(n)})
    for n in range(2)
]
sys.exit(max(rank.wait() for rank in ranks))
"""


class Launcher:
    """`model-check run` in a folder of its own."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.folder = folder
        self.run_dir = folder / "run"
        self.said = folder / "said"
        with self.said.open("wb") as said:
            self.process = subprocess.Popen(
                [str(BIN / "model-check"), "run", "--run-dir", str(self.run_dir), *words],
                cwd=folder,
                env=Shell(folder).environment(),
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                preexec_fn=hear_signals,
            )

    def children(self, rank: int) -> list[int]:
        noted = self.folder / f"children-{rank}"
        wait_until(noted.exists, 30.0)
        return [int(word) for word in noted.read_text().split()]

    def wait_for(self, name: str) -> None:
        wait_until((self.folder / name).exists, 30.0)

    def events(self, name: str) -> list[dict[str, object]]:
        records = read_jsonl(self.run_dir / "events" / "supervisor.jsonl").records
        return [record for record in records if record["event"] == name]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., Launcher]]:
    started: list[Launcher] = []

    def start(*words: str) -> Launcher:
        started.append(Launcher(tmp_path, *words))
        return started[-1]

    yield start
    for launcher in started:
        launcher.process.kill()
        launcher.process.wait()
    for noted in tmp_path.glob("children-*"):
        for word in noted.read_text().split():
            with suppress(ProcessLookupError):
                os.kill(int(word), signal.SIGKILL)


def _words(tmp_path: Path, how: str, code: str) -> list[str]:
    """The command line for two ranks of this code, started by us or by a command that starts its own ranks."""
    (tmp_path / "rank.py").write_text(code)
    (tmp_path / "starts_ranks.py").write_text(_LAUNCHES_ITSELF)
    script = str(tmp_path / "rank.py")
    return ["--nproc", "2", script] if how == "script" else ["--", sys.executable, "starts_ranks.py", script]


both_ways = pytest.mark.parametrize("how", ["script", pytest.param("command", marks=pytest.mark.slow)])


@both_ways
def test_children_of_a_clean_rank_live_on_and_nobody_waits_for_them(
    tmp_path: Path, run: Callable[..., Launcher], how: str
) -> None:
    launcher = run(*_words(tmp_path, how, _LEAVES + "os._exit(0)\n"))
    assert launcher.process.wait(timeout=60) == 0, launcher.said.read_text()
    assert [pid for rank in (0, 1) for pid in launcher.children(rank) if is_gone(pid)] == []


@pytest.mark.slow
def test_children_of_a_clean_trainer_rank_live_on(start_job: StartJob) -> None:
    job = start_job("leaves_children", nproc=1)
    assert job.wait() == 0
    children = [int(word) for word in job.marker("left-0").read_text().split()]
    assert [pid for pid in children if is_gone(pid)] == []
    for pid in children:
        os.kill(pid, signal.SIGKILL)


def test_children_of_a_failed_rank_end_and_those_of_its_clean_peer_live_on(
    tmp_path: Path, run: Callable[..., Launcher]
) -> None:
    waits = "while rank == '1' and not os.path.exists('fail'): time.sleep(0.01)\n"
    launcher = run(*_words(tmp_path, "script", _LEAVES + waits + "os._exit(3 if rank == '1' else 0)\n"))
    clean, failed = launcher.children(0), launcher.children(1)
    wait_until(lambda: launcher.events("rank_exited"), 30.0)
    (tmp_path / "fail").touch()
    assert launcher.process.wait(timeout=60) == 3
    for pid in failed:
        wait_until(lambda pid=pid: is_gone(pid), 5.0)
    assert [pid for pid in clean if is_gone(pid)] == []


@both_ways
def test_a_second_ctrl_c_ends_the_children_of_a_clean_rank_too(
    tmp_path: Path, run: Callable[..., Launcher], how: str
) -> None:
    stays = (
        "import signal\n"
        "def hear(*_): note('heard')\n"
        "signal.signal(signal.SIGINT, hear)\n"
        "note('up')\n"
        "while rank == '1': time.sleep(0.01)\n"
        "os._exit(0)\n"
    )
    words = _words(tmp_path, how, _LEAVES + stays)
    (tmp_path / "starts_ranks.py").write_text(
        "import signal\n"
        + _LAUNCHES_ITSELF.replace(
            "sys.exit(", "signal.signal(signal.SIGINT, lambda *_: ranks[1].send_signal(2))\nsys.exit("
        )
    )
    launcher = run(*words)
    clean = launcher.children(0)
    launcher.wait_for("up-1")
    wait_until(lambda: launcher.events("rank_exited"), 30.0)
    launcher.process.send_signal(signal.SIGINT)
    launcher.wait_for("heard-1")
    assert [pid for pid in clean if is_gone(pid)] == []
    asked_at = time.monotonic()
    wait_until(lambda: time.monotonic() > asked_at + KEY_REPEATED_WITHIN_S, 30.0)
    launcher.process.send_signal(signal.SIGINT)
    assert launcher.process.wait(timeout=30) == 130, launcher.said.read_text()
    for pid in [*clean, *launcher.children(1)]:
        wait_until(lambda pid=pid: is_gone(pid), 5.0)


@both_ways
def test_a_killed_launcher_takes_its_job_along_but_not_the_children_of_a_clean_rank(
    tmp_path: Path, run: Callable[..., Launcher], how: str
) -> None:
    stays = "note('up')\nwhile rank == '1': time.sleep(0.01)\nos._exit(0)\n"
    launcher = run(*_words(tmp_path, how, _LEAVES + stays))
    clean, running = launcher.children(0), launcher.children(1)
    launcher.wait_for("up-1")
    wait_until(lambda: launcher.events("rank_exited"), 30.0)
    launcher.process.kill()
    for pid in running:
        wait_until(lambda pid=pid: is_gone(pid), 10.0)
    launcher.process.wait()
    assert [pid for pid in clean if is_gone(pid)] == []


@pytest.mark.slow
def test_a_rank_that_a_clean_command_left_running_lives_on(tmp_path: Path, run: Callable[..., Launcher]) -> None:
    words = _words(tmp_path, "command", "import os\n" + _LEAVES + "note('up')\ntime.sleep(100)\n")
    (tmp_path / "starts_ranks.py").write_text(
        "import os, time\n" + _LAUNCHES_ITSELF.rpartition("sys.exit(")[0] + "\nwhile not os.path.exists('leave'):"
        " time.sleep(0.01)\nos._exit(0)\n"
    )
    launcher = run(*words)
    children = launcher.children(0) + launcher.children(1)
    wait_until(lambda: len(launcher.events("rank_started")) == 2, 30.0)
    ranks = [int(str(event["pid"])) for event in launcher.events("rank_started")]
    (tmp_path / "leave").touch()
    try:
        assert launcher.process.wait(timeout=30) == 0, launcher.said.read_text()
        assert [pid for pid in ranks + children if is_gone(pid)] == []
        assert launcher.events("signal_sent") == []
    finally:
        for pid in ranks:
            os.kill(pid, signal.SIGKILL)


def test_a_shell_that_names_the_run_directory_is_not_part_of_the_job(
    tmp_path: Path, run: Callable[..., Launcher]
) -> None:
    shell = subprocess.Popen(["sleep", "100"], env={**os.environ, "MODEL_CHECK_RUN_DIR": str(tmp_path / "run")})
    try:
        launcher = run("--", "sh", "-c", "touch up-0; sleep 100 & echo $! > children-0; wait")
        launcher.wait_for("up-0")
        (child,) = wait_until(lambda: launcher.children(0), 10.0)
        launcher.process.kill()
        wait_until(lambda: is_gone(child), 10.0)
        assert shell.poll() is None
    finally:
        shell.kill()
        shell.wait()


@pytest.mark.slow
def test_a_job_inside_a_killed_job_ends_with_it(tmp_path: Path, run: Callable[..., Launcher]) -> None:
    inner = f"{BIN / 'model-check'} run --run-dir inner -- sh -c 'sleep 100 & echo $! > children-0; wait'"
    launcher = run("--", "sh", "-c", inner)
    (child,) = wait_until(lambda: launcher.children(0), 30.0)
    launcher.process.kill()
    wait_until(lambda: is_gone(child), 10.0)


# Fifty helpers, each orphaned by its parent before it ends.
_ORPHANS = """\
import os, time
for _ in range(50):
    middle = os.fork()
    if middle == 0:
        middle = os.getpid()
        if os.fork() == 0:
            while os.getppid() == middle:
                time.sleep(0.001)
        os._exit(0)
    os.waitpid(middle, 0)
open(f"up-{os.environ['RANK']}", "w").close()
while not os.path.exists("end"):
    time.sleep(0.01)
"""


@pytest.mark.slow
@both_ways
def test_orphans_of_a_job_do_not_pile_up_as_zombies(tmp_path: Path, run: Callable[..., Launcher], how: str) -> None:
    launcher = run(*_words(tmp_path, how, _ORPHANS))
    launcher.wait_for("up-0")
    launcher.wait_for("up-1")
    family = psutil.Process(launcher.process.pid)
    wait_until(lambda: not [p for p in family.children(recursive=True) if is_gone(p.pid)], 5.0)
    assert launcher.process.poll() is None
    (tmp_path / "end").touch()
    assert launcher.process.wait(timeout=30) == 0, launcher.said.read_text()


# Its workers cannot end by themselves: each waits for room in a pipe that nobody reads anymore.
_LOADER = """\
import os, time
import numpy as np
from torch.utils.data import DataLoader
rank = os.environ["RANK"]
loader = DataLoader(range(1000), batch_size=2, num_workers=2, collate_fn=lambda _: np.zeros(1 << 20, np.uint8))
batches = iter(loader)
next(batches)
open(f".children-{rank}", "w").write(" ".join(str(worker.pid) for worker in batches._workers))
os.rename(f".children-{rank}", f"children-{rank}")
os._exit(0)
"""


@pytest.mark.slow
@both_ways
def test_loader_workers_of_a_clean_rank_do_not_outlive_it(
    tmp_path: Path, run: Callable[..., Launcher], how: str
) -> None:
    launcher = run(*_words(tmp_path, how, _LOADER))
    assert launcher.process.wait(timeout=60) == 0, launcher.said.read_text()
    for pid in launcher.children(0) + launcher.children(1):
        wait_until(lambda pid=pid: is_gone(pid), 2.0)
