"""One look at a process through /proc, as the launcher's events store it and the rules read it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ProcessSample:
    """What is known of a rank and of its children."""

    pid: int = 0
    comm: str = ""
    state: str = ""  # R running, S sleeping, D in the kernel, T stopped, Z dead but not yet collected
    cpu_s: float = 0.0  # so far, of all threads
    rss: int = 0  # bytes
    io_bytes: int = 0  # read and written so far, through any descriptor: a long save moves this
    switches: int | None = None  # how often the main thread went to sleep: a poll moves this, one long wait does not

    @property
    def alive(self) -> bool:
        return self.state not in ("Z", "X")


@dataclass(frozen=True, kw_only=True)
class RankSample(ProcessSample):
    """A rank and its direct children."""

    t: float = 0.0  # CLOCK_MONOTONIC seconds
    threads: int = 0
    rss_file: int = 0  # of the resident bytes, those of mapped files: the kernel takes them back when it must
    wchan: str = ""  # what the kernel has the main thread wait for
    syscall: str = ""  # the system call the main thread sleeps in
    syscall_fd: int | None = None
    syscall_target: str = ""  # what that descriptor is
    fd0: str = ""  # what its standard input is
    children: tuple[ProcessSample, ...] = ()
