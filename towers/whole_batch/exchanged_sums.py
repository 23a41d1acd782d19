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
from towers.graph.graph_walk import operation_names
from towers.graph.variable_access import metric_variables
from towers.proof.analysis import Analysis
from towers.proof.states import Kind
from towers.proof.written import Written
from towers.whole_batch.batch_values import batch_sum


def exchange_sums(operations: typing.Iterable[tf.Operation], analysis: Analysis,
                  no_batch_values: typing.Optional[str]) -> typing.Dict[str, tf.Tensor]:
    """Replaces sums over a shard that moving averages are updated with by sums of the whole batch.

    Args:
      operations: the operations of the forward pass.
      analysis: its analysis.
      no_batch_values: why the towers cannot exchange values in this build; or None.

    Returns:
      {name of a tensor: the tensor that took its place}.
    """
    by_name = {op.name: op for op in operations}
    instead: typing.Dict[str, tf.Tensor] = {}
    for name, write in _averages_of_sums(analysis):
        for statistic in sorted(write.value.reductions):
            if statistic + ':0' in instead:
                continue
            op = by_name.get(statistic)
            if op is None or not compat.in_branches_alone(op):
                raise _refusal(name, write, 'the sum is taken in a loop or a function')
            if no_batch_values is not None:
                raise _refusal(name, write, no_batch_values)
            total = op.outputs[0]
            instead[total.name] = _replace_by_batch_sum(total)
    return instead


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


def _replace_by_batch_sum(total: tf.Tensor) -> tf.Tensor:
    """Makes all that reads a sum over the shard read the batch's, which is returned."""
    readers = list(total.consumers())
    with compat.within_branch(total.op), tf.name_scope('batch_sums/'):
        whole = batch_sum(total)
    compat.replace_tensor(total, whole, readers)
    return whole


def _refusal(name: str, write: Written, why: str) -> SharedVariableError:
    """The error for a write, by the operation of that name, whose sum cannot be exchanged."""
    return SharedVariableError(
        'the model function writes variable %s (operation %s) by a sum over its examples, of which '
        'each tower has a part alone, and %s: take the sum outside of the model function, or pass '
        "update_ops='all' or 'none'." % (write.variable, name, why))
