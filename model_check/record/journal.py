"""The launcher's own account of a job: one line in events/supervisor.jsonl for everything it does or sees."""

from __future__ import annotations

import time

from model_check.record import JsonlWriter, RunDir
from model_check.record.events import Event


class Journal:
    """Appends events with both clocks: `t` (monotonic) to compare with the ranks' records, `time` to read."""

    def __init__(self, run_dir: RunDir) -> None:
        self._writer = JsonlWriter(run_dir.supervisor_events)
        self.lost: OSError | None = None  # why a record could not be written

    def write(self, event: Event) -> None:
        """An event's own `t` says when it happened; 0: now."""
        now = time.monotonic()
        at = event.t or now
        about = {"pid": event.pid} if event.pid else {}
        stamped = {"event": event.kind, "t": at, "time": time.time() - (now - at), **about, **event.body()}
        # A full disk under the run directory must not end the job that is being watched: the record is lost instead.
        try:
            self._writer.write(stamped)
        except OSError as error:
            self.lost = error

    def close(self) -> None:
        self._writer.close()
