"""The role of each variable, and the order of the writes of shared variables.

In come the recorded forward pass and what is proven of it. Out goes a table with the role of each
variable (trained, shared, written by tower 0, by every tower, of one tower, counter of a metric),
and control dependencies which make writes wait for reads.
Read `variable_roles`, the table; `ownership`, which makes it, with `written_values`, `own_state`
and `inline_updates`; `step_updates`; then, for the order of writes, `reads_before_writes`,
`write_order`, `turns`, `write_in_turn`, `metric_counters`, and `update_order`.
"""
