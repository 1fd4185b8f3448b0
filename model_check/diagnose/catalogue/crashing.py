"""MC3xx and MC5xx: faults that end a rank."""

from __future__ import annotations

from model_check.diagnose.catalogue.entry import MEMORY_FACTS, Entry

CRASHING: dict[str, Entry] = {
    "MC301": Entry(
        "exception",
        "A rank raised an exception that nothing caught.",
        "The first failure that is not about a lost peer is the cause; everything after it follows from it.",
        "The rank records type, text and frames when the exception reaches the top; order is by the host's clock.",
        ("look at the named line; the text of the exception is the original one",),
        "ValueError: expected a batch of 8, got 7   # rank 2, train.py:88",
        causes={"held_in_finally": "on its way out the rank waits for its peers in a `finally` block"},
    ),
    "MC302": Entry(
        "swallowed exception, the rank drifted off",
        "A rank caught an exception inside a step and went on, and is now out of step with its peers.",
        "After `except: continue` this rank makes one collective less than the others.",
        "An exception left a forward, backward, collective or loader call, or its handler printed something, the "
        "script went on, and then ranks part. An exception that left no trace is inferred where a rank is short of a "
        "call that stands in a `try` whose handler goes on with the loop.",
        (
            "do not catch exceptions around a part of the step that contains collectives on one rank only",
            "agree on skipping: all_reduce a flag before the backward, then all ranks skip or none",
        ),
        "try: train_step(batch)\nexcept RuntimeError: continue",
        causes={
            "swallowed": "the script caught the exception and went on",
            "in_handler": "the rank is still in the handler, and calls something there",
            "unseen": "no record of the exception: the handler is the only way past the missing call",
        },
        facts={"handler": "the source line of the handler, where the exception itself was not seen"},
    ),
    "MC303": Entry(
        "killed by a signal of an unknown sender",
        "A rank was ended by a signal that the launcher did not send; who did is not on record.",
        "A person, a batch system at its time limit, a container that was stopped, the script itself (os.kill).",
        "The exit status carries the signal; we sent none, and no memory kill is on record in the cgroup or the "
        "kernel log, as far as they can be read. The line is the last recorded one, not where the signal came from.",
        (
            "ask the batch system (sacct, kubectl describe pod) why it ended the job",
            "look at who else may kill on this host",
        ),
        "kill -9 4711",
        causes={"interrupt": "a KeyboardInterrupt that nobody caught"},
    ),
    "MC304": Entry(
        "killed by the OOM killer",
        "The kernel killed a rank because the host ran out of memory.",
        "All processes of the host together want more memory than there is.",
        "The kernel log names the process among its out-of-memory kills.",
        ("fewer loader workers, fewer ranks, memory-mapped data", "load weights on one rank at a time, or with mmap"),
        "Out of memory: Killed process 4711 (python)",
        ours=("start fewer ranks, or share what they import: launch.start=warm",),
    ),
    "MC305": Entry(
        "killed by a memory limit",
        "A rank was killed because its container, its job or the rank itself reached its memory limit.",
        "The limit of the container, pod or Slurm job, or launch.memory_limit_gb, is lower than what the ranks need.",
        "The oom_kill counter of the rank's cgroup rose, the kernel log says Memory cgroup out of memory, or the "
        "launcher saw the rank hold more than launch.memory_limit_gb.",
        (
            "raise the limit (docker --memory, resources.limits.memory, --mem, --memory-limit-gb)",
            "fewer loader workers or ranks",
        ),
        "memory.max 32 GiB, 4 ranks × 9 GiB",
        causes={"cgroup": "the limit of its cgroup", "own_limit": "the limit that was given to Model Check"},
        ours=(
            "raise the limit (docker --memory, resources.limits.memory, --mem, launch.memory_limit_gb)",
            "start fewer ranks, or share what they import: launch.start=warm",
        ),
    ),
    "MC306": Entry(
        "segmentation fault or abort",
        "A rank crashed in native code.",
        "A bug in an extension, memory corruption, an abort of a library.",
        "The exit status carries SIGSEGV, SIGABRT, SIGBUS, SIGFPE or SIGILL; the handler wrote the Python line.",
        (
            "look at the named line: which extension does it call?",
            "run that line alone; update or pin the extension",
        ),
        'Fatal Python error: Segmentation fault   # File "train.py", line 41 in augment',
        causes={"after_the_script": "the script had ended; the interpreter crashed on its way out"},
    ),
    "MC307": Entry(
        "host out of memory",
        "An allocation in host memory failed in the rank itself.",
        "A limit (ulimit -v, RLIMIT_AS) or the host's memory is exhausted; often something grows step by step.",
        "MemoryError, std::bad_alloc or the CPU allocator's error; the history of the resident memory is shown.",
        (
            "look for lists that keep tensors with their graphs: append loss.item(), not loss",
            "raise the limit, or load less at once",
        ),
        "history.append(loss)   # keeps every graph",
        causes={"aborted": "no MemoryError: native code could not allocate, and ended the process"},
        facts=MEMORY_FACTS,
    ),
    "MC308": Entry(
        "early exit with code 0",
        "A rank left through exit() or os._exit() with code 0 while the others still need it.",
        "A stopping condition that only one rank met. Launchers take code 0 for success and say nothing.",
        "The rank exited 0 without having started the collectives that its peers wait in.",
        ("decide together: broadcast or all_reduce the stop flag, then all leave",),
        "if loss < target: sys.exit(0)   # true on rank 1 only",
    ),
    "MC309": Entry(
        "store host gone",
        "Rank 0, which hosts the store of the process group, ended while others still needed the store.",
        "With env:// and no agent, the TCPStore lives in rank 0.",
        "Rank 0 is gone and the errors of its peers are about the store.",
        (
            "end with dist.barrier() and dist.destroy_process_group() on all ranks",
            "start the job with torchrun or model-check run: the store then outlives rank 0",
        ),
        "if rank == 0: os._exit(0)",
    ),
    "MC310": Entry(
        "import error",
        "A rank cannot import a module.",
        "A package is missing in the environment of that host, or a name does not exist in the installed version.",
        "ImportError or ModuleNotFoundError on the rank.",
        ("install the package in the environment of every host", "compare what is installed: pip list on both"),
        "ModuleNotFoundError: No module named 'flash_attn'   # rank 9 only",
    ),
    "MC311": Entry(
        "device-side assert",
        "An assertion failed in a CUDA kernel, usually an index out of range.",
        "Token ids beyond the embedding, or labels beyond the classes. The error shows at a later line than its cause.",
        "The text of the exception.",
        (
            "run once with CUDA_LAUNCH_BLOCKING=1: the line is then exact",
            "check ids: assert input_ids.max() < vocab_size",
        ),
        "CUDA error: device-side assert triggered",
    ),
    "MC312": Entry(
        "device failed",
        "The GPU reported a hardware error or is gone.",
        "Uncorrectable ECC errors, an Xid, a device that fell off the bus, NVLink errors.",
        "The text of the exception.",
        (
            "nvidia-smi -q; dmesg | grep -i xid",
            "drain the host, reset or replace the GPU, resume elsewhere from the last checkpoint",
        ),
        "CUDA error: uncorrectable ECC error encountered",
    ),
    "MC313": Entry(
        "exit with a code of its own",
        "A rank ended with a non-zero exit code and raised nothing.",
        "sys.exit(n) or os._exit(n) in the script or in a library.",
        "The exit status, and no exception on record.",
        ("look at the named line: why does it exit?", "raise an exception instead: it says why"),
        "sys.exit(7)",
    ),
}
