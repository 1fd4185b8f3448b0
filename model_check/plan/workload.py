"""What a configuration asks one rank to compute, as plain numbers: the input of the memory and speed models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from model_check.config import Config
from model_check.config.sections import Precision

Recomputation = Literal["none", "selective", "full"]
States = Literal["fp32", "bf16", "8bit"]


@dataclass(frozen=True)
class Workload:
    """One rank's share of a step. Sizes are those of a micro-batch; `micro_batches` of them make a step."""

    batch: int
    context: int
    micro_batches: int = 1
    precision: Precision = "bf16"
    states: States = "fp32"
    recomputation: Recomputation = "none"
    compiled: bool = True
    fused_loss: bool = True
    gathers_half: bool = True  # sharded parameters travel in the half format
    offloads: bool = False  # sharded parameters, gradients and moments live in host memory
    documents: bool = False

    @property
    def half(self) -> bool:
        """Whether matrix products run in a format of two bytes (fp8 included: it keeps bf16 around them)."""
        return self.precision != "fp32"

    @property
    def width(self) -> int:
        """Bytes of a number that a matrix product reads or writes."""
        return 2 if self.half else 4


def workload_of(config: Config, world_size: int) -> Workload:
    """What the configuration asks for on GPUs."""
    training, parallel = config.training, config.parallel
    return Workload(
        batch=training.batch_size,
        context=training.context_length,
        micro_batches=config.accumulation(world_size),
        precision=training.compute_precision,
        states=training.optimizer_states,
        recomputation=parallel.activation_checkpointing,
        compiled=training.compile != "off",  # on a GPU `auto` compiles every layout
        fused_loss=training.fused_loss != "off",
        gathers_half=config.fsdp.use_mixed_precision,
        offloads=config.fsdp.cpu_offload,
        documents=config.data.document_mask,
    )
