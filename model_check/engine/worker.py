"""What one rank does: assemble (data, model, optimizer, loop), then fit. The same for 1 and N ranks, CPU and GPU."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from model_check.checkpoint import salvage, store
from model_check.config import Config, resolve_shape
from model_check.data import BatchLoader, Cursor, PackedCache, load_tokenizer
from model_check.engine.evaluate import validation_loss
from model_check.engine.feed import on_device
from model_check.engine.loop import Loop, LoopPlan, StepInfo
from model_check.engine.optimizer import build_optimizer
from model_check.engine.place import Place
from model_check.engine.precision import Precision
from model_check.engine.schedule import rate_factor
from model_check.engine.step import TrainStep, replicate
from model_check.errors import CheckpointError, NumericsError, UsageError
from model_check.models import Llama, apply_compile, build_model, load_pretrained
from model_check.models.fp8 import apply_fp8
from model_check.observe.instrument.spans import span
from model_check.plan.flops import count_flops_per_token
from model_check.plan.peaks import peak_flops


class Batches(Protocol):
    """What the loop needs of a loader: micro-batches, and a cursor that says where it stands."""

    @property
    def cursor(self) -> Cursor: ...

    def __iter__(self) -> Iterator[Any]: ...

    def seek(self, cursor: Cursor) -> None: ...

    def close(self) -> None: ...


@dataclass
class Session:
    """Everything a rank has assembled. `state` below is exactly what resume restores."""

    config: Config
    place: Place
    bare_model: nn.Module
    train_step: TrainStep
    loader: Batches
    held_out: PackedCache | None
    precision: Precision
    first_step: int = 0
    tokens_before: int = 0

    def state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.bare_model, self.train_step.optimizer)
        return {"model": model, "optimizer": optimizer}

    def extra(self, step: int, tokens: int) -> dict[str, Any]:
        cursor = self.loader.cursor
        return {
            "step": step,
            "tokens": tokens,
            "cursor": {"epoch": cursor.epoch, "position": cursor.position},
            "loss_scale": self.train_step.loss_scale.state_dict(),
        }

    def restore(self, checkpoint: store.Checkpoint) -> None:
        from torch.distributed.checkpoint.state_dict import set_state_dict

        with span("load", str(checkpoint.path)):
            state = self.state()
            extra = store.load(checkpoint, state)
            set_state_dict(
                self.bare_model,
                self.train_step.optimizer,
                model_state_dict=state["model"],
                optim_state_dict=state["optimizer"],
            )
        self.first_step, self.tokens_before = extra["step"] + 1, extra["tokens"]
        self.loader.seek(Cursor(**extra["cursor"]))
        self.train_step.loss_scale.load_state_dict(extra["loss_scale"])


def seed_everything(seed: int, rank: int) -> None:
    """Weights and sample order have generators of their own; this is for everything else."""
    random.seed(seed + rank)
    np.random.seed((seed + rank) % 2**32)
    torch.manual_seed(seed + rank)


def make_model(config: Config, place: Place, precision: Precision, vocab_size: int) -> Llama:
    """The model the configuration names, on the rank's device, with fresh or pretrained weights."""
    shape = resolve_shape(config.model, vocab_size)
    model = build_model(
        shape,
        place.device,
        precision.parameter_dtype,
        seed=config.system.seed,
        init_std=config.model.init_std,
        attention_backend=config.model.attention_backend,
    )
    if config.model.init == "pretrained" and config.model.model_path:
        load_pretrained(model, config.model.model_path)
    model.fused_loss = config.training.fused_loss != "off"
    if precision.name == "fp8":
        apply_fp8(model)
    wanted = config.training.compile
    if wanted == "on" or (wanted == "auto" and place.device.type == "cuda"):
        apply_compile(model)
    return model


def open_loader(config: Config, place: Place, cache: PackedCache) -> BatchLoader:
    """This rank's share of every global batch of the training data."""
    return BatchLoader(
        cache,
        batch_size=config.training.batch_size,
        context_length=config.training.context_length,
        rank=place.rank,
        world_size=place.world_size,
        seed=config.system.seed,
        grad_accum=config.accumulation(place.world_size),
        num_workers=config.training.num_workers,
        document_mask=config.data.document_mask,
        pin_memory=place.device.type == "cuda",
    )


def assemble(
    config: Config,
    place: Place,
    loader: Batches,
    *,
    model: nn.Module | None = None,
    held_out: PackedCache | None = None,
) -> Session:
    """Builds what the loop needs. A model that is passed in is trained as it is."""
    training = config.training
    seed_everything(config.system.seed, place.rank)
    precision = Precision.choose(training.compute_precision, place.device)
    with span("model"):
        if model is None:
            model = make_model(config, place, precision, load_tokenizer(config.data.tokenizer).vocab_size)
        else:
            model = model.to(place.device)
        train_step = TrainStep(
            replicate(model, place),
            build_optimizer(model, training),
            precision,
            place,
            max_grad_norm=training.max_grad_norm,
        )
    return Session(config, place, model, train_step, loader, held_out, precision)


def _plan(session: Session, max_steps: int) -> LoopPlan:
    config, place = session.config, session.place
    accumulation = config.accumulation(place.world_size)
    context = config.training.context_length
    flops, peak = 0.0, None
    if isinstance(session.bare_model, Llama) and place.device.type == "cuda":
        flops = count_flops_per_token(session.bare_model.shape, context)
        # fp8 runs are measured against the bf16 peak too: only some of their products are fp8, and so they compare.
        precision = config.training.compute_precision.replace("fp8", "bf16")
        one = peak_flops(torch.cuda.get_device_name(place.device), precision)
        peak = one * place.world_size if one else None
    return LoopPlan(
        first_step=session.first_step,
        max_steps=max_steps,
        accumulation=accumulation,
        tokens_per_step=config.training.batch_size * accumulation * context * place.world_size,
        tokens_before=session.tokens_before,
        flops_per_token=flops,
        peak_flops=peak,
    )


def _evaluator(session: Session) -> Callable[[int], float | None]:
    """Evaluates every eval_interval steps on the same held-out samples."""
    config, place = session.config, session.place
    held_out = session.held_out
    needed = config.training.batch_size * place.world_size
    if not config.training.eval_interval or held_out is None:
        return lambda step: None
    available = held_out.samples(config.training.context_length)
    if available < needed:
        raise UsageError(
            f"the {available} held-out samples do not fill one batch of {needed}",
            remedy="raise data.validation_fraction or data.samples, or set training.eval_interval=0",
        )

    def batches() -> Iterator[Any]:
        loader = BatchLoader(
            held_out,
            batch_size=config.training.batch_size,
            context_length=config.training.context_length,
            rank=place.rank,
            world_size=place.world_size,
            seed=config.system.seed,
            document_mask=config.data.document_mask,
        )
        feed = on_device(loader, place.device)
        try:
            for _ in range(config.training.eval_batches):
                yield next(feed)
        finally:
            loader.close()

    def evaluate(step: int) -> float | None:
        if (step + 1) % config.training.eval_interval:
            return None
        with span("eval"):
            return validation_loss(session.train_step.model, batches, session.precision, place)

    return evaluate


def fit(
    session: Session,
    *,
    on_step: Callable[[StepInfo], None],
    max_steps: int | None = None,
    checkpoint_dir: Path | None = None,
    say: Callable[[str], None] = lambda line: None,
    stop_requested: Callable[[], bool] = lambda: False,
) -> StepInfo | None:
    """Trains to the end, or to the step after which a rank was asked to stop; returns the last step."""
    config = session.config
    last = max_steps or config.training.max_steps
    interval, every = config.checkpoint.interval, config.training.eval_interval

    def saves_after(step: int) -> bool:
        return checkpoint_dir is not None and interval > 0 and ((step + 1) % interval == 0 or step + 1 == last)

    schedule = config.training.scheduler
    loop = Loop(
        _plan(session, last),
        session.train_step,
        on_device(session.loader, session.place.device),
        rate_of=lambda step: (
            config.training.learning_rate
            * rate_factor(
                step,
                kind=schedule.type,
                warmup_steps=schedule.warmup_steps,
                max_steps=config.training.max_steps,
                min_ratio=schedule.min_ratio,
                decay_fraction=schedule.decay_fraction,
            )
        ),
        stop_requested=stop_requested,
        needs_result=lambda step: config.debug.nan or saves_after(step) or (every > 0 and (step + 1) % every == 0),
        evaluate=_evaluator(session),
    )
    info: StepInfo | None = None
    try:
        for info in loop:
            on_step(info)
            if info.skipped and config.debug.nan and not session.train_step.loss_scale.enabled:
                raise non_finite(session.bare_model, info.step)
            stopping = info.stop and interval > 0
            if checkpoint_dir is not None and (saves_after(info.step) or stopping):
                with span("save", str(checkpoint_dir)):
                    saved = store.save(
                        checkpoint_dir,
                        info.step,
                        session.state(),
                        session.extra(info.step, info.tokens),
                        keep=config.checkpoint.keep,
                    )
                if session.place.is_first:
                    say(f"checkpoint: {saved}")
    except Exception:
        _salvage(session, info.step + 1 if info else session.first_step, checkpoint_dir, say)
        raise
    finally:
        session.loader.close()
    return info


def non_finite(model: nn.Module, step: int) -> NumericsError:
    """Names the parameters whose gradients are not finite; the step itself changed nothing."""
    bad = []
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and not torch.isfinite(parameter.grad).all():
            count = int((~torch.isfinite(parameter.grad)).sum())
            bad.append(f"{name} ({count}/{parameter.grad.numel()})")
    return NumericsError(
        f"step {step} has non-finite gradients in {len(bad)} parameters, first {', '.join(bad[:3]) or 'none left'}",
        remedy="lower training.learning_rate or model.init_std, or use training.use_amp=false",
        code="MC401",
    )


def _salvage(session: Session, step: int, checkpoint_dir: Path | None, say: Callable[[str], None]) -> None:
    """A failing rank writes what it holds, locally; a failure to do so must not hide the first one."""
    if checkpoint_dir is None:
        return
    try:
        path = salvage.write_error_checkpoint(checkpoint_dir, session.place.rank, step, session.bare_model)
    except (OSError, RuntimeError) as failure:
        say(f"no error checkpoint could be written: {failure}")
    else:
        say(f"error checkpoint: {path}")


def find_checkpoint(resume: str | None, directory: Path) -> tuple[store.Checkpoint | None, list[str]]:
    """The checkpoint to resume from (`auto`: the newest that verifies) and what to tell the user about the search."""
    if resume is None:
        return None, []
    if resume != "auto":
        path = Path(resume)
        if not path.is_dir():
            raise CheckpointError(f"there is no checkpoint {path}", remedy="name a step_* folder, or --resume auto")
        return store.verify(path), []
    found, passed_over = store.newest(directory)
    notes = [f"passed over: {reason}" for reason in passed_over]
    if found is None:
        notes.append(f"no checkpoint in {directory}: starting fresh")
    return found, notes
