"""The memory of a step: predicted, measured, fitted to a limit, and explained when it runs out.

In come finished towers, a batch size, and a limit in bytes; out come accounts and texts, and the
towers' graph is left as it is. Read `node`, `step_graph` and `tower_step` (a step as plain data, at
any batch size), `kernels` (how kernels use memory), `buffers` and `simulation` (the executor),
`account_table` and `account` (what the memory is for); then `limits`, `measure`, `fit`, `report`
and `out_of_memory`.
"""
