"""Sums over the examples that go into averages of them: the sum over all towers goes there.

A cluster's size in a vector quantizer, a sum of rewards: v := d v + (1 - d) S, with S the sum over
the batch. Each tower has the sum of its shard alone, and the average of all these is none of the
batch's, whoever writes it. So S is exchanged (`batch_sum`) where it is made, and tower 0 writes.
"""

import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import SharedVariableError
from towers.graph.variable_access import metric_variables
from towers.proof.states import Kind
from towers.whole_batch.batch_values import batch_sum


def exchange_sums(operations, analysis, refused):
    """Has the writes of averages of sums take the sums of the whole batch.

    Args:
      operations: list of the operations of the forward pass.
      analysis: its `Analysis`.
      refused: why the towers cannot exchange values in this build; or None.

    Returns:
      {name of a tensor: the tensor that took its place}.
    """
    by_name, instead = {op.name: op for op in operations}, {}
    shared = {variable.op.name for variable in tf.global_variables()} - metric_variables().keys()
    for name, writes in analysis.writes.items():
        for write in writes:
            if write.variable not in shared or not _needs_batch(write):
                continue
            for statistic in sorted(write.value.statistics):
                if statistic + ':0' in instead:
                    continue
                _check(name, write, by_name.get(statistic), refused)
                tensor = by_name[statistic].outputs[0]
                instead[tensor.name] = _over_towers(tensor)
    return instead


def _needs_batch(write):
    """Whether a variable is set to what follows from a sum, or such a value is added to it; a sum
    that is added as it is, every tower adds in turn."""
    value = write.value
    if value.kind is not Kind.SUM or value.estimated or write.places is not None:
        return False
    return write.sets or value.has_offset


def _over_towers(total):
    """Has all that reads a sum over the shard read the batch's, which is returned."""
    readers = list(total.consumers())
    with compat.within_branch(total.op), tf.name_scope('batch_sums/'):
        whole = batch_sum(total)
    compat.replace_tensor(total, whole, readers)
    return whole


def _check(name, write, statistic, refused):
    """Refuses a sum that cannot be exchanged where it is made."""
    reason = refused
    if statistic is None or not compat.in_branches_alone(statistic):
        reason = 'the sum is taken in a loop or a function'
    if reason is not None:
        raise SharedVariableError(
            'the model function writes variable %s (operation %s) by a sum over its examples, of '
            "which each tower has a part alone, and %s: take the sum outside of the model "
            "function, or pass update_ops='all' or 'none'." % (write.variable, name, reason))
