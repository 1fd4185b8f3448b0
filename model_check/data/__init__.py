"""Data: sources, tokenizers, packed cache, resumable loader. May import config, observe."""
