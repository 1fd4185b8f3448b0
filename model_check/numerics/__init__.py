"""Numerics: is a step finite, and if not, where it began. May import record, blackbox.

finite     the check of every step: each rank's own gradients, before they are exchanged
origins    watches one replayed step, operation by operation, and names where the first bad number was made
ranges     how large the numbers of a tensor are, and those that passed through each module
causes     why: the code that the evidence deserves
banner     the block of text that a rank prints
dump       the tensors of a failed step, on disk
"""
