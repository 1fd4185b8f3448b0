"""Context parallelism, applied from outside: each rank of the group holds a slice of every sequence.

Everything but attention works token by token. In attention a rank gathers the keys and values of the whole sequence
(few, with grouped heads) and lets its own queries look at what lies before them. A rank's slice is two pieces, one from
each end of the sequence, so that all ranks have the same work: late tokens look at many others, early ones at few.
"""

from __future__ import annotations

from functools import lru_cache, partial

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, _functional_collectives
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from model_check.models.attention import AttentionMask, attend
from model_check.models.llama import Attention, Block, Llama
from model_check.models.rope import RotaryTables, rotate

# torch 2.13 has a new name for it; the old one warns there.
_gather = getattr(_functional_collectives, "all_gather_single_autograd", None) or (
    _functional_collectives.all_gather_tensor_autograd
)


def slice_positions(length: int, rank: int, ranks: int) -> Tensor:
    """The positions of a rank's slice: piece `rank` from the front and the same from the back."""
    front, back = (torch.arange(length).chunk(2 * ranks)[piece] for piece in (rank, 2 * ranks - 1 - rank))
    return torch.cat([front, back])


class ContextParallelAttention(Attention):
    """Attention of this rank's queries to all keys before them."""

    group: ProcessGroup

    def forward(self, x: Tensor, rotary: RotaryTables, backend: str, mask: AttentionMask) -> Tensor:
        heads = (*x.shape[:2], -1, self.head_dim)
        query = rotate(self.wq(x).view(heads), rotary)
        key = rotate(self.wk(x).view(heads), rotary)
        value = self.wv(x).view(heads)
        # One collective for both; the mask knows in which order the pieces arrive.
        key, value = _gather(torch.cat([key, value], dim=-1), 1, self.group).chunk(2, dim=-1)
        return self.wo(attend(query, key.contiguous(), value.contiguous(), backend, mask).flatten(2))


def build_context_mask(
    rank: int, ranks: int, backend: str, hidden: Tensor, document_ids: Tensor | None
) -> AttentionMask:
    """The mask of a slice: a query looks at the keys whose position is not after its own."""
    assert document_ids is None, "packed documents are not kept apart across slices"
    return _mask(backend == "flex", hidden.shape[1], rank, ranks, str(hidden.device))


@lru_cache(maxsize=8)
def _mask(flex: bool, length: int, rank: int, ranks: int, device: str) -> Tensor | BlockMask:
    slices = [slice_positions(length * ranks, number, ranks) for number in range(ranks)]
    queries, keys = slices[rank].to(device), torch.cat(slices).to(device)
    if not flex:
        return keys <= queries.unsqueeze(1)
    return create_block_mask(
        lambda _b, _h, query, key: keys[key] <= queries[query], None, None, length, length * ranks, device=device
    )


def apply_context_parallel(model: Llama, group: ProcessGroup, rank: int, ranks: int) -> Llama:
    """Make `model` compute on slices of sequences, in place; call it before compiling and sharding."""
    for layer in model.layers:
        if isinstance(layer, Block):
            layer.attention.__class__ = ContextParallelAttention
            layer.attention.group = group  # type: ignore[assignment]
    model.context_mask = partial(build_context_mask, rank, ranks)
    return model
