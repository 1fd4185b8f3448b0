"""The sections of a configuration: every key with its type, default, unit and range, as frozen data.

A rule that needs two keys lives in `validate`; here each key stands for itself.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


def _bool_as_switch(value: Any) -> Any:
    """`true` and `false` are what people write for on and off."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return value


def _list_as_tuple(value: Any) -> Any:
    """JSON and YAML know lists only; frozen data holds tuples."""
    return tuple(value) if isinstance(value, list) else value


Switch = Annotated[Literal["auto", "on", "off"], BeforeValidator(_bool_as_switch)]
Count = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Name = Annotated[str, Field(min_length=1)]
Precision = Literal["bf16", "fp16", "fp32", "fp8"]


class Section(BaseModel):
    """Frozen, and strict: the string "5" is not a number, an unknown key is a fault, NaN is no value."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())


class ModelSection(Section):
    """What is trained. A size left null comes from the shape that model_path names. A model that you name in a
    file or with `--set` brings its whole shape: the sizes of a preset hold for the preset's own model only. Sizes that
    you set yourself win over both."""

    model_path: Name | None = Field(
        None,
        description="Built-in shape (`llama-3.1-8b`, `14b`), hub id, or local Hugging Face folder; with "
        "init=pretrained also a .pt or .safetensors file. null, or such a file: the sizes below define the model.",
    )
    init: Literal["random", "pretrained"] = Field(
        "random",
        description="`random`: fresh weights, every size free. `pretrained`: the weights and sizes of model_path.",
    )
    num_layers: Count | None = Field(None, description="Transformer blocks.")
    hidden_size: Count | None = Field(None, description="Width of the residual stream; a multiple of num_heads.")
    num_heads: Count | None = Field(None, description="Query heads; a multiple of num_kv_heads.")
    num_kv_heads: Count | None = Field(None, description="Key and value heads. null without model_path: num_heads.")
    intermediate_size: Count | None = Field(
        None, description="Width inside the MLP. null without model_path: 8/3 of hidden_size, rounded up to 256."
    )
    vocab_size: Count | None = Field(
        None, description="Rows of the embedding. null: those of the shape; without model_path those of the tokenizer."
    )
    tie_embeddings: bool | None = Field(None, description="Share one matrix between input embedding and output head.")
    rope_theta: Annotated[float, Field(gt=0)] | None = Field(None, description="Base of the rotary frequencies.")
    init_std: float = Field(0.02, gt=0, le=1, description="Standard deviation of fresh weights; smaller is calmer.")
    attention_backend: Literal["auto", "sdpa", "cudnn", "flash", "flex", "flash_attn", "flash_attn_4", "math"] = Field(
        "auto",
        description="Attention kernel. `auto` takes the fastest that works here; `flash_attn` and `flash_attn_4` need "
        "their packages.",
    )


class DataSection(Section):
    """What it is trained on."""

    dataset: Name = Field(
        "synthetic",
        description="`synthetic` (generated, entropy known), a path (.txt, .jsonl, .parquet, folder), or a hub name "
        "(`wikitext`, `c4`).",
    )
    tokenizer: Name = Field(
        "builtin",
        description="`builtin` (small BPE shipped with the package), `bytes`, a path to a tokenizer.json, or a hub id.",
    )
    samples: Count | None = Field(None, description="Documents to use from the source. null: all.")
    cache_dir: Name = Field(".cache/datasets", description="Folder of tokenized, packed data.")
    text_field: Name = Field("text", description="Field of a record that holds the text.")
    subset: Name | None = Field(None, description="Named configuration of a hub dataset, such as `wikitext-2-raw-v1`.")
    split: Name = Field("train", description="Split of a hub dataset.")
    validation_fraction: float = Field(
        0.01, ge=0, le=0.5, description="Share of the documents held out for evaluation."
    )
    document_mask: bool = Field(False, description="Attention stays inside a document and positions restart with it.")
    streaming: Switch = Field(
        "auto", description="Read a hub dataset while downloading. `auto`: where it is large or samples is set."
    )


class SchedulerSection(Section):
    """How the learning rate moves."""

    type: Literal["constant", "linear_warmup", "cosine", "wsd"] = Field(
        "constant",
        description="`constant`; `linear_warmup` then constant; warm-up then `cosine`; `wsd`: warm-up, stable, decay. "
        "All of them warm up for warmup_steps.",
    )
    warmup_steps: NonNegative = Field(0, description="Steps of linear warm-up to the full learning rate.")
    min_ratio: Fraction = Field(
        0.1, description="Learning rate at the end of cosine or wsd, as a share of the full one."
    )
    decay_fraction: Fraction = Field(0.1, description="Share of max_steps in which wsd decays.")


class TrainingSection(Section):
    """How it is trained."""

    batch_size: Count = Field(1, description="Sequences per rank and forward pass.")
    grad_accum_nums: Count | None = Field(
        None, description="Forward passes per optimizer step. null: derived from global_batch, or 1 without it."
    )
    global_batch: Count | None = Field(
        None, description="Sequences per optimizer step over all ranks. null: batch_size × grad_accum_nums × ranks."
    )
    context_length: int = Field(2048, ge=2, description="Tokens per sequence.")
    max_steps: Count = Field(100, description="Optimizer steps.")
    learning_rate: float = Field(1e-5, gt=0, le=1, description="Peak learning rate.")
    weight_decay: Fraction = Field(0.1, description="Decay of matrices; norms are never decayed.")
    max_grad_norm: float = Field(1.0, ge=0, description="Gradients are clipped to this norm. 0: no clipping.")
    betas: Annotated[tuple[Beta, Beta], BeforeValidator(_list_as_tuple)] = Field(
        (0.9, 0.95), description="Decay rates of AdamW's two moments."
    )
    eps: float = Field(1e-8, gt=0, le=1e-2, description="AdamW's guard against division by zero.")
    precision: Precision = Field("bf16", description="Number format of the matrix products.")
    use_amp: bool = Field(True, description="false: everything in fp32, whatever precision says.")
    optimizer_states: Literal["fp32", "bf16", "8bit"] = Field(
        "fp32", description="Number format of AdamW's two moments. `8bit` needs the torchao package."
    )
    num_workers: int = Field(
        0, ge=0, le=128, description="Threads per rank that prepare batches ahead. 0: none; each step prepares its own."
    )
    scheduler: SchedulerSection = SchedulerSection()
    eval_interval: NonNegative = Field(0, description="Steps between evaluations. 0: never.")
    eval_batches: Count = Field(8, description="Batches per rank and evaluation.")
    compile: Switch = Field("auto", description="torch.compile of each block. `auto`: on GPUs.")
    fused_loss: Switch = Field(
        "auto",
        description="`auto` and `on` do the same: output head and cross-entropy in chunks of at most 1 GiB of logits "
        "(64 MiB on a CPU). `off`: all logits at once, unless parallel.tensor is above 1.",
    )
    oom_retry: bool = Field(
        False,
        description="A step that runs out of device memory is done again with half the micro-batch and twice as many.",
    )
    profile: bool = Field(False, description="Record a torch profiler trace of a few steps.")
    profile_ranks: Annotated[tuple[Annotated[int, Field(ge=0)], ...], BeforeValidator(_list_as_tuple)] = Field(
        (0,), description="The ranks that `profile` traces."
    )
    log_interval: Count = Field(1, description="Steps between log lines.")

    @property
    def compute_precision(self) -> Precision:
        """The format that is really used: `use_amp: false` wins over `precision`."""
        return self.precision if self.use_amp else "fp32"


class ParallelSection(Section):
    """How the work is spread over ranks."""

    strategy: Literal["auto", "ddp", "fsdp", "hsdp"] = Field(
        "auto",
        description="How parameters live on the ranks: `ddp` whole on each, `fsdp` in shards, `hsdp` in shards within "
        "groups of `shard` ranks. `auto`: from an estimate of the memory.",
    )
    shard: Count | None = Field(
        None, description="Ranks that hold one copy of the parameters under hsdp. null: those of one host."
    )
    tensor: Count = Field(1, description="Ranks that share each matrix.")
    pipeline: Count = Field(1, description="Ranks that share the layers.")
    context: Count = Field(1, description="Ranks that share each sequence.")
    activation_checkpointing: Literal["none", "selective", "full"] = Field(
        "none",
        description="Activations recomputed in the backward pass to save memory: all of a block (`full`), or those "
        "that are cheap for their size (`selective`).",
    )


class FsdpSection(Section):
    """Details of the fsdp and hsdp strategies."""

    use_mixed_precision: bool = Field(
        True,
        description="Gather parameters in training.precision, reduce gradients in fp32; false: gather in fp32 too.",
    )
    reshard: Switch = Field(
        "auto",
        description="Free gathered parameters after each use: less memory, more communication. "
        "`auto`: where keeping them for the step would not fit.",
    )
    cpu_offload: bool = Field(False, description="Keep parameters and optimizer state in host memory.")


class SystemSection(Section):
    """The machine."""

    device: Literal["auto", "cuda", "cpu"] = Field("auto", description="`auto`: GPUs where there are any.")
    device_id: NonNegative | None = Field(None, description="GPU of a one-GPU run, as nvidia-smi counts. null: chosen.")
    seed: int = Field(42, ge=0, lt=2**32, description="Seed of weights and sample order.")
    backend: Literal["nccl", "gloo"] | None = Field(None, description="null: nccl on GPUs, gloo on CPUs.")
    timeout_s: float = Field(1800, gt=0, description="Seconds until a collective gives up.")


class CheckpointSection(Section):
    """Saved training state."""

    dir: Name = Field(".checkpoints", description="Folder of checkpoints.")
    interval: NonNegative = Field(0, description="Steps between checkpoints. 0: none.")
    keep: Count = Field(3, description="Newest checkpoints kept.")
    keep_every: NonNegative = Field(
        0, description="Checkpoints after a multiple of this many steps are kept for good. 0: none."
    )
    keep_best: bool = Field(
        True, description="Keep the checkpoint with the lowest validation loss, of those saved where evaluated."
    )
    async_save: bool = Field(True, description="Write while training goes on.")
    on_full: Literal["continue", "stop"] = Field(
        "continue", description="What the run does when a checkpoint cannot be written, as on a full disk."
    )


class LaunchSection(Section):
    """How ranks are started and watched."""

    start: Literal["warm", "cold", "gate"] = Field(
        "warm",
        description="`warm`: import once, fork the ranks. `cold`: an interpreter each. `gate`: cold, imports in turn.",
    )
    low_memory: bool = Field(False, description="Small communication buffers and a frugal allocator.")
    memory_limit_gb: Annotated[float, Field(ge=2)] | None = Field(
        None,
        description="Host memory per rank, in GB: of a CPU rank the address space, of a GPU rank what it keeps in "
        "memory. A rank that takes more is ended by name. At least 2: torch cannot start in less. null: no limit.",
    )
    hang_kill_after_s: float = Field(
        300, ge=0, description="Seconds without progress until the job is ended. 0: never."
    )
    io_kill_after_s: float = Field(
        0,
        ge=0,
        description="Seconds in uninterruptible I/O (process state D: a slow or lost filesystem) until the job is "
        "ended. 0: never, it is only warned about.",
    )
    stop_grace_s: float = Field(
        600,
        ge=1,
        description="Seconds that ranks have to save after a request to stop, where checkpoint.interval is set: a "
        "large model takes minutes to write. A second Ctrl-C ends them at once, and so does a second SIGTERM more than "
        "1 s after the first. Without checkpoints they have 10.",
    )
    max_restarts: int = Field(0, ge=0, le=100, description="Times the job is started again after a failure.")


class DebugSection(Section):
    """What is watched closely."""

    nan: bool = Field(
        False,
        description="Stop at a step whose loss or gradients are not finite. The guard itself is always on: such a step "
        "never changes a weight, is replayed, and is explained.",
    )
    on_nan: Literal["auto", "halt", "skip", "rollback"] = Field(
        "auto",
        description="What follows a step that is not finite: stop, go on without it (at most 20 in a row), or go back "
        "to the last checkpoint and leave its data out (3 times at most without a newer one). `auto`: halt where "
        "debug.nan is true, else skip.",
    )
    dump_gb: float = Field(
        2.0, ge=0, description="Largest size of each file in the dump of a step that is not finite, in GB. 0: no dump."
    )
    verify_gradients: int = Field(
        0,
        ge=0,
        description="Every so many steps all replicas compute the gradients of one and the same micro-batch: a rank "
        "that comes to others is named (MC411). A check costs one micro-batch's forward and backward. 0: off.",
    )


class LoggingSection(Section):
    """What is written down."""

    dir: Name | None = Field(None, description="Folder that also gets the per-rank logs. null: only the temporary one.")
    tensorboard: bool = Field(True, description="Scalars for TensorBoard, in the run directory.")
    wandb: bool = Field(False, description="Weights & Biases, from rank 0 only; needs the wandb package.")
