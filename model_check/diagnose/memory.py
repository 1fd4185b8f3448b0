"""Rules on memory that ran out: MC501, MC502, the facts beside MC307, and MC504 for a step that was retried smaller.

The rank leaves a record of the moment (`out_of_memory` in its events): what was asked for, what is held for what. Where
it could not, the numbers in torch's own message stand in. Shortage and fragmentation are told apart: memory that is
free in sum, but in pieces that are all too small, is lost to the layout of the allocator and not to the model.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from model_check.diagnose.collectives import ranks_text
from model_check.diagnose.evidence import Evidence, RankEvidence
from model_check.diagnose.findings import make_finding
from model_check.record import Finding
from model_check.record.events.memory import Holding, HostLimits, MicroBatchHalved, OutOfMemory
from model_check.record.run_plan import RunPlan

GIB = 1 << 30
# Free memory in pieces counts as fragmentation from this share of the device on: a little is always in pieces.
FRAGMENTED_SHARE = 0.1
_SHOWN = 5
_WORTH_SHOWING = 0.01  # of what is in use


def memory_account(rank: RankEvidence, message: str, *, on_device: bool) -> OutOfMemory:
    """The rank's own record of its last moment without memory, or what the exception's message says."""
    records = rank.happened(OutOfMemory)
    told = OutOfMemory.told_by(message)
    if not records:
        return told
    account = records[-1]
    if not on_device or account.total is not None:
        return account
    # The allocator of the device was not ours to watch: the rank knows whose tensors there are, the message how much.
    requested = account.requested or told.requested
    return replace(told, requested=requested, categories=account.categories, largest=account.largest)


def is_fragmented(account: OutOfMemory) -> bool:
    """What was asked for is free in sum, and so is a good share of the device."""
    if account.requested is None or account.total is None:
        return False
    return account.free_in_pieces >= max(account.requested, FRAGMENTED_SHARE * account.total)


def _unnamed(account: OutOfMemory) -> int:
    """What is in use and of no category: on a host lists, caches, activations, libraries."""
    return max(0, (account.rss or account.allocated or 0) - sum(account.categories.values()))


def memory_facts(account: OutOfMemory, plan: RunPlan) -> list[str]:
    """The lines of evidence that a finding about memory carries."""
    facts = []
    worth = _WORTH_SHOWING * max(sum(account.categories.values()), account.allocated or 0, account.rss or 0)
    if account.requested is not None:
        of = f" with {_size(account.free)} free of {_size(account.total)}" if account.total is not None else ""
        facts.append(f"observed: it asked for {_size(account.requested)}{of}")
    facts += _host_facts(account.limits or HostLimits())
    if account.categories:
        unnamed = _unnamed(account)
        named = {**account.categories, **({"everything else": unnamed} if unnamed > worth else {})}
        held = sorted(named.items(), key=lambda item: -item[1])
        facts.append("observed: in use " + ", ".join(f"{name} {_size(size)}" for name, size in held))
    elif account.allocated is not None:
        facts.append(f"observed: torch has {_size(account.allocated)} in use")
    facts += [f"observed: {_holding(held)}" for held in account.largest[:_SHOWN] if held.bytes >= worth]
    if account.free_in_pieces >= (account.requested or GIB):
        largest = f", the largest {_size(account.largest_piece)}" if account.largest_piece else ""
        facts.append(f"observed: {_size(account.free_in_pieces)} are free inside the allocator in pieces{largest}")
    if plan.memory.peak_gib is not None and account.total is not None:
        planned = f"{plan.memory.peak_gib:.1f} GiB at its peak, in the {plan.memory.peak_moment}"
        facts.append(f"inferred: the plan expected {planned}")
    if account.snapshot:
        facts.append(f"observed: {account.snapshot} opens in PyTorch's memory viewer")
    return facts


def memory_values(account: OutOfMemory) -> dict[str, Any]:
    """The same as facts of the finding: those that are known, in bytes."""
    known = {name: getattr(account, name) for name in ("requested", "free", "total", "allocated", "rss")}
    held = {"held": dict(account.categories)} if account.categories else {}
    return {name: size for name, size in known.items() if size is not None} | held


def _host_facts(limits: HostLimits) -> list[str]:
    if limits.total is None or limits.available is None:
        return []
    bounds = {"its address space": limits.address_space, "its cgroup": limits.cgroup}
    limited = "".join(f"; {name} is limited to {_size(bound)}" for name, bound in bounds.items() if bound)
    return [f"observed: the host has {_size(limits.available)} of {_size(limits.total)} left{limited}"]


def _holding(held: Holding) -> str:
    many = f"{held.count} × {_size(held.bytes // held.count)}" if held.count > 1 else _size(held.bytes)
    name = f" ({held.name})" if held.name else ""
    line = f" made at {held.line}" if held.line else ""
    return f"{many} of {held.category}{name}{line}"


def _size(size: int | None) -> str:
    if size is None:
        return "an unknown amount"
    return f"{size / GIB:.2f} GiB" if size >= GIB else f"{size / (1 << 20):.0f} MiB"


def memory_fixes(account: OutOfMemory, plan: RunPlan) -> list[str]:
    """The smallest change that fits, where the plan of the run knows one; else what the largest category suggests."""
    limits = account.limits or HostLimits()
    bounds = [bound for bound in (limits.total, limits.address_space, limits.cgroup) if bound]
    most = account.total or min(bounds, default=None)
    if account.requested is not None and most is not None and account.requested > most:
        return [f"one allocation of {_size(account.requested)} is more than there is: the sizes on that line are wrong"]
    if is_fragmented(account):
        return [
            "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, which leaves no such pieces",
            "keep shapes the same from step to step: pad batches to one length",
        ]
    # What the plan saves is the device's: it says nothing to a host that is short of memory.
    planned = _planned_fix(account, plan) if account.rss is None else []
    if planned:
        return planned
    if not account.categories or _unnamed(account) > max(account.categories.values()):
        return []
    if account.allocated is None and account.rss is None:
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


def _planned_fix(account: OutOfMemory, plan: RunPlan) -> list[str]:
    # What was missing at this moment is the least that must go: more was to come in the same step.
    known = account.requested is not None and account.free is not None
    missing = max(0, (account.requested or 0) - (account.free or 0)) / GIB if known else 0.0
    enough = [remedy for remedy in plan.remedies if remedy.saves_gib > missing]
    return [f"add {remedy.flags} (saves about {remedy.saves_gib:.1f} GiB)" for remedy in enough[:2]]


def retry_findings(evidence: Evidence) -> list[Finding]:
    """A run that goes on with smaller micro-batches is told so: the next one should start with them."""
    retried = {rank.rank: events[-1] for rank in evidence.ranks.values() if (events := rank.happened(MicroBatchHalved))}
    if not retried:
        return []
    last = next(iter(retried.values()))
    size, count = last.micro_batch, last.micro_batches
    first_line = last.message.partition("\n")[0]
    return [
        make_finding(
            "MC504",
            f"the micro-batch of {ranks_text(sorted(retried))} did not fit and is {size} now",
            ranks=sorted(retried),
            evidence=[
                f"observed: {first_line[:200]}",
                f"observed: a step now takes {count} micro-batches of {size}; the global batch is the same",
            ],
            fix=[f"set training.batch_size={size} and training.grad_accum_nums={count}: the retries then cost nothing"],
            severity="warning",
            phase="forward",
            facts={"micro_batch": size, "micro_batches": count},
        )
    ]
