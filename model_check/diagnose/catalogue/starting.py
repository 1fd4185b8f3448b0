"""MC1xx: faults of the start."""

from __future__ import annotations

from model_check.diagnose.catalogue.entry import Entry

STARTING: dict[str, Entry] = {
    "MC101": Entry(
        "import storm",
        "Every rank of a host imports the same heavy packages at the same moment, on fewer cores than ranks.",
        "Importing is CPU work and memory traffic. N interpreters at once take about N times as long, and their peaks "
        "of memory add up; on small hosts that ends in std::bad_alloc.",
        "The import spans of at least three ranks, more than there are cores, overlap and each takes over 8 s.",
        (
            "start with `model-check train`: ranks are forked from one process that has already imported everything",
            "import heavy packages only where they are used",
            "start fewer ranks on this host",
        ),
        "import transformers, datasets, lightning   # on 8 ranks and 4 cores: 40 s instead of 6 s",
        facts={"cores": "of the host", "longest": "the module whose import took longest"},
    ),
    "MC102": Entry(
        "rank never joined",
        "Some ranks are inside init_process_group and one rank has not called it.",
        "init_process_group returns when all ranks have called it. A rank that is busy, stuck or dead before that call "
        "keeps everybody waiting until the timeout, which names nobody.",
        "Open `init` spans on the waiting ranks; none on the guilty one, whose stack says where it stands instead.",
        (
            "move slow work (downloads, building a cache) behind init_process_group, with a barrier after it",
            "check that WORLD_SIZE equals the number of processes that were started",
        ),
        "if rank == 1: build_index()      # takes 20 minutes\ndist.init_process_group('gloo')",
    ),
    "MC103": Entry(
        "port taken",
        "The port on which the ranks meet is already in use by another process.",
        "Usually an earlier job that was not ended, or a second job on this host with the same MASTER_PORT.",
        "The exception of rank 0 says EADDRINUSE; the launcher looks up who listens on that port.",
        (
            "end the process that holds the port, if it is a leftover",
            "choose another port: MASTER_PORT=0 lets the system choose under torchrun and model-check",
        ),
        "MASTER_PORT=29500 torchrun …   # twice on one host",
        facts={
            "port": "its number",
            "holder_pid": "the process that listens on it; 0: one of another user",
            "holder_cmd": "the command of that process",
        },
    ),
    "MC104": Entry(
        "GPU missing or busy",
        "A rank asks for a device that it does not have, or that another process holds exclusively.",
        "More ranks than visible GPUs, a wrong CUDA_VISIBLE_DEVICES, two NCCL ranks on one device, or compute mode "
        "EXCLUSIVE_PROCESS.",
        "The text of the exception: invalid device ordinal, no CUDA GPUs, busy or unavailable, Duplicate GPU detected.",
        (
            "compare --nproc with the devices that `model-check gpus` lists",
            "check CUDA_VISIBLE_DEVICES and torch.cuda.set_device(LOCAL_RANK)",
        ),
        "torch.cuda.set_device(rank)   # rank 8 on a host with 8 GPUs",
    ),
    "MC105": Entry(
        "versions differ between ranks",
        "Not every rank runs the same Python, torch or library versions.",
        "One host, or one container image, was not updated. Collectives and numerics may differ in silence.",
        "Each rank records its versions at init_process_group; they are compared.",
        (
            "install the same environment everywhere",
            "start all ranks from one container image or one shared environment",
        ),
        "rank 0: torch 2.13.0    rank 1: torch 2.9.1",
        facts={
            "differs": "what is not the same everywhere: python, torch, cuda",
            "other": "of each of these, what the ranks have that differ from the rest",
        },
    ),
    "MC106": Entry(
        "config or code differs between ranks",
        "Not every rank runs the same script, arguments or configuration.",
        "Two checkouts that differ, a file edited while the job started, or a launcher that passes other arguments.",
        "Each rank records a hash of its script and its arguments at init_process_group; they are compared.",
        ("start all ranks from one checkout", "pass the same arguments to every rank"),
        "rank 0: --lr 3e-4    rank 1: --lr 3e-3",
        facts={
            "differs": "what is not the same everywhere: arguments, the hash of the script",
            "other": "of each of these, what the ranks have that differ from the rest",
        },
    ),
    "MC107": Entry(
        "directory race",
        "Several ranks make the same directory and all but the first fail.",
        "mkdir without exist_ok is not safe when several processes run it.",
        "FileExistsError from mkdir, makedirs or rename on some ranks, not on all.",
        ("os.makedirs(path, exist_ok=True)", "let rank 0 make it, then dist.barrier()"),
        "os.mkdir('checkpoints')   # on every rank",
    ),
    "MC108": Entry(
        "every rank downloads from the hub",
        "All ranks call the hub at the same time for the same files.",
        "It multiplies traffic, runs into rate limits, and races on the cache.",
        "Every rank has a span of phase `hub`.",
        (
            "let one rank of each host download first, then a barrier, then the others read the cache",
            "prepare the cache before the job and set HF_HUB_OFFLINE=1",
        ),
        "tokenizer = AutoTokenizer.from_pretrained(name)   # on 64 ranks at once",
    ),
    "MC109": Entry(
        "every rank starts the tracker",
        "All ranks start their own run of the experiment tracker.",
        "The project fills with N runs for one job, and N network calls slow the start.",
        "Every rank has a span of phase `tracker`.",
        ("if rank == 0: wandb.init(…)", "or wandb.init(mode='disabled') on the other ranks"),
        "wandb.init(project='llm')   # on every rank",
    ),
    "MC110": Entry(
        "half-written cache read by another rank",
        "A rank read a file that another rank was still writing, and found it cut off.",
        "Testing with os.path.exists says that a file was begun, not that it is whole.",
        "A reading error that means a truncated file, on some ranks and not on all.",
        (
            "write to a temporary name and rename it when it is whole: os.replace(tmp, path)",
            "put dist.barrier() between writing on rank 0 and reading on the others",
        ),
        "while not os.path.exists(path): time.sleep(0.1)\ntokens = torch.load(path)   # rank 0 still writes",
        facts={"file": "the path that was being read"},
    ),
}
