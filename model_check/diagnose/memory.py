"""Rules on memory that ran out: MC501, MC502, the facts beside MC307, and MC504 for a step that was retried smaller.

The rank leaves a record of the moment (`out_of_memory` in its events): what was asked for, what is held for what. Where
it could not, the numbers in torch's own message stand in. Shortage and fragmentation are told apart: memory that is
free in sum, but in pieces that are all too small, is lost to the layout of the allocator and not to the model.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from model_check.diagnose.collectives import ranks_text
from model_check.diagnose.evidence import Evidence, RankEvidence
from model_check.diagnose.findings import make_finding
from model_check.record import Finding

GIB = 1 << 30
# Free memory in pieces counts as fragmentation from this share of the device on: a little is always in pieces.
FRAGMENTED_SHARE = 0.1
_SIZE = r"([\d.]+) ([KMGT]i?B|bytes)"
_REQUESTED = re.compile(rf"[Tt]ried to allocate {_SIZE}")
_CAPACITY = re.compile(rf"total capacity of {_SIZE} of which {_SIZE} is free")
_ALLOCATED = re.compile(rf"{_SIZE} is allocated by PyTorch, and {_SIZE} is reserved by PyTorch but unallocated")
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_SHOWN = 5
_WORTH_SHOWING = 0.01  # of what is in use


@dataclass(frozen=True)
class Account:
    """Bytes at the moment memory ran out; None: not known."""

    requested: int | None = None
    total: int | None = None
    free: int | None = None
    allocated: int | None = None
    free_in_pieces: int = 0
    largest_piece: int | None = None
    categories: Mapping[str, int] = field(default_factory=dict)
    largest: Sequence[Mapping[str, Any]] = ()
    snapshot: str = ""
    limits: Mapping[str, Any] = field(default_factory=dict)
    resident: int | None = None  # of host memory; what the device holds is `allocated`

    @property
    def unnamed(self) -> int:
        """What is in use and of no category: on a host lists, caches, activations, libraries."""
        return max(0, (self.resident or self.allocated or 0) - sum(self.categories.values()))

    @property
    def most(self) -> int | None:
        """What there is of this memory: the device's, or the host's as far as this rank may take it."""
        bounds = [_number(self.limits.get(name)) for name in ("total", "address_space", "cgroup")]
        return self.total or min((bound for bound in bounds if bound), default=None)

    @property
    def fragmented(self) -> bool:
        """What was asked for is free in sum, and so is a good share of the device."""
        if self.requested is None or self.total is None:
            return False
        return self.free_in_pieces >= max(self.requested, FRAGMENTED_SHARE * self.total)

    @property
    def missing(self) -> int | None:
        if self.requested is None or self.free is None:
            return None
        return max(0, self.requested - self.free)


def memory_account(rank: RankEvidence, message: str) -> Account:
    """The rank's own record of its last moment without memory, or what the exception's message says."""
    records = [record for record in rank.happened("out_of_memory") if "failed" not in record]
    told = _from_message(message)
    if not records:
        return told
    account = _from_record(records[-1])
    if records[-1].get("kind") == "host" or account.total is not None:
        return account
    # The allocator of the device was not ours to watch: the rank knows whose tensors there are, the message how much.
    return replace(
        told, requested=account.requested or told.requested, categories=account.categories, largest=account.largest
    )


def _number(value: Any) -> int | None:
    if isinstance(value, float):
        return int(value) if math.isfinite(value) else None
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _from_record(record: Mapping[str, Any]) -> Account:
    largest = record.get("largest")
    sizes = {str(name): _number(size) for name, size in _mapping(record.get("categories")).items()}
    return Account(
        requested=_number(record.get("requested")),
        total=_number(record.get("total")),
        free=_number(record.get("free")),
        allocated=_number(record.get("allocated")),
        free_in_pieces=_number(record.get("free_in_pieces")) or 0,
        largest_piece=_number(record.get("largest_piece")),
        categories={name: size for name, size in sizes.items() if size},
        largest=[item for item in largest if isinstance(item, dict)] if isinstance(largest, list) else (),
        snapshot=str(record.get("snapshot") or ""),
        limits=_mapping(record.get("limits")),
        resident=_number(record.get("rss")) if record.get("kind") == "host" else None,
    )


def _bytes(number: str, unit: str) -> int:
    return round(float(number.rstrip(".") or 0) * _UNITS.get(unit, 1))


def _from_message(message: str) -> Account:
    requested, capacity, held = (pattern.search(message) for pattern in (_REQUESTED, _CAPACITY, _ALLOCATED))
    return Account(
        requested=_bytes(requested[1], requested[2]) if requested else None,
        total=_bytes(capacity[1], capacity[2]) if capacity else None,
        free=_bytes(capacity[3], capacity[4]) if capacity else None,
        allocated=_bytes(held[1], held[2]) if held else None,
        free_in_pieces=_bytes(held[3], held[4]) if held else 0,
    )


def memory_facts(account: Account, plan: Mapping[str, Any]) -> list[str]:
    """The lines of evidence that a finding about memory carries."""
    facts = []
    worth = _WORTH_SHOWING * max(sum(account.categories.values()), account.allocated or 0, account.resident or 0)
    if account.requested is not None:
        of = f" with {_size(account.free)} free of {_size(account.total)}" if account.total is not None else ""
        facts.append(f"observed: it asked for {_size(account.requested)}{of}")
    facts += _host_facts(account)
    if account.categories:
        named = {**account.categories, **({"everything else": account.unnamed} if account.unnamed > worth else {})}
        held = sorted(named.items(), key=lambda item: -item[1])
        facts.append("observed: in use " + ", ".join(f"{name} {_size(size)}" for name, size in held))
    elif account.allocated is not None:
        facts.append(f"observed: torch has {_size(account.allocated)} in use")
    shown = [item for item in account.largest[:_SHOWN] if (_number(item.get("bytes")) or 0) >= worth]
    facts += [f"observed: {_holding(item)}" for item in shown]
    if account.free_in_pieces >= (account.requested or GIB):
        largest = f", the largest {_size(account.largest_piece)}" if account.largest_piece else ""
        facts.append(f"observed: {_size(account.free_in_pieces)} are free inside the allocator in pieces{largest}")
    planned, moment = _mapping(plan.get("memory")).get("peak_gib"), _mapping(plan.get("memory")).get("peak_moment")
    if isinstance(planned, (int, float)) and account.total is not None:
        facts.append(f"inferred: the plan expected {planned:.1f} GiB at its peak, in the {moment}")
    if account.snapshot:
        facts.append(f"observed: {account.snapshot} opens in PyTorch's memory viewer")
    return facts


def _host_facts(account: Account) -> list[str]:
    limits = account.limits
    names = {"address_space": "its address space", "cgroup": "its cgroup"}
    bounds = [f"{text} is limited to {_size(limits[name])}" for name, text in names.items() if limits.get(name)]
    total, available = _number(limits.get("total")), _number(limits.get("available"))
    if total is None or available is None:
        return []
    return [f"observed: the host has {_size(available)} of {_size(total)} left" + "".join(f"; {b}" for b in bounds)]


def _holding(item: Mapping[str, Any]) -> str:
    count, size = _number(item.get("count")) or 1, _number(item.get("bytes")) or 0
    many = f"{count} × {_size(size // count)}" if count > 1 else _size(size)
    name = f" ({item['name']})" if item.get("name") else ""
    line = f" made at {item['line']}" if item.get("line") else ""
    return f"{many} of {item.get('category')}{name}{line}"


def _size(value: Any) -> str:
    size = _number(value)
    if size is None:
        return "an unknown amount"
    return f"{size / GIB:.2f} GiB" if size >= GIB else f"{size / (1 << 20):.0f} MiB"


def memory_fixes(account: Account, plan: Mapping[str, Any]) -> list[str]:
    """The smallest change that fits, where the plan of the run knows one; else what the largest category suggests."""
    if account.requested is not None and account.most is not None and account.requested > account.most:
        return [f"one allocation of {_size(account.requested)} is more than there is: the sizes on that line are wrong"]
    if account.fragmented:
        return [
            "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, which leaves no such pieces",
            "keep shapes the same from step to step: pad batches to one length",
        ]
    # What the plan saves is the device's: it says nothing to a host that is short of memory.
    planned = _planned_fix(account, plan) if account.resident is None else []
    if planned:
        return planned
    if not account.categories or account.unnamed > max(account.categories.values()):
        return []
    if account.allocated is None and account.resident is None:
        return []  # the largest of those that are known may be next to nothing
    held = max(account.categories, key=lambda name: account.categories[name])
    if held in ("parameters", "gradients", "optimizer"):
        return [
            f"{held} take most: share them among ranks (FSDP), or keep the optimizer's state in 8 bits",
            "halving the batch will not be enough",
        ]
    return [
        "activations take most: halve the batch and double the gradient accumulation",
        "recompute activations (torch.utils.checkpoint), or shorten the sequences",
    ]


def _planned_fix(account: Account, plan: Mapping[str, Any]) -> list[str]:
    ladder = plan.get("remedies")
    remedies = [_mapping(step) for step in ladder] if isinstance(ladder, list) else []
    missing = (account.missing or 0) / GIB
    # What was missing at this moment is the least that must go: more was to come in the same step.
    enough = [step for step in remedies if isinstance(step.get("saves_gib"), (int, float))]
    enough = [step for step in enough if float(step["saves_gib"]) > missing]
    return [f"add {step.get('flags')} (saves about {float(step['saves_gib']):.1f} GiB)" for step in enough[:2]]


def retry_findings(evidence: Evidence) -> list[Finding]:
    """A run that goes on with smaller micro-batches is told so: the next one should start with them."""
    retried = {rank.rank: events[-1] for rank in evidence.ranks.values() if (events := rank.happened("oom_retry"))}
    if not retried:
        return []
    last = next(iter(retried.values()))
    size, count = last.get("micro_batch"), last.get("micro_batches")
    return [
        make_finding(
            "MC504",
            f"the micro-batch of {ranks_text(sorted(retried))} did not fit and is {size} now",
            ranks=sorted(retried),
            evidence=[
                f"observed: {str(last.get('message') or '').splitlines()[0][:200]}",
                f"observed: a step now takes {count} micro-batches of {size}; the global batch is the same",
            ],
            fix=[f"set training.batch_size={size} and training.grad_accum_nums={count}: the retries then cost nothing"],
            severity="warning",
            phase="forward",
        )
    ]
