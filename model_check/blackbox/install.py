"""Attaches the black box to this process: its ring if it is a rank, and our patches to modules as they are imported."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from model_check.blackbox import (
    compiler,
    endings,
    exceptions,
    gate,
    memory_marks,
    outofmemory,
    service,
    watched_calls,
)
from model_check.blackbox.box import BOX, RANK_PID_VARIABLE, rank_from_environment
from model_check.blackbox.imports import PostImport
from model_check.record.events.crashes import Fork
from model_check.record.paths import RunDir

_SLOW_PACKAGES = frozenset(
    """
    torch torchvision torchaudio transformers datasets accelerate peft trl lightning pytorch_lightning deepspeed
    tensorflow jax sklearn pandas wandb mlflow
    """.split()  # noqa: SIM905 a list of words
)


class _Installed:
    hooks = False


def install(run_dir: Path | str, rank: int | None = None, **identity: Any) -> None:
    """Records this process in the run directory: now if its rank is given or in the environment, else once it joins.

    `identity` goes into the ring's header, e.g. world_size and local_rank.
    """
    BOX.run_dir = RunDir(Path(run_dir))
    # Helpers of a rank too: a loader worker that was spawned is read from outside like one that was forked.
    service.allow_ptrace()
    # The flight recorder is off by default in some versions of torch, and reads this when it is loaded.
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    if rank is None and not _belongs_to_a_rank():
        rank = rank_from_environment(os.environ)
        BOX.may_adopt = rank is None
    if rank is not None:
        BOX.open(rank, **identity)
        service.write_stacks_on_demand()
        memory_marks.mark("start")
        gate.open_for(rank)
    _install_hooks()


def _belongs_to_a_rank() -> bool:
    """A helper process of a rank, or a child of multiprocessing: a rank only if it joins a process group itself."""
    if os.environ.get(RANK_PID_VARIABLE, str(os.getpid())) != str(os.getpid()):
        return True
    return any("multiprocessing" in word for word in sys.orig_argv[1:3])


def _install_hooks() -> None:
    """Once a process; children of a fork inherit everything here."""
    if _Installed.hooks:
        return
    _Installed.hooks = True
    endings.install()
    outofmemory.install()
    watched_calls.watch_standard_input()
    exceptions.listen_to(sys.stdout)
    exceptions.listen_to(sys.stderr, endings.ENDING.interpreter_says)
    exceptions.hear_handlers()
    _watch_fork()
    PostImport(_patches(), _SLOW_PACKAGES).install()


def _patches() -> dict[str, Callable[[ModuleType], None]]:
    """What to do with each module right after its import. Rooms of torch are imported only then."""

    def distributed(module: ModuleType) -> None:
        from model_check.blackbox import collectives, joining

        collectives.patch(module)
        joining.patch(module)

    def training(name: str) -> Callable[[ModuleType], None]:
        def patch(module: ModuleType) -> None:
            from model_check.blackbox import step_phases as phases

            getattr(phases, name)(module)

        return patch

    return {
        **watched_calls.patches(),
        "multiprocessing.process": endings.patch_multiprocessing_process,
        "torch.multiprocessing.spawn": endings.patch_torch_spawn,
        "torch.cuda": outofmemory.patch_cuda,
        "torch.distributed.distributed_c10d": distributed,
        "torch.utils.data.dataloader": training("patch_loader"),
        "torch.nn.modules.module": training("patch_module_call"),
        "torch.nn.utils.clip_grad": training("patch_clipping"),
        "torch.autograd.graph": training("patch_saved_hooks"),
        "torch.autograd": training("patch_autograd"),
        "torch.optim.optimizer": training("patch_optimizer"),
        "torch.amp.grad_scaler": training("patch_scaler"),
        "torch._dynamo.eval_frame": compiler.patch_eval_frame,
        "torch._inductor.compile_fx": gate.patch_inductor,
    }


def _watch_fork() -> None:
    fork = os.fork

    def recorded_fork() -> int:
        child = fork()
        if child and BOX.recorder is not None:
            BOX.event(Fork(child_pid=child))
        return child

    recorded_fork.__doc__ = fork.__doc__
    os.fork = recorded_fork
    os.register_at_fork(after_in_child=_after_fork_in_child)


def _after_fork_in_child() -> None:
    """The ring is the parent's. This child becomes a rank only if it joins a process group itself."""
    was_rank = BOX.recorder is not None
    BOX.leave()
    BOX.may_adopt = False
    exceptions.NOTES.forget()
    endings.forget_after_fork()
    phases = sys.modules.get("model_check.blackbox.step_phases")
    if phases is not None:
        phases.forget_after_fork()
    if was_rank:
        service.allow_ptrace()
