"""MC6xx: saved state that cannot be written, trusted or used."""

from __future__ import annotations

from model_check.diagnose.catalogue.entry import Entry

CHECKPOINTS: dict[str, Entry] = {
    "MC601": Entry(
        "corrupt checkpoint",
        "A file of a checkpoint is not what was saved: its size or a checksum differs.",
        "A flipped bit on the disk or on the way to it, a copy that was cut short, a file edited by hand.",
        "Every tensor has a checksum in the manifest, and so has the manifest; all bytes are read before training.",
        (
            "load an older checkpoint, or copy this one again from where it is whole",
            "write to a temporary name and rename it when it is whole: os.replace(tmp, path)",
            "look at the disk's own error counters",
        ),
        "rank_00001.bin is not what was saved: model.layers.3.attention.wq.weight has another checksum",
        facts={"file": "the path that was being read"},
        ours=(
            "--resume auto goes on from the newest checkpoint that verifies",
            "model-check checkpoint verify .checkpoints reads all of them",
            "copy the folder again from where it is whole; look at the disk's own error counters",
        ),
    ),
    "MC602": Entry(
        "missing shard",
        "A file that the manifest lists is not in the folder of the checkpoint.",
        "A copy that left files out, a clean-up that removed some, hosts that do not share checkpoint.dir.",
        "The manifest lists every file with its size.",
        (
            "copy the whole folder, with manifest.json and every rank_*.bin",
            "with several hosts, write checkpoints to a file system that all of them see",
        ),
        "step_00000999/rank_00003.bin is missing",
        ours=(
            "copy the whole folder, with manifest.json and every rank_*.bin",
            "with several hosts, put checkpoint.dir on a file system that all of them see",
        ),
    ),
    "MC603": Entry(
        "partial checkpoint",
        "A save was begun and never finished: there is no manifest.",
        "The job was killed while it wrote. A checkpoint gets its name only after every rank has written.",
        "Folders that begin with .staging, and step folders without a manifest.json.",
        ("nothing: --resume auto passes it over, and the next run removes it", "name an older checkpoint"),
        ".staging-step_00001999@host.4711-98765 was never finished",
    ),
    "MC604": Entry(
        "disk full",
        "A checkpoint, or another file, could not be written because there is no room for it. Of our own trainer's "
        "checkpoints the ones before it are intact.",
        "The disk or the quota is used up, often by older checkpoints, or a limit on file sizes is reached.",
        "Needed and free bytes are compared before a save, and a write that finds no room is reported. torch.save says "
        "only that it is at an unexpected position.",
        (
            "free space (df -h, quota -s and ulimit -f show what is left), or write to another disk",
            "keep fewer checkpoints, or save them less often",
        ),
        "the checkpoint of step 1999 needs 96,361,299,968 bytes, 12,884,901,888 are free",
        ours=(
            "free space (df -h, quota -s and ulimit -f show what is left), or write to another disk: checkpoint.dir",
            "lower checkpoint.keep, raise checkpoint.keep_every",
            "checkpoint.on_full says whether the run goes on (continue) or ends (stop)",
        ),
    ),
    "MC605": Entry(
        "wrapper's prefix in the names",
        "The names of a weights file begin with module. or hold _orig_mod.; they were taken off.",
        "The state dict was taken from the model inside DDP or torch.compile.",
        "The names of the tensors in the file.",
        ("nothing: the file is loaded as it is", "save model.module.state_dict() next time"),
        "module.layers.0.attention.wq.weight",
    ),
    "MC606": Entry(
        "another number of ranks",
        "A checkpoint is continued on another number of ranks than it was saved on.",
        "The job got other machines.",
        "The manifest records the number of ranks.",
        (
            "nothing: weights, optimizer and data order go on exactly; random generators are seeded anew",
            "keep the global batch, so that every step has the same samples",
        ),
        "saved on 4 ranks, continued on 2",
        ours=(
            "nothing: weights, optimizer and data order go on exactly; random generators are seeded anew",
            "set training.global_batch to keep the same samples in every step",
        ),
    ),
    "MC607": Entry(
        "checkpoint of another model",
        "Tensors of the checkpoint and of the model differ in name or shape.",
        "model.* or the tokenizer changed since it was saved, or it belongs to another experiment.",
        "Names and shapes are compared before any value is read.",
        (
            "give model.* the values it was saved with: they are in config.json of its run",
            "name another checkpoint, or start without --resume",
        ),
        "model.tok_embed.weight is [4096, 64] there and [4096, 128] here",
    ),
    "MC608": Entry(
        "checkpoint not written",
        "A save failed for another reason than a full disk. The ones before it are intact.",
        "An I/O error, a folder without permission, a file server that went away, a rank that died during the save.",
        "Every rank reports how its write ended before anything is committed.",
        (
            "look at the disk and its mount",
            "write to a folder that you may write to",
        ),
        "the checkpoint of step 1999 could not be written: Input/output error",
        ours=(
            "look at the disk and its mount",
            "set checkpoint.dir to a folder you may write to",
            "checkpoint.on_full says whether the run goes on (continue) or ends (stop)",
        ),
    ),
    "MC609": Entry(
        "data of another run",
        "A checkpoint is continued on other data, or the same in another order: its place in the data means nothing.",
        "data.*, the tokenizer, training.context_length or system.seed changed since it was saved.",
        "Checkpoints record the seed, the context length and a fingerprint of the tokens.",
        (
            "nothing, if it was meant: weights and optimizer go on, the data starts at its first sample",
            "to go on in the same data, give these keys the values they had: they are in config.json of its run",
        ),
        "training.context_length was 8192 and is 16384",
    ),
    "MC610": Entry(
        "several trainings to continue",
        "--resume auto found several trainings of this model on this data: none has these settings, or several have "
        "them and none of these continues all the others.",
        "checkpoint.dir holds several runs, and the run directory is new, so it does not say which one is meant.",
        "Checkpoints record the shapes and fingerprints of the tokens and the settings. A branch also records the "
        "lineage it began from, and takes its place once it has gone further.",
        (
            "add one of the --resume PATH that the message lists",
            "give each experiment a --run-dir of its own: then auto knows which is meant",
            "leave out --resume to start afresh",
        ),
        "--resume .checkpoints/a/step_00000999 or --resume .checkpoints/b/step_00000499",
        ours=(
            "add one of the --resume PATH that the message lists",
            "give each experiment a --run-dir or a checkpoint.dir of its own: then auto knows which is meant",
            "leave out --resume to start afresh",
        ),
    ),
}
