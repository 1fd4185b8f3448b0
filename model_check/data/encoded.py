"""Tokenized documents on their way into a cache."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class EncodedDocuments:
    """Whole documents, one after another, each with its end-of-text token; `lengths` counts that token too."""

    ids: np.ndarray
    lengths: np.ndarray
