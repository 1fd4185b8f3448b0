"""Ranks that join, or make their groups, on different terms."""

from __future__ import annotations


def asks_for(actor, world_size):
    actor.event("joining", world_size=world_size)
    actor.begin("init", 7, op="new_group", detail="init_process_group")


def makes(actor, members, line, *, open=False):
    span = actor.begin("init", line, op="new_group", detail=members)
    if not open:
        actor.end(span, "init")


def test_ranks_that_were_told_of_worlds_of_different_sizes(stage):
    for actor, size in zip(stage.ranks(3, join=False), (3, 4, 3), strict=True):
        asks_for(actor, size)
    stage.stall()
    finding = stage.first()
    assert (finding.code, finding.ranks, finding.victims) == ("MC106", [1], [0, 2])
    assert (finding.severity, finding.certainty) == ("error", "proven") and stage.line(finding) == 7
    assert "ranks 0 and 2: 3; rank 1: 4" in finding.evidence[0]
    assert "ranks 0-2 wait in init_process_group" in " ".join(finding.evidence)


def test_two_ranks_told_of_different_worlds_are_both_named(stage):
    for actor, size in zip(stage.ranks(2, join=False), (2, 3), strict=True):
        asks_for(actor, size)
    stage.stall()
    finding = stage.first()
    assert (finding.code, finding.ranks, finding.victims) == ("MC106", [0, 1], [])


def test_ranks_that_meet_in_one_world_are_only_slow(stage):
    for actor in stage.ranks(2, join=False):
        asks_for(actor, 2)
    stage.stall()
    assert stage.first().code == "MC220"


def test_a_smaller_world_that_some_ranks_join_later_is_no_other_size(stage):
    actors = stage.ranks(4)
    for actor in actors:
        actor.event("joining", world_size=4)
    stage.train(6)
    asks_for(actors[0], 2)
    stage.stall()
    assert "MC106" not in [finding.code for finding in stage.findings()]


def test_groups_are_numbered_only_as_far_as_every_record_is_there(stage):
    a, b = stage.ranks(2)
    for actor in (a, b):
        for number in range(300):
            makes(actor, f"ranks {number}", 14)
            for _ in range(9 if actor is a else 8):
                actor.end(actor.begin("data", 20), "data")
    a.collective("all_reduce", 40, open=True)
    stage.stall()
    assert "MC201" not in [finding.code for finding in stage.findings()]


def test_groups_made_in_another_order(stage):
    a, b, c, d = stage.ranks(4)
    for actor in (a, b, d):
        makes(actor, "ranks 0,1", 14, open=actor is a)
        makes(actor, "ranks 2,3", 15) if actor is not a else None
    makes(c, "ranks 2,3", 17)
    for actor in (b, c, d):
        actor.collective("all_reduce", 40, group="ranks 0,1" if actor is b else "ranks 2,3", open=True)
    stage.stall()
    finding = stage.first()
    assert (finding.code, finding.ranks, finding.victims) == ("MC201", [2], [0, 1, 3])
    assert (finding.severity, finding.certainty) == ("error", "proven") and stage.line(finding) == 17
    assert (finding.cause, finding.facts["groups"]["2"]) == ("groups", "ranks 2,3")
    assert {finding.facts["groups"][rank] for rank in ("0", "1", "3")} == {"ranks 0,1"}


def test_groups_in_another_order_without_a_majority_blame_nobody(stage):
    a, b = stage.ranks(2)
    makes(a, "ranks 0", 14, open=True)
    makes(b, "ranks 1", 15)
    b.collective("all_reduce", 40, open=True)
    stage.stall()
    finding = stage.first()
    assert (finding.code, finding.ranks, finding.victims) == ("MC201", [0, 1], [])
    assert any("none is blamed" in line for line in finding.evidence)


def test_groups_that_their_members_make_alone_have_no_common_order(stage):
    a, b = stage.ranks(2)
    stage.train(6)
    makes(a, "ranks 0, members only", 14)
    makes(b, "ranks 1, members only", 15)
    a.collective("all_reduce", 40, open=True)
    stage.stall()
    assert stage.first().code == "MC219"


def test_a_rank_that_met_the_wrong_members_and_left_is_no_cause(stage):
    """Ranks 1 and 2 are both the second of group 1: rank 0 met rank 2, did its work and left with the store."""
    a, b, c = stage.ranks(3)
    for actor in (a, b):
        makes(actor, "ranks 0,1", 14)
    makes(c, "ranks 1,2", 14)
    for _ in range(5):
        a.collective("all_reduce", 20, group="ranks 0,1")
    b.fails("DistNetworkError", "Failed to recv, got 0 bytes. Connection was likely closed.", 14)
    a.exits(0)
    b.exits(1)
    finding = stage.first()
    assert (finding.code, finding.ranks, finding.victims) == ("MC201", [2], [0, 1])
    assert (finding.severity, finding.certainty) == ("error", "proven") and stage.line(finding) == 14
    assert any("rank 0 exited with code 0" in line for line in finding.evidence)


def test_a_rank_that_left_after_all_had_met_is_the_cause_whatever_the_order(stage):
    a, b = stage.ranks(2)
    makes(a, "ranks 0", 14)
    makes(b, "ranks 1", 15)
    for actor in (a, b):
        actor.collective("all_reduce", 20)
    b.fails("DistNetworkError", "Failed to recv, got 0 bytes. Connection was likely closed.", 40)
    a.exits(0)
    b.exits(1)
    assert "MC201" not in [finding.code for finding in stage.findings() if finding.severity == "error"]


def test_groups_of_one_that_all_got_past_accuse_nobody(stage):
    """Each rank makes one of its own, in no order, which waits for nobody; then one leaves before the common one."""
    a, b = stage.ranks(2)
    makes(a, "ranks 0", 14)
    makes(b, "ranks 1", 14)
    makes(b, "ranks 0,1", 16)
    b.fails("DistNetworkError", "Failed to recv, got 0 bytes. Connection was likely closed.", 16)
    a.exits(0)
    b.exits(1)
    assert "MC201" not in [finding.code for finding in stage.findings() if finding.severity == "error"]
    assert stage.first().ranks == [0]
