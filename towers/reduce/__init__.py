"""From the gradients of all towers to one update of the variables.

In come the towers, each with the gradients of its shard or micro-batches; out go one gradient a
variable (`Combined`) and the operation that applies them. Read `combination`, with
`joined_products` for wide layers, then `replicas` (variables that every tower has), `loss_scale`,
`schedules` and `micro_batches` (the order within a tower), and `update`, which applies what the
others give.
"""
