"""The states of a tensor: how it depends on the examples of the batch.

Let a batch have n examples, and let f be a function of one example (and of weights and settings,
which all towers share) that is the same for all examples and does not depend on n.

    INDEPENDENT   the same for every batch: weights, a learning rate
    PER_EXAMPLE   entry (o, e, i) along `axis`, of outer x n x inner entries, is f(example e)
    ROWS          each entry along `axis` is a function of one example; examples have different
                  numbers of entries: what `tf.boolean_mask` leaves, the values of a sparse tensor
    ONE_EXAMPLE   f(example e), in the iteration e of a loop over the examples
    MEAN          (1/n) sum over e of f(example e)
    SUM           sum over e of f(example e), plus a constant if it `has_offset`
    SHARE         a constant divided by n
    SIZES         numbers computed from shapes alone, each constant or a multiple of n
    POSITION      the position of each entry or row among all entries of the shard, which are
                  outer x n x inner: `tf.range(n)`, `tf.where(mask)`
    ROW_POSITION  the position of each row among the rows of another selection, of which a mask left
                  this row
    INDICES       vectors whose first number is the position of their example: the indices of a
                  sparse tensor, `tf.stack([tf.range(n), column], 1)`
    EMPTY         a list of tensors in which nothing is written yet
    UNKNOWN       none of these is proven

For MEAN and INDEPENDENT, the mean of the towers' values, weighted by their numbers of examples, is
the value of the batch. For a SUM without an offset, the sum of the towers' values is the value of
the batch.

A value may depend on a statistic of the shard in a way that is not linear (a variance, a maximum):
then f depends on that statistic as well, and `shard_statistics` names the statistic. The analysis
goes on with this mark. The proof of a loss ends at it, unless all of these statistics are of the
whole batch.

A state says nothing else: what an operation keeps from one run to the next (a variable, a table, a
generator of random numbers) is called its values here, never its state.
"""

import enum
import typing

import tensorflow.compat.v1 as tf


class Kind(enum.Enum):
    """The kinds of states; the module's docstring says what each means."""
    INDEPENDENT = 'the same on every tower'
    PER_EXAMPLE = 'a value for each example'
    ROWS = 'rows of the examples'
    ONE_EXAMPLE = 'one example'
    MEAN = 'a mean over the examples'
    SUM = 'a sum over the examples'
    SHARE = 'a part for each example'
    SIZES = 'sizes'
    POSITION = 'the positions of the examples'
    ROW_POSITION = 'the numbers of rows'
    INDICES = 'places of examples'
    EMPTY = 'an empty list'
    UNKNOWN = 'unknown'


OTHER_DIMENSIONS = 'gives a result of another shape than its rule expects'
TAKES_NO_OTHER_BATCH = 'takes no batch of another size'
HAS_OWN_SIZE = (
    'combines the examples with a tensor whose length along their dimension is not known to come '
    'from the batch')
TAKES_SOME = 'takes some of the examples, or changes their order'
"""Why a proof ends where the graph may hold the size of the program's batch."""

RUNS_AS_OFTEN = 'decides how often a loop runs, and equals the static size of a shard'
"""Why a proof ends at a constant that may be the number of examples (`static_batch`)."""

HAS_NO_RULE = 'has no rule'
IS_PYTHON = 'is Python code, of which nothing is known'
NO_STATIC_RANK = 'has a rank that is not static'
NO_STATIC_ARGUMENT = 'has an argument that is not static'
"""Why a proof ends where a rule needs a rank, or the value of an argument such as `axis`."""


class Reason(typing.NamedTuple):
    """Where and why a proof ends."""
    operation: str  # the operation's name
    type: str  # the operation's type
    why: str  # the predicate of a sentence whose subject is the operation


class Size(typing.NamedTuple):
    """A number computed from shapes: `constant + per_example * n`, of n examples."""
    constant: int = 0
    per_example: int = 0


EVERY_EXAMPLE = ''
"""The `State.selection` of a tensor that is no selection: it has all examples."""


class Layout(typing.NamedTuple):
    """Where the examples are in a tensor: states of the same layout go together entry by entry."""
    kind: Kind
    axis: int
    outer: int
    inner: int
    selection: str


class State(typing.NamedTuple):
    """How a tensor depends on the examples; a comment begins with the kinds that have the field."""
    kind: Kind
    # PER_EXAMPLE, ROWS: the dimension along which the examples are
    axis: int = 0
    # PER_EXAMPLE, POSITION: how often all examples follow each other along the axis
    outer: int = 1
    # PER_EXAMPLE, POSITION: how many neighbouring entries belong to one example
    inner: int = 1
    # ROWS, POSITION, INDICES: the operation or tensor that selected the rows; two tensors with the
    # same selection have the same rows in the same order
    selection: str = EVERY_EXAMPLE
    # PER_EXAMPLE, SUM: whether f is known to be the same for every example, as in ones [n]. False
    # is always sound: a rule that does not look at this gives False
    is_constant: bool = False
    # SUM: whether a value that does not depend on the examples is added
    has_offset: bool = False
    # SIZES: the numbers, in row-major order. Of a list of tensors, whatever its kind: its length
    sizes: typing.Tuple[Size, ...] = ()
    # MEAN, SUM, SHARE: names of the operations that took the mean or the sum over the examples
    reductions: typing.FrozenSet[str] = frozenset()
    # all: names of statistics of the shard on which f depends, but not linearly
    shard_statistics: typing.FrozenSet[str] = frozenset()
    # all: whether random numbers take part
    is_random: bool = False
    # INDEPENDENT: whether all entries are equal, or drawn alike, each by itself. In a graph with
    # the static size of its batch (`View.is_as_built`) ones [8, 4] may be ones of 8 examples
    is_uniform: bool = False
    # UNKNOWN: where and why the proof ended
    reason: typing.Optional[Reason] = None

    @property
    def layout(self) -> Layout:
        """Where the examples are."""
        return Layout(self.kind, self.axis, self.outer, self.inner, self.selection)

    @property
    def entries_of_each(self) -> int:
        """How many entries of each example are along `axis`: 16 in [2 * n * 8]."""
        return self.outer * self.inner

    @property
    def is_total(self) -> bool:
        """Whether the tensor is a mean or a sum over all examples."""
        return self.kind in (Kind.MEAN, Kind.SUM)

    @property
    def is_total_or_share(self) -> bool:
        """Whether the tensor is a mean, a sum or a share: its values on towers can be combined."""
        return self.is_total or self.kind is Kind.SHARE

    @property
    def is_alike_on_towers(self) -> bool:
        """Whether the tensor is the same on every tower, and depends on no statistic of a shard."""
        return self.kind is Kind.INDEPENDENT and not self.shard_statistics

    @property
    def is_by_example(self) -> bool:
        """Whether its entries belong to single examples."""
        return self.kind in (Kind.PER_EXAMPLE, Kind.ROWS, Kind.ONE_EXAMPLE)

    @property
    def is_position(self) -> bool:
        """Whether the tensor tells positions of examples. Only the rules of some operations take
        such a tensor (`Row.takes_positions`)."""
        return self.kind in (Kind.POSITION, Kind.ROW_POSITION, Kind.INDICES)

    @property
    def is_position_of_each(self) -> bool:
        """Whether the tensor has the position of each example, in the order of the examples, as
        `tf.range(n)` has; or, in the iteration of an example, the position of that example.
        Positions that a mask leaves are not the positions of all examples."""
        return self.layout == State(Kind.POSITION).layout

    @property
    def is_count(self) -> bool:
        """Whether the tensor is a multiple of the number of examples."""
        if self.kind is Kind.SIZES:
            return all(size.per_example and not size.constant for size in self.sizes)
        return self.kind is Kind.SUM and self.is_constant and not self.has_offset

    @property
    def depends_on_size(self) -> bool:
        """Whether the number of examples is in any of these sizes."""
        return self.kind is Kind.SIZES and any(size.per_example for size in self.sizes)

    @property
    def depends_on_length(self) -> bool:
        """Whether a list of tensors, whose elements have this state, may have a length that depends
        on the examples: False only where `sizes` has a constant length."""
        return not self.sizes or any(size.per_example for size in self.sizes)

    def with_shard_statistics(self, names: typing.Iterable[str]) -> 'State':
        """This state, marked with statistics of the shard on which it depends, but not linearly."""
        return self._with_marks(self.shard_statistics.union(names), self.is_random)

    def with_marks_of(self, *others: 'State') -> 'State':
        """This state with the marks of other states added: their shard statistics, and whether
        random numbers take part."""
        shard_statistics = self.shard_statistics
        is_random = self.is_random
        for other in others:
            shard_statistics |= other.shard_statistics
            is_random = is_random or other.is_random
        return self._with_marks(shard_statistics, is_random)

    def _with_marks(self, shard_statistics: typing.FrozenSet[str], is_random: bool) -> 'State':
        """This state with these marks: itself where it has them, since a new state takes long."""
        if shard_statistics == self.shard_statistics and is_random == self.is_random:
            return self
        return self._replace(shard_statistics=shard_statistics, is_random=is_random)


INDEPENDENT = State(Kind.INDEPENDENT)
ONE_EXAMPLE = State(Kind.ONE_EXAMPLE)


def per_example(axis: int, outer: int = 1, inner: int = 1, is_constant: bool = False) -> State:
    """The state of a tensor with the examples along a dimension.

        [n, 4]           per_example(0)
        [8, n]           per_example(1)
        [n * 8]          per_example(0, inner=8), 8 neighbouring entries of each example
        [8 * n]          per_example(0, outer=8), all examples, eight times

    Args:
      axis: the dimension.
      outer: how often all examples follow each other along it.
      inner: how many neighbouring entries belong to one example.
      is_constant: whether every example has the same values.
    """
    return State(Kind.PER_EXAMPLE, axis, outer, inner, is_constant=is_constant)


ROW_OF_EACH_EXAMPLE = per_example(0).layout
"""The layout of a tensor [n, …] whose row e belongs to example e."""


def rows(axis: int, selection: str) -> State:
    """The state of a tensor with any number of rows of each example along a dimension.

    Args:
      axis: the dimension.
      selection: the name of the operation or tensor that selected the rows.
    """
    return State(Kind.ROWS, axis, selection=selection)


def sizes_state(sizes: typing.Iterable[Size]) -> State:
    """The state of a tensor of these sizes."""
    return State(Kind.SIZES, sizes=tuple(sizes))


def unknown(op: tf.Operation, why: str) -> State:
    """The state of the results of an operation about which nothing is proven.

    Args:
      op: the operation, at which the proof ends.
      why: the predicate of a sentence whose subject is the operation.
    """
    return State(Kind.UNKNOWN, reason=Reason(op.name, op.type, why))


PerhapsStates = typing.Sequence[typing.Optional[State]]
"""States of tensors, None for a tensor that has no state yet."""


def known_states(states: PerhapsStates) -> typing.List[State]:
    """The states without the Nones."""
    return [state for state in states if state is not None]


def if_complete(states: PerhapsStates) -> typing.Optional[typing.List[State]]:
    """The states as a list; None where any of them is None."""
    known = known_states(states)
    return known if len(known) == len(states) else None


def first_unknown(states: typing.Iterable[State]) -> typing.Optional[State]:
    """The first state of the kind UNKNOWN, which has the reason; None where there is none."""
    for state in states:
        if state.kind is Kind.UNKNOWN:
            return state
    return None
