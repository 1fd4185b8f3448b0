"""The injected start: it finds its rank, stays out of everybody else's way, and says how the process ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from model_check.numerics.bootstrap import inject_path
from model_check.record import RunDir, read_jsonl
from model_check.record.ring import read_header
from tests.blackbox.observed_runs import Runner, injected_environment, rank_environment, run_ranks


def test_a_rank_is_known_from_its_environment(run: Runner) -> None:
    seen = run("import sys; print(sys.path[0], 'torch' in sys.modules)", env={"MY_API_KEY": "hunter2-hunter2"})
    header = seen.ring().header
    assert seen.codes == [0] and seen.outputs[0].endswith("user False\n") and seen.errors == [""]
    assert (header.rank, header.world_size, header.local_rank, header.role) == (0, 1, 0, "rank")
    assert header.script == "train.py" and header.host == os.uname().nodename
    assert header.argv[1:] == ("train.py",)
    assert [e["via"] for e in seen.events("exit")] == ["return"]


@pytest.mark.parametrize(
    "variables",
    [
        {"RANK": "3", "WORLD_SIZE": "4"},
        {"SLURM_PROCID": "3", "SLURM_NTASKS": "4"},
        {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"},
    ],
)
def test_ranks_of_every_launcher_are_recognised(run: Runner, variables: dict[str, str]) -> None:
    seen = run("pass", world=None, env=variables)
    assert (seen.ring(3).header.rank, seen.ring(3).header.world_size) == (3, 4)


def test_helper_processes_do_not_touch_the_ring(run: Runner) -> None:
    seen = run(
        "import os, subprocess, sys, multiprocessing as mp\n"
        "def work(n):\n    print('child', n, flush=True)\n"
        "if __name__ == '__main__':\n"
        "    subprocess.run([sys.executable, '-c', 'import os; print(os.environ[\"RANK\"])'], check=True)\n"
        "    for how in ('spawn', 'fork'):\n"
        "        p = mp.get_context(how).Process(target=work, args=(how,)); p.start(); p.join()\n"
        "    pid = os.fork()\n"
        "    if pid == 0:\n        os._exit(7)\n"
        "    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), os.getpid())\n"
    )
    assert seen.codes == [0], seen.errors
    assert seen.outputs[0].split()[:-1] == ["0", "child", "spawn", "child", "fork", "7"]
    assert seen.ring().header.pid == int(seen.outputs[0].split()[-1])
    assert [e["via"] for e in seen.events("exit")] == ["return"]
    assert len(seen.events("fork")) == 2
    assert sorted(p.name for p in seen.run_dir.blackbox_dir.iterdir()) == ["rank-00000.ring"]


@pytest.mark.parametrize(
    ("text", "code", "via", "line"),
    [
        ("import sys\nsys.exit(3)", 3, "sys.exit", 2),
        ("import sys\nsys.exit()", 0, "sys.exit", 2),
        ("import sys\nsys.exit('no data')", 1, "sys.exit", 2),
        ("import os\n\nos._exit(5)", 5, "os._exit", 3),
        ("exit(4)", 4, "sys.exit", 1),
    ],
)
def test_the_exit_call_is_written_down_with_its_line(run: Runner, text: str, code: int, via: str, line: int) -> None:
    seen = run(text)
    (event,) = seen.events("exit")
    assert seen.codes == [code]
    assert (event["code"], event["via"], event["user_frame"]["line"]) == (code, via, line)


def test_an_exception_is_an_event_and_the_traceback_is_still_printed(run: Runner) -> None:
    seen = run(
        "def inner(x):\n    return 1 / x\n\ndef main():\n    try:\n        inner(0)\n"
        "    except ZeroDivisionError as error:\n        raise RuntimeError('token abcdef-secret') from error\n"
        "\nmain()\n",
        env={"HF_TOKEN": "abcdef-secret"},
    )
    (event,) = seen.events("exception")
    assert seen.codes == [1] and seen.errors[0].endswith("RuntimeError: token abcdef-secret\n")
    assert event["type"] == "RuntimeError" and "abcdef-secret" not in event["message"]
    assert [(f["file"], f["line"], f["function"]) for f in event["frames"]] == [
        ("train.py", 10, "<module>"),
        ("train.py", 8, "main"),
    ]
    assert event["user_frame"]["text"] == "raise RuntimeError('token abcdef-secret') from error"
    assert event["cause"]["type"] == "ZeroDivisionError" and event["cause"]["user_frame"]["line"] == 2
    assert [e["via"] for e in seen.events("exit")] == ["exception"]


def test_a_hook_of_the_scripts_own_does_not_hide_the_exception(run: Runner) -> None:
    seen = run("import sys\nsys.excepthook = lambda *a: print('mine')\nraise KeyError('x')")
    assert seen.outputs == ["mine\n"]
    assert [e["type"] for e in seen.events("exception")] == ["KeyError"]


def test_an_exception_in_a_process_of_multiprocessing_is_not_the_ranks(run: Runner) -> None:
    seen = run(
        "import multiprocessing as mp\ndef work():\n    raise ValueError('x')\n"
        "p = mp.get_context('fork').Process(target=work); p.start(); p.join(); print(p.exitcode)"
    )
    assert seen.outputs == ["1\n"] and seen.events("exception") == []


def test_an_exception_in_a_thread_does_not_end_the_rank(run: Runner) -> None:
    seen = run("import threading\nt = threading.Thread(target=lambda: 1 / 0); t.start(); t.join()")
    assert seen.codes == [0]
    assert [e["type"] for e in seen.events("thread_exception")] == ["ZeroDivisionError"]
    assert [e["via"] for e in seen.events("exit")] == ["return"]


SWALLOWING = (
    "import sys\n"
    "def step(n):\n    if n == 2:\n        raise ValueError('bad batch')\n"
    "for n in range(4):\n"
    "    try:\n        step(n)\n"
    "    except ValueError as error:\n        {handler}\n"
    "sys.stdin.readline()\n"
)


@pytest.mark.parametrize("handler", ["print('skipped', error)", "import logging; logging.warning('skipped %s', error)"])
def test_an_exception_that_a_handler_speaks_of_is_swallowed(run: Runner, handler: str) -> None:
    seen = run(SWALLOWING.format(handler=handler), stdin="\n")
    (event,) = seen.events("swallowed_exception")
    assert (event["type"], event["message"], event["user_frame"]["line"]) == ("ValueError", "bad batch", 4)
    assert seen.codes == [0] and seen.events("exception") == []


@pytest.mark.parametrize("version", ["3.12", "3.13"])
def test_an_exception_that_is_swallowed_in_silence_is_noticed_by_newer_interpreters(
    tmp_path: Path, script: Callable[[str], Path], version: str
) -> None:
    python = _interpreter(version)
    if python is None:
        pytest.skip(f"no Python {version} on this machine")
    path = script(SWALLOWING.format(handler="pass"))
    seen = run_ranks(path, RunDir.create(tmp_path / "run"), world=1, stdin="\n", python=python)
    (event,) = seen.events("swallowed_exception")
    assert seen.codes == [0], seen.errors
    assert (event["message"], event["user_frame"]["line"]) == ("bad batch", 4)


def _interpreter(version: str) -> str | None:
    if sys.version.startswith(version):
        return sys.executable
    found = sorted(Path(sys.base_prefix).parent.glob(f"{version}.*/bin/python3"))
    return str(found[0]) if found else None


def test_an_exception_swallowed_just_before_the_end_is_not_forgotten(run: Runner) -> None:
    seen = run("import sys\ntry:\n    int('x')\nexcept ValueError as e:\n    print(e)\nsys.exit(0)")
    assert [e["type"] for e in seen.events("swallowed_exception")] == ["ValueError"]
    assert [(e["code"], e["user_frame"]["line"]) for e in seen.events("exit")] == [(0, 6)]


def test_a_loop_that_retries_does_not_fill_the_disk(run: Runner) -> None:
    seen = run(
        "import sys\nfor n in range(500):\n    try:\n        int('x')\n    except ValueError as e:\n        print(e)\n"
        "    sys.stdin.readline()\n",
        stdin="\n" * 500,
    )
    assert seen.codes == [0] and len(seen.events("swallowed_exception")) == 3


def test_waiting_for_input_is_a_span(run: Runner) -> None:
    seen = run("import sys\nprint(input('name? '))\nprint(sys.stdin.read())", stdin="ada\nrest")
    assert seen.outputs == ["name? ada\nrest\n"]
    spans = [(c.detail, c.site) for c in seen.crumbs(phase="input", event="begin")]
    # input() reads through the stream's readline where standard input is no terminal.
    assert spans == [
        ("input()", "train.py:2"),
        ("sys.stdin.readline", "train.py:2"),
        ("sys.stdin.read", "train.py:3"),
    ]
    assert seen.ring().open_spans() == []


def test_the_environments_own_sitecustomize_still_runs(tmp_path: Path, script: Callable[[str], Path]) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "sitecustomize.py").write_text("import builtins; builtins.theirs = __file__\n")
    path = script("import sitecustomize; print(theirs == sitecustomize.__file__)")
    run_dir = RunDir.create(tmp_path / "run")
    env = {"PYTHONPATH": os.pathsep.join([inject_path(), str(theirs)])}
    assert run_ranks(path, run_dir, world=1, env=env).outputs == ["True\n"]
    assert read_header(run_dir.ring(0)).rank == 0


def test_a_failure_of_ours_is_written_down_and_the_script_runs(tmp_path: Path, script: Callable[[str], Path]) -> None:
    run_dir = RunDir.create(tmp_path / "run")
    run_dir.ring(0).mkdir()
    seen = run_ranks(script("print('ran')"), run_dir, world=1)
    assert (seen.codes, seen.outputs, seen.errors) == ([0], ["ran\n"], [""])
    (note,) = run_dir.events_dir.glob("injection-*.txt")
    assert "IsADirectoryError" in note.read_text()


def test_a_process_that_is_no_rank_loads_nothing(run: Runner) -> None:
    seen = run("import sys; print(sorted(m for m in sys.modules if m.split('.')[0] == 'model_check'))", world=None)
    assert seen.outputs == ["[]\n"]
    assert list(seen.run_dir.blackbox_dir.iterdir()) == []


def test_a_segfault_leaves_the_python_line(run: Runner) -> None:
    seen = run("import faulthandler\n\ndef crash():\n    faulthandler._sigsegv()\n\ncrash()\n")
    text = (seen.run_dir.stacks_dir / "rank-00000.fault.txt").read_text()
    assert seen.codes == [-signal.SIGSEGV]
    assert "Segmentation fault" in text and 'train.py", line 4 in crash' in text


def test_stacks_on_demand_while_c_code_holds_the_gil(tmp_path: Path, script: Callable[[str], Path]) -> None:
    path = script(
        "import ctypes, sys\nprint('up', flush=True)\n\ndef hold():\n    ctypes.PyDLL(None).sleep(60)\n\nhold()\n"
    )
    run_dir = RunDir.create(tmp_path / "run")
    process = subprocess.Popen(
        [sys.executable, path.name],
        cwd=path.parent,
        env={**injected_environment(run_dir), **rank_environment(0, 1, 1)},
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
        text = _stack_by_signal(process.pid, run_dir)
    finally:
        process.kill()
        process.wait()
    assert 'train.py", line 5 in hold' in text


def _stack_by_signal(pid: int, run_dir: RunDir) -> str:
    number = read_header(run_dir.ring(0)).stack_signal
    path = run_dir.stacks_dir / "rank-00000.fault.txt"
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        os.kill(pid, number)
        text = path.read_text()
        if "in hold" in text:
            return text
    return path.read_text()


def test_a_rank_that_replaces_itself_stays_the_rank(run: Runner) -> None:
    seen = run(
        "import os, sys\n"
        "if 'again' not in sys.argv:\n    os.execv(sys.executable, [sys.executable, 'train.py', 'again'])\n"
        "print(os.getpid())\n"
    )
    assert seen.ring().header.pid == int(seen.outputs[0])
    assert seen.ring().header.argv[-1] == "again"


def test_the_start_costs_little(run: Runner, tmp_path: Path, script: Callable[[str], Path]) -> None:
    """CPU time, not wall time: the machine that runs the tests is busy."""
    text = "import resource; u = resource.getrusage(resource.RUSAGE_SELF); print(u.ru_utime + u.ru_stime)"

    def cost(world: int | None, inject: bool) -> float:
        return min(float(run(text, world=world, inject=inject).outputs[0]) for _ in range(3))

    plain = cost(None, False)
    assert cost(None, True) - plain < 0.03, "a process that is no rank"
    assert cost(1, True) - plain < 0.35, "a rank"


def test_events_have_a_time_and_a_name(run: Runner) -> None:
    before = time.monotonic()
    seen = run("pass")
    records = read_jsonl(seen.run_dir.events(0)).records
    assert [r["event"] for r in records] == ["memory", "memory", "exit"]
    assert all(before <= r["t"] <= time.monotonic() for r in records)
    assert all(r["rss"] > 1_000_000 for r in records if r["event"] == "memory")


def test_a_request_for_stacks_does_not_kill_a_process_whose_interpreter_has_ended(run: Runner) -> None:
    seen = run(
        "import faulthandler, os, signal\n"
        "number = signal.SIGRTMIN + 9\n"
        "assert faulthandler.unregister(number)\n"  # what the end of the interpreter does
        "os.kill(os.getpid(), number)\n"
        "print('still here')\n"
    )
    assert (seen.codes, seen.outputs) == ([0], ["still here\n"]), seen.errors
