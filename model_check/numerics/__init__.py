"""Numerics: is a step finite, and if not, where it began. May import record, blackbox.

A foreign script, in the order in which a step crosses the files:

bootstrap        registers `step_watchers` with the black box, which tells it of every step
step_watchers    passes the step on to the guard, the replicas, the trends
script_guard     checks loss and gradients, and decides that a step is bad
exchanges        this rank's own gradients, before those of its peers arrive; on a GPU some of them in turns
probes           what an optimizer is about to apply, and how large
backward_passes  which of several backward passes of a step was the bad one
hits             what was seen, and what a second run showed
reports          the event about it, and the refusal of the step

What they use, our own trainer's guard too (`engine/guard.py`):

replaying        what a forward was given, and how it is run once more
origins          watches a replayed step, operation by operation, and names where the first bad number was made
graph_search     the same from the numbers in the graph, for what cannot be run again
loss_code        what the script computes outside its model, and the line of it
causes           why: the code that the evidence deserves
finite           is a tensor finite; the sums that are noted of each rank's own gradients
banner, dump     the block of text that a rank prints; the tensors of a failed step, on disk

replicas, trends and token_ids only write down what `diagnose` compares later.
"""
