"""One process of a host at a time, by a lock file: the first does the work, the others find it done.

The kernel gives the lock back when its holder dies. Nobody waits in a collective here, so a rank that is slow is a
rank that holds a file, and says so in its stack.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def in_turn(path: Path) -> Iterator[None]:
    """Holds the file while the block runs; where it cannot be locked the block runs all the same."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("ab")
    except OSError:
        yield
        return
    with file:
        with suppress(OSError):  # a filesystem without locks: the libraries below have locks of their own
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
