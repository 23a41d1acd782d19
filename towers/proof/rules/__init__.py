"""The rules: what each kind of operation does to the examples of a batch.

A rule is a function `(op, states, view)`:

    op      `tf.Operation` of the scratch graph
    states  the state of each of its inputs
    view    `View`, which it asks for ranks, shapes and static values, and in which it notes why a
            statistic of the shard ends a proof

It returns the state of all results, or a list with the state of each. `towers.proof.table` says
which rule an operation has. The sentence in a rule's docstring says why it is sound; [n, 4] is the
shape of a tensor with the examples along dimension 0.

A mark on a state is the name of a statistic of the shard on which the value depends, but not
linearly (`State.shard_statistics`); no loss with one is proven. Who adds marks: a rule, where it
makes a statistic (`totals.shard_statistic`) or uses a total otherwise than linearly (`not_linear`);
`sizes.as_number`, where the number of examples is used as a number; `transfer`, for each total
among the inputs that a rule does not account for, for what may overflow, and for gradients of the
program's own. Who hands them on: `transfer` gives each result the marks of all inputs; only a row
that does not `keeps_marks`, of control flow, says itself which it hands on. Nobody takes a mark
away, but `longest`, and `verdict` for batch norms.

Read `entries` (one by one: `exp`, `+`), `totals` (means and sums), `reductions`, `products`,
`shapes`; then those that put entries elsewhere: `layout`, `slices`, `joining`, `gathers`, `images`,
`rows`; then `loops`, `arrays`, and for control flow v2 `loops_v2`, `tensor_lists`.
"""
