"""What a check says: one name, one status, one sentence, and what to do where it is not well."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

_LONGEST = 320

Status = Literal["ok", "warn", "fail", "skip"]


@dataclass(frozen=True)
class Check:
    """One answer. `fix` is empty where there is nothing to do."""

    name: str
    status: Status
    detail: str
    fix: str = ""

    def to_json(self) -> dict[str, str]:
        return {"name": self.name, "status": self.status, "detail": self.detail, "fix": self.fix}


def passed(name: str, detail: str) -> Check:
    return Check(name, "ok", detail)


def warned(name: str, detail: str, fix: str) -> Check:
    """Training works, though not as well as it could, or not in every case."""
    return Check(name, "warn", detail, fix)


def failed(name: str, detail: str, fix: str) -> Check:
    """Training does not work here until this is mended."""
    return Check(name, "fail", detail, fix)


def skipped(name: str, why: str) -> Check:
    return Check(name, "skip", why)


def graded(
    name: str, value: float, detail: str, fix: str, *, fail: float = 0, warn: float = 0, fatal: str = ""
) -> Check:
    """A number against its limits: under `fail` training does not work (`fatal` says why), under `warn` not well."""
    if value < fail:
        return failed(name, f"{detail}: {fatal}" if fatal else detail, fix)
    return warned(name, detail, fix) if value < warn else passed(name, detail)


def foreign_words(text: str) -> str:
    """A message of somebody else as part of a sentence: one line, of bounded length, that cannot steer a terminal."""
    line = "".join(sign if sign.isprintable() else "?" for sign in " ".join(text.split()))
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}…"


def gib(size: float) -> str:
    """A size in the unit a person would use."""
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20)):
        if size >= factor:
            amount = size / factor
            return f"{amount:.0f} {unit}" if amount >= 100 or amount == int(amount) else f"{amount:.1f} {unit}"
    return f"{size / 2**10:.0f} KiB"
