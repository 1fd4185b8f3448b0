"""What one rank of `model-check train` does: the entry that the launcher starts, or torchrun's process itself."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
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
from model_check.engine.data_spec import data_spec
from model_check.engine.loop import StepInfo
from model_check.engine.metrics import MetricsWriter, Sink, TensorBoardSink, WandbSink
from model_check.engine.place import Place, join, leave
from model_check.engine.preflight import check_data
from model_check.engine.profile import profiled
from model_check.engine.rank_start import begin_rank, print_line
from model_check.engine.saving import Saving, open_saver
from model_check.engine.session import Session
from model_check.engine.worker import build, continue_from, fit, open_loader
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


@contextlib.contextmanager
def _metrics(order: TrainOrder, place: Place, run_dir: RunDir) -> Iterator[MetricsWriter | None]:
    """Rank 0 alone writes metrics and talks to trackers."""
    if not place.is_first:
        yield None
        return
    with MARKS.calling("WandbLogger constructor" if order.config.logging.wandb else "MetricsWriter constructor"):
        writer = _open_writer(order, place, run_dir)
    try:
        yield writer
    finally:
        writer.close()


def _open_writer(order: TrainOrder, place: Place, run_dir: RunDir) -> MetricsWriter:
    sinks: dict[str, Callable[[], Sink]] = {}
    if order.config.logging.tensorboard:
        sinks["tensorboard"] = lambda: TensorBoardSink(run_dir.root / "tensorboard")
    if order.config.logging.wandb:
        sinks["wandb"] = lambda: WandbSink(run_dir.root, to_jsonable(order.config)["values"])

    def say_once(name: str, error: Exception) -> None:
        if BOX.unwritten(name, error):
            print_line(f"[{place.label}] {name} cannot be written ({error}); training goes on")

    return MetricsWriter(run_dir.metrics, sinks, say_once)


def _lineage_of(run_dir: RunDir) -> Path | None:
    """The lineage that this run directory has saved into before, if it was used before."""
    return run_dir.checkpoints.resolve() if run_dir.checkpoints.is_dir() else None


def _remember_lineage(run_dir: RunDir, lineage: Path) -> None:
    try:
        run_dir.checkpoints.unlink(missing_ok=True)
        run_dir.checkpoints.symlink_to(lineage.resolve())
    except OSError as error:
        BOX.unwritten(run_dir.checkpoints.name, error)


def _error_dir(order: TrainOrder, run_dir: RunDir, saving: Saving | None) -> Path | None:
    """Where a failing rank leaves what it holds."""
    if saving is not None:
        return saving.folder
    return Path(order.config.checkpoint.dir) / run_dir.root.name if order.save else None


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
    _join(rank)
    rank.memory.reach("POST-IMPORT")
    session = _build(rank, data)
    MARKS.passed(7)
    rank.memory.reach("POST-MODEL")
    _say_layout(rank, session)
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


def _join(rank: _Rank) -> None:
    system = rank.config.system
    with MARKS.calling(f"init_process_group with backend={system.backend or 'auto'}"):
        join(
            rank.place,
            backend=system.backend,
            timeout_s=system.timeout_s,
            host_tensors=rank.config.fsdp.cpu_offload,
        )


def _build(rank: _Rank, data: PreparedData) -> Session:
    config, place = rank.config, rank.place
    with MARKS.calling(f"build with strategy={config.parallel.strategy}"):
        built = build(config, place)
    return built.with_data(open_loader(config, place, data.train), data.valid)


def _say_layout(rank: _Rank, session: Session) -> None:
    if rank.place.is_first and rank.place.world_size > 1:
        rank.say(f"layout: {session.layout.describe()}")


def _resume(rank: _Rank, session: Session) -> Saving | None:
    """Restores a checkpoint if one was asked for, and opens the saver if this run saves."""
    config, order = rank.config, rank.order
    saves = order.save and config.checkpoint.interval > 0
    peers = Peers() if saves or order.resume else None
    with MARKS.calling(f"resume from {order.resume}") if order.resume else contextlib.nullcontext():
        lineage, notes = continue_from(order.resume, session, peers, lineage=_lineage_of(rank.run_dir))
    if rank.place.is_first:
        for note in notes:
            rank.say(f"resume: {note}")
        if order.resume and session.first_step >= config.training.max_steps:
            rank.say(f"resume: nothing left to do, training.max_steps is {config.training.max_steps}")
    return _open_saving(rank, session, peers, lineage) if saves and peers is not None else None


def _open_saving(rank: _Rank, session: Session, peers: Peers, lineage: Path | None) -> Saving:
    saver = open_saver(rank.config, peers, lineage=lineage, name=rank.run_dir.root.name, origin=session.continued)
    if rank.place.is_first:
        _remember_lineage(rank.run_dir, saver.lineage)
        if saver.shared is not None:
            rank.say(f"checkpoint: another run saves into {saver.shared}; this one saves into {saver.lineage}")
    return Saving(session, saver, last_step=rank.config.training.max_steps, say=rank.say)


def _run_steps(rank: _Rank, session: Session, saving: Saving | None, stop: _StopFlag) -> StepInfo | None:
    """All steps of the run, with their lines and metrics; returns the last one."""
    config, place = rank.config, rank.place
    traced = config.training.profile and place.rank in config.training.profile_ranks
    trace_dir = rank.run_dir.root / "profile" if traced else None
    with (
        _metrics(rank.order, place, rank.run_dir) as metrics,
        profiled(trace_dir, place.rank, rank.say) as step_done,
    ):
        MARKS.passed(9, off=_why_no_wandb(config, place))
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
                error_dir=_error_dir(rank.order, rank.run_dir, saving),
                dumps_dir=rank.run_dir.dumps_dir,
                say=rank.say,
                show=print_line,
                stop_requested=stop,
            )
        MARKS.passed(12)
        MARKS.say_device("after training")
    return last


def _why_no_wandb(config: Config, place: Place) -> str:
    if not config.logging.wandb:
        return "logging.wandb is false"
    return "" if place.is_first else "only rank 0 logs to W&B"


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
