"""Tries to take the lock of a file that somebody else may hold: says whether it was free."""

from __future__ import annotations

import fcntl
import json
import sys
from pathlib import Path


def is_free(path: Path) -> bool:
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


if __name__ == "__main__":
    print(json.dumps({"free": is_free(Path(sys.argv[1]))}))
