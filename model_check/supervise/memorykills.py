"""Evidence that the kernel, not a person, killed a process for its memory: cgroup counters and the kernel's log.

SIGKILL leaves no trace in the process. Two places keep one: the cgroup's `oom_kill` counter (which limit), and the
kernel log (which process, how large). Both are read from the job's start on: older kills are not taken for ours.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from model_check.record.cgroups import kill_count, memory_cgroups, memory_limit
from model_check.record.events.memory import MemoryKill

_KILLED = re.compile(r"(?P<memcg>Memory cgroup )?[Oo]ut of memory: Killed process (?P<pid>\d+) \((?P<comm>[^)]*)\)")


class KernelLog:
    """New lines of the kernel log since this was opened; empty where the log may not be read."""

    def __init__(self, path: Path = Path("/dev/kmsg")) -> None:
        self._fd = -1
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._fd, 0, os.SEEK_END)
        except OSError:
            self.close()

    @property
    def readable(self) -> bool:
        return self._fd >= 0

    def new_lines(self) -> list[str]:
        lines: list[str] = []
        while self._fd >= 0:
            try:
                record = os.read(self._fd, 8192)
            except BlockingIOError:
                break
            except BrokenPipeError:  # the kernel overwrote records we had not read yet: go on with the next one
                continue
            except OSError:
                self.close()
                break
            if not record:
                break
            lines.append(record.decode("utf-8", "replace").partition(";")[2].partition("\n")[0])
        return lines

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def parse_kill(line: str) -> MemoryKill | None:
    """The kill a kernel log line reports, if it reports one."""
    match = _KILLED.search(line)
    if match is None:
        return None
    source = "cgroup" if match["memcg"] else "kernel"
    return MemoryKill(source=source, detail=line.strip(), pid=int(match["pid"]))


class MemoryKillWatch:
    """Remembers the counters of every cgroup the job's processes are seen in, and tells which have risen since."""

    def __init__(self) -> None:
        self._log = KernelLog()
        self._counts: dict[Path, int] = {}

    def notice(self, pid: int) -> None:
        """Takes note of where a process is accounted; called at each sample, since a process may be moved."""
        for folder in memory_cgroups(pid):
            if folder not in self._counts:
                count = kill_count(folder)
                if count is not None:
                    self._counts[folder] = count

    def new_kills(self) -> list[MemoryKill]:
        """Kills since the last call. A named process (kernel log) comes before a bare counter."""
        kills = [kill for kill in map(parse_kill, self._log.new_lines()) if kill is not None]
        for folder, before in self._counts.items():
            count = kill_count(folder)
            if count is None or count <= before:
                continue
            self._counts[folder] = count
            limit = memory_limit(folder)
            if limit is None:
                continue
            detail = f"oom_kill of {folder} rose from {before} to {count}, limit {limit} bytes"
            kills.append(MemoryKill(source="cgroup", detail=detail))
        return kills

    def close(self) -> None:
        self._log.close()
