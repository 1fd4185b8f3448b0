"""What a rank holds at the turning points of its start, as a log line and as an event: MEM:START and its followers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from model_check.blackbox.box import BOX
from model_check.blackbox.memory_reading import read_memory

Mark = Literal["START", "POST-IMPORT", "POST-MODEL", "FIRST-STEP"]


class MemoryMarks:
    """Each mark is made once, when it is first reached."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._reached: set[Mark] = set()

    def reach(self, mark: Mark) -> None:
        if mark in self._reached:
            return
        self._reached.add(mark)
        reading = read_memory()
        self._say(f"MEM:{mark} {reading.describe()}")
        recorder = BOX.recorder
        if recorder is not None:
            BOX.event("memory", mark=mark, at=mark.lower(), step=recorder.steps, **reading.record())
