"""Output to terminals, pipes and files that know no UTF-8, are closed, or are full.

A sign that cannot be shown stops no verb; where nothing can be written any more, that is said once.
"""

from __future__ import annotations

import codecs
import io
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_PLAIN = {"✓": "+", "✗": "x", "→": "->", "–": "-", "…": "...", "×": "x", "µ": "u", "≥": ">=", "≤": "<=", "°": " "}
_HANDLER = "model-check-plain-signs"


class OutputFailed(OSError):
    """Standard output takes no more. Any other file has errors of the system's own classes.

    It carries no errno: the libraries that print for us turn that of a pipe into an exit code of their own.
    """

    def __init__(self, why: OSError) -> None:
        super().__init__(why.strerror)
        self.reader_left = isinstance(why, BrokenPipeError)  # as that of `| head` does, who has read enough


class _Output(io.FileIO):
    """Fails once; what comes later, down to the interpreter's last flush, has nowhere to go and no one to tell."""

    _failed = False

    def write(self, data: ReadableBuffer, /) -> int:
        size = memoryview(data).nbytes
        if self._failed or not size:  # nothing at all is written to find out what kind of stream this is
            return size
        try:
            return super().write(data)
        except OSError as error:
            self._failed = True
            raise OutputFailed(error) from error


def make_output_safe() -> None:
    """Called once, before anything is printed."""
    _open_closed_streams()
    codecs.register_error(_HANDLER, _in_plain_signs)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors=_HANDLER)
    if sys.stdout is sys.__stdout__ and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout = _over_our_file(sys.stdout)


def _open_closed_streams() -> None:
    """Opens /dev/null for streams that the shell closed (`2>&-`), so that no file of ours gets their numbers.

    A command that we start still finds them closed, as it would without us.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)) <= 2:
        pass
    os.close(descriptor)
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 all three live as long as the process
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115


def _over_our_file(stream: io.TextIOWrapper) -> io.TextIOWrapper:
    """The interpreter's stream, buffered as before, whose failures are told from those of other files."""
    stream.flush()
    file = _Output(stream.fileno(), "wb", closefd=False)
    buffer = io.BufferedWriter(file) if isinstance(stream.buffer, io.BufferedWriter) else file
    return io.TextIOWrapper(
        buffer,
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def _in_plain_signs(error: UnicodeError) -> tuple[str, int]:
    """For what the encoding of a stream lacks, the sign that comes nearest."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    unknown = error.object[error.start : error.end]
    return "".join(_PLAIN.get(sign, "?") for sign in unknown), error.end
