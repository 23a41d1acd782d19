"""Where the examples of a batch are in each tensor of a forward pass, proven from its graph.

In comes a recorded forward pass and the inputs at which the batch enters; out comes an `Analysis`:
the state of each tensor, the statistics of the shard that it depends on, and, where the proof ends,
the operation and why. It makes no operation in the program's graph.

Read `states` (what can be known of a tensor), `table` (one row for each kind of operation), the
modules of its rules (`arithmetic`, `layout`, `sizes`, `rows`, `loops`), `scratch` (the graph in
which TensorFlow's own shape inference says where the examples are), `analysis` (from the first
operation to the last), `verdict` (the plan's line).
"""
