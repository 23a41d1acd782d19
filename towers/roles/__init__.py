"""The role of each variable, and the order of the writes of shared variables.

In come the recorded forward pass and what is proven of it. Out goes a table with the role of each
variable (trained, shared, written by tower 0, by every tower, of one tower, counter of a metric),
and control dependencies which make writes wait for reads.
Read `ownership`, `written_values`, `inline_updates`, then `write_order` and `metric_counters`.
"""
