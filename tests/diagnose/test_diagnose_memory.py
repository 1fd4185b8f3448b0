"""Memory that ran out: what was asked for, who holds it, shortage told from fragmentation, and the change that fits."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model_check.diagnose.evidence import RankEvidence
from model_check.diagnose.memory import is_fragmented, memory_account, memory_facts, memory_fixes
from model_check.record import write_json_atomic
from model_check.record.events import read_event
from model_check.record.run_plan import RunPlan
from model_check.record.typed import from_json

GIB = 1 << 30
MESSAGE = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.72 GiB of which 1.25 GiB is "
    "free. Process 4 has 138.4 GiB memory in use. Of the allocated memory 137.00 GiB is allocated by PyTorch, and "
    "512.00 MiB is reserved by PyTorch but unallocated."
)


def record(**changes: Any) -> dict[str, Any]:
    return {
        "device": "cuda:0",
        "requested": 2 * GIB,
        "total": 140 * GIB,
        "free": 1 * GIB,
        "allocated": 137 * GIB,
        "free_in_pieces": GIB // 2,
        "largest_piece": GIB // 4,
        "categories": {"parameters": 15 * GIB, "optimizer": 60 * GIB, "activations and temporaries": 62 * GIB},
        "largest": [
            {"bytes": 56 * GIB, "count": 128, "category": "activations and temporaries", "name": "", "line": "net.py:7"}
        ],
        "snapshot": "dumps/oom-rank-1.pickle",
        **changes,
    }


def failed(stage: Any, error: str = "OutOfMemoryError", message: str = MESSAGE, **changes: Any) -> Any:
    a, b = stage.ranks(2)
    for actor in (a, b):
        actor.step()
    b.event("out_of_memory", **record(**changes))
    b.fails(error, message, 36)
    b.exits(1)
    a.collective("all_reduce", 40, open=True)
    return stage.first(after=0.1)


def test_a_shortage_names_the_request_the_holders_and_their_lines(stage: Any) -> None:
    finding = failed(stage)
    assert (finding.code, finding.ranks, finding.victims) == ("MC501", [1], [0])
    assert stage.line(finding) == 36
    said = "\n".join(finding.evidence)
    numbers = {name: finding.facts[name] // GIB for name in ("requested", "free", "total", "allocated")}
    assert numbers == {"requested": 2, "free": 1, "total": 140, "allocated": 137}
    assert finding.facts["held"] == record()["categories"] and "rss" not in finding.facts
    assert "it asked for 2.00 GiB with 1.00 GiB free of 140.00 GiB" in said
    assert "in use activations and temporaries 62.00 GiB, optimizer 60.00 GiB, parameters 15.00 GiB" in said
    assert "128 × 448 MiB of activations and temporaries made at net.py:7" in said
    assert "dumps/oom-rank-1.pickle opens in PyTorch's memory viewer" in said
    assert "halve the batch" in finding.fix[0]


def test_what_is_free_in_pieces_only_is_fragmentation(stage: Any) -> None:
    finding = failed(stage, free_in_pieces=20 * GIB)
    assert (finding.code, finding.ranks) == ("MC502", [1])
    assert any("20.00 GiB are free inside the allocator in pieces, the largest 256 MiB" in e for e in finding.evidence)
    assert "expandable_segments" in finding.fix[0]


@pytest.mark.parametrize("pieces", [1 * GIB, 3 * GIB, 13 * GIB])
def test_a_little_in_pieces_is_no_fragmentation(stage: Any, pieces: int) -> None:
    assert failed(stage, free_in_pieces=pieces).code == "MC501"


def test_states_that_take_most_are_not_cured_by_a_smaller_batch(stage: Any) -> None:
    finding = failed(stage, categories={"optimizer": 100 * GIB, "activations and temporaries": 5 * GIB})
    assert finding.fix[0].startswith("optimizer take most: share them among ranks (FSDP)")


def test_the_plan_of_the_run_gives_the_smallest_change_that_is_enough(stage: Any) -> None:
    remedies = [
        {"flags": "--set training.fused_loss=auto", "saves_gib": 0.5},
        {"flags": "--set training.batch_size=2", "saves_gib": 17.25},
        {"flags": "--set parallel.activation_checkpointing=full", "saves_gib": 31.0},
    ]
    plan = {"memory": {"peak_gib": 126.6, "peak_moment": "loss"}, "remedies": remedies}
    write_json_atomic(stage.run_dir.plan, plan)
    finding = failed(stage)
    assert finding.fix == [
        "add --set training.batch_size=2 (saves about 17.2 GiB)",
        "add --set parallel.activation_checkpointing=full (saves about 31.0 GiB)",
    ]
    assert "inferred: the plan expected 126.6 GiB at its peak, in the loss" in finding.evidence


def test_host_memory_has_the_hosts_numbers(stage: Any) -> None:
    limits = {"total": 64 * GIB, "available": 3 * GIB, "address_space": 8 * GIB, "cgroup": None}
    finding = failed(
        stage,
        "RuntimeError",
        "DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes",
        device="cpu",
        requested=6 * GIB,
        total=None,
        free=None,
        limits=limits,
    )
    assert (finding.code, finding.ranks) == ("MC307", [1])
    said = "\n".join(finding.evidence)
    assert "it asked for 6.00 GiB\n" in said
    assert finding.fix[0].startswith("activations take most")
    assert "the host has 3.00 GiB of 64.00 GiB left; its address space is limited to 8.00 GiB" in said


HOST = {"total": None, "free": None, "allocated": None, "free_in_pieces": 0, "snapshot": "", "device": "cpu"}
HOST_LIMITS = {"total": 64 * GIB, "available": 60 * GIB, "address_space": 3 * GIB, "cgroup": None}
HOST_MESSAGE = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 268435456 bytes"


def test_a_list_that_fills_the_host_is_not_blamed_on_the_parameters(stage: Any) -> None:
    """Of 2.3 GiB the model has 16 KiB: sharing that among ranks would cure nothing."""
    write_json_atomic(
        stage.run_dir.plan, {"remedies": [{"flags": "--set training.batch_size=1", "saves_gib": 9.0}], "memory": {}}
    )
    weight = {"bytes": 16 << 10, "count": 1, "category": "parameters", "name": "weight", "line": ""}
    finding = failed(
        stage,
        "RuntimeError",
        HOST_MESSAGE,
        **HOST,
        requested=GIB // 4,
        rss=int(2.3 * GIB),
        categories={"parameters": 16 << 10},
        largest=[weight],
        limits=HOST_LIMITS,
    )
    assert (finding.code, stage.line(finding)) == ("MC307", 36)
    said = "\n".join(finding.evidence)
    assert "in use everything else 2.30 GiB, parameters 0 MiB" in said and "of parameters (weight)" not in said
    assert finding.fix[0].startswith("look for lists that keep tensors")
    assert not any("FSDP" in line or "batch_size" in line for line in finding.fix)


UNWATCHED = {
    **dict.fromkeys(("total", "free", "allocated", "largest_piece")),
    "free_in_pieces": None,
    "snapshot": None,
    "rss": GIB,
    "categories": {"parameters": 16 << 10},
    "largest": [{"bytes": 16 << 10, "count": 1, "category": "parameters", "name": "weight", "line": ""}],
    "limits": HOST_LIMITS,
}


def test_where_the_allocator_was_not_watched_the_message_has_the_sizes(stage: Any) -> None:
    """Raised in another process, or by a torch that lets nobody watch: host numbers say nothing about the device."""
    finding = failed(stage, **UNWATCHED)
    said = "\n".join(finding.evidence)
    assert finding.code == "MC501"
    assert "it asked for 2.00 GiB with 1.25 GiB free of 139.72 GiB" in said
    assert "in use everything else 137.00 GiB, parameters 0 MiB" in said
    assert "the host has" not in said and not any("parameters take most" in line for line in finding.fix)


def test_pieces_that_only_the_message_names_are_fragmentation(stage: Any) -> None:
    finding = failed(stage, message=MESSAGE.replace("512.00 MiB is reserved", "15.00 GiB is reserved"), **UNWATCHED)
    assert finding.code == "MC502" and "expandable_segments" in finding.fix[0]


def test_without_any_size_nothing_is_said_to_take_most(stage: Any) -> None:
    finding = failed(stage, message="CUDA out of memory.", **UNWATCHED)
    assert finding.code == "MC501" and finding.fix[0].startswith("halve the batch")


def test_one_tensor_larger_than_the_limit_of_a_rank_is_a_wrong_size(stage: Any) -> None:
    finding = failed(stage, "RuntimeError", HOST_MESSAGE, **HOST, requested=4 * GIB, limits=HOST_LIMITS)
    assert finding.fix == ["one allocation of 4.00 GiB is more than there is: the sizes on that line are wrong"]


def test_one_tensor_larger_than_the_device_is_a_wrong_size(stage: Any) -> None:
    finding = failed(stage, requested=900 * GIB)
    assert finding.fix == ["one allocation of 900.00 GiB is more than there is: the sizes on that line are wrong"]


def test_without_a_record_the_message_says_it() -> None:
    account = memory_account(RankEvidence(0), MESSAGE, on_device=True)
    assert (account.requested, account.total, account.free) == (2 * GIB, round(139.72 * GIB), round(1.25 * GIB))
    assert (account.allocated, account.free_in_pieces) == (137 * GIB, GIB // 2)
    assert not is_fragmented(account)


def test_a_message_of_fragmentation_is_told_apart() -> None:
    message = MESSAGE.replace("512.00 MiB is reserved", "21.00 GiB is reserved")
    assert is_fragmented(memory_account(RankEvidence(0), message, on_device=True))


def test_a_step_that_was_retried_is_a_warning_with_the_values_to_set(stage: Any) -> None:
    a, b = stage.ranks(2)
    for actor in (a, b):
        actor.event("oom_retry", micro_batch=2, micro_batches=4, was=4, message=MESSAGE)
        for _ in range(3):
            actor.step()
    finding = stage.first(after=0.1)
    assert (finding.code, finding.ranks, finding.severity) == ("MC504", [0, 1], "warning")
    assert finding.facts == {"micro_batch": 2, "micro_batches": 4}
    assert finding.fix == ["set training.batch_size=2 and training.grad_accum_nums=4: the retries then cost nothing"]


anything = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False) | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=4,
)
KEYS = st.sampled_from([*record(), "limits", "remedies", "memory"])


@settings(max_examples=40, deadline=None)
@given(body=st.dictionaries(KEYS, anything), plan=st.dictionaries(KEYS, anything), message=st.text(max_size=80))
def test_no_record_however_damaged_breaks_the_account(body: dict[str, Any], plan: dict[str, Any], message: str) -> None:
    rank = RankEvidence(0, told=(read_event({**body, "event": "out_of_memory"}),))
    planned = from_json(RunPlan, plan)
    for evidence, on_device in ((rank, True), (rank, False), (RankEvidence(0), True)):
        account = memory_account(evidence, message, on_device=on_device)
        assert all(isinstance(line, str) for line in memory_facts(account, planned) + memory_fixes(account, planned))
