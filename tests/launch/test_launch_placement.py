"""Which device a rank gets and how its lines are labelled."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from model_check.launch.gpus import Gpu, visible_gpus
from model_check.launch.placement import Hosts, Placement
from model_check.launch.ranks import threads_named_by
from model_check.record import RunDir
from model_check.record.rank_context import RankContext

_MACHINE = [Gpu(i, f"GPU-{i}", "H200", 100, 0, 0) for i in range(8)]
_HOST = socket.gethostname().split(".")[0]


def _described(
    visible: str | None, nproc: int, *, isolate: bool, hosts: int = 1
) -> list[tuple[RankContext, dict[str, str]]]:
    gpus = tuple(visible_gpus(_MACHINE, visible))
    placement = Placement(RunDir(Path("/run")), nproc, gpus, isolate, Hosts(hosts, "10.0.0.1:4000"), {"MINE": "1"})
    # Of torchelastic's objects the placement reads these numbers only.
    group: Any = SimpleNamespace(group_rank=0, master_addr="10.0.0.1", master_port=4000)
    workers = [SimpleNamespace(local_rank=i, global_rank=i, world_size=nproc * hosts) for i in range(nproc)]
    return [placement.describe(cast("Any", worker), group, 0) for worker in workers]


@pytest.mark.parametrize(
    ("visible", "nproc", "seen"),
    [
        (None, 2, [("GPU0", "cuda:0"), ("GPU1", "cuda:1")]),
        ("5,3", 2, [("GPU5", "cuda:0"), ("GPU3", "cuda:1")]),
        ("5,3", 1, [("GPU5", "cuda:0")]),
        ("6", 2, [("GPU6", "cuda:0"), ("GPU6", "cuda:0")]),
        ("5,3", 3, [("GPU5", "cuda:0"), ("GPU3", "cuda:1"), ("GPU5", "cuda:0")]),
        ("", 2, [("CPU0", "cpu"), ("CPU1", "cpu")]),
        ("-1", 1, [("CPU0", "cpu")]),
    ],
)
def test_ranks_that_see_every_gpu_take_them_in_turn(
    visible: str | None, nproc: int, seen: list[tuple[str, str]]
) -> None:
    described = _described(visible, nproc, isolate=False)
    assert [(context.label, context.device) for context, _ in described] == seen
    assert all("CUDA_VISIBLE_DEVICES" not in env and env["MINE"] == "1" for _, env in described)


def test_an_isolated_rank_sees_its_own_gpu_by_its_uuid() -> None:
    described = _described("5,3", 2, isolate=True)
    assert [(c.label, c.device, env["CUDA_VISIBLE_DEVICES"]) for c, env in described] == [
        ("GPU5", "cuda:0", "GPU-5"),
        ("GPU3", "cuda:0", "GPU-3"),
    ]


def test_the_host_stands_in_front_where_there_are_several() -> None:
    assert [context.label for context, _ in _described("5", 1, isolate=False, hosts=2)] == [f"{_HOST}:GPU5"]
    assert [context.label for context, _ in _described("", 1, isolate=False, hosts=2)] == [f"{_HOST}:CPU0"]


@pytest.mark.parametrize(
    ("text", "threads"), [("4", 4), ("8,4,2", 8), (" 3 ,1", 3), ("0", 1), ("", 1), ("abc", 1), ("-2", 1), ("²", 1)]
)
def test_every_form_of_omp_num_threads(text: str, threads: int) -> None:
    assert threads_named_by(text) == threads
