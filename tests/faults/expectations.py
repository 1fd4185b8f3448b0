"""What the black box must say about every fault script, and what it must not say about the healthy ones.

The line is not in the table: the script marks it with `# FAULT` (`# FAULT-ALSO` where a second line is as good).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

HERE = Path(__file__).resolve().parent
SCRIPTS = HERE / "scripts"
CONTROLS = HERE / "controls"

HANG_S = 10.0  # the promise: from the fault to the finding
CRASH_S = 2.0
SLOW_S = 25.0  # a rate needs a history before it can be called one
TREND_S = 45.0  # and a trend a longer one

Form = Literal["run", "python", "torchrun"]  # run SCRIPT · run -- python SCRIPT · run -- torchrun … SCRIPT
Stdin = Literal["null", "open", "closed"]
Needs = Literal["", "gpu", "cgroup"]


@dataclass(frozen=True)
class Fault:
    """One planted fault. `ranks` None: which rank it hits is decided by a race."""

    name: str
    codes: frozenset[str]
    ranks: tuple[int, ...] | None
    within_s: float
    nproc: int = 2
    script: str = ""
    severity: Literal["error", "warning", "info", ""] = ""
    exit_code: int | None = None  # None: any but 0 for an error, 143 where we had to end a job that only hung
    cause: str = ""  # of the finding
    tensor: str = ""  # part of the finding's
    facts: dict[str, object] = field(default_factory=dict)  # of the finding, among others
    says: tuple[str, ...] = ()  # must appear in title, evidence or fix; {port} and {holder} are filled in
    every_line: bool = False  # all marked lines must be named, not only one of them
    arguments: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()  # of `model-check run` itself
    form: Form = "run"
    stdin: Stdin = "null"
    needs: Needs = ""
    cores: int | None = None  # no more than these, however many the machine has
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        return SCRIPTS / f"{self.script or self.name}.py"

    def lines(self) -> set[int]:
        """The lines that may be named; none: the fault has no line of its own."""
        text = self.path.read_text().splitlines()
        return {number for number, line in enumerate(text, start=1) if re.search(r"# FAULT(-ALSO)?\b", line)}


@dataclass(frozen=True)
class Control:
    """A healthy script: same result and exit code as under torchrun, and no finding shown at any time."""

    name: str
    nproc: int = 2
    exit_code: int = 0
    form: Form = "run"
    stdin: Stdin = "null"
    script: str = ""
    seconds: float = 60.0
    waits: str = ""  # what the live line must say while the ranks wait
    may_tell: frozenset[str] = frozenset()  # warnings that are correct while shown
    never_says: str = ""
    error_codes: frozenset[str] = frozenset()  # errors that are true of it

    @property
    def path(self) -> Path:
        return CONTROLS / f"{self.script or self.name}.py"


def hang(name: str, codes: str, ranks: tuple[int, ...] | None, **more: object) -> Fault:
    return Fault(name, frozenset(codes.split()), ranks, HANG_S, **more)  # type: ignore[arg-type]


def crash(name: str, codes: str, ranks: tuple[int, ...] | None, **more: object) -> Fault:
    return Fault(name, frozenset(codes.split()), ranks, CRASH_S, severity="error", **more)  # type: ignore[arg-type]


def slow(name: str, codes: str, ranks: tuple[int, ...] | None, **more: object) -> Fault:
    return Fault(name, frozenset(codes.split()), ranks, SLOW_S, severity="warning", **more)  # type: ignore[arg-type]


def leak(name: str, ranks: tuple[int, ...], facts: dict[str, object]) -> Fault:
    return Fault(name, frozenset({"MC705"}), ranks, TREND_S, severity="warning", facts=facts)


def raised(exception: str, message: str = "") -> dict[str, object]:
    """The facts of a finding about this exception."""
    return {"exception": exception} | ({"message": message} if message else {})


_LABEL_17 = raised("ValueError", "label 17 out of range at step 12")
_NO_MODULE = raised("ModuleNotFoundError", "No module named 'fast_tokenizer_kernels'")
_KILLED = {"signal": "SIGKILL", "last_recorded": True}

MISMATCHES = (
    hang("order_mismatch", "MC201", (1,), severity="error", facts={"op": "broadcast", "peers_op": "all_reduce"}),
    hang(
        "order_mismatch_first_step",
        "MC201",
        (2,),
        nproc=3,
        severity="error",
        facts={"op": "all_gather", "peers_op": "all_reduce"},
    ),
    hang(
        "order_mismatch_subgroup",
        "MC201",
        (3,),
        nproc=4,
        severity="error",
        facts={"op": "broadcast", "peers_op": "all_reduce"},
    ),
    hang("swapped_pair", "MC208", (1,), facts={"op": "all_reduce", "peers_op": "all_reduce"}),
    hang("swapped_pair_sets", "MC208", (2,), nproc=3, facts={"op": "all_reduce", "peers_op": "all_reduce"}),
    hang("fsdp_branches_swapped", "MC208", (1,), facts={"op": "all_gather"}),
    hang("fsdp_layers_swapped", "MC208", (0,), nproc=4, facts={"unit": "layers.2", "peers_unit": "layers.1"}),
    hang("dtype_mismatch", "MC203", (1,), severity="error", facts={"dtype": "int32", "peers_dtype": "float32"}),
    hang(
        "dtype_mismatch_half",
        "MC203",
        (2,),
        nproc=3,
        severity="error",
        facts={"dtype": "float16", "peers_dtype": "bfloat16"},
    ),
    hang("shape_mismatch", "MC202", (1,), severity="error", facts={"shape": [11], "peers_shape": [16]}),
    hang(
        "shape_mismatch_reduce",
        "MC202",
        (0,),
        nproc=3,
        severity="error",
        facts={"shape": [128, 16], "peers_shape": [100, 16]},
    ),
    # A rank that leaves out a collective and one that adds one leave the same traces when its peers' next call differs
    # in kind: the history of its own steps tells which it was.
    hang("skip_step", "MC206", (1,), severity="error"),
    hang("skip_reduce", "MC206", (2,), nproc=3, severity="error", facts={"op": "barrier", "peers_op": "all_reduce"}),
    hang("skip_async_reduce", "MC206", (0,), severity="error", facts={"op": "broadcast", "peers_op": "all_reduce"}),
    hang("extra_collective", "MC207", (0,), severity="error", facts={"op": "all_gather"}),
    hang(
        "extra_reduce_in_eval",
        "MC207",
        (1,),
        nproc=3,
        severity="error",
        facts={"op": "all_reduce", "peers_op": "barrier"},
    ),
    hang("barrier_rank0", "MC206 MC207", (0,), severity="error", facts={"op": "barrier"}),
    hang("barrier_rank0_at_end", "MC206 MC207", (0,), severity="error", facts={"op": "barrier"}),
    hang("fsdp_save_rank0", "MC206 MC207", (0,), severity="error", facts={"op": "all_gather"}),
    hang("accumulate_mismatch", "MC206", (1,), severity="error", facts={"op": "barrier", "peers_op": "all_reduce"}),
    hang("ddp_unused_branch", "MC301 MC206", (1,), severity="error"),
    hang(
        "root_mismatch", "MC221", (2,), nproc=4, severity="error", facts={"op": "broadcast", "root": 1, "peers_root": 0}
    ),
    hang(
        "barrier_rank0_after_loader",
        "MC206 MC207",
        (0,),
        severity="error",
        facts={"op": "barrier", "peers_op": "all_reduce"},
    ),
    hang(
        "validate_rank0_ddp",
        "MC206 MC207",
        (0,),
        severity="error",
        facts={"op": "all_reduce", "peers_op": "barrier", "condition": "if rank == 0"},
    ),
    hang(
        "barrier_some_ranks",
        "MC206",
        (0, 1),
        nproc=3,
        severity="error",
        facts={"op": "barrier", "peers_op": "all_reduce", "condition": "if rank in (0, 1)"},
    ),
    hang(
        "zero_consolidate_rank0",
        "MC206 MC207",
        (0,),
        severity="error",
        facts={"op": "broadcast", "peers_op": "all_reduce"},
    ),
    hang("reduction_mismatch", "MC223", (1,), severity="error", facts={"reduction": "max", "peers_reduction": "sum"}),
    # All ranks of a circle wait; to blame is who came there by a call that it never made at that place before.
    hang(
        "p2p_cycle",
        "MC218",
        (0,),
        severity="error",
        cause="left_its_order",
        facts={"waits_in": {"0": "recv from rank 1", "1": "recv from rank 0"}},
    ),
    hang("group_cycle", "MC218", (1, 2), nproc=3, severity="error", cause="left_its_order"),
    hang("message_left_out", "MC218", (2,), nproc=3, severity="error", cause="left_its_order"),
    hang("ring_wrong_neighbour", "MC218", (2,), nproc=4, severity="error", cause="wrong_peer"),
    hang(
        "receive_once_too_often",
        "MC218",
        (0,),
        nproc=3,
        severity="error",
        cause="left_its_order",
        facts={"waits_in": {"0": "recv", "1": "barrier", "2": "barrier"}},
    ),
    hang(
        "receive_alone",
        "MC218",
        (1,),
        nproc=3,
        cause="left_its_order",
        facts={"waits_in": {"0": "all_reduce", "1": "recv from rank 2", "2": "all_reduce"}},
    ),
    # A DDP wait inside backward has no record of its own, so the circle is observed, not proven.
    hang(
        "receive_beside_ddp",
        "MC218",
        (1,),
        nproc=3,
        severity="warning",
        cause="left_its_order",
        facts={"waits_in": {"0": "all_reduce", "1": "recv from rank 0", "2": "all_reduce"}},
    ),
    hang("barrier_part_of_group", "MC218", (0, 1), nproc=4, severity="warning", cause="left_its_order"),
    hang(
        "groups_other_order",
        "MC201",
        (2,),
        nproc=3,
        cause="groups",
        facts={"groups": {"0": "ranks 0,1", "1": "ranks 0,1", "2": "ranks 1,2"}},
    ),
    # The minority is the suspect even if its peers' call is inside a condition that only excludes it.
    hang(
        "skip_by_condition",
        "MC206",
        (2,),
        nproc=3,
        severity="error",
        facts={"op": "barrier", "peers_op": "all_reduce", "condition": "if rank != 2"},
    ),
    hang(
        "skip_one_broadcast",
        "MC206",
        (1,),
        nproc=3,
        severity="error",
        facts={"op": "all_reduce", "peers_op": "broadcast"},
    ),
    hang(
        "skip_by_early_return",
        "MC206",
        (0,),
        nproc=3,
        severity="error",
        facts={"condition": "if rank == 0: return None"},
    ),
)

STUCK = (
    hang("loader_stuck", "MC204", (1,), severity="warning", cause="rank"),
    hang("loader_worker_stuck", "MC204", (0,), severity="warning", cause="worker"),
    hang("loader_iterable_stuck", "MC204", (1,), severity="warning"),
    hang(
        "uneven_data", "MC205", (1,), severity="error", cause="data", facts={"op": "barrier", "peers_op": "all_reduce"}
    ),
    hang("uneven_data_return", "MC205", (2,), nproc=3, severity="error", cause="data"),
    hang(
        "uneven_epoch_eval",
        "MC205",
        (1,),
        severity="error",
        cause="data",
        facts={"op": "all_gather", "peers_op": "all_reduce"},
    ),
    hang("eval_batches_differ", "MC205", (1,), severity="error", cause="data"),
    hang("uneven_batches", "MC205", (0,), severity="error", cause="steps", facts={"steps": 22}),
    hang("uneven_steps", "MC205", (2,), nproc=3, severity="error", cause="steps", facts={"steps": 18}),
    hang("uneven_steps_in_function", "MC205", (2,), nproc=3, severity="error", cause="steps", facts={"steps": 28}),
    hang("stopped", "MC209", (1,), severity="warning"),
    hang("gil_held", "MC210", (1,), severity="warning"),
    hang("gil_held_regex", "MC210", (0,), severity="warning"),
    hang("lock_deadlock", "MC211", (1,), severity="warning", every_line=True, cause="locks"),
    hang("lock_taken_twice", "MC211", (0,), severity="warning", cause="lock"),
    hang(
        "helper_thread_dies",
        "MC222",
        (1,),
        severity="warning",
        every_line=True,
        facts={"thread": "prefetch", "exception": "KeyError"},
    ),
    hang("busy_loop", "MC212", (1,), severity="warning"),
    hang("livelock_polling", "MC212", (0,), severity="warning"),
    hang("never_joins", "MC102", (2,), nproc=3, severity="warning"),
    hang("write_stuck", "MC213", (0,), severity="warning"),
    hang("write_stuck_pipe", "MC213", (1,), severity="warning"),
    hang("read_stuck_pipe", "MC219", (1,), severity="warning", cause="reading", facts={"file": "a pipe"}),
    hang("read_stuck_fifo", "MC219", (0,), severity="warning", cause="opening"),
    hang("load_stuck_fifo", "MC219", (1,), severity="warning", cause="opening"),
    hang("file_lock_held", "MC219", (0,), severity="warning", cause="file_lock"),
    hang(
        "tracker_stuck", "MC214", (0,), severity="warning", environment={"WANDB_BASE_URL": "http://127.0.0.1:{silent}"}
    ),
    hang(
        "hub_stuck",
        "MC214",
        (1,),
        severity="warning",
        environment={"HF_ENDPOINT": "http://127.0.0.1:{silent}", "HF_HUB_ETAG_TIMEOUT": "900"},
    ),
    hang("stdin_wait", "MC215", (0,), severity="warning", stdin="open", cause="input"),
    hang("breakpoint_left", "MC215", (1,), severity="warning", stdin="open", cause="debugger"),
    hang("stuck_subprocess", "MC219", (1,), severity="warning", cause="own_code", facts={"children": ["sleep"]}),
    hang("group_timeout", "MC219", (1,), severity="error", exit_code=1, says=("gave up", "4000ms")),
    hang("stuck_sleep_in_forward", "MC219", (3,), nproc=4, severity="warning", cause="own_code"),
)

CRASHES = (
    crash("loader_worker_killed", "MC216", (1,), exit_code=1, says=("SIGKILL",)),
    hang("loader_worker_exits", "MC216", (0,), severity="error", exit_code=1),
    # A swallowed exception is no crash: its harm, a drift into a hang, may show a few steps later.
    hang(
        "swallowed_exception", "MC302", (1,), severity="error", facts=raised("IndexError", "index out of range in self")
    ),
    hang("swallowed_oom", "MC302", (0,), severity="error", facts=raised("OutOfMemoryError")),
    hang(
        "swallowed_in_loader",
        "MC302",
        (1,),
        severity="error",
        nproc=3,
        facts=raised("ValueError", "record 96 has a bad checksum"),
    ),
    hang("swallowed_quietly", "MC302", (1,), severity="error", facts={"handler": "except KeyError:"}),
    hang("swallowed_in_caller", "MC302", (1,), severity="error", facts={"handler": "except Exception:"}),
    hang(
        "swallowed_by_suppress",
        "MC302",
        (2,),
        nproc=3,
        severity="error",
        facts={"handler": "with contextlib.suppress(KeyError):"},
    ),
    hang("swallowed_by_manager", "MC302", (1,), severity="error", facts={"handler": "with Tolerant():"}),
    hang("swallowed_by_finally", "MC302", (0,), severity="error", facts=raised("RuntimeError")),
    hang("swallowed_by_retry", "MC302", (1,), severity="error", facts={"handler": "except (ValueError, OSError):"}),
    hang("swallowed_epoch", "MC302", (0,), severity="error", facts={"handler": "except TypeError:"}),
    crash("exception_ddp", "MC301", (1,), exit_code=1, facts=_LABEL_17),
    crash("exception_four_ranks", "MC301", (2,), nproc=4, exit_code=1, facts=raised("KeyError")),
    crash(
        "exception_in_worker",
        "MC301",
        (0,),
        exit_code=1,
        facts={**raised("JSONDecodeError"), "raised_in": "DataLoader worker process 0"},
        says=(":31",),
    ),
    crash("syntax_error", "MC301", (1,), exit_code=1, facts=raised("SyntaxError"), says=("losses.py:2",)),
    crash("exception_in_backward", "MC301", (0,), exit_code=1, facts=raised("RuntimeError", "no backward for 16 bits")),
    crash("killed_from_outside", "MC303", (1,), exit_code=137, facts=_KILLED),
    crash("killed_by_cgroup", "MC305", (1,), exit_code=137, needs="cgroup", arguments=("--cgroup", "{cgroup}")),
    crash("segfault", "MC306", (1,), exit_code=139, facts={"signal": "SIGSEGV"}),
    crash("aborted", "MC306", (0,), exit_code=134, facts={"signal": "SIGABRT"}),
    crash("memory_error", "MC307", (1,), exit_code=1, facts=raised("MemoryError")),
    crash("bad_alloc", "MC307", (1,), exit_code=1, says=("RSS",)),
    crash("early_exit", "MC308", (1,), facts={"via": "sys.exit"}),
    crash("early_exit_hard", "MC308", (2,), nproc=3, facts={"via": "os._exit"}),
    crash("exit_code", "MC313", (1,), exit_code=7, facts={"exit_code": 7, "via": "sys.exit"}),
    # From inside it looks like a return: its code is known when its process has ended.
    hang("system_exit_raised", "MC313", (1,), severity="error", exit_code=1, facts={"message": "no shard for step 12"}),
    crash("store_host_gone", "MC309", (0,), facts={"via": "os._exit"}),
    crash("checkpoint_cut_off", "MC601", (0,), exit_code=1, says=("last.pt", "os.replace")),
    crash(
        "weights_cut_off", "MC601", (0, 1), exit_code=1, says=("model.safetensors",), facts=raised("SafetensorError")
    ),
    crash("pickle_cut_off", "MC601", (0,), exit_code=1, says=("os.replace",), facts=raised("UnpicklingError")),
    crash("import_error", "MC310", (1,), exit_code=1, facts=_NO_MODULE),
    crash("cuda_device_assert", "MC902", (1,), needs="gpu", facts={"token": 100, "rows": 100}),
    crash("cuda_index_assert", "MC311", (1,), needs="gpu"),
    crash("cuda_out_of_memory", "MC501", (1,), needs="gpu"),
)

STARTS = (
    crash("port_taken", "MC103", (0,), says=("{port}", "{holder}"), arguments=("--port", "{port}")),
    crash("no_gpu", "MC104", (1,), exit_code=1),
    slow("import_storm", "MC101", None, nproc=4, cores=2),
    crash("directory_race", "MC107", None, exit_code=1, says=("checkpoints",), facts=raised("FileExistsError")),
    slow(
        "every_rank_downloads",
        "MC108",
        (0, 1, 2, 3),
        nproc=4,
        environment={"HF_ENDPOINT": "http://127.0.0.1:{hub}"},
    ),
    slow("every_rank_tracker", "MC109", (0, 1)),
    crash("half_written_cache", "MC110", None, exit_code=1, says=("tokens.pt",)),
    slow("versions_differ", "MC105", (1,), facts={"other": {"torch": {"1": "2.9.1"}}}),
    slow("arguments_differ", "MC106", (1,), form="python", facts={"differs": ["arguments"]}),
    slow("code_differs", "MC106", (1,), nproc=3, form="python", facts={"differs": ["hash of train.py"]}),
)

SLOWNESS = (
    slow("straggler", "MC701", (1,), cause="every_step"),
    slow("straggler_in_bursts", "MC701", (1,), cause="now_and_then"),
    slow("loader_in_bursts", "MC701", (2,), nproc=3, cause="now_and_then"),
    slow("data_bound", "MC702", (0, 1)),
    slow("oversubscribed", "MC704", None, nproc=4, environment={"OMP_NUM_THREADS": "16"}),
    leak(
        "leak",
        (0,),
        {
            "name": "history",
            "container": "list",
            "item": "tuple of (Tensor float32[] on cpu with its graph, Tensor float32[2048, 64] on cpu)",
        },
    ),
    leak(
        "leak_of_objects",
        (1,),
        {"name": "seen", "container": "dict", "item": "dict of (sample: str, loss: list of (float))"},
    ),
    leak(
        "leak_in_attribute",
        (1,),
        {"name": "outputs", "container": "deque", "item": "Tensor float32[512, 64] on cpu"},
    ),
)

FRAMEWORKS = (
    hang("lightning_rank0_log", "MC206 MC207", (0,), severity="error"),
    crash("trainer_collator_fails", "MC301", (1,), exit_code=1, facts=raised("KeyError", "'labels'")),
    hang("accelerate_gather_main", "MC206 MC207", (0,), severity="error", says=("all_gather",)),
    slow("lightning_nan_sample", "MC404", (1,), facts={"samples": [5]}, says=("dataset index",)),
    slow("trainer_nan_in_loss", "MC401", (1,), cause="loss_code", facts={"op": "add"}),
    slow("trainer_log_of_zero", "MC401", (1,), cause="loss_code", facts={"problem": "logarithm"}),
)

OTHER_LAUNCHERS = (
    crash("exception_under_torchrun", "MC301", (1,), script="exception_ddp", form="torchrun", facts=_LABEL_17),
    hang("loader_stuck_under_torchrun", "MC204", (1,), script="loader_stuck", form="torchrun", severity="warning"),
    hang("barrier_under_torchrun", "MC206 MC207", (0,), script="barrier_rank0", form="torchrun", severity="error"),
    crash("killed_under_torchrun", "MC303", (1,), script="killed_from_outside", form="torchrun", facts=_KILLED),
)

NUMERICS = (
    slow("nan_sample", "MC404", (1,), facts={"samples": [5]}),
    slow("nan_in_dataset", "MC404", (0,), facts={"samples": [7], "dataset_indices": [237]}),
    slow("sqrt_at_zero", "MC402", (0,), cause="model", facts={"op": "sqrt"}),
    slow("root_in_loss", "MC402", (1,), cause="loss_code", facts={"op": "sqrt"}),
    crash("half_overflow", "MC403", (0,), exit_code=1, flags=("--guard", "halt"), facts={"module": "wide"}),
    slow("rate_spike", "MC405", (0, 1), facts={"rates": [0.001, 100.0]}),
    slow("exploding", "MC406", (0, 1)),
    slow("empty_mask", "MC408", (1,), cause="loss_code", facts={"problem": "empty_sum"}),
    slow("nan_to_the_end", "MC408", (1,), cause="loss_code", facts={"problem": "empty_sum"}),
    slow("weights_too_large", "MC407", (0, 1), cause="model"),
    slow("log_of_zero", "MC401", (1,), cause="model", facts={"op": "log", "module": "Policy"}),
    # Models that cannot be run again, or come out finite the second time: their graph shows the operation.
    slow("nan_counting_module", "MC401", (0,), facts={"op": "div", "module": "Net", "finite_again": True}),
    slow("nan_in_encoder", "MC408", (1,), facts={"module": "Encoder"}),
    slow("nan_under_fsdp", "MC401", (1,), facts={"op": "div", "module": "Net", "problem": "zero_divisor"}),
    # One number of one gradient far from the loss, of more than twenty buckets or sharded modules.
    slow("nan_late_bucket", "MC402", (1,), tensor="layers.2"),
    slow("nan_late_unit", "MC402", (1,), tensor="layers.2"),
    slow("norm_in_place", "MC401", (1,), facts={"changes_its_input": True}),
    slow("replica_drift", "MC410", (2,), nproc=3, tensor="head.bias", facts={"majority": True, "last_alike": 20}),
    slow("replicas_never_alike", "MC410", (0, 1), cause="from_the_start", tensor="0.weight"),
    slow("replica_skips_average", "MC410", (2,), nproc=3, cause="changed", facts={"last_alike": 10}),
    slow("same_data", "MC412", (0, 1)),
    # The script itself sees the number and stops: that is what followed from it.
    crash(
        "nan_loss_raises",
        "MC408",
        (1,),
        exit_code=1,
        facts={"ended_by": {"ranks": [1], "exception": "ValueError", "message": "loss is nan"}},
    ),
    crash("nan_loss_exits", "MC401", (1,), exit_code=3, facts={"op": "log"}, says=("then exited with code 3",)),
    crash(
        "clip_raises",
        "MC402",
        (1,),
        exit_code=1,
        facts={"op": "sqrt"},
        says=("ranks 0 and 1 then raised RuntimeError",),
    ),
    crash("loss_too_large", "MC301", (1,), exit_code=1, facts=raised("ValueError")),
    crash("token_without_row", "MC902", (1,), exit_code=1, tensor="tokens", facts={"token": 117, "rows": 100}),
)

# Nothing is broken yet: the run ends as it would have without us.
TRENDS = (
    slow("loss_spike", "MC413", (0,), nproc=1, exit_code=0, cause="spike", says=("at step 140",)),
    slow(
        "rate_too_small",
        "MC414",
        (0, 1),
        exit_code=0,
        cause="rate_too_small",
        facts={"rates": [3e-9], "choices": 64},
    ),
    slow(
        "dead_layer",
        "MC415",
        (0,),
        nproc=1,
        exit_code=0,
        cause="stopped",
        tensor="body.weight",
        facts={"without_gradient": ["body.weight", "body.bias", "head.weight"]},
    ),
    slow("penalty_sign", "MC416", (0, 1), exit_code=0, cause="gradients", tensor="2."),
)

FAULTS: tuple[Fault, ...] = (
    *MISMATCHES,
    *STUCK,
    *CRASHES,
    *STARTS,
    *SLOWNESS,
    *NUMERICS,
    *TRENDS,
    *FRAMEWORKS,
    *OTHER_LAUNCHERS,
)

HEALTHY: tuple[Control, ...] = (
    Control("long_first_step"),
    Control("slow_save_rank0", waits="saving"),
    Control("long_validation_rank0", seconds=90, waits="rank 0 evaluates; 1 rank waits for it"),
    Control("rank0_works_on"),
    # A long sleep while others wait looks like an endless one, which must be reported within these seconds.
    Control("pipeline_stages", nproc=4, may_tell=frozenset({"MC101", "MC219"})),
    Control("stdin_closed", stdin="closed"),
    Control("threads"),
    Control("forks"),
    Control("spawn_workers"),
    Control("subprocesses"),
    Control("hf_trainer", seconds=90),
    Control("lightning_fit", seconds=90),
    Control("fsdp2"),
    Control("not_distributed"),
    Control("hard_exit"),
    Control("own_spawn", form="python"),
    Control("fsdp2_under_torchrun", script="fsdp2", form="torchrun"),
    Control("legal_asymmetry"),
    Control("join_uneven"),
    Control("async_ops"),
    Control("all_exit_three", exit_code=3, error_codes=frozenset({"MC313"})),
    Control("retries"),
    Control("signal_handlers"),
    Control("scaler_skips"),
    Control("noisy_loss"),
    Control("cache_fills", seconds=90, never_says="MC705"),
    Control(
        "cache_fills_slowly",
        nproc=1,
        seconds=120,
        waits="rank 0 grows no longer; the warning MC705 is withdrawn",
        may_tell=frozenset({"MC705"}),
    ),
    Control("elastic_restart", form="python"),
    Control("compiles", seconds=120, waits="rank 0 compiles; 1 rank waits for it"),
    Control("scores_text", seconds=90),
    Control("draws_weights", seconds=90),
    Control("builds_index", seconds=90),
    Control("waits_for_loaders", seconds=90),
    Control("experts_by_hand"),
)

# Which part of the tests runs a case (test.sh): what is named in neither runs with --all.
QUICK = frozenset(
    (
        *("port_taken", "order_mismatch", "loader_stuck", "exception_ddp", "early_exit", "nan_sample"),
        *("checkpoint_cut_off", "data_bound", "token_without_row"),
        *("legal_asymmetry", "retries", "scaler_skips"),
    )
)
# Variants: another case with the same code runs with --all.
LONG = frozenset(
    (
        *("order_mismatch_first_step", "order_mismatch_subgroup", "swapped_pair_sets", "fsdp_layers_swapped"),
        *("dtype_mismatch_half", "shape_mismatch_reduce", "skip_async_reduce", "skip_one_broadcast"),
        *("skip_by_early_return", "extra_reduce_in_eval", "barrier_rank0_at_end", "barrier_rank0_after_loader"),
        *("zero_consolidate_rank0", "message_left_out", "receive_once_too_often"),
        *("loader_iterable_stuck", "uneven_data_return", "uneven_steps", "eval_batches_differ", "gil_held_regex"),
        *("lock_taken_twice", "write_stuck_pipe", "read_stuck_fifo", "hub_stuck"),
        *("breakpoint_left", "loader_worker_exits"),
        *("swallowed_oom", "swallowed_in_loader", "swallowed_in_caller", "swallowed_by_suppress"),
        *("swallowed_by_retry", "swallowed_epoch", "exception_four_ranks", "exception_in_backward"),
        *("aborted", "memory_error", "early_exit_hard"),
        *("leak_of_objects", "leak_in_attribute"),
        *("root_in_loss", "nan_to_the_end", "norm_in_place", "replica_skips_average"),
        *("loss_too_large", "trainer_log_of_zero", "loader_stuck_under_torchrun", "killed_under_torchrun"),
        *("cache_fills_slowly", "fsdp2_under_torchrun"),
    )
)


def markers_of(case: Fault | Control) -> tuple[str, ...]:
    """The pytest markers that put a case into its part."""
    part = () if case.name in QUICK else ("long",) if case.name in LONG else ("slow",)
    return (*part, "gpu") if isinstance(case, Fault) and case.needs == "gpu" else part
