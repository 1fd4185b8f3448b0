"""Stage data: every prepared cache is whole, and a small one can be built and read here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from model_check.data import DataSpec, PackedCache, prepare, verify
from model_check.data.packed import MANIFEST
from model_check.doctor.check import Check, failed, gib, passed
from model_check.doctor.jobs import scratch_folder
from model_check.doctor.settings import Settings
from model_check.errors import ModelCheckError


def check_data(settings: Settings) -> Iterator[Check]:
    yield check_building()
    yield check_caches(settings.places.cache, settings.limits.verify_cache_bytes)


def check_building() -> Check:
    """Tokenizer, packing, checksums: the whole way on made-up text."""
    name = "prepare"
    with scratch_folder() as folder:
        spec = DataSpec(samples=50, context_length=64, cache_dir=folder / "cache")
        try:
            prepared = prepare(spec, workers=1, verify=True)
        except ModelCheckError as error:
            return failed(name, error.message, error.remedy or "model-check prepare --preset debug shows more")
        return passed(name, f"{prepared.tokens:,} tokens of made-up text in {prepared.seconds:.1f} s")


def check_caches(folder: Path, verify_bytes: int) -> Check:
    name = "data cache"
    manifests = sorted(folder.expanduser().glob(f"*/*/{MANIFEST}"))
    if not manifests:
        return passed(name, f"nothing prepared in {folder} yet: the first run does it")
    tokens = size = 0
    verified = True
    for manifest in manifests:
        try:
            cache = PackedCache.open(manifest.parent)
            if cache.size_bytes <= verify_bytes:
                verify(cache)
            else:
                verified = False
        except (ModelCheckError, OSError) as error:
            code = f"[{error.code}] " if isinstance(error, ModelCheckError) and error.code else ""
            message = error.message if isinstance(error, ModelCheckError) else f"{manifest.parent}: {error.strerror}"
            fix = f"rm -r {manifest.parent.parent}: the next run builds it anew; if it happens twice, check the disk"
            return failed(name, f"{code}{message}", fix)
        tokens, size = tokens + cache.tokens, size + cache.size_bytes
    how = "every block read and right" if verified else "large ones opened only: model-check prepare --verify"
    count = f"{len(manifests)} split{'s' if len(manifests) != 1 else ''}"
    return passed(name, f"{count}, {tokens:,} tokens, {gib(size)} in {folder}; {how}")
