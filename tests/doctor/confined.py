"""Runs one check of the doctor in a process that its test has restricted; prints the check as JSON.

confined.py shared-memory FOLDER SIZE     on a tmpfs of this size (needs a mount namespace)
confined.py room FOLDER SIZE              the same, for the room on a disk
confined.py write-speed FOLDER SIZE       the same, for writing 64 MiB
confined.py open-files|processes|address-space|file-size|locked-memory NUMBER [FOLDER]     under this limit
confined.py locks FOLDER                  where the kernel refuses flock
confined.py loopback                      as the network namespace lets it
confined.py stages NAMES FOLDER SIZE      all checks of the stages, the folder being all there is to write to, and full
confined.py ranks|comm                    the last check of the stage, as the network namespace lets it
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import platform
import resource
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from model_check.doctor import Check, Limits, Places, Settings, examine
from model_check.doctor.comm import check_comm
from model_check.doctor.disk import check_locks, check_room, check_write_speed
from model_check.doctor.host import (
    check_locked_memory,
    check_open_files,
    check_processes,
    check_shared_memory,
    check_shell_limits,
)
from model_check.doctor.network import check_loopback
from model_check.doctor.ranks import check_ranks

LIMITS = Limits()


def small(folder: str, size: str) -> Path:
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], check=True)
    return Path(folder)


def limit(kind: int, number: str) -> None:
    resource.setrlimit(kind, (int(number), int(number)))


def refuse_flock() -> None:
    """A seccomp filter that answers flock with ENOLCK, as a file system without a lock daemon does."""
    number = {"x86_64": 73, "aarch64": 32}[platform.machine()]
    program = b"".join(
        struct.pack("HBBI", *instruction)
        for instruction in (
            (0x20, 0, 0, 0),  # load the number of the call
            (0x15, 0, 1, number),  # another one: skip the refusal
            (0x06, 0, 0, 0x00050000 | errno.ENOLCK),
            (0x06, 0, 0, 0x7FFF0000),
        )
    )
    code = ctypes.create_string_buffer(program)
    filter_ = ctypes.create_string_buffer(struct.pack("HxxxxxxP", 4, ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0, "no new privileges"
    assert libc.prctl(22, 2, filter_, 0, 0) == 0, f"seccomp: errno {ctypes.get_errno()}"


def open_files(number: str) -> Check:
    limit(resource.RLIMIT_NOFILE, number)
    return check_open_files(LIMITS)


def processes(number: str) -> Check:
    limit(resource.RLIMIT_NPROC, number)
    return check_processes(LIMITS)


def shell_limit(kind: int, number: str) -> Check:
    limit(kind, number)
    [only] = check_shell_limits(LIMITS)
    return only


def locked_memory(number: str, adapters: str) -> Check:
    limit(resource.RLIMIT_MEMLOCK, number)
    return check_locked_memory(LIMITS, Path(adapters))


def locks(folder: str) -> Check:
    refuse_flock()
    return check_locks(Path(folder), Settings())


def everywhere_full(names: str, folder: str, size: str) -> list[Check]:
    place = small(folder, size)
    with (place / "fill").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass
    # The standard library takes the current folder where no other can be written to.
    tempfile._candidate_tempdir_list = lambda: [folder]  # type: ignore[attr-defined]
    below = place / "below"
    settings = Settings(places=Places(checkpoints=below, cache=below, outputs=below, logs=place))
    return [check for name in names.split(",") for check in examine(name, settings)]


CHECKS: dict[str, Callable[..., Check]] = {
    "shared-memory": lambda folder, size: check_shared_memory(small(folder, size), LIMITS),
    "room": lambda folder, size: check_room("checkpoint folder", small(folder, size), LIMITS, "elsewhere"),
    "write-speed": lambda folder, size: check_write_speed(small(folder, size), LIMITS),
    "open-files": open_files,
    "processes": processes,
    "locked-memory": locked_memory,
    "address-space": lambda number: shell_limit(resource.RLIMIT_AS, number),
    "file-size": lambda number: shell_limit(resource.RLIMIT_FSIZE, number),
    "locks": locks,
    "loopback": lambda: check_loopback(2.0),
    "ranks": lambda: list(check_ranks(Settings()))[-1],
    "comm": lambda: list(check_comm(Settings()))[-1],
}

if __name__ == "__main__":
    sys.path.insert(0, str(Path.cwd()))
    if sys.argv[1] == "stages":
        found = everywhere_full(*sys.argv[2:])
    else:
        found = [CHECKS[sys.argv[1]](*sys.argv[2:])]
    for check in found:
        print(json.dumps(check.to_json()))
