"""Rules on numbers that are not finite: from what ranks wrote down to a finding with the guilty and the victims."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from staging import Stage

from model_check.diagnose import examine, render
from model_check.record import Finding, JsonlWriter, RunDir

EVENT: dict[str, Any] = {
    "step": 7,
    "loss": 2.5,
    "grad_norm": float("nan"),
    "direction": "backward",
    "module": "layers.3.gate",
    "op": "sqrt",
    "location": "train.py:12",
    "function": "forward",
    "tensor": "layers.3.gate.weight.grad",
    "ranges": [
        {
            "module": f"layers.{n}",
            "input": {"absmax": 2.0, "mean": 0.1, "finite": 1.0},
            "output": {"absmax": 5.0, "mean": 0.2, "finite": 0.5},
        }
        for n in range(5)
    ],
    "sample_ids": list(range(12)),
    "token_ids": [],
    "deterministic": True,
    "cause": "MC402",
    "evidence": ["observed: the loss is finite; the derivative of sqrt is infinity"],
    "local": True,
    "dump": ".checkpoints/debug/nan_debug_step_7.safetensors",
    "action": "halt",
}


def findings(folder: Path, events: dict[int, list[dict[str, Any]]], world_size: int = 4) -> list[Finding]:
    run_dir = RunDir.create(folder)
    for rank in range(world_size):
        writer = JsonlWriter(run_dir.events(rank))
        writer.write({"t": 10.0, "event": "group", "name": "default", "ranks": list(range(world_size))})
        for number, event in enumerate(events.get(rank, [])):
            writer.write({"t": 20.0 + number, "event": "nonfinite", "rank": rank, **event})
        writer.close()
    return examine(run_dir, live=False).findings


def test_a_guard_that_ended_itself_says_so(tmp_path: Path) -> None:
    failed = {"event": "guard_failed", "error": "TypeError: no such thing", "traceback": ""}
    (found,) = findings(tmp_path / "run", {1: [failed], 3: [failed, failed]})
    assert (found.code, found.ranks, found.victims, found.severity) == ("MC417", [1, 3], [], "warning")
    assert found.title == "the numbers of ranks 1 and 3 are no longer watched"
    assert found.evidence == ["observed: the guard ended itself after TypeError: no such thing"]


def test_the_rank_that_wrote_it_is_guilty_and_the_others_are_victims(tmp_path: Path) -> None:
    (found,) = findings(tmp_path / "run", {2: [EVENT]})
    assert (found.code, found.ranks, found.victims, found.step) == ("MC402", [2], [0, 1, 3], 7)
    assert (found.location, found.function, found.tensor) == ("train.py:12", "forward", EVENT["tensor"])
    assert (found.severity, found.certainty, found.phase) == ("error", "proven", "backward")
    assert found.title == "non-finite gradient in the backward pass only in layers.3.gate (sqrt) on rank 2"


def test_the_evidence_holds_ranges_samples_and_files(tmp_path: Path) -> None:
    (found,) = findings(tmp_path / "run", {0: [EVENT]})
    assert "observed: loss 2.5, gradient norm nan" in found.evidence
    before = [line for line in found.evidence if line.startswith("observed: before it, ")]
    assert len(before) == 3, "the nearest three"
    assert before[-1] == "observed: before it, layers.4: in max 2, mean 0.1; out max 5, mean 0.2, 50.0% finite"
    assert "observed: samples of the batch 0, 1, 2, 3, 4, 5, 6, 7 and 4 more" in found.evidence
    assert f"observed: tensors are in {EVENT['dump']}" in found.evidence


def test_the_same_cause_on_two_ranks_is_one_finding_and_another_line_is_another(tmp_path: Path) -> None:
    elsewhere = {**EVENT, "cause": "MC401", "location": "train.py:40", "step": 9}
    found = findings(tmp_path / "run", {1: [EVENT, elsewhere], 3: [EVENT]})
    assert [(f.code, f.ranks, f.step) for f in found] == [("MC402", [1, 3], 7), ("MC401", [1], 9)]


SPOILT = {
    **EVENT,
    "made_in": "weight",
    "step": 8,
    "cause": "MC401",
    "tensor": "parameter a.weight",
    "location": "train.py:30",
    "op": None,
}


def test_a_weight_that_another_step_has_spoilt_adds_nothing_to_that_step(tmp_path: Path) -> None:
    (found,) = findings(tmp_path / "run", {0: [EVENT], 1: [SPOILT]}, world_size=2)
    assert (found.code, found.ranks, found.victims, found.step) == ("MC402", [0], [1], 7)


def test_a_spoilt_weight_is_told_where_nobody_saw_the_step_that_spoilt_it(tmp_path: Path) -> None:
    both = {rank: [{**SPOILT, "local": False}] for rank in range(2)}
    (found,) = findings(tmp_path / "run", both, world_size=2)
    assert (found.code, found.ranks, found.victims, found.tensor) == ("MC401", [], [], "parameter a.weight")


def test_a_later_pass_of_the_same_step_meets_the_weights_that_an_earlier_one_has_spoilt(tmp_path: Path) -> None:
    (found,) = findings(tmp_path / "run", {0: [{**SPOILT, "step": 7}], 1: [EVENT]}, world_size=2)
    assert (found.code, found.ranks, found.victims, found.step) == ("MC402", [1], [0], 7)


RECEIVED = {"event": "nonfinite_received", "step": 3, "loss": 0.5, "location": "train.py:21", "action": "observe"}


def test_gradients_that_no_rank_owns_up_to_are_told_without_blame(tmp_path: Path) -> None:
    why = "its parameters are sharded: the other ranks would have to take part"
    both = {rank: [{**RECEIVED, "why_not": why}] for rank in range(2)}
    (found,) = findings(tmp_path / "run", both, world_size=2)
    assert (found.code, found.ranks, found.victims, found.step) == ("MC402", [], [], 3)
    assert (found.severity, found.location) == ("warning", "train.py:21")
    assert found.evidence == [
        "observed: ranks 0 and 1 had gradients that are not finite; rank 0's loss was 0.5",
        f"inferred: the operation is not known: {why}",
    ]


def test_a_rank_that_may_still_be_looking_is_waited_for(tmp_path: Path) -> None:
    assert findings(tmp_path / "run", {0: [RECEIVED]}, world_size=2)[0].code == "MC402"
    assert examine(RunDir(tmp_path / "run"), live=True, now=30.0).findings == []


def test_what_was_received_adds_nothing_to_the_rank_that_made_it(tmp_path: Path) -> None:
    (found,) = findings(tmp_path / "run", {0: [EVENT], 1: [{**RECEIVED, "step": 7}]}, world_size=2)
    assert (found.ranks, found.victims) == ([0], [1])


@pytest.mark.parametrize(
    ("first", "second", "guilty"),
    [
        ({"number": 3, "ranks": [0, 1], "spreads": True}, {"number": 5, "ranks": [0, 1], "spreads": False}, [0]),
        ({"number": 3, "ranks": [0, 1], "spreads": False}, {"number": 3, "ranks": [0, 1], "spreads": False}, [0, 1]),
        ({"number": 3, "ranks": [0, 2], "spreads": True}, {"number": 5, "ranks": [1, 3], "spreads": True}, [0, 1]),
        ({"number": 3, "ranks": [0, 1], "spreads": True}, None, [0]),
        ({"number": 3, "ranks": [0, 1], "spreads": False}, None, [0, 1]),
        ({"number": "3", "ranks": 7}, ["not", "an", "object"], [0, 1]),
    ],
)
def test_whoever_brought_a_bad_number_to_an_earlier_exchange_infected_its_peers(
    tmp_path: Path, first: Any, second: Any, guilty: list[int]
) -> None:
    seen = {**EVENT, "deterministic": None}
    events = {rank: [{**seen, "brought": brought}] for rank, brought in enumerate((first, second))}
    (found,) = findings(tmp_path / "run", events)
    assert (found.ranks, found.victims) == (guilty, [rank for rank in range(4) if rank not in guilty])


@pytest.mark.parametrize(
    ("clean", "mixed", "again", "guilty"),
    [(False, True, None, []), (True, True, None, [0]), (False, False, None, [0]), (False, True, True, [0])],
)
def test_nobody_is_blamed_for_what_a_peer_that_did_not_look_may_have_sent(
    tmp_path: Path, clean: bool, mixed: bool, again: bool | None, guilty: list[int]
) -> None:
    event = {**EVENT, "mixed": mixed, "deterministic": again}
    received = {**RECEIVED, "step": EVENT["step"], "clean": clean}
    (found,) = findings(tmp_path / "run", {0: [event], 1: [received]}, world_size=2)
    assert found.ranks == guilty
    assert any("may have sent it" in line for line in found.evidence) == (not guilty)


def test_a_rank_whose_own_pass_makes_it_again_is_guilty_whoever_was_first(tmp_path: Path) -> None:
    early, late = ({**EVENT, "brought": {"number": n, "ranks": [0, 1], "spreads": True}} for n in (1, 2))
    (found,) = findings(tmp_path / "run", {0: [early], 1: [late]}, world_size=2)
    assert found.ranks == [0, 1]


def test_what_was_skipped_is_a_warning_and_later_steps_are_counted(tmp_path: Path) -> None:
    again = [{**EVENT, "action": "skip", "step": step} for step in (7, 9, 11)]
    (found,) = findings(tmp_path / "run", {0: again})
    assert (found.severity, found.step) == ("warning", 7)
    assert "observed: again in 2 later steps, last 11" in found.evidence


def test_two_skipped_steps_are_all_there_were(tmp_path: Path) -> None:
    (found,) = findings(tmp_path / "run", {0: [{**EVENT, "action": "skip", "step": step} for step in (7, 9)]})
    assert not any("there may be more" in line for line in found.evidence)


def test_the_others_received_bad_gradients_and_wait_for_nobody(tmp_path: Path) -> None:
    findings(tmp_path / "run", {2: [{**EVENT, "action": "observe"}]})
    text = render(examine(RunDir(tmp_path / "run"), live=False), color=False)
    assert "= victims: ranks 0, 1 and 3 received its bad gradients" in text


def test_a_step_that_spoils_nothing_has_no_victims(tmp_path: Path) -> None:
    harmless = {**EVENT, "action": "observe", "spoils": False, "cause": "MC408", "direction": "forward"}
    (found,) = findings(tmp_path / "run", {1: [harmless]})
    assert (found.code, found.ranks, found.victims) == ("MC408", [1], [])


def test_a_transient_fault_is_only_suspected(tmp_path: Path) -> None:
    once = {**EVENT, "cause": "MC409", "deterministic": False, "op": None, "location": None, "module": None}
    (found,) = findings(tmp_path / "run", {3: [once]})
    assert (found.code, found.certainty, found.ranks, found.location) == ("MC409", "suspected", [3], None)


def test_a_rank_that_only_reports_for_the_job_is_not_guilty(tmp_path: Path) -> None:
    (found,) = findings(tmp_path / "run", {0: [{**EVENT, "local": False, "cause": "MC409", "deterministic": False}]})
    assert (found.ranks, found.victims) == ([], [])


def test_what_the_guard_found_explains_the_exception_that_ended_the_rank(tmp_path: Path) -> None:
    run_dir = RunDir.create(tmp_path / "run")
    for rank in range(2):
        writer = JsonlWriter(run_dir.events(rank))
        if rank == 1:
            writer.write({"t": 20.0, "event": "nonfinite", "rank": 1, **EVENT})
        error = {"type": "NumericsError", "message": "[MC402] step 7 has non-finite gradients", "frames": []}
        writer.write({"t": 21.0, "event": "exception", "thread": "MainThread", **error})
        writer.close()
    (found,) = examine(run_dir, live=False).findings
    assert (found.code, found.ranks, found.victims) == ("MC402", [1], [0])


STOPS = """def train(model, opt, batch, step):
    loss = model(batch).mean()
    if not math.isfinite(loss.item()):
        raise StopTraining(step)
    if step in wanted:
        sys.exit(1)
    opt.step()
"""
OBSERVED = {**EVENT, "action": "observe", "dump": None}
STOPPED = {**OBSERVED, "action": "stopped"}
LOOKED_FOR = {**STOPPED, "op": None, "location": "train.py:2", "deterministic": None, "preliminary": True}


def stopped(stage: Stage, *, at: int, record: dict[str, Any], line: int = 4, said: str = "StopTraining") -> Stage:
    """Rank 1 of two makes a bad number in step 7, and ends itself in step `at`, in a given line of its script."""
    stage.source(STOPS)
    zero, one = stage.ranks(2)
    stage.train(at)
    one.event("nonfinite", **record)
    one.span("forward", 2)
    one.fails(said, str(at), line)
    one.exits(1)
    zero.collective(open=True)
    zero.fails("RuntimeError", "Connection closed by peer [127.0.0.1]:9105", 6)
    zero.exits(1)
    return stage


@pytest.mark.parametrize("live", [True, False])
def test_a_script_that_stops_in_the_bad_step_has_seen_the_number(stage: Stage, live: bool) -> None:
    (found,) = stopped(stage, at=7, record=STOPPED).findings(live=live)
    assert (found.code, found.ranks, found.victims, found.step) == ("MC402", [1], [0], 7)
    assert (found.severity, found.certainty, found.location) == ("error", "proven", "train.py:12")
    where = {"location": f"{stage.script}:4", "function": "train"}
    lost = {"lost_peers": {"0": "RuntimeError: Connection closed by peer [127.0.0.1]:9105"}}
    assert found.facts["ended_by"] == {"ranks": [1], "exception": "StopTraining", "message": "7", **where, **lost}
    assert found.evidence[-1].startswith("observed: rank 0 then lost its peer: RuntimeError: Connection closed")
    text = render(stage.verdict(live=False), color=False)
    assert "= victims: rank 0 waits or failed because of it" in text


@pytest.mark.parametrize(
    ("record", "at", "line", "said", "codes"),
    [
        (OBSERVED, 8, 2, "KeyError", ["MC402"]),  # the weights that the step has spoilt are used
        (OBSERVED, 30, 2, "KeyError", ["MC301", "MC402"]),
        (OBSERVED, 30, 4, "KeyError", ["MC402"]),  # under a condition that asks for such a number
        (OBSERVED, 30, 2, "NotFiniteError", ["MC402"]),
        ({**OBSERVED, "spoils": False}, 7, 2, "KeyError", ["MC301", "MC402"]),
        ({**STOPPED, "spoils": False}, 7, 4, "KeyError", ["MC402"]),
        ({**OBSERVED, "action": "skip"}, 8, 2, "KeyError", ["MC301", "MC402"]),
        (STOPPED, 7, 2, "ModuleNotFoundError", ["MC310", "MC402"]),
    ],
)
def test_an_exception_of_its_own_stands_beside_the_number(
    stage: Stage, record: dict[str, Any], at: int, line: int, said: str, codes: list[str]
) -> None:
    found = stopped(stage, at=at, record=record, line=line, said=said).findings(live=False)
    assert [finding.code for finding in found] == codes
    assert [finding.severity for finding in found] == ["error", "warning"][: len(codes)]


def test_an_exit_of_all_ranks_follows_from_the_number_of_one(stage: Stage) -> None:
    stage.source(STOPS)
    ranks = stage.ranks(2)
    stage.train(7)
    ranks[1].event("nonfinite", **STOPPED)
    for rank in ranks:
        rank.span("forward", 2)
        rank.exits(3, via="sys.exit", line=6)
    (found,) = stage.findings(live=False)
    assert (found.code, found.ranks, found.victims, found.severity) == ("MC402", [1], [0], "error")
    where = {"location": f"{stage.script}:6", "function": "train"}
    assert found.facts["ended_by"] == {"ranks": [0, 1], "exit_code": 3, "via": "sys.exit", **where}
    assert stage.verdict(live=False).exit_code == 3


def test_a_rank_that_goes_on_after_all_has_not_stopped(stage: Stage) -> None:
    (lone,) = stage.ranks(1)
    stage.train(7)
    lone.event("nonfinite", **STOPPED)
    assert stage.findings(live=True, after=0.1) == [], "an exit may be caught"
    stage.train(1)
    lone.exits(0)
    assert stage.findings(live=False) == []


def test_what_a_rank_says_first_stands_until_it_knows_more(stage: Stage) -> None:
    (first,) = stopped(stage, at=7, record=LOOKED_FOR).findings(live=False)
    assert (first.code, first.ranks, first.location, first.certainty) == ("MC402", [1], "train.py:2", "observed")
    stage.actors[1].event("nonfinite", **STOPPED)
    (then,) = stage.findings(live=False)
    assert (then.ranks, then.location, then.certainty) == ([1], "train.py:12", "proven")


def test_a_rank_that_finds_itself_innocent_takes_it_back(stage: Stage) -> None:
    stopped(stage, at=7, record=LOOKED_FOR)
    stage.actors[1].event("nonfinite_received", step=7, loss=0.5, location="train.py:2", action="stopped", clean=True)
    (found,) = stage.findings(live=False)
    assert (found.code, found.ranks, found.severity) == ("MC402", [], "error")


def test_what_came_of_a_warning_is_added_to_it(stage: Stage) -> None:
    verdict = stopped(stage, at=7, record=OBSERVED).verdict(live=False)
    first, _ = render(verdict, told_before=lambda finding: True).split("\n\n")
    head, *since = first.split("\n")
    assert head.endswith("on rank 1 (as above)")
    assert since[0].startswith("  = observed: rank 1 then raised StopTraining: 7")
    assert since[1].startswith("  = observed: rank 0 then lost its peer: RuntimeError: Connection closed")


def test_the_dump_is_never_opened(tmp_path: Path) -> None:
    trap = tmp_path / "nan_debug_step_7.safetensors"
    trap.with_suffix(".pkl").write_bytes(b"cos\nsystem\n(S'touch opened'\ntR.")
    found = findings(tmp_path / "run", {0: [{**EVENT, "dump": str(trap)}]})
    assert str(trap) in " ".join(found[0].evidence)
    assert not Path("opened").exists()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None)
@given(changes=st.dictionaries(st.sampled_from([*EVENT, "fix"]), json_values, max_size=4))
def test_whatever_stands_in_an_event_the_rules_hold(
    tmp_path_factory: pytest.TempPathFactory, changes: dict[str, Any]
) -> None:
    run_dir = RunDir.create(tmp_path_factory.mktemp("any") / "run")
    writer = JsonlWriter(run_dir.events(0))
    writer.write({"t": 1.0, "event": "nonfinite", "rank": 0, **EVENT, **changes})
    writer.close()
    verdict = examine(run_dir, live=False)
    assert all(f.code.startswith("MC4") for f in verdict.findings)
    json.dumps([f.__dict__ for f in verdict.findings])
    render(verdict)
