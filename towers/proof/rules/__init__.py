"""The rules: what each kind of operation does to the examples of a batch.

A rule is a function `(op, states, view)`:

    op      `tf.Operation` of the scratch graph
    states  the state of each of its inputs
    view    `View`, which it asks for ranks, shapes and static values, and in which it notes why a
            statistic of the shard ends a proof

It returns the state of all results, or a list with the state of each. `towers.proof.table` says
which rule an operation has. The sentence in a rule's docstring says why it is sound; [n, 4] is the
shape of a tensor with the examples along dimension 0.

Read `entries` (one by one: `exp`, `+`), `totals` (means and sums), `reductions`, `products`,
`shapes`; then those that put entries elsewhere: `layout`, `slices`, `joining`, `gathers`, `images`,
`rows`; then `loops`, `arrays`, and for control flow v2 `loops_v2`, `tensor_lists`.
"""
