"""Packages that break, hang or crash; GPUs that are ill or slow; jobs that fail or learn nothing."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_check.doctor import Check, Limits, Settings
from model_check.doctor.comm import Rate, judge_rates
from model_check.doctor.gpu import check_gpus, judge_clocks, judge_company, judge_connections, judge_errors
from model_check.doctor.gpu_facts import GpuFacts, _bus, kernel_xids, read_facts, read_paths
from model_check.doctor.gpu_speed import Rates, check_speed, judge_speeds
from model_check.doctor.imports import Package, check_imports
from model_check.doctor.ranks import check_start
from model_check.doctor.training import STEPS, check_training, judge_losses
from model_check.launch import Gpu, GpuProcess
from tests.doctor.conftest import confined

MakePackage = Callable[[str, str], dict[str, str]]
GOOD = GpuFacts(0, "NVIDIA H200", ecc_volatile=0, ecc_lifetime=3, temperature=30, slowdown_at=90, links=18)


def imported(package: Package, environ: dict[str, str], limits: Limits | None = None) -> Check:
    [check] = check_imports(Settings(environ=environ, limits=limits or Limits()), (package,))
    return check


def test_a_package_that_raises_is_named_with_its_line(package: MakePackage) -> None:
    environ = package("flash_attn", "import json\n\nraise ImportError('libcudart.so: undefined symbol')\n")
    check = imported(Package("flash_attn", "flash-attn"), environ)
    assert check.status == "fail"
    assert check.detail.startswith("ImportError: libcudart.so: undefined symbol (")
    assert check.detail.endswith("/packages/flash_attn/__init__.py:3)")
    assert "pip install --force-reinstall flash-attn" in check.fix


def test_a_folder_that_an_installer_filled_may_come_first(package: MakePackage, tmp_path: Path) -> None:
    environ = package("xxhash", "names = []\n")
    (tmp_path / "packages" / "xxhash-9.9.dist-info").mkdir()
    assert imported(Package("xxhash", "xxhash"), environ).status == "ok"
    assert imported(Package("xxhash", "another-one"), environ).status == "warn"


def test_a_folder_of_the_user_that_hides_an_installed_package(package: MakePackage, tmp_path: Path) -> None:
    hiding = str(tmp_path / "packages" / "datasets" / "__init__.py")
    environ = package("datasets", "names = []\n")
    check = imported(Package("datasets", "datasets"), environ)
    assert check.status == "warn" and check.detail.startswith(f"{hiding} is imported, not the installed ")
    assert check.fix.startswith(f"rename {hiding}, ")
    Path(hiding).write_text("raise AttributeError('names')\n")
    broken = imported(Package("datasets", "datasets"), environ)
    assert broken.status == "fail" and broken.detail == f"AttributeError: names ({hiding}:1)"
    assert broken.fix.startswith(f"rename {hiding}, ")


def test_a_package_installed_in_front_of_another_is_no_stray_file(package: MakePackage, tmp_path: Path) -> None:
    environ = package("datasets", "names = []\n")
    (tmp_path / "packages" / "datasets-9.9.dist-info").mkdir()
    assert imported(Package("datasets", "datasets"), environ).status == "ok"


def test_a_file_that_cannot_be_parsed_is_named(package: MakePackage) -> None:
    check = imported(Package("flash_attn", "flash-attn"), package("flash_attn", "\ndef broken(:\n"))
    assert check.status == "fail" and check.detail.endswith("/packages/flash_attn/__init__.py:2)")


def test_a_message_without_end_stays_a_sentence(package: MakePackage) -> None:
    environ = package("flash_attn", "raise RuntimeError('\\x1b[2Jlong ' * 1_000_000)\n")
    check = imported(Package("flash_attn", "flash-attn"), environ)
    assert check.detail.startswith("RuntimeError: ?[2Jlong ?[2Jlong ") and len(check.detail) < 600
    assert check.detail.isprintable() and check.detail.endswith("/flash_attn/__init__.py:1)")


def test_a_package_is_not_blamed_for_a_limit_of_the_shell(package: MakePackage) -> None:
    check = imported(Package("flash_attn", "flash-attn"), package("flash_attn", "raise MemoryError\n"))
    assert check.detail.startswith("MemoryError (") and "ulimit -v" in check.fix and "pip" not in check.fix


def test_a_package_that_hangs_does_not_hang_the_doctor(package: MakePackage) -> None:
    environ = package("yaml", "import threading\nthreading.Event().wait()\n")
    check = imported(Package("yaml", "PyYAML"), environ, Limits(import_limit_s=1.0))
    assert (check.status, check.detail) == ("fail", "no answer within 1 s")


@pytest.mark.parametrize(
    ("source", "detail"),
    [
        ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n", "ended by SIGSEGV"),
        ("import os\nos._exit(3)\n", "exit code 3: no message"),
        ("raise SystemExit('license expired')\n", "SystemExit: license expired ("),
    ],
)
def test_a_package_that_ends_the_interpreter(package: MakePackage, source: str, detail: str) -> None:
    check = imported(Package("xxhash", "xxhash"), package("xxhash", source))
    assert check.status == "fail" and check.detail.startswith(detail)


def test_an_optional_package_that_is_broken_is_a_warning(package: MakePackage) -> None:
    environ = package("flash_attn", "raise ImportError('built for another torch')")
    assert imported(Package("flash_attn", "flash-attn", needed=False), environ).status == "warn"


def test_packages_that_are_missing() -> None:
    environ = dict(Settings().environ)
    needed = imported(Package("no_such_package", "no-such-package"), environ)
    assert needed.status == "fail" and "bash run.sh" in needed.fix
    assert imported(Package("no_such_package", "no-such-package", needed=False), environ).status == "skip"


def test_a_missing_package_inside_a_present_one_is_not_taken_for_it(package: MakePackage) -> None:
    check = imported(Package("tensorboard", "tensorboard"), package("tensorboard", "import no_such_package"))
    assert check.status == "fail" and "No module named 'no_such_package'" in check.detail


def test_the_worst_come_first(package: MakePackage) -> None:
    environ = package("broken", "raise ValueError('x')")
    package("quick", "")
    package(
        "slow",
        "print('noise')\nfor _ in range(3_000_000): pass\nblob = bytes(range(256)) * 200_000",
    )
    packages = tuple(Package(name, name) for name in ("quick", "slow", "broken"))
    checks = list(check_imports(Settings(environ=environ), packages))
    assert [check.name for check in checks] == ["import broken", "import slow", "import quick"]
    assert float(checks[1].detail.split()[0]) > float(checks[2].detail.split()[0])
    assert float(checks[1].detail.split()[2]) >= 45, "MiB of the blob"
    slow = imported(Package("slow", "slow"), environ, Limits(import_warn_s=0.0))
    assert slow.status == "warn" and "local disk" in slow.fix


@pytest.mark.parametrize(
    ("changes", "status", "fragment"),
    [
        ({}, "ok", "no uncorrected memory error, 3 in its lifetime"),
        ({"ecc_volatile": 2}, "fail", "2 uncorrected memory errors"),
        ({"rows_failed": True}, "fail", "no spare row"),
        ({"rows_pending": True}, "warn", "at the next reset"),
        ({"xids": (79, 79, 48)}, "warn", "Xid 79 ×2, Xid 48 ×1"),
        ({"xids": (13, 31)}, "ok", "no Xid in the kernel log"),
        ({"xids": None}, "ok", "the kernel log may not be read"),
        ({"ecc_volatile": None}, "ok", "no ECC counter"),
    ],
)
def test_errors_of_a_gpu(changes: dict[str, Any], status: str, fragment: str) -> None:
    check = judge_errors(replace(GOOD, **changes))
    assert (check.status, fragment in check.detail) == (status, True), check


def test_a_gpu_that_is_hot_or_slowed_down() -> None:
    limits = Limits()
    assert judge_clocks(GOOD, limits).status == "ok"
    hot = judge_clocks(replace(GOOD, temperature=86), limits)
    assert hot.status == "warn" and "slows down at 90 °C" in hot.detail
    slowed = judge_clocks(replace(GOOD, throttled_by=("power brake",)), limits)
    assert slowed.status == "warn" and "slowed down by power brake" in slowed.detail


def test_somebody_else_on_the_gpu() -> None:
    gpu = Gpu(3, "GPU-3", "NVIDIA H200", 140 << 30, 20 << 30, 90)
    assert judge_company(gpu).status == "ok"
    check = judge_company(replace(gpu, processes=(GpuProcess(1, 20 << 30),)))
    assert check.status == "warn" and "pid 1 (" in check.detail and "20 GiB" in check.detail
    assert "--gpus auto" in check.fix


def test_connections_between_gpus() -> None:
    pair = [replace(GOOD, pcie_width=16, pcie_width_most=16), replace(GOOD, index=1, pcie_width=16, pcie_width_most=16)]
    assert judge_connections(pair, {(0, 1): "NVLink"}).detail == "1 pair over NVLink, 18 NVLinks each"
    narrow = judge_connections([pair[0], replace(pair[1], pcie_width=8)], {(0, 1): "NVLink"})
    assert narrow.status == "warn" and "GPU 1 has 8 of its 16 PCIe lanes" in narrow.detail
    fewer = judge_connections([pair[0], replace(pair[1], links=17)], {(0, 1): "NVLink"})
    assert fewer.status == "warn" and "17–18 NVLinks each" in fewer.detail
    three = [*pair, replace(GOOD, index=2)]
    paths = {(0, 1): "NVLink", (0, 2): "the host bridge", (1, 2): "the host bridge"}
    assert judge_connections(three, paths).status == "warn"


def speeds(*flops: float, bytes_per_s: float = 4.2e12) -> list[Check]:
    measured = [Rates(i, f, bytes_per_s, True, 989e12, 4.9e12) for i, f in enumerate(flops)]
    return list(judge_speeds(measured, Limits()))


def test_a_slow_gpu_is_found_among_its_siblings() -> None:
    assert [c.status for c in speeds(700e12, 705e12, 690e12, 700e12)] == ["ok"] * 4
    checks = speeds(700e12, 705e12, 702e12, 600e12, 400e12)
    assert [c.status for c in checks] == ["ok", "ok", "ok", "warn", "fail"]
    assert "43% below the median of its siblings" in checks[-1].detail.replace(" %", "%")
    assert "--gpus" in checks[-1].fix


def test_a_gpu_below_its_kind() -> None:
    assert speeds(700e12)[0].detail == "700 TFLOP/s (71% of 989), memory 4.20 TB/s (86% of 4.9)"
    assert speeds(500e12)[0].status == "warn"
    assert speeds(200e12)[0].status == "fail"
    assert speeds(700e12, bytes_per_s=3e12)[0].status == "warn"
    assert speeds(700e12, bytes_per_s=1e12)[0].status == "fail"
    unknown = list(judge_speeds([Rates(0, 10e12, 0.1e12)], Limits()))
    assert unknown[0].status == "ok", "nothing to compare with"
    wrong = list(judge_speeds([Rates(0, 700e12, 4e12, correct=False)], Limits()))
    assert wrong[0].status == "fail" and "product of ones is wrong" in wrong[0].detail


@pytest.mark.slow
def test_a_gpu_that_cannot_be_measured_is_named() -> None:
    gone = Gpu(4, "GPU-of-nobody", "NVIDIA H200", 0, 0, None)
    [check] = check_speed(Settings(gpus=(gone,)), {})
    assert (check.name, check.status) == ("GPU 4 speed", "fail")
    assert "could not be measured: exit code 1" in check.detail


def test_no_gpu_is_no_failure() -> None:
    [check] = check_gpus(Settings())
    assert check.status == "skip"


class StandInDriver:
    """The calls of pynvml that the doctor makes, for two GPUs; the second knows little."""

    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC, NVML_AGGREGATE_ECC = 1, 0, 1
    NVML_TEMPERATURE_GPU, NVML_TEMPERATURE_THRESHOLD_SLOWDOWN = 0, 1
    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_P2P_CAPS_INDEX_NVLINK = 1, 2, 2

    class NVMLError(Exception):
        pass

    def nvmlInit(self) -> None: ...

    def nvmlShutdown(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetName(self, handle: int) -> bytes:
        return b"NVIDIA H200"

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}"

    def nvmlDeviceGetPciInfo(self, handle: int) -> Any:
        return SimpleNamespace(busId=f"00000000:{0x9A + handle:02X}:00.0")

    def nvmlDeviceGetTotalEccErrors(self, handle: int, kind: int, counter: int) -> int:
        return self._first(handle, 5 if counter == self.NVML_AGGREGATE_ECC else 1)

    def nvmlDeviceGetRemappedRows(self, handle: int) -> tuple[int, int, int, int]:
        return self._first(handle, (0, 1, 1, 0))

    def nvmlDeviceGetMaxClockInfo(self, handle: int, clock: int) -> int:
        return self._first(handle, 3201 if clock == self.NVML_CLOCK_MEM else 1980)

    def nvmlDeviceGetMemoryBusWidth(self, handle: int) -> int:
        return self._first(handle, 6144)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: int) -> int:
        return self._first(handle, 0x1 | 0x40)

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:
        return self._first(handle, int(link < 12))

    def nvmlDeviceGetP2PStatus(self, one: int, other: int, capability: int) -> int:
        return 1

    def nvmlDeviceGetTopologyCommonAncestor(self, one: int, other: int) -> int:
        return 50

    def _first(self, handle: int, value: Any) -> Any:
        if handle:
            raise self.NVMLError("not supported")
        return value


def test_what_the_driver_says_is_read(tmp_path: Path) -> None:
    log = tmp_path / "kmsg"
    log.write_text("6,1,2,-;NVRM: Xid (PCI:0000:9a:00): 79, pid=1, GPU has fallen off the bus.\n4,2,3,-;other words\n")
    first, second = read_facts(log, StandInDriver())
    assert (first.ecc_volatile, first.ecc_lifetime, first.rows_pending, first.rows_failed) == (1, 5, True, False)
    assert first.throttled_by == ("heat (hardware)",)
    assert first.links == 12 and first.clock_most == 1980 and first.xids == (79,)
    assert first.memory_bytes_per_s == pytest.approx(4.917e12, rel=1e-3), "H200: 4.8 TB/s on its data sheet"
    assert (second.ecc_volatile, second.rows_failed, second.memory_bytes_per_s, second.links) == (None, None, None, 0)
    assert second.xids == () and second.bus_id == "00000000:9B:00.0"
    assert read_paths(StandInDriver()) == {(0, 1): "the link between CPU sockets"}


@given(
    st.integers(0, 0xFFFF),
    st.integers(0, 0xFF),
    st.integers(0, 0x1F),
    st.lists(st.integers(1, 200), max_size=4),
    st.text(max_size=30),
)
def test_every_spelling_of_a_bus_finds_its_xids(
    domain: int, bus: int, device: int, xids: list[int], noise: str
) -> None:
    """NVML writes eight digits and capitals, the kernel four and small letters, with or without the function."""
    lines = [f"6,1,2,-;NVRM: Xid (PCI:{domain:04x}:{bus:02x}:{device:02x}): {xid}, pid=1" for xid in xids]
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", errors="replace") as log:
        log.write("\n".join([noise.replace("NVRM", ""), *lines]))
        log.flush()
        found = kernel_xids(Path(log.name))
    assert found is not None
    assert found.get(_bus(f"{domain:08X}:{bus:02X}:{device:02X}.0"), []) == xids
    assert sum(map(len, found.values())) == len(xids)


def test_a_kernel_log_that_may_not_be_read(tmp_path: Path) -> None:
    assert kernel_xids(tmp_path / "nothing") is None


def job(tmp_path: Path, source: str) -> tuple[str, ...]:
    """A command that stands for the trainer or the launcher; it is given --run-dir and the rest."""
    file = tmp_path / "job.py"
    header = "import json, sys\nfrom pathlib import Path\nrun_dir = Path(sys.argv[sys.argv.index('--run-dir') + 1])\n"
    file.write_text(header + "run_dir.mkdir()\n" + source)
    return (sys.executable, str(file))


def test_losses_that_do_not_fall() -> None:
    falling = [8.0 - 0.2 * i for i in range(STEPS)]
    assert judge_losses("train", falling, 1.0).status == "ok"
    assert "it does not fall" in judge_losses("train", [8.0] * STEPS, 1.0).detail
    assert "not finite" in judge_losses("train", [8.0] * (STEPS - 1) + [float("nan")], 1.0).detail
    assert "3 of 12 steps" in judge_losses("train", falling[:3], 1.0).detail


def test_a_trainer_whose_loss_stands_still(tmp_path: Path) -> None:
    source = "(run_dir / 'metrics.jsonl').write_text(''.join(json.dumps({'loss': 8.3}) + '\\n' for _ in range(12)))"
    [check] = check_training(Settings(train=job(tmp_path, source)))
    assert check.status == "fail" and "loss 8.30 → 8.30 in 12 steps: it does not fall" in check.detail


def test_a_job_that_fails_speaks_through_its_verdict(tmp_path: Path) -> None:
    verdict = {"findings": [{"code": "MC307", "title": "host out of memory on rank 0", "evidence": ["64 GiB asked"]}]}
    source = f"(run_dir / 'verdict.json').write_text({json.dumps(json.dumps(verdict))})\nsys.exit(1)"
    [check] = check_training(Settings(train=job(tmp_path, source)))
    assert check.detail == "[MC307] host out of memory on rank 0 (64 GiB asked)"
    plain = job(tmp_path, "sys.exit('model-check: error: no such preset; use debug')")
    [check] = check_training(Settings(train=plain))
    assert check.detail == "exit code 1: no such preset; use debug"


def test_a_job_that_hangs_is_ended(tmp_path: Path) -> None:
    hangs = job(tmp_path, "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_DFL)\nsignal.pause()")
    check = check_start(Settings(run=hangs, limits=Limits(job_limit_s=0.5)), "cpu", 2)
    assert check.status == "fail" and "no answer within 0.5 s" in check.detail


@pytest.mark.parametrize(
    ("answers", "fragment"),
    [
        ([{"rank": 0, "right": True}, {"rank": 1, "right": False}], "the all-reduce is wrong on rank 1"),
        ([{"rank": 0, "right": True}], "1 of 2 ranks reported"),
    ],
)
def test_sums_that_are_wrong_or_missing(tmp_path: Path, answers: list[dict[str, object]], fragment: str) -> None:
    source = f"for a in json.loads({json.dumps(json.dumps(answers))}):\n"
    source += "    (Path(sys.argv[-2]) / f\"rank-{a['rank']}.json\").write_text(json.dumps(a))"
    check = check_start(Settings(run=job(tmp_path, source)), "cpu", 2)
    assert (check.status, fragment in check.detail) == ("fail", True), check


def test_slow_communication() -> None:
    rates = [Rate("all-reduce", 65536, 1e-4, 0.1, 0.1), Rate("all-reduce", 256 << 20, 1e-2, 20.0, 35.0)]
    assert judge_rates("all-reduce", rates, "8 GPUs", 4.0, "PCIe").status == "ok"
    check = judge_rates("all-reduce", rates, "8 GPUs", 100.0, "NVLink")
    assert check.status == "warn" and "256 MiB 35.00" in check.detail and "nvidia-smi nvlink -s" in check.fix


def test_ranks_that_cannot_meet_are_not_started() -> None:
    """They would wait for their timeouts: a minute each, for what is already known."""
    check = confined("ranks", unshare="-n")
    assert (check.name, check.status) == ("gloo ranks", "skip") and "without loopback" in check.detail
    assert confined("comm", unshare="-n").status == "fail"
