"""The first lines of a rank, before torch is imported: its black box, how it prints, its first two checkpoints."""

from __future__ import annotations

import sys

from model_check.blackbox.install import install
from model_check.blackbox.start_marks import MARKS
from model_check.record.rank_context import RankContext


def print_line(line: str) -> None:
    """In one write: under torchrun all ranks share one stream, and print() would write the newline apart."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def begin_rank(context: RankContext, *, verbose: bool) -> None:
    """The process runs, and it knows what it is to do. Doing this again changes nothing."""
    try:
        install(context.run_dir, rank=context.rank, world_size=context.world_size, local_rank=context.local_rank)
    except OSError as error:
        print_line(f"[{context.label}] this rank is not recorded ({error}); training goes on")
    MARKS.begin(context.rank, context.world_size, context.local_rank, print_line if verbose else None)
    MARKS.passed(1)
    MARKS.passed(2)
