"""CommunicationProfiler and the trace summary on a real device: NCCL's own durations, kernels by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from model_check import CommunicationProfiler
from tests.conftest import Shell

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_nccl_calls_are_timed_by_the_device(tmp_path: Path) -> None:
    import torch.distributed as dist

    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=torch.device("cuda:0"))
    try:
        tensor = torch.ones(1 << 20, device="cuda")
        with CommunicationProfiler(enabled=True) as profiler:
            for _ in range(10):
                dist.all_reduce(tensor)
            torch.cuda.synchronize()
            reduced = profiler.get_stats().collectives["all_reduce"]
        assert (reduced.count, reduced.bytes) == (10, 10 * tensor.nbytes)
        assert reduced.untimed == 0 and reduced.seconds > 0 and reduced.overlap is None
        with CommunicationProfiler(enabled=True) as profiler:
            for work in [dist.all_reduce(tensor, async_op=True) for _ in range(10)]:
                work.wait()
            torch.cuda.synchronize()
            queued = profiler.get_stats().collectives["all_reduce"]
        assert (queued.count, queued.bytes) == (10, 10 * tensor.nbytes)
        assert queued.untimed == 1, "timing is switched on at the first call, for those after it"
        assert queued.seconds > 0
    finally:
        dist.destroy_process_group()


def test_a_profiled_run_is_explained_by_its_kernels(shell: Shell) -> None:
    done = shell.train("--max-steps", "8", "--nproc", "1", "--profile")
    assert done.code == 0, done.err
    summary = json.loads((done.run_dir / "profile" / "rank0.summary.json").read_text())
    assert summary["shares"]["GEMM"] > 0
    assert sum(summary["shares"].values()) == pytest.approx(1)
    assert "the first thing to change is" in done.out
