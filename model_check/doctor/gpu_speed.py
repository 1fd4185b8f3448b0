"""How fast each GPU is, beside its siblings and beside what its kind should give: a slow one slows the whole job."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from model_check.doctor.check import Check, failed, passed, warned
from model_check.doctor.gpu_facts import GpuFacts
from model_check.doctor.probe import Answer, ask
from model_check.doctor.settings import Limits, Settings
from model_check.launch import Gpu

_LOOK = "nvidia-smi -q -d CLOCK,PERFORMANCE,POWER; stop who else uses it; leave it out with --gpus until it is mended"


@dataclass(frozen=True)
class Rates:
    """What one GPU gives: FLOP/s of a large product in half precision, bytes/s of a copy; and what is due, if known."""

    index: int
    flops: float
    bytes_per_s: float
    correct: bool = True
    flops_due: float | None = None
    bytes_due: float | None = None


def check_speed(settings: Settings, facts: Mapping[int, GpuFacts]) -> Iterator[Check]:
    """All GPUs at once, each in a process that sees only its own: as in training, they share power and heat."""

    def measure(gpu: Gpu) -> Answer:
        environ = {**settings.environ, "CUDA_VISIBLE_DEVICES": gpu.uuid}
        return ask("gpu_rates", limit_s=settings.limits.torch_limit_s, environ=environ)

    with ThreadPoolExecutor(max_workers=max(1, len(settings.gpus))) as pool:
        answers = list(pool.map(measure, settings.gpus))
    measured = []
    for gpu, answer in zip(settings.gpus, answers, strict=True):
        if answer.problem:
            fix = "nvidia-smi; a GPU in an exclusive mode or with full memory lets nobody in"
            yield failed(f"GPU {gpu.index} speed", f"could not be measured: {answer.problem}", fix)
            continue
        known = facts.get(gpu.index)
        # A MIG instance has a share of its GPU's memory bandwidth that the driver does not tell.
        bytes_due = known.memory_bytes_per_s if known and gpu.mig is None else None
        rates = (answer.value["flops"], answer.value["bytes_per_s"], answer.value["correct"])
        measured.append(Rates(gpu.index, *rates, settings.peak(gpu.name), bytes_due))
    yield from judge_speeds(measured, settings.limits)


def judge_speeds(measured: Sequence[Rates], limits: Limits) -> Iterator[Check]:
    """The median of the siblings is what a healthy one gives today; data sheets say what it should give at all."""
    if not measured:
        return
    flops = statistics.median(rates.flops for rates in measured)
    size = statistics.median(rates.bytes_per_s for rates in measured)
    for rates in measured:
        yield _judge(rates, rates.flops / flops, rates.bytes_per_s / size, len(measured), limits)


def _judge(rates: Rates, beside_flops: float, beside_bytes: float, siblings: int, limits: Limits) -> Check:
    name = f"GPU {rates.index} speed"
    detail = (
        f"{rates.flops / 1e12:.0f} TFLOP/s{_due(rates.flops, rates.flops_due)}, "
        f"memory {rates.bytes_per_s / 1e12:.2f} TB/s{_due(rates.bytes_per_s, rates.bytes_due)}"
    )
    if not rates.correct:
        return failed(name, f"{detail}: a product of ones is wrong", "do not train on it; drain and replace the GPU")
    slower = min(beside_flops, beside_bytes)
    if siblings > 1 and slower < limits.sibling_warn:
        what = "products" if beside_flops <= beside_bytes else "memory"
        judge = failed if slower < limits.sibling_fail else warned
        return judge(name, f"{detail}: {what} {1 - slower:.0%} below the median of its siblings", _LOOK)
    for what, value, due, least, much_less in (
        ("products", rates.flops, rates.flops_due, limits.matmul_warn, limits.matmul_fail),
        ("memory", rates.bytes_per_s, rates.bytes_due, limits.bandwidth_warn, limits.bandwidth_fail),
    ):
        if due and value < least * due:
            judge = failed if value < much_less * due else warned
            return judge(name, f"{detail}: {what} far below what this kind gives", _LOOK)
    return passed(name, detail)


def _due(value: float, due: float | None) -> str:
    return f" ({value / due:.0%} of {due / 1e12:.3g})" if due else ""
