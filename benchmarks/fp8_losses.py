"""Does fp8 learn what bf16 learns? The same model, text, order and seed in both, on one GPU.

    python benchmarks/fp8_losses.py --steps 500 --seeds 0 1

The text is the source and documentation of the installed Python packages. A BPE is trained on it first, so the tokens
are realistic. The benchmark compares the mean training loss of the last 50 steps.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import sysconfig
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch
from result_file import result_path, write_result
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from model_check.config.shapes import built_in_shape
from model_check.engine.place import Place
from model_check.engine.precision import Precision
from model_check.engine.split_adamw import SplitAdamW
from model_check.engine.step import TrainStep
from model_check.models import apply_compile, build_model
from model_check.models.fp8 import apply_fp8

DEVICE = torch.device("cuda")
SUFFIXES = {".py", ".md", ".rst", ".txt", ".pyi"}
AVERAGED = 50


def texts(folders: list[Path], most_bytes: int) -> Iterator[str]:
    """Files ordered by a hash, without duplicates, so that any prefix is a mixture of all packages."""
    files = [f for folder in folders for f in folder.rglob("*") if f.suffix in SUFFIXES and f.is_file()]
    seen: set[bytes] = set()
    taken = 0
    for file in sorted(files, key=lambda f: hashlib.sha1(str(f).encode()).digest()):
        text = file.read_text(encoding="utf-8", errors="ignore")
        digest = hashlib.sha1(text.encode()).digest()
        if len(text) < 500 or len(text) > 1_000_000 or digest in seen:
            continue
        seen.add(digest)
        taken += len(text)
        yield text
        if taken >= most_bytes:
            return


def tokenize(corpus: list[str], vocabulary: int) -> torch.Tensor:
    """Tokens of the whole corpus, document by document, from a byte-level BPE trained on it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=["<end>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(corpus, trainer)
    assert tokenizer.get_vocab_size() == vocabulary, f"the text gave {tokenizer.get_vocab_size()} entries only"
    ids = [token for found in tokenizer.encode_batch_fast(corpus) for token in (*found.ids, 0)]
    return torch.tensor(ids, dtype=torch.int64)


def rate_at(step: int, steps: int, peak: float) -> float:
    warm = min(1.0, (step + 1) / 50)
    return peak * warm * (1.0 - 0.9 * step / steps)


def losses(args: argparse.Namespace, tokens: torch.Tensor, seed: int, precision: str) -> list[float]:
    torch.manual_seed(seed)
    base = built_in_shape(args.model)
    assert base is not None, f"unknown model {args.model}"
    shape = replace(base, num_layers=args.layers, vocab_size=args.vocabulary)
    model = build_model(shape, DEVICE, torch.bfloat16)
    if precision == "fp8":
        apply_fp8(model)
    apply_compile(model)
    optimizer = SplitAdamW(model.parameters(), lr=args.rate, state_dtype=torch.float32)
    step = TrainStep(model, optimizer, Precision.choose("bf16", DEVICE), Place(device=DEVICE), max_grad_norm=1.0)
    order = torch.randperm((len(tokens) - 1) // args.context, generator=torch.Generator().manual_seed(seed))
    found = []
    for number in range(args.steps):
        rows = order[(number * args.batch + torch.arange(args.batch)) % len(order)] * args.context
        window = torch.stack([tokens[row : row + args.context + 1] for row in rows]).to(DEVICE)
        batch = SimpleNamespace(
            tokens=window[:, :-1].contiguous(), targets=window[:, 1:].contiguous(), document_ids=None, positions=None
        )
        found.append(step([batch], rate_at(number, args.steps, args.rate))[0])
    return torch.stack(found).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--rate", type=float, default=3e-4)
    parser.add_argument("--vocabulary", type=int, default=65536)
    parser.add_argument("--text", type=Path, nargs="+", default=[Path(sysconfig.get_path("purelib"))])
    parser.add_argument("--megabytes", type=int, default=60)
    parser.add_argument("--output", type=Path, default=None)
    args = parser.parse_args()
    corpus = list(texts(args.text, args.megabytes * 1_000_000))
    tokens = tokenize(corpus, args.vocabulary)
    print(f"{len(corpus):,} documents, {len(tokens):,} tokens of {args.vocabulary:,}", flush=True)
    rows = []
    for seed in args.seeds:
        curves = {precision: losses(args, tokens, seed, precision) for precision in ("bf16", "fp8")}
        ends = {precision: statistics.fmean(curve[-AVERAGED:]) for precision, curve in curves.items()}
        difference = ends["fp8"] / ends["bf16"] - 1
        rows.append({"seed": seed, "last": ends, "difference": difference, "curves": curves})
        print(f"seed {seed}: bf16 {ends['bf16']:.4f}, fp8 {ends['fp8']:.4f}, {difference:+.3%}", flush=True)
    record = {
        "text": {"documents": len(corpus), "tokens": len(tokens), "vocabulary": args.vocabulary},
        "rows": rows,
    }
    write_result(args.output or result_path("fp8-losses"), record, ("torch", "tokenizers"))


if __name__ == "__main__":
    main()
