"""The exception tree. Any room may import this; it imports nothing.

    ModelCheckError              a fault we can name; `code` is its MC number where it has one
    ├── UsageError               the command line or the configuration is wrong (exit code 2)
    │   └── ConfigError          every fault of a configuration at once
    ├── DataError                a source, tokenizer or cache cannot be used
    │   ├── HubUnavailable       the hub cannot be reached or refuses us
    │   └── CacheDamaged         a cache file differs from what was written
    ├── ModelError               weights or shapes do not fit
    ├── NumericsError            a loss or gradient is not a finite number
    ├── CheckpointError          a checkpoint cannot be written or trusted
    ├── RunDirError              the run directory cannot be used
    └── LaunchError              ranks cannot be started on this machine

A message is one sentence with the fact and the value; `remedy` is the sentence that says what to do.
"""

from __future__ import annotations

from dataclasses import dataclass


class ModelCheckError(Exception):
    """A fault with a name: what happened, what to do, and the exit code it deserves."""

    exit_code = 1

    def __init__(self, message: str, *, remedy: str = "", code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy
        self.code = code

    def __str__(self) -> str:
        text = f"{self.message}; {self.remedy}" if self.remedy else self.message
        return f"[{self.code}] {text}" if self.code else text


class UsageError(ModelCheckError):
    """The user asked for something that cannot be done as asked."""

    exit_code = 2


@dataclass(frozen=True)
class Problem:
    """One fault of a configuration: its MC8xx code, the dotted key, the sentence, the remedy."""

    code: str
    key: str
    message: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.message}; {self.remedy}" if self.remedy else self.message


class ConfigError(UsageError):
    """All faults of a configuration, reported together."""

    def __init__(self, problems: list[Problem], source: str = "the configuration") -> None:
        self.problems = problems
        self.source = source
        count = f"{len(problems)} problem{'s' if len(problems) != 1 else ''} in {source}"
        lines = "".join(f"\n  [{p.code}] {p}" for p in problems)
        super().__init__(f"{count}:{lines}")


class DataError(ModelCheckError):
    """A source, a tokenizer or a cache cannot be used."""


class HubUnavailable(DataError):
    """The hub cannot be reached, or does not let us in."""


class CacheDamaged(DataError):
    """A cache file is not what was written."""


class ModelError(ModelCheckError):
    """Weights, shapes or a backend do not fit the model that was asked for."""


class NumericsError(ModelCheckError):
    """A loss or a gradient is not a finite number, and the run was told to stop there."""


class CheckpointError(ModelCheckError):
    """A checkpoint cannot be written, or cannot be trusted."""


class RunDirError(UsageError):
    """The run directory cannot be used as asked."""


class LaunchError(ModelCheckError):
    """Ranks cannot be started on this machine."""
