"""One job at a time in a run directory: the hosts of a job share it, and another job is refused.

`run.lock` names the job that uses the directory. Each launcher of that job holds a shared flock on it, so the claim
ends with the last launcher, however it ends. On a filesystem without locks, the file alone is the claim. It holds while
the process that it names lives or, if that PID means nothing on this host, while its modification time is renewed.
"""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model_check.errors import RunDirError
from model_check.record.files import read_json, write_json_atomic
from model_check.record.paths import LOCK, PRIVATE, RunDir, holds_a_run, new_path
from model_check.record.process_identity import Identity, identity, is_near, live_pid
from model_check.record.typed import from_json

_BEAT_S = 10.0
_DEAD_AFTER_S = 120.0  # without a beat

_held: set[int] = set()


def _let_go_in_child() -> None:
    """A forked rank or loader worker must not keep the directory claimed once its launcher is gone."""
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_let_go_in_child)


@dataclass(frozen=True)
class Job:
    """The job that asks for a directory. Launchers with the same name are hosts (or ranks) of one job."""

    name: str
    shared: bool

    @classmethod
    def alone(cls) -> Job:
        me = identity()
        return cls(":".join(str(me[key]) for key in ("host", "boot_id", "pid_ns", "pid", "start_ticks")), shared=False)

    @classmethod
    def meeting_at(cls, endpoint: str, job_id: str = "") -> Job:
        """The job whose hosts meet at `endpoint` (host:port); a loopback address means a different job on each host."""
        host = endpoint.rpartition(":")[0]
        where = f"{os.uname().nodename}/" if host in ("127.0.0.1", "localhost", "[::1]", "::1", "") else ""
        return cls(f"{job_id}@{where}{endpoint}", shared=True)


class Claim:
    """A claimed run directory. `joined`: another host of this job claimed it before. Ends with `release` or death."""

    def __init__(self, root: Path, job: Job, *, force: bool | None, check_free: Callable[[], None]) -> None:
        """`check_free` raises if the directory cannot be used even though no job claims it.

        `force` takes over a directory that is in use; None: the caller's verb has no such flag.
        """
        self._path = root / LOCK
        self._job = job
        self._force = force
        self._check_free = check_free
        self._beating: threading.Event | None = None
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            try:
                self.joined = self._with_lock()
            except BlockingIOError:
                raise
            except OSError:  # ENOLCK, EOPNOTSUPP, ENOSYS: no locks here
                self.joined = self._without_locks()
                self._keep_beating()
        except BaseException:
            os.close(self._fd)
            raise
        _held.add(self._fd)

    def __enter__(self) -> Claim:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        if self._fd not in _held:
            return
        if self._beating is not None:
            self._beating.set()
            if not self._job.shared:  # another host of the job may still be at work
                with suppress(OSError):
                    os.truncate(self._path, 0)
        _held.discard(self._fd)
        os.close(self._fd)

    def _with_lock(self) -> bool:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(self._fd, fcntl.LOCK_SH)  # waits only while a starting job writes its name
            holder = self._read()
            if holder.get("job") == self._job.name:
                return True
            if not self._force:
                raise self._in_use(holder) from None
        self._check_free()
        self._write()
        # Not atomic: another job may have got in between the two locks.
        fcntl.flock(self._fd, fcntl.LOCK_SH)
        holder = self._read()
        if holder and holder.get("job") != self._job.name:
            raise self._in_use(holder)
        return False

    def _without_locks(self) -> bool:
        holder = self._read()
        if holder and self._lives(holder):
            if holder.get("job") == self._job.name:
                return True
            if not self._force:
                raise self._in_use(holder)
        self._check_free()
        write_json_atomic(self._path, self._record())
        now = read_json(self._path)
        if isinstance(now, dict) and now.get("job") != self._job.name:
            raise self._in_use(now)  # both came at once, and the later one got it
        return False

    def _lives(self, holder: dict[str, Any]) -> bool:
        process = from_json(Identity, holder)
        if is_near(process) and not holder.get("shared"):
            return live_pid(process) is not None
        with tempfile.TemporaryFile(dir=self._path.parent) as now:  # the clock of the file server, not ours
            now.write(b".")
            now.flush()
            return os.fstat(now.fileno()).st_mtime - self._path.stat().st_mtime < _DEAD_AFTER_S

    def _keep_beating(self) -> None:
        ended = self._beating = threading.Event()

        def beat() -> None:
            while not ended.wait(_BEAT_S):
                with suppress(OSError):
                    os.utime(self._path)

        threading.Thread(target=beat, name="model-check-claim", daemon=True).start()

    def _record(self) -> dict[str, Any]:
        return {"job": self._job.name, "shared": self._job.shared, **identity()}

    def _write(self) -> None:
        os.ftruncate(self._fd, 0)
        with suppress(OSError):  # a full disk: the lock holds without a name
            os.pwrite(self._fd, json.dumps(self._record()).encode() + b"\n", 0)

    def _read(self) -> dict[str, Any]:
        try:
            value = json.loads(os.pread(self._fd, 1 << 16, 0))
        except ValueError:
            return {}
        return value if isinstance(value, dict) else {}

    def _in_use(self, holder: dict[str, Any]) -> RunDirError:
        who = f"host {holder.get('host')}, pid {holder.get('pid')}" if holder else "it left no name"
        remedy = "stop it or name another directory"
        if self._force is not None:
            remedy += ", or add --force to write into this one all the same"
        return RunDirError(f"--run-dir {self._path.parent} is in use by another job ({who})", remedy=remedy)


def enter(
    root: Path | str | None,
    job: Job,
    *,
    resuming: bool = False,
    resume_flag: str = "",
    force: bool | None = None,
    mode: int = PRIVATE,
) -> tuple[RunDir, Claim]:
    """Claims a run directory for a job and makes its folders. If the claim is refused, the directory is unchanged.

    The directory must be new or empty, unless the job resumes into it or another host of the job already uses it.
    """
    path = new_path(root)

    def check_free() -> None:
        if not resuming and holds_a_run(path):
            raise RunDir.taken(path, resume_flag)

    try:
        RunDir.make_root(path, mode)
        if not (path / LOCK).exists():
            check_free()
        claim = Claim(path, job, force=force, check_free=check_free)
    except OSError as error:
        raise RunDir.cannot_be_made(path, error) from error
    try:
        return RunDir.create(path, resuming=True, mode=mode), claim
    except BaseException:
        claim.release()
        raise
