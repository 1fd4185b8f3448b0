"""How a job's ranks are arranged: arithmetic on sizes, no torch.

Ranks are numbered from the outside in: pipeline stage, replica, shard, context slice, tensor slice. Ranks that talk
most are neighbours: a tensor group never crosses a host if its size divides the host's ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from model_check.config import Config

Strategy = Literal["ddp", "fsdp", "hsdp"]


@dataclass(frozen=True)
class Layout:
    """Sizes of each kind of parallelism; their product is the number of ranks. `why` is one line for the user."""

    strategy: Strategy = "ddp"
    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    keep_gathered: bool = True
    why: str = ""

    @property
    def world_size(self) -> int:
        return self.pipeline * self.data_parallel * self.context * self.tensor

    @property
    def data_parallel(self) -> int:
        """How many ranks, or groups of ranks, see different samples."""
        return self.replicate * self.shard

    @property
    def splits_model(self) -> bool:
        """Whether a rank holds some of the layers or some of each matrix only."""
        return self.tensor * self.pipeline > 1

    @property
    def shards(self) -> bool:
        """Whether parameters live in shards. Those of a split model always do, if need be one shard each: DDP knows
        neither slices of a matrix nor stages."""
        return self.strategy != "ddp" or self.context > 1 or self.splits_model

    def describe(self) -> str:
        """One line for the user: the sizes that are not 1, and why."""
        sizes = {
            "pipeline": self.pipeline,
            "replicas": self.replicate,
            "shards": self.shard,
            "context": self.context,
            "tensor": self.tensor,
        }
        cut = " × ".join(f"{size} {name}" for name, size in sizes.items() if size > 1) or "one rank"
        return f"{self.strategy}, {cut} ({self.why})"

    def stage_of(self, rank: int) -> int:
        return rank // (self.world_size // self.pipeline)


def data_rank(config: Config, rank: int, world_size: int) -> int:
    """Which slice of every global batch this rank trains on: ranks that share a model share a slice."""
    inner = config.parallel.tensor * config.parallel.context
    return rank // inner % config.data_parallel(world_size)


def context_rank(config: Config, rank: int) -> int:
    """Which slice of every sequence this rank computes."""
    return rank // config.parallel.tensor % config.parallel.context
