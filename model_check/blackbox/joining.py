"""init_process_group and its kin: the moment a process learns which rank it is, and with whom.

A script that starts its ranks itself (mp.spawn, fork, a cluster's own launcher) gets its ring here; so does the service
that answers while the main thread is stuck, because before this point a script may still fork.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qs, urlsplit

import torch

from model_check.blackbox import gate, memory_marks, native_collectives
from model_check.blackbox.box import BOX, SpanKind, rank_from_environment
from model_check.blackbox.exceptions import NOTES
from model_check.blackbox.groups import GROUPS
from model_check.blackbox.service import Service, write_stacks_on_demand
from model_check.blackbox.spans import spanned
from model_check.record.events.process import Joining, Threads, Versions
from model_check.record.process_identity import is_near, live_pid
from model_check.record.ring import MEMBERS_ONLY, RAISED, read_header, read_ring

_JOINING = SpanKind("init", "new_group")
_AT_WORK = frozenset({"init", "forward", "backward", "optimizer", "collective", "p2p", "barrier", "step"})


_KEPT_GROUPS = 32  # each holds descriptors and threads: a script may make and leave groups without an end


class _Running:
    service: Service | None = None
    left: ClassVar[deque[Any]] = deque(maxlen=_KEPT_GROUPS)


def _announced_rank(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """The rank this process is about to join as, as far as it can be known before."""
    rank = args[4] if len(args) > 4 else kwargs.get("rank", -1)
    if isinstance(rank, int) and rank >= 0:
        return rank
    url = args[1] if len(args) > 1 else kwargs.get("init_method")
    if isinstance(url, str) and (told := parse_qs(urlsplit(url).query).get("rank")) and told[0].isdigit():
        return int(told[0])
    return rank_from_environment(os.environ)


def _announced_size(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """How many ranks this process expects to meet, as far as it can be known before."""
    size = args[3] if len(args) > 3 else kwargs.get("world_size", -1)
    if isinstance(size, int) and size > 0:
        return size
    url = args[1] if len(args) > 1 else kwargs.get("init_method")
    told = parse_qs(urlsplit(url).query).get("world_size") if isinstance(url, str) else None
    text = told[0] if told else os.environ.get("WORLD_SIZE", "")
    return int(text) if text.isdigit() else None


def _announced_store(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Where the members of this group meet: the port or file of the store, which is the same for all of them."""
    store = args[5] if len(args) > 5 else kwargs.get("store")
    if store is not None:
        return str(store.port) if isinstance(store, torch.distributed.TCPStore) else type(store).__name__
    url = args[1] if len(args) > 1 else kwargs.get("init_method")
    if not isinstance(url, str) or url.startswith("env:"):
        return os.environ.get("MASTER_PORT", "")
    parts = urlsplit(url)
    return str(parts.port or parts.path)


def _may_become(rank: int, world_size: int | None, store: str) -> bool:
    """Whether this process is the job's rank, not a helper whose own process group has a rank with that number.

    A live process that has joined or begun to train keeps its rank, and a process group with another size or store is
    not the job's. A rank that has done neither may be a launcher (mp.spawn, a wrapper): it gives up its place to a
    member of a larger group, or of the group that it was meant to join itself. If the job's launcher has numbered all
    ranks, the size of the job is known before any rank joins.
    """
    run_dir = BOX.run_dir
    if run_dir is None:
        return False
    rings = {path: read_header(path) for path in run_dir.blackbox_dir.glob("rank-*.ring")}
    others = {path: who for path, who in rings.items() if not is_near(who) or live_pid(who) not in (None, os.getpid())}
    joined = [(who.world_size, who.store) for who in others.values() if who.backend]
    numbered = [size for who in others.values() if who.final and (size := who.world_size or 1) > 1]
    if any(group != (world_size, store) for group in joined) or any(size != world_size for size in numbered):
        return False
    path = run_dir.ring(rank)
    holder = others.get(path)
    if holder is None:
        return True
    told = holder.world_size or 1
    if holder.backend or world_size is None or world_size < told:
        return False
    if any(crumb.phase in _AT_WORK for crumb in read_ring(path).crumbs):
        return False
    return world_size > told or told == 1 or store == holder.store


def _open_as(rank: int, world_size: int | None, store: str) -> None:
    if BOX.recorder is not None and BOX.recorder.rank == rank:
        return
    if _may_become(rank, world_size, store):
        BOX.open(rank)
        write_stacks_on_demand()
        memory_marks.mark("start")
        gate.open_for(rank)


def join_recorded(original: Callable[..., Any]) -> Callable[..., Any]:
    """init_process_group with a span around it, and everything that follows from knowing the rank."""

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        gate.let_go()
        if BOX.run_dir is None or torch.distributed.is_initialized():
            return original(*args, **kwargs)
        try:
            size, store = _announced_size(args, kwargs), _announced_store(args, kwargs)
            span = _before_joining(_announced_rank(args, kwargs), size, store)
        except Exception as error:
            BOX.give_up(error)
            return original(*args, **kwargs)
        recorder = BOX.recorder
        BOX.thread.depth += 1
        try:
            result = original(*args, **kwargs)
        except BaseException as error:
            if recorder is not None:
                BOX.end(recorder, _JOINING, span, f"{RAISED}{type(error).__name__}")
                NOTES.left_a_call(error, "init_process_group")
            raise
        finally:
            BOX.thread.depth -= 1
        if recorder is not None:
            BOX.end(recorder, _JOINING, span)
        try:
            _joined(store)
        except Exception as error:
            BOX.give_up(error)
        return result

    return init_process_group


def _before_joining(rank: int | None, world_size: int | None, store: str) -> int:
    """Opens the ring where the rank is known already; returns the span of joining, 0 where nothing is recorded yet."""
    if rank is not None:
        _open_as(rank, world_size, store)
    native_collectives.install()
    GROUPS.forget()
    recorder = BOX.recorder
    if recorder is None:
        return 0
    NOTES.moved_on()
    BOX.event(Joining(world_size=world_size))
    span = BOX.begin(recorder, _JOINING, "init_process_group")
    _start_service()
    return span


def _joined(store: str) -> None:
    import torch.distributed as dist

    _open_as(dist.get_rank(), dist.get_world_size(), store)
    recorder = BOX.recorder
    if recorder is None:
        return
    _start_service()
    recorder.identify(
        world_size=dist.get_world_size(),
        backend=str(dist.get_backend()),
        store=store,
        torch=torch.__version__,
        service=_Running.service.path if _Running.service is not None else None,
    )
    GROUPS.find(recorder, None)
    BOX.event(
        Versions(
            torch=torch.__version__,
            python=platform.python_version(),
            cuda=torch.version.cuda,
            script=BOX.code.script,
            script_sha256=_digest_of(Path(BOX.code.cwd, BOX.code.script)) if BOX.code.script else None,
            arguments=tuple(recorder.header.get("argv") or ()),
        )
    )
    BOX.event(Threads(compute=torch.get_num_threads()))
    memory_marks.mark("joined")


def _digest_of(path: Path) -> str | None:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None


def _start_service() -> None:
    recorder, run_dir = BOX.recorder, BOX.run_dir
    if recorder is None or run_dir is None:
        return
    if _Running.service is None or _Running.service.pid != os.getpid():
        _Running.service = Service.start(run_dir.blackbox_dir / f"rank-{recorder.rank:05d}.sock")
    recorder.identify(service=_Running.service.path if _Running.service is not None else None)


def patch(c10d: Any) -> None:
    """torch.distributed.distributed_c10d, right after its import."""
    c10d.init_process_group = join_recorded(c10d.init_process_group)
    for name in ("new_group", "split_group", "new_subgroups", "new_subgroups_by_enumeration"):
        original = getattr(c10d, name, None)
        if original is not None:
            setattr(c10d, name, _group_made(original))
    leave = spanned(c10d.destroy_process_group, "exit", describe=lambda args, kwargs: "destroy_process_group")

    @functools.wraps(c10d.destroy_process_group)
    def destroy_process_group(group: Any = None) -> Any:
        # DDP's reducer may be a group's last owner. It dies with the GIL held, and the group then waits for a thread
        # of its backend, which needs the GIL to let go of a tensor that our kernel has shown to Python: so the group
        # is kept for as long as a reducer of it may live.
        _Running.left += list(c10d._world.pg_map) if group is None else [group]
        if group is None:
            GROUPS.forget()
        return leave(group)

    c10d.destroy_process_group = destroy_process_group
    if c10d.is_initialized():
        # The script was already in the group when recording began: the store is unknown, only its port is known.
        native_collectives.install()
        _joined(os.environ.get("MASTER_PORT", ""))


def _group_made(original: Callable[..., Any]) -> Callable[..., Any]:
    """new_group: all ranks must call it, and it waits for them."""
    within = spanned(original, "init", op="new_group", describe=lambda args, kwargs: _members(args, kwargs))

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if BOX.recorder is None or BOX.thread.depth:
            return original(*args, **kwargs)
        BOX.thread.depth = 1
        try:
            group = within(*args, **kwargs)
        finally:
            BOX.thread.depth = 0
        if BOX.recorder is not None and hasattr(group, "group_name"):
            # Named now: members meet their groups in the order in which they are made.
            GROUPS.find(BOX.recorder, group)
        return group

    return call


def _members(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    ranks = args[0] if args else kwargs.get("ranks")
    if isinstance(ranks, (list, tuple, range)):
        # torch sorts them too, unless it is told not to: [1, 0] and [0, 1] are one group.
        as_given = kwargs.get("sort_ranks", args[7] if len(args) > 7 else True) is False
        members = f"ranks {','.join(map(str, ranks if as_given else sorted(ranks)))}"
    else:
        members = "all ranks"
    alone = args[4] if len(args) > 4 else kwargs.get("use_local_synchronization")
    return f"{members}, {MEMBERS_ONLY}" if alone is True else members
