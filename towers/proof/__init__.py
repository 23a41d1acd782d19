"""Where the examples of a batch are in each tensor of a forward pass, proven from its graph.

In comes a recorded forward pass and the inputs at which the batch enters; out comes an `Analysis`:
the state of each tensor, the statistics of the shard that it depends on, and, where the proof ends,
the operation and why. It makes no operation in the program's graph.

Read in this order:

1. `states`: what can be known of a tensor; `sizes`: numbers computed from shapes (it asks `View`
   for static values and shapes alone).
2. `scratch`: the forward pass once more, in a graph in which TensorFlow's own shape inference says
   where the examples are; `stand_ins` for its inputs, `functions` for the bodies that it calls.
3. `view`: what rules ask of that graph; `contexts`: its loops and branches.
4. `table`: a row for each kind of operation; `rules/`: the functions in it.
5. From the states of an operation's inputs to the states of its results: `by_table`, for most
   operations; `written_before`, for reads of variables that the forward pass has written;
   `transfer`, for any operation.
6. `fixed_point`: from the first operation to the last, in rounds, until nothing changes;
   `static_batch`: the constants that come from the size of a static batch, with `traced_numbers`;
   `loops_of_size`: loops that may run once for each example of it; `analysis`: the result.
7. `batch_norms`: the statistics that batch norms take; `written`: the values that are written to
   variables.
8. `question`: what the build does to the losses; `verdict`: the plan's line; `conditions`: those of
   a proof, in words.

Tests: `tests/proof/test_rules.py` has a line for each answer of a rule, `losses.py` whole losses
whose answer is known by hand, `random_graphs.py` makes programs at random. What has no test file of
its own (`scratch`, `functions`, `view`, `contexts`, `by_table`, `transfer`, `fixed_point`,
`written_before`, `conditions`) is tested by these, and by `test_analysis.py`.
"""
