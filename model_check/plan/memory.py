"""How much memory one rank needs, for what, and at which moment of the step it needs most.

Four moments are looked at: the end of the forward pass, the loss, the backward pass (at its first and at its last
block, for activations shrink while gradients grow), and the optimizer. Every number follows from the sizes of tensors
that the code holds at that moment. What PyTorch's allocator hands out is `allocated`; what it takes from the device for
that is `reserved`; CUDA's context and NCCL's buffers come on top, outside of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from model_check.config import ModelShape
from model_check.plan.activations import block_bytes, loss_bytes, weight_copies_kept
from model_check.plan.layout import Layout
from model_check.plan.workload import Workload

GIB = 2**30
MIB = 2**20

CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "logits", "communication", "workspace")

# cuBLAS keeps 32 MiB for each thread that multiplies (forward, backward) on Hopper; kernels keep small change.
WORKSPACE_BYTES = 2 * 32 * MIB + 32 * MIB
# What must be left beside the tensors themselves: holes between blocks, rounding; and, in sharded runs, blocks that
# belong to another stream.
SLACK_SHARE, SLACK_SHARE_SHARDED = 0.03, 0.1
SLACK_BYTES = 256 * MIB
# What the allocator takes from the device, over what it hands out: medians of docs/memory.md. Sharded runs use several
# streams, each with blocks of its own; most of that goes back when memory becomes short.
RESERVED_SHARE, RESERVED_SHARE_SHARDED = 0.04, 0.29
# The context, loaded kernels and cuDNN's handles: measured, as NCCL's buffers are, for each kind of group of a rank.
CONTEXT_BYTES = 768 * MIB
NCCL_BYTES = 552 * MIB

ADAM_BYTES = {"fp32": 8.0, "bf16": 4.0, "8bit": 2.1}


@dataclass(frozen=True)
class Moment:
    """What a rank holds at one point of the step, in bytes by category."""

    name: str
    parts: Mapping[str, float]

    @property
    def total(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True)
class MemoryPlan:
    """The memory of one rank, in bytes."""

    moments: tuple[Moment, ...]
    outside: float  # CUDA's context and NCCL, which the allocator does not see
    host: float = 0.0  # offloaded parameters, gradients and moments
    shards: bool = False

    @cached_property
    def peak(self) -> Moment:
        return max(self.moments, key=lambda moment: moment.total)

    @property
    def allocated(self) -> float:
        """The peak that `torch.cuda.max_memory_allocated` shows."""
        return self.peak.total

    @property
    def reserved(self) -> float:
        """The peak of `torch.cuda.max_memory_reserved` where there is plenty: the allocator keeps what it once took."""
        return self.allocated * (1 + (RESERVED_SHARE_SHARDED if self.shards else RESERVED_SHARE))

    @property
    def needed(self) -> float:
        """What the device must have: the tensors, some slack between them, and what is outside of the allocator."""
        slack = SLACK_SHARE_SHARDED if self.shards else SLACK_SHARE
        return self.allocated * (1 + slack) + SLACK_BYTES + self.outside

    def fits(self, device_bytes: float) -> bool:
        return self.needed <= device_bytes

    def fits_with_ease(self, device_bytes: float) -> bool:
        """The allocator never has to give anything back, which would make the device wait."""
        return max(self.needed, self.reserved + self.outside) <= device_bytes

    def cannot_fit(self, device_bytes: float) -> bool:
        """Not even if the allocator wasted nothing. Between this and `fits` only a try can tell."""
        return self.allocated + self.outside > device_bytes


@dataclass(frozen=True)
class _State:
    """What a rank holds whatever it computes, and the largest pieces it gathers."""

    parameters: float
    gradients: float
    optimizer: float
    host: float = 0.0


def plan_memory(shape: ModelShape, load: Workload, layout: Layout) -> MemoryPlan:
    """The memory of the rank that needs most: the first stage of a pipeline, or the last."""
    if layout.pipeline == 1:
        return _plan_stage(shape, load, layout, 0)
    first, last = (_plan_stage(shape, load, layout, stage) for stage in (0, layout.pipeline - 1))
    return max(first, last, key=lambda plan: plan.allocated)


def plan_state(parameters: int, load: Workload, layout: Layout) -> MemoryPlan:
    """Of a model that is not a LLaMA only what follows from its number of parameters is known."""
    state = _state(parameters / (layout.tensor * layout.pipeline), load, layout)
    gathered = parameters * (load.width if load.gathers_half else 4) if layout.shards and layout.keep_gathered else 0.0
    parts = {
        "parameters": state.parameters,
        "gradients": state.gradients,
        "optimizer": state.optimizer,
        "communication": gathered,
    }
    return MemoryPlan((Moment("optimizer", parts),), _outside(layout), state.host, layout.shards)


def _plan_stage(shape: ModelShape, load: Workload, layout: Layout, stage: int) -> MemoryPlan:
    sizes = _StageSizes.of(shape, layout, stage)
    state = _state(sizes.parameters, load, layout)
    autocast = _autocasts(load, layout)
    tokens = load.batch * load.context / layout.context
    in_flight = min(layout.pipeline - stage, load.micro_batches)
    block = block_bytes(shape, load, tensor=layout.tensor, context_ranks=layout.context, autocast=autocast)
    copies = weight_copies_kept(shape, load, tensor=layout.tensor, autocast=autocast)
    stream = tokens * shape.hidden_size * (4 if autocast else load.width)
    kept = sizes.layers * (tokens * block.kept + copies)
    # Earlier micro-batches of a pipeline wait for their gradients while this one runs.
    waiting = (in_flight - 1) * (sizes.layers * tokens * block.kept + stream)
    loss = loss_bytes(shape, load, tokens, tensor=layout.tensor, autocast=autocast) if sizes.is_last else None
    traffic = _Traffic.of(shape, load, layout, sizes)
    # Buckets of DDP, and sums over micro-batches, stay through the forward pass.
    has_buckets = not layout.shards and layout.data_parallel > 1
    held = state.gradients if has_buckets or load.micro_batches > 1 else 0.0
    base = {"parameters": state.parameters, "optimizer": state.optimizer, "workspace": float(WORKSPACE_BYTES)}

    def moment(name: str, **parts: float) -> Moment:
        return Moment(name, dict.fromkeys(CATEGORIES, 0.0) | base | parts)

    # The stream after the last block and after the last norm.
    ends = 2 * stream if sizes.is_last else stream
    moments = [moment("forward", gradients=held, activations=waiting + kept + ends, communication=traffic.forward)]
    head_gradient = 0.0
    if loss is not None:
        head_gradient = 0.0 if layout.shards else loss.weight_gradient  # in shards, traffic counts it
        moments.append(
            moment(
                "loss",
                gradients=held + loss.finished,
                activations=waiting + kept + ends + loss.hidden_gradient,
                logits=loss.logits,
                communication=traffic.at_loss,
            )
        )
    whole_block = tokens * (block.whole + block.working) + copies
    first_block = waiting + kept + stream + whole_block - tokens * block.kept - copies
    block_gradient = sizes.block_parameters * _gradient_width(load, layout)
    moments.append(
        max(
            moment(
                "backward",
                gradients=held + head_gradient + block_gradient,
                activations=first_block,
                communication=traffic.first_block,
            ),
            moment(
                "backward",
                gradients=max(held + block_gradient, state.gradients - sizes.later_gradients(state, layout)),
                activations=waiting + stream + whole_block,
                communication=traffic.last_block,
            ),
            moment("backward", gradients=state.gradients, activations=2 * stream, communication=traffic.at_end),
            key=lambda found: found.total,
        )
    )
    moments.append(moment("optimizer", gradients=state.gradients, communication=0.0))
    return MemoryPlan(tuple(moments), _outside(layout), state.host, layout.shards)


@dataclass(frozen=True)
class _StageSizes:
    """Parameters of one stage on one rank, before they are sharded."""

    layers: int
    block_parameters: float
    embedding: float
    head: float
    is_last: bool

    @classmethod
    def of(cls, shape: ModelShape, layout: Layout, stage: int) -> _StageSizes:
        size, extra = divmod(shape.num_layers, layout.pipeline)
        table = shape.vocab_size * shape.hidden_size / layout.tensor
        is_first, is_last = stage == 0, stage == layout.pipeline - 1
        return cls(
            layers=size + (stage < extra),
            block_parameters=shape.parameters_per_layer() / layout.tensor,
            embedding=table if is_first else 0.0,
            head=table if is_last and not shape.tie_embeddings else 0.0,
            is_last=is_last,
        )

    @property
    def parameters(self) -> float:
        return self.layers * self.block_parameters + self.embedding + self.head

    def later_gradients(self, state: _State, layout: Layout) -> float:
        """Gradients that do not exist yet when the last block's are complete: the embedding's; in shards the head's."""
        later = self.embedding + (self.head if layout.shards else 0.0)
        return state.gradients * later / self.parameters


@dataclass(frozen=True)
class _Traffic:
    """Parameters that are gathered and gradients that are on their way, at each moment of a sharded step."""

    forward: float = 0.0
    at_loss: float = 0.0
    first_block: float = 0.0
    last_block: float = 0.0
    at_end: float = 0.0

    @classmethod
    def of(cls, shape: ModelShape, load: Workload, layout: Layout, sizes: _StageSizes) -> _Traffic:
        if not layout.shards:
            return cls()
        width = load.width if load.gathers_half else 4
        block, head = sizes.block_parameters, sizes.head or (sizes.embedding if shape.tie_embeddings else 0.0)
        whole_sums = 4 * sizes.parameters if layout.keep_gathered and load.micro_batches > 1 else 0.0
        # One block is in use, the next one arrives: as it comes off the wire, and cut into its tensors. The root's
        # parameters, which are the head, stay from its forward to the end.
        passing = width * (head + 3 * block)
        gathered = width * sizes.parameters if layout.keep_gathered else passing
        # Gradients of a block as they were computed, and in float32 on their way into shards. A lone rank's shard is
        # the whole. The head's wait for the end of the backward pass.
        on_the_wire = 4 if layout.shard * layout.context > 1 else 0
        leaving = (width + on_the_wire) * block + width * head
        return cls(
            forward=gathered + width * block + whole_sums,
            at_loss=(gathered if layout.keep_gathered else width * head) + whole_sums,
            first_block=gathered + leaving + whole_sums,
            # Whatever was kept is freed block by block on the way back.
            last_block=min(gathered, passing + width * sizes.embedding) + leaving + whole_sums,
            at_end=width * head + (width + on_the_wire) * head + whole_sums,
        )


def _autocasts(load: Workload, layout: Layout) -> bool:
    """Parameters are float32 and products half, cast on the way (see engine.precision)."""
    if layout.shards:
        return load.half and not load.gathers_half
    return load.precision == "fp16"


def _gradient_width(load: Workload, layout: Layout) -> int:
    """Bytes of a gradient where the backward pass leaves it on this rank whole; in shards traffic counts it."""
    if layout.shards:
        return 0
    return 2 if load.precision in ("bf16", "fp8") else 4


def _summed_width(load: Workload, layout: Layout) -> float:
    """Bytes of a bf16 gradient at the end of a step.

    With several micro-batches it is summed in float32 (see engine.gradient_sums); DDP's buckets stay beside the sums.
    """
    if load.micro_batches == 1:
        return 2.0
    return 4.0 + (2.0 if layout.data_parallel > 1 else 0.0)


def _state(parameters: float, load: Workload, layout: Layout) -> _State:
    """bf16 parameters with the low half of their master beside them; float32 throughout where they are sharded."""
    moments = ADAM_BYTES[load.states]
    if layout.shards:
        held = parameters / (layout.shard * layout.context)
        if load.offloads:
            return _State(0.0, 0.0, 0.0, host=held * (8.0 + moments))
        return _State(4.0 * held, 4.0 * held, moments * held)
    if load.precision in ("bf16", "fp8"):
        low_half = 0.0 if load.states == "8bit" else 2.0
        return _State(2.0 * parameters, _summed_width(load, layout) * parameters, (low_half + moments) * parameters)
    return _State(4.0 * parameters, 4.0 * parameters, moments * parameters)


def _outside(layout: Layout) -> float:
    groups = sum(size > 1 for size in (layout.pipeline, layout.data_parallel * layout.context, layout.tensor))
    # What is sharded has a group even where it has one member.
    return CONTEXT_BYTES + max(groups, layout.shards) * NCCL_BYTES
