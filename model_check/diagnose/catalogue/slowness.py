"""MC7xx: jobs that run, but slower than they should."""

from __future__ import annotations

from model_check.diagnose.catalogue.entry import Entry

SLOWNESS: dict[str, Entry] = {
    "MC701": Entry(
        "straggler",
        "One rank needs longer for its own work than its peers, and all of them wait for it in every step.",
        "A slower device, longer samples, another process on its cores, work that only this rank does.",
        "Own time per step (the step without waiting for others) is 1.5 times that of the peers over at least 5 steps. "
        "A wait for loader workers counts only where they compute more than the peers' workers: of equal loaders, one "
        "always comes last. Or it stops now and then: at least 4 times at one place in 100 steps, 50 ms or longer "
        "each, while its peers do not, for 15 % of the job's time in all. Saving and evaluating do not count.",
        (
            "look at the named phase and line",
            "compare clocks and temperature of the devices: nvidia-smi -q -d PERFORMANCE",
            "balance the samples by length",
        ),
        "rank 3: 92 ms of own work a step, the others 41 ms",
        causes={
            "every_step": "its own work takes longer in every step",
            "now_and_then": "it stops in some steps, each time at the same place",
        },
        facts={
            "own_s": "seconds of own work a step",
            "peers_s": "the same of its peers",
            "stop_s": "how much longer than usual a step takes in which it stops",
            "stops": "in how many of its newest steps it stopped",
            "steps": "how many of its newest steps were looked at",
        },
    ),
    "MC702": Entry(
        "data-bound",
        "The loader takes more than half of every step.",
        "Decoding, tokenizing or reading is slower than training, and too few workers hide it.",
        "The time in the loader's next, as a share of the step, on all ranks.",
        (
            "more num_workers, prefetch_factor=4, persistent_workers=True",
            "prepare the data once, ahead of training",
            "move slow work out of __getitem__",
        ),
        "data 180 ms, forward and backward 20 ms",
        ours=("raise training.num_workers", "prepare the data once, ahead of training: model-check prepare"),
        facts={"share": "of a step that the loader takes, from 0 to 1"},
    ),
    "MC704": Entry(
        "CPU oversubscription",
        "The ranks of a host run far more compute threads than it has cores.",
        "Every rank assumes that the host is its own and starts a thread per core.",
        "Threads of all ranks against cores, while the cores are saturated.",
        ("OMP_NUM_THREADS = cores / ranks", "torch.set_num_threads(…) to the same"),
        "8 ranks × 64 threads on 64 cores",
        facts={"threads": "that compute, of all ranks", "cores": "of the host"},
    ),
    "MC705": Entry(
        "host memory leak",
        "The resident memory of a rank climbs steadily while it trains.",
        "A list that keeps tensors with their graphs, a cache without a bound, copy-on-write pages of loader workers.",
        "The resident memory, pages of mapped files not counted, rises in nearly every sample for 20 seconds and 10 "
        "steps at least, and at the end about as fast as before. A cache that is still filling looks the same: when "
        "growth ends, the warning is withdrawn. While its memory grows, the rank counts its containers twice, seconds "
        "apart: the one that grew is named, with its newest item and the line that fills it. Where none grew, the line "
        "is that of the step's forward.",
        (
            "append loss.item(), not loss",
            "look for caches and lists that grow with every step",
            "keep datasets in arrays or memory maps, not in Python objects",
        ),
        "losses.append(loss)   # 40 MB a step",
        facts={
            "gib_per_hour": "how fast the memory grows",
            "container": "the type of the container that grew",
            "name": "of the variable or attribute that holds it; empty: unknown",
            "item": "its newest item",
        },
    ),
}
