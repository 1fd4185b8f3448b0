"""`model-check train`: configuration, GPUs, data, ranks, summary."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from model_check.blackbox.endings import recording_failures
from model_check.blackbox.gate import Gate
from model_check.checkpoint import layout
from model_check.cli.fitting import Fitted, check_host_memory, fit_to_gpus
from model_check.cli.flags import configured, flag_values, gpu_count_from_environment, require_world
from model_check.cli.options import BatchSize, ConfigFiles, Debug, Gpus, Overrides, Preset, RunDirMode
from model_check.cli.unwinding import signals_unwind_us
from model_check.config import Config, to_jsonable
from model_check.config.eight_bit import torchao_is_installed, torchao_missing
from model_check.config.shard_index import is_weights_folder
from model_check.engine.rank_start import begin_rank
from model_check.errors import ModelCheckError, UsageError
from model_check.launch import Gpu, choose_gpus, list_gpus
from model_check.launch.gate import plan_gate
from model_check.launch.limits import check_address_space, limit_address_space, use_less_memory
from model_check.launch.warmstart import without_looking_for_garbage
from model_check.record import Finding, RunDir, Verdict, write_json_atomic
from model_check.record.claim import Claim, Job, enter
from model_check.record.paths import RUN_DIR_VARIABLE, read_mode
from model_check.record.rank_context import RankContext, foreign_launcher
from model_check.record.redaction import redact_text

CPU_RANKS = 2
LARGE_ON_A_CPU = 200_000_000  # parameters

Enter = Callable[..., tuple[RunDir, Claim]]  # `enter` with the run directory's flags filled in


@dataclass(frozen=True)
class Launch:
    """How the ranks of this host are started, beside what the configuration says."""

    gpus: list[Gpu]
    ranks: int
    nnodes: int
    rdzv_endpoint: str | None
    resume: str | None
    verbose_init: bool


def train(
    preset: Preset = None,
    config: ConfigFiles = None,
    overrides: Overrides = None,
    debug: Debug = False,
    gpus: Gpus = None,
    nproc: Annotated[int | None, typer.Option(help="Number of ranks: one per GPU, or CPU ranks without one.")] = None,
    nnodes: Annotated[int, typer.Option(help="Hosts of the job; run the same command on each.")] = 1,
    rdzv_endpoint: Annotated[str | None, typer.Option(help="HOST:PORT of the first host, with --nnodes.")] = None,
    max_steps: Annotated[int | None, typer.Option(help="Stop after this many optimizer steps.")] = None,
    fast_dev_run: Annotated[int, typer.Option(help="Only N steps, without checkpoints and trackers.")] = 0,
    batch_size: BatchSize = None,
    num_workers: Annotated[int | None, typer.Option(help="Loader threads per rank.")] = None,
    resume: Annotated[str | None, typer.Option(help="auto, a checkpoint's folder, or weights in another form.")] = None,
    run_dir: Annotated[Path | None, typer.Option(help="Where the run writes (default .outputs/<run-id>).")] = None,
    run_dir_mode: RunDirMode = "0700",
    profile: Annotated[bool, typer.Option("--profile", help="Trace a few steps with the torch profiler.")] = False,
    force: Annotated[
        bool,
        typer.Option("--force", help="Start where the plan says that it does not fit, or in a run directory in use."),
    ] = False,
    verbose_init: Annotated[
        bool, typer.Option("--verbose-init", help="Every rank says where it is on its way to the first step.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the resolved configuration and stop.")] = False,
    single: Annotated[bool, typer.Option("--single", hidden=True, help="One rank, on system.device_id.")] = False,
) -> int:
    """Train a LLaMA on every GPU of this machine, or on two CPU ranks where there is none.

    Example: model-check train --preset debug --max-steps 20
    """
    flags = flag_values(
        max_steps=max_steps,
        fast_dev_run=fast_dev_run,
        batch_size=batch_size,
        num_workers=num_workers,
        profile=profile,
    )
    resolved = configured(preset, debug, config or [], overrides or [], flags)
    if resolved.launch.low_memory:
        use_less_memory()
    _check_resume(resume)
    mode = read_mode(run_dir_mode)
    visible = _visible_gpus(resolved)
    enter_dir = partial(enter, force=force, mode=mode)
    if foreign_launcher(os.environ) and not dry_run:
        return _one_rank_of(resolved, visible, run_dir, resume, enter_dir, force=force, verbose_init=verbose_init)
    chosen, ranks = _placement(resolved, visible, gpus, nproc, single)
    if nnodes > 1 and rdzv_endpoint is None:
        raise UsageError(f"--nnodes {nnodes} needs a place to meet", remedy="add --rdzv-endpoint HOST:PORT of one host")
    require_world(resolved, ranks * nnodes)
    sizes = {"world_size": ranks * nnodes, "ranks_per_host": ranks}
    fitted = fit_to_gpus(resolved, chosen, **sizes, force=force, say=_to_stderr)
    if dry_run:
        typer.echo(json.dumps(to_jsonable(fitted.config), indent=2))
        return 0
    check_host_memory(fitted.config, on_gpu=bool(chosen), **sizes, force=force, say=_to_stderr)
    launch = Launch(chosen, ranks, nnodes, rdzv_endpoint, resume, verbose_init)
    return _train_here(fitted, launch, partial(enter_dir, run_dir))


def _visible_gpus(config: Config) -> list[Gpu]:
    visible = [] if config.system.device == "cpu" else list_gpus()
    if config.system.device == "cuda" and not visible:
        raise UsageError("system.device is cuda and this machine shows no GPU", remedy="set system.device=auto or cpu")
    return visible


def _placement(
    config: Config, visible: list[Gpu], gpus: str | None, nproc: int | None, single: bool
) -> tuple[list[Gpu], int]:
    """The GPUs of the job and its number of ranks on this host."""
    wanted = gpu_count_from_environment(os.environ) if nproc is None else nproc
    if single and gpus is None and wanted is None:
        if not visible:
            return [], 1
        return [_device_by_id(config.system.device_id, visible)], 1
    chosen = choose_gpus(gpus, wanted, visible)
    return chosen, len(chosen) or wanted or CPU_RANKS


def _device_by_id(device_id: int | None, visible: list[Gpu]) -> Gpu:
    """By the number nvidia-smi shows, or else by place among the visible ones, as CUDA itself counts."""
    if device_id is None:
        return visible[0]
    for gpu in visible:
        if gpu.index == device_id:
            return gpu
    if device_id < len(visible):
        return visible[device_id]
    known = ", ".join(str(gpu.index) for gpu in visible)
    raise UsageError(f"system.device_id={device_id} is not a visible GPU", remedy=f"use one of {known}")


def _to_stderr(line: str) -> None:
    typer.echo(line, err=True)


def _write_identity(run_dir: RunDir, fitted: Fitted) -> None:
    from model_check.record.environment import snapshot_environment

    write_json_atomic(run_dir.config, _without_secrets(to_jsonable(fitted.config)))
    if fitted.plan is not None:
        write_json_atomic(run_dir.plan, fitted.plan)
    write_json_atomic(run_dir.environment, snapshot_environment())


def _without_secrets(value: Any) -> Any:
    """A configuration may hold a URL with a password in it; the run directory must not."""
    if isinstance(value, dict):
        return {key: _without_secrets(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_without_secrets(inner) for inner in value]
    return redact_text(value) if isinstance(value, str) else value


def _one_rank_of(
    config: Config,
    visible: list[Gpu],
    run_dir: Path | None,
    resume: str | None,
    enter_dir: Enter,
    *,
    force: bool,
    verbose_init: bool,
) -> int:
    """torchrun or srun has made a rank of this process: train as it, launch nothing."""
    # Every rank must name the same directory, and none may ask another on the way there.
    job = os.environ.get("TORCHELASTIC_RUN_ID") or os.environ.get("SLURM_JOB_ID") or os.environ.get("MASTER_PORT", "0")
    root = run_dir or Path(".outputs") / f"job-{job}-{os.environ.get('MASTER_PORT', '0')}"
    directory = _enter_as_rank(root, job, enter_dir)
    context = RankContext.from_environment(
        os.environ, run_dir=directory.root, gpus=visible, device=config.system.device
    )
    # Under `model-check run` this process records into that directory already.
    if os.environ.get(RUN_DIR_VARIABLE) != str(directory.root):
        directory.set_aside_earlier_life(context.rank, context.world_size)
    begin_rank(context, verbose=verbose_init)
    # Our own mistakes' sentences end the process in order: nobody but us would record them as its failure.
    recording_failures(_train_as)(context, config, visible, resume, force=force, verbose_init=verbose_init)
    return 0


def _enter_as_rank(root: Path, job_id: str, enter_dir: Enter) -> RunDir:
    """The ranks of a job share the claim on the directory; each holds it until its process ends."""
    if os.environ.get(RUN_DIR_VARIABLE) == str(root.resolve()):
        return RunDir.create(root, resuming=True)  # `model-check run` has claimed it for us
    endpoint = f"{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '0')}"
    directory, _ = enter_dir(root, Job.meeting_at(endpoint, job_id), resuming=True)
    return directory


def _train_as(
    context: RankContext, config: Config, visible: list[Gpu], resume: str | None, *, force: bool, verbose_init: bool
) -> None:
    directory = RunDir(context.run_dir)
    require_world(config, context.world_size)
    on_gpu = context.device.startswith("cuda")
    say = _to_stderr if context.rank == 0 else lambda line: None
    ranks, world_size = context.local_world_size, context.world_size
    fitted = fit_to_gpus(
        config, visible if on_gpu else [], world_size=world_size, ranks_per_host=ranks, force=force, say=say
    )
    check_host_memory(fitted.config, on_gpu=on_gpu, world_size=world_size, ranks_per_host=ranks, force=force, say=say)
    if config.launch.memory_limit_gb is not None:
        _limit_one_rank(context, config.launch.memory_limit_gb)
    with _gate_of_one_rank(config, context):
        from model_check.engine.preflight import check_weights
        from model_check.engine.rank import TrainOrder, train_rank
    check_weights(fitted.config, resume)
    if context.rank == 0:
        _write_identity(directory, fitted)
    train_rank(context, TrainOrder(fitted.config, resume, verbose_init=verbose_init))


def _gate_of_one_rank(config: Config, context: RankContext) -> contextlib.AbstractContextManager[None]:
    """torchrun's ranks are interpreters of their own: where the user asks for it they import in turn."""
    if config.launch.start != "gate":
        return contextlib.nullcontext()
    plan = plan_gate(RunDir(context.run_dir), context.local_world_size)
    os.environ.update(plan.variables())
    return Gate(plan, context.rank).passing()


def _limit_one_rank(context: RankContext, limit_gb: float) -> None:
    if context.device != "cpu":
        raise UsageError(
            "launch.memory_limit_gb on GPU ranks needs our launcher, which watches them",
            remedy="start with model-check train, or set launch.memory_limit_gb=null",
        )
    check_address_space(limit_gb, forked=False)
    limit_address_space(limit_gb)


def _train_here(fitted: Fitted, launch: Launch, enter_dir: Enter) -> int:
    config, resume, endpoint = fitted.config, launch.resume, launch.rdzv_endpoint
    _check_checkpoint_folder(config)
    _check_vocabulary_cut(config)
    _check_what_is_here(config, on_gpu=bool(launch.gpus))
    _warn_of_a_large_model_on_the_cpu(config, launch.gpus)
    with without_looking_for_garbage():
        from model_check.engine.preflight import check_weights
    check_weights(config, resume)
    job = Job.meeting_at(endpoint) if endpoint and launch.nnodes > 1 else Job.alone()
    directory, claim = enter_dir(job, resuming=resume is not None, resume_flag="--resume auto")
    with claim:
        if not claim.joined:
            directory.set_aside_earlier_attempt()
        return _train_in(directory, fitted, launch)


def _train_in(directory: RunDir, fitted: Fitted, launch: Launch) -> int:
    with without_looking_for_garbage():
        from model_check.cli.prepare import prepare_with_progress
        from model_check.cli.summary import summary_lines
        from model_check.cli.supervision import show_findings, supervisor_for
        from model_check.data import entropy_floor
        from model_check.engine.data_and_shape import data_spec
        from model_check.engine.preflight import check_data
        from model_check.engine.rank import TrainOrder, train_rank
        from model_check.launch.console import ConsoleOptions
        from model_check.launch.job import launch_job
        from model_check.launch.placement import Hosts
        from model_check.supervise.hooks import Graces
        from model_check.supervise.supervisor import Limits

    config, world_size = fitted.config, launch.ranks * launch.nnodes
    _write_identity(directory, fitted)
    with _verdict_before_the_ranks(directory, world_size), _speaking() as say:
        check_data(config, world_size, prepare_with_progress(config, say=say))
    limits = Limits(kill_after_s=config.launch.hang_kill_after_s, io_kill_after_s=config.launch.io_kill_after_s)
    supervisor = supervisor_for(directory, limits)
    with _mistakes_in_the_verdict(directory, phase="start"):
        result = launch_job(
            train_rank,
            TrainOrder(config, launch.resume, verbose_init=launch.verbose_init),
            nproc=launch.ranks,
            run_dir=directory,
            hosts=Hosts(launch.nnodes, launch.rdzv_endpoint) if launch.rdzv_endpoint else None,
            gpus=launch.gpus,
            start=config.launch.start,
            preload_modules=_preload(config, bool(launch.gpus)),
            max_restarts=config.launch.max_restarts,
            memory_limit_gb=config.launch.memory_limit_gb,
            graces=Graces(stop_s=config.launch.stop_grace_s) if config.checkpoint.interval else None,
            hooks=supervisor.hooks(),
            console=ConsoleOptions(
                max_steps=config.training.max_steps,
                log_copies=Path(config.logging.dir) if config.logging.dir else None,
            ),
        )
    if result.outcome == "interrupted":
        supervisor.note_stop("interrupted", result.message)
    show_findings(supervisor.finish(result.outcome, result.exits, result.exit_code), supervisor)
    floor = entropy_floor(data_spec(config)) if config.data.dataset == "synthetic" else None
    with _speaking() as say:
        for line in summary_lines(directory, result.log_dir, outcome=result.outcome, entropy_floor=floor):
            say(line)
    return result.exit_code


@contextlib.contextmanager
def _speaking() -> Iterator[Callable[[str], None]]:
    """For lines on standard output that a reader who left or stalls must not turn into the end of the run."""
    from model_check.launch.messages import Voice

    voice = Voice(lambda: sys.stdout)
    try:
        yield voice.say
    finally:
        voice.close()  # its thread too: from here on the launcher may fork


@contextlib.contextmanager
def _verdict_before_the_ranks(directory: RunDir, world_size: int) -> Iterator[None]:
    """What ends a run before its ranks start is in its verdict too."""
    verdict = Verdict(world_size=world_size)
    verdict.write(directory.verdict)
    try:
        with signals_unwind_us(), _mistakes_in_the_verdict(directory, phase="data"):
            yield
    except (KeyboardInterrupt, SystemExit) as interruption:
        code: Any = interruption.code if isinstance(interruption, SystemExit) else 128 + signal.SIGINT
        replace(verdict, outcome="interrupted", exit_code=code).write(directory.verdict)
        typer.echo("stopped while the data was prepared: no rank was started", err=True)
        sys.exit(code)


@contextlib.contextmanager
def _mistakes_in_the_verdict(directory: RunDir, *, phase: str) -> Iterator[None]:
    """Writes an error that ends the launcher into its verdict, which would otherwise say "running" forever."""
    try:
        yield
    except ModelCheckError as error:
        verdict = Verdict.read(directory.verdict) or Verdict()
        fix = [error.remedy] if error.remedy else []
        finding = Finding(error.code or "MC301", redact_text(error.message), phase=phase, fix=fix)
        replace(verdict, outcome="failed", exit_code=error.exit_code, findings=[*verdict.findings, finding]).write(
            directory.verdict
        )
        raise


def _check_resume(resume: str | None) -> None:
    """A path that is not there, or is something else, is a slip of the pen: no rank need start to find that out."""
    if resume in (None, "auto"):
        return
    path = Path(resume)
    if not path.exists():
        wrong = f"there is no checkpoint {resume}"
    elif path.is_dir() and not layout.holds_any(path) and not is_weights_folder(path):
        wrong = f"{resume} holds no checkpoint and no weights"
    else:
        return
    raise UsageError(
        wrong, remedy="name a step_* folder, a .pt or .safetensors file or a Hugging Face folder, or use --resume auto"
    )


def _check_what_is_here(config: Config, *, on_gpu: bool) -> None:
    """What needs a package or a chip that this machine lacks: every rank would stop at it."""
    if config.logging.wandb and importlib.util.find_spec("wandb") is None:
        raise UsageError("logging.wandb is true and wandb is not installed", remedy="pip install wandb, or turn it off")
    if config.training.optimizer_states == "8bit" and not torchao_is_installed():
        raise torchao_missing()
    if config.training.compute_precision == "fp8" and not on_gpu:
        raise UsageError("training.precision=fp8 does not run on CPU ranks", remedy="use bf16")


def _check_checkpoint_folder(config: Config) -> None:
    """Before the first step: a folder that cannot be written would be noticed only at the first save."""
    if not config.checkpoint.interval:
        return
    folder = Path(config.checkpoint.dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        usable = os.access(folder, os.W_OK)
    except OSError:
        usable = False
    if not usable:
        raise UsageError(
            f"checkpoint.dir={folder} cannot be written to", remedy="name another folder, or set checkpoint.interval=0"
        )


def _check_vocabulary_cut(config: Config) -> None:
    """Where only the tokenizer says how large the vocabulary is, the rules of the configuration could not ask it."""
    from model_check.cli.plan import shape_of

    ranks = config.parallel.tensor
    if ranks == 1:
        return
    size = shape_of(config).vocab_size
    if size % ranks:
        raise UsageError(
            f"the vocabulary of {size} (data.tokenizer={config.data.tokenizer}) cannot be cut over "
            f"parallel.tensor={ranks} ranks",
            remedy=f"set model.vocab_size={size + -size % ranks}, whose last rows stay unused",
        )


def _warn_of_a_large_model_on_the_cpu(config: Config, chosen: list[Gpu]) -> None:
    from model_check.cli.plan import shape_of

    if chosen:
        return
    parameters = shape_of(config).parameters()
    if parameters > LARGE_ON_A_CPU:
        typer.echo(
            f"warning: {parameters / 1e9:.1f} B parameters on CPU ranks take minutes a step; try --preset debug",
            err=True,
        )


def _preload(config: Config, on_gpu: bool) -> tuple[str, ...]:
    """What the ranks import before their first step; every optimizer asks dynamo, only compiling asks inductor."""
    modules: tuple[str, ...] = (
        "torch",
        "torch.distributed",
        "torch.nn.parallel",
        "torch.optim",
        "torch._dynamo",
        "model_check.engine.rank",
    )
    parallel = config.parallel
    if parallel.strategy in ("fsdp", "hsdp") or parallel.tensor * parallel.pipeline * parallel.context > 1:
        modules += ("model_check.engine.sharded", "model_check.models.parallelize")
    if parallel.tensor > 1:
        modules += ("model_check.models.tensor",)
    if parallel.context > 1:
        modules += ("model_check.models.context",)
    if parallel.pipeline > 1:
        modules += ("model_check.engine.pipelined",)
    compiles = config.training.compile == "on" or (config.training.compile == "auto" and on_gpu)
    if config.checkpoint.interval:
        modules += ("model_check.checkpoint.saver", "torch.distributed.checkpoint.default_planner")
    return (*modules, "torch._inductor.compile_fx") if compiles else modules
