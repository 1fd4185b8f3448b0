"""The MC8xx codes: one for each way in which a configuration can be wrong."""

from __future__ import annotations

FILE_UNREADABLE = "MC801"
FILE_SYNTAX = "MC802"
NOT_A_SECTION = "MC803"
BAD_ASSIGNMENT = "MC804"
UNKNOWN_PRESET = "MC805"
UNKNOWN_KEY = "MC806"
WRONG_TYPE = "MC810"
OUT_OF_RANGE = "MC811"
NOT_A_CHOICE = "MC812"
HIDDEN_NOT_DIVISIBLE = "MC820"
HEADS_NOT_DIVISIBLE = "MC821"
ODD_HEAD = "MC822"
SIZES_MISSING = "MC823"
NOTHING_PRETRAINED = "MC824"
PRETRAINED_RESHAPED = "MC825"
UNKNOWN_MODEL = "MC826"
MODEL_FOLDER = "MC827"
CONTEXT_TOO_LONG = "MC828"
VOCABULARY_TOO_SMALL = "MC829"
WARMUP_TOO_LONG = "MC830"
NO_STABLE_PHASE = "MC831"
NOTHING_TO_EVALUATE = "MC832"
GLOBAL_BATCH_NOT_DIVISIBLE = "MC833"
GLOBAL_BATCH_MISMATCH = "MC834"
NOTHING_TO_GO_BACK_TO = "MC835"
DEVICE_ID_WITHOUT_GPU = "MC840"
NCCL_WITHOUT_GPU = "MC841"
KERNEL_WITHOUT_GPU = "MC842"
KERNEL_NEEDS_HALF = "MC843"
RANKS_NOT_DIVISIBLE = "MC850"
SHARD_NOT_DIVISIBLE = "MC851"
PIPELINE_TOO_DEEP = "MC852"
TENSOR_NOT_DIVISIBLE = "MC853"
SHARD_WITHOUT_HSDP = "MC854"
LAYOUT_PRECISION = "MC855"
LAYOUT_WITHOUT_FSDP = "MC856"
CONTEXT_NOT_DIVISIBLE = "MC857"
STATES_NEED_WHOLE = "MC858"
NEEDS_REPLICAS = "MC859"

MEANINGS: dict[str, str] = {
    FILE_UNREADABLE: "a configuration file cannot be read",
    FILE_SYNTAX: "a configuration file is not valid JSON or YAML, or names a key twice",
    NOT_A_SECTION: "a section, or a whole file, holds a plain value where keys are expected",
    BAD_ASSIGNMENT: "an argument of --set is not of the form section.key=value",
    UNKNOWN_PRESET: "there is no preset of this name",
    UNKNOWN_KEY: "a key does not exist; the nearest known one is named",
    WRONG_TYPE: "a value has the wrong type",
    OUT_OF_RANGE: "a number is outside its range, or a text is empty",
    NOT_A_CHOICE: "a value is not one of the choices",
    HIDDEN_NOT_DIVISIBLE: "hidden_size is not a multiple of num_heads",
    HEADS_NOT_DIVISIBLE: "num_heads is not a multiple of num_kv_heads",
    ODD_HEAD: "the head dimension is odd, and rotary positions rotate pairs",
    SIZES_MISSING: "there is no model_path, and the sizes do not define a model",
    NOTHING_PRETRAINED: "init is pretrained and no model_path says which weights, or random and it names only weights",
    PRETRAINED_RESHAPED: "a size differs from that of the pretrained weights",
    UNKNOWN_MODEL: "model_path is neither a built-in shape, nor a folder, nor a hub id",
    MODEL_FOLDER: "config.json of the model folder is missing, damaged, or not of a LLaMA",
    CONTEXT_TOO_LONG: "the context is longer than the pretrained weights know positions",
    VOCABULARY_TOO_SMALL: "the tokenizer has ids beyond the model's vocabulary",
    WARMUP_TOO_LONG: "the warm-up is longer than the training",
    NO_STABLE_PHASE: "warm-up and decay of wsd together are longer than the training",
    NOTHING_TO_EVALUATE: "evaluation is on, but no data is held out for it",
    GLOBAL_BATCH_NOT_DIVISIBLE: "global_batch cannot be split over batch_size and ranks",
    GLOBAL_BATCH_MISMATCH: "global_batch differs from batch_size × grad_accum_nums × ranks",
    NOTHING_TO_GO_BACK_TO: "a run is to go back to a checkpoint, and saves none",
    DEVICE_ID_WITHOUT_GPU: "a GPU is named for a run on the CPU",
    NCCL_WITHOUT_GPU: "nccl is asked for on the CPU",
    KERNEL_WITHOUT_GPU: "the attention kernel exists on GPUs only",
    KERNEL_NEEDS_HALF: "the attention kernel cannot compute in fp32",
    RANKS_NOT_DIVISIBLE: "the ranks cannot be arranged in the asked-for parallel groups",
    SHARD_NOT_DIVISIBLE: "the data-parallel ranks cannot be arranged in groups of parallel.shard",
    PIPELINE_TOO_DEEP: "the layers cannot be cut into that many stages, or a tied matrix would live on two of them",
    TENSOR_NOT_DIVISIBLE: "heads, MLP or vocabulary cannot be cut over that many tensor ranks",
    SHARD_WITHOUT_HSDP: "parallel.shard is set for a strategy that does not read it",
    LAYOUT_PRECISION: "the layout does not run in this number format",
    LAYOUT_WITHOUT_FSDP: "a key of the fsdp section asks for something the strategy cannot do",
    CONTEXT_NOT_DIVISIBLE: "sequences cannot be cut over that many context ranks",
    STATES_NEED_WHOLE: "8-bit optimizer states go with whole parameters, and the layout cuts them",
    NEEDS_REPLICAS: "a setting needs the whole model on every rank, or a second rank, and the layout has none",
}
