"""One read of each variable for a forward pass, from which all of its operations take the value.

A layer and its L2 loss read a weight for themselves, and an operation in a loop reads it anew in
each iteration. Where the weight is on another device than the tower, each of these reads sends the
whole weight. A reference variable, as programs of TensorFlow 1 have them, is read once, before all
loops: here resource variables are, too, if the forward pass does not write them.

    weight -> read -> layer                        weight -> read -> layer
    weight -> read -> L2 loss             ->                      -> L2 loss
    weight -> Enter -> read -> product                            -> Enter -> product

Its test is tests/placement/test_shared_reads.py.
"""

import collections
import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.graph.graph_walk import Recording, names_of, without_names
from towers.graph.variable_access import Writes, variable_op
from towers.placement.tower_device import device_like

Reads = typing.List[tf.Operation]
"""Operations that read one variable, in the order in which they were made."""


def share_reads(operations: typing.List[tf.Operation], owned: typing.Container[str],
                devices: typing.Iterable[str]) -> typing.List[tf.Operation]:
    """Makes the operations of a forward pass that read one variable take the value of one read.

    Left as they are: reads that wait for operations, and reads in branches, which may not run; the
    reads of a variable that the forward pass may write, since they may come before or after the
    write; and the reads of a variable that is on the only device of the towers.

    Args:
      operations: the operations of the forward pass, in order.
      owned: names of the operations that a variable is made of, which no step runs.
      devices: the devices of all towers.

    Returns:
      The operations, with the new ones, which read before loops and lead into loops.
    """
    shared = list(operations)
    for reads in reads_to_share(operations, owned, devices).values():
        first = _read_outside_of_loops(reads, shared)
        for read in reads:
            if read is not first:
                _take_from(first, read, shared)
    return shared


def reads_to_share(operations: typing.List[tf.Operation], owned: typing.Container[str],
                   devices: typing.Iterable[str]) -> typing.Dict[str, Reads]:
    """{name of a variable: its reads in a forward pass that may be one read}; the arguments are
    those of `share_reads`."""
    devices_of_towers = set(devices)
    writes = Writes(tf.get_default_graph())
    written: typing.Set[str] = set()  # names of the variables that the forward pass may write
    found: typing.Dict[str, Reads] = collections.OrderedDict()
    for op in without_names(operations, owned):
        written.update(writes.written_by(op))
        if not can_be_shared(op):
            continue
        variable = variable_of(op)
        is_sent = devices_of_towers != {variable.device}
        if is_sent:
            found.setdefault(variable.name, []).append(op)
    for name in written:
        found.pop(name, None)
    return found


def can_be_shared(op: tf.Operation) -> bool:
    """Whether an operation reads a resource variable for others, without a wait, in no branch."""
    if op.type != 'ReadVariableOp' or not op.outputs[0].consumers():
        return False
    is_of_known_variable = variable_op(op.inputs[0]) is not None
    if not is_of_known_variable:
        return False
    waits = names_of(op.control_inputs) - compat.begins_of_iteration(op)
    if waits:
        return False
    return all(around.IsWhileContext() for around in compat.contexts_around(op))


def variable_of(read: tf.Operation) -> tf.Operation:
    """The operation of the variable that an operation reads, for which `can_be_shared` holds."""
    return typing.cast(tf.Operation, variable_op(read.inputs[0]))


def _read_outside_of_loops(reads: Reads, operations: typing.List[tf.Operation]) -> tf.Operation:
    """The first of some reads of a variable that is in no loop. If all are in loops, a new read.

    In `operations` it is put to the place of the first of the reads, since operations come after
    what they take.
    """
    place = operations.index(reads[0])
    for read in reads:
        if not compat.in_control_flow(read):
            operations.remove(read)  # it is not before `place`
            operations.insert(place, read)
            return read
    first = reads[0]
    # Without a device, as TensorFlow makes reads: it puts them beside the variable.
    with tf.control_dependencies(None), tf.name_scope(None), tf.device(None):
        value = tf.raw_ops.ReadVariableOp(
            resource=variable_of(first).outputs[0], dtype=first.get_attr('dtype'),
            name=first.name + '/before_loop')
    value.set_shape(first.outputs[0].shape)
    operations.insert(place, value.op)
    return value.op


def _take_from(first: tf.Operation, read: tf.Operation,
               operations: typing.List[tf.Operation]) -> None:
    """Makes the operations that take the value of `read` take that of `first`. What leads the value
    into the loops around `read` is put into `operations` before `read`."""
    value = first.outputs[0]
    taker = read.outputs[0].consumers()[0]
    with Recording(tf.get_default_graph()) as made, tf.device(device_like(taker)), \
            tf.name_scope(read.name + '/'):
        value = compat.led_into_loop(value, read)
    position = operations.index(read)
    operations[position:position] = made.operations
    compat.replace_tensor(read.outputs[0], value)
