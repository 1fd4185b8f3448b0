"""The environment that torchrun and srun leave, read as a rank."""

from __future__ import annotations

import pickle
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_check.errors import UsageError
from model_check.launch.gpus import Gpu
from model_check.record.rank_context import RankContext, first_host, foreign_launcher

HOST = socket.gethostname().split(".")[0]
GPUS = [Gpu(i, f"GPU-{i}", "H200", 100, 0, 0) for i in (4, 6)]
TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "4000",
    "TORCHELASTIC_RESTART_COUNT": "2",
}
SRUN = {
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "123456",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "6",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4,2",
    "SLURM_STEP_NODELIST": "gpu[03-04]",
}


def test_torchrun() -> None:
    context = RankContext.from_environment(TORCHRUN, run_dir=Path("/run"), gpus=GPUS)
    assert context == RankContext(3, 1, 4, 2, 1, "cuda:1", 6, f"{HOST}:GPU6", Path("/run"), 2, "10.0.0.1", 4000)
    assert pickle.loads(pickle.dumps(context)) == context


def test_torch_distributed_launch_on_one_host_without_gpus() -> None:
    environ = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
    context = RankContext.from_environment(environ, run_dir=Path("/run"))
    assert (context.label, context.device, context.local_world_size, context.node_rank) == ("CPU1", "cpu", 2, 0)


def test_srun() -> None:
    context = RankContext.from_environment(SRUN, run_dir=Path("/run"), gpus=GPUS)
    assert (context.rank, context.world_size, context.local_rank, context.local_world_size) == (5, 6, 1, 2)
    assert (context.node_rank, context.master_addr, context.device) == (1, "gpu03", "cuda:1")
    other = RankContext.from_environment({**SRUN, "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, run_dir=Path("/run"))
    assert other.master_port == context.master_port == 20000 + 123456 % 12000


def test_a_rank_that_is_shown_one_gpu_uses_it_whatever_its_local_rank() -> None:
    context = RankContext.from_environment(SRUN, run_dir=Path("/run"), gpus=GPUS[1:])
    assert (context.device, context.physical_gpu) == ("cuda:0", 6)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"RANK": "x"}, "RANK=x is not a number"),
        ({"RANK": "4"}, "RANK=4 is not below WORLD_SIZE=4"),
        ({"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "3"}, "local rank 2 needs a GPU of its own and 2 are visible"),
    ],
)
def test_a_wrong_environment_is_a_usage_error(changes: dict[str, str], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        RankContext.from_environment({**TORCHRUN, **changes}, run_dir=Path("/run"), gpus=GPUS)


def test_a_plain_process_and_a_batch_script_are_no_ranks() -> None:
    assert foreign_launcher({}) is None
    assert foreign_launcher({"SLURM_PROCID": "0", "SLURM_JOB_ID": "1"}) is None
    assert foreign_launcher(TORCHRUN) == "torchrun" and foreign_launcher(SRUN) == "slurm"
    with pytest.raises(UsageError, match="RANK and WORLD_SIZE are not in the environment"):
        RankContext.from_environment({}, run_dir=Path("/run"))


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [("n1", "n1"), ("n1,n2", "n1"), ("gpu[03-05,9],x", "gpu03"), ("a-b[7]-ib", "a-b7-ib"), ("r[1,3]", "r1")],
)
def test_first_host(nodelist: str, host: str) -> None:
    assert first_host(nodelist) == host


@given(st.text(max_size=20))
def test_first_host_of_any_text_is_a_name_or_a_usage_error(text: str) -> None:
    try:
        host = first_host(text)
    except UsageError:
        return
    assert "," not in host and "[" not in host
