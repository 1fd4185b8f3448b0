"""Blackbox: what a rank leaves behind while it works: ring, events, memory marks, spans. May import record.

`install` is called by the injected bootstrap at interpreter start, and by our own trainer in each rank. It imports no
torch: the patches of torch are applied when the script imports it. Nothing here may change what a script computes.
"""
