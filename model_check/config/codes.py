"""The MC8xx codes: one for each way in which a configuration can be wrong."""

from __future__ import annotations

MEANINGS: dict[str, str] = {}


def _code(number: str, meaning: str) -> str:
    MEANINGS[number] = meaning
    return number


FILE_UNREADABLE = _code("MC801", "a configuration file cannot be read")
FILE_SYNTAX = _code("MC802", "a configuration file is not valid JSON or YAML, or names a key twice")
NOT_A_SECTION = _code("MC803", "a section, or a whole file, holds a plain value where keys are expected")
BAD_ASSIGNMENT = _code("MC804", "an argument of --set is not of the form section.key=value")
UNKNOWN_PRESET = _code("MC805", "there is no preset of this name")
UNKNOWN_KEY = _code("MC806", "a key does not exist; the nearest known one is named")
WRONG_TYPE = _code("MC810", "a value has the wrong type")
OUT_OF_RANGE = _code("MC811", "a number is outside its range, or a text is empty")
NOT_A_CHOICE = _code("MC812", "a value is not one of the choices")
HIDDEN_NOT_DIVISIBLE = _code("MC820", "hidden_size is not a multiple of num_heads")
HEADS_NOT_DIVISIBLE = _code("MC821", "num_heads is not a multiple of num_kv_heads")
ODD_HEAD = _code("MC822", "the head dimension is odd, and rotary positions rotate pairs")
SIZES_MISSING = _code("MC823", "there is no model_path, and the sizes do not define a model")
NOTHING_PRETRAINED = _code(
    "MC824", "init is pretrained and no model_path says which weights, or random and it names only weights"
)
PRETRAINED_RESHAPED = _code("MC825", "a size differs from that of the pretrained weights")
UNKNOWN_MODEL = _code("MC826", "model_path is neither a built-in shape, nor a folder, nor a hub id")
MODEL_FOLDER = _code("MC827", "config.json of the model folder is missing, damaged, or not of a LLaMA")
CONTEXT_TOO_LONG = _code("MC828", "the context is longer than the pretrained weights know positions")
VOCABULARY_TOO_SMALL = _code("MC829", "the tokenizer has ids beyond the model's vocabulary")
WARMUP_TOO_LONG = _code("MC830", "the warm-up is longer than the training")
NO_STABLE_PHASE = _code("MC831", "warm-up and decay of wsd together are longer than the training")
NOTHING_TO_EVALUATE = _code("MC832", "evaluation is on, but no data is held out for it")
GLOBAL_BATCH_NOT_DIVISIBLE = _code("MC833", "global_batch cannot be split over batch_size and ranks")
GLOBAL_BATCH_MISMATCH = _code("MC834", "global_batch differs from batch_size × grad_accum_nums × ranks")
NOTHING_TO_GO_BACK_TO = _code("MC835", "a run is to go back to a checkpoint, and saves none")
DEVICE_ID_WITHOUT_GPU = _code("MC840", "a GPU is named for a run on the CPU")
NCCL_WITHOUT_GPU = _code("MC841", "nccl is asked for on the CPU")
KERNEL_WITHOUT_GPU = _code("MC842", "the attention kernel exists on GPUs only")
KERNEL_NEEDS_HALF = _code("MC843", "the attention kernel cannot compute in fp32")
RANKS_NOT_DIVISIBLE = _code("MC850", "the ranks cannot be arranged in the asked-for parallel groups")
SHARD_NOT_DIVISIBLE = _code("MC851", "the data-parallel ranks cannot be arranged in groups of parallel.shard")
PIPELINE_TOO_DEEP = _code(
    "MC852", "the layers cannot be cut into that many stages, or a tied matrix would live on two of them"
)
TENSOR_NOT_DIVISIBLE = _code("MC853", "heads, MLP or vocabulary cannot be cut over that many tensor ranks")
SHARD_WITHOUT_HSDP = _code("MC854", "parallel.shard is set for a strategy that does not read it")
LAYOUT_PRECISION = _code("MC855", "the layout does not run in this number format")
LAYOUT_WITHOUT_FSDP = _code("MC856", "a key of the fsdp section asks for something the strategy cannot do")
CONTEXT_NOT_DIVISIBLE = _code("MC857", "sequences cannot be cut over that many context ranks")
STATES_NEED_WHOLE = _code("MC858", "8-bit optimizer states go with whole parameters, and the layout cuts them")
NEEDS_REPLICAS = _code(
    "MC859", "a setting needs the whole model on every rank, or a second rank, and the layout has none"
)
