"""Training from Python: any nn.Module that returns a loss, one call.

    DDPTrainer(model=model, config=config, device="cpu", rank=0, world_size=1).train(num_steps=10)
    FSDPTrainer(…)   the same, with parameters, gradients and optimizer state in shards

It runs the same step and the same loop as `model-check train`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from model_check.checkpoint.peers import Peers
from model_check.config import Config, load_config
from model_check.data import Cursor, prepare
from model_check.engine.data_and_shape import data_spec
from model_check.engine.feed import open_loader
from model_check.engine.loop import StepInfo
from model_check.engine.place import Place, join, own_device
from model_check.engine.profile import profiled
from model_check.engine.saving import Saving
from model_check.engine.session import Batches
from model_check.engine.worker import assemble, fit
from model_check.errors import UsageError
from model_check.record import RunDir, new_run_id

# A library does not print. What must be seen, a step that is not finite, Python shows on stderr if nobody listens.
_LOG = logging.getLogger("model_check")


@dataclass
class TrainResult:
    """Every step of a run, in order."""

    steps: list[StepInfo] = field(default_factory=list)
    trace_dir: Path | None = None

    @property
    def losses(self) -> list[float]:
        return [info.loss for info in self.steps]

    @property
    def final_loss(self) -> float | None:
        return self.steps[-1].loss if self.steps else None


class _GivenBatches:
    """Batches that the caller brought; they start over at their end and have no cursor to resume from."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self._batches = batches
        self.cursor = Cursor()
        self.identity: dict[str, Any] = {}

    def __iter__(self) -> Iterator[Any]:
        while True:
            empty = True
            for batch in self._batches:
                empty = False
                yield batch
            if empty:
                raise UsageError("the batches given to the trainer ran out", remedy="pass a list or a DataLoader")

    def seek(self, cursor: Cursor) -> None:
        raise UsageError("batches given to the trainer cannot be resumed", remedy="name the data in the config")

    def close(self) -> None:
        """The caller owns them."""


class DDPTrainer:
    """Trains a module on this rank; with world_size > 1 the ranks average their gradients through DDP."""

    strategies: ClassVar[tuple[str, ...]] = ("ddp",)

    def __init__(
        self,
        model: nn.Module,
        config: Config | Mapping[str, Any] | str | Path,
        device: torch.device | str = "cpu",
        rank: int = 0,
        world_size: int = 1,
        gradient_accumulation_steps: int | None = None,
        data: Iterable[Any] | None = None,
    ) -> None:
        if not 0 <= rank < world_size:
            raise UsageError(f"rank={rank} is not in a world of {world_size}", remedy="use 0 ≤ rank < world_size")
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise UsageError(
                f"{type(model).__name__} has no parameter that learns", remedy="pass a module with parameters"
            )
        if isinstance(config, Mapping):
            config = load_config(values={section: (keys, "python") for section, keys in config.items()})
        elif not isinstance(config, Config):
            config = load_config(config)
        if config.parallel.strategy not in self.strategies:
            config = config.with_values({"parallel.strategy": self.strategies[0]}, type(self).__name__)
        if gradient_accumulation_steps is not None:
            config = config.with_values(
                {"training.grad_accum_nums": gradient_accumulation_steps, "training.global_batch": None},
                "gradient_accumulation_steps",
            )
        device = own_device(torch.device(device), rank)
        self.model = model
        self.config = config
        self.place = Place(rank, world_size, device, f"{'GPU' if device.type == 'cuda' else 'CPU'}{rank}")
        self._data = data

    def train(
        self,
        num_steps: int | None = None,
        warmup_steps: int | None = None,
        profile: bool = False,
        save_checkpoints: bool = False,
        checkpoint_interval: int = 100,
    ) -> TrainResult:
        """Trains and returns every step; `profile` leaves a torch profiler trace that TensorBoard opens."""
        values: dict[str, Any] = {"checkpoint.interval": checkpoint_interval if save_checkpoints else 0}
        if num_steps is not None:
            values["training.max_steps"] = num_steps
        if warmup_steps is not None:
            values["training.scheduler.warmup_steps"] = warmup_steps
        config = self.config.with_values(values, f"{type(self).__name__}.train")
        if self._data is not None and config.debug.on_nan == "rollback":
            raise UsageError(
                "debug.on_nan=rollback goes back to an earlier batch, and batches given to the trainer cannot go back",
                remedy="name the data in the config, or set debug.on_nan to skip or halt",
            )
        join(self.place, config)
        held_out = None
        loader: Batches
        if self._data is None:
            prepared = prepare(data_spec(config))
            loader, held_out = open_loader(config, self.place, prepared.train), prepared.valid
        else:
            loader = _GivenBatches(self._data)
        session = assemble(config, self.place, loader, model=self.model, held_out=held_out)
        saving = None
        if save_checkpoints:
            saving = Saving(session, Peers(), name=new_run_id(), last_step=config.training.max_steps)
        result = TrainResult()
        if profile:
            result.trace_dir = RunDir.create().root / "profile"
        with profiled(result.trace_dir, self.place.rank) as step_done:

            def on_step(info: StepInfo) -> None:
                result.steps.append(info)
                step_done()

            error_dir = saving.folder if saving else None
            fit(session, on_step=on_step, saving=saving, error_dir=error_dir, say=_LOG.info, show=_LOG.warning)
        return result


class FSDPTrainer(DDPTrainer):
    """The same with FSDP2: every rank holds a shard of each parameter, its gradient and its optimizer state.

    All ranks start from the weights that rank 0 passed in. Groups of shards: `parallel.strategy=hsdp` in the config.
    """

    strategies = ("fsdp", "hsdp")
