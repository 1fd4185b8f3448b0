"""Per-step numbers: metrics.jsonl for programs, TensorBoard and W&B for people. Written by rank 0 only."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from model_check.errors import UsageError
from model_check.record import JsonlWriter
from model_check.record.metrics import StepMetrics


class Sink(Protocol):
    """Takes one flat record a step."""

    def write(self, record: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


class TensorBoardSink:
    """Scalars in the run directory, through tensorboard's own writer (no TensorFlow, a thread of its own)."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(folder))

    def write(self, record: dict[str, Any]) -> None:
        values = [
            self._summary.Value(tag=f"train/{name}", simple_value=value)
            for name, value in record.items()
            if name != "step" and isinstance(value, (int, float)) and not isinstance(value, bool)
        ]
        event = self._event(wall_time=time.time(), step=record["step"], summary=self._summary(value=values))
        self._writer.add_event(event)

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """Weights & Biases, where the package is installed."""

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        try:
            import wandb
        except ImportError as error:
            raise UsageError(
                "logging.wandb is true but the wandb package is not installed",
                remedy="pip install wandb, or set logging.wandb=false",
            ) from error
        self._run = wandb.init(dir=str(folder), config=config, name=folder.name)

    def write(self, record: dict[str, Any]) -> None:
        self._run.log({k: v for k, v in record.items() if k != "step"}, step=record["step"])

    def close(self) -> None:
        self._run.finish()


class MetricsWriter:
    """Writes one object per step to metrics.jsonl and to every other sink.

    A failing sink (on a full disk, say) never ends training: `on_failure` is called, and the next step tries again.
    """

    def __init__(
        self, path: Path, sinks: Mapping[str, Callable[[], Sink]], on_failure: Callable[[str, Exception], None]
    ) -> None:
        self._on_failure = on_failure
        self._sinks: dict[str, Sink] = {}
        for name, open_sink in {path.name: lambda: JsonlWriter(path), **sinks}.items():
            try:
                self._sinks[name] = open_sink()
            except OSError as error:
                on_failure(name, error)

    def write(self, step: StepMetrics) -> None:
        record = step.record()
        self._each(lambda sink: sink.write(record))

    def close(self) -> None:
        self._each(lambda sink: sink.close())

    def _each(self, do: Callable[[Sink], None]) -> None:
        for name, sink in self._sinks.items():
            try:
                do(sink)
            except Exception as error:
                self._on_failure(name, error)
