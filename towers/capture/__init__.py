"""The model, recorded once on shard 0.

In comes a model function, or tensors of a finished model, and shard 0. Out goes `Recorded`: the
operations of the forward pass, its outputs, the variables it made, and its cuts into stages.
Read `record`; for a finished model `finished_model`, `model_inputs`, `model_graph`,
`finished_updates` and `finished_checks`; for stages `stage_cuts`, `stage_costs` and `stage_lines`.
"""
