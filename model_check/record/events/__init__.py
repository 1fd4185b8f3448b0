"""Every kind of event, one file for each family. Importing this package makes all kinds known to `read_event`."""

from model_check.record.events import crashes, job, memory, numerics, process
from model_check.record.events.base import KINDS, Event, UnknownEvent, read_event, read_events

__all__ = [
    "KINDS",
    "Event",
    "UnknownEvent",
    "crashes",
    "job",
    "memory",
    "numerics",
    "process",
    "read_event",
    "read_events",
]
