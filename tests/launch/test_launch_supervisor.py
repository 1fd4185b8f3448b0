"""The supervisor on real processes that write real black boxes: when it suspects, gathers, withdraws and ends."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from model_check.record import Finding, JsonlWriter, RunDir, Verdict, read_json, read_jsonl
from model_check.record.events.process import Stalled, StallWithdrawn
from model_check.record.rank_exits import RankExit
from model_check.supervise.hooks import EndJob
from model_check.supervise.supervisor import Limits, Supervisor

_RANK = Path(__file__).with_name("pretend_rank.py")
# The life of a stall in tenths of seconds: the same machine, with less patience.
_QUICK = Limits(
    stall_floor_s=0.3,
    stall_before_first_step_s=0.6,
    stall_while_peers_wait_s=0.4,
    second_round_after_s=0.2,
    sample_every_s=0.1,
    examine_every_s=0.2,
    own_exit_s=0.3,
    kill_after_s=0.0,
)


class PretendRank:
    def __init__(self, run_dir: RunDir, rank: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(_RANK), str(run_dir.root), str(rank)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answer()

    def tell(self, *commands: str) -> None:
        for command in commands:
            assert self.process.stdin is not None
            self.process.stdin.write(command + "\n")
            self.process.stdin.flush()
            if not command.startswith("exit"):
                self._answer()

    def _answer(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ok\n"


class Job:
    """Two pretend ranks under a supervisor whose rules are the test's own."""

    def __init__(self, root: Path, limits: Limits, findings_when_stalled: list[Finding]) -> None:
        self.run_dir = RunDir.create(root)
        self.ranks = [PretendRank(self.run_dir, rank) for rank in range(2)]
        self.said: list[str] = []
        self.shown: list[Verdict] = []
        self.examinations = 0
        self._when_stalled = findings_when_stalled
        self.supervisor = Supervisor(
            self.run_dir, self._examine, self.said.append, show=self.shown.append, limits=limits
        )
        for rank, pretend in enumerate(self.ranks):
            self.supervisor.rank_started(rank, pretend.process.pid)

    def _examine(self, run_dir: RunDir, live: bool) -> Verdict:
        self.examinations += 1
        stands = False
        for record in self.events():
            stands = record["event"] == "stall" or (stands and record["event"] != "stall_withdrawn")
        findings = [Finding(**vars(finding)) for finding in self._when_stalled] if stands else []
        return Verdict(world_size=2, findings=findings)

    def events(self) -> list[dict[str, Any]]:
        return read_jsonl(self.run_dir.supervisor_events).records

    def poll_until(self, condition: Any, deadline_s: float = 10.0) -> EndJob | None:
        end = time.monotonic() + deadline_s
        while time.monotonic() < end:
            ending = self.supervisor.poll()
            if ending is not None or condition():
                return ending
            time.sleep(0.02)
        pytest.fail("the supervisor did not get there in time")

    def poll_for(self, seconds: float) -> list[EndJob]:
        """Watches for a while, as a launcher would; the endings it asked for."""
        end = time.monotonic() + seconds
        endings = []
        while time.monotonic() < end:
            ending = self.supervisor.poll()
            endings += [ending] if ending else []
            time.sleep(0.02)
        return endings

    def kinds(self) -> list[str]:
        return [record["event"] for record in self.events()]


WARNING = Finding("MC204", "rank 1 is stuck in the data loader", severity="warning", ranks=[1], victims=[0])
PROOF = Finding("MC201", "ranks 0 and 1 call different collectives", certainty="proven", ranks=[1], victims=[0])


@pytest.fixture
def make_job(tmp_path: Path) -> Iterator[Any]:
    jobs: list[Job] = []

    def make(*findings: Finding, limits: Limits = _QUICK) -> Job:
        jobs.append(Job(tmp_path / f"run-{len(jobs)}", limits, list(findings)))
        return jobs[-1]

    yield make
    for job in jobs:
        for rank in job.ranks:
            rank.process.kill()
            rank.process.communicate()


def _hang(job: Job) -> None:
    for rank in job.ranks:
        rank.tell("step", "step")
    job.ranks[0].tell("begin collective")
    job.ranks[1].tell("begin data")


def test_a_stall_leaves_two_rounds_of_stacks_and_is_said_once(make_job: Any) -> None:
    job = make_job(WARNING)
    _hang(job)
    assert job.poll_until(lambda: job.shown) is None
    stall = next(record for record in job.events() if record["event"] == "stall")
    assert stall["threshold_s"] == pytest.approx(0.3, abs=0.2)
    assert 0.3 < stall["waiting_s"] < 3.0
    for rank, pretend in enumerate(job.ranks):
        for number in (1, 2):
            dump = read_json(job.run_dir.stacks_dir / f"rank-{rank:05d}.{number}.json")
            assert (dump["rank"], dump["pid"], dump["process"]) == (rank, pretend.process.pid, "rank")
            lines = {frame["function"] for thread in dump["threads"] for frame in thread["frames"]}
            assert "main" in lines
    assert job.poll_for(1.0) == []
    assert [finding.code for verdict in job.shown for finding in verdict.findings] == ["MC204"]
    written = Verdict.read(job.run_dir.verdict)
    assert written is not None and written.findings[0].seconds_to_detect == pytest.approx(0.6, abs=0.5)


def test_progress_withdraws_the_warning(make_job: Any) -> None:
    job = make_job(WARNING)
    _hang(job)
    job.poll_until(lambda: job.shown)

    def both_step() -> bool:
        for rank in job.ranks:
            rank.tell("step")
        return "stall_withdrawn" in job.kinds()

    assert job.poll_until(both_step) is None
    assert "withdrawn" in job.said[-1]
    written = Verdict.read(job.run_dir.verdict)
    assert written is not None and written.findings == []


CALM = Finding("MC220", "rank 1 has been compiling for 6 s", severity="info", ranks=[1], victims=[0])


def _wait_while_rank_1(job: Job, phase: str, seconds: float) -> None:
    """Rank 0 waits while rank 1 completes one span of this phase after another."""
    for rank in job.ranks:
        rank.tell("step", "step")
    job.ranks[0].tell("begin collective")
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        job.ranks[1].tell(f"begin {phase}", "end")
        job.supervisor.poll()


def test_waiting_for_a_rank_that_works_is_no_stall_and_one_calm_line(make_job: Any) -> None:
    job = make_job(WARNING)
    _wait_while_rank_1(job, "forward", 2.0)
    assert "stall" not in job.kinds() and job.shown == []
    assert job.said == ["rank 1 evaluates; 1 rank waits for it"]
    job.poll_until(lambda: job.shown)  # rank 1 has stopped working


def test_asking_again_and_again_is_no_work(make_job: Any) -> None:
    job = make_job(WARNING)
    _wait_while_rank_1(job, "store", 2.0)
    assert "stall" in job.kinds()


def test_a_rank_that_is_alive_is_told_in_one_line_and_looked_at_again(make_job: Any) -> None:
    job = make_job(CALM)
    _hang(job)
    job.poll_until(lambda: job.said)
    assert job.poll_for(1.0) == []
    assert job.shown == [] and job.said == ["rank 1 has been compiling for 6 s; 1 rank waits for it"]
    looks = {path.name.partition(".")[0] for path in job.run_dir.stacks_dir.glob("*.look-*.json")}
    assert looks == {"rank-00001"}, "only those who do not wait are looked at in between"


def test_a_warning_never_ends_the_job_and_a_proof_does(make_job: Any) -> None:
    warned = make_job(WARNING)
    _hang(warned)
    warned.poll_until(lambda: warned.shown)
    assert warned.poll_for(0.5) == []
    proven = make_job(PROOF)
    _hang(proven)
    ending = proven.poll_until(lambda: False)
    assert ending == EndJob("MC201: ranks 0 and 1 call different collectives", 1)
    assert "stopped" in proven.kinds()


def test_silence_before_the_first_step_is_no_stall_until_peers_wait(make_job: Any) -> None:
    job = make_job(
        limits=Limits(stall_while_peers_wait_s=0.4, stall_before_first_step_s=60.0, second_round_after_s=0.1)
    )
    job.ranks[0].tell("begin import")
    job.ranks[1].tell("begin import")
    job.poll_for(1.0)
    assert "stall" not in job.kinds()
    job.ranks[0].tell("end", "begin init")
    job.poll_until(lambda: "stall" in job.kinds())


def test_an_idle_hang_is_ended_at_its_limit_and_becomes_an_error(make_job: Any) -> None:
    limits = Limits(**{**vars(_QUICK), "kill_after_s": 1.5})
    job = make_job(WARNING, limits=limits)
    _hang(job)
    ending = job.poll_until(lambda: False)
    assert ending is not None and ending.reason.startswith("hang: no progress")
    written = Verdict.read(job.run_dir.verdict)
    assert written is not None and written.findings[0].severity == "error"


def test_a_job_that_was_suspended_together_with_us_is_not_hung(make_job: Any) -> None:
    """Ctrl-Z and fg, or a scheduler that suspends jobs: the clock goes on, the ranks do not."""
    job = make_job(WARNING, limits=replace(_QUICK, kill_after_s=0.5, away_after_s=0.5))
    for rank in job.ranks:
        rank.tell("step", "step")
    assert job.supervisor.poll() is None
    for rank in job.ranks:
        rank.tell("step", "begin collective")
    assert job.supervisor.poll() is None
    time.sleep(1.0)  # how long all of us are suspended
    assert job.supervisor.poll() is None
    assert "stall" not in job.kinds() and not job.supervisor.stalled
    ending = job.poll_until(lambda: False)  # a hang is found all the same
    assert ending is not None and ending.reason.startswith("hang: no progress")


@pytest.mark.parametrize("io_kill_after_s", [0.0, 0.8])
def test_uninterruptible_io_is_ended_only_by_a_limit_of_its_own(make_job: Any, io_kill_after_s: float) -> None:
    job = make_job(WARNING, limits=replace(_QUICK, kill_after_s=0.5, io_kill_after_s=io_kill_after_s))
    for rank in job.ranks:
        rank.tell("step", "step")
    job.ranks[0].tell("begin collective")
    job.ranks[1].tell("begin save", "block")
    if not io_kill_after_s:
        assert job.poll_for(2.5) == []
        assert job.shown, "the warning is shown"
        return
    ending = job.poll_until(lambda: False)
    assert ending is not None and "uninterruptible I/O" in ending.reason


def test_a_rank_that_computes_is_slow_and_never_ended(make_job: Any) -> None:
    limits = Limits(**{**vars(_QUICK), "kill_after_s": 1.0, "sample_every_s": 0.5})
    job = make_job(WARNING, limits=limits)
    job.ranks[1].tell("spin")
    _hang(job)
    job.poll_until(lambda: job.shown)
    assert job.poll_for(2.5) == []


def test_a_limit_shorter_than_a_step_does_not_end_ranks_that_compute(make_job: Any) -> None:
    """Steps of a minute are given five before they are suspected: the limit has passed when the first look is taken."""
    job = make_job(WARNING, limits=replace(_QUICK, kill_after_s=0.2))
    job.ranks[1].tell("spin")
    _hang(job)
    assert job.poll_for(2.5) == []
    assert job.supervisor.stalled


def test_a_save_that_moves_little_at_a_time_is_alive(make_job: Any) -> None:
    job = make_job(WARNING, limits=replace(_QUICK, kill_after_s=2.0))
    for rank in job.ranks:
        rank.tell("step", "step")
    job.ranks[0].tell("begin collective")
    job.ranks[1].tell("begin save")
    end = time.monotonic() + 4.0
    while time.monotonic() < end:
        job.ranks[1].tell("write 900000")
        assert job.poll_for(0.1) == []
    assert job.supervisor.stalled


def test_a_person_at_a_prompt_may_take_their_time(make_job: Any) -> None:
    keyboard, terminal = os.openpty()
    try:
        job = make_job(WARNING, limits=replace(_QUICK, kill_after_s=0.5))
        for rank in job.ranks:
            rank.tell("step", "step")
        job.ranks[0].tell("begin collective")
        job.ranks[1].tell("begin input", f"prompt {os.ttyname(terminal)}")
        assert job.poll_for(2.5) == []
        assert job.shown, "the warning is shown"
    finally:
        os.close(keyboard)
        os.close(terminal)


def test_a_crash_leaves_the_stacks_of_the_survivors_before_anybody_ends_them(make_job: Any) -> None:
    job = make_job()
    job.ranks[1].tell("exit 3")
    code = job.ranks[1].process.wait(timeout=10)
    began = time.monotonic()
    job.supervisor.rank_exited(RankExit(t=began, rank=1, pid=job.ranks[1].process.pid, code=code))
    assert time.monotonic() - began < 2.0
    dump = read_json(job.run_dir.stacks_dir / "rank-00000.1.json")
    assert dump["pid"] == job.ranks[0].process.pid and dump["threads"]
    assert not (job.run_dir.stacks_dir / "rank-00001.1.json").exists()


def test_after_bad_news_of_a_rank_its_peers_are_looked_at_more_often(make_job: Any) -> None:
    # No stall in between, which would be examined too.
    limits = replace(_QUICK, examine_every_s=60.0, stall_before_first_step_s=60.0, stall_while_peers_wait_s=60.0)
    job = make_job(limits=limits)
    job.supervisor.poll()
    assert job.examinations == 1
    events = JsonlWriter(job.run_dir.events(1))
    events.write({"t": 1.0, "event": "raised", "type": "ValueError", "message": "bad batch"})
    job.poll_until(lambda: job.examinations == 5)
    events.write({"t": 2.0, "event": "memory", "rss": 1})
    events.close()
    job.supervisor.poll()
    assert job.examinations == 5


def test_the_exit_code_is_that_of_the_rank_the_verdict_names(make_job: Any) -> None:
    job = make_job(Finding("MC313", "rank 1 exited with code 3", certainty="proven", ranks=[1], victims=[0]))
    job.supervisor.journal.write(Stalled())
    exits = [
        RankExit(t=1.0, rank=0, pid=job.ranks[0].process.pid, code=1),
        RankExit(t=2.0, rank=1, pid=job.ranks[1].process.pid, code=3),
    ]
    verdict = job.supervisor.finish("failed", exits, 1)
    assert (verdict.outcome, verdict.exit_code) == ("failed", 3)
    assert Verdict.read(job.run_dir.verdict) == verdict


def test_a_rank_that_we_ended_while_it_was_leaving_keeps_the_code_it_had_announced(make_job: Any) -> None:
    job = make_job(Finding("MC313", "rank 1 exited with code 9", certainty="proven", ranks=[1], victims=[0]))
    job.supervisor.journal.write(Stalled())
    pids = [rank.process.pid for rank in job.ranks]
    events = JsonlWriter(job.run_dir.events(1))
    events.write({"t": 1.0, "event": "exit", "pid": pids[1], "code": 9, "via": "sys.exit"})
    events.close()
    killed = [RankExit(t=2.0, rank=rank, pid=pids[rank], signal=15, signalled_at=1.5) for rank in range(2)]
    assert job.supervisor.finish("failed", killed, 1).exit_code == 9


def test_a_launcher_that_the_job_brought_along_keeps_its_own_code(make_job: Any) -> None:
    job = make_job(Finding("MC313", "rank 1 exited with code 3", certainty="proven", ranks=[1], victims=[0]))
    assert job.supervisor.finish("failed", None, 1).exit_code == 1


@pytest.mark.parametrize(("own_launcher_s", "ends_at_once"), [(0.0, True), (60.0, False)])
def test_a_crashed_job_is_left_to_its_own_launcher_first(
    make_job: Any, own_launcher_s: float, ends_at_once: bool
) -> None:
    limits = Limits(**{**vars(_QUICK), "own_launcher_s": own_launcher_s})
    crash = Finding("MC301", "rank 1 raised ValueError", certainty="proven", ranks=[1], victims=[0])
    job = make_job(crash, limits=limits)
    job.supervisor.journal.write(Stalled())
    endings = job.poll_for(1.0)
    assert bool(endings) is ends_at_once


def test_a_failing_rank_that_is_still_at_work_is_not_cut_short(make_job: Any) -> None:
    """A tracker uploads its last lines after the exception, for example."""
    crash = Finding("MC301", "rank 1 raised ValueError", certainty="proven", ranks=[1], victims=[0])
    job = make_job(crash, limits=replace(_QUICK, own_work_s=2.0))
    job.ranks[1].tell("spin")
    job.supervisor.journal.write("stall")
    assert job.poll_for(1.2) == []
    ending = job.poll_until(lambda: False)
    assert ending is not None and ending.reason.startswith("MC301")


def test_an_interrupted_stall_keeps_its_finding(make_job: Any) -> None:
    job = make_job(WARNING)
    _hang(job)
    job.poll_until(lambda: job.shown)
    job.supervisor.journal.write(StallWithdrawn())
    verdict = job.supervisor.finish("interrupted", [], 130)
    assert [finding.code for finding in verdict.findings] == ["MC204"]
    assert (verdict.outcome, verdict.exit_code) == ("interrupted", 130)


def test_it_says_what_it_waits_for(make_job: Any) -> None:
    job = make_job(WARNING, limits=Limits(**{**vars(_QUICK), "say_every_s": 1.0}))
    for rank in job.ranks:
        rank.tell("step", "step")
    job.ranks[0].tell("begin save")
    job.ranks[1].tell("begin barrier")
    job.poll_until(lambda: job.said)
    assert job.said[0].startswith("rank 0 has been saving a checkpoint for ")
    assert job.said[0].endswith(" s; 1 rank waits for it")


def test_the_last_words_of_a_rank_are_heard_at_the_next_turn(make_job: Any) -> None:
    raised = Finding("MC301", "rank 1 raised ValueError", certainty="observed", ranks=[1])
    job = make_job(raised, limits=Limits(examine_every_s=1000.0))
    job.supervisor.poll()
    job.supervisor.journal.write(Stalled())
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        events = JsonlWriter(job.run_dir.events(1))
        events.write({"t": 1.0, "event": "memory", "rss": 1})
        job.supervisor.poll()
        assert job.supervisor.verdict.findings == []
        events.write({"t": 2.0, "event": "exception", "message": f"port: {port}, name: EADDRINUSE"})
        job.supervisor.poll()
        events.close()
    assert [finding.code for finding in job.supervisor.verdict.findings] == ["MC301"]
    (taken,) = [record for record in job.events() if record["event"] == "port"]
    assert (taken["port"], taken["holder_pid"]) == (port, os.getpid())


def test_watching_costs_next_to_nothing(make_job: Any) -> None:
    job = make_job(limits=Limits(examine_every_s=1000.0))
    for rank in job.ranks:
        rank.tell("step", "step")
    before = time.process_time()
    turns = 200
    for _ in range(turns):
        job.supervisor.poll()
    per_second = (time.process_time() - before) / turns * 10
    assert per_second < 0.01, f"{per_second:.2%} of a core at ten turns a second"
