"""Blackbox: what a rank leaves behind while it works: ring, events, memory marks, spans. May import record.

`install` is called by the injected bootstrap at interpreter start, and by our own trainer in each rank. It imports no
torch: what belongs to torch is attached when torch is imported. Nothing here may change what a script computes.
"""
