"""Placeholders that the model function makes, where it is called for each tower.

On one device there is one placeholder, and what is fed to it reaches the whole batch. A program
that keeps it, as an attribute of its model say, has the last call's. So all towers read the last
call's, and its default is the first call's placeholder: whichever of a `placeholder_with_default`
is fed, all towers get the number.

A placeholder of examples is left alone, since a program may feed each tower its own: one whose
shape has dimensions, and no default; or one whose default is computed from a tower's shard. One
without any shape is a `keep_prob` or an `is_training` in most programs: it has to be fed a scalar.
"""

import tensorflow.compat.v1 as tf

from towers import compat
from towers.placement.variable_device import only_device


def tie_placeholders(calls):
    """Makes all towers read what is fed to one call's placeholder.

    Args:
      calls: `ModelCalls`. Calls that made other placeholders than the first are left alone.
    """
    for first in calls[0].operations if len(calls) > 1 else ():
        if not _is_number(first, calls):
            continue
        alike = [calls.twin(first, index) for index in range(len(calls))]
        if None not in alike and all(_is_number(each, calls) for each in alike):
            _tie(alike)


def _is_number(op, calls):
    """Whether an operation is a placeholder of a number for the whole batch: a rate, a switch."""
    if compat.in_control_flow(op):
        return False
    if op.type == 'PlaceholderWithDefault':
        return not calls.is_partial(op)
    return op.type == 'Placeholder' and op.outputs[0].shape.ndims in (None, 0)


def _tie(alike):
    """All that read some placeholders read the last one; each one's default is the one before."""
    last = alike[-1].outputs[0]
    readers = [(reader, position) for op in alike for reader in op.outputs[0].consumers()
               for position, tensor in enumerate(reader.inputs)
               if tensor.name == op.outputs[0].name]
    if alike[-1].type == 'Placeholder' and last.shape.ndims is None:
        last = _scalar(last)
    for reader, position in readers:
        compat.replace_input(reader, position, last)
    for before, op in zip(alike, alike[1:]):
        # Micro-batches wait for each other; what is fed waits for nothing.
        compat.set_control_inputs(op, [])
        if op.type == 'PlaceholderWithDefault':
            compat.replace_input(op, 0, before.outputs[0])


def _scalar(fed):
    """The same tensor, of a placeholder without a shape; fails where it is no scalar."""
    with fed.graph.as_default(), tf.control_dependencies(None), only_device(
            fed.op.device or None), tf.name_scope('one_for_all_towers'):
        check = tf.raw_ops.Assert(condition=tf.equal(tf.rank(fed), 0), data=[
            'towers: %s, which the model function makes without a shape, is one for all towers, '
            'and was fed something else than a scalar. Give it a shape, [None] for examples, and '
            'each tower has its own.' % fed.name])
        with tf.control_dependencies([check]):
            return tf.identity(fed)
