"""Ranks that end: the first one that failed by itself, its reason, and everybody else as a victim."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

import model_check

GLOO = "[../third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:31722"
FAULT_TEXT = """Fatal Python error: Segmentation fault

Current thread 0x00007f2 (most recent call first):
  File "/usr/lib/python3.11/ctypes/__init__.py", line 519 in string_at
  File "{script}", line 14 in augment
  File "{script}", line 30 in train

Thread 0x00007f3 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 320 in wait
"""


def crashing(stage, world=2):
    actors = stage.ranks(world)
    stage.train(6)
    return actors


def loses_peer(actor, message=GLOO):
    actor.collective("all_reduce", 40, raised="RuntimeError")
    actor.fails("RuntimeError", message, 40)
    actor.exits(1)


def test_the_original_exception_is_the_cause_and_the_lost_connections_are_victims(stage):
    a, b, c = crashing(stage, 3)
    b.fails("ValueError", "label 17 out of range", 33, function="loss")
    a.t = c.t = b.t + 0.02
    loses_peer(a)
    loses_peer(c, "Connection reset by peer")
    b.t = c.t + 0.05
    b.exits(1)  # it closes its connections first and exits last: the order of exits alone would blame a victim
    verdict = stage.verdict(after=0.1)
    assert [f.code for f in verdict.findings] == ["MC301"]
    finding = verdict.findings[0]
    assert (finding.ranks, finding.victims, finding.function) == ([1], [0, 2], "loss") and stage.line(finding) == 33
    assert "label 17 out of range" in finding.title
    assert (finding.certainty, finding.severity) == ("proven", "error")
    assert (verdict.outcome, verdict.exit_code) == ("failed", 1)


@pytest.mark.parametrize(
    "message",
    [
        GLOO,
        "Broken pipe",
        "NCCL error: remote process exited or there was a network error",
        "ncclRemoteError: A call failed possibly due to a network error",
        "Application timeout caused pair closure",
        "failed to recv, got 0 bytes",
        "recvValue failed on SocketImpl(fd=5): Connection was likely closed",
    ],
)
def test_texts_of_victims_never_name_a_cause(stage, message):
    a, b = crashing(stage)
    loses_peer(a, message)
    b.t = a.t + 1
    b.fails("KeyError", "'labels'", 34)
    b.exits(1)
    finding = stage.first(after=0.1)
    assert (finding.code, finding.ranks, finding.victims) == ("MC301", [1], [0])


def test_the_same_exception_on_all_ranks_is_one_finding(stage):
    for actor in crashing(stage, 3):
        actor.fails("TypeError", "unsupported operand", 35)
        actor.exits(1)
    findings = stage.findings(after=0.1)
    assert len(findings) == 1 and findings[0].ranks == [0, 1, 2] and findings[0].victims == []


def test_a_rank_that_waits_for_the_failed_one_is_its_victim_not_a_hang(stage):
    a, b = crashing(stage)
    b.fails("ValueError", "boom", 33)
    b.exits(1)
    a.collective("all_reduce", 40, open=True)
    stage.stall()
    findings = stage.findings()
    assert [f.code for f in findings] == ["MC301"] and findings[0].victims == [0]


CASES = [
    ("ModuleNotFoundError", "No module named 'flash_attn'", "MC310"),
    ("OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB.", "MC501"),
    ("RuntimeError", "CUDA error: device-side assert triggered", "MC311"),
    ("RuntimeError", "CUDA error: uncorrectable ECC error encountered", "MC312"),
    ("RuntimeError", "CUDA error: invalid device ordinal", "MC104"),
    ("MemoryError", "", "MC307"),
    ("RuntimeError", "[enforce fail at alloc_cpu.cpp:126] DefaultCPUAllocator: can't allocate memory", "MC307"),
    ("RuntimeError", "std::bad_alloc", "MC307"),
    ("RuntimeError", "DataLoader worker (pid 812) is killed by signal: Killed.", "MC216"),
    ("RuntimeError", "DataLoader worker (pid(s) 812) exited unexpectedly", "MC216"),
    ("DistNetworkError", "The server socket has failed to listen on port 29500, EADDRINUSE", "MC103"),
    ("RuntimeError", "mat1 and mat2 shapes cannot be multiplied (4x8 and 7x8)", "MC301"),
]


@pytest.mark.parametrize(("kind", "message", "code"), CASES)
def test_what_an_exception_is_about(stage, kind, message, code):
    a, b = crashing(stage)
    b.fails(kind, message, 36)
    b.exits(1)
    loses_peer(a)
    finding = stage.first(after=0.1)
    assert (finding.code, finding.ranks, finding.victims) == (code, [1], [0])
    assert stage.line(finding) == (20 if code == "MC216" else 36)


def test_the_history_of_resident_memory_stands_beside_a_failed_allocation(stage):
    a, b = crashing(stage)
    for second, gib in enumerate((1, 2, 4)):
        b.sample(b.t + second, rss=gib << 30)
    b.t += 3
    b.fails("MemoryError", "", 36)
    b.exits(1)
    assert any("RSS" in e and "1.00 GiB" in e and "4.00 GiB" in e for e in stage.first(after=0.1).evidence)
    assert a.rank == 0


def test_the_holder_of_the_port_is_named(stage):
    a, _ = crashing(stage)
    stage.say("port", a.t, port=29500, holder_pid=77, holder_cmd="python old_job.py")
    a.fails("DistNetworkError", "EADDRINUSE, port: 29500", 10)
    a.exits(1)
    finding = stage.first(after=0.1)
    held = {"port": 29500, "holder_pid": 77, "holder_cmd": "python old_job.py"}
    assert finding.code == "MC103" and finding.facts.items() >= held.items()


def test_a_race_for_a_directory(stage):
    a, b = crashing(stage)
    b.fails("FileExistsError", "[Errno 17] File exists: 'checkpoints'", 12, text="os.mkdir(path)")
    b.exits(1)
    assert stage.first(after=0.1).code == "MC107" and a.rank == 0


def test_a_directory_that_exists_on_all_ranks_is_a_plain_exception(stage):
    for actor in crashing(stage):
        actor.fails("FileExistsError", "[Errno 17] File exists: 'checkpoints'", 12, text="os.mkdir(path)")
        actor.exits(1)
    assert stage.first(after=0.1).code == "MC301"


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("RuntimeError", "PytorchStreamReader failed reading zip archive"),
        ("OSError", "[Errno 22] Invalid argument"),
        ("EOFError", "Ran out of input"),
    ],
)
def test_a_half_written_file(stage, kind, message):
    a, b = crashing(stage)
    b.span("load", 13, detail="/data/tokens.pt", end_detail="raised RuntimeError")
    b.fails(kind, message, 13, text="return torch.load(path)")
    b.exits(1)
    finding = stage.first(after=0.1)
    assert finding.code == "MC110" and any("/data/tokens.pt" in e for e in finding.evidence) and a.rank == 0


def test_killed_by_an_unknown_sender(stage):
    a, b = crashing(stage)
    b.exits(None, signal=signal.SIGKILL)
    loses_peer(a)
    verdict = stage.verdict(after=0.1)
    finding = verdict.findings[0]
    assert (finding.code, finding.ranks, finding.victims) == ("MC303", [1], [0])
    assert any("sender is not known" in e for e in finding.evidence) and verdict.exit_code == 137
    assert finding.title == "rank 1 was ended by SIGKILL" and "outside" not in " ".join(finding.evidence)
    assert f"observed: its last recorded line is {finding.location}" in finding.evidence


@pytest.mark.parametrize(("source", "code"), [("kernel", "MC304"), ("cgroup", "MC305"), ("limit", "MC305")])
def test_killed_for_memory(stage, source, code):
    _, b = crashing(stage)
    stage.say("oom", b.t, source=source, pid=b.pid, detail="Killed process")
    b.exits(None, signal=signal.SIGKILL)
    assert stage.first(after=0.1).code == code


def test_a_memory_kill_of_another_process_does_not_explain_a_kill(stage):
    _, b = crashing(stage)
    stage.say("oom", b.t, source="kernel", pid=99999, detail="Killed process 99999")
    b.exits(None, signal=signal.SIGKILL)
    assert stage.first(after=0.1).code == "MC303"


def test_a_segfault_names_the_python_line(stage):
    _, b = crashing(stage)
    stage.run_dir.stacks_dir.mkdir()
    (stage.run_dir.stacks_dir / "rank-00001.fault.txt").write_text(FAULT_TEXT.format(script=stage.script))
    b.exits(None, signal=signal.SIGSEGV)
    stage.actors[0].exits(0, via="return")
    verdict = stage.verdict(live=False)
    finding = verdict.findings[0]
    assert (finding.code, finding.ranks, finding.function) == ("MC306", [1], "augment") and stage.line(finding) == 14
    assert verdict.exit_code == 139


def test_an_abort_after_bad_alloc_is_host_memory(stage):
    _, b = crashing(stage)
    logs = stage.run_dir.root / "logs"
    logs.mkdir()
    (logs / "rank-00001.log").write_text("terminate called after throwing an instance of 'std::bad_alloc'\n")
    b.exits(None, signal=signal.SIGABRT)
    assert stage.first(after=0.1).code == "MC307"


def test_ranks_that_we_end_ourselves_are_no_causes(stage):
    a, b = crashing(stage)
    b.fails("ValueError", "boom", 33)
    b.exits(1)
    stage.say("signal_sent", b.t + 0.1, rank=0, signal="SIGTERM", why="a rank failed")
    a.t = b.t + 0.2
    a.exits(None, signal=signal.SIGTERM)
    finding = stage.first(after=0.1)
    assert (finding.code, finding.ranks, finding.victims) == ("MC301", [1], [0])


def test_ranks_swept_away_by_a_launcher_we_do_not_know(stage):
    a, b = crashing(stage)
    b.exits(None, signal=signal.SIGSEGV)
    a.t = b.t + 0.3
    a.exits(None, signal=signal.SIGTERM)
    assert (stage.first(after=0.1).code, stage.first(after=0.1).victims) == ("MC306", [0])


def test_an_early_exit_with_code_0_while_a_peer_waits(stage):
    a, b = crashing(stage)
    b.exits(0, via="sys.exit", line=48)
    a.collective("all_reduce", 40, open=True)
    finding = stage.first(after=0.1)
    assert (finding.code, finding.ranks, finding.victims) == ("MC308", [1], [0]) and stage.line(finding) == 48
    assert finding.certainty == "proven"


def test_an_early_exit_after_which_the_peer_has_failed(stage):
    a, b = crashing(stage)
    b.exits(0, via="os._exit", line=48)
    a.t = b.t + 0.01
    loses_peer(a)
    finding = stage.first(after=0.1)
    assert (finding.code, finding.ranks, finding.victims) == ("MC308", [1], [0])


def test_ranks_that_finish_one_after_the_other_are_fine(stage):
    a, b = crashing(stage)
    b.exits(0, via="return")
    a.span("eval", 60, 20.0)
    assert stage.findings(after=30.0) == []
    a.exits(0, via="return")
    verdict = stage.verdict(live=False)
    assert (verdict.outcome, verdict.exit_code, verdict.findings, verdict.steps_completed) == ("completed", 0, [], 6)


def test_uneven_data_of_a_rank_that_returned(stage):
    a, b, c = crashing(stage, 3)
    c.exhausted()
    c.exits(0, via="return")
    for actor in (a, b):
        actor.span("data", 20)
        actor.collective("all_reduce", 40, open=True)
    finding = stage.first(after=0.1)
    assert (finding.code, finding.ranks, finding.victims) == ("MC205", [2], [0, 1]) and stage.line(finding) == 20


def test_a_rank_that_returned_with_one_collective_less(stage):
    a, b = crashing(stage)
    b.exits(0, via="return")
    a.step()
    a.collective("all_reduce", 40, open=True)
    finding = stage.first(after=0.1)
    assert (finding.code, finding.ranks, finding.victims) == ("MC206", [1], [0])


def test_a_barrier_at_the_end_that_only_rank_0_calls(stage):
    a, b = crashing(stage)
    b.exits(0, via="return")
    a.span("save", 60)
    a.collective("barrier", 61, open=True)
    finding = stage.first(after=0.1)
    assert (finding.code, finding.ranks) == ("MC206", [0]) and stage.line(finding) == 61


def test_the_store_host_is_gone(stage):
    a, b = crashing(stage)
    a.exits(0, via="os._exit", line=70)
    b.t = a.t + 0.05
    b.fails("DistNetworkError", "failed to recv, got 0 bytes", 72)
    b.exits(1)
    finding = stage.first(after=0.1)
    assert (finding.code, finding.ranks, finding.victims) == ("MC309", [0], [1]) and stage.line(finding) == 70


def test_an_exit_code_without_an_exception(stage):
    a, b = crashing(stage)
    b.exits(7, via="sys.exit", line=22)
    a.collective("all_reduce", 40, open=True)
    verdict = stage.verdict(after=0.1)
    finding = verdict.findings[0]
    assert (finding.code, finding.severity, finding.ranks, finding.victims) == ("MC313", "error", [1], [0])
    assert stage.line(finding) == 22


def test_all_ranks_that_choose_the_same_code_are_a_decision_not_an_error(stage):
    for actor in crashing(stage):
        actor.exits(3, via="sys.exit", line=80)
    verdict = stage.verdict(live=False)
    assert [(f.code, f.severity) for f in verdict.findings] == [("MC313", "warning")]
    assert (verdict.outcome, verdict.exit_code) == ("failed", 3)


def test_a_swallowed_exception_before_the_peers_lost_it(stage):
    a, b = crashing(stage)
    b.swallows("RuntimeError", "index out of range in self", 38)
    b.exits(0, via="return")
    a.t = b.t + 0.1
    loses_peer(a)
    finding = stage.first(after=0.1)
    assert (finding.code, finding.ranks, finding.victims) == ("MC302", [1], [0]) and stage.line(finding) == 38


def test_a_peer_lost_on_another_host(stage):
    for actor in crashing(stage):
        loses_peer(actor)
    finding = stage.first(live=False)
    assert (finding.code, finding.ranks, finding.certainty) == ("MC217", [], "suspected")


def test_the_outcome_of_an_interrupted_run(stage):
    for actor in crashing(stage):
        stage.say("signal_sent", actor.t, rank=actor.rank, signal="SIGINT", why="interrupted")
        actor.exits(None, signal=signal.SIGINT)
    stage.say("stopped", reason="interrupted")
    verdict = stage.verdict(live=False)
    assert (verdict.outcome, verdict.findings) == ("interrupted", [])


def test_an_exception_without_frames_of_the_user_is_placed_by_the_black_box(stage):
    _, b = crashing(stage)
    b.begin("forward", 37)
    deep = {"file": "/x/site-packages/torch/nn/functional.py", "line": 2615, "function": "embedding"}
    b.event(
        "exception",
        type="IndexError",
        message="index out of range",
        frames=[deep],
        user_frame=None,
        thread="MainThread",
    )
    finding = stage.first(after=0.1)
    assert finding.code == "MC301" and stage.line(finding) == 37


def test_a_worker_that_was_killed_shows_as_a_broken_queue(stage):
    a, b = crashing(stage)
    frames = [
        {"file": str(stage.script), "line": 20, "function": "train"},
        {"file": "/x/site-packages/torch/utils/data/dataloader.py", "line": 1200, "function": "_try_get_data"},
    ]
    message = "[Errno 104] Connection reset by peer"
    b.event(
        "exception",
        type="ConnectionResetError",
        message=message,
        frames=frames,
        user_frame=frames[0],
        thread="MainThread",
    )
    b.exits(1)
    loses_peer(a)
    finding = stage.first(after=0.1)
    assert (finding.code, finding.ranks, finding.victims) == ("MC216", [1], [0]) and stage.line(finding) == 20


def test_what_ranks_do_after_we_passed_a_signal_on_is_no_finding(stage):
    a, b = crashing(stage)
    for actor in (a, b):
        stage.say("signal_sent", actor.t, rank=actor.rank, pid=actor.pid, signal="SIGTERM", why="passed on")
    a.exits(None, signal=signal.SIGTERM)
    b.t += 0.2
    b.fails("SignalException", "process got signal 15", 40)
    b.exits(1)
    stage.say("stopped", reason="interrupted")
    verdict = stage.verdict(live=False)
    assert (verdict.findings, verdict.outcome) == ([], "interrupted")


def test_a_rank_that_says_it_leaves_is_gone_before_its_process_is(stage):
    a, b = crashing(stage)
    b.event("exit", code=0, via="sys.exit", user_frame={"file": str(stage.script), "line": 50, "function": "train"})
    a.t = b.t + 0.01
    a.collective("all_reduce", 40, open=True)
    finding = stage.first(after=0.3)
    assert (finding.code, finding.ranks, finding.victims) == ("MC308", [1], [0]) and stage.line(finding) == 50


def test_a_dead_loader_worker_is_named_at_the_loader_wherever_the_rank_was(stage):
    a, _ = crashing(stage)
    a.begin("backward", 31)
    a.fails("RuntimeError", "DataLoader worker (pid 77) exited unexpectedly with exit code 1", 31)
    finding = stage.first(after=0.1)
    assert (finding.code, finding.ranks) == ("MC216", [0]) and stage.line(finding) == 20


def test_an_abort_after_the_end_of_the_script_names_no_line_of_it(stage):
    a, b = crashing(stage)
    b.event("exit", code=0, via="return")
    b.exits(None, signal=signal.SIGABRT)
    a.exits(0, via="return")
    verdict = stage.verdict(live=False)
    finding = verdict.findings[0]
    assert (finding.code, finding.ranks, finding.location) == ("MC306", [1], None)
    assert finding.title == "rank 1 crashed with SIGABRT after its script had ended" and verdict.exit_code == 134
    assert "destroy_process_group" in finding.fix[0]


def test_an_abort_over_a_message_of_another_size_is_a_wrong_size(stage):
    _, b = crashing(stage)
    b.message("recv", 0, 52, open=True)
    logs = stage.run_dir.root / "logs"
    logs.mkdir()
    (logs / "rank-00001.log").write_text(
        "terminate called after throwing an instance of 'gloo::EnforceNotMet'\n"
        "  what():  [enforce fail at pair.cc:456] op.preamble.length <= op.nbytes. 16 vs 8. "
        "Received data size doesn't match expected size.\n"
    )
    b.exits(None, signal=signal.SIGABRT)
    finding = stage.first(after=0.1)
    assert (finding.code, finding.ranks) == ("MC202", [1]) and stage.line(finding) == 52
    assert finding.title == "rank 1 received 16 bytes in recv from rank 0 where it expected 8, and aborted"


def test_our_own_sentence_about_a_users_files_names_no_line_of_ours(stage):
    a, b = stage.ranks(2)
    ours = str(Path(model_check.__file__).parent / "checkpoint" / "search.py")
    frame = {"file": ours, "line": 42, "function": "newest", "text": ""}
    for actor in (a, b):
        actor.event(
            "exception",
            type="CheckpointError",
            message="[MC607] the checkpoint of step 1 is of another model; name another one",
            frames=[frame],
            user_frame=None,
            thread="MainThread",
        )
        actor.exits(1)
    finding = stage.first()
    assert (finding.code, finding.ranks, finding.location) == ("MC607", [0, 1], None)
    assert finding.title == "the checkpoint of step 1 is of another model; name another one"
