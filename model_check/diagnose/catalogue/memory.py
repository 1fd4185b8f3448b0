"""Codes MC5xx: memory that ran out, was in pieces, or would not be enough."""

from __future__ import annotations

from model_check.diagnose.catalogue.entry import MEMORY_FACTS, Entry

MEMORY: dict[str, Entry] = {
    "MC501": Entry(
        "device out of memory",
        "An allocation on the GPU failed, and there was not enough memory left for it.",
        "Weights, gradients, optimizer states and activations together do not fit.",
        "torch's allocator tells us before it raises: the finding has what was asked for, what is held for what, the "
        "largest tensors with the lines that made them, and the plan's view of the run.",
        (
            "halve the batch and double the gradient accumulation: the same global batch",
            "recompute activations (torch.utils.checkpoint), or shorten the sequences",
            "share parameters and optimizer states among ranks: torch.distributed.fsdp.fully_shard",
        ),
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        facts=MEMORY_FACTS,
        ours=(
            "halve training.batch_size and double training.grad_accum_nums: the same global batch",
            "set parallel.activation_checkpointing, or shorten training.context_length",
            "share parameters and optimizer states among ranks: parallel.strategy=fsdp",
            "model-check plan shows what each of these saves",
        ),
    ),
    "MC502": Entry(
        "device memory in pieces",
        "An allocation on the GPU failed although enough memory was free: in pieces that were all too small.",
        "Tensors of many different sizes come and go, and leave holes between those that stay.",
        "The free memory inside torch's allocator is at least what was asked for and a tenth of the device.",
        (
            "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
            "keep shapes the same from step to step: pad batches to one length",
        ),
        "Tried to allocate 3.00 GiB … 9.12 GiB is reserved by PyTorch but unallocated.",
        facts=MEMORY_FACTS,
    ),
    "MC503": Entry(
        "the run cannot fit",
        "Before the launch: this configuration needs more memory than these GPUs, or this host, have.",
        "The sum of what the training step must hold at one moment is larger than the device. On CPU ranks, or with "
        "fsdp.cpu_offload, the parameters, gradients and optimizer states are larger than the memory of the host.",
        "The plan computes it from the shapes; measured peaks lie within a few percent of it (docs/memory.md).",
        (
            "take the configuration that the message names",
            "model-check plan shows every strategy with its memory and speed",
            "--force starts the run all the same",
        ),
        "this run cannot fit: a rank needs 201.9 GiB of the GPU's 139.7",
    ),
    "MC504": Entry(
        "step retried with a smaller micro-batch",
        "A step ran out of device memory and was done again with half the micro-batch and twice as many of them.",
        "training.oom_retry is on, and the configured micro-batch does not fit.",
        "The rank says so in its events. Global batch and losses are the same.",
        ("start the next run with the micro-batch of the finding",),
        "the micro-batch of rank 0 did not fit and is 2 now",
        ours=("set training.batch_size and training.grad_accum_nums to the values of the finding",),
        facts={"micro_batch": "its samples now", "micro_batches": "how many of them a step takes now"},
    ),
}
