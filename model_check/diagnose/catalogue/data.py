"""MC9xx: data that is not what it should be."""

from __future__ import annotations

from model_check.diagnose.catalogue.entry import Entry

DATA: dict[str, Entry] = {
    "MC901": Entry(
        "corrupt data cache",
        "A block of the tokenized data differs from what was written.",
        "A damaged disk, an interrupted copy, a cache edited by hand.",
        "Each block has a checksum that is compared when it is first read; prepare --verify reads all.",
        ("run the command again: a damaged cache is rebuilt", "check the disk it lies on"),
        "model-check prepare --verify",
    ),
    "MC902": Entry(
        "token id outside the vocabulary",
        "The data holds a token that the model has no row for.",
        "The data was tokenized with another tokenizer than the model's, or model.vocab_size is too small.",
        "The largest token id of the cache is compared with the model before the first step.",
        ("use the tokenizer that belongs to the model", "give the embedding a row for every token id"),
        "the data holds token id 128001 and the model has a vocabulary of 32000",
        ours=("use the tokenizer that belongs to the model", "raise model.vocab_size"),
        facts={"token": "the largest id", "rows": "how many the embedding has", "module": "the name of the embedding"},
    ),
    "MC903": Entry(
        "two ranks read the same samples",
        "Ranks were given the same part of a global batch, so some samples count twice and others never.",
        "Rank numbers or world size that differ from what the loader was told.",
        "The sample ids of the ranks are compared for one global batch.",
        ("give every loader its own rank and the same world size and seed",),
        "ranks 0 and 1 were given the same sample 17 of one global batch",
    ),
    "MC904": Entry(
        "empty source",
        "The data holds no text, or too little to fill one global batch.",
        "An empty file, a wrong text_field, more ranks or a longer context than the data can feed.",
        "Documents and samples are counted while the cache is built and when the loader opens it.",
        ("look at the file: does it hold text?", "use more data, shorter samples or a smaller batch"),
        "notes.jsonl holds no document with a field text",
        ours=(
            "check data.text_field and the file",
            "use more data, a shorter training.context_length or a smaller training.batch_size",
        ),
    ),
    "MC905": Entry(
        "hub unavailable",
        "The hub cannot be reached, or does not let us in.",
        "No network, a proxy, a gated repository, a token that is missing or expired.",
        "The endpoint is probed for a second before a library would start its retries.",
        ("use a local path", "set HF_TOKEN for gated repositories", "set HF_ENDPOINT for a mirror"),
        "data.dataset=wikitext on a machine without a network",
    ),
    "MC906": Entry(
        "source not found or not readable",
        "The data that was named is not there, or is not what its name says.",
        "A wrong path, a missing permission, a file that is not JSON lines or parquet.",
        "The source is opened before any rank starts.",
        ("check the path of the data and its permissions",),
        "data.dataset=corpus.jsonl, line 17 is not JSON",
        ours=("check data.dataset and its permissions",),
    ),
    "MC907": Entry(
        "tokenizer cannot be used",
        "The tokenizer that was named cannot be loaded.",
        "A wrong path, a file that is no tokenizer.json, a hub id that does not exist.",
        "The tokenizer is loaded before any rank starts.",
        ("check the path of the tokenizer",),
        "data.tokenizer=nowhere/tokenizer.json",
        ours=("check data.tokenizer", "use builtin or bytes to train without one"),
    ),
}
