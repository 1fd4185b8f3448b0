"""Lets a planted fault say when it fired: one CLOCK_MONOTONIC number a line in the file named by FAULT_CLOCK."""

import os
import time


def fired() -> None:
    path = os.environ.get("FAULT_CLOCK")
    if path:
        with open(path, "a") as clock:
            clock.write(f"{time.monotonic()}\n")
