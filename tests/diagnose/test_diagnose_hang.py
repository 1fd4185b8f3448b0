"""Ranks that do not move: who holds the others up and in what, each code with a near miss."""

from __future__ import annotations

import threading

import pytest
from staging import held_up, look

from model_check.record.ring import FLAG_ASYNC

LOADER = "/venv/lib/python3.11/site-packages/torch/utils/data/dataloader.py"
TORCH = "/venv/lib/python3.11/site-packages/torch/nn/modules/linear.py"


def test_nothing_is_said_before_the_job_stands_still(stage):
    a, _ = stage.ranks(2)
    stage.train(6)
    a.collective("all_reduce", 40, open=True)
    assert stage.findings(after=1.0) == []
    assert stage.first(live=False, after=60.0).code == "MC219", "of a dead run the age of the wait decides"


def test_a_withdrawn_stall_leaves_no_finding(stage):
    _, guilty = held_up(stage)
    assert stage.first().severity == "warning"
    stage.say("stall_withdrawn", stage.latest + 6.5)
    assert stage.findings(after=3.0) == []
    assert guilty.rank == 1


def test_stuck_in_the_loader_of_the_rank_itself(stage):
    _, guilty = held_up(stage, 4, phase="data", line=20)
    look(guilty, ("", 9, "__getitem__"), (LOADER, 700, "__next__"), ("", 20, "train"))
    finding = stage.first()
    assert (finding.code, finding.ranks, finding.victims) == ("MC204", [1], [0, 2, 3])
    assert stage.line(finding) == 9 and finding.function == "__getitem__" and finding.phase == "data"
    assert (finding.severity, finding.certainty) == ("warning", "observed")


def test_stuck_in_a_loader_worker(stage):
    _, guilty = held_up(stage, phase="data", line=20)
    guilty.event("loader_worker", worker_pid=5001, worker_id=0)
    look(
        guilty,
        (LOADER, 1200, "_try_get_data"),
        ("", 20, "train"),
        children=[{"pid": 5001, "state": "S", "comm": "python"}],
    )
    worker = guilty.thread(
        ("", 11, "__getitem__"), (LOADER.replace("dataloader", "_utils/worker"), 300, "_worker_loop")
    )
    worker["native_id"] = 5001
    guilty.stack(stage.latest + 7, 2, worker, process="loader_worker", pid=5001)
    finding = stage.first()
    assert (finding.code, finding.ranks) == ("MC204", [1]) and stage.line(finding) == 11


def test_an_idle_worker_that_was_looked_at_first_is_not_the_stuck_one(stage):
    _, guilty = held_up(stage, phase="data", line=20)
    look(guilty, (LOADER, 1200, "_try_get_data"), ("", 20, "train"))
    loop = (LOADER.replace("dataloader", "_utils/worker"), 300, "_worker_loop")
    idle = guilty.thread(("/usr/lib/python3.11/multiprocessing/queues.py", 113, "get"), loop, ("", 20, "train"))
    busy = guilty.thread(("", 11, "__getitem__"), loop, ("", 20, "train"))
    for later, pid, thread in ((7.0, 5002, idle), (7.1, 5001, busy)):
        thread["native_id"] = pid
        guilty.event("loader_worker", worker_pid=pid, worker_id=pid - 5001)
        guilty.stack(stage.latest + later, 2, thread, process="loader_worker", pid=pid)
    finding = stage.first()
    assert (finding.code, finding.ranks) == ("MC204", [1]) and stage.line(finding) == 11


def test_a_dead_worker_is_not_a_stuck_one(stage):
    _, guilty = held_up(stage, phase="data", line=20)
    guilty.event("loader_worker", worker_pid=5001, worker_id=0)
    guilty.sample(stage.latest, children=[{"pid": 5001, "state": "S", "comm": "python"}])
    look(guilty, (LOADER, 1200, "_try_get_data"), ("", 20, "train"))
    finding = stage.first()
    assert (finding.code, finding.ranks) == ("MC216", [1]) and stage.line(finding) == 20
    assert "5001" in finding.evidence[0]


def test_a_stopped_process_is_found_even_inside_the_same_collective(stage):
    actors = stage.ranks(2)
    stage.train(6)
    for actor in actors:
        actor.collective("all_reduce", 40, open=True)
    stage.stall()
    actors[1].sample(stage.latest + 6, state="T")
    finding = stage.first()
    assert (finding.code, finding.ranks, finding.victims) == ("MC209", [1], [0]) and "SIGSTOP" in finding.title


def test_everybody_in_the_same_collective_blames_nobody(stage):
    for actor in stage.ranks(2):
        actor.collective("all_reduce", 40, open=True)
        actor.sample(stage.latest + 6, state="S")
    stage.stall()
    finding = stage.first()
    assert (finding.code, finding.ranks, finding.victims, finding.severity) == ("MC220", [], [0, 1], "warning")


def test_the_gil_held_by_sleeping_c_code(stage):
    _, guilty = held_up(stage)
    look(guilty, ("", 8, "decode"), ("", 30, "train"), gil=True)
    finding = stage.first()
    assert (finding.code, finding.ranks) == ("MC210", [1]) and stage.line(finding) == 8


def test_a_process_that_goes_on_after_a_stop_is_not_judged_by_its_stacks_from_before(stage):
    _, guilty = held_up(stage)
    look(guilty, ("", 8, "decode"), ("", 30, "train"), gil=True, state="T")
    assert stage.first().code == "MC209"
    guilty.sample(stage.latest + 8, state="S")
    assert stage.first().code == "MC219", "what it holds now nobody has seen"


def test_the_gil_held_by_busy_c_code_outside_any_loop(stage):
    stage.source("import re\ndef clean(text):\n    return CLEAN.match(text)\n")
    _, guilty = held_up(stage)
    look(guilty, ("", 3, "clean"), ("", 30, "train"), gil=True, state="R", cpu=1.0)
    assert stage.first().code == "MC210"


def test_a_busy_python_loop_holds_the_gil_too_but_is_a_loop(stage):
    stage.source("def spin():\n    while True:\n        pass\n")
    _, guilty = held_up(stage)
    look(guilty, ("", 3, "spin"), ("", 30, "train"), gil=True, state="R", cpu=1.0)
    finding = stage.first()
    assert (finding.code, finding.ranks) == ("MC212", [1]) and stage.line(finding) == 3


def test_polling_for_something_that_never_comes(stage):
    stage.source("def wait_for(path):\n    while not os.path.exists(path):\n        time.sleep(0.005)\n")
    _, guilty = held_up(stage)
    look(guilty, ("", 3, "wait_for"), ("", 30, "train"), cpu=0.02)
    assert stage.first().code == "MC212"


def test_a_sleep_inside_the_training_loop_is_no_livelock(stage):
    stage.source("\n" * 18 + "while step < 100:\n" + "    work()\n" * 30)
    _, guilty = held_up(stage)
    look(guilty, ("", 25, "train"), cpu=0.02)
    finding = stage.first()
    assert (finding.code, finding.ranks) == ("MC219", [1]) and stage.line(finding) == 25


def test_two_threads_that_wait_for_each_others_locks(stage):
    stage.source(
        "def flush():\n    with stats_lock:\n        pass\ndef record():\n    with cache_lock:\n        pass\n"
    )
    _, guilty = held_up(stage)
    other = guilty.thread(("", 2, "flush"), ("/usr/lib/python3.11/threading.py", 982, "run"), main=False)
    look(guilty, ("", 5, "record"), ("", 30, "train"), others=(other,))
    finding = stage.first()
    assert (finding.code, finding.ranks, finding.cause) == ("MC211", [1], "locks") and stage.line(finding) == 5
    text = " ".join(finding.evidence)
    assert f"{stage.script}:5" in text and f"{stage.script}:2" in text, "both places are named"


def test_one_thread_that_takes_a_lock_twice(stage):
    stage.source("def mean(self):\n    with self.lock:\n        pass\n")
    _, guilty = held_up(stage)
    look(guilty, ("", 2, "mean"), ("", 30, "train"))
    finding = stage.first()
    assert (finding.code, finding.cause) == ("MC211", "lock")


def test_a_wait_for_a_subprocess_is_not_a_lock(stage):
    stage.source("def preprocess():\n    subprocess.run(['sleep', '900'])\n")
    _, guilty = held_up(stage)
    frames = (("/usr/lib/python3.11/subprocess.py", 1264, "wait"), ("", 2, "preprocess"), ("", 30, "train"))
    look(guilty, *frames, children=[{"pid": 9, "state": "S", "comm": "sleep"}])
    finding = stage.first()
    assert (finding.code, finding.ranks) == ("MC219", [1]) and stage.line(finding) == 2
    assert (finding.cause, finding.facts["children"]) == ("own_code", ["sleep"])


def test_a_write_that_the_kernel_does_not_finish(stage):
    _, guilty = held_up(stage, phase="save", line=50)
    look(guilty, ("", 50, "save"), syscall="openat", wchan="wait_for_partner", state="S")
    finding = stage.first()
    assert (finding.code, finding.ranks, finding.phase) == ("MC213", [1], "save") and stage.line(finding) == 50


def test_a_long_save_is_waited_for_and_said(stage):
    _, guilty = held_up(stage, phase="save", line=50)
    look(guilty, ("", 50, "save"), state="R", cpu=0.9)
    finding = stage.first()
    assert (finding.code, finding.severity, finding.ranks) == ("MC220", "info", [1])
    assert "saving a checkpoint" in finding.title


@pytest.mark.parametrize(("phase", "what"), [("hub", "the hub"), ("tracker", "the experiment tracker")])
def test_a_network_call_by_its_phase(stage, phase, what):
    _, guilty = held_up(stage, phase=phase, line=12)
    look(guilty, ("", 12, "train"))
    finding = stage.first()
    assert (finding.code, finding.ranks) == ("MC214", [1]) and what in finding.title


def test_a_network_call_by_its_stack(stage):
    _, guilty = held_up(stage)
    ssl = ("/usr/lib/python3.11/ssl.py", 1100, "read")
    look(guilty, ssl, ("/x/site-packages/urllib3/connection.py", 1, "send"), ("", 14, "fetch"))
    finding = stage.first()
    assert finding.code == "MC214" and "urllib3" in finding.title and stage.line(finding) == 14


def test_waiting_for_standard_input(stage):
    _, guilty = held_up(stage, phase="input", line=15)
    look(guilty, ("", 15, "confirm"), fd0="/dev/pts/3")
    finding = stage.first()
    assert (finding.code, finding.ranks) == ("MC215", [1]) and stage.line(finding) == 15


def test_a_forgotten_breakpoint_waits_for_input(stage):
    _, guilty = held_up(stage)
    pdb = ("/usr/lib/python3.11/cmd.py", 126, "cmdloop"), ("/usr/lib/python3.11/pdb.py", 300, "interaction")
    look(guilty, *pdb, ("", 16, "train"))
    finding = stage.first()
    assert (finding.code, finding.cause) == ("MC215", "debugger") and stage.line(finding) == 16


def test_computing_in_torch_is_slow_not_stuck(stage):
    _, guilty = held_up(stage, phase="forward", line=30)
    look(guilty, (TORCH, 120, "forward"), ("", 30, "train"), state="R", cpu=1.0)
    assert stage.first().code == "MC220"


def test_sleeping_in_forward_is_stuck(stage):
    stage.source("def forward(self, x):\n    time.sleep(900)\n")
    _, guilty = held_up(stage, phase="forward", line=30)
    look(guilty, ("", 2, "forward"), (TORCH, 120, "_call_impl"), ("", 30, "train"), syscall="clock_nanosleep")
    finding = stage.first()
    assert (finding.code, finding.ranks) == ("MC219", [1]) and stage.line(finding) == 2


def test_a_rank_that_never_joined(stage):
    actors = stage.ranks(3, join=False)
    for actor in actors[:2]:
        actor.begin("init", 10, op="new_group", detail="init_process_group")
    stage.stall()
    look(actors[2], ("", 6, "prepare"), ("", 30, "main"))
    finding = stage.first()
    assert (finding.code, finding.ranks, finding.victims) == ("MC102", [2], [0, 1]) and stage.line(finding) == 6


def test_all_ranks_joining_together_is_no_fault(stage):
    for actor in stage.ranks(3, join=False):
        actor.begin("init", 10, op="new_group", detail="init_process_group")
    assert stage.findings(after=1.0) == []


def test_a_circle_of_receives(stage):
    a, b = stage.ranks(2)
    stage.train(3)
    a.message("recv", 1, 50, open=True)
    b.message("recv", 0, 51, open=True)
    finding = stage.first(after=0.2)
    assert (finding.code, finding.ranks, finding.certainty, finding.severity) == ("MC218", [0, 1], "proven", "error")
    assert stage.line(finding) == 50


def test_receives_whose_sends_are_under_way_are_no_circle(stage):
    a, b = stage.ranks(2)
    for actor in (a, b):
        actor.message("send", 1 - actor.rank, 49)
        actor.message("recv", 1 - actor.rank, 50, open=True)
    assert stage.findings(after=0.2) == []


def test_a_circle_through_three_groups(stage):
    actors = stage.ranks(3)
    pairs = {0: "ranks 0,1", 1: "ranks 1,2", 2: "ranks 0,2"}
    for actor in actors:
        actor.collective("all_reduce", 60 + actor.rank, group=pairs[actor.rank], open=True)
    finding = stage.first(after=0.2)
    assert (finding.code, finding.ranks, finding.certainty) == ("MC218", [0, 1, 2], "proven")


def test_a_chain_of_waits_ends_at_the_one_that_does_not_wait(stage):
    actors = stage.ranks(3)
    stage.train(3)
    actors[0].collective("all_reduce", 60, group="ranks 0,1", open=True)
    actors[1].collective("all_reduce", 61, group="ranks 1,2", open=True)
    actors[2].begin("data", 20)
    stage.stall()
    finding = stage.first()
    assert (finding.code, finding.ranks, finding.victims) == ("MC204", [2], [0, 1])


def test_a_rank_in_backward_waits_for_its_reducer(stage):
    """DDP starts its reductions from C++: the main thread is in backward, not in a collective."""
    a, b = stage.ranks(2)
    for _ in range(6):
        for actor in (a, b):
            actor.collective("all_reduce", 31, native=True)
            actor.recorder.steps += 1
    a.begin("backward", 31)
    a.collective("all_reduce", 31, native=True)
    b.begin("data", 20)
    stage.stall()
    finding = stage.first()
    assert (finding.code, finding.ranks, finding.victims) == ("MC204", [1], [0])


def test_a_job_ended_as_hung_turns_the_warning_into_an_error(stage):
    _, guilty = held_up(stage, phase="data")
    stage.say("stopped", stage.latest + 6.5, reason="hang")
    finding = stage.first()
    assert (finding.code, finding.severity, finding.ranks) == ("MC204", "error", [guilty.rank])


def test_a_lone_script_that_stands_still(stage):
    (only,) = stage.ranks(1)
    stage.train(6)
    stage.stall()
    look(only, ("", 33, "train"))
    finding = stage.first()
    assert (finding.code, finding.ranks, finding.victims, finding.severity) == ("MC219", [0], [], "warning")


def test_ranks_stuck_in_the_same_way_are_one_finding(stage):
    actors = stage.ranks(4)
    stage.train(6)
    for actor in actors:
        if actor.rank < 2:
            actor.collective("all_reduce", 40, open=True)
        else:
            actor.begin("data", 20)
    stage.stall()
    findings = [f for f in stage.findings() if f.code == "MC204"]
    assert len(findings) == 1 and findings[0].ranks == [2, 3] and findings[0].victims == [0, 1]


def test_a_loop_on_a_core_it_must_share_is_still_a_loop(stage):
    stage.source("def spin():\n    while True:\n        pass\n")
    _, guilty = held_up(stage)
    look(guilty, ("", 3, "spin"), ("", 30, "train"), gil=True, state="R", cpu=0.2)
    assert stage.first().code == "MC212"


def test_a_script_seen_from_outside_is_named_as_its_user_named_it(stage):
    a, b = stage.ranks(2, cwd=str(stage.script.parent), script=stage.script.name)
    stage.train(3)
    a.collective("all_reduce", 40, open=True)
    stage.stall()
    look(b, ("", 33, "train"))
    assert stage.first().location == f"{stage.script.name}:33"


def test_ranks_that_we_ended_are_explained_by_where_they_stood(stage):
    _, guilty = held_up(stage, phase="data")
    for actor in stage.actors:
        stage.say("signal_sent", stage.latest + 8, rank=actor.rank, signal="SIGTERM", why="terminated")
    for actor in stage.actors:
        actor.t = stage.latest + 9
        actor.exits(None, signal=15)
    finding = stage.first(live=False)
    assert (finding.code, finding.ranks) == ("MC204", [guilty.rank])


def test_a_write_that_keeps_the_gil_is_first_of_all_a_stuck_write(stage):
    _, guilty = held_up(stage, phase="save", line=50)
    look(guilty, ("", 50, "save"), gil=True, syscall="openat", state="S")
    assert stage.first().code == "MC213"


def test_a_wait_for_a_message_nobody_sends_closes_the_circle(stage):
    a, b = stage.ranks(2)
    stage.train(6)
    a.message("send", 1)
    b.begin("p2p", 52, op="recv", group="default", collective_seq=1, peer=0, flags=FLAG_ASYNC)
    b.begin("p2p", 53, op="recv", group="default", collective_seq=2, peer=0, flags=FLAG_ASYNC, detail="wait")
    a.collective("all_reduce", 40, open=True)
    finding = stage.first(after=0.5)
    assert (finding.code, finding.ranks, finding.certainty) == ("MC218", [0, 1], "proven")
    assert finding.facts["waits_in"] == {"0": "all_reduce", "1": "recv from rank 0"}
    assert any(f"rank 1 waits in recv from rank 0 in group default at {stage.script}:53" in e for e in finding.evidence)


def test_waits_in_different_calls_are_not_said_to_be_one_call(stage):
    a, b, _ = stage.ranks(3, capacity=64)
    stage.train(40)  # the rings have lost their beginning: nobody can say what was not sent
    a.begin("p2p", 50, op="recv", group="default", collective_seq=9, peer=2)
    b.begin("p2p", 51, op="recv", group="default", collective_seq=9, peer=2)
    stage.actors[2].begin("p2p", 52, op="send", group="default", collective_seq=9, peer=-1)
    stage.stall()
    finding = stage.first()
    assert (finding.code, finding.ranks, finding.severity) == ("MC220", [], "warning")
    assert finding.cause == "different_calls"


@pytest.mark.parametrize(("switches", "code"), [((90, 90, 90, 90, 90), "MC219"), ((90, 92, 94, 96, 98), "MC212")])
def test_one_long_wait_inside_a_loop_is_no_poll(stage, switches, code):
    """However much CPU time the other threads use: what counts is whether the main thread wakes up."""
    stage.source("def batches():\n    while True:\n        yield stream.recv(64)\n")
    _, guilty = held_up(stage)
    base = stage.latest + 1
    for at, count in enumerate(switches):
        guilty.sample(base + at, cpu_s=10.0 + 0.02 * at, switches=count)
    for number in (1, 2):
        guilty.stack(base + 2 + number, number, guilty.thread(("", 3, "batches"), ("", 30, "train")))
    finding = stage.first()
    assert (finding.code, finding.ranks) == (code, [1]) and stage.line(finding) == 3
    assert not any("0 % of a core" in line for line in finding.evidence)


def test_the_last_sleeps_before_one_long_wait_are_no_poll(stage):
    stage.source("def batches():\n    while True:\n        yield stream.recv(64)\n")
    _, guilty = held_up(stage)
    base = stage.latest + 0.1
    for at, count in enumerate((90, 97, 97, 97, 97)):
        guilty.sample(base + at, cpu_s=10.0 + 0.02 * at, switches=count)
    for number in (1, 2):
        guilty.stack(base + 2 + number, number, guilty.thread(("", 3, "batches"), ("", 30, "train")))
    assert stage.first().code == "MC219"


def grid_step(actor, tensor_group, data_group, *, open=False):
    actor.collective("all_reduce", 20, group=tensor_group)
    actor.collective("all_reduce", 21, group=data_group, open=open)


def test_the_rank_that_left_its_own_order_is_the_guilty_one_of_a_circle(stage):
    """Rank 3 reduces in the wrong group; all four are caught in the circle that follows."""
    ranks = stage.ranks(4)
    rows, columns = ("ranks 0,1", "ranks 2,3"), ("ranks 0,2", "ranks 1,3")
    for _ in range(5):
        for actor in ranks:
            grid_step(actor, rows[actor.rank // 2], columns[actor.rank % 2])
            actor.collective("barrier", 22)
    a, b, c, d = ranks
    grid_step(a, rows[0], columns[0], open=True)
    grid_step(b, rows[0], columns[1])
    b.collective("barrier", 22, open=True)
    c.collective("all_reduce", 20, group=rows[1], open=True)
    d.collective("all_reduce", 20, group=columns[1])
    d.collective("all_reduce", 21, group=columns[1], open=True)
    finding = stage.first(after=0.5)
    assert (finding.code, finding.ranks, finding.victims) == ("MC218", [3], [0, 1, 2]) and stage.line(finding) == 20
    assert any(
        f"it used to call all_reduce in group ranks 2,3 at {stage.script}:20, this time all_reduce in group ranks 1,3"
        in line
        for line in finding.evidence
    )


def test_a_circle_without_a_history_blames_all_of_it(stage):
    a, b = stage.ranks(2)
    a.message("recv", 1, open=True)
    b.message("recv", 0, open=True)
    finding = stage.first(after=0.5)
    assert (finding.code, finding.ranks, finding.victims) == ("MC218", [0, 1], [])


def test_a_message_that_was_left_out_names_who_left_it_out(stage):
    ranks = stage.ranks(3)
    for step in range(6):
        for actor in ranks:
            left, right = (actor.rank - 1) % 3, (actor.rank + 1) % 3
            actor.message("send", right, 50)
            if not (step == 5 and actor.rank == 2):
                actor.message("send", left, 51)
            actor.message("recv", left, 52)
            actor.message("recv", right, 53, open=step == 5 and actor.rank == 1)
            if not (step == 5 and actor.rank == 1):
                actor.collective("all_reduce", 60, open=step == 5)
    finding = stage.first(after=0.5)
    assert (finding.code, finding.ranks, finding.victims) == ("MC218", [2], [0, 1]) and stage.line(finding) == 52
    assert finding.cause == "left_its_order"
    assert any(f"it used to call send to rank 1 at {stage.script}:51" in line for line in finding.evidence)


THREADING = "/usr/lib/python3.11/threading.py"


@pytest.mark.parametrize("wait", ["Condition.wait", "wait"])
def test_a_queue_that_nobody_fills_any_more(stage, wait):
    """Newer interpreters name a method with its class."""
    stage.source("def batches():\n    while True:\n        yield q.get()\n")
    _, guilty = held_up(stage)
    look(guilty, (THREADING, 327, wait), ("/usr/lib/python3.11/queue.py", 171, "Queue.get"), ("", 3, "batches"))
    finding = stage.first()
    assert (finding.code, finding.ranks, finding.severity) == ("MC211", [1], "warning") and stage.line(finding) == 3
    assert finding.cause == "thread"
    assert any("none of its other threads runs a line of the script" in line for line in finding.evidence)


def test_a_thread_that_is_waited_for_is_shown_where_it_stands(stage):
    _, guilty = held_up(stage)
    logger = guilty.thread((THREADING, 10, "sleep"), ("", 7, "logger"), main=False)
    look(guilty, (THREADING, 1139, "Thread._wait_for_tstate_lock"), (THREADING, 1119, "Thread.join"), ("", 30, "train"))
    guilty.stack(stage.latest + 8, 3, guilty.thread((THREADING, 1119, "Thread.join"), ("", 30, "train")), logger)
    finding = stage.first(after=9.0)
    assert (finding.code, finding.ranks) == ("MC211", [1]) and stage.line(finding) == 30
    assert f"observed: its thread Thread-1 is at {stage.script}:7 in logger" in finding.evidence


def test_a_save_that_waits_for_its_own_writer_thread_is_still_a_save(stage):
    _, guilty = held_up(stage, phase="save", line=60)
    look(guilty, (THREADING, 327, "Condition.wait"), ("", 60, "train"))
    assert stage.first().code == "MC220"


def test_a_script_that_is_over_and_held_by_a_thread(stage):
    _, guilty = held_up(stage)
    end = guilty.thread((THREADING, 1590, "_shutdown"))
    guilty.stack(stage.latest + 6, 1, end, guilty.thread(("", 7, "logger"), main=False))
    finding = stage.first()
    assert (finding.code, finding.ranks, finding.victims) == ("MC211", [1], [0]) and stage.line(finding) == 7
    assert finding.cause == "script_over"
    assert "inferred: rank 1 will not make the call that is missing: its script is over" in finding.evidence


def test_a_peer_that_sends_from_a_helper_thread_closes_no_circle(stage):
    a, b = stage.ranks(2)
    stage.train(6)
    helper = threading.Thread(target=lambda: a.message("send", 1))
    helper.start()
    helper.join()
    b.message("recv", 0)
    b.message("recv", 0, open=True)
    a.collective("all_reduce", 40, open=True)
    assert stage.findings(after=0.5) == []


def master_takes_from_anybody(stage, *, sent: int, taken: int):
    """Two workers send to rank 0 and then wait at a barrier; rank 0 is in a receive that names no sender."""
    master, *workers = stage.ranks(3)
    for worker in workers:
        for _ in range(sent):
            worker.message("send", 0, 49)
        worker.collective("barrier", 60, open=True)
    for number in range(taken):
        master.message("recv", -1, 50, open=number == taken - 1)


def test_a_receive_from_anybody_that_nobody_is_left_to_send_to_closes_the_circle(stage):
    master_takes_from_anybody(stage, sent=2, taken=5)
    finding = stage.first(after=0.2)
    assert (finding.code, finding.ranks, finding.certainty) == ("MC218", [0], "proven") and stage.line(finding) == 50


def test_a_receive_from_anybody_whose_message_is_under_way_is_no_circle(stage):
    master_takes_from_anybody(stage, sent=2, taken=4)
    assert stage.findings(after=0.2) == []


def test_a_worker_that_still_computes_may_send_to_a_receive_from_anybody(stage):
    master, waits, computes = stage.ranks(3)
    waits.collective("barrier", 60, open=True)
    computes.begin("forward", 30)
    master.message("recv", -1, 50, open=True)
    assert stage.findings(after=0.2) == []
