"""Stacks where the kernel is strict: ranks let py-spy in under Yama, and answer by themselves where it is missing."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from launch_jobs import wait_until

from model_check.supervise import processes, stacks
from tests.conftest import ROOT

_HERE = Path(__file__).parent
_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
_NOBODY = 65534

# libc's prctl with a diary of PR_SET_PTRACER: the kernel has no way to ask who may trace a process.
_DIARY = r"""
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>
int prctl(int option, ...) {
    va_list rest;
    va_start(rest, option);
    unsigned long a = va_arg(rest, unsigned long), b = va_arg(rest, unsigned long);
    unsigned long c = va_arg(rest, unsigned long), d = va_arg(rest, unsigned long);
    va_end(rest);
    if (option == 0x59616d61) {
        FILE *diary = fopen(getenv("PTRACER_DIARY"), "a");
        fprintf(diary, "%d %ld\n", getpid(), (long)a);
        fclose(diary);
    }
    return syscall(SYS_prctl, option, a, b, c, d);
}
"""

# torch here is an empty folder of that name: its import is what makes a helper process one of ours.
_FAMILY = """\
import json, multiprocessing, os, sys
import torch

def tell(queue):
    queue.put(os.getpid())

if __name__ == "__main__":
    pids = {"rank": os.getpid()}
    for method in ("fork", "spawn"):
        context = multiprocessing.get_context(method)
        queue = context.SimpleQueue()
        child = context.Process(target=tell, args=(queue,))
        child.start()
        pids[method] = queue.get()
        child.join()
    print("PIDS", json.dumps(pids))
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler for a prctl that keeps a diary")
def test_a_rank_and_its_workers_let_the_launcher_read_their_stacks(tmp_path: Path) -> None:
    library, diary = tmp_path / "diary.so", tmp_path / "diary"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), "-x", "c", "-"], input=_DIARY, text=True, check=True)
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("")
    script = tmp_path / "family.py"
    script.write_text(_FAMILY)
    command = [sys.executable, str(_HERE / "foreign_driver.py"), str(tmp_path / "run"), "script", "1", str(script)]
    env = {**os.environ, "LD_PRELOAD": str(library), "PTRACER_DIARY": str(diary), "CUDA_VISIBLE_DEVICES": ""}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as launcher:
        out, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == 0, out
    pids = json.loads(next(line for line in out.splitlines() if " PIDS " in line).partition(" PIDS ")[2])
    allowed = [tuple(map(int, line.split())) for line in diary.read_text().splitlines()]
    anybody = -1
    # The launcher may look from the first moment on, before the interpreter has even started.
    assert [tracer for pid, tracer in allowed if pid == pids["rank"]] == [launcher.pid, anybody]
    assert (pids["fork"], anybody) in allowed
    assert (pids["spawn"], anybody) in allowed


# A rank stuck in a function of its own while its peer waits for it, and a worker that it forked, stuck elsewhere.
_STUCK = """\
import os
import torch
import torch.distributed as dist

def stuck_here():
    os.read(os.pipe()[0], 1)

def worker_stuck():
    os.read(os.pipe()[0], 1)

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
if dist.get_rank() == 1:
    if os.fork() == 0:
        worker_stuck()
    stuck_here()
dist.all_reduce(torch.ones(1))
"""
_STUCK_LINE, _WORKER_LINE = 6, 9


@pytest.fixture
def python_without_py_spy(tmp_path: Path) -> Path:
    """This environment's interpreter and packages, in a folder that has no py-spy beside it."""
    environment = tmp_path / "environment"
    (environment / "bin").mkdir(parents=True)
    if sys.prefix == sys.base_prefix:
        pytest.skip("needs a virtual environment to make another of")
    for name in ("lib", "lib64", "pyvenv.cfg"):
        if (Path(sys.prefix) / name).exists():
            (environment / name).symlink_to(Path(sys.prefix) / name)
    python = environment / "bin" / "python3"
    python.symlink_to(Path(sys.executable).resolve())
    return python


@contextmanager
def _started(command: list[str], folder: Path, env: dict[str, str], **user: Any) -> Iterator[subprocess.Popen[bytes]]:
    with (folder / "said").open("wb") as said:
        job = subprocess.Popen(command, cwd=folder, env=env, stdout=said, stderr=said, **user)
    try:
        yield job
    finally:
        # Its ranks go with it, whatever ends it.
        job.kill()
        job.wait()


def _finding(run_dir: Path, location: str) -> dict[str, Any] | None:
    try:
        findings = json.loads((run_dir / "verdict.json").read_text())["findings"]
    except (FileNotFoundError, ValueError):
        return None
    return next((finding for finding in findings if finding["location"] == location), None)


@pytest.mark.slow
def test_a_hang_is_named_with_its_line_where_nobody_may_trace(tmp_path: Path, python_without_py_spy: Path) -> None:
    (tmp_path / "stuck.py").write_text(_STUCK)
    env = {**os.environ, "PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    command = [str(python_without_py_spy), "-m", "model_check.cli.main", "run", "--run-dir", "run", "--nproc", "2"]
    with _started([*command, "stuck.py"], tmp_path, env) as job:
        finding = wait_until(lambda: _finding(tmp_path / "run", f"stuck.py:{_STUCK_LINE}"), 60.0)
        job.send_signal(signal.SIGTERM)
        assert job.wait(timeout=30) == 143
    assert (finding["ranks"], finding["function"]) == ([1], "stuck_here")
    dumps = [json.loads(path.read_text()) for path in (tmp_path / "run" / "stacks").glob("rank-00001.*.json")]
    assert {dump["source"] for dump in dumps} == {"faulthandler"}
    assert {dump["error"] for dump in dumps} == {"py-spy is not installed"}
    innermost = {dump["process"]: dump["threads"][-1]["frames"][0]["line"] for dump in dumps}
    assert innermost == {"rank": _STUCK_LINE, "child": _WORKER_LINE}
    said = (tmp_path / "said").read_text()
    assert said.count(f"--> stuck.py:{_STUCK_LINE}") == 1, "the finding is told in full once"
    assert re.search(rf"^warning\[{finding['code']}\]: .* \(as above\)$", said, re.MULTILINE)


def test_a_process_that_would_die_of_the_signal_never_gets_it(tmp_path: Path) -> None:
    number = signal.SIGRTMIN + 9
    file = tmp_path / "fault.txt"
    file.touch()
    with subprocess.Popen(["sleep", "60"]) as process:
        assert not processes.catches(process.pid, number)
        assert stacks._by_faulthandler(process.pid, file, number) is None
        assert processes.is_alive(process.pid)
        process.kill()
    before = signal.signal(signal.SIGUSR2, lambda *_: None)
    try:
        assert processes.catches(os.getpid(), signal.SIGUSR2)
    finally:
        signal.signal(signal.SIGUSR2, before)


@pytest.fixture
def strict_kernel() -> Iterator[None]:
    """Yama's ptrace_scope at 1, as many distributions ship it."""
    if not _SCOPE.exists():
        pytest.skip("this kernel has no Yama")
    before = _SCOPE.read_text().strip()
    if before not in ("0", "1"):
        pytest.skip(f"ptrace_scope is {before}: nobody may trace")
    if before == "0":
        if not os.access(_SCOPE, os.W_OK):
            pytest.skip("ptrace_scope is 0 and may not be changed")
        _SCOPE.write_text("1")
    try:
        yield
    finally:
        if before == "0":
            _SCOPE.write_text("0")


def _without_privileges() -> dict[str, Any]:
    """Root may trace anybody: then the job is nobody's, where nobody can run this interpreter."""
    if os.geteuid() != 0:
        return {}
    as_nobody: dict[str, Any] = {"user": _NOBODY, "group": _NOBODY, "extra_groups": []}
    try:
        subprocess.run([sys.executable, "-c", "import torch"], check=True, capture_output=True, **as_nobody)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this interpreter cannot be run by another user than root")
    return as_nobody


@pytest.mark.slow
@pytest.mark.usefixtures("strict_kernel")
def test_py_spy_reads_the_ranks_under_yama(tmp_path: Path) -> None:
    user = _without_privileges()
    if stacks.py_spy_binary() is None:
        pytest.skip("py-spy is not installed")
    folder = tmp_path / "job"
    folder.mkdir()
    if user:
        for path in (folder, *list(folder.parents)[: len(folder.parts) - len(Path("/tmp").parts)]):
            path.chmod(0o777)
    (folder / "stuck.py").write_text(_STUCK)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "HOME": str(folder)}
    command = [sys.executable, "-m", "model_check.cli.main", "run", "--run-dir", "run", "--nproc", "2", "stuck.py"]
    with _started(command, folder, env, **user) as job:
        wait_until(lambda: _finding(folder / "run", f"stuck.py:{_STUCK_LINE}"), 60.0)
        job.send_signal(signal.SIGTERM)
        job.wait(timeout=30)
    dumps = [json.loads(path.read_text()) for path in (folder / "run" / "stacks").glob("rank-0000?.*.json")]
    assert dumps and {dump["source"] for dump in dumps} == {"py-spy"}
