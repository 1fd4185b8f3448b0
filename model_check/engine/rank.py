"""What one rank of `model-check train` does: the entry that the launcher starts, or torchrun's process itself."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from model_check.blackbox import memory_marks, outofmemory
from model_check.blackbox.box import BOX
from model_check.blackbox.memory_marks import MemoryMarks
from model_check.blackbox.spans import span
from model_check.blackbox.start_marks import MARKS
from model_check.checkpoint.peers import Peers
from model_check.config import Config, to_jsonable
from model_check.data import PreparedData, load_tokenizer, prepare
from model_check.engine.data_and_shape import data_spec
from model_check.engine.feed import open_loader
from model_check.engine.loop import StepInfo
from model_check.engine.metrics import MetricsWriter, Sink, TensorBoardSink, WandbSink
from model_check.engine.place import Place, join, leave
from model_check.engine.preflight import check_data
from model_check.engine.profile import profiled
from model_check.engine.rank_start import begin_rank, print_line
from model_check.engine.saving import Saving
from model_check.engine.session import Session
from model_check.engine.worker import assemble, continue_from, fit
from model_check.record import RunDir
from model_check.record.host_lock import in_turn
from model_check.record.rank_context import RankContext
from model_check.record.rank_exits import EXIT_STOPPED_AND_SAVED
from model_check.record.signal_handlers import handle
from model_check.record.step_lines import step_line


@dataclass(frozen=True)
class TrainOrder:
    """What the launcher tells every rank; plain data, so that it can be pickled."""

    config: Config
    resume: str | None = None
    save: bool = True
    verbose_init: bool = False


class _StopFlag:
    """Remembers that this rank was asked to stop; the ranks agree on the step in the reduction they share anyway."""

    def __init__(self) -> None:
        self.number: int | None = None
        signal.signal(signal.SIGTERM, self._remember)  # our launcher's own request
        handle({signal.SIGUSR1: self._remember})
        # Ctrl-C reaches the whole foreground group; the launcher passes it on as SIGTERM.
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def _remember(self, number: int, frame: object) -> None:
        self.number = number

    def __call__(self) -> bool:
        return self.number is not None


def _remember_lineage(run_dir: RunDir, lineage: Path) -> None:
    try:
        run_dir.checkpoints.unlink(missing_ok=True)
        run_dir.checkpoints.symlink_to(lineage.resolve())
    except OSError as error:
        BOX.unwritten(run_dir.checkpoints.name, error)


def train_rank(context: RankContext, order: TrainOrder) -> None:
    """Trains as one rank. Asked to stop, it exits with 75 after a save, or with 143."""
    try:
        _train(context, order)
    except Exception as error:
        outofmemory.note(error)  # while its frames still hold what filled the memory
        raise


def _train(context: RankContext, order: TrainOrder) -> None:
    begin_rank(context, verbose=order.verbose_init)
    stop = _StopFlag()
    rank = _Rank(context, order)
    _share_cores(rank.place)
    rank.memory.reach("START")
    MARKS.say_environment()
    MARKS.say_device("at the start")
    MARKS.passed(3)
    data = _prepare_data(rank)
    MARKS.passed(4)
    config, place = rank.config, rank.place
    with MARKS.calling(f"init_process_group with backend={config.system.backend or 'auto'}"):
        join(place, config)
    rank.memory.reach("POST-IMPORT")
    loader = open_loader(config, place, data.train)
    with MARKS.calling(f"build with strategy={config.parallel.strategy}"):
        session = assemble(config, place, loader, held_out=data.valid)
    MARKS.passed(7)
    rank.memory.reach("POST-MODEL")
    if place.is_first and place.world_size > 1:
        rank.say(f"layout: {session.layout.describe()}")
    saving = _resume(rank, session)
    MARKS.passed(8)
    last = _run_steps(rank, session, saving, stop)
    leave()
    _exit_if_stopped(rank, last, saving)


class _Rank:
    """What every stage of a rank's life needs: its order, its place in the job, the run directory, a way to print."""

    def __init__(self, context: RankContext, order: TrainOrder) -> None:
        self.order = order
        self.config = order.config
        self.run_dir = RunDir(Path(context.run_dir))
        self.place = Place(
            context.rank, context.world_size, torch.device(context.device), context.label, context.local_world_size
        )
        self.memory = MemoryMarks(self.say)

    def say(self, line: str) -> None:
        print_line(f"[{self.place.label}] {line}")


def _share_cores(place: Place) -> None:
    """CPU ranks of a host divide its cores; a GPU rank needs one thread."""
    sharing = (place.ranks_per_host or place.world_size) if place.device.type == "cpu" else torch.get_num_threads()
    torch.set_num_threads(max(1, torch.get_num_threads() // sharing))


def _prepare_data(rank: _Rank) -> PreparedData:
    """The first rank of a host fetches and builds; the others find the result. No rank waits in a collective."""
    with MARKS.calling("load_tokenizer and prepare"), contextlib.ExitStack() as turn:
        with span("gate", "its turn to prepare the data"):
            turn.enter_context(in_turn(rank.run_dir.root / "start" / f"{os.uname().nodename}.lock"))
        load_tokenizer(rank.config.data.tokenizer)
        data = prepare(data_spec(rank.config))
    check_data(rank.config, rank.place.world_size, data)
    return data


def _resume(rank: _Rank, session: Session) -> Saving | None:
    """Restores a checkpoint if one was asked for, and opens the saver if this run saves."""
    config, order = rank.config, rank.order
    saves = order.save and config.checkpoint.interval > 0
    peers = Peers() if saves or order.resume else None
    with MARKS.calling(f"resume from {order.resume}") if order.resume else contextlib.nullcontext():
        # A run directory that was used before goes on with the lineage that it saved into.
        used = rank.run_dir.checkpoints.resolve() if rank.run_dir.checkpoints.is_dir() else None
        lineage, notes = continue_from(order.resume, session, peers, lineage=used)
    if rank.place.is_first:
        for note in notes:
            rank.say(f"resume: {note}")
        if order.resume and session.first_step >= config.training.max_steps:
            rank.say(f"resume: nothing left to do, training.max_steps is {config.training.max_steps}")
    return _open_saving(rank, session, peers, lineage) if saves and peers is not None else None


def _open_saving(rank: _Rank, session: Session, peers: Peers, lineage: Path | None) -> Saving:
    last_step, name = rank.config.training.max_steps, rank.run_dir.root.name
    saving = Saving(session, peers, name=name, last_step=last_step, lineage=lineage, say=rank.say)
    if rank.place.is_first:
        _remember_lineage(rank.run_dir, saving.folder)
        if saving.shared is not None:
            rank.say(f"checkpoint: another run saves into {saving.shared}; this one saves into {saving.folder}")
    return saving


def _run_steps(rank: _Rank, session: Session, saving: Saving | None, stop: _StopFlag) -> StepInfo | None:
    """All steps of the run, with their lines and metrics; returns the last one."""
    config, place = rank.config, rank.place
    traced = config.training.profile and place.rank in config.training.profile_ranks
    trace_dir = rank.run_dir.root / "profile" if traced else None
    # Where a failing rank leaves what it holds.
    error_dir = Path(config.checkpoint.dir) / rank.run_dir.root.name if rank.order.save else None
    no_wandb = "" if place.is_first else "only rank 0 logs to W&B"
    with (
        _metrics(rank) as metrics,
        profiled(trace_dir, place.rank, rank.say) as step_done,
    ):
        MARKS.passed(9, off=no_wandb if config.logging.wandb else "logging.wandb is false")
        memory_marks.mark("assembled")
        MARKS.passed(10)

        def on_step(info: StepInfo) -> None:
            rank.memory.reach("FIRST-STEP")
            if metrics is not None:
                metrics.write(info)
            _print_step(rank, info)
            step_done()

        MARKS.say_device("before training")
        MARKS.passed(11)
        with MARKS.calling("fit"):
            last = fit(
                session,
                on_step=on_step,
                saving=saving,
                error_dir=saving.folder if saving is not None else error_dir,
                dumps_dir=rank.run_dir.dumps_dir,
                say=rank.say,
                show=print_line,
                stop_requested=stop,
            )
        MARKS.passed(12)
        MARKS.say_device("after training")
    return last


def _metrics(rank: _Rank) -> contextlib.AbstractContextManager[MetricsWriter | None]:
    """Rank 0 alone writes metrics and talks to trackers."""
    if not rank.place.is_first:
        return contextlib.nullcontext()
    logging, root = rank.config.logging, rank.run_dir.root
    sinks: dict[str, Callable[[], Sink]] = {}
    if logging.tensorboard:
        sinks["tensorboard"] = lambda: TensorBoardSink(root / "tensorboard")
    if logging.wandb:
        sinks["wandb"] = lambda: WandbSink(root, to_jsonable(rank.config)["values"])

    def say_once(name: str, error: Exception) -> None:
        if BOX.unwritten(name, error):
            rank.say(f"{name} cannot be written ({error}); training goes on")

    with MARKS.calling("WandbLogger constructor" if logging.wandb else "MetricsWriter constructor"):
        return contextlib.closing(MetricsWriter(rank.run_dir.metrics, sinks, say_once))


def _print_step(rank: _Rank, info: StepInfo) -> None:
    training = rank.config.training
    if info.step % training.log_interval == 0 or info.step == training.max_steps - 1:
        print_line(
            step_line(
                rank.place.label,
                info.step,
                training.max_steps,
                info.loss,
                info.lr,
                info.grad_norm,
                info.eta_s,
                lowered_scale=info.lowered_scale,
            )
        )
    if info.val_loss is not None and rank.place.is_first:
        rank.say(f"Eval [{info.step}/{training.max_steps}] | Val Loss: {info.val_loss:.4f}")


def _exit_if_stopped(rank: _Rank, last: StepInfo | None, saving: Saving | None) -> None:
    if last is None or not last.stop:
        return
    saved = saving is not None and saving.committed == last.step
    rank.say("stopped by request" + (", state saved" if saved else ""))
    sys.exit(EXIT_STOPPED_AND_SAVED if saved else 128 + signal.SIGTERM)
