"""The role of each variable, and the order of the writes of shared variables.

In come the recorded forward pass and what is proven of it. Out goes a table with the role of each
variable: trained; written by tower 0 for all towers; written by every tower in turn; one for each
tower; or counter of a metric. And control dependencies which make writes wait for reads.

Read `variable_roles`, the table; `writes`, the operations that write; `ownership`, which makes the
table, with `inner_training`, `written_values`, `own_state`, `used_writes` and `inline_updates`;
`step_updates`; then, for the order of writes, `reads_before_writes`, `write_order`, `turns`,
`write_in_turn`, `metric_counters`, and `update_order`.

"The update" is the optimizer's. *Update ops* are the model's (`UPDATE_OPS`, `ModelOutput.updates`,
`Tower.updates`). In a list `towers`, there is a `Tower` for each micro-batch of each tower.
"""
