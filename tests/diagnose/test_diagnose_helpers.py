"""Threads and worker processes of a rank: what fails in them, and who waits for it."""

from __future__ import annotations

import threading

from model_check.diagnose import render

THREADING = "/usr/lib/python3.11/threading.py"


def waits_in_a_queue(rank, t, line=50):
    rank.stack(t, 1, rank.thread((THREADING, 327, "Condition.wait"), ("", line, "main")))
    rank.stack(t + 1, 2, rank.thread((THREADING, 327, "Condition.wait"), ("", line, "main")))


def died(rank, line=12):
    frame = {"file": str(rank.stage.script), "line": line, "function": "prefetch", "text": ""}
    rank.event("thread_exception", type="KeyError", message="'x'", frames=[frame], user_frame=frame, thread="prefetch")


def stalled_pair(stage):
    stage.source("\n" * 60)
    a, b = stage.ranks(2)
    stage.train(4)
    a.collective(open=True)
    return a, b


def test_a_thread_that_died_is_why_the_main_thread_waits(stage):
    _, b = stalled_pair(stage)
    died(b)
    waits_in_a_queue(b, stage.latest + 5)
    stage.stall()
    finding = stage.first()
    assert (finding.code, finding.ranks, finding.victims, finding.severity) == ("MC222", [1], [0], "warning")
    assert stage.line(finding) == 12 and finding.facts == {"thread": "prefetch", "exception": "KeyError"}
    assert any("main thread at" in e and ":50 in main" in e for e in finding.evidence)


def test_a_thread_that_died_is_told_where_the_main_thread_does_something_else(stage):
    _, b = stalled_pair(stage)
    died(b)
    b.stack(stage.latest + 5, 1, b.thread(("/usr/lib/python3.11/subprocess.py", 9, "Popen.wait"), ("", 50, "main")))
    stage.stall()
    finding = stage.first()
    assert (finding.code, finding.ranks) == ("MC219", [1]) and stage.line(finding) == 50
    assert any("thread prefetch of rank 1 died of KeyError: 'x'" in e for e in finding.evidence)


def test_a_wait_between_threads_without_a_dead_one_is_no_such_thing(stage):
    _, b = stalled_pair(stage)
    waits_in_a_queue(b, stage.latest + 5)
    stage.stall()
    assert stage.first().code != "MC222"


def test_a_pause_is_no_progress_and_only_a_hang_is_stuck(stage):
    _, b = stalled_pair(stage)
    b.stack(stage.latest + 5, 1, b.thread(("", 50, "main")))
    stage.stall()
    finding = stage.first(after=6.0)
    assert (finding.code, finding.severity) == ("MC219", "warning")
    assert finding.title.startswith("rank 1 has made no progress for 6 s at ") and "stuck" not in finding.title
    stage.say("stopped", stage.latest + 300, reason="hang")
    assert stage.first(after=301.0).title.startswith("rank 1 is stuck at ")


def test_several_ranks_have_they_do_not_has(stage):
    stage.source("\n" * 60)
    a, b, c = stage.ranks(3)
    stage.train(4)
    c.collective(open=True)
    for actor in (a, b):
        actor.begin("save", 50)
    stage.stall()
    finding = stage.first()
    assert (finding.code, finding.ranks) == ("MC220", [0, 1])
    assert finding.title.startswith("ranks 0 and 1 have been saving a checkpoint for ")


def test_an_exception_of_a_loader_worker_is_shown_where_it_was_raised_first(stage):
    a, b = stage.ranks(2)
    stage.train(3)
    origin = {
        "type": "JSONDecodeError",
        "message": "Expecting value",
        "where": "DataLoader worker process 3",
        "user_frame": {"file": str(stage.script), "line": 25, "function": "__getitem__", "text": ""},
    }
    b.fails("RuntimeError", "Caught JSONDecodeError in DataLoader worker process 3.\nOriginal …", 31, origin=origin)
    finding = stage.first(after=0.1)
    assert (finding.code, finding.ranks, finding.function) == ("MC301", [1], "__getitem__") and a.rank == 0
    assert stage.line(finding) == 25 and finding.title == "rank 1 raised JSONDecodeError: Expecting value"
    assert finding.evidence[1].startswith("observed: it was raised in DataLoader worker process 3 of rank 1, raised")
    assert finding.evidence[1].endswith(":31")


def test_a_message_whose_first_line_only_announces_the_next_is_told_with_it(stage):
    (only,) = stage.ranks(1)
    stage.train(3)
    only.fails("ConfigError", "2 problems in the configuration:\n  [MC835] saves nothing\n  [MC811] too large", 31)
    finding = stage.first(after=0.1)
    assert finding.title == "rank 0 raised ConfigError: 2 problems in the configuration: [MC835] saves nothing"


def test_an_end_of_file_that_a_worker_met_is_no_dead_worker(stage):
    (only,) = stage.ranks(1)
    origin = {"type": "EOFError", "message": "", "where": "DataLoader worker process 0", "user_frame": None}
    torch_file = {"file": "/x/site-packages/torch/utils/data/dataloader.py", "line": 9, "function": "n", "text": ""}
    frame = {"file": str(stage.script), "line": 31, "function": "main", "text": ""}
    where = {"frames": [frame, torch_file], "user_frame": frame, "origin": origin}
    only.event("exception", type="EOFError", message="Caught EOFError", **where)
    assert stage.first(after=0.1).code == "MC301"


def test_a_rank_that_has_raised_is_not_said_to_wait(stage):
    a, b = stage.ranks(2)
    stage.train(3)
    a.collective(open=True)
    b.fails("ValueError", "boom", 33)
    a.fails("RuntimeError", "Connection closed by peer", 40)
    lines = stage.first(after=0.1).evidence
    assert any("rank 0 then lost its peer" in line for line in lines)
    assert not any("rank 0 waits" in line for line in lines)


def test_the_line_of_a_killed_rank_is_called_the_last_recorded_one(stage):
    stage.source("\n" * 60)
    _, b = stage.ranks(2)
    stage.train(3)
    b.exits(None, signal=9)
    assert f"{stage.script}:45 in train (step 2, last recorded line)" in render(stage.verdict(after=0.1))


def test_collectives_of_two_threads_in_one_group_are_told_apart(stage):
    a, b = stage.ranks(2)
    stage.train(3)
    helper = threading.Thread(target=lambda: a.collective("barrier", 50, open=True))
    helper.start()
    helper.join()
    b.collective("all_reduce", 40, open=True)
    finding = stage.first(after=0.5)
    assert finding.ranks == [0] and stage.line(finding) == 50
    assert any("rank 0 called it on a helper thread" in e for e in finding.evidence)
