"""Moving averages of sums over the examples: they are written by sums over the whole batch.

Examples are a cluster's size in a vector quantizer and a sum of rewards: v := d v + (1 - d) S, with
S the sum over the batch. Each tower has the sum of its shard alone, so that no tower could write
the average of the batch. So S is exchanged (`batch_sum`) where it is computed, and tower 0 writes.

Its test is `tests/roles/test_written_values.py`.
"""

import functools
import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import SharedVariableError
from towers.graph.graph_walk import ancestors, operation_names, producers_of, reached
from towers.graph.variable_access import metric_variables
from towers.proof.analysis import Analysis
from towers.proof.states import Kind
from towers.proof.written import Written
from towers.whole_batch.batch_values import batch_sum


class _Read(typing.NamedTuple):
    """A read of a sum over the shard, on the way to the write of an average."""
    total: tf.Tensor
    reader: tf.Operation


def exchange_sums(operations: typing.Iterable[tf.Operation], analysis: Analysis,
                  outputs: typing.Sequence, no_batch_values: typing.Optional[str]) -> bool:
    """Replaces sums over a shard that moving averages are updated with by sums of the whole batch.

    What else reads such a sum, as a loss may, goes on reading the shard's.

    Args:
      operations: the operations of the forward pass.
      analysis: the analysis of this forward pass.
      outputs: tensors and operations that the model function returns, but for the updates.
      no_batch_values: why the towers cannot exchange values in this build; or None.

    Returns:
      Whether there was such a sum.

    Raises:
      SharedVariableError: the towers cannot exchange a sum.
    """
    by_name = {op.name: op for op in operations}
    # All reads are found before one is replaced: an operation may be on the way to two writes.
    reads: typing.Dict[typing.Tuple[str, str], _Read] = {}
    for name, write in _averages_of_sums(analysis):
        consumers = _Consumers(by_name[name], outputs)
        for statistic in sorted(write.value.reductions):
            op = by_name.get(statistic)  # None in a function
            if op is None or not compat.in_branches_alone(op):
                raise _refusal(name, write, 'the sum is taken in a loop or a function')
            if no_batch_values is not None:
                raise _refusal(name, write, no_batch_values)
            reads_of_sum = _reads_of_sum(op, analysis, consumers)
            if not reads_of_sum:
                raise _refusal(name, write, 'no operation is known that takes it to the write')
            for read in reads_of_sum:
                if consumers.is_for_outputs(read.reader):
                    raise _refusal(name, write, 'what is computed from it goes into the loss or '
                                   'another output, too')
                reads[read.total.name, read.reader.name] = read
    for read in reads.values():
        _replace_by_batch_sum(read)
    return bool(reads)


class _Consumers:
    """What is computed from a sum for a write, and what for the outputs of the model function."""

    def __init__(self, write: tf.Operation, outputs: typing.Sequence):
        """
        Args:
          write: the operation that writes an average.
          outputs: as those of `exchange_sums`.
        """
        self._for_write = ancestors(write.inputs) | {write.name}
        # An output that reads the average after the write gets a value of the whole batch. So the
        # walk from the outputs ends at the write, and does not go on to the sum that it takes.
        operations = [getattr(output, 'op', output) for output in outputs]
        producers = functools.partial(_producers_but_of, write)
        self._for_outputs = set(reached(operations, producers))
        self._for_outputs.discard(write.name)

    def for_write(self, total: tf.Tensor) -> typing.List[tf.Operation]:
        """The operations that read a tensor, and from which the written value is computed."""
        return [op for op in total.consumers() if op.name in self._for_write]

    def is_for_outputs(self, op: tf.Operation) -> bool:
        """Whether an output is computed from an operation, otherwise than by the written value."""
        return op.name in self._for_outputs


def _producers_but_of(end: tf.Operation, op: tf.Operation) -> list:
    """The operations that an operation gets its inputs from, or waits for; none of `end`."""
    return [] if op is end else producers_of(op)


def _reads_of_sum(op: tf.Operation, analysis: Analysis, consumers: _Consumers
                  ) -> typing.List[_Read]:
    """The reads of a sum over the shard on the way to a write.

    Args:
      op: the operation that takes the sum, or that first uses the number of examples as a number,
        as `v + n` does: what is summed over the towers is then n.
      analysis: the analysis of the forward pass.
      consumers: those of the write.
    """
    counts = []
    for tensor in op.inputs:
        state = analysis.state(tensor)
        if state.kind is Kind.SIZES and state.is_count:
            counts.append(tensor)
    if counts:
        return [_Read(count, op) for count in counts]
    total = op.outputs[0]
    return [_Read(total, reader) for reader in consumers.for_write(total)]


def _averages_of_sums(analysis: Analysis) -> typing.List[typing.Tuple[str, Written]]:
    """The writes of shared variables that need a sum over the whole batch:
    `[(name of the operation in the forward pass, its write)]`."""
    shared = operation_names(tf.global_variables()) - metric_variables().keys()
    found = []
    for name, writes in analysis.writes.items():
        for write in writes:
            if write.variable in shared and _needs_batch(write):
                found.append((name, write))
    return found


def _needs_batch(write: Written) -> bool:
    """Whether a write needs a sum over the whole batch: a variable is set to what follows from a
    sum of the shard, or such a value is added to it."""
    value = write.value
    if value.kind is not Kind.SUM:
        return False
    # With statistics of the shard, or by rows, it is not exchanged: `roles` decides on it.
    if value.shard_statistics or write.indices is not None:
        return False
    # A plain sum that is added to a variable, every tower adds in turn.
    is_plain_sum_to_add = not write.sets and not value.has_offset
    return not is_plain_sum_to_add


def _replace_by_batch_sum(read: _Read) -> None:
    """Makes the reader of a sum over the shard read the batch's sum."""
    with compat.within_branch(read.total.op), tf.name_scope('batch_sums/'):
        sum_of_batch = batch_sum(read.total)
    compat.replace_tensor(read.total, sum_of_batch, [read.reader])


def _refusal(name: str, write: Written, why: str) -> SharedVariableError:
    """The error for a write, by the operation of that name, whose sum cannot be exchanged."""
    return SharedVariableError(
        'the model function writes variable %s (operation %s) by a sum over its examples, of which '
        'each tower has a part alone, and %s: take the sum outside of the model function, or pass '
        "update_ops='all' or 'none'." % (write.variable, name, why))
