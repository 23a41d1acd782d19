"""Moving averages of sums over the examples: they are written by sums over the whole batch.

Examples are a cluster's size in a vector quantizer and a sum of rewards: v := d v + (1 - d) S, with
S the sum over the batch. Each tower has the sum of its shard alone, so that no tower could write
the average of the batch. So S is exchanged (`batch_sum`) where it is computed, and tower 0 writes.

Words of `proof/` used here, of a value: its `kind` is `SUM` if it is computed from a sum over the
examples, linearly, and `SIZES` if it is computed from shapes; its `reductions` are the operations
that have taken the sums; it `is_count` if it is a multiple of the number of examples; it
`has_offset` if a value that does not depend on the examples is added to its sum.

Its test is `tests/roles/test_written_values.py`.
"""

import functools
import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import SharedVariableError
from towers.graph.graph_walk import (
    ancestors,
    operation_names,
    operation_of,
    producers_of,
    reached,
    with_names,
)
from towers.graph.variable_access import metric_variables
from towers.proof.analysis import Analysis
from towers.proof.states import Kind
from towers.proof.written import Written
from towers.whole_batch.batch_values import batch_sum


class _Read(typing.NamedTuple):
    """A read of a sum over the shard, on the way to the write of an average."""
    total: tf.Tensor  # the sum
    reader: tf.Operation  # the operation that reads it


def exchange_sums(operations: typing.Iterable[tf.Operation], analysis: Analysis,
                  outputs: typing.Sequence, no_batch_values: typing.Optional[str]) -> bool:
    """Replaces sums over a shard that moving averages are updated with by sums of the whole batch.

    Other operations that read such a sum, as a loss may, go on reading the shard's sum.

    Args:
      operations: the operations of the forward pass.
      analysis: the analysis of this forward pass.
      outputs: tensors and operations that the model function returns, without the updates.
      no_batch_values: why the towers cannot exchange values in this build; or None.

    Returns:
      Whether there was such a sum.

    Raises:
      SharedVariableError: the towers cannot exchange a sum.
    """
    by_name = {op.name: op for op in operations}
    # All reads are found before one is replaced. A read may be on the way to two writes: it is
    # replaced once.
    reads: typing.Dict[typing.Tuple[str, str], _Read] = {}
    for average in _averages_of_sums(analysis):
        if no_batch_values is not None:
            raise _refusal(average, no_batch_values)
        consumers = _Consumers(by_name[average.operation], outputs)
        for read in _reads_for_average(average, by_name, analysis, consumers):
            reads[read.total.name, read.reader.name] = read
    for read in reads.values():
        _replace_by_batch_sum(read)
    return bool(reads)


class _Average(typing.NamedTuple):
    """A write of a moving average of sums."""
    operation: str  # name of the operation of the forward pass that writes, or calls the function
    write: Written


def _reads_for_average(average: _Average, by_name: typing.Dict[str, tf.Operation],
                       analysis: Analysis, consumers: '_Consumers') -> typing.List[_Read]:
    """The reads of all sums that a moving average is updated with. Raises `SharedVariableError` for
    a sum that cannot be exchanged.

    Args:
      average: the write of the moving average.
      by_name: {name: operation} of the forward pass.
      analysis: the analysis of the forward pass.
      consumers: tells which operations this write is computed from.
    """
    reads: typing.List[_Read] = []
    names_of_sums = average.write.value.reductions  # of the operations that take the sums
    for name in sorted(names_of_sums):
        op = by_name.get(name)  # None if it is in a function
        if op is None or compat.in_loop(op):
            raise _refusal(average, 'the sum is taken in a loop or a function')
        reads_of_sum = _reads_of_sum(op, analysis, consumers)
        if not reads_of_sum:
            raise _refusal(average, 'no operation is known that takes it to the write')
        for read in reads_of_sum:
            if consumers.is_for_outputs(read.reader):
                raise _refusal(average, 'what is computed from it goes into the loss or another '
                               'output, too')
        reads += reads_of_sum
    return reads


class _Consumers:
    """Tells which operations a write is computed from, and which the outputs of the model function
    are computed from."""

    def __init__(self, write: tf.Operation, outputs: typing.Sequence):
        """
        Args:
          write: the operation that writes an average.
          outputs: the `outputs` of `exchange_sums`.
        """
        self._for_write = ancestors(write.inputs) | {write.name}
        # An output may read the average after the write: it then gets a value of the whole batch.
        # So the walk back from the outputs ends at the write.
        operations = list(map(operation_of, outputs))
        producers = functools.partial(_producers_but_of, write)
        self._for_outputs = set(reached(operations, producers))
        self._for_outputs.discard(write.name)

    def for_write(self, total: tf.Tensor) -> typing.List[tf.Operation]:
        """The operations that read a tensor, and from which the written value is computed."""
        return with_names(total.consumers(), self._for_write)

    def is_for_outputs(self, op: tf.Operation) -> bool:
        """Whether an output is computed from an operation, and not only by way of the written
        value."""
        return op.name in self._for_outputs


def _producers_but_of(end: tf.Operation, op: tf.Operation) -> list:
    """The operations that compute the inputs of an operation; [] for `end`, so that a walk back
    ends there."""
    return [] if op is end else producers_of(op)


def _reads_of_sum(op: tf.Operation, analysis: Analysis, consumers: _Consumers
                  ) -> typing.List[_Read]:
    """The reads of a sum over the shard on the way to a write.

    In `v + tf.reduce_sum(x)` the sum is the output of the `Sum`, which the addition reads. In
    `v + n`, with n from `tf.shape(x)[0]`, no operation adds up anything: what is to be summed over
    the towers is n, an input of the addition.

    Args:
      op: the operation that takes the sum, such as the `Sum`; or that computes with a number of
        examples, such as the addition of `v + n`.
      analysis: the analysis of the forward pass.
      consumers: tells which operations the write is computed from.
    """
    counts = [tensor for tensor in op.inputs if _is_count_by_shape(tensor, analysis)]
    if counts:
        return [_Read(count, op) for count in counts]
    total = op.outputs[0]
    return [_Read(total, reader) for reader in consumers.for_write(total)]


def _is_count_by_shape(tensor: tf.Tensor, analysis: Analysis) -> bool:
    """Whether a tensor is the number of examples, or a multiple, computed from a shape."""
    state = analysis.state(tensor)
    return state.kind is Kind.SIZES and state.is_count


def _averages_of_sums(analysis: Analysis) -> typing.List[_Average]:
    """The writes of shared variables that need a sum over the whole batch."""
    # Counters of metrics are left out: all towers add their shard's sum, one after the other.
    shared = operation_names(tf.global_variables()) - metric_variables().keys()
    found = []
    for name, writes in analysis.writes.items():
        for write in writes:
            if write.variable in shared and _needs_batch(write):
                found.append(_Average(name, write))
    return found


def _needs_batch(write: Written) -> bool:
    """Whether a write needs a sum S over the whole batch: it sets a variable to a value that S is
    in, such as d v + (1 - d) S, or adds such a value to it."""
    value = write.value
    if value.kind is not Kind.SUM:
        return False
    # Two kinds of writes are no writes of a moving average: writes of a value that also depends on
    # statistics of the shard, and writes of rows of a table. They are left to `roles/`, which
    # decides who makes them, or refuses them.
    depends_on_statistics = bool(value.shard_statistics)
    is_for_rows = write.indices is not None
    if depends_on_statistics or is_for_rows:
        return False
    if write.sets:
        return True
    # `v += S` needs no sum over the batch, since each tower adds its own sum in turn. But with an
    # offset the towers cannot take turns, since each would add it: `v += (1 - d) (S - v)` has the
    # offset -(1 - d) v.
    return value.has_offset


def _replace_by_batch_sum(read: _Read) -> None:
    """Makes the reader of a sum over the shard read the batch's sum."""
    with compat.within_branch(read.total.op), tf.name_scope('batch_sums/'):
        sum_of_batch = batch_sum(read.total)
    compat.replace_tensor(read.total, sum_of_batch, [read.reader])


def _refusal(average: _Average, why: str) -> SharedVariableError:
    """The error for a moving average whose sum cannot be exchanged; `why` is said in it."""
    return SharedVariableError(
        'the model function writes variable %s (operation %s) by a sum over its examples, of which '
        'each tower has a part alone, and %s: take the sum outside of the model function, or pass '
        "update_ops='all' or 'none'." % (average.write.variable, average.operation, why))
