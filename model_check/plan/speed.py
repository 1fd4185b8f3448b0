"""How long a step takes: the time of its parts, each at the rate that its kind of work reaches.

The shares of the peak were measured part by part on an H200 (matrix products 0.72 of the dense peak, cuDNN attention
0.56, copies 0.89 of the memory's rate) and are taken to hold for other chips. Communication was not measured: it is
volume over link speed, hidden behind computation where the code can hide it. A forecast, then, and not a promise.
"""

from __future__ import annotations

from dataclasses import dataclass

from model_check.config import ModelShape
from model_check.plan.devices import NETWORK_BYTES_PER_S, Device
from model_check.plan.flops import count_flops_per_token
from model_check.plan.layout import Layout
from model_check.plan.memory import ADAM_BYTES
from model_check.plan.workload import Workload

PRODUCT_SHARE = 0.72
FP8_PRODUCT_SHARE = 1.08  # of the bf16 peak, casts included
ATTENTION_SHARE = 0.56
# What the sum of the parts leaves out: launches, and what runs between the kernels.
BETWEEN_KERNELS = 1.05
MEMORY_SHARE = 0.89
LINK_SHARE = 0.7
# The backward pass of fused attention computes the scores again: 5 products where the forward pass has 2.
ATTENTION_WORK = 3.5 / 3
# What the forward pass repeats, as a share of it: docs/memory.md has the measured cost.
_REPEATED = {"none": 0.0, "selective": 0.33, "full": 0.75}
GPUS_PER_HOST = 8
# Offloaded: parameters and gradients cross PCIe, and the host's processors update them at the rate of its memory.
_PCIE_BYTES_PER_S = 25e9
_HOST_UPDATE_BYTES_PER_S = 20e9


@dataclass(frozen=True)
class SpeedPlan:
    """A step of the whole job."""

    step_s: float
    tokens_per_s: float
    mfu: float
    exposed_communication_s: float
    bubble_s: float


def plan_speed(
    shape: ModelShape, load: Workload, layout: Layout, device: Device, *, gpus_per_host: int = GPUS_PER_HOST
) -> SpeedPlan | None:
    """The forecast; None where the device's rates are not known."""
    peak = device.peak(load.precision)
    if peak is None or device.memory_rate is None:
        return None
    ranks = layout.tensor * layout.pipeline * layout.context
    tokens = load.batch * load.context  # of one micro-batch, shared by `ranks` ranks
    micro = _micro_batch_seconds(shape, load, layout, tokens, peak, device.memory_rate)
    optimizer = _optimizer_seconds(shape, load, layout, device.memory_rate)
    bubble = micro * (layout.pipeline - 1)
    exposed = _tensor_seconds(shape, load, layout, device, gpus_per_host) * load.micro_batches
    traffic = _data_parallel_seconds(shape, load, layout, device, gpus_per_host)
    # Gradients travel while the backward pass goes on: two thirds of the last micro-batch's time hide them.
    exposed += max(0.0, traffic - micro * load.micro_batches * 2 / 3)
    step = micro * load.micro_batches + bubble + optimizer + exposed
    job_tokens = tokens * load.micro_batches * layout.data_parallel
    rate = job_tokens / step
    useful = rate * count_flops_per_token(shape, load.context)
    world = ranks * layout.data_parallel
    return SpeedPlan(step, rate, useful / (peak * world), exposed, bubble)


def _micro_batch_seconds(
    shape: ModelShape, load: Workload, layout: Layout, tokens: float, peak: float, memory_rate: float
) -> float:
    """Forward and backward of one micro-batch on one rank, without waiting for anybody."""
    ranks = layout.tensor * layout.pipeline * layout.context
    head = 6.0 * shape.vocab_size * shape.hidden_size * tokens
    blocks = 6.0 * shape.num_layers * shape.parameters_per_layer() * tokens
    attention = 6.0 * shape.num_layers * shape.num_heads * shape.head_dim * load.context * tokens
    repeated = 1 + _REPEATED[load.recomputation] / 3
    # Selective recomputation keeps the attention's output; full repeats it too.
    repeated_attention = repeated if load.recomputation == "full" else 1.0
    share = FP8_PRODUCT_SHARE if load.precision == "fp8" else PRODUCT_SHARE
    seconds = blocks * repeated / (peak * share) + head / (peak * PRODUCT_SHARE)
    seconds += attention * ATTENTION_WORK * repeated_attention / (peak * ATTENTION_SHARE)
    # Norms, rotation, gate and residuals read and write about 9 streams and 6 gates a token, three times over.
    passes = 3.0 if load.compiled else 6.0
    moved = passes * load.width * (9 * shape.hidden_size + 6 * shape.intermediate_size) * shape.num_layers * tokens
    # Fused, logits become their gradient in place; else they pass through float32, softmax and their gradients.
    logits = (4 * load.width if load.fused_loss else 32) * shape.vocab_size * tokens
    return BETWEEN_KERNELS * (seconds + (moved * repeated + logits) / (memory_rate * MEMORY_SHARE)) / ranks


def _optimizer_seconds(shape: ModelShape, load: Workload, layout: Layout, memory_rate: float) -> float:
    """Every byte of parameter, master and moments is read and written once, a gradient read twice."""
    held = shape.parameters() / (layout.tensor * layout.pipeline)
    if layout.shards:
        held /= layout.shard * layout.context
    state = 4.0 + ADAM_BYTES[load.states]
    if load.offloads:
        return held * (8 / _PCIE_BYTES_PER_S + (2 * state + 8) / _HOST_UPDATE_BYTES_PER_S)
    gradient = 4.0 if layout.shards else _gradient_width(load)
    return held * (2 * state + 2 * gradient) / (memory_rate * MEMORY_SHARE)


def _gradient_width(load: Workload) -> int:
    """Bytes per element of an unsharded gradient: bf16, or the fp32 sum of several micro-batches."""
    return 2 if load.precision in ("bf16", "fp8") and load.micro_batches == 1 else 4


def _rate(ranks_apart: int, device: Device, gpus_per_host: int) -> float:
    """Of a group of neighbours: the host's links where they all are in one host, the network beyond."""
    return LINK_SHARE * (device.link_rate if ranks_apart <= gpus_per_host else NETWORK_BYTES_PER_S)


def _tensor_seconds(shape: ModelShape, load: Workload, layout: Layout, device: Device, gpus_per_host: int) -> float:
    """Two sums over the group in each layer's forward pass and two in its backward; nothing hides them."""
    if layout.tensor == 1:
        return 0.0
    bytes_ = load.batch * load.context / layout.context * shape.hidden_size * load.width
    layers = shape.num_layers / layout.pipeline
    volume = 4 * layers * 2 * bytes_ * (layout.tensor - 1) / layout.tensor
    return volume / _rate(layout.tensor, device, gpus_per_host)


def _data_parallel_seconds(
    shape: ModelShape, load: Workload, layout: Layout, device: Device, gpus_per_host: int
) -> float:
    held = shape.parameters() / (layout.tensor * layout.pipeline)
    inner = layout.tensor * layout.context
    if not layout.shards:
        group = layout.replicate
        return 2 * held * _gradient_width(load) * (group - 1) / group / _rate(inner * group, device, gpus_per_host)
    width = load.width if load.gathers_half else 4
    shards = layout.shard * layout.context
    gathers = 1 if layout.keep_gathered else 2 * load.micro_batches
    scatters = 1 if layout.keep_gathered else load.micro_batches
    volume = held * (gathers * width + scatters * 4) * (shards - 1) / shards
    seconds = volume / _rate(inner * layout.shard, device, gpus_per_host)
    if layout.replicate > 1:
        # Replicas exchange their shards' gradients across hosts.
        volume = 2 * 4 * held / shards * (layout.replicate - 1) / layout.replicate
        seconds += volume / _rate(inner * layout.data_parallel, device, gpus_per_host)
    return seconds
