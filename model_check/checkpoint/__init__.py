"""Checkpoint: commits training state to disk and proves it is whole. May import config, record."""
