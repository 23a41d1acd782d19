"""The roles of shared variables that a step writes, by what is proven of the written values.

    a value that does not depend on the examples        tower 0 writes
    a mean over the examples, set                       tower 0 writes
    a moving average of a statistic of the examples     tower 0 writes: batch norm's averages
    a sum, or a count of examples, added                every tower adds, in turn
    rows, each of one example, by places of examples    every tower writes, in turn

If a step writes one variable several times, tower 0 makes all of these writes; or every tower makes
all of them, if all are additions that every tower has to make.
A moving average is linear in the earlier value of the variable. Any other value is refused: no
tower can write it, since a part of the batch gives another value than the whole batch.

Each value that the program writes gets a verdict: who writes it, and why.

Words of `proof/` used here, of a value: it `is_shared` if it is the same on every tower; it
`is_count` if it is a multiple of the number of examples; it `is_by_example` if its entries belong
to single examples. Its `shard_statistics` are the statistics of the shard on which it depends, but
not linearly. Its `reason`, if it has one, says why nothing is proven of it.
"""

import collections
import enum
import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.capture.record import Recorded
from towers.errors import SharedVariableError
from towers.graph.graph_walk import operation_names, reachable_from
from towers.graph.variable_access import metric_variables
from towers.model.request import Request
from towers.proof.states import Kind, Reason, State
from towers.proof.written import Dependence, Written, is_shared
from towers.roles.writes import Write


class ProvenWriters(typing.NamedTuple):
    """Who has to write the shared variables, by what is proven of the written values.

    Attributes:
      every_tower: names of the variables that every tower writes, one tower after the other. Tower
        0 alone writes all other variables.
      reasons: {name of a variable: what is proven of its new value, in words}; empty where nothing
        has to be proven, as with one tower.
    """
    every_tower: typing.Set[str]
    reasons: typing.Dict[str, str]


def proven_writers(recorded: Recorded, writes: typing.Iterable[Write],
                   writes_of_each_tower: typing.Iterable[Write],
                   request: Request) -> ProvenWriters:
    """Finds who has to write each shared variable, so that it gets the value that it has on one
    device.

    Args:
      recorded: the call of the model function.
      writes: the writes of shared variables that a step of tower 0 runs.
      writes_of_each_tower: the writes of variables whose role needs no proof: each tower's own
        state, and the counters of metrics.
      request: `Request` of the build.

    Raises:
      SharedVariableError: a value that neither tower 0 nor every tower can write.
    """
    proven = ProvenWriters(set(), {})
    if request.training.update_ops != 'first':  # 'all' and 'none' say who writes
        return proven
    if not is_divided(request):  # the one tower writes what one device writes
        return proven
    judge = _Judge(recorded, writes_of_each_tower, request)
    writes_by_variable: typing.Dict[str, typing.List[_JudgedWrite]] = collections.defaultdict(list)
    for write in writes:
        for judged in judge.judged(write):
            writes_by_variable[judged.variable].append(judged)
            proven.reasons[judged.variable] = judged.verdict.reason
            if judged.verdict.writer is _Writer.EVERY_TOWER:
                proven.every_tower.add(judged.variable)
    for variable, judged_writes in writes_by_variable.items():
        _check_writes_together(variable, judged_writes)
    return proven


def is_divided(request: Request) -> bool:
    """Whether several towers, each with a part of the batch, may write the same variables, in the
    build of a `Request`. On parameter servers the towers of all workers share the variables."""
    is_on_parameter_servers = request.served_rank is not None
    return len(request.split.parts) > 1 or is_on_parameter_servers


class _Writer(enum.Enum):
    """Who has to write a value, so that the variable is as on one device."""
    TOWER_0 = 'tower 0, for all'
    EVERY_TOWER = 'every tower, in turn'
    NONE = 'nobody can'


class _Verdict(typing.NamedTuple):
    """Who has to write a value, and why; where nobody can, the text of the error."""
    writer: _Writer
    reason: str


_SAME_ON_TOWERS = _Verdict(_Writer.TOWER_0, 'its new value does not depend on the examples')
_AVERAGE = _Verdict(_Writer.TOWER_0, 'it is a moving average of a statistic of the examples')
_MEAN = _Verdict(_Writer.TOWER_0, 'it is set to a mean over the examples')
_SUM = _Verdict(_Writer.EVERY_TOWER, 'a sum over the examples, or a count of them, is added to it')
_ROWS = _Verdict(_Writer.EVERY_TOWER, 'each example writes rows of its own')


class _JudgedWrite(typing.NamedTuple):
    """A write of a variable, and who has to do it.

    Attributes:
      variable: name of the variable.
      operation: name of the operation of the program that writes.
      verdict: who has to write, and why.
      adds: whether the write is an addition.
    """
    variable: str
    operation: str
    verdict: _Verdict
    adds: bool


class _Judge:
    """Says who has to write each value, by what is proven of a call of the model function."""

    def __init__(self, recorded: Recorded, writes_of_each_tower: typing.Iterable[Write],
                 request: Request):
        """
        Args:
          recorded: the call of the model function, with what is proven of it.
          writes_of_each_tower: the writes of each tower's own state, and of counters of metrics.
          request: `Request` of the build.
        """
        self._analysis = recorded.proven.analysis
        self._request = request
        self._static_size = recorded.proven.static_size  # examples of the shard; or None
        self._from_shard = recorded.from_shard  # names of operations that depend on the shard
        self._batch_norm_statistics = recorded.proven.batch_norms.statistics()
        self._readers_of_towers = _readers_of_towers(recorded, writes_of_each_tower)

    def judged(self, write: Write) -> typing.List[_JudgedWrite]:
        """Judges a `Write`: one verdict for each value that its operation writes. A call of a
        function may write several variables, each several times.

        Raises:
          SharedVariableError: a value that neither tower 0 nor every tower can write.
        """
        judged = []
        for written in self._values_of(write):
            verdict = self._verdict(written, write.op)
            if verdict.writer is _Writer.NONE:
                raise SharedVariableError(verdict.reason)
            if verdict.writer is _Writer.EVERY_TOWER:
                _check_in_turn(write.op, written, self._request)
            self._check_is_of_batch(write, may_take_rows=verdict is _ROWS)
            judged.append(_JudgedWrite(written.variable, write.op.name, verdict, written.adds))
        if judged:
            return judged
        self._check_is_of_batch(write, may_take_rows=False)
        # The proof has no rule for this operation. It writes the same on every tower: otherwise
        # `_check_unknown_write` has refused it. Whether it adds is not known.
        return [_JudgedWrite(variable, write.op.name, _SAME_ON_TOWERS, adds=False)
                for variable in write.variables]

    def _values_of(self, write: Write) -> typing.List[Written]:
        """List of the values that the operation of a `Write` writes to the variables of this
        `Write`. The operation may also write variables of another role, such as counters of
        metrics, which the `Write` does not have: their values are left out. [] for an operation
        without a rule in the proof.

        Raises:
          SharedVariableError: an operation without a rule writes by the examples.
        """
        values = self._analysis.writes.get(write.op.name, [])
        if not values:
            self._check_unknown_write(write)
        return [written for written in values if written.variable in write.variables]

    def _verdict(self, written: Written, op: tf.Operation) -> _Verdict:
        """Who has to write a value.

        Args:
          written: what is written.
          op: the operation of the program that writes it.
        """
        if not self._is_from_shard(op):
            # Nothing of the shard is upstream of the value. But with a shard of 32 examples,
            # `tf.shape(x)[0]` may be the constant 32 in the graph. So an added 32 is refused: it
            # may count the examples, or not.
            refused = self._refused_count(written, op)
            if refused is not None:
                return refused
            # The proof may have found that another constant is a multiple of the number of
            # examples. Then the value is judged below as one that depends on the examples.
            is_size_constant = written.value.is_count
            if not is_size_constant:
                return _SAME_ON_TOWERS
        if written.indices is not None:
            return self._verdict_on_rows(written, written.indices, op)
        return self._verdict_on_value(written, op)

    def _verdict_on_value(self, written: Written, op: tf.Operation) -> _Verdict:
        """Who has to write a value that sets a whole variable, or is added to all of it.

        Args:
          written: what is written.
          op: the operation of the program that writes it.
        """
        value = written.value
        if value.reason is not None:  # nothing is proven of the value
            return _refused(written, op, _in_words(value.reason))
        if is_shared(value):
            # An added constant may be the number of examples: see `_refused_count`.
            return self._refused_count(written, op) or _SAME_ON_TOWERS
        if _is_moving_average(written):
            return _AVERAGE
        if self._shard_statistics(value):
            # Each term depends on several examples, as in mean((x - mean(x)) ** 2), so that even
            # the sum of the towers' values is not the batch's value.
            return _refused(written, op, self._why(value))
        if _is_added_sum(written):
            return _SUM
        if _is_mean_alone(written):
            return _MEAN
        return _refused(written, op, self._why(value))

    def _verdict_on_rows(self, written: Written, indices: State, op: tf.Operation) -> _Verdict:
        """Who has to write rows of a variable.

        Args:
          written: what is written.
          indices: what is proven of the rows' indices.
          op: the operation of the program that writes them.
        """
        value = written.value
        why_not = self._why_across_examples(value) or self._why_across_examples(indices)
        if why_not is not None:
            return _refused(written, op, why_not)
        has_same_values = is_shared(value)
        if has_same_values and is_shared(indices):
            return _SAME_ON_TOWERS
        if self._static_size is not None and _has_constant_rows(written, indices):
            return _Verdict(_Writer.NONE, _holds_size(written.variable, op, self._static_size))
        # `scatter_add(v, ids, 1)` writes the same value for each example.
        has_value_for_each = value.is_by_example or has_same_values
        if has_value_for_each and indices.is_by_example:
            return _verdict_on_order(written, op)
        return _refused(written, op, 'the rows are %s, at places that are %s' % (
            value.kind.value, indices.kind.value))

    def _why_across_examples(self, state: State) -> typing.Optional[str]:
        """Why values or indices of rows cannot be written by single examples, in words: nothing is
        proven of them, or they depend on statistics of the shard. None for any other values."""
        if state.reason is not None:
            return _in_words(state.reason)
        if self._shard_statistics(state):
            return 'the rows are computed across the examples: ' + self._why(state)
        return None

    def _check_is_of_batch(self, write: Write, may_take_rows: bool) -> None:
        """Refuses a write that is computed from a variable which holds something of one tower's
        examples, also of those of earlier steps.

        Args:
          write: the write.
          may_take_rows: whether the write is of rows, each of one example: then it may take them
            from a variable with a row for each example of the shard, as an RNN's state is.
        """
        for variable, readers in self._readers_of_towers.items():
            has_rows_of_shard = _num_rows(variable, write.op.graph) == self._static_size
            if may_take_rows and self._static_size is not None and has_rows_of_shard:
                continue
            if write.op.name in readers:
                raise SharedVariableError(
                    'the model function writes variable %s (operation %s) by what it takes from '
                    'variable %s, which holds something of one tower\'s examples: of the whole '
                    'batch it would have another value. Take the value over all towers '
                    '(towers.batch_sum, towers.batch_mean) before it is kept, or compute what is '
                    'written from the examples of this step.' % (
                        write.variables[0], write.op.name, variable))

    def _check_unknown_write(self, write: Write) -> None:
        """Raises `SharedVariableError` for a write by an operation that the proof has no rule for
        (no assign, add or scatter), if what it writes depends on the examples."""
        op = write.op
        if not self._is_from_shard(op):  # each tower would write the same, so tower 0 may write
            return
        # The proof imports a graph of static size once more, for another number of examples. Where
        # the import of an operation fails, a constant before it has the size of the shard.
        is_imported = op.name in self._analysis.analysed
        if self._static_size is not None and not is_imported:
            raise SharedVariableError(_holds_size(write.variables[0], op, self._static_size))
        for tensor in list(op.inputs) + _conditions(op):
            state = self._analysis.state(tensor)
            if not is_shared(state):
                raise SharedVariableError(
                    'the model function writes variable %s (operation %s, %s) by its examples '
                    '(%s): assign, add or scatter the values, so that it is known which tower is '
                    'to write.' % (write.variables[0], op.name, op.type, self._why(state)))

    def _is_from_shard(self, op: tf.Operation) -> bool:
        """Whether the shard decides what an operation writes, or how often: a loop over the
        examples may add 1 for each of them."""
        conditions = map(self._analysis.state, _conditions(op))
        return op.name in self._from_shard or not all(map(is_shared, conditions))

    def _shard_statistics(self, state: State) -> typing.AbstractSet[str]:
        """Set of the names of the statistics of the shard that a value depends on. Statistics of
        batch norms are left out: they make the loss differ from one device's in any case."""
        return state.shard_statistics - self._batch_norm_statistics

    def _why(self, value: State) -> str:
        """Why neither tower 0 nor every tower can write a value, in words."""
        if value.reason is not None:
            return _in_words(value.reason)
        names = self._analysis.in_order(self._shard_statistics(value))
        if names:
            return _in_words(self._analysis.reasons[names[0]])
        return 'the value is %s' % value.kind.value

    def _refused_count(self, written: Written, op: tf.Operation) -> typing.Optional[_Verdict]:
        """The refusal of a constant that is added and may be the number of examples; None for any
        other value.

        In a batch of static size `tf.shape(x)[0]` is a constant, which does not show where it comes
        from. So in a build with shards of 32 examples, an addition of 32 is refused.
        """
        size = self._static_size
        if written.sets or written.indices is not None:
            return None
        if size is None or written.constant != size:
            return None
        if size < 2:  # 1 is what every counter of steps adds
            return None
        return _Verdict(_Writer.NONE, (
            'the model function adds %d to variable %s (operation %s), and a shard has %d '
            'examples, too: whether it counts the examples, as every tower would in turn, or '
            'adds a constant, is not known of a batch of static size. Pass a batch '
            '[None, ...].' % (size, written.variable, op.name, size)))


def _readers_of_towers(recorded: Recorded, writes: typing.Iterable[Write]
                       ) -> typing.Dict[str, typing.Set[str]]:
    """{name of a variable that holds something of one tower's examples: names of the operations
    that are computed from the variable}.

    It is a counter of a metric, to which every tower adds; or a tower's own state, if it is written
    by the shard, or by other such state. State that each tower writes alike, as a counter of steps,
    is left out.

    Args:
      recorded: the call of the model function.
      writes: the writes of each tower's own state, and of counters of metrics.
    """
    graph = tf.get_default_graph()
    counters = metric_variables()
    from_shard = set(recorded.from_shard)
    readers: typing.Dict[str, typing.Set[str]] = collections.OrderedDict()
    written_by_step = list(writes)
    num_known = -1
    while num_known < len(readers):  # until no further state is found
        num_known = len(readers)
        for write in written_by_step:
            decided_by = operation_names(_conditions(write.op)) | {write.op.name}
            for variable in write.variables:
                holds_examples = variable in counters or not decided_by.isdisjoint(from_shard)
                if holds_examples and variable not in readers:
                    readers[variable] = reachable_from(
                        [graph.get_operation_by_name(variable)], recorded.operations)
                    from_shard |= readers[variable]
    return readers


def _num_rows(variable: str, graph: tf.Graph) -> typing.Optional[int]:
    """The size of the first dimension of the variable of a name; None for a scalar, or where it is
    not static."""
    shape = tf.TensorShape(graph.get_operation_by_name(variable).get_attr('shape'))
    if not shape.ndims:
        return None
    return shape.as_list()[0]


def _conditions(op: tf.Operation) -> typing.List[tf.Tensor]:
    """The conditions of all branches and loops (v1) around an operation."""
    return [op.graph.get_tensor_by_name(name) for name in compat.conditions_around(op)]


def _is_added_sum(written: Written) -> bool:
    """Whether what is added to a variable adds up over the towers to what the batch adds: a sum
    over the examples, or a count of them, without a constant beside it."""
    if written.sets:
        return False
    is_sum_alone = written.value.kind is Kind.SUM and not written.value.has_offset
    return is_sum_alone or written.value.is_count


def _has_constant_rows(written: Written, indices: State) -> bool:
    """Whether rows are constants of the graph, as many as a shard has examples: in
    `scatter_add(v, ids, [1., 1., 1., 1.])`, with ids of 4 examples, but not in
    `scatter_add(v, ids, 1.)`.

    Args:
      written: the rows that are written.
      indices: what is proven of their indices.
    """
    is_one_index_an_example = indices.kind is Kind.PER_EXAMPLE
    is_one_row_for_all = written.is_scalar
    return is_shared(written.value) and is_one_index_an_example and not is_one_row_for_all


def _is_mean_alone(written: Written) -> bool:
    """Whether a variable is set to a mean over the examples, whatever it was before."""
    is_mean = written.value.kind is Kind.MEAN
    return is_mean and written.sets and written.dependence is Dependence.NONE


def _is_moving_average(written: Written) -> bool:
    """Whether a variable v becomes a moving average of a statistic. Examples:

        assign(v, 0.9 * v + 0.1 * mean)      LINEAR: the written value is linear in v
        assign_sub(v, 0.1 * (v - mean))      LINEAR
        assign_sub(v, v - mean)              RUNNING_SUM: the written value has v itself as a term
        assign(v, v + mean)                  RUNNING_SUM, but no average, since it sets v
    """
    # Of other statistics of the shard than means, such as a variance, the kind is INDEPENDENT, and
    # a mark names the statistic.
    is_statistic = written.value.kind in (Kind.MEAN, Kind.INDEPENDENT)
    if not is_statistic:
        return False
    if written.dependence is Dependence.RUNNING_SUM:
        return not written.sets
    return written.dependence is Dependence.LINEAR


def _in_words(reason: Reason) -> str:
    """The reason for which a proof ended, as text: the operation, its type, and what it does."""
    return "'%s' (%s) %s" % reason


def _refused(written: Written, op: tf.Operation, why: str) -> _Verdict:
    """The verdict on a value that nobody can write.

    Args:
      written: what is written.
      op: the operation of the program that writes it.
      why: why nobody can, in words.
    """
    return _Verdict(_Writer.NONE, (
        'the model function writes variable %s (operation %s) by its examples, and no moving '
        'average of them (%s): of a part of the batch it would have another value than of the '
        'whole. Take the value over all towers (towers.batch_sum, towers.batch_mean), or compute '
        "it from what does not depend on the examples; or pass update_ops='all' to have every "
        'tower write, one after the other, as in a loop over devices.' % (
            written.variable, op.name, why)))


def _verdict_on_order(written: Written, op: tf.Operation) -> _Verdict:
    """Who has to write rows of single examples: every tower, unless their order matters and is
    another one than that of the examples.

    Args:
      written: what is written.
      op: the operation of the program that writes the rows.
    """
    # The order of additions does not matter, nor that of writes that set one value.
    needs_order = written.sets_rows and written.value.is_by_example
    if written.is_in_order or not needs_order:
        return _ROWS
    return _Verdict(_Writer.NONE, (
        'the model function sets rows of variable %s (operation %s) in another order than that of '
        'the examples, so that of a row that is set twice towers would keep another value than one '
        'device: put the examples first in its indices, [n, ...] in the place of [k, n] '
        '(tf.stack(..., axis=1), tf.transpose).' % (written.variable, op.name)))


def _holds_size(variable: str, op: tf.Operation, size: int) -> str:
    """The text of the error for a write in a graph that has the static size of a shard in its
    constants, and so takes no batch of another size.

    Args:
      variable: name of the variable.
      op: the operation of the program that writes it.
      size: how many examples the shard has.
    """
    return ('the model function writes variable %s (operation %s) by its examples, and the graph '
            'has the size of a shard, %d, in it, so that it is not known which tower is to write: '
            'pass a batch [None, ...], and take sizes from tf.shape.' % (variable, op.name, size))


def _check_writes_together(variable: str, writes: typing.Sequence[_JudgedWrite]) -> None:
    """Refuses several writes of one variable in a step that are right one by one, and not together.

    Each tower does all writes of a variable in its turn, if it has to do one of them. Let one write
    halve v, and another one add the examples' sum a + b: two towers give (v / 2 + a) / 2 + b, and
    one device v / 2 + a + b. Additions alone come in any order. But `v += 1` beside `v += total` is
    refused as well: tower 0 alone is to add the 1, and every tower would add it.

    Args:
      variable: name of the variable.
      writes: its writes.
    """
    if len(writes) == 1:
        return
    writers = {write.verdict.writer for write in writes}
    if _Writer.EVERY_TOWER not in writers:
        return  # tower 0 does them all as one device does
    are_all_additions = all(write.adds for write in writes)
    if writers == {_Writer.EVERY_TOWER} and are_all_additions:
        return
    operations = sorted({write.operation for write in writes})
    raise SharedVariableError(
        'a step writes variable %s %d times (operations %s), by its examples in one write at '
        'least, which every tower does in its turn, and not all of the writes add sums, counts or '
        'rows of the examples: towers that each do all of them do not make what one device makes. '
        'Write it once, as by assign(v, .9 * v + total), or put what is not added into a variable '
        'of its own.' % (variable, len(writes), ', '.join(operations)))


def _check_in_turn(op: tf.Operation, written: Written, request: Request) -> None:
    """Refuses a write that every tower has to make in its turn, where the towers cannot take turns.

    Args:
      op: the operation of the program that writes.
      written: what it writes.
      request: `Request` of the build.
    """
    are_on_parameter_servers = request.served_rank is not None
    has_rows = written.indices is not None
    is_in_function = op.name != written.operation  # `op` calls a function, which writes
    if are_on_parameter_servers:
        reason = 'no machine waits for the turns of another one: train on one machine'
    elif request.has_copies and has_rows:
        # In a ring and with Horovod each worker has a copy of the variable. In such a copy a count
        # may count the worker's own examples alone; but rows have to be in all copies.
        reason = 'other machines would not get the rows: train on one machine'
    elif is_in_function or compat.in_control_flow(op):
        reason = 'the operation is in a branch, a loop or a function: write outside of it'
    else:
        return
    raise SharedVariableError(
        'the model function writes variable %s by its examples (operation %s), which every '
        'tower does in its turn, and %s.' % (written.variable, op.name, reason))
