"""Our own messages to the terminal. Writing can neither block nor end a job, even if the reader stalls or is gone."""

from __future__ import annotations

import os
import queue
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TextIO

_MOST_WAITING = 1000  # messages; a reader that is this far behind gets no more
_FAREWELL_S = 5.0


class Voice:
    """Writes in order, on its own thread. Bypasses the stream's buffer, whose lock would hold up our exit.

    The thread starts with the first message: until then the launcher may still fork, which needs a single thread.
    """

    def __init__(self, stream: Callable[[], TextIO] = lambda: sys.stderr) -> None:
        self._stream = stream
        self._texts: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write_all, name="model-check-voice", daemon=True)
        self._begin = threading.Lock()

    def say(self, text: str) -> None:
        if self._texts.qsize() < _MOST_WAITING:
            self._texts.put(text)
        with self._begin, suppress(RuntimeError):  # no thread to be had: nothing is said, and nothing ends
            if self._thread.ident is None:
                self._thread.start()

    def close(self) -> None:
        """Waits a few seconds for a slow reader. The verdict is in the run directory anyway."""
        if self._thread.ident is None:
            return
        self._texts.put(None)
        self._thread.join(_FAREWELL_S)

    def _write_all(self) -> None:
        while (text := self._texts.get()) is not None:
            try:
                _write(text + "\n", self._stream())
            except (OSError, ValueError, AttributeError):
                continue  # nobody listens, or there is no such stream


def _write(text: str, stream: TextIO) -> None:
    try:
        descriptor = stream.fileno()
    except OSError:  # a stream in memory
        stream.write(text)
        return
    data = text.encode(stream.encoding, "backslashreplace")
    while data:
        data = data[os.write(descriptor, data) :]
