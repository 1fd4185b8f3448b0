"""What /proc says about the processes of a job: state, CPU time, memory, what the kernel has them waiting for.

A sample reads seven small files per process (about 0.1 ms), so the supervisor can take one every second; psutil would
take three times as long and knows neither the system call nor its file. Nothing here needs the process's cooperation; a
process that is gone reads as None, never as an error.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from model_check.record.process_sample import ProcessSample, RankSample

PROC = Path("/proc")
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")

# Only the calls a stuck process is found in. The numbers differ by architecture.
_SYSCALLS: dict[str, dict[int, str]] = {
    "x86_64": {
        0: "read", 1: "write", 2: "open", 7: "poll", 17: "pread64", 18: "pwrite64", 19: "readv", 20: "writev",
        23: "select", 34: "pause", 35: "nanosleep", 42: "connect", 43: "accept", 44: "sendto", 45: "recvfrom",
        46: "sendmsg", 47: "recvmsg", 61: "wait4", 72: "fcntl", 73: "flock", 74: "fsync", 75: "fdatasync",
        202: "futex", 230: "clock_nanosleep", 232: "epoll_wait", 247: "waitid", 257: "openat", 270: "pselect6",
        271: "ppoll", 281: "epoll_pwait", 288: "accept4", 441: "epoll_pwait2",
    },
    "aarch64": {
        22: "epoll_pwait", 25: "fcntl", 32: "flock", 56: "openat", 63: "read", 64: "write", 65: "readv", 66: "writev",
        67: "pread64", 68: "pwrite64", 72: "pselect6", 73: "ppoll", 82: "fsync", 83: "fdatasync", 95: "waitid",
        98: "futex", 101: "nanosleep", 115: "clock_nanosleep", 202: "accept", 203: "connect", 206: "sendto",
        207: "recvfrom", 211: "sendmsg", 212: "recvmsg", 242: "accept4", 260: "wait4", 441: "epoll_pwait2",
    },
}  # fmt: skip
_SYSCALL_NAMES = _SYSCALLS.get(platform.machine(), {})
# The first argument of these is a small number too, but no descriptor.
_NOT_ON_DESCRIPTOR = frozenset({"select", "pselect6", "pause", "wait4", "waitid", "clock_nanosleep"})


@dataclass(frozen=True)
class ProcStat:
    """The fields of /proc/PID/stat that say whether a process lives and works."""

    pid: int
    comm: str
    state: str
    ppid: int
    cpu_s: float
    threads: int
    start_ticks: int  # with the pid this names a process for good: pids are reused
    rss: int
    wait_status: int | None  # how a zombie ended, as waitpid(2) encodes it

    @property
    def alive(self) -> bool:
        return self.state not in ("Z", "X")


def _read(pid: int, name: str) -> str:
    try:
        return (PROC / str(pid) / name).read_text(errors="replace")
    except OSError:
        return ""


def _link(pid: int, name: str) -> str:
    try:
        return str((PROC / str(pid) / name).readlink())
    except OSError:
        return ""


def read_stat(pid: int) -> ProcStat | None:
    """The process's vital signs, or None where there is no such process."""
    text = _read(pid, "stat")
    # The command name may hold spaces and brackets; the last closing bracket ends it.
    head, _, tail = text.rpartition(")")
    fields = tail.split()
    if len(fields) < 22:
        return None
    return ProcStat(
        pid=pid,
        comm=head.partition("(")[2],
        state=fields[0],
        ppid=int(fields[1]),
        cpu_s=(int(fields[11]) + int(fields[12])) / _TICKS,
        threads=int(fields[17]),
        start_ticks=int(fields[19]),
        rss=int(fields[21]) * _PAGE,
        wait_status=int(fields[49]) if fields[0] == "Z" and len(fields) > 49 else None,
    )


def is_alive(pid: int, start_ticks: int | None = None) -> bool:
    """Whether this very process still runs (a zombie does not)."""
    stat = read_stat(pid)
    return stat is not None and stat.alive and start_ticks in (None, stat.start_ticks)


def is_stopped(pid: int) -> bool:
    stat = read_stat(pid)
    return stat is not None and stat.state == "T"


def thread_states(pids: Iterable[int]) -> set[str]:
    """The states of all threads of these processes: R runs or wants to run, D is in uninterruptible I/O."""
    found: set[str] = set()
    for pid in pids:
        try:
            tasks = [entry.name for entry in os.scandir(f"/proc/{pid}/task")]
        except OSError:
            continue
        for task in tasks:
            found.update(_read(pid, f"task/{task}/stat").rpartition(")")[2].split()[:1])
    return found


def status_of(pid: int) -> dict[str, str]:
    """The fields of /proc/PID/status, which is that of the main thread; none where there is no such process."""
    fields = (line.partition(":") for line in _read(pid, "status").splitlines())
    return {name: value.strip() for name, _, value in fields}


def catches(pid: int, number: int) -> bool:
    """Whether the process has a handler for this signal: one without would die of it, or never hear it."""
    return bool(int(status_of(pid).get("SigCgt", "0"), 16) >> (number - 1) & 1)


def send_signal(pid: int, number: int) -> None:
    """Signals a process, if it still exists and we may signal it."""
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def children_of_thread(pid: int, thread: int) -> list[int]:
    return [int(child) for child in _read(pid, f"task/{thread}/children").split()]


def children_of(pid: int) -> list[int]:
    """Direct children, whichever thread of the process started them."""
    try:
        threads = [int(entry.name) for entry in os.scandir(f"/proc/{pid}/task")]
    except OSError:
        return []
    return [child for thread in threads for child in children_of_thread(pid, thread)]


def descendants_of(pid: int) -> list[int]:
    """Children, their children and so on; parents before their children."""
    found: list[int] = []
    queue = children_of(pid)
    while queue:
        child = queue.pop(0)
        if child not in found:
            found.append(child)
            queue.extend(children_of(child))
    return found


def _system_call(pid: int) -> tuple[str, int | None, str]:
    """The system call the main thread sleeps in; its file descriptor and what that is, if it has one."""
    fields = _read(pid, "syscall").split()
    if len(fields) < 2 or not fields[0].isdigit():
        return "", None, ""
    name = _SYSCALL_NAMES.get(int(fields[0]))
    if name is None:
        return f"syscall-{fields[0]}", None, ""
    descriptor = int(fields[1], 16)
    target = "" if name in _NOT_ON_DESCRIPTOR else _link(pid, f"fd/{descriptor}")
    return name, descriptor if target else None, target


def _io_bytes(pid: int) -> int:
    """Bytes the process has read and written so far, through any descriptor: a long save moves this."""
    total = 0
    for line in _read(pid, "io").splitlines():
        name, _, value = line.partition(":")
        if name in ("rchar", "wchar"):
            total += int(value)
    return total


def machine_cpu_seconds() -> float:
    """What all processors together have worked since the machine started, for whomever."""
    spent = psutil.cpu_times()
    return float(spent.user + spent.nice + spent.system + spent.irq + spent.softirq + spent.steal)


def sample(pid: int) -> RankSample | None:
    """One look at a process and its direct children, or None where it is gone."""
    stat = read_stat(pid)
    if stat is None:
        return None
    syscall, descriptor, target = _system_call(pid)
    status = status_of(pid)
    return RankSample(
        **_vital_signs(stat, status),
        t=round(time.monotonic(), 3),
        threads=stat.threads,
        rss_file=1024 * int(status.get("RssFile", "0 kB").split()[0]),
        wchan=_read(pid, "wchan").strip("\0\n0"),
        syscall=syscall,
        syscall_fd=descriptor,
        syscall_target=target,
        fd0=_link(pid, "fd/0"),
        children=tuple(child for child in map(_child, children_of(pid)) if child is not None),
    )


def _child(pid: int) -> ProcessSample | None:
    stat = read_stat(pid)
    return ProcessSample(**_vital_signs(stat, status_of(pid))) if stat is not None else None


def _vital_signs(stat: ProcStat, status: dict[str, str]) -> dict[str, Any]:
    counted = status.get("voluntary_ctxt_switches")
    return {
        "pid": stat.pid,
        "comm": stat.comm,
        "state": stat.state,
        "cpu_s": round(stat.cpu_s, 2),
        "rss": stat.rss,
        "io_bytes": _io_bytes(stat.pid),
        "switches": int(counted) if counted else None,
    }


def environment_of(pid: int) -> dict[str, str]:
    """The environment the process was started with; empty where we may not read it."""
    try:
        raw = (PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return {}
    pairs = (entry.partition(b"=") for entry in raw.split(b"\0") if b"=" in entry)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


def mapped_files(pid: int) -> set[str]:
    """The paths of the files that the process has mapped into its memory."""
    lines = (line.split(None, 5) for line in _read(pid, "maps").splitlines())
    return {words[5] for words in lines if len(words) == 6}


def command_of(pid: int) -> list[str]:
    return [part for part in _read(pid, "cmdline").split("\0") if part]


def kernel_stack(pid: int) -> list[str]:
    """Where the kernel has the main thread (needs privileges): innermost first, symbols only."""
    frames = []
    for line in _read(pid, "stack").splitlines():
        symbol = line.partition("] ")[2].partition("+")[0]
        if symbol:
            frames.append(symbol)
    return frames


@dataclass(frozen=True)
class PortHolder:
    """Who listens on a TCP port; pid 0 where the process belongs to another user."""

    port: int
    pid: int
    command: tuple[str, ...]


def port_holder(port: int) -> PortHolder | None:
    """The process that listens on the port, or None where nobody does."""
    try:
        sockets = psutil.net_connections("tcp")
    except (OSError, psutil.Error):
        return None
    pids = [s.pid for s in sockets if s.status == psutil.CONN_LISTEN and s.laddr and s.laddr.port == port]
    pid = next(filter(None, pids), 0)
    return PortHolder(port, pid, tuple(command_of(pid)) if pid else ()) if pids else None
