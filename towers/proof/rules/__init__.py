"""The rules: what each kind of operation does to the examples of a batch.

A rule is a function `(op, states, view)`:

    op      `tf.Operation` of the scratch graph
    states  the state of each of its inputs
    view    `View`, which it asks for ranks, shapes and static values, and in which it notes why a
            statistic of the shard ends a proof

It returns the state of all results, or a list with the state of each. `towers.proof.table` says
which rule an operation has, and what reaches the rule: unless the row has the flag `takes_unknown`,
`takes_positions` or `takes_sizes`, no input is UNKNOWN, none tells positions of examples, and sizes
have become numbers (a rule with `takes_unknown` makes numbers of them itself). The sentence in a
rule's docstring says why it is sound. Where a rule is not certain it returns `unknown(op, why)`.
Where something that it needs is not known, such as a shape or the value of an argument,
`common.required`, `static_rank` and their like raise `NotKnown`; `by_table` makes `unknown` of
that, too. Of what is computed from one example, in a loop over them, `by_table` makes a value of
that example in the place of `unknown`.

A decorator makes a whole rule of one that is written for some inputs alone: `for_examples`, of
inputs that tell of examples; `moves_entries` and `computes_entries`, of values of the batch.

What the docstrings say of a tensor, and what its state is then:

    x [n, 4]        one row for each of n examples: `per_example(0)`
    x [3, n]        the examples along dimension 1: `per_example(1)`
    x [3 n, 4]      3 neighbouring rows of each example: `per_example(0, inner=3)`; or all examples
                    three times, one round after the other: `per_example(0, outer=3)`
    x [rows, 4]     any number of rows of each example: `rows(0, selection)`, where `selection`
                    names what chose them
    w [4]           the same on every tower: `INDEPENDENT`
    (n, 4)          sizes, the numbers in a shape: `sizes_state([Size(0, 1), Size(4)])`

Words that all modules use of states:

    by example      the entries are of single examples: PER_EXAMPLE, ROWS, ONE_EXAMPLE
    of the batch    the same of all examples of the shard, along one dimension: PER_EXAMPLE, ROWS
    total           a mean or a sum over the examples
    layout          where the examples are: `State.layout`
    constant        the same for each example, as ones [n] are: `State.is_constant`. A rule that
                    does not follow this says that its result is not constant; that is always sound
    as numbers      sizes, where an operation computes with them as with any numbers: 4 is the same
                    on every tower then, n a sum over the examples (`sizes.as_numbers`)
    argument        an input that says what to do, such as an axis or a shape

A mark on a state is the name of a statistic of the shard on which the value depends, but not
linearly (`State.shard_statistics`); no loss with one is proven. Who adds marks:

- a rule, where it makes a statistic (`totals.shard_statistic`) or uses a total otherwise than
  linearly (`totals.not_linear`);
- `sizes.as_number`, where the number of examples is used as a number;
- `by_table`, for each total among the inputs that a rule does not account for;
- `transfer`, for what may overflow, and for gradients of the program's own.

Who hands them on: `by_table` gives each result the marks of all inputs; only the rule of a row
without `keeps_marks`, of control flow, says itself which it hands on. All other rules may add the
marks of their inputs (`with_marks_of`), which is right in any case, and necessary where a rule has
made numbers of sizes itself: these numbers have marks that the sizes have not. Nobody takes a mark
away, but `longest`, `verdict` for batch norms, and `transfer` for the moments of the whole batch.

Read `common` (questions about states), `entries` (one by one: `exp`, `+`), `totals` (means and
sums), `reductions`, `products`, `shapes`; then those that put entries elsewhere: `moves`,
`reshapes`, `layout`, `slices`, `joining`, `gathers`, `blocks`, `images`, `rows`, `lookups`; then
`loops`, `longest`, `arrays`, and for control flow v2 `loops_v2`, `tensor_lists`.
"""
