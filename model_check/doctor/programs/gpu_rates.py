"""Measures the one visible GPU: matrix products in bf16 (fp16 on older chips) and copies in its own memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

SIZE = 8192
COPY_BYTES = 1 << 30
ROUNDS = 5
CALLS = 10


def best_seconds(torch: Any, work: Callable[[], Any]) -> float:
    """The fastest of a few rounds, per call: what the chip can do, not what a neighbour left of it."""
    for _ in range(3):
        work()
    best = float("inf")
    for _ in range(ROUNDS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(CALLS):
            work()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) / CALLS / 1e3)
    return best


def rates() -> dict[str, Any]:
    import torch

    device = torch.device("cuda:0")
    free, _ = torch.cuda.mem_get_info(device)
    dtype = torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    size = SIZE if free > 6 * SIZE * SIZE + 4 * COPY_BYTES else SIZE // 4
    ones = torch.ones(size, size, device=device, dtype=dtype)
    # A sum of `size` ones is a power of two, exact in either format.
    right_product = bool((ones @ ones == size).all())
    # Random numbers for the measurement: ones toggle few bits, draw less power, and flatter the chip.
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    matmul_s = best_seconds(torch, lambda: torch.mm(left, right, out=ones))
    copy_bytes = COPY_BYTES if size == SIZE else COPY_BYTES // 16
    source = torch.empty(copy_bytes, device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    copy_s = best_seconds(torch, lambda: target.copy_(source))
    return {
        "name": torch.cuda.get_device_name(device),
        "flops": 2 * size**3 / matmul_s,
        "bytes_per_s": 2 * copy_bytes / copy_s,  # every byte is read once and written once
        "correct": right_product,
        "dtype": str(dtype).removeprefix("torch."),
    }


if __name__ == "__main__":
    print(json.dumps(rates()))
