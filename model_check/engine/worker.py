"""What one rank does: assemble (data, model, optimizer, loop), then fit. The same for 1 and N ranks, CPU and GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from model_check.blackbox.spans import span
from model_check.blackbox.start_marks import MARKS
from model_check.checkpoint import layout, salvage, search
from model_check.checkpoint.manifest import MANIFEST, Manifest
from model_check.checkpoint.peers import Peers
from model_check.checkpoint.verify import Checkpoint
from model_check.checkpoint.weight_files import open_weights
from model_check.config import Config
from model_check.config.shard_index import is_weights_folder
from model_check.data import PackedCache, load_tokenizer
from model_check.engine import resume
from model_check.engine.arrangement import arrange_llama, arrange_module
from model_check.engine.evaluate import evaluator
from model_check.engine.feed import context_cut, on_device
from model_check.engine.gradient_check import GradientCheck
from model_check.engine.guard import Guard
from model_check.engine.inputs import StepInputs
from model_check.engine.loop import Loop, LoopPlan, StepInfo
from model_check.engine.memory_retry import RetryingPasses, split
from model_check.engine.optimizer import build_optimizer
from model_check.engine.passes import Passes
from model_check.engine.place import Place
from model_check.engine.profile import named_waits
from model_check.engine.saving import Saving
from model_check.engine.schedule import rate_factor
from model_check.engine.session import Batches, Session, seed_everything
from model_check.engine.step import TrainStep
from model_check.errors import CheckpointError, NumericsError
from model_check.models import Llama
from model_check.plan.flops import count_flops_per_token, peak_flops


def assemble(
    config: Config,
    place: Place,
    loader: Batches,
    *,
    model: nn.Module | None = None,
    held_out: PackedCache | None = None,
) -> Session:
    """The model as this rank holds it, its optimizer and its step. A model that is passed in is trained as it is."""
    training = config.training
    seed_everything(config.system.seed, place.rank)
    with span("model"):
        if model is None:
            arranged = arrange_llama(config, place, load_tokenizer(config.data.tokenizer).vocab_size)
        else:
            arranged = arrange_module(config, place, model)
        MARKS.passed(5)
        train_step = TrainStep(
            arranged.model,
            build_optimizer(arranged.bare_model, training),
            arranged.precision,
            place,
            max_grad_norm=training.max_grad_norm,
            passes=RetryingPasses(arranged, place) if training.oom_retry else arranged.passes,
            norm_of=arranged.norm_of,
            losses_in_job=arranged.losses_in_job,
            local_check=arranged.local_check,
        )
    MARKS.passed(6)
    return Session(config, place, arranged.layout, arranged.bare_model, train_step, loader, held_out)


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
        tokens_per_step=config.training.batch_size * accumulation * context * session.layout.data_parallel,
        tokens_before=session.tokens_before,
        flops_per_token=flops,
        peak_flops=peak,
    )


def fit(
    session: Session,
    *,
    on_step: Callable[[StepInfo], None],
    max_steps: int | None = None,
    saving: Saving | None = None,
    error_dir: Path | None = None,
    dumps_dir: Path | None = None,
    say: Callable[[str], None] = lambda line: None,
    show: Callable[[str], None] = lambda block: None,
    stop_requested: Callable[[], bool] = lambda: False,
) -> StepInfo | None:
    """Trains to the end, or to the step after which a rank was asked to stop; returns the last step.

    A failing rank leaves what it holds in `error_dir`; tensors of a step that is not finite are listed in `dumps_dir`.
    `say` takes a line for the log, `show` a block that must stay as it is.
    """
    guard = Guard(
        session.config, session.place, session.train_step, session.bare_model, say=say, show=show, dumps_dir=dumps_dir
    )
    check = GradientCheck(session.config.debug.verify_gradients, session.train_step, session.bare_model, say)
    left_out: Counter[int] = Counter()
    info: StepInfo | None = None
    if error_dir is not None and session.place.is_first:
        with suppress(OSError):  # what cannot be removed stays
            salvage.remove_leftovers(error_dir)
    try:
        while True:
            loop = _loop(session, max_steps, saving, stop_requested, left_out, check)
            for info in loop:
                if info.hit:
                    on_step(info)
                    if loop.inputs is not None and _goes_back(session, guard, info, loop.inputs, saving, say):
                        left_out[info.step] += 1
                        break
                if saving is not None:
                    info = saving.after_step(info)
                if not info.hit:
                    on_step(info)
                guard.note(info)
                if check.is_due(info.step) and loop.inputs is not None:
                    check.after_step(info.step, _what_fits(session.train_step.passes, loop.inputs.micro_batches[0]))
            else:
                break
    except Exception as error:
        if not (isinstance(error, NumericsError) and guard.dumped):
            _salvage(session, info.step + 1 if info else session.first_step, error_dir, say)
        raise
    finally:
        session.loader.close()
    if saving is not None:
        saving.finish(info)
    return info


def _what_fits(passes: Passes, micro_batch: Any) -> Any:
    """A micro-batch, or the part of it that a rank computes at once since it ran out of memory."""
    return split(micro_batch, passes.pieces)[0] if isinstance(passes, RetryingPasses) else micro_batch


def _loop(
    session: Session,
    max_steps: int | None,
    saving: Saving | None,
    stop_requested: Callable[[], bool],
    left_out: Mapping[int, int],
    check: GradientCheck,
) -> Loop:
    """The loop from where the session stands."""
    config = session.config
    every = config.training.eval_interval

    def saves_after(step: int) -> bool:
        return saving is not None and saving.is_due(step)

    batches = on_device(session.loader, session.place.device, context_cut(config, session.place.rank))
    return Loop(
        _plan(session, max_steps or config.training.max_steps),
        session.train_step,
        named_waits(batches) if config.training.profile else batches,
        rate_of=lambda step: (
            config.training.learning_rate * rate_factor(step, config.training.scheduler, config.training.max_steps)
        ),
        stop_requested=lambda: stop_requested() or (saving is not None and saving.must_stop),
        needs_result=lambda step: (
            config.debug.nan or saves_after(step) or check.is_due(step) or (every > 0 and (step + 1) % every == 0)
        ),
        evaluate=evaluator(session),
        left_out=dict(left_out),
    )


def _goes_back(
    session: Session,
    guard: Guard,
    info: StepInfo,
    inputs: StepInputs,
    saving: Saving | None,
    say: Callable[[str], None],
) -> bool:
    """Explains a bad step; raises where the run must stop, says whether it went back to a checkpoint."""
    checkpoint = _to_go_back_to(session, saving) if saving is not None and guard.wants_back else None
    if not guard.handle(info, inputs, checkpoint=checkpoint.step if checkpoint is not None else None):
        return False
    assert checkpoint is not None
    notes = session.restore(checkpoint)
    if session.place.is_first:
        for note in notes:
            say(f"rollback: {note}")
        say(f"rollback: step {info.step} is left out, going on after step {checkpoint.step}")
    return True


def _to_go_back_to(session: Session, saving: Saving) -> Checkpoint | None:
    """The newest checkpoint of this run that is whole. Collective."""
    saving.settle()
    peers = Peers()
    shapes = _whole_shapes(session, peers)
    try:
        found = search.newest(
            Path(session.config.checkpoint.dir),
            peers,
            lambda manifest: resume.misfit(manifest, shapes),
            lineage=saving.folder,
        )
    except CheckpointError:
        return None
    return found.checkpoint


def _salvage(session: Session, step: int, error_dir: Path | None, say: Callable[[str], None]) -> None:
    """The first failing rank writes its replica locally; an error here must not hide the original failure."""
    # A pipeline stage, like a shard, is not a whole model.
    if error_dir is None or session.config.parallel.pipeline > 1:
        return
    try:
        path = salvage.write_error_checkpoint(error_dir, session.place.rank, step, session.bare_model)
    except (OSError, RuntimeError) as failure:
        say(f"no error checkpoint could be written: {failure}")
    else:
        if path is not None:
            say(f"error checkpoint: {path}")


def _whole_shapes(session: Session, peers: Peers) -> dict[str, tuple[int, ...]]:
    """A stage of a pipeline holds only some of the tensors: what must fit is what all ranks hold together."""
    return {k: v for held in peers.gather(resume.model_shapes(session.bare_model)) for k, v in held.items()}


def continue_from(
    wanted: str | None, session: Session, peers: Peers | None, *, lineage: Path | None = None
) -> tuple[Path | None, list[str]]:
    """Restores what `--resume` names (`auto`: the newest that verifies); collective.

    Returns the lineage to go on saving into (None: a new one) and what to tell the user.
    """
    if wanted is None or peers is None:
        return None, []
    directory = Path(session.config.checkpoint.dir)
    shapes = _whole_shapes(session, peers)
    if wanted != "auto" and (Path(wanted).is_file() or _is_plain_folder(Path(wanted))):
        return None, _start_from_weights(Path(wanted), session, shapes)

    def misfit(manifest: Manifest) -> CheckpointError | None:
        return resume.misfit(manifest, shapes)

    if wanted == "auto":
        found = search.newest(
            directory,
            peers,
            misfit,
            lineage=lineage,
            is_other_data=lambda manifest: resume.is_other_data(manifest, session.loader.identity),
            experiment=session.experiment,
        )
    else:
        found = search.named(Path(wanted), directory, peers, misfit, experiment=session.experiment)
    notes = list(found.notes)
    if found.checkpoint is not None:
        notes += session.restore(found.checkpoint)
        verb = f"continuing after step {found.checkpoint.step}" if session.first_step else "starting"
        notes.append(f"{verb} from {found.checkpoint.path}")
    return found.lineage, notes


def _is_plain_folder(path: Path) -> bool:
    """Weights and nothing to continue: an export that lies beside checkpoints must not stand in for them."""
    return is_weights_folder(path) and not (path / MANIFEST).exists() and not layout.lineages(path)


def _start_from_weights(path: Path, session: Session, shapes: dict[str, tuple[int, ...]]) -> list[str]:
    """Plain weights of any trainer, a file or a Hugging Face folder: the training itself starts at step 0."""
    with span("load", str(path)):
        weights = open_weights(path)
        resume.load_weights(session.bare_model, weights, shapes)
    notes = []
    if weights.removed_prefixes:
        notes.append(f"[MC605] names in {path} carried {', '.join(weights.removed_prefixes)}; taken off")
    return [*notes, f"weights from {path} ({len(weights.tensors)} tensors): optimizer, data and step count start fresh"]
