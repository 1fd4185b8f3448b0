"""Which dataset samples a batch was made of: found from the batch itself, never guessed from one fetched ahead."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

from model_check.blackbox.batch_samples import Drawn, indices_of


def batch(indices: Sequence[int], *, by_script: bool) -> tuple[Drawn, torch.Tensor]:
    tensor = torch.zeros(len(indices), 2)
    return Drawn(indices, (weakref.ref(tensor),), by_script), tensor


def test_the_batch_that_was_given_is_told_from_the_one_fetched_ahead() -> None:
    used, tensor = batch([7, 3], by_script=False)
    ahead, _ = batch([5, 1], by_script=False)
    assert indices_of([used, ahead], [tensor], 2) == [7, 3]


def test_a_copy_is_the_newest_batch_only_where_the_script_asked_for_it() -> None:
    asked, _ = batch([7, 3], by_script=True)
    assert indices_of([asked], [torch.ones(2, 2)], 2) == [7, 3]
    fetched, _ = batch([7, 3], by_script=False)
    assert indices_of([fetched], [torch.ones(2, 2)], 2) is None
    assert indices_of([asked], [torch.ones(3, 2)], 3) is None
    assert indices_of([], [torch.ones(2, 2)], 2) is None
