"""Sums over the examples that go into averages of them: the sum over all towers goes there.

A cluster's size in a vector quantizer, a sum of rewards: v := d v + (1 - d) S, with S the sum over
the batch. Each tower has the sum of its shard alone, and the average of all these is none of the
batch's, whoever writes it. So S is exchanged (`batch_sum`) where it is made, and tower 0 writes.

Its test is `tests/roles/test_written_values.py`.
"""

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


def exchange_sums(operations: typing.Iterable[tf.Operation], analysis: Analysis,
                  outputs: typing.Sequence, no_batch_values: typing.Optional[str]) -> bool:
    """Replaces sums over a shard that moving averages are updated with by sums of the whole batch.

    What else reads such a sum, as a loss may, goes on reading the shard's.

    Args:
      operations: the operations of the forward pass.
      analysis: its analysis.
      outputs: tensors and operations that the model function returns, but for the updates.
      no_batch_values: why the towers cannot exchange values in this build; or None.

    Returns:
      Whether there was such a sum.
    """
    by_name = {op.name: op for op in operations}
    exchanged: typing.Set[typing.Tuple[str, str]] = set()
    for name, write in _averages_of_sums(analysis):
        readers = _Readers(by_name[name], outputs)
        for statistic in sorted(write.value.reductions):
            op = by_name.get(statistic)
            if op is None or not compat.in_branches_alone(op):
                raise _refusal(name, write, 'the sum is taken in a loop or a function')
            if no_batch_values is not None:
                raise _refusal(name, write, no_batch_values)
            sums = _exact_sums(op, analysis, readers)
            if not sums:
                raise _refusal(name, write, 'no operation is known that takes it to the write')
            for total, taker in sums:
                if readers.is_of_outputs(taker):
                    raise _refusal(name, write, 'what is computed from it goes into the loss or '
                                   'another output, too')
                if (total.name, taker.name) not in exchanged:
                    exchanged.add((total.name, taker.name))
                    _replace_by_batch_sum(total, taker)
    return bool(exchanged)


class _Readers:
    """What reads a sum on the way to a write, and on the way to the outputs."""

    def __init__(self, write: tf.Operation, outputs: typing.Sequence):
        """
        Args:
          write: the operation that writes an average.
          outputs: as those of `exchange_sums`.
        """
        self._before_write = ancestors(write.inputs) | {write.name}

        def producers(op: tf.Operation) -> list:
            return [] if op is write else producers_of(op)
        self._of_outputs = set(reached([getattr(each, 'op', each) for each in outputs], producers))
        self._of_outputs.discard(write.name)

    def on_the_way(self, total: tf.Tensor) -> typing.List[tf.Operation]:
        """The operations that read a tensor, and from which the written value is computed."""
        return [op for op in total.consumers() if op.name in self._before_write]

    def is_of_outputs(self, op: tf.Operation) -> bool:
        """Whether an output is computed from an operation, otherwise than by the written value."""
        return op.name in self._of_outputs


def _exact_sums(op: tf.Operation, analysis: Analysis, readers: _Readers
                ) -> typing.List[typing.Tuple[tf.Tensor, tf.Operation]]:
    """Pairs `(a sum over the shard, an operation that reads it on the way to the write)`.

    Args:
      op: the operation that takes the sum, or that first uses the number of examples as a number,
        as `v + n` does: what is summed over the towers is then n.
      analysis: the analysis of the forward pass.
      readers: `_Readers` of the write.
    """
    counts = [tensor for tensor in op.inputs if analysis.state(tensor).kind is Kind.SIZES
              and analysis.state(tensor).is_count]
    if counts:
        return [(tensor, op) for tensor in counts]
    return [(op.outputs[0], taker) for taker in readers.on_the_way(op.outputs[0])]


def _averages_of_sums(analysis: Analysis) -> typing.List[typing.Tuple[str, Written]]:
    """`[(name of an operation, its write)]`: the writes of shared variables that need sums over the
    whole batch."""
    shared = operation_names(tf.global_variables()) - metric_variables().keys()
    found = []
    for name, writes in analysis.writes.items():
        for write in writes:
            if write.variable in shared and _needs_batch(write):
                found.append((name, write))
    return found


def _needs_batch(write: Written) -> bool:
    """Whether a variable is set to what follows from a sum, or such a value is added to it; a sum
    that is added as it is, every tower adds in turn."""
    value = write.value
    if value.kind is not Kind.SUM or value.shard_statistics or write.indices is not None:
        return False
    return write.sets or value.has_offset


def _replace_by_batch_sum(total: tf.Tensor, taker: tf.Operation) -> None:
    """Makes an operation that reads a sum over the shard read the batch's."""
    with compat.within_branch(total.op), tf.name_scope('batch_sums/'):
        whole = batch_sum(total)
    compat.replace_tensor(total, whole, [taker])


def _refusal(name: str, write: Written, why: str) -> SharedVariableError:
    """The error for a write, by the operation of that name, whose sum cannot be exchanged."""
    return SharedVariableError(
        'the model function writes variable %s (operation %s) by a sum over its examples, of which '
        'each tower has a part alone, and %s: take the sum outside of the model function, or pass '
        "update_ops='all' or 'none'." % (write.variable, name, why))
