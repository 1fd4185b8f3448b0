"""Foreign scripts and commands under the launcher: environment, streams, exit codes, signals, nothing left behind."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from model_check.errors import UsageError
from model_check.launch.command import run_command
from model_check.launch.foreign import ForeignScript
from model_check.launch.signals import KEY_REPEATED_WITHIN_S, REPEATED_WITHIN_S
from model_check.record import RunDir, Verdict, read_jsonl
from model_check.record.paths import RUN_DIR_VARIABLE
from model_check.supervise import processes
from model_check.supervise.supervisor import Supervisor
from tests.signals import hear_signals

_HERE = Path(__file__).parent
_RING = "from pathlib import Path; import os\nfrom model_check.blackbox.recorder import Recorder\n"


class Launched:
    """A launcher with a run directory of its own, whose every descendant can be found by it."""

    def __init__(
        self,
        root: Path,
        *words: str,
        ignored: int | None = None,
        terminal: int | None = None,
        **environment: str,
    ) -> None:
        def prepare() -> None:
            hear_signals()
            if ignored is not None:
                signal.signal(ignored, signal.SIG_IGN)
            if terminal is not None:  # as a shell does for the job in the foreground
                os.setsid()
                fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)

        self.run_dir = RunDir(root)
        self.process = subprocess.Popen(
            [sys.executable, str(_HERE / "foreign_driver.py"), str(root), *words],
            stdin=subprocess.PIPE if terminal is None else terminal,
            stdout=subprocess.PIPE,
            text=True,
            cwd=root.parent,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            preexec_fn=prepare,
        )

    def marked(self) -> list[int]:
        root = str(self.run_dir.root)
        marked = [pid for pid in psutil.pids() if processes.environment_of(pid).get(RUN_DIR_VARIABLE) == root]
        return [pid for pid in marked if processes.is_alive(pid)]

    def finish(self) -> tuple[dict[str, Any], list[str]]:
        out, _ = self.process.communicate(timeout=60)
        *lines, last = out.splitlines()
        return json.loads(last), lines

    def end(self) -> None:
        """Kills it if it still runs; whatever it started must be gone a moment later."""
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()
        _until(lambda: not self.marked())

    def wait_for(self, *names: str) -> None:
        _until(lambda: all((self.run_dir.root.parent / name).exists() for name in names), 30.0)

    def events(self, name: str) -> list[dict[str, Any]]:
        return [record for record in read_jsonl(self.run_dir.supervisor_events).records if record["event"] == name]


def _until(condition: Callable[[], Any], deadline_s: float = 10.0) -> Any:
    end = time.monotonic() + deadline_s
    while not (value := condition()):
        assert time.monotonic() < end, "it did not become true in time"
        time.sleep(0.01)
    return value


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    launched: list[Launched] = []

    def start(*words: str, **environment: Any) -> Launched:
        launched.append(Launched(tmp_path / "run", *words, **environment))
        return launched[-1]

    yield start
    for launcher in launched:
        launcher.end()


def _write(path: Path, code: str) -> str:
    path.write_text(code)
    return str(path)


def test_ranks_see_what_torchrun_would_show_them(tmp_path: Path, launch: Callable[..., Launched]) -> None:
    code = (
        "import json, os, sys\n"
        "told = {k: os.environ.get(k) for k in ('RANK','LOCAL_RANK','WORLD_SIZE','LOCAL_WORLD_SIZE','MASTER_ADDR',"
        "'OMP_NUM_THREADS','MODEL_CHECK_RUN_DIR','CUDA_VISIBLE_DEVICES')}\n"
        "told['argv'] = sys.argv[1:]\n"
        "told['port'] = os.environ['MASTER_PORT'].isdigit()\n"
        "told['first_path'] = os.environ['PYTHONPATH'].split(os.pathsep)[0]\n"
        "told['stdin'] = sys.stdin.readline() if os.environ['RANK'] == '0' else None\n"
        "print(json.dumps(told))\n"
    )
    job = launch(
        "script", "2", _write(tmp_path / "tell.py", code), "--nproc", "5", "--", "-m", "a b", CUDA_VISIBLE_DEVICES=""
    )
    assert job.process.stdin is not None
    job.process.stdin.write("from the launcher\n")
    job.process.stdin.flush()
    result, lines = job.finish()
    assert result == {"exit_code": 0, "exits": [[0, 0, None], [1, 0, None]]} or result["exits"][0][0] == 1
    told = {line.partition(" ")[0]: json.loads(line.partition(" ")[2]) for line in lines if line.startswith("[CPU")}
    assert set(told) == {"[CPU0]", "[CPU1]"}
    for rank in (0, 1):
        mine = told[f"[CPU{rank}]"]
        assert (mine["RANK"], mine["LOCAL_RANK"], mine["WORLD_SIZE"]) == (str(rank), str(rank), "2")
        assert mine["argv"] == ["--nproc", "5", "--", "-m", "a b"]
        assert mine["MODEL_CHECK_RUN_DIR"] == str(job.run_dir.root)
        assert mine["first_path"].endswith("model_check/numerics/inject")
        assert mine["port"] and mine["CUDA_VISIBLE_DEVICES"] == ""
    assert told["[CPU0]"]["stdin"] == "from the launcher\n"


@pytest.mark.slow
@pytest.mark.parametrize("how", [("script", "2"), ("command", "env", "RANK=0", "WORLD_SIZE=1", sys.executable)])
def test_a_job_started_by_a_rank_of_another_one_has_ranks_of_its_own(
    tmp_path: Path, launch: Callable[..., Launched], how: tuple[str, ...]
) -> None:
    script = _write(tmp_path / "tell.py", "import os; print('MODEL_CHECK_GATE_DIR' in os.environ)\n")
    job = launch(*how, script, MODEL_CHECK_RANK_PID="1", MODEL_CHECK_GATE_DIR="/of/another", MODEL_CHECK_GATE_SLOTS="1")
    result, lines = job.finish()
    assert result["exit_code"] == 0
    rings = sorted(path.name for path in job.run_dir.blackbox_dir.iterdir())
    assert rings == [f"rank-{rank:05d}.ring" for rank in range(2 if how[0] == "script" else 1)]
    assert len(lines) == len(rings) and all(line.endswith("False") for line in lines)


# A driver of eight GPUs, for a launcher on a machine that has none.
_DRIVER = """\
from types import SimpleNamespace
class NVMLError(Exception): pass
def nvmlInit(): pass
def nvmlShutdown(): pass
def nvmlDeviceGetCount(): return 8
def nvmlDeviceGetHandleByIndex(index): return index
def nvmlDeviceGetMaxMigDeviceCount(handle): return 0
def nvmlDeviceGetUUID(handle): return f"GPU-{handle}"
def nvmlDeviceGetName(handle): return "H200"
def nvmlDeviceGetMemoryInfo(handle): return SimpleNamespace(total=100, used=0)
def nvmlDeviceGetUtilizationRates(handle): return SimpleNamespace(gpu=0)
def nvmlDeviceGetComputeRunningProcesses(handle): return []
"""


@pytest.mark.slow
def test_a_rank_is_labelled_by_the_gpu_it_sees(tmp_path: Path, launch: Callable[..., Launched]) -> None:
    drivers = tmp_path / "drivers"
    drivers.mkdir()
    _write(drivers / "pynvml.py", _DRIVER)
    script = _write(tmp_path / "tell.py", "import os\nprint(os.environ['RANK'], os.environ['CUDA_VISIBLE_DEVICES'])\n")
    path = os.pathsep.join(filter(None, [str(drivers), os.environ.get("PYTHONPATH")]))
    job = launch("script", "3", script, CUDA_VISIBLE_DEVICES="5,GPU-3", PYTHONPATH=path)
    _, lines = job.finish()
    # Three ranks share two GPUs, and every rank of a foreign script sees both.
    assert sorted(line for line in lines if line.startswith("[")) == [
        "[GPU3] 1 5,GPU-3",
        "[GPU5] 0 5,GPU-3",
        "[GPU5] 2 5,GPU-3",
    ]


def test_a_failing_rank_gives_its_code_and_its_peer_ends_within_two_seconds(
    tmp_path: Path, launch: Callable[..., Launched]
) -> None:
    code = (
        "import os, sys, time\n"
        "if os.environ['RANK'] == '1':\n"
        "    open('failed_at', 'w').write(str(time.monotonic()))\n"
        "    sys.exit(7)\n"
        "time.sleep(100)\n"
    )
    job = launch("script", "2", _write(tmp_path / "fail.py", code))
    result, _ = job.finish()
    assert result["exit_code"] == 7
    assert [0, None, signal.SIGTERM] in result["exits"]
    last_exit = max(record["t"] for record in job.events("rank_exited"))
    assert last_exit - float((tmp_path / "failed_at").read_text()) < 2.0
    assert (job.run_dir.stacks_dir / "rank-00000.1.json").exists()


_SAVES_WHEN_A_PEER_FAILS = """\
import os, signal, sys, time
rank = os.environ["RANK"]

def save(*_):
    with open("saved", "wb", buffering=0) as file:
        for _ in range(30):
            file.write(bytes(1 << 20))
            time.sleep(0.1)
    os.rename("saved", "whole")
    sys.exit(0)

if rank == "0":
    signal.signal(signal.SIGTERM, save)
    open("up", "w").close()
    time.sleep(100)
while not os.path.exists("up"):
    time.sleep(0.01)
sys.exit(7)
"""


@pytest.mark.slow
def test_a_rank_that_saves_because_its_peer_failed_may_finish(tmp_path: Path, launch: Callable[..., Launched]) -> None:
    job = launch("script", "2", _write(tmp_path / "saves.py", _SAVES_WHEN_A_PEER_FAILS))
    result, _ = job.finish()
    assert result["exit_code"] == 7
    assert (tmp_path / "whole").stat().st_size == 30 << 20
    assert sorted(result["exits"]) == [[0, 0, None], [1, 7, None]]


@pytest.mark.parametrize(
    ("number", "code"), [pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow), (signal.SIGKILL, -9)]
)
def test_when_the_launcher_goes_no_rank_stays(
    tmp_path: Path, launch: Callable[..., Launched], number: int, code: int
) -> None:
    script = (
        "import os, subprocess, time\n"
        "subprocess.Popen(['sleep', '100'])\n"
        "open('up-' + os.environ['RANK'], 'w').close()\n"
        "time.sleep(100)\n"
    )
    job = launch("script", "2", _write(tmp_path / "sleep.py", script))
    job.wait_for("up-0", "up-1")
    assert len(job.marked()) == 4
    os.kill(job.process.pid, number)
    assert job.process.wait(timeout=20) == code
    _until(lambda: not job.marked())


# Collects every signal until the test has seen the first stop signal arrive and opens `go`.
_COUNTS = """\
import os, signal, sys
rank = os.environ.get("RANK", "0")
os.mkfifo(f"go-{rank}")
heard, told = os.pipe()
os.set_blocking(told, False)
signal.set_wakeup_fd(told)
for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
    if signal.getsignal(number) is not signal.SIG_IGN:
        signal.signal(number, lambda *_: None)
open(f"up-{rank}", "w").close()
got = [os.read(heard, 1)[0]]
while got[-1] == signal.SIGUSR1:
    open(f"heard-{rank}", "w").close()
    got.append(os.read(heard, 1)[0])
open(f"stopping-{rank}", "w").close()
open(f"go-{rank}").close()
os.set_blocking(heard, False)
try:
    got += os.read(heard, 100)
except BlockingIOError:
    pass
print("got", *got, flush=True)
"""


def _let_go(job: Launched, ranks: int) -> None:
    for rank in range(ranks):
        job.wait_for(f"stopping-{rank}")
    for rank in range(ranks):
        (job.run_dir.root.parent / f"go-{rank}").write_text("")


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGINT,
        *(pytest.param(number, marks=pytest.mark.slow) for number in (signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP)),
    ],
)
def test_each_rank_of_a_script_gets_the_signal_that_we_got_once(
    tmp_path: Path, launch: Callable[..., Launched], number: int
) -> None:
    job = launch("script", "2", _write(tmp_path / "counts.py", _COUNTS))
    job.wait_for("up-0", "up-1")
    os.kill(job.process.pid, signal.SIGUSR1)  # a message to the script, not a request to stop
    job.wait_for("heard-0", "heard-1")
    os.kill(job.process.pid, number)
    _let_go(job, 2)
    result, lines = job.finish()
    assert result["exit_code"] == 0
    both = f"got {int(signal.SIGUSR1)} {int(number)}"
    assert sorted(line for line in lines if " got " in line) == [f"[CPU0] {both}", f"[CPU1] {both}"]


_STOPPED = """\
import os, signal, sys
rank = os.environ["RANK"]

def save(*_):
    print("saved", flush=True)
    sys.exit(0)

signal.signal(signal.SIGTERM, save)
open(f"up-{rank}", "w").close()
while True:
    os.kill(os.getpid(), signal.SIGSTOP) if rank == "1" else signal.pause()
"""


def test_a_stopped_rank_hears_a_request_to_stop_too(tmp_path: Path, launch: Callable[..., Launched]) -> None:
    job = launch("script", "2", _write(tmp_path / "stopped.py", _STOPPED))
    job.wait_for("up-0", "up-1")
    (stopped,) = (int(line["pid"]) for line in job.events("rank_started") if line["rank"] == 1)
    _until(lambda: processes.is_stopped(stopped))
    os.kill(job.process.pid, signal.SIGTERM)
    result, lines = job.finish()
    assert result["exit_code"] == 0
    assert sorted(line for line in lines if "saved" in line) == ["[CPU0] saved", "[CPU1] saved"]


@pytest.mark.parametrize(("key", "number"), [(b"\x03", signal.SIGINT), (b"\x1c", signal.SIGQUIT)], ids=["C", "quit"])
@pytest.mark.parametrize(
    "how",
    [("script", "2"), pytest.param(("command", sys.executable), marks=pytest.mark.slow)],
    ids=["script", "command"],
)
def test_a_key_at_a_terminal_reaches_each_rank_once(
    tmp_path: Path, launch: Callable[..., Launched], how: tuple[str, ...], key: bytes, number: int
) -> None:
    keyboard, terminal = os.openpty()
    try:
        job = launch(*how, _write(tmp_path / "counts.py", _COUNTS), terminal=terminal)
        ranks = 2 if how[0] == "script" else 1
        job.wait_for(*(f"up-{rank}" for rank in range(ranks)))
        os.write(keyboard, key)
        _let_go(job, ranks)
        result, lines = job.finish()
    finally:
        os.close(keyboard)
        os.close(terminal)
    assert result["exit_code"] == 0
    assert [line.rpartition("got ")[2] for line in lines if "got " in line] == [str(int(number))] * ranks


@pytest.mark.parametrize(
    "how",
    [("script", "1"), pytest.param(("command", sys.executable), marks=pytest.mark.slow)],
    ids=["script", "command"],
)
def test_what_nohup_ignores_stays_ignored(
    tmp_path: Path, launch: Callable[..., Launched], how: tuple[str, ...]
) -> None:
    job = launch(*how, _write(tmp_path / "counts.py", _COUNTS), ignored=signal.SIGHUP)
    job.wait_for("up-0")
    for pid in {job.process.pid, *job.marked()}:
        os.kill(pid, signal.SIGHUP)
    os.kill(job.process.pid, signal.SIGTERM)
    _let_go(job, 1)
    result, lines = job.finish()
    assert result["exit_code"] == 0
    assert any(line.endswith(f"got {int(signal.SIGTERM)}") for line in lines)
    assert not any("SIGHUP" in line for line in lines)


def test_a_script_that_is_not_there_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match=r"there is no script nowhere\.py"):
        ForeignScript("nowhere.py").check()


# A job that brings its own launcher.

_SPAWNER = (
    _RING
    + """
import subprocess, sys
if len(sys.argv) == 1:
    ranks = [subprocess.Popen([sys.executable, __file__, str(r)], start_new_session=True) for r in range(2)]
    sys.exit(max(rank.wait() for rank in ranks))
rank = int(sys.argv[1])
recorder = Recorder(Path(os.environ["MODEL_CHECK_RUN_DIR"]) / "blackbox" / f"rank-{rank:05d}.ring", rank=rank)
open(f"up-{rank}", "w").close()
sys.stdin.readline()
os._exit(3 if rank == 1 else 0)
"""
)


def test_a_commands_ranks_are_found_by_their_rings_and_its_code_is_ours(
    tmp_path: Path, launch: Callable[..., Launched]
) -> None:
    job = launch("command", sys.executable, _write(tmp_path / "spawner.py", _SPAWNER))
    _until(lambda: len(job.events("rank_started")) == 2, 20.0)
    assert job.process.stdin is not None
    job.process.stdin.write("\n\n")
    job.process.stdin.close()
    assert job.process.stdout is not None
    result = json.loads(job.process.stdout.read().splitlines()[-1])
    assert job.process.wait(timeout=20) == 3
    assert result["exit_code"] == 3
    assert sorted(result["exits"]) == [[0, 0, None], [1, 3, None]]


@pytest.mark.parametrize(
    ("number", "code"),
    [
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow),
        (signal.SIGTERM, 143),
        pytest.param(signal.SIGKILL, -9, marks=pytest.mark.slow),
    ],
)
def test_when_we_go_the_command_and_its_ranks_go_too(
    tmp_path: Path, launch: Callable[..., Launched], number: int, code: int
) -> None:
    job = launch("command", sys.executable, _write(tmp_path / "spawner.py", _SPAWNER))
    _until(lambda: len(job.events("rank_started")) == 2, 20.0)
    assert len(job.marked()) == 3
    os.kill(job.process.pid, number)
    assert job.process.wait(timeout=20) == code
    _until(lambda: not job.marked())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("handler", "code"),
    [("lambda *_: sys.exit(7)", 7), ("signal.SIG_DFL", 128 + signal.SIGUSR1)],
    ids=["warned", "ended"],
)
def test_a_signal_of_its_own_is_passed_on_to_the_command(
    tmp_path: Path, launch: Callable[..., Launched], handler: str, code: int
) -> None:
    """Slurm's warning before the end: it says what comes of it, and nothing is left behind."""
    catches = f"import signal, sys\nsignal.signal(signal.SIGUSR1, {handler})\n"
    job = launch("command", sys.executable, _write(tmp_path / "spawner.py", catches + _SPAWNER))
    _until(lambda: len(job.events("rank_started")) == 2, 20.0)
    os.kill(job.process.pid, signal.SIGUSR1)
    assert job.process.wait(timeout=20) == code
    _until(lambda: not job.marked())


@pytest.mark.slow
def test_a_command_that_makes_one_of_our_signal_is_still_terminated(
    tmp_path: Path, launch: Callable[..., Launched]
) -> None:
    handler = "import signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(1))\n"
    job = launch("command", sys.executable, _write(tmp_path / "spawner.py", handler + _SPAWNER))
    _until(lambda: len(job.events("rank_started")) == 2, 20.0)
    os.kill(job.process.pid, signal.SIGTERM)
    assert job.process.wait(timeout=20) == 143
    told = [(record["rank"], record["signal"]) for record in job.events("signal_sent")]
    assert {(0, "SIGTERM"), (1, "SIGTERM")} <= set(told)
    _until(lambda: not job.marked())


@pytest.mark.parametrize(
    ("number", "after_s", "code"),
    [(2, KEY_REPEATED_WITHIN_S, 130), pytest.param(15, REPEATED_WITHIN_S, 143, marks=pytest.mark.slow)],
    ids=["SIGINT", "SIGTERM"],
)
def test_a_command_that_takes_its_time_is_ended_when_asked_again(
    tmp_path: Path, launch: Callable[..., Launched], number: int, after_s: float, code: int
) -> None:
    ignores = f"import signal\nsignal.signal({number}, signal.SIG_IGN)\n"
    job = launch("command", sys.executable, _write(tmp_path / "spawner.py", ignores + _SPAWNER))
    _until(lambda: len(job.events("rank_started")) == 2, 20.0)
    os.kill(job.process.pid, number)
    _until(lambda: job.events("signal_sent"))
    asked_at = time.monotonic()
    _until(lambda: time.monotonic() > asked_at + after_s)
    os.kill(job.process.pid, number)
    assert job.process.wait(timeout=20) == code
    assert job.process.stdout is not None
    name = signal.Signals(number).name
    assert job.process.stdout.read().splitlines()[:-1] == [
        f"{name} again: the command and its ranks are ended now, saved or not"
    ]
    # A rank that takes a moment to die is told once more when the command is gone.
    whys = {e["why"] for e in job.events("signal_sent")} - {"its launcher is gone"}
    assert whys == {"passed on to the command", f"{name} again"}


@pytest.mark.slow
def test_ranks_that_their_launcher_left_behind_are_ended(tmp_path: Path, launch: Callable[..., Launched]) -> None:
    job = launch("command", sys.executable, _write(tmp_path / "spawner.py", _SPAWNER))
    _until(lambda: len(job.events("rank_started")) == 2, 20.0)
    os.kill(job.events("job_started")[0]["command_pid"], signal.SIGKILL)
    assert job.process.wait(timeout=20) == 137
    assert {record["why"] for record in job.events("signal_sent")} == {"its launcher is gone"}
    _until(lambda: not job.marked())


@pytest.mark.parametrize(
    "stranger",
    [
        {"start_ticks": 1},
        *(
            pytest.param(other, marks=pytest.mark.slow)
            for other in ({"host": "elsewhere"}, {"pid_ns": "pid:[1]"}, {"boot_id": "an earlier one"})
        ),
    ],
)
def test_a_pid_in_a_ring_is_not_killed_where_it_names_another_process(
    tmp_path: Path, launch: Callable[..., Launched], stranger: dict[str, Any]
) -> None:
    """A ring from another machine holds a PID that belongs to a different process here."""
    bystander = subprocess.Popen(["sleep", "100"])
    code = (
        _RING
        + "folder = Path(os.environ['MODEL_CHECK_RUN_DIR'], 'blackbox')\n"
        + f"Recorder(folder / 'rank-00003.ring', rank=3, **{{'pid': {bystander.pid}, **{stranger!r}}})\n"
    )
    try:
        job = launch("command", sys.executable, _write(tmp_path / "leaves_a_ring.py", code))
        assert job.process.wait(timeout=20) == 0
        assert bystander.poll() is None
        assert job.events("signal_sent") == []
    finally:
        bystander.kill()
        bystander.wait()


def test_a_command_that_is_not_there_is_a_usage_error(tmp_path: Path) -> None:
    run_dir = RunDir.create(tmp_path / "run")
    supervisor = Supervisor(run_dir, lambda _, live: Verdict(), say=print, show=print)
    with pytest.raises(UsageError, match="no-such-command cannot be started: No such file"):
        run_command(["no-such-command"], run_dir=run_dir, env={}, supervisor=supervisor)
    supervisor.finish("failed", (), 2)
