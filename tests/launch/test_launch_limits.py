"""What a rank may take of the host's memory, and what makes it need less."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from launch_jobs import wait_until

from model_check.errors import LaunchError
from model_check.launch.limits import (
    GB,
    ResidentWatch,
    check_address_space,
    held_bytes,
    low_memory_variables,
)
from model_check.record import RunDir, read_jsonl
from model_check.record.journal import Journal
from model_check.supervise.hooks import EndJob, Hooks, JobView
from tests.conftest import Shell

HOLD = "import sys; held = bytearray(300_000_000); print('ready', flush=True); sys.stdin.read()"


def test_low_memory_leaves_what_the_user_has_set() -> None:
    chosen = low_memory_variables({"NCCL_BUFFSIZE": "7", "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"})
    assert "NCCL_BUFFSIZE" not in chosen and "PYTORCH_ALLOC_CONF" not in chosen
    assert chosen["MALLOC_ARENA_MAX"] == "2"
    everything = low_memory_variables({})
    assert everything["PYTORCH_ALLOC_CONF"] == everything["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert int(everything["NCCL_BUFFSIZE"]) < 4 << 20, "NCCL's own choice"


def test_low_memory_is_written_into_environment_json(shell: Shell) -> None:
    (shell.folder / "script.py").write_text(
        "import os; print(os.environ['NCCL_BUFFSIZE'], os.environ['NCCL_MAX_CTAS'])"
    )
    done = shell.model_check("run", "--low-memory", "--run-dir", "out", "script.py", NCCL_MAX_CTAS="3")
    assert done.code == 0, done.err
    assert "1048576 3" in done.out
    variables = json.loads((shell.folder / "out" / "environment.json").read_text())["variables"]
    assert variables["MALLOC_ARENA_MAX"] == "2" and variables["NCCL_MAX_CTAS"] == "3"


@pytest.mark.parametrize("forked", [False, True])
def test_a_limit_below_what_torch_maps_is_refused_with_the_number(forked: bool) -> None:
    with pytest.raises(LaunchError, match=r"launch\.memory_limit_gb=0\.5 is below the \d+\.\d GB") as refused:
        check_address_space(0.5, forked=forked)
    assert "or more, or to null" in str(refused.value)
    check_address_space(1000, forked=forked)


def test_the_limit_holds_for_the_process_and_its_children(tmp_path: Path) -> None:
    program = (
        "import subprocess, sys\n"
        "from model_check.launch.limits import limit_address_space\n"
        "limit_address_space(1)\n"
        "try: bytearray(2_000_000_000)\n"
        "except MemoryError: print('refused')\n"
        "print(subprocess.run([sys.executable, '-c', "
        "'import resource; print(resource.getrlimit(resource.RLIMIT_AS)[0])'], capture_output=True, text=True).stdout)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["refused", str(GB)]


def test_a_limit_above_the_hard_one_is_cut_to_it() -> None:
    program = (
        "import resource\n"
        "from model_check.launch.limits import limit_address_space\n"
        "resource.setrlimit(resource.RLIMIT_AS, (3_000_000_000, 3_000_000_000))\n"
        "limit_address_space(5)\n"
        "print(resource.getrlimit(resource.RLIMIT_AS)[0])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(done.stdout) == 3_000_000_000


def test_a_limit_beyond_all_counting_is_set_as_high_as_it_goes() -> None:
    program = (
        "import resource\n"
        "from model_check.launch.limits import limit_address_space\n"
        "limit_address_space(1e30)\n"
        "print(*resource.getrlimit(resource.RLIMIT_AS), resource.RLIM_INFINITY)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    soft, hard, infinity = map(int, done.stdout.split())
    assert soft == (1 << 62 if hard == infinity else hard)


@pytest.fixture
def holder() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdin is not None
    assert process.stdout.readline() == "ready\n"
    yield process
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()


def view_of(process: subprocess.Popen[str], tmp_path: Path) -> JobView:
    run_dir = RunDir.create(tmp_path / "run")
    return JobView(run_dir, 0, {1: process.pid}, (1,), 0.0, Journal(run_dir))


def test_the_watch_ends_a_rank_over_its_limit_and_says_why(holder: subprocess.Popen[str], tmp_path: Path) -> None:
    view = view_of(holder, tmp_path)
    order = EndJob("asked", 3)
    hooks = ResidentWatch(0.1).added_to(Hooks(on_poll=lambda _: order))
    assert hooks.on_poll is not None and hooks.on_poll(view) is order, "what was there is still asked"
    assert wait_until(holder.poll) == -signal.SIGKILL
    (record,) = [r for r in read_jsonl(view.run_dir.supervisor_events).records if r["event"] == "oom"]
    assert (record["source"], record["pid"]) == ("limit", holder.pid)
    assert record["detail"].startswith("rank 1 held 0.3") and record["detail"].endswith("launch.memory_limit_gb=0.1")
    assert held_bytes(holder.pid) == 0, "a process that is gone holds nothing"


def test_the_watch_leaves_a_rank_below_its_limit_alone(holder: subprocess.Popen[str], tmp_path: Path) -> None:
    assert 300e6 < held_bytes(holder.pid) < 400e6
    ResidentWatch(1).look(view_of(holder, tmp_path))
    assert holder.poll() is None


WATCHED = """
import sys
from model_check.launch import Command, Gpu, launch_job
from model_check.record import RunDir

large = "import os, time; held = bytearray(300_000_000 if os.environ['RANK'] == '1' else 0); time.sleep(60)"
gpus = [Gpu(n, f"GPU-{n}", "pretend", 0, 0, None) for n in range(2)]
result = launch_job(
    Command((sys.executable, "-c", large)), nproc=2, run_dir=RunDir.create("out"), gpus=gpus, memory_limit_gb=0.1
)
sys.exit(result.exit_code)
"""


@pytest.mark.slow
def test_a_gpu_rank_over_its_limit_ends_the_job_by_name(shell: Shell) -> None:
    done = shell.run(sys.executable, "-c", WATCHED)
    assert done.code == 128 + signal.SIGKILL, done.err
    verdict = json.loads(shell.model_check("diagnose", "--json", "out").out)
    finding = verdict["findings"][0]
    assert (finding["code"], finding["ranks"]) == ("MC305", [1])
    assert finding["title"] == "rank 1 was killed by --memory-limit-gb"
    assert any(line.endswith("of host memory; launch.memory_limit_gb=0.1") for line in finding["evidence"])


@pytest.mark.slow
def test_a_rank_over_its_address_space_is_named_with_the_line(shell: Shell) -> None:
    (shell.folder / "script.py").write_text("small = bytearray(10)\nlarge = bytearray(5_000_000_000)\n")
    done = shell.model_check("run", "--memory-limit-gb", "2", "--run-dir", "out", "script.py")
    assert done.code == 1
    finding = json.loads((shell.folder / "out" / "verdict.json").read_text())["findings"][0]
    assert (finding["code"], finding["ranks"], finding["location"]) == ("MC307", [0], "script.py:2")
    assert "observed: --memory-limit-gb=2.0 is the address space of each rank" in finding["evidence"]


@pytest.mark.slow
def test_training_under_a_limit_it_fits_into(shell: Shell) -> None:
    done = shell.train("--max-steps", "1", "--nproc", "1", "--set", "launch.memory_limit_gb=4")
    assert done.code == 0, done.err
    refused = shell.train("--max-steps", "1", "--nproc", "1", "--set", "launch.memory_limit_gb=1")
    assert refused.code == 2 and "launch.memory_limit_gb" in refused.err
