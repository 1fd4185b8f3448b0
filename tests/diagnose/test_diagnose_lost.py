"""Faults that cannot be planted on one healthy host: a peer on another one, a kill by the kernel, a lost device."""

from __future__ import annotations

import signal

import pytest

GLOO = "[/x/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.7]:31722"


def test_a_peer_on_another_host_is_lost_and_nobody_here_is_blamed(stage):
    a, b = stage.ranks(2)
    stage.train(4)
    for actor in (a, b):
        actor.collective(raised="RuntimeError")
        actor.fails("RuntimeError", GLOO, 40)
        actor.exits(1)
    verdict = stage.verdict(live=False)
    finding = verdict.findings[0]
    assert (finding.code, finding.ranks, finding.victims) == ("MC217", [], [0, 1])
    assert (finding.certainty, verdict.outcome, verdict.exit_code) == ("suspected", "failed", 1)
    assert stage.line(finding) == 40 and any("10.0.0.7" in e for e in finding.evidence)
    assert any("other hosts" in fix for fix in finding.fix)


def test_a_rank_that_is_gone_without_a_code_is_what_its_peer_waits_for(stage):
    a, b = stage.ranks(2)
    stage.train(4)
    a.collective(open=True)
    b.exits(None)
    finding = stage.first(after=0.5)
    assert (finding.code, finding.ranks, finding.victims) == ("MC217", [1], [0])
    assert any("rank 1 is gone" in e for e in finding.evidence)


def test_a_kill_by_the_kernel_is_told_with_its_words_the_memory_and_the_last_recorded_line(stage):
    a, b = stage.ranks(2)
    stage.train(4)
    b.sample(b.t, rss=2 << 30)
    b.sample(b.t + 0.1, rss=61 << 30)
    stage.say("oom", b.t, source="kernel", pid=b.pid, detail=f"Out of memory: Killed process {b.pid} (python)")
    b.exits(None, signal=signal.SIGKILL)
    a.t = b.t
    a.fails("RuntimeError", GLOO, 40)
    verdict = stage.verdict(after=0.1)
    finding = verdict.findings[0]
    assert (finding.code, finding.ranks, finding.victims) == ("MC304", [1], [0])
    said = " ".join(finding.evidence)
    assert f"Out of memory: Killed process {b.pid}" in said and "61.00 GiB at its highest" in said
    assert f"last recorded line is {finding.location}" in said and stage.line(finding) == 45


@pytest.mark.parametrize(
    "message",
    [
        "CUDA error: uncorrectable ECC error encountered",
        "CUDA error: unspecified launch failure",
        "NCCL error: unhandled system error: GPU is lost",
    ],
)
def test_a_device_that_failed_is_named_with_its_rank_and_line(stage, message):
    a, b = stage.ranks(2)
    stage.train(4)
    b.fails("RuntimeError", message, 30)
    a.collective(open=True)
    finding = stage.first(after=0.1)
    assert (finding.code, finding.ranks, finding.victims) == ("MC312", [1], [0])
    assert stage.line(finding) == 30 and message in finding.evidence[0]


@pytest.mark.parametrize(
    "message",
    [
        "Torch not compiled with CUDA enabled",
        "module 'torch._C' has no attribute '_cuda_setDevice'",
        "No CUDA GPUs are available",
    ],
)
def test_a_gpu_that_is_not_there_is_named_with_its_rank_and_line(stage, message):
    a, b = stage.ranks(2)
    b.fails("RuntimeError", message, 12)
    finding = stage.first(after=0.1)
    assert (finding.code, finding.ranks) == ("MC104", [1]) and stage.line(finding) == 12 and a.rank == 0


def test_the_rank_that_a_timed_out_one_waited_for_is_named_not_the_one_that_gave_up(stage):
    stage.source("\n" * 60)
    a, b = stage.ranks(2)
    stage.train(4)
    a.collective(seconds=4.0, raised="RuntimeError")
    a.fails("RuntimeError", "[/x/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 4000ms for recv", 40)
    b.stack(a.t, 1, b.thread(("", 50, "read_shards")))
    finding = stage.first(after=0.1)
    assert (finding.code, finding.ranks, finding.victims, finding.severity) == ("MC219", [1], [0], "error")
    assert stage.line(finding) == 50 and finding.evidence[0].startswith("observed: rank 0 gave up in all_reduce")
    assert not any("can go on" in e for e in finding.evidence)
