"""GPU choice: the spec parser, CUDA_VISIBLE_DEVICES, and what is read from the driver."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_check.errors import UsageError
from model_check.launch.gpus import Gpu, choose_gpus, parse_gpu_ids, visible_gpus
from model_check.record.nvml import driver_versions, read_gpus


def _gpu(index: int, used: int = 0, load: int | None = 0) -> Gpu:
    return Gpu(index, f"GPU-{index}a-{index}", "H200", 100, used, load)


MACHINE = [_gpu(i) for i in range(8)]


@given(st.lists(st.integers(0, 9999), min_size=1, max_size=20, unique=True))
def test_a_list_of_ids_reads_back_in_order(ids: list[int]) -> None:
    assert parse_gpu_ids(",".join(map(str, ids))) == ids


@given(st.integers(0, 500), st.integers(0, 50))
def test_a_range_is_all_its_ids(first: int, more: int) -> None:
    assert parse_gpu_ids(f"{first}-{first + more}") == list(range(first, first + more + 1))


@given(st.text(max_size=12))
def test_any_text_gives_unique_ids_or_one_usage_error(text: str) -> None:
    try:
        ids = parse_gpu_ids(text)
    except UsageError as error:
        assert error.remedy
    else:
        assert ids and len(set(ids)) == len(ids) and all(i >= 0 for i in ids)


@pytest.mark.parametrize(
    ("spec", "nproc", "chosen"),
    [
        (None, None, [0, 1, 2, 3, 4, 5, 6, 7]),
        ("all", 2, [0, 1]),
        ("3", None, [3]),
        ("0,3", None, [0, 3]),
        ("3,0", 2, [3, 0]),
        ("0-3", None, [0, 1, 2, 3]),
        ("6-7,1", None, [6, 7, 1]),
    ],
)
def test_choice_by_spec(spec: str | None, nproc: int | None, chosen: list[int]) -> None:
    assert [gpu.index for gpu in choose_gpus(spec, nproc, MACHINE)] == chosen


def test_auto_takes_the_least_used_then_the_most_free() -> None:
    machine = [_gpu(0, used=10, load=50), _gpu(1, used=90, load=0), _gpu(2, used=20, load=0), _gpu(3, load=99)]
    assert [gpu.index for gpu in choose_gpus("auto", None, machine)] == [2]
    assert [gpu.index for gpu in choose_gpus("auto", 3, machine)] == [2, 1, 0]


@pytest.mark.parametrize(
    ("spec", "nproc", "says"),
    [
        ("8", None, "names 8, which this machine does not have; use 0, 1, 2, 3, 4, 5, 6, 7"),
        ("0,9,12", None, "names 9, 12"),
        ("3-1", None, "counts down in 3-1; write 1-3"),
        ("1,1", None, "names GPU 1 twice"),
        ("one", None, "cannot be read at 'one'"),
        ("all", 9, "--nproc 9 does not fit 8 GPUs"),
        ("0,1", 3, "--nproc 3 does not fit 2 GPUs (0, 1)"),
        ("all", 0, "--nproc 0 starts no rank"),
    ],
)
def test_a_wrong_choice_says_what_exists(spec: str, nproc: int | None, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        choose_gpus(spec, nproc, MACHINE)
    assert says in str(caught.value) and caught.value.exit_code == 2


def test_without_gpus_the_ranks_are_cpu_ranks_unless_a_gpu_was_named() -> None:
    assert choose_gpus(None, 4, []) == [] and choose_gpus("auto", None, []) == []
    with pytest.raises(UsageError, match="--gpus 0 asks for GPUs and this machine shows none"):
        choose_gpus("0", None, [])


@pytest.mark.parametrize(
    ("setting", "indices"),
    [
        (None, [0, 1, 2, 3, 4, 5, 6, 7]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("2", [2]),
        ("5, 3", [5, 3]),
        ("1,-1,2", [1]),
        ("GPU-4a-4,GPU-0a", [4, 0]),
    ],
)
def test_cuda_visible_devices(setting: str | None, indices: list[int]) -> None:
    assert [gpu.index for gpu in visible_gpus(MACHINE, setting)] == indices


@pytest.mark.parametrize(
    ("setting", "says"),
    [("9", "names 9, which is no GPU"), ("GPU-", "is 8 GPUs"), ("1,1", "names 1 twice"), ("x", "names x")],
)
def test_cuda_visible_devices_that_name_nothing(setting: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        visible_gpus(MACHINE, setting)


def test_mig_instances_are_found_by_their_own_ids() -> None:
    instances = [Gpu(0, f"MIG-{name}", "H200 MIG", 10, 0, None, mig=slot) for slot, name in enumerate("ab")]
    assert [gpu.mig for gpu in visible_gpus(instances, "MIG-b")] == [1]
    assert [gpu.mig for gpu in choose_gpus("0", None, instances)] == [0, 1]


class _Driver:
    """NVML with two GPUs: the second is partitioned and knows neither its load nor its processes."""

    class NVMLError(Exception):
        pass

    def __init__(self) -> None:
        self.open = 0

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return f"GPU-{index}"

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: str) -> int:
        if handle == "GPU-0":
            raise self.NVMLError("not supported")
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: str, slot: int) -> str:
        if slot != 2:
            raise self.NVMLError("not found")
        return "MIG-2"

    def nvmlDeviceGetUUID(self, handle: str) -> bytes:
        return handle.encode()

    def nvmlDeviceGetName(self, handle: str) -> str:
        return "H200"

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        return SimpleNamespace(total=100, used=30)

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        if handle.startswith("MIG"):
            raise self.NVMLError("not supported")
        return SimpleNamespace(gpu=55)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> Any:
        if handle.startswith("MIG"):
            raise self.NVMLError("not supported")
        return [SimpleNamespace(pid=77, usedGpuMemory=None)]

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.1"

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return 13010


def test_what_the_driver_does_not_know_is_not_invented() -> None:
    driver = _Driver()
    whole, instance = read_gpus(driver)
    assert (whole.index, whole.uuid, whole.memory_free, whole.utilization, whole.mig) == (0, "GPU-0", 70, 55, None)
    assert [(p.pid, p.memory) for p in whole.processes] == [(77, None)]
    assert (instance.index, instance.uuid, instance.utilization, instance.processes, instance.mig) == (
        1,
        "MIG-2",
        None,
        (),
        2,
    )
    assert driver_versions(driver) == {"driver": "580.1", "driver_cuda": "13.1"}
    assert driver.open == 0


def test_no_driver_is_no_gpu() -> None:
    class Broken(_Driver):
        def nvmlInit(self) -> None:
            raise self.NVMLError("driver not loaded")

    assert read_gpus(Broken()) == []
    assert driver_versions(Broken()) == {"driver": None, "driver_cuda": None}
