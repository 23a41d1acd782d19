"""The rules: what each kind of operation does to the examples of a batch.

A rule is a function `(op, states, view)`:

    op      `tf.Operation` of the scratch graph
    states  the state of each of its inputs
    view    `View`; the rule asks it for ranks, shapes and static values, and notes in it why a
            statistic of the shard ends a proof

A rule returns one state for all results of the operation, or a list with the state of each result.
The table in `towers.proof.table` says which rule an operation has. The flags of the row say which
inputs the rule can get:

- without `takes_unknown`, no input is UNKNOWN;
- without `takes_positions`, no input tells positions of examples;
- without `takes_sizes`, sizes have been converted to numbers before (a rule with `takes_unknown`
  converts them itself).

The row of an operation that computes sizes from sizes, such as `tf.stack([n, 4])`, has a second
function with the same arguments, `of_sizes`. It is asked first. Where it raises `NotKnown`, the
result is no size, and the rule is asked.

The docstring of a rule says why the rule is sound. Where a rule is not certain, it returns
`unknown(op, why)`. Where a rule needs a value that is not known, such as a shape or an axis,
`common.required`, `static_rank` and similar functions raise `NotKnown`; `by_table` converts this
exception to the state `unknown`. Inside a loop over the examples, an operation may compute on the
values of one example alone. There `by_table` replaces `unknown` with the state ONE_EXAMPLE.

Some rules are written for some inputs alone, and a decorator adds the answer for all other inputs.
A rule below `for_examples` is asked about inputs that tell of examples; a rule below
`moves_entries` or `computes_entries` is asked about values of the batch.

How the docstrings write a tensor, and the state of this tensor:

    x [n, 4]        one row for each of n examples: `per_example(0)`
    x [3, n]        the examples along dimension 1: `per_example(1)`
    x [3 n, 4]      3 neighbouring rows of each example: `per_example(0, inner=3)`; or all examples
                    three times, one round after the other: `per_example(0, outer=3)`
    x [rows, 4]     any number of rows of each example: `rows(0, selection)`, where `selection`
                    names the mask or operation that chose the rows
    w [4]           the same on every tower: `INDEPENDENT`
    (n, 4)          sizes, the numbers in a shape: `sizes_state([Size(0, 1), Size(4)])`

Words for states, in all modules:

    by example      the entries are of single examples: PER_EXAMPLE, ROWS, ONE_EXAMPLE
    of the batch    the tensor has entries of all examples of the shard, along one dimension:
                    PER_EXAMPLE, ROWS
    total           a mean or a sum over the examples
    layout          where the examples are: `State.layout`
    constant        the same for each example, as ones [n] are: `State.is_constant`. A rule that
                    does not compute this field sets it to False, which is always sound
    as numbers      sizes that an operation computes with as with any other numbers: then 4 is the
                    same on every tower, and n is a sum over the examples (`sizes.as_numbers`)
    argument        an input that says what to do, such as an axis or a shape

Questions whose names are alike, and what they ask:

    are_shared_arguments(states)    no entries or positions of single examples; a mean, or n, passes
    is_same_on_towers(state)        INDEPENDENT or constant sizes, whatever the marks
    state.is_alike_on_towers        INDEPENDENT, and no mark
    written.is_shared(state)        INDEPENDENT and no mark; or constant sizes

A mark on a state is the name of a statistic of the shard on which the value depends, but not
linearly (`State.shard_statistics`). No loss with a mark is proven. These add marks:

- a rule, where its operation computes a statistic (`totals.shard_statistic`), or uses a total
  otherwise than linearly (`totals.not_linear`);
- `sizes.as_number`, where an operation uses the number of examples as a number;
- `by_table`, for each total among the inputs that a rule does not account for;
- `transfer`, for values that may overflow, and for custom gradients of the program.

These hand marks on: `by_table` adds the marks of all inputs to each result. Only for a row without
`keeps_marks`, of control flow, the rule itself chooses the marks that its results get. All other
rules may add the marks of their inputs (`with_marks_of`). This is right in any case. It is
necessary where a rule itself has converted sizes to numbers: these numbers have marks that the
sizes lack. Marks are removed in three places alone: by `longest`, by `verdict` for batch norms, and
by `transfer` for the moments of the whole batch.

Read `common` (questions about states), `entries` (one by one: `exp`, `+`), `totals` (means and
sums), `reductions`, `products`, `recurrent`, `shapes`, `fills`, `broadcast_gradients`; then the
modules for operations that put entries elsewhere: `moves`, `reshapes`, `layout`, `slices`,
`joining`, `gathers`, `blocks`, `images`, `rows`, `lookups`; then `loops`, `longest`, `arrays`, and
for control flow v2 `loops_v2`, `tensor_lists`.
"""
