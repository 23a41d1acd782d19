"""Towers 1, 2, … as imports of tower 0.

In come tower 0, with its forward and backward pass, and a substitute for each of its inputs from
outside. Out goes a `TowerSet`: a tower for each part of the batch.
Read `tower_set`, `substitution`, `template`, `copy`, `closure_tensors`, then
`references_in_loops`.
"""
