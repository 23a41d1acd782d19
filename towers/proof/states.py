"""The states of a tensor: how it depends on the examples of the batch.

Let a batch have n examples, and let f be a function of one example (and of weights and settings,
which all towers share) that is the same for all examples and does not depend on n.

    INDEPENDENT   the same for every batch: weights, a learning rate
    PER_EXAMPLE   entry (o, e, i) along `axis`, of outer x n x inner entries, is f(example e)
    ROWS          each entry along `axis` is a function of one example, of which examples have
                  different numbers: what `tf.boolean_mask` leaves, the values of a sparse tensor
    ONE_EXAMPLE   f(example e), in the iteration e of a loop over the examples
    MEAN          (1/n) sum over e of f(example e)
    SUM           sum over e of f(example e), plus a constant if it `has_offset`
    SHARE         a constant divided by n
    SIZES         numbers computed from shapes alone, each constant or a multiple of n
    NUMBER        the place of each entry or row among those of the shard, outer x n x inner in all:
                  `tf.range(n)`, `tf.where(mask)`
    PLACES        vectors of places whose first number is that of their example: the indices of a
                  sparse tensor, `tf.stack([tf.range(n), column], 1)`
    NOTHING       a list of tensors in which nothing is written yet
    UNKNOWN       none of these is proven

The mean of the towers' shards, weighted by their numbers of examples, is the batch's for MEAN and
INDEPENDENT; the sum of the towers' is the batch's for a SUM without an offset.

A value may depend on a statistic of the shard in a way that is not linear (a variance, a maximum):
then f depends on that statistic, too, which `estimated` names. It goes on with this mark, which
ends no analysis and every proof, unless all of these statistics are taken over the whole batch.
"""

import enum
import typing


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
    NUMBER = 'the numbers of the examples'
    PLACES = 'places of examples'
    NOTHING = 'an empty list'
    UNKNOWN = 'unknown'


TAKES_NO_OTHER_BATCH = 'takes no batch of another size'
"""Why a proof ends where the graph holds the size of the program's batch."""


class Reason(typing.NamedTuple):
    """Where and why a proof ends."""
    operation: str  # the operation's name
    type: str  # the operation's type
    why: str  # the predicate of a sentence whose subject is the operation


class Size(typing.NamedTuple):
    """A number computed from shapes: `constant + per_example * n`, of n examples."""
    constant: int = 0
    per_example: int = 0


class State(typing.NamedTuple):
    """How a tensor depends on the examples."""
    kind: Kind
    axis: int = 0  # PER_EXAMPLE, ROWS: the dimension along which the examples are
    outer: int = 1  # PER_EXAMPLE: how often all examples follow each other along the axis
    inner: int = 1  # PER_EXAMPLE: how many neighbouring entries belong to one example
    rows_of: str = ''  # ROWS, NUMBER, PLACES: what made the rows, the same name for the same rows
    is_constant: bool = False  # PER_EXAMPLE, SUM: f is the same for every example, as in ones [n]
    has_offset: bool = False  # SUM: a value that does not depend on the examples is added
    sizes: typing.Tuple[Size, ...] = ()  # SIZES: the numbers, in row-major order; lists: the length
    statistics: typing.FrozenSet[str] = frozenset()  # MEAN, SUM, SHARE: what took it
    estimated: typing.FrozenSet[str] = frozenset()  # statistics of the shard in a non-linear use
    is_random: bool = False  # whether random numbers take part
    is_uniform: bool = False  # INDEPENDENT: all entries are equal, or drawn alike, each by itself
    reason: typing.Optional[Reason] = None  # UNKNOWN: where and why the proof ended

    @property
    def is_total(self) -> bool:
        """Whether it is a mean or a sum over all examples."""
        return self.kind in (Kind.MEAN, Kind.SUM)

    @property
    def is_by_example(self) -> bool:
        """Whether its entries belong to single examples."""
        return self.kind in (Kind.PER_EXAMPLE, Kind.ROWS, Kind.ONE_EXAMPLE)

    @property
    def is_count(self) -> bool:
        """Whether it is a multiple of the number of examples."""
        if self.kind is Kind.SIZES:
            return all(size.per_example and not size.constant for size in self.sizes)
        return self.kind is Kind.SUM and self.is_constant and not self.has_offset

    @property
    def depends_on_size(self) -> bool:
        """Whether these sizes have the number of examples in them."""
        return self.kind is Kind.SIZES and any(size.per_example for size in self.sizes)

    @property
    def depends_on_length(self) -> bool:
        """Whether a list of these elements may have a length that depends on the examples."""
        return not self.sizes or any(size.per_example for size in self.sizes)

    def marked(self, others: typing.Iterable['State']) -> 'State':
        """This state with the marks (estimated, random) of others, too."""
        estimated, is_random = self.estimated, self.is_random
        for other in others:
            estimated |= other.estimated
            is_random = is_random or other.is_random
        return self._replace(estimated=estimated, is_random=is_random)


INDEPENDENT = State(Kind.INDEPENDENT)
ONE_EXAMPLE = State(Kind.ONE_EXAMPLE)


def per_example(axis: int, outer: int = 1, inner: int = 1, is_constant: bool = False) -> State:
    """The state of a tensor with the examples along a dimension."""
    return State(Kind.PER_EXAMPLE, axis, outer, inner, is_constant=is_constant)


def rows(axis: int, rows_of: str) -> State:
    """The state of a tensor with any number of rows of each example along a dimension."""
    return State(Kind.ROWS, axis, rows_of=rows_of)


def unknown(op, why: str) -> State:
    """The state of the results of an operation about which nothing is proven."""
    return State(Kind.UNKNOWN, reason=Reason(op.name, op.type, why))
