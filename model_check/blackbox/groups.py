"""Names for process groups that all their members agree on, and the count of calls in each.

torch's own names are not the same on every rank and not for people. Ours are "default", or the members and how many
groups of the same members this process has seen ("ranks 0,1", "ranks 0,1 #2"): members see them in the same order.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from model_check.blackbox.box import BOX
from model_check.blackbox.recorder import Recorder
from model_check.record.events.process import GroupJoined


class Group:
    """One process group as the ring knows it."""

    def __init__(self, name: str, ranks: tuple[int, ...], recorder: Recorder) -> None:
        self.name = name
        self.ranks = ranks
        self.id = recorder.intern(name)
        # The first record of a group says who is in it.
        self.introduction = recorder.intern(f"ranks {spell(ranks)}")
        self.collectives = 0
        self.messages: Counter[tuple[str, int]] = Counter()

    def next_collective(self) -> tuple[int, int]:
        """(sequence number, detail id) of the collective that is about to be issued."""
        self.collectives += 1
        return self.collectives, self.introduction if self.collectives == 1 else 0

    def next_message(self, op: str, peer: int) -> int:
        """Point-to-point calls are counted per operation and peer: their number says nothing about other ranks."""
        self.messages[op, peer] += 1
        return self.messages[op, peer]

    def global_rank(self, group_rank: int | None) -> int:
        """The job's number of a member; -1 where there is none."""
        return self.ranks[group_rank] if group_rank is not None and 0 <= group_rank < len(self.ranks) else -1


class Groups:
    """The groups this process is in, by torch's name of them."""

    def __init__(self) -> None:
        self._known: dict[str | None, Group] = {}
        self._same_members: Counter[tuple[int, ...]] = Counter()
        self._recorder: Recorder | None = None

    def find(self, recorder: Recorder, group: Any) -> Group | None:
        """The group of a collective's `group` argument; None where this rank is not in it."""
        if recorder is not self._recorder:
            self.forget()
            self._recorder = recorder
        if group is None:
            known = self._known.get(None)
            if known is None:
                known = self._known[None] = self._default(recorder)
            return known
        name = getattr(group, "group_name", None)
        if name is None:
            return None
        known = self._known.get(name)
        if known is None:
            known = self._known[name] = self._meet(recorder, group)
        return known

    def _default(self, recorder: Recorder) -> Group:
        from torch.distributed import distributed_c10d as c10d

        world = c10d._get_default_group()
        found = self.find(recorder, world)
        assert found is not None, f"the default group {world} has no name"
        return found

    def _meet(self, recorder: Recorder, group: Any) -> Group:
        from torch.distributed import distributed_c10d as c10d

        world = c10d._world.default_pg
        if world is not None and group is world:
            met = Group("default", tuple(range(world.size())), recorder)
        else:
            ranks = tuple(sorted(c10d._world.pg_group_ranks.get(group, {})))
            if ranks:
                self._same_members[ranks] += 1
                count = self._same_members[ranks]
                met = Group(f"ranks {spell(ranks)}" + (f" #{count}" if count > 1 else ""), ranks, recorder)
            else:
                # Made behind torch.distributed's back, so its members are not on record.
                met = Group(f"group {group.group_name}", (), recorder)
        BOX.event(GroupJoined(name=met.name, ranks=met.ranks, torch_name=group.group_name))
        return met

    def forget(self) -> None:
        """torch counts its names from the start again after destroy_process_group."""
        self._known.clear()
        self._same_members.clear()


def spell(ranks: tuple[int, ...]) -> str:
    """0,1,2,3 up to eight members; longer ones as ranges."""
    if len(ranks) <= 8:
        return ",".join(map(str, ranks))
    parts: list[str] = []
    first = last = ranks[0]
    for rank in (*ranks[1:], -1):
        if rank == last + 1:
            last = rank
            continue
        parts.append(str(first) if first == last else f"{first}-{last}")
        first = last = rank
    return ",".join(parts)


GROUPS = Groups()
