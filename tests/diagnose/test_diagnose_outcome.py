"""The verdict worked out again from the files agrees with the one written at the end, and says how long it took."""

from __future__ import annotations

import signal

import pytest

from model_check.diagnose import examine
from model_check.record import Verdict


def mismatched(stage):
    a, b = stage.ranks(2)
    stage.train(3)
    a.collective("all_reduce", 40, open=True)
    b.collective("broadcast", 41, open=True)
    return a, b


def end_all(stage, actors, reason, number=signal.SIGTERM):
    stage.say("stopped", reason=reason)
    for actor in actors:
        stage.say("signal_sent", actor.t, rank=actor.rank, signal=number.name)
        actor.exits(None, signal=number)


@pytest.mark.parametrize("journal", [True, False])
def test_a_job_that_we_ended_on_proof_failed_with_1_not_with_our_signal(stage, journal):
    end_all(stage, mismatched(stage), "proven")
    if journal:
        stage.say("job_ended", outcome="failed", exit_code=1)
    verdict = examine(stage.run_dir, live=False)
    assert (verdict.outcome, verdict.exit_code, verdict.findings[0].code) == ("failed", 1, "MC201")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_an_interrupted_job_keeps_the_launchers_code(stage, number, code):
    actors = stage.ranks(2)
    stage.train(3)
    end_all(stage, actors, "interrupted", number)
    stage.say("job_ended", outcome="interrupted", exit_code=code)
    verdict = examine(stage.run_dir, live=False)
    assert (verdict.outcome, verdict.exit_code) == ("interrupted", code)


def test_the_guilty_ranks_own_code_goes_before_the_launchers(stage):
    a, b = stage.ranks(2)
    stage.train(3)
    b.exits(7, via="sys.exit", line=33)
    stage.say("signal_sent", a.t + 0.1, rank=0, signal="SIGTERM")
    a.t += 0.1
    a.exits(None, signal=signal.SIGTERM)
    stage.say("job_ended", outcome="failed", exit_code=1)
    verdict = examine(stage.run_dir, live=False)
    assert (verdict.outcome, verdict.exit_code) == ("failed", 7)


def test_the_code_of_a_victim_is_not_the_jobs(stage):
    a, b = mismatched(stage)
    a.exits(None, signal=signal.SIGABRT)
    end_all(stage, (b,), "proven")
    stage.say("job_ended", outcome="failed", exit_code=1)
    verdict = examine(stage.run_dir, live=False)
    assert (verdict.findings[0].ranks, verdict.findings[0].victims, verdict.exit_code) == ([1], [0], 1)


def test_a_rank_that_had_said_its_code_before_we_ended_it(stage):
    a, b = stage.ranks(2)
    stage.train(3)
    b.fails("ValueError", "boom", 33)
    b.event("exit", code=3, via="exception")
    for actor in (a, b):
        stage.say("signal_sent", b.t + 1, rank=actor.rank, signal="SIGKILL")
    b.t += 1
    b.exits(None, signal=signal.SIGKILL)
    a.t = b.t
    a.exits(None, signal=signal.SIGKILL)
    assert examine(stage.run_dir, live=False).exit_code == 3


def test_a_rank_that_was_leaving_when_a_signal_came_had_left(stage):
    a, b = stage.ranks(2)
    stage.train(3)
    a.collective(open=True)
    b.event("exit", code=0, via="return")
    end_all(stage, (a, b), "proven")
    stage.say("job_ended", outcome="failed", exit_code=1)
    finding = stage.first(live=False)
    assert (finding.code, finding.ranks, finding.victims) == ("MC206", [1], [0])


def test_a_rank_that_crashes_on_its_way_out_has_not_left(stage):
    a, b = stage.ranks(2)
    stage.train(3)
    for actor in (a, b):
        actor.event("exit", code=0, via="return")
    a.exits(0)
    b.exits(None, signal=signal.SIGSEGV)
    verdict = examine(stage.run_dir, live=False)
    assert (verdict.findings[0].code, verdict.findings[0].ranks, verdict.exit_code) == ("MC306", [1], 139)


def test_the_code_of_a_launcher_that_the_job_brought_along_is_in_the_last_verdict(stage):
    a, b = stage.ranks(2)
    stage.train(3)
    b.exits(None, signal=signal.SIGKILL)
    a.t = b.t
    a.exits(1)
    Verdict(outcome="failed", exit_code=1, world_size=2).write(stage.run_dir.verdict)
    verdict = examine(stage.run_dir, live=False)
    assert (verdict.outcome, verdict.exit_code, verdict.findings[0].code) == ("failed", 1, "MC303")


def test_seconds_to_detect_count_from_the_last_of_the_parting_calls(stage):
    a, b = stage.ranks(2)
    stage.train(3)
    a.collective("all_reduce", 40, open=True)
    b.t += 20.0
    b.collective("broadcast", 41, open=True)
    assert stage.first(after=0.75).seconds_to_detect == 0.75


def test_seconds_to_detect_of_a_swallowed_exception_count_from_the_drift_it_causes(stage):
    a, b = stage.ranks(2)
    stage.train(3)
    b.swallows("IndexError", "index out of range", 38)
    for actor in (a, b):
        actor.t += 30.0
    a.collective("all_reduce", 40, open=True)
    b.collective("broadcast", 41, open=True)
    finding = stage.first(after=0.5)
    assert (finding.code, finding.ranks, finding.seconds_to_detect) == ("MC302", [1], 0.5)
