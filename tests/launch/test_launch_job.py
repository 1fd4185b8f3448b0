"""Whole jobs: real launchers, real ranks, real signals."""

from __future__ import annotations

import os
import signal
import time

import psutil
import pytest
from launch_jobs import StartJob, is_gone, wait_until

from model_check.launch.signals import KEY_REPEATED_WITHIN_S, REPEATED_WITHIN_S
from model_check.record import read_jsonl


@pytest.mark.parametrize("start", ["warm", "cold"])
def test_two_ranks_reduce_and_every_line_carries_its_rank(start_job: StartJob, start: str) -> None:
    job = start_job("sums", start=start)
    assert job.wait() == 0
    assert sorted(job.lines) == ["[CPU0] sum 3 of 2 as CPU0 on cpu", "[CPU1] sum 3 of 2 as CPU1 on cpu"]
    assert job.result["outcome"] == "completed"
    assert [(e["code"], e["signal"]) for e in job.result["exits"]] == [(0, None), (0, None)]


def test_warm_ranks_find_their_imports_done_and_cold_ones_do_not(start_job: StartJob) -> None:
    warm, cold = (start_job("tells_if_warm", {"a": 1}, nproc=1, start=s).lines for s in ("warm", "cold"))
    assert warm == ["[CPU0] warm=True payload={'a': 1}"]
    assert cold == ["[CPU0] warm=False payload={'a': 1}"]


@pytest.mark.parametrize(
    ("how", "code", "name"),
    [
        ("raise", 1, "failed with ValueError: boom at the source"),
        ("user error", 1, "failed with DataError: the shard is empty"),
        ("wrapped", 1, "failed with ValueError: boom at the source"),
        ("sys.exit", 7, "exited with code 7"),
        ("os._exit", 7, "exited with code 7"),
        ("SIGKILL", 137, "was killed by SIGKILL"),
        ("SIGSEGV", 139, "was killed by SIGSEGV"),
    ],
)
def test_the_rank_that_failed_is_named_not_its_victims(start_job: StartJob, how: str, code: int, name: str) -> None:
    job = start_job("fails_while_peers_wait", {"culprit": 2, "how": how}, nproc=3)
    assert job.wait() == code
    result = job.result
    assert (result["outcome"], result["first_failure"]["rank"]) == ("failed", 2)
    assert name in result["message"] and "rank 2 (CPU2" in result["message"]
    assert any(line.startswith("[model-check] rank 2 (CPU2") for line in job.lines)
    exits = [e["t"] for e in job.events if e["event"] == "rank_exited"]
    assert len(exits) == 3 and max(exits) - min(exits) < 2.0
    if how == "raise":
        assert result["error"]["type"] == "ValueError" and "boom at the source" in result["error"]["traceback"]
        assert result["error"]["frames"][-1]["function"] == "fails_while_peers_wait"


def test_the_exception_is_in_the_events_of_its_rank(start_job: StartJob) -> None:
    job = start_job("fails_while_peers_wait", {"culprit": 1, "how": "raise"})
    assert job.wait() == 1
    (record,) = read_jsonl(job.run_dir.events(1)).records
    assert (record["event"], record["rank"], record["type"], record["message"]) == (
        "exception",
        1,
        "ValueError",
        "boom at the source",
    )


def test_a_rank_that_ignores_sigterm_is_killed_within_two_seconds_of_the_failure(start_job: StartJob) -> None:
    job = start_job("deaf_after_failure")
    assert job.wait() == 1
    exits = {e["rank"]: e for e in job.events if e["event"] == "rank_exited"}
    assert exits[0]["signal"] == signal.SIGKILL
    assert exits[0]["t"] - exits[1]["t"] < 2.0
    assert job.result["first_failure"]["rank"] == 1


def test_a_restart_begins_afresh_and_succeeds(start_job: StartJob) -> None:
    job = start_job("fails_on_first_attempt", max_restarts=1)
    assert job.wait() == 0
    assert "[CPU0] attempt 1 sum 2" in job.lines and "[CPU1] attempt 1 sum 2" in job.lines
    assert "[model-check] restarting all ranks, attempt 1 of 1" in job.lines
    assert [e["attempt"] for e in job.events if e["event"] == "rank_started"] == [0, 0, 1, 1]
    assert job.result["outcome"] == "completed"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stop_without_a_save_ends_with_the_code_of_its_signal(start_job: StartJob, number: int, code: int) -> None:
    job = start_job("sleeps")
    job.wait_for("ready-0", "ready-1")
    job.send(number)
    assert job.wait() == code
    assert job.result["outcome"] == "interrupted"
    assert {e["signal"] for e in job.events if e["event"] == "signal_sent"} == {"SIGTERM"}


def test_ranks_that_save_on_request_make_it_75(start_job: StartJob) -> None:
    job = start_job("saves_on_sigterm")
    job.wait_for("ready-0", "ready-1")
    job.send(signal.SIGTERM)
    assert job.wait() == 75
    assert job.marker("saved-0").exists() and job.marker("saved-1").exists()
    assert job.result["outcome"] == "interrupted"


def test_the_grace_ends_with_sigkill(start_job: StartJob) -> None:
    job = start_job("ignores_sigterm", graces={"stop_s": 0.3})
    job.wait_for("ready-0", "ready-1")
    job.send(signal.SIGTERM)
    assert job.wait() == 143
    assert {e["signal"] for e in job.events if e["event"] == "rank_exited"} == {signal.SIGKILL}


def test_a_rank_that_fails_during_the_grace_shortens_it_for_those_that_wait_for_it(start_job: StartJob) -> None:
    job = start_job("one_fails_on_sigterm", graces={"stop_s": 600.0, "lost_s": 0.2})
    job.wait_for("ready-0", "ready-1")
    job.send(signal.SIGTERM)
    assert job.wait() == 143
    ends = {e["rank"]: (e["code"], e["signal"]) for e in job.events if e["event"] == "rank_exited"}
    assert ends == {1: (3, None), 0: (None, signal.SIGKILL)}


def test_a_second_ctrl_c_does_not_wait_for_the_grace(start_job: StartJob) -> None:
    job = start_job("ignores_sigterm", graces={"stop_s": 60.0})
    job.wait_for("ready-0", "ready-1")
    job.send(signal.SIGINT)
    wait_until(lambda: any(e["event"] == "signal_sent" for e in job.events))
    asked_at = time.monotonic()
    wait_until(lambda: time.monotonic() > asked_at + KEY_REPEATED_WITHIN_S)
    job.send(signal.SIGINT)
    assert job.wait() == 130
    assert {e["signal"] for e in job.events if e["event"] == "rank_exited"} == {signal.SIGKILL}
    assert "[model-check] SIGINT again: the ranks are ended now, saved or not" in job.lines


def test_a_second_sigterm_does_not_wait_for_the_grace(start_job: StartJob) -> None:
    job = start_job("ignores_sigterm", graces={"stop_s": 600.0})
    job.wait_for("ready-0", "ready-1")
    job.send(signal.SIGTERM)
    wait_until(lambda: any(e["event"] == "signal_sent" for e in job.events))
    asked_at = time.monotonic()
    wait_until(lambda: time.monotonic() > asked_at + REPEATED_WITHIN_S)
    job.send(signal.SIGTERM)
    assert job.wait() == 143
    assert {e["signal"] for e in job.events if e["event"] == "rank_exited"} == {signal.SIGKILL}
    said = [line for line in job.lines if "SIGTERM" in line]
    assert said == [
        "[model-check] SIGTERM: the ranks have 600 s to save and stop; SIGTERM again ends them now",
        "[model-check] SIGTERM again: the ranks are ended now, saved or not",
        "[model-check] stopped by SIGTERM without a save",
    ]


@pytest.mark.parametrize("victim", ["launcher", "nursery", "rank"])
def test_nothing_is_left_behind_whoever_is_killed(start_job: StartJob, victim: str) -> None:
    job = start_job("has_children")
    job.wait_for("children-0", "children-1")
    ranks = job.rank_pids()
    children = [int(word) for r in (0, 1) for word in job.marker(f"children-{r}").read_text().split()]
    nursery = psutil.Process(ranks[0]).ppid()
    os.kill({"launcher": job.pid, "nursery": nursery, "rank": ranks[1]}[victim], signal.SIGKILL)
    for pid in [*ranks.values(), *children]:
        wait_until(lambda pid=pid: is_gone(pid), deadline_s=5.0)
    assert job.wait() == {"launcher": 137, "nursery": 99, "rank": 137}[victim]


def test_exit_functions_of_a_rank_run_and_those_of_the_launcher_do_not(start_job: StartJob) -> None:
    job = start_job("says_goodbye", nproc=1)
    assert job.wait() == 0
    assert job.lines == ["[CPU0] goodbye"]


def test_the_output_of_all_ranks_is_complete_labelled_and_harmless(start_job: StartJob) -> None:
    job = start_job("prints_a_lot", 500)
    assert job.wait() == 0
    for rank in (0, 1):
        mine = [line for line in job.lines if line.startswith(f"[CPU{rank}] ")]
        numbered = [line for line in mine if f"of rank {rank} " in f"{line} "]
        assert numbered == [f"[CPU{rank}] line {n} of rank {rank} {'x' * (n % 97)}".rstrip() for n in range(500)]
        assert f"[CPU{rank}] Step [0/1] | already labelled" in mine
        assert f"[CPU{rank}] bytes \ufffd\ufffd and red and done" in mine
        assert f"[CPU{rank}] 100%" in mine and f"[CPU{rank}] 50%" not in mine
        assert any(line.endswith(f"y … (134464 more bytes in rank-0000{rank}.log)") for line in mine)
        assert mine[-1] == f"[CPU{rank}] the last line has no end"
    assert len(job.lines) == 2 * 505


def test_raw_logs_lie_in_tmp_linked_from_the_run_directory_and_copied_on_request(
    start_job: StartJob, tmp_path: object
) -> None:
    job = start_job("sums", log_copies=f"{tmp_path}/copies")
    assert job.wait() == 0
    target = job.run_dir.logs.resolve()
    assert str(target) == job.result["log_dir"]
    assert target.name.startswith(f"model_check_logs_{job.pid}_") and str(target.parent) == "/tmp"
    raw = (job.run_dir.logs / "rank-00001.log").read_bytes()
    assert raw == b"sum 3 of 2 as CPU1 on cpu\n"
    assert raw == (job.run_dir.root.parent / "copies" / "rank-00001.log").read_bytes()


def test_a_rank_gets_torchruns_variables_a_session_and_its_threads(start_job: StartJob) -> None:
    job = start_job("tells_its_environment", env={"EXTRA": "yes"})
    assert job.wait() == 0
    assert (
        "[CPU1] RANK=1 LOCAL_RANK=1 WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 "
        f"CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')} EXTRA=yes"
    ) in job.lines
    assert "[CPU1] threads=1 device=cpu own session=True" in job.lines


def test_a_hook_can_end_the_job(start_job: StartJob) -> None:
    job = start_job("sleeps", hook=True)
    job.wait_for("ready-0", "ready-1")
    job.marker("end").touch()
    assert job.wait() == 42
    assert (job.result["outcome"], job.result["message"]) == ("failed", "the hook says so")


def test_a_command_runs_as_ranks_without_a_shell(start_job: StartJob) -> None:
    job = start_job("command", ["python3", "-c", "import os; print('$HOME', os.environ['RANK'])"], isolate_gpus=False)
    assert job.wait() == 0
    assert sorted(job.lines) == ["[CPU0] $HOME 0", "[CPU1] $HOME 1"]


def test_a_command_that_is_not_there_is_127_in_one_sentence(start_job: StartJob) -> None:
    job = start_job("command", ["no-such-program"], nproc=1)
    assert job.wait() == 127
    assert "[CPU0] no-such-program cannot be started: No such file or directory" in job.lines
