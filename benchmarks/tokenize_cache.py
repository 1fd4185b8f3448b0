"""Tokens per second from raw text to packed samples: our `prepare` beside `datasets.map` + group-texts.

    python benchmarks/tokenize_cache.py [--megabytes 20] [--rounds 3]

Both get the same text, the same 32k byte-level BPE and the same cores. The text is what every installation has: the
docstrings of the installed packages (prose) and their source (code). The peer is the usual recipe: `map` with a fast
tokenizer, then `map` with group-texts, at each number of processes; it starts from a dataset that is already in Arrow,
while ours also reads the JSONL, checksums, syncs and commits. Rounds are interleaved and the best of each is compared,
per second and per CPU second: on a machine that others use too, only the second is about the code.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import resource
import sysconfig
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path

import datasets
import tokenizers
from result_file import result_path, write_result
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from model_check.data import DataSpec, prepare
from model_check.data.tokenizer import END_OF_TEXT

CONTEXT = 1024
OURS = "model-check prepare"


def source_files() -> Iterator[str]:
    for path in sorted(Path(sysconfig.get_paths()["purelib"]).rglob("*.py")):
        try:
            yield path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue  # a few test fixtures are deliberately broken


def docstrings() -> Iterator[str]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    for source in source_files():
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            text = ast.get_docstring(node) if isinstance(node, kinds) else None
            if text and len(text) > 200:
                yield text


def take(texts: Iterator[str], chars: float) -> list[str]:
    taken: list[str] = []
    for text in texts:
        taken.append(text)
        chars -= len(text)
        if chars <= 0:
            break
    return taken


def train_tokenizer(texts: list[str]) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=32_000,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def ours(text_file: Path, tokenizer_file: Path, scratch: Path) -> int:
    """Tokens packed; every call starts without a cache."""
    with tempfile.TemporaryDirectory(dir=scratch) as cache:
        spec = DataSpec(
            dataset=str(text_file),
            tokenizer=str(tokenizer_file),
            context_length=CONTEXT,
            cache_dir=cache,
            validation_fraction=0.0,
        )
        return prepare(spec).tokens


def peer(dataset: datasets.Dataset, tokenizer_file: Path, processes: int) -> int:
    """Tokens packed by the usual recipe."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(tokenizer_file), eos_token=END_OF_TEXT)

    def tokenize(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        return {"input_ids": tokenizer(batch["text"], return_attention_mask=False)["input_ids"]}

    def group_texts(batch: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        joined = list(chain.from_iterable(batch["input_ids"]))
        whole = len(joined) // CONTEXT * CONTEXT
        return {"input_ids": [joined[i : i + CONTEXT] for i in range(0, whole, CONTEXT)]}

    num_proc = processes if processes > 1 else None
    tokens = dataset.map(tokenize, batched=True, num_proc=num_proc, remove_columns=["text"])
    packed = tokens.map(group_texts, batched=True, num_proc=num_proc)
    return packed.num_rows * CONTEXT


@dataclass(frozen=True)
class Measured:
    """One run. CPU seconds count every process, so they mean the same on a busy machine."""

    tokens: int
    seconds: float
    cpu_seconds: float

    @property
    def per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def per_cpu_second(self) -> float:
        return self.tokens / self.cpu_seconds


def measure(work: Callable[[], int]) -> Measured:
    started, cpu_started = time.perf_counter(), _cpu_seconds()
    tokens = work()
    return Measured(tokens, time.perf_counter() - started, _cpu_seconds() - cpu_started)


def _cpu_seconds() -> float:
    usages = (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def compare(name: str, texts: list[str], rounds: int, scratch: Path) -> dict[str, object]:
    tokenizer_file = scratch / f"{name}.tokenizer.json"
    train_tokenizer(texts[::5]).save(str(tokenizer_file))
    text_file = scratch / f"{name}.jsonl"
    text_file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    dataset = datasets.load_dataset("json", data_files=str(text_file), split="train", cache_dir=str(scratch / "arrow"))
    cores = len(os.sched_getaffinity(0))
    contestants: dict[str, Callable[[], int]] = {
        f"datasets.map, {processes} process{'es' * (processes > 1)}": (
            lambda processes=processes: peer(dataset, tokenizer_file, processes)
        )
        for processes in sorted({1, cores, 2 * cores})
    }
    contestants[OURS] = lambda: ours(text_file, tokenizer_file, scratch)
    runs: dict[str, list[Measured]] = {contestant: [] for contestant in contestants}
    for _ in range(rounds):
        for contestant, work in contestants.items():
            run = measure(work)
            runs[contestant].append(run)
            print(
                f"  {name:12} {contestant:26} {run.per_second / 1e6:5.2f} M tokens/s"
                f" {run.per_cpu_second / 1e6:5.2f} M per CPU second",
                flush=True,
            )
    return {
        "characters": sum(map(len, texts)),
        "documents": len(texts),
        "runs": {contestant: [asdict(run) for run in its_runs] for contestant, its_runs in runs.items()},
        "ratio_per_second": ratio(runs, lambda run: run.per_second),
        "ratio_per_cpu_second": ratio(runs, lambda run: run.per_cpu_second),
    }


def ratio(runs: dict[str, list[Measured]], rate: Callable[[Measured], float]) -> float:
    """Our best run over the best run of the peer at any number of processes."""
    best = {contestant: max(map(rate, its_runs)) for contestant, its_runs in runs.items()}
    mine = best.pop(OURS)
    return round(mine / max(best.values()), 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    warnings.simplefilter("ignore", SyntaxWarning)
    datasets.disable_progress_bars()
    datasets.disable_caching()
    corpora = {
        "docstrings": take(docstrings(), options.megabytes * 1e6),
        "code": take(source_files(), options.megabytes * 1e6),
    }
    with tempfile.TemporaryDirectory() as scratch:
        results = {name: compare(name, texts, options.rounds, Path(scratch)) for name, texts in corpora.items()}
    packages = ("datasets", "tokenizers", "transformers", "numpy")
    write_result(result_path("tokenize-cache"), {"context_length": CONTEXT, "results": results}, packages)
    for name, result in results.items():
        print(
            f"{name}: {result['ratio_per_second']} × the best of datasets.map per second, "
            f"{result['ratio_per_cpu_second']} × per CPU second"
        )


if __name__ == "__main__":
    main()
