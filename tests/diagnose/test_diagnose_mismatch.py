"""Collectives that do not match: order, shape, dtype, missing, extra, crossed; and what must not be taken for them."""

from __future__ import annotations

import threading


def test_a_rank_that_calls_another_operation_is_named_by_its_own_history(stage):
    a, b = stage.ranks(2)
    for _ in range(6):
        for actor in (a, b):
            actor.collective("all_reduce", 40)
            actor.collective("broadcast", 41, shape=(4,))
            actor.recorder.steps += 1
    a.collective("all_reduce", 40, open=True)
    b.collective("broadcast", 60, shape=(4,), open=True)
    finding = stage.first(after=0.5)
    assert (finding.code, finding.severity, finding.certainty) == ("MC201", "error", "proven")
    assert finding.ranks == [1] and finding.victims == [0] and stage.line(finding) == 60
    assert finding.cause == "history"
    assert (finding.facts["op"], finding.facts["peers_op"]) == ("broadcast", "all_reduce")


def test_the_majority_decides_without_a_history(stage):
    actors = stage.ranks(3)
    for actor in actors:
        actor.collective("all_gather" if actor.rank == 2 else "all_reduce", 70 + actor.rank, open=True)
    finding = stage.first(after=0.5)
    assert (finding.code, finding.ranks, finding.victims) == ("MC201", [2], [0, 1])
    assert stage.line(finding) == 72


def test_two_ranks_without_a_history_are_both_named_and_neither_is_blamed(stage):
    a, b = stage.ranks(2)
    a.collective("all_reduce", 40, open=True)
    b.collective("broadcast", 60, open=True)
    finding = stage.first(after=0.5)
    assert (finding.code, finding.ranks, finding.victims) == ("MC201", [0, 1], [])
    assert finding.cause == "undecided"


def test_different_roots_of_a_broadcast_are_a_mismatch(stage):
    actors = stage.ranks(3)
    for actor in actors:
        actor.collective("broadcast", 40, peer=1 if actor.rank == 2 else 0, open=True)
    finding = stage.first(after=0.5)
    assert (finding.code, finding.ranks, finding.victims) == ("MC221", [2], [0, 1])
    assert finding.title == "rank 2 used root 1, ranks 0 and 1 used root 0 in one broadcast"
    assert stage.line(finding) == 40 and (finding.facts["root"], finding.facts["peers_root"]) == (1, 0)


def test_different_roots_are_found_although_nobody_waits(stage):
    a, b = stage.ranks(2)
    for actor in (a, b):
        for _ in range(3):
            actor.collective("broadcast", 40, peer=0)
        actor.collective("broadcast", 40, peer=1 if actor is b else 0)
        actor.collective("all_reduce", 41)
    finding = stage.first(after=0.5)
    assert (finding.code, finding.ranks, finding.severity) == ("MC221", [1], "error")
    assert any("hold the values of different roots" in e for e in finding.evidence)


def test_a_root_that_one_rank_did_not_record_is_no_difference(stage):
    for actor in stage.ranks(2):
        actor.collective("gather", 40, peer=-1 if actor.rank else 0, open=True)
    assert stage.findings(after=0.5) == []


def test_ranks_that_are_merely_behind_are_not_wrong(stage):
    a, b = stage.ranks(2)
    stage.train(6)
    for _ in range(3):
        a.collective("all_reduce", 40, native=True)
    b.span("forward", 30)
    assert stage.findings(after=0.5) == []


def test_different_sizes(stage):
    a, b = stage.ranks(2)
    stage.train(6)
    a.collective("all_reduce", 40, shape=(8,), open=True)
    b.collective("all_reduce", 40, shape=(5,), raised="RuntimeError")
    b.fails("RuntimeError", "[enforce fail at op.preamble.length <= op.nbytes] 32 vs 20", 40)
    b.exits(1)
    findings = stage.findings(after=0.5)
    assert [f.code for f in findings] == ["MC202"], "the error that the mismatch raises is not a second cause"
    assert findings[0].ranks == [1] and findings[0].victims == [0] and stage.line(findings[0]) == 40
    assert (findings[0].facts["shape"], findings[0].facts["peers_shape"]) == ([5], [8])


def test_calls_of_other_sizes_that_all_ranks_know_are_a_step_lost_not_a_wrong_size(stage):
    ranks = stage.ranks(3)
    for step in range(12):
        for actor in ranks:
            if step != 10 or actor.rank != 1:
                actor.collective("all_reduce", 40, shape=(72,), native=True, open=step == 10)
            if step % 5 == 0 and (step < 10 or actor.rank == 1):
                actor.collective("all_reduce", 50, shape=(1,), open=step == 10)
            if step == 10:
                continue
            actor.recorder.steps += 1
        if step == 10:
            break
    finding = stage.first(after=0.5)
    assert (finding.code, finding.ranks, finding.victims) == ("MC206", [1], [0, 2]) and stage.line(finding) == 50


def test_same_number_of_elements_in_another_shape_is_fine(stage):
    a, b = stage.ranks(2)
    stage.train(6)
    a.collective("all_reduce", 40, shape=(2, 4))
    b.collective("all_reduce", 40, shape=(4, 2))
    assert stage.findings(after=0.5) == []


def test_lists_of_all_gather_may_have_different_sizes(stage):
    for actor in stage.ranks(2):
        for _ in range(4):
            actor.collective("all_gather", 44, shape=(3 + actor.rank,))
    assert stage.findings(after=0.5) == []


def test_different_dtypes_are_found_although_nothing_hangs(stage):
    a, b = stage.ranks(2)
    stage.train(6)
    for _ in range(3):
        a.collective("all_reduce", 40, dtype="float32")
        b.collective("all_reduce", 40, dtype="int32")
    finding = stage.first(after=0.5)
    assert (finding.code, finding.severity, finding.ranks) == ("MC203", "error", [1])
    assert (finding.facts["dtype"], finding.facts["peers_dtype"]) == ("int32", "float32")


def test_same_dtypes_are_fine(stage):
    for actor in stage.ranks(2):
        for dtype in ("float32", "int64", "bfloat16"):
            actor.collective("all_reduce", 40, dtype=dtype)
    assert stage.findings(after=0.5) == []


def routine(actor, *, skip: bool = False) -> None:
    """Two different collectives a step."""
    actor.span("forward", 30)
    actor.span("backward", 31)
    if not skip:
        actor.collective("all_reduce", 40)
    actor.span("optimizer", 45)
    actor.recorder.point("step")
    actor.recorder.steps += 1
    actor.collective("barrier", 46)


def test_a_skipped_collective(stage):
    actors = stage.ranks(3)
    for _ in range(6):
        for actor in actors:
            routine(actor)
    for actor in actors[:2]:
        actor.span("backward", 31)
        actor.collective("all_reduce", 40, open=True)
    actors[2].span("backward", 31)
    actors[2].span("optimizer", 45)
    actors[2].recorder.point("step")
    actors[2].recorder.steps += 1
    actors[2].collective("barrier", 46, open=True)
    finding = stage.first(after=0.5)
    assert (finding.code, finding.ranks, finding.victims) == ("MC206", [2], [0, 1])
    assert stage.line(finding) == 46 and finding.certainty == "proven"


def test_a_barrier_under_if_rank_0(stage):
    a, b = stage.ranks(2)
    stage.train(6)
    a.span("save", 50)
    a.collective("barrier", 51, open=True)
    b.span("forward", 30)
    b.collective("all_reduce", 40, open=True)
    finding = stage.first(after=0.5)
    assert (finding.code, finding.ranks) == ("MC206", [0]) and stage.line(finding) == 51
    assert (finding.facts["op"], finding.facts["peers_op"]) == ("barrier", "all_reduce")


def test_an_extra_collective(stage):
    a, b = stage.ranks(2)
    for _ in range(6):
        for actor in (a, b):
            routine(actor)
    for actor in (a, b):
        actor.span("forward", 30)
        actor.span("backward", 31)
        actor.collective("all_reduce", 40)
    a.collective("all_gather", 55, open=True)
    b.span("optimizer", 45)
    b.recorder.steps += 1
    b.collective("barrier", 46, open=True)
    finding = stage.first(after=0.5)
    assert (finding.code, finding.ranks) == ("MC207", [0]) and stage.line(finding) == 55


def test_one_round_more_of_the_same_collective_is_extra(stage):
    actors = stage.ranks(3)
    for _ in range(3):
        for actor in actors:
            for _ in range(4):
                actor.collective("all_reduce", 60, shape=(1,))
            actor.collective("barrier", 61)
    for actor in actors:
        for _ in range(4):
            actor.collective("all_reduce", 60, shape=(1,))
        actor.collective(
            "all_reduce" if actor.rank == 1 else "barrier", 60 if actor.rank == 1 else 61, shape=(1,), open=True
        )
    finding = stage.first(after=0.5)
    assert (finding.code, finding.ranks) == ("MC207", [1]) and stage.line(finding) == 60


SWAPPED = """\
if rank == 1:
    dist.all_reduce(correct)
    dist.all_reduce(loss)
else:
    dist.all_reduce(loss)
    dist.all_reduce(correct)
"""


def test_crossed_pairs_on_the_same_lines(stage):
    actors = stage.ranks(3)
    for _ in range(4):
        for actor in actors:
            for line in (41, 40) if actor.rank == 2 else (40, 41):
                actor.collective("all_reduce", line, shape=(1,))
    finding = stage.first(after=0.5)
    assert (finding.code, finding.ranks, finding.severity) == ("MC208", [2], "error")
    assert stage.line(finding) == 41


def test_crossed_pairs_in_two_branches_are_seen_in_the_source(stage):
    stage.source(SWAPPED)
    a, b = stage.ranks(2)
    for step in range(8):
        for actor in (a, b):
            swapped = actor.rank == 1 and step >= 4
            for line in (2, 3) if swapped else (5, 6):
                actor.collective("all_reduce", line, shape=(1,))
            actor.recorder.steps += 1
    finding = stage.first(after=0.5)
    assert (finding.code, finding.ranks) == ("MC208", [1]) and stage.line(finding) == 2


def test_the_same_call_from_two_branches_is_legal(stage):
    stage.source(
        "if rank == 0:\n    dist.all_reduce(x)\n    log(x)\nelse:\n    dist.all_reduce(y)\ndist.all_reduce(z)\n"
    )
    for actor in stage.ranks(2):
        for _ in range(6):
            actor.collective("all_reduce", 2 if actor.rank == 0 else 5, shape=(1,))
            actor.collective("all_reduce", 6, shape=(1,))
            actor.recorder.steps += 1
    assert stage.findings(after=0.5) == []


def test_a_silent_shift_by_one_step_is_suspected_not_proven(stage):
    a, b = stage.ranks(2)
    for step in range(12):
        a.step()
        b.step(reduce=step != 6)
    finding = stage.first(after=0.5)
    assert (finding.code, finding.severity, finding.certainty, finding.ranks) == ("MC206", "warning", "suspected", [1])


def test_a_joined_rank_that_shadows_its_peers_collectives_is_no_shift(stage):
    """DDP's Join: the rank without data goes on to issue the collectives, and its step stands still."""
    a, b = stage.ranks(2)
    for step in range(12):
        a.step()
        if step < 5:
            b.step()
        else:
            b.collective("all_reduce", 12)
        assert stage.findings(after=0.5) == [], f"looked at after step {step}"
    for actor in (a, b):
        for _ in range(4):
            actor.collective("all_reduce", 12)
    assert stage.findings(after=0.5) == []


def test_a_swallowed_exception_is_the_cause_of_the_mismatch(stage):
    a, b = stage.ranks(2)
    for _ in range(6):
        for actor in (a, b):
            routine(actor)
    b.swallows("ValueError", "record 96 has a bad checksum", 77)
    b.collective("barrier", 46, open=True)
    a.collective("all_reduce", 40, open=True)
    finding = stage.first(after=0.5)
    assert (finding.code, finding.ranks, finding.victims) == ("MC302", [1], [0]) and stage.line(finding) == 77
    assert any("bad checksum" in e for e in finding.evidence)


def test_an_exception_that_all_ranks_swallow_alike_keeps_them_together(stage):
    a, b = stage.ranks(2)
    for actor in (a, b):
        actor.swallows("OSError", "temporary", 77)
        for _ in range(6):
            routine(actor)
    assert stage.findings(after=0.5) == []
    a.collective("all_gather", 40, open=True)
    b.collective("all_reduce", 40, open=True)
    assert stage.first(after=0.5).code != "MC302"


def test_uneven_data_that_ends_in_another_collective(stage):
    a, b = stage.ranks(2)
    stage.train(6)
    b.exhausted()
    b.collective("barrier", 60, open=True)
    a.span("data", 20)
    a.span("backward", 31)
    a.collective("all_reduce", 40, open=True)
    finding = stage.first(after=0.5)
    assert (finding.code, finding.ranks, finding.victims) == ("MC205", [1], [0]) and stage.line(finding) == 20
    assert finding.certainty == "proven"


def test_a_loader_that_ends_on_all_ranks_is_fine(stage):
    actors = stage.ranks(2)
    stage.train(6)
    for actor in actors:
        actor.exhausted()
        actor.collective("barrier", 60)
    assert stage.findings(after=0.5) == []


def test_nothing_is_matched_past_what_a_wrapped_ring_holds(stage):
    a, b = stage.ranks(2, capacity=64)
    for _ in range(40):
        a.step()
    b.step()  # far behind: its numbers are no longer in the other ring
    assert all(f.severity != "error" for f in stage.findings(after=0.5))


def test_groups_are_compared_on_their_own(stage):
    actors = stage.ranks(4)
    for actor in actors:
        pair = "ranks 0,1" if actor.rank < 2 else "ranks 2,3"
        for _ in range(5):
            actor.collective("all_reduce", 40, group=pair, shape=(actor.rank // 2 + 3,))
            actor.collective("all_reduce", 41)
    assert stage.findings(after=0.5) == []
    for actor in actors[2:]:
        actor.collective("broadcast" if actor.rank == 3 else "all_reduce", 43, group="ranks 2,3", open=True)
    finding = stage.first(after=0.5)
    assert finding.code == "MC201" and 3 in finding.ranks and not {0, 1} & {*finding.ranks, *finding.victims}


def test_gloo_cannot_gather_different_sizes(stage):
    a, b = stage.ranks(2)
    for _ in range(4):
        for actor in (a, b):
            actor.collective("all_gather", 44, shape=(16,))
    a.collective("all_gather", 44, shape=(16,))
    a.collective("barrier", 45, raised="RuntimeError")
    a.fails("RuntimeError", "Connection reset by peer", 45)
    b.collective("all_gather", 44, shape=(11,), open=True)
    b.exits(None, signal=6)
    finding = stage.first(after=0.1)
    assert (finding.code, finding.ranks, finding.victims) == ("MC202", [1], [0]) and stage.line(finding) == 44


def test_nccl_can_gather_different_sizes(stage):
    a, b = stage.ranks(2, backend="nccl")
    a.collective("all_gather", 44, shape=(16,), open=True)
    b.collective("all_gather", 44, shape=(11,), open=True)
    assert stage.findings(after=0.1) == []


def test_an_exception_whose_handler_still_runs_is_read_from_the_ring(stage):
    a, b = stage.ranks(2)
    for _ in range(6):
        for actor in (a, b):
            routine(actor)
    b.span("data", 28, end_detail="raised ValueError")
    b.collective("barrier", 33, open=True)  # called by the handler: no event has been written yet
    a.collective("all_reduce", 40, open=True)
    finding = stage.first(after=0.5)
    assert (finding.code, finding.ranks, finding.victims) == ("MC302", [1], [0]) and stage.line(finding) == 28
    assert "ValueError" in finding.title


def test_a_handler_that_calls_a_collective_still_has_the_words_of_its_exception(stage):
    a, b, c = stage.ranks(3)
    stage.train(6)
    for peer in (a, c):
        peer.collective("all_reduce", 40, open=True)
    frame = {"file": str(stage.script), "line": 22, "function": "__getitem__", "text": ""}
    b.event("raised", type="ValueError", message="bad checksum", user_frame=frame, t_raised=b.t)
    b.collective("barrier", 60, open=True)
    finding = stage.first(after=0.5)
    assert (finding.code, finding.ranks) == ("MC302", [1]) and stage.line(finding) == 22
    assert "bad checksum" in finding.evidence[0]


def test_an_exception_that_is_only_on_its_way_is_not_swallowed(stage):
    a, b = stage.ranks(2)
    stage.train(6)
    b.event("raised", type="ValueError", message="bad", user_frame=None, t_raised=b.t)
    a.collective("all_reduce", 40, open=True)
    assert [f.code for f in stage.findings(after=0.5)] == []


def test_an_abort_in_a_gather_of_other_sizes_comes_from_the_gather(stage):
    """gloo aborts the rank that receives the wrong size; C++ came back from both calls as soon as they were issued."""
    a, b = stage.ranks(2)
    for _ in range(6):
        for actor in (a, b):
            forward = actor.begin("forward", 30)
            actor.collective("all_gather", 30, shape=(64,), native=True)
            actor.end(forward, "forward")
            actor.recorder.steps += 1
    b.begin("forward", 30)
    a.collective("all_gather", 25, shape=(16,), native=True)
    b.collective("all_gather", 30, shape=(64,), native=True)
    a.exits(None, signal=6)
    finding = stage.first(after=0.5)
    assert (finding.code, finding.ranks) == ("MC207", [0]) and stage.line(finding) == 25


def test_a_gather_that_one_rank_leaves_out_is_no_wrong_size(stage):
    """FSDP gathers the weights of each module; one rank does not run one of them."""
    a, b = stage.ranks(2)
    for step in range(7):
        for actor in (a, b):
            last = step == 6
            if not (last and actor is b):
                actor.collective("all_gather", 22, shape=(136,), open=last)
            if not (last and actor is a):
                actor.collective("all_gather", 23, shape=(34,), open=last)
            actor.recorder.steps += 1
    finding = stage.first(after=0.5)
    assert (finding.code, finding.ranks, finding.victims) == ("MC206", [1], [0]) and stage.line(finding) == 23
    assert any(f"all_gather of float32[136] at {stage.script}:22" in e for e in finding.evidence)


def test_an_extra_reduction_of_another_size_is_no_wrong_size(stage):
    stage.source("\n" * 24 + "if rank == 0:\n    work = dist.all_reduce(x)\n")
    a, b = stage.ranks(2)
    stage.train(6)
    a.collective("all_reduce", 26, shape=(3,), open=True)
    b.collective("all_reduce", 40, shape=(8,), open=True)
    finding = stage.first(after=0.5)
    assert (finding.code, finding.ranks, finding.victims) == ("MC207", [0], [1]) and stage.line(finding) == 26


def test_lists_of_objects_of_different_lengths(stage):
    a, b, c = stage.ranks(3)
    for actor, count in ((a, 2), (b, 1), (c, 2)):
        actor.begin("collective", 44, op="broadcast_object", group="default", collective_seq=1, shape=(count,), peer=0)
    finding = stage.first(after=0.5)
    assert (finding.code, finding.ranks, finding.victims) == ("MC202", [1], [0, 2]) and stage.line(finding) == 44
    assert finding.title == "rank 1 called broadcast_object with another number of objects than its peers"
    assert (finding.facts["shape"], finding.facts["peers_shape"], finding.tensor) == ([1], [2], None)


def reduces(actor, by, seq, *, detail=""):
    text = detail or (f"by {by}" if by != "sum" else "")
    span = actor.begin(
        "collective", 40, op="all_reduce", group="default", collective_seq=seq, shape=(8,), nbytes=32, detail=text
    )
    actor.end(span, "collective")


def test_different_reductions_are_found_although_nothing_hangs(stage):
    a, b = stage.ranks(2)
    for seq in range(1, 6):
        reduces(a, "sum", seq)
        reduces(b, "max" if seq == 4 else "sum", seq)
    finding = stage.first(after=0.5)
    assert (finding.code, finding.ranks, finding.victims) == ("MC223", [1], [0]) and stage.line(finding) == 40
    assert (finding.facts["reduction"], finding.facts["peers_reduction"]) == ("max", "sum")
    assert (finding.severity, finding.certainty) == ("error", "proven")


def test_a_first_call_that_names_the_members_says_nothing_of_its_reduction(stage):
    a, b = stage.ranks(2)
    reduces(a, "sum", 1, detail="ranks 0,1")
    reduces(b, "max", 1)
    assert stage.findings(after=0.5) == []


def test_threads_in_another_order_have_left_nothing_out(stage):
    a, b = stage.ranks(2)
    stage.train(6)
    a.collective("all_gather", 42, open=True)
    helper = threading.Thread(target=lambda: b.collective("broadcast", 43, open=True))
    helper.start()
    helper.join()
    finding = stage.first(after=0.5)
    assert (finding.code, finding.cause) == ("MC201", "threads")
    assert "a process group of its own" in finding.fix[0]


def test_a_skipped_call_of_ddp_is_explained_by_its_modules(stage):
    a, b = stage.ranks(2)
    for step in range(7):
        for actor in (a, b):
            last = step == 6
            if not (last and actor is b):
                actor.collective("all_reduce", 24, shape=(408,), native=True, open=last)
            if not (last and actor is a):
                actor.collective("all_reduce", 25, shape=(1,), open=last)
            actor.recorder.steps += 1
    finding = stage.first(after=0.5)
    assert (finding.code, finding.ranks) == ("MC206", [1])
    assert any("find_unused_parameters=True" in fix for fix in finding.fix)


def test_a_scatter_into_a_tensor_of_another_size_is_found_although_nothing_hangs(stage):
    a, b = stage.ranks(2)
    for step in range(6):
        a.collective("scatter", 44, shape=(4,), peer=0)
        b.collective("scatter", 44, shape=(8,) if step == 4 else (4,), peer=0)
    finding = stage.first(after=0.5)
    assert (finding.code, finding.ranks, finding.victims) == ("MC202", [1], [0]) and stage.line(finding) == 44
    assert any("the backend did not notice" in line for line in finding.evidence)


def held_by_a_barrier(stage, line_5):
    head = "def work():\n    while True:\n        try:\n            read()\n"
    stage.source(f"{head}{line_5}        finally:\n            log()\n            barrier()\n")
    a, b = stage.ranks(2)
    stage.train(6)
    frame = {"file": str(stage.script), "line": 4, "function": "work", "text": ""}
    b.event("raised", type="OSError", message="quota", frames=[frame], user_frame=frame, t_raised=b.t)
    a.collective("all_reduce", 40, open=True)
    b.collective("barrier", 8, open=True)
    return stage.first(after=0.5)


def test_an_exception_on_its_way_through_a_finally_is_not_swallowed(stage):
    finding = held_by_a_barrier(stage, "\n")
    assert (finding.code, finding.ranks, finding.victims) == ("MC301", [1], [0]) and stage.line(finding) == 4
    assert finding.title == "rank 1 raised OSError: quota" and "finally" in finding.fix[1]
    assert any(f"on its way out it waits for its peers at {stage.script}:8" in line for line in finding.evidence)


def test_an_exception_that_was_caught_before_the_finally_was_handled(stage):
    finding = held_by_a_barrier(stage, "        except OSError: pass\n")
    assert (finding.code, finding.ranks) == ("MC302", [1]) and "handled OSError" in finding.title


def test_a_barrier_that_a_rank_comes_to_early_is_not_explained_by_modules(stage):
    a, b = stage.ranks(2)
    for _ in range(6):
        for actor in (a, b):
            actor.collective("all_reduce", 24, shape=(68,), native=True)
            actor.recorder.steps += 1
    a.collective("all_reduce", 24, shape=(68,), native=True)
    b.collective("barrier", 30, open=True)
    finding = stage.first(after=0.5)
    assert (finding.code, finding.ranks) == ("MC206", [1])
    assert not any("find_unused_parameters" in fix for fix in finding.fix)
