"""What to do about a fault of the host that shows itself in many places, each time as somebody else's error.

A full disk makes torch's import fail, and a limit of the shell any package's: reinstalling them would not help.
"""

from __future__ import annotations

_BY_WORDS = (
    (
        ("No space left on device", "No usable temporary directory", "Disk quota exceeded"),
        "free space on that disk; export TMPDIR=… names another folder for temporary files",
    ),
    (("Read-only file system",), "use a folder on a disk that may be written to"),
    (("File too large",), "ulimit -f unlimited: a limit on the size of files is set"),
    (("Too many open files",), "ulimit -n 65536, or docker run --ulimit nofile=65536"),
    (
        ("MemoryError", "Cannot allocate memory", "cannot allocate memory", "failed to map segment", "std::bad_alloc"),
        "ulimit -v unlimited where a limit is set (model-check doctor --only basic says so), else free memory",
    ),
)


def host_remedy(problem: str, otherwise: str) -> str:
    """The remedy for what the host lacks where the words name it; else the one given."""
    for words, remedy in _BY_WORDS:
        if any(word in problem for word in words):
            return remedy
    return otherwise
