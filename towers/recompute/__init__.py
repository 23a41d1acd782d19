"""Recomputation: the backward pass computes activations again instead of keeping them.

In come the operations of one tower's forward pass and of its finished backward pass, in the order
in which they were made, and what the user wants to keep. The room changes inputs of the backward
pass, and returns how many segments and operations it recomputes. Read `segments` first (where to
cut, what to keep), then `repeatable` (what may run twice) and `rewrite` (copies of the segments,
and what they wait for).
"""
