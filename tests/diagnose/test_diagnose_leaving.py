"""How a rank that leaves by itself is named: exit codes nobody called for, handlers that exit, and their reasons."""

from __future__ import annotations

import signal

import pytest

from model_check.diagnose.render import render


def training(stage):
    actors = stage.ranks(2)
    stage.train(6)
    return actors


def frame(stage, line, text=""):
    return {"file": str(stage.script), "line": line, "function": "train", "text": text}


def test_a_raised_system_exit_looks_like_a_return_until_the_process_has_ended(stage):
    stage.source("\n" * 10 + "if not shards:\n    raise SystemExit(3)\n")
    a, b = training(stage)
    b.event("exit", code=0, via="return")
    a.t = b.t + 0.01
    a.collective("all_reduce", 40, open=True)
    assert stage.findings(after=1.0) == []
    b.t += 1.5
    b.exits(3)
    verdict = stage.verdict(after=0.1)
    finding = verdict.findings[0]
    assert (finding.code, finding.ranks, finding.victims) == ("MC313", [1], [0]) and stage.line(finding) == 12
    assert finding.facts == {"exit_code": 3, "via": "SystemExit"}
    assert "12 is the only `raise SystemExit` of that file" in finding.evidence[2]


def test_of_two_places_that_raise_system_exit_none_is_named(stage):
    stage.source("if not shards:\n    raise SystemExit(3)\nif not steps:\n    raise SystemExit(3)\n")
    a, b = training(stage)
    b.event("exit", code=0, via="return")
    a.t = b.t + 0.01
    a.collective("all_reduce", 40, open=True)
    b.exits(3)
    finding = stage.first(after=0.1)
    assert finding.code == "MC313" and stage.line(finding) == 45  # where it was last seen
    assert not any("only `raise" in e for e in finding.evidence)


def test_the_words_of_a_system_exit_are_in_the_title(stage):
    a, b = training(stage)
    b.event("exit", code=1, via="SystemExit", message="no shards in /data\nsecond line")
    a.t = b.t + 0.01
    a.collective("all_reduce", 40, open=True)
    b.exits(1)
    finding = stage.first(after=0.1)
    assert (finding.code, finding.title) == ("MC313", "rank 1 exited with code 1: no shards in /data")


def test_a_rank_that_returned_is_believed_when_its_process_does_not_end(stage):
    a, b = training(stage)
    b.event("exit", code=0, via="return")
    a.t = b.t + 0.01
    a.collective("all_reduce", 40, open=True)
    assert [f.code for f in stage.findings(after=5.0)] == ["MC206"]


def test_a_keyboard_interrupt_is_named_at_its_own_line(stage):
    a, b = training(stage)
    b.fails("KeyboardInterrupt", "", 17)
    b.exits(None, signal=signal.SIGINT)
    a.collective("all_reduce", 40, open=True)
    verdict = stage.verdict(after=0.1)
    finding = verdict.findings[0]
    assert (finding.code, finding.ranks, finding.victims) == ("MC303", [1], [0]) and stage.line(finding) == 17
    assert (finding.cause, finding.facts) == ("interrupt", {"signal": "SIGINT"})
    assert "last recorded line" not in render(verdict)


def test_an_exception_that_is_caught_only_to_exit_is_what_the_rank_failed_of(stage):
    a, b = training(stage)
    b.swallows("ValueError", "label 17", 33)
    b.t += 0.01
    b.exits(4, via="sys.exit", line=60)
    a.t = b.t + 0.01
    a.collective("all_reduce", 40, open=True)
    verdict = stage.verdict(after=0.1)
    finding = verdict.findings[0]
    assert (finding.code, finding.ranks, finding.victims) == ("MC301", [1], [0]) and stage.line(finding) == 33
    left = {"exit_code": 4, "via": "sys.exit"}
    assert finding.facts == {"exception": "ValueError", "message": "label 17", **left}
    assert f"the script caught it and exited with code 4 through sys.exit at {stage.script}:60" in finding.evidence[1]


def test_an_exception_that_was_followed_by_more_training_was_swallowed_whatever_the_exit_code(stage):
    a, b = training(stage)
    b.swallows("ValueError", "label 17", 33)
    b.step()
    b.exits(4, via="sys.exit", line=60)
    a.t = b.t + 0.01
    a.step()
    a.collective("all_reduce", 40, open=True)
    assert (stage.first(after=0.1).code, stage.first(after=0.1).cause) == ("MC302", "swallowed")


def test_a_block_that_still_handles_the_exception_is_not_said_to_have_swallowed_it(stage):
    a, b = training(stage)
    b.event("raised", type="ValueError", message="bad", frames=[], user_frame=frame(stage, 33), t_raised=b.t)
    b.collective("barrier", 70, open=True)
    a.collective("all_reduce", 40, open=True)
    stage.stall()
    finding = stage.first()
    assert (finding.code, finding.ranks) == ("MC302", [1]) and stage.line(finding) == 33
    assert (finding.cause, finding.facts) == ("in_handler", {"exception": "ValueError", "message": "bad"})


def test_what_an_exception_followed_from_and_what_a_group_holds_are_evidence(stage):
    _, b = training(stage)
    cause = {"type": "ValueError", "message": "invalid literal", "user_frame": frame(stage, 8)}
    part = {"type": "KeyError", "message": "'a'", "user_frame": frame(stage, 9)}
    b.fails("ExceptionGroup", "two shards failed", 33, cause=cause, parts=[part])
    evidence = stage.first(after=0.1).evidence
    assert f"observed: it followed from ValueError: invalid literal, raised at {stage.script}:8" in evidence
    assert f"observed: it holds KeyError: 'a', raised at {stage.script}:9" in evidence


def test_an_exception_without_words_is_told_by_its_statement(stage):
    _, b = training(stage)
    b.fails("AssertionError", "", 33, text="assert loss.isfinite()")
    assert stage.first(after=0.1).title == "rank 1 raised AssertionError in `assert loss.isfinite()`"


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("OSError", "[Errno 28] No space left on device"),
        ("OSError", "[Errno 122] Disk quota exceeded: 'x.pt'"),
        ("OSError", "[Errno 27] File too large"),
        ("RuntimeError", "[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598"),
    ],
)
def test_a_disk_without_room_has_a_name(stage, kind, message):
    _, b = training(stage)
    b.fails(kind, message, 33)
    finding = stage.first(after=0.1)
    assert (finding.code, finding.ranks) == ("MC604", [1]) and stage.line(finding) == 33
    assert "df -h" in finding.fix[0]


def test_a_rank_whose_recording_failed_is_accused_of_nothing(stage):
    """It trains on without a record: its peers seem to call what it does not, and it seems to leave too early."""
    a, b = stage.ranks(2)
    stage.train(6)
    b.recorder.identify(gave_up="ValueError")
    for _ in range(6):
        a.step()
    b.exits(0)
    a.collective(open=True)
    stage.stall()
    verdict = stage.verdict()
    assert verdict.findings == []
    assert verdict.notes == [
        "recording rank 1 failed (ValueError, see its events): since then no hang and no mismatch can be found"
    ]
