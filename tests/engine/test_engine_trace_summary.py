"""A trace in words: every instant is given to one thing, and the largest that can be changed is named."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model_check.engine.trace_summary import DATA_WAIT, summarize

RECORDED = Path(__file__).parent / "recorded_cpu_trace.json"


def event(cat: str, name: str, ts: float, dur: float, tid: int = 1) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid}


def step(number: int, ts: float, dur: float) -> dict[str, Any]:
    return event("user_annotation", f"ProfilerStep#{number}", ts, dur)


GPU_STEP = [
    step(3, 0, 1000),
    event("kernel", "nvjet_tst_256x128_64x4_2x1_v_bz_coopA_NNT", 0, 410, tid=7),
    event("kernel", "cudnn_generated_fort_native_sdpa_sm90_flash_fprop", 410, 180, tid=7),
    event("kernel", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 300, 380, tid=20),  # the first 290 are hidden
    event("user_annotation", DATA_WAIT, 680, 60),
    event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 700, 10, tid=9),
    event("kernel", "multi_tensor_apply_kernel<FusedAdamMathFunctor>", 740, 100, tid=7),
    event("kernel", "triton_poi_fused_silu_mul_3", 840, 60, tid=7),
]


def test_a_gpu_step_in_words() -> None:
    summary = summarize(GPU_STEP)
    assert summary is not None
    assert {what: round(share, 3) for what, share in summary.shares.items()} == {
        "GEMM": 0.41,
        "attention": 0.18,
        "idle": 0.1,
        "optimizer": 0.1,
        "exposed all-reduce": 0.09,
        "other": 0.06,
        "waiting for data": 0.05,
        "copies": 0.01,
    }
    assert summary.communication_share == pytest.approx(0.38)
    assert summary.communication_hidden == pytest.approx(1 - 90 / 380)
    assert summary.words().startswith("41 % GEMM, 18 % attention, 10 % ")
    assert "9 % exposed all-reduce" in summary.words()
    assert (summary.steps, summary.seconds) == (1, 0.001)


@pytest.mark.parametrize(
    ("extra", "advice"),
    [
        (event("user_annotation", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 500, 400), "num_work"),
        (event("kernel", "ncclDevKernel_ReduceScatter_Sum_f32", 500, 400, tid=20), "the reduce-scatter that nothing"),
        (event("kernel", "ncclDevKernel_SendRecv", 500, 400, tid=20), "the send/receive that nothing hides"),
        (event("kernel", "void at::native::vectorized_elementwise_kernel", 500, 400, tid=7), "small operations"),
        (event("kernel", "adamw_fused", 500, 400, tid=7), "grad_accum_nums"),
        (event("kernel", "sm90_xmma_gemm_bf16", 500, 480, tid=7), "nothing stands out"),
        (event("kernel", "sm90_xmma_gemm_bf16", 500, 10, tid=7), "the host does not keep up"),
    ],
)
def test_the_first_thing_to_change(extra: dict[str, Any], advice: str) -> None:
    summary = summarize([step(1, 0, 1000), event("kernel", "cutlass_gemm", 0, 500, tid=7), extra])
    assert summary is not None and advice in summary.words()


def test_a_trace_without_a_step_says_nothing() -> None:
    assert summarize([event("kernel", "gemm", 0, 5), {"ph": "M", "name": "process_name"}]) is None


def recorded() -> list[dict[str, Any]]:
    return [event(cat, name, ts, dur, tid) for cat, name, tid, ts, dur in json.loads(RECORDED.read_text())]


def by_looking_at_instants(events: list[dict[str, Any]], instants: int) -> Counter[str]:
    """The same question asked the slow way: who is innermost on the main thread at each of many moments?"""
    (whole,) = [e for e in events if e["name"].startswith("ProfilerStep#")]
    seen: Counter[str] = Counter()
    for n in range(instants):
        t = whole["ts"] + (n + 0.5) * whole["dur"] / instants
        now = [e for e in events if e["ts"] <= t < e["ts"] + e["dur"]]
        ops = [e for e in now if e["cat"] == "cpu_op" and e["tid"] == whole["tid"] and "c10d::" not in e["name"]]
        if not ops:
            gloo = any("gloo:" in e["name"] or "c10d::" in e["name"] for e in now)
            seen["exposed all-reduce" if gloo else "nothing"] += 1
            continue
        inner = max(ops, key=lambda e: (e["ts"], -e["dur"]))["name"]
        if any(e["name"].startswith("Optimizer.step") for e in now):
            seen["optimizer"] += 1
        elif inner in ("aten::mm", "aten::addmm", "aten::bmm", "aten::linear", "aten::matmul"):
            seen["GEMM"] += 1
        elif "scaled_dot_product" in inner or "flash" in inner.lower():
            seen["attention"] += 1
        else:
            seen["rest"] += 1
    return seen


def test_a_recorded_step_of_two_cpu_ranks() -> None:
    events = recorded()
    summary = summarize(events)
    assert summary is not None and sum(summary.shares.values()) == pytest.approx(1)
    instants = 4000
    slow_way = by_looking_at_instants(events, instants)
    for what in ("GEMM", "attention", "exposed all-reduce"):
        assert summary.shares[what] == pytest.approx(slow_way[what] / instants, abs=0.01), what
    assert summary.shares["GEMM"] > 0.15 and summary.shares["exposed all-reduce"] > 0.02
    assert summary.communication_hidden is not None and 0 < summary.communication_hidden < 1


_NAMES = st.sampled_from(
    ["gemm", "flash", "ncclDevKernel_AllGather", "x", "Memcpy", DATA_WAIT, "aten::mm", "gloo:recv"]
)
_CATS = st.sampled_from(["kernel", "gpu_memcpy", "cpu_op", "user_annotation"])
_TIMES = st.integers(0, 300)


@settings(deadline=None)
@given(st.lists(st.builds(event, _CATS, _NAMES, _TIMES, _TIMES, st.integers(1, 3)), max_size=12))
def test_shares_always_add_up(events: list[dict[str, Any]]) -> None:
    summary = summarize([step(1, 50, 200), *events])
    assert summary is not None
    assert sum(summary.shares.values()) == pytest.approx(1)
    assert all(0 < share <= 1 + 1e-9 for share in summary.shares.values())
    assert summary.communication_hidden is None or -1e-9 <= summary.communication_hidden <= 1 + 1e-9
