"""Compares what the ranks of a group called: the first place where they part, and who parted from whom.

A deviation is judged against the majority; between two ranks, against each rank's own earlier steps. Where neither
decides, both are named and neither is blamed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from model_check.diagnose.branches import rank_branch
from model_check.diagnose.issues import GroupTable, Issue, Key

Kind = Literal["op", "root", "shape", "dtype", "reduction", "crossed", "shifted"]
Manner = Literal["order", "missing", "extra"]
BlamedBy = Literal["majority", "history", "condition", "count"]

# Operations whose tensors must have one size (and dtype) on every rank. The sizes of all_gather lists (not on gloo),
# all_to_all and most object collectives may differ; of broadcast_object it is the number of objects.
SAME_SIZE_OPS = frozenset(
    {"all_reduce", "broadcast", "reduce", "reduce_scatter", "gather", "scatter", "broadcast_object"}
)
SAME_DTYPE_OPS = SAME_SIZE_OPS | {"all_gather"}
_CROSSING_REACH = 4
_SETTLED = 3
_REMEMBERED = 256
_LOOK_BACK = 64
_SILENT: frozenset[Kind] = frozenset({"root", "dtype", "reduction", "crossed"})  # what may stop nobody


@dataclass(frozen=True)
class Blame:
    """Which ranks are the wrong ones, and what shows it."""

    ranks: tuple[int, ...] = ()  # empty: undecided
    by: BlamedBy | None = None
    why: str = ""  # the same as a sentence
    condition: str = ""  # the condition on the rank that the call of these, or of other ranks stands in


@dataclass(frozen=True)
class Divergence:
    """The ranks of a group called different things at one sequence number."""

    kind: Kind
    manner: Manner
    table: GroupTable
    seq: int
    calls: dict[int, Issue]
    blame: Blame
    stuck: bool  # nobody can get past it

    @property
    def guilty(self) -> tuple[int, ...]:
        """Empty: undecided."""
        return self.blame.ranks

    def first_call(self) -> Issue:
        ranks = self.guilty or tuple(sorted(self.calls))
        return self.calls[ranks[0]]

    def peers_call(self) -> Issue:
        """What the first of the other ranks called."""
        first = self.first_call()
        named = self.guilty or (first.rank,)
        return next((issue for rank, issue in sorted(self.calls.items()) if rank not in named), first)


class Matcher:
    """Compares groups that grow: what has matched once is not looked at again."""

    def __init__(self) -> None:
        self._matched: dict[str, int] = {}
        self._silent: dict[str, Divergence] = {}

    def find(self, table: GroupTable) -> Divergence | None:
        """The first number at which the group's ranks part. One that stops nobody is remembered for good."""
        held = self._silent.get(table.group)
        if held is not None:
            return held
        divergence = find_divergence(table, self._matched.get(table.group, 0))
        if divergence is None:
            # A crossing or a shift shows only in the calls that follow.
            self._matched[table.group] = max(0, table.settled() - _LOOK_BACK)
        elif divergence.kind in _SILENT and not divergence.stuck:
            self._silent[table.group] = divergence
        return divergence


def find_divergence(table: GroupTable, start: int = 0) -> Divergence | None:
    """The first sequence number from `start` on at which the ranks of this group part, if they do."""
    for seq in table.shared_sequences(start):
        calls = table.at(seq)
        kind = _mismatch(table, calls)
        if kind is not None:
            return _judge(table, seq, calls, kind)
    return _crossed_pair(table, start) or _shifted(table, start)


def _mismatch(table: GroupTable, calls: dict[int, Issue]) -> Kind | None:
    issues = list(calls.values())
    if len({issue.op for issue in issues}) > 1:
        # An operation that all ranks got through cannot have been a mismatch: no backend completes one.
        return None if all(table.passed(issue) for issue in issues) else "op"
    if len({issue.root for issue in issues if issue.root >= 0}) > 1:
        return "root"
    op = issues[0].op
    dtypes = {issue.dtype for issue in issues if issue.dtype not in ("none", "other", "")}
    if op in SAME_DTYPE_OPS and len(dtypes) > 1:
        return "dtype"
    sizes = {size for issue in issues if (size := _size(issue)) is not None}
    if len(sizes) > 1:
        if op in SAME_SIZE_OPS:
            return "op" if _lost_step(table, issues) else "shape"
        if op == "all_gather" and not all(table.completed(issue) for issue in issues):
            if _lost_step(table, issues):
                return "op"
            return "shape" if table.equal_gathers else None
    if len({issue.reduction for issue in issues if issue.reduction}) > 1:
        return "reduction"
    return None


def _lost_step(table: GroupTable, issues: Sequence[Issue]) -> bool:
    """The ranks make different calls here, not one call with different tensors."""
    if len({issue.text_key for issue in issues}) == 1:
        return False
    return _leaves_routine(table, issues) or _out_of_step(table, issues)


def _out_of_step(table: GroupTable, issues: Sequence[Issue]) -> bool:
    """Each call is one that another rank has made too."""
    made = {issue.rank: {past.key for past in table.history(issue.rank, issue.seq)} for issue in issues}
    return all(any(issue.key in made[other.rank] for other in issues if other is not issue) for issue in issues)


def _leaves_routine(table: GroupTable, issues: Iterable[Issue]) -> bool:
    """One rank calls from a place where it never did before, while the others do what they always do."""
    novel = [_is_novel(table, issue) for issue in issues]
    return any(novel) and not all(novel)


def _size(issue: Issue) -> int | None:
    if issue.bytes:
        return issue.bytes
    return math.prod(issue.shape) if issue.shape else None


def _signature(issue: Issue, kind: Kind) -> object:
    if kind == "shape":
        return _size(issue)
    if kind == "dtype":
        return issue.dtype
    if kind == "root":
        return issue.root
    if kind == "reduction":
        return issue.reduction
    if kind == "crossed":
        return issue.text_key
    return (issue.op, _size(issue) if issue.op in SAME_SIZE_OPS or issue.op == "all_gather" else None)


def _judge(table: GroupTable, seq: int, calls: dict[int, Issue], kind: Kind) -> Divergence:
    blame = blame_for(table, calls, {rank: _signature(issue, kind) for rank, issue in calls.items()})
    manner: Manner = "order"
    if kind == "op" and blame.ranks:
        others = [issue for rank, issue in calls.items() if rank not in blame.ranks]
        manner = _manner(table, calls[blame.ranks[0]], others[0])
    waiting = [issue for issue in calls.values() if not table.passed(issue)]
    return Divergence(kind, manner, table, seq, calls, blame, stuck=len(waiting) > 1)


def blame_for(table: GroupTable, calls: dict[int, Issue], signatures: dict[int, object]) -> Blame:
    """The ranks that differ from the majority, or from their own earlier steps; nobody where neither decides."""
    counts = Counter(signatures.values())
    (common, most), *rest = counts.most_common()
    if rest and most > rest[0][1] and most > len(calls) / 2:
        guilty = tuple(sorted(rank for rank, signature in signatures.items() if signature != common))
        agree = f"{most} of {len(calls)} ranks agree, {ranks_text(guilty)} differ{'s' if len(guilty) == 1 else ''}"
        inside, names_them = _in_a_branch_of_their_own(calls)
        if not inside.ranks or set(inside.ranks) & set(guilty):
            return Blame(guilty, "majority", agree, inside.condition)
        if names_them and all(_is_novel(table, calls[rank]) for rank in inside.ranks):
            return inside  # a subset of the ranks may well be most of them
        return Blame(guilty, "majority", f"{agree}; {inside.why}", inside.condition)
    surprising = {rank: _surprise(table, issue) for rank, issue in calls.items()}
    odd = tuple(sorted(rank for rank, value in surprising.items() if value))
    if odd and len(odd) < len(calls) and len({signatures[rank] for rank in odd}) == 1:
        left = f"{ranks_text(odd)} left the order of its own earlier steps: {surprising[odd[0]]}"
        return Blame(odd, "history", left)
    return _in_a_branch_of_their_own(calls)[0]


def _in_a_branch_of_their_own(calls: dict[int, Issue]) -> tuple[Blame, bool]:
    """The ranks whose call is inside a condition on the rank, if the calls of the others are not.

    Also whether the condition names these ranks. If it only excludes others, the others are the exception.
    """
    branches = {rank: rank_branch(issue.frame) if issue.frame is not None else None for rank, issue in calls.items()}
    inside = tuple(sorted(rank for rank, branch in branches.items() if branch is not None))
    if not inside or len(inside) == len(calls) or len({calls[rank].key for rank in inside}) > 1:
        return Blame(), False
    branch = branches[inside[0]]
    assert branch is not None, f"rank {inside[0]} was chosen for its branch"
    why = f"the call of {ranks_text(inside)} is reached only through `{branch.test}` at {branch.site}"
    return Blame(inside, "condition", why, branch.test), branch.names_them


def _surprise(table: GroupTable, issue: Issue) -> str:
    """Why this call is not what the rank's own history led to expect; empty where it is, or nothing is known."""
    history = table.history(issue.rank, issue.seq)
    expected = _predict(history, 1)
    if not expected:
        return ""
    usual = expected[0]
    if usual.key != issue.key:
        return f"after {history[-1].describe()} it used to call {usual.describe()}, this time {issue.describe()}"
    if (_size(usual), usual.dtype, usual.root) != (_size(issue), issue.dtype, issue.root) or (
        usual.reduction and usual.reduction != issue.reduction
    ):
        return f"it used to call {usual.describe()}, this time {issue.describe()}"
    return ""


def _predict(history: Sequence[Issue], count: int) -> list[Issue]:
    """The calls that came next the last time this rank had made the same calls, as many of them as possible."""
    known = history[-_REMEMBERED:]
    keys = [(issue.key, _size(issue)) for issue in known]
    best_length, best_end = 0, 0
    for end in range(len(keys) - 1, 0, -1):
        length = 0
        while length < end and keys[end - 1 - length] == keys[-1 - length]:
            length += 1
        if length > best_length:
            best_length, best_end = length, end
    return list(known[best_end : best_end + count]) if best_length else []


def _is_novel(table: GroupTable, issue: Issue) -> bool:
    return all(earlier.key != issue.key for earlier in table.history(issue.rank, issue.seq))


def _manner(table: GroupTable, deviant: Issue, usual: Issue) -> Manner:
    """Whether the deviating rank left a call out, made one too many, or made another one in its place."""
    upcoming = _upcoming(table, usual)
    own_past = table.history(deviant.rank, deviant.seq)
    if not _is_novel(table, deviant):
        expected = _predict(own_past, 1)
        if expected and expected[0].key == deviant.key:
            return "missing"  # it continues as usual, but without a call that the others make
        repeated = next((past for past in reversed(own_past) if past.key == deviant.key), None)
        same_step = repeated is not None and repeated.step == deviant.step and own_past[-1].key == deviant.key
        comes_later = any(later.op == deviant.op for later in upcoming)
        return "extra" if same_step or not comes_later else "missing"
    if any(later.op == deviant.op and _size(later) == _size(deviant) for later in upcoming):
        return "order"
    if deviant.op in ("barrier", "monitored_barrier"):
        return "missing"
    if deviant.frame is not None and rank_branch(deviant.frame) and not (usual.frame and rank_branch(usual.frame)):
        return "extra"
    if own_past and deviant.context == usual.context and deviant.step == usual.step:
        return "order"
    return "extra" if own_past else "order"


def _upcoming(table: GroupTable, issue: Issue) -> list[Issue]:
    """What this rank calls after the given call: already issued, else what its history says comes next."""
    later = [i for seq, i in table.issues[issue.rank].items() if seq > issue.seq][:_CROSSING_REACH]
    history = [*table.history(issue.rank, issue.seq), issue]
    return later or _predict(history, _CROSSING_REACH)


def _crossed_pair(table: GroupTable, start: int) -> Divergence | None:
    """A then B on one rank, B then A on another, with one signature: each sum mixes two different things."""
    # Whoever swapped differs from the first rank, or the first rank differs from all.
    first, *others = sorted(table.issues)
    mine = table.issues[first]
    for rank in others:
        theirs = table.issues[rank]
        for seq in (s for s in mine if s >= start and s in theirs and mine[s].key != theirs[s].key):
            for later in range(seq + 1, seq + 1 + _CROSSING_REACH):
                both = later in mine and later in theirs
                if both and _crosses(mine[seq], theirs[seq], mine[later], theirs[later]):
                    calls = table.at(seq)
                    signatures: dict[int, object] = {r: issue.text_key for r, issue in calls.items()}
                    blame = blame_for(table, calls, signatures)
                    return Divergence("crossed", "order", table, seq, calls, blame, stuck=False)
    return None


def _crosses(a1: Issue, b1: Issue, a2: Issue, b2: Issue) -> bool:
    if a1.key == b1.key or a1.native or b1.native or a1.step != b1.step:
        return False

    def swapped(first: Key, second: Key, third: Key, fourth: Key) -> bool:
        return first != second and first == fourth and second == third

    return swapped(a1.key, b1.key, a2.key, b2.key) or swapped(a1.text_key, b1.text_key, a2.text_key, b2.text_key)


def _shifted(table: GroupTable, start: int) -> Divergence | None:
    """The same calls, but from some number on one rank's belong to another step than its peers'."""
    first, *others = sorted(table.issues)
    for rank in others:
        seq = _shift_between(table, first, rank, start)
        if seq is None:
            continue
        calls = table.at(seq)
        blame = blame_for(table, calls, {r: issue.step for r, issue in calls.items()})
        if not blame.ranks and (odd := _uneven_counts(table, seq, calls)):
            counted = f"{ranks_text(odd)} made another number of calls in a step than in earlier steps"
            blame = Blame(odd, "count", counted)
        ahead = max(calls.values(), key=lambda issue: issue.step)
        manner: Manner = "missing" if not blame.ranks or ahead.rank in blame.ranks else "extra"
        return Divergence("shifted", manner, table, seq, calls, blame, stuck=False)
    return None


def _shift_between(table: GroupTable, left: int, right: int, start: int) -> int | None:
    """The first number after which the steps of two ranks differ by another, then constant, amount."""
    mine, theirs = table.issues[left], table.issues[right]
    # Only the same call on both: a rank that shadows its peers (DDP's Join) calls from elsewhere, on purpose.
    shared = [s for s in mine if s >= start and s in theirs and mine[s].key == theirs[s].key]
    gaps = [(s, mine[s].step - theirs[s].step) for s in shared]
    for at in range(_SETTLED, len(gaps) - _SETTLED + 1):
        before, after = gaps[at - _SETTLED : at], gaps[at:]
        steady = len({gap for _, gap in before}) == 1 and len({gap for _, gap in after}) == 1
        in_a_row = after[0][0] == before[-1][0] + 1
        if steady and in_a_row and abs(after[0][1] - before[-1][1]) == 1:
            return after[0][0]
    return None


def _uneven_counts(table: GroupTable, seq: int, calls: dict[int, Issue]) -> tuple[int, ...]:
    """The ranks whose number of calls in the step just before the shift is not what it used to be."""
    odd = []
    for rank in calls:
        history = table.history(rank, seq)
        counts = Counter(issue.step for issue in history)
        steps = sorted(counts)
        # The oldest step may have lost records to the ring; the newest is the one in question.
        usual = Counter(counts[s] for s in steps[1:-1]).most_common(1)
        missing_steps = {s for s in range(steps[0], calls[rank].step) if s not in counts} if steps else set()
        if missing_steps or (usual and counts[steps[-1]] != usual[0][0]):
            odd.append(rank)
    return tuple(odd) if len(odd) < len(calls) else ()


def ranks_text(ranks: Iterable[int]) -> str:
    """rank 1; ranks 0 and 2; ranks 0, 1, 4-7"""
    numbers = sorted(set(ranks))
    parts: list[str] = []
    start = 0
    while start < len(numbers):
        end = start
        while end + 1 < len(numbers) and numbers[end + 1] == numbers[end] + 1:
            end += 1
        if end - start >= 2:
            parts.append(f"{numbers[start]}-{numbers[end]}")
        else:
            parts.extend(str(n) for n in numbers[start : end + 1])
        start = end + 1
    if not parts:
        return "no rank"
    body = parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]
    return f"rank {body}" if len(numbers) == 1 else f"ranks {body}"
