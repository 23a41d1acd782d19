"""The devices of TensorArrays and stacks, in which loops of control flow v1 keep their values.

They have to be on the device of the operations that use them: else the session says "Cannot
colocate nodes", or "Cannot place the graph because a reference or resource edge connects …".
"""

import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.graph.edit import colocate, colocated_operations, is_colocated
from towers.graph.graph_walk import (
    devices_of,
    of_types,
    producers_of,
    reached,
    takers_of_results,
)
from towers.graph.op_types import HAND_ON
from towers.placement.tower_device import resources_taken, stages_of

# Types of operations that write into a TensorArray, that read from it, and that use a stack.
_FILLS = frozenset(['TensorArrayScatterV3', 'TensorArraySplitV3', 'TensorArrayWriteV3'])
_READS = frozenset(['TensorArrayReadV3', 'TensorArrayGatherV3', 'TensorArrayConcatV3'])
_PUSHES_AND_POPS = frozenset(['StackPushV2', 'StackPopV2'])


def keep_arrays_with_readers(operations: typing.Iterable[tf.Operation], device: str) -> None:
    """Puts operations that fill a TensorArray before a loop (v1), such as those of `tf.map_fn`, on
    the device of the loop, which reads it. TensorFlow colocates these operations with the first
    value that is written, and this value may be on another stage than the loop.

    Args:
      operations: the operations of a tower.
      device: the device of the tower.
    """
    stages = stages_of(device)
    for array in of_types(operations, ('TensorArrayV3',)):
        _keep_array_with_readers(array, stages)


def _keep_array_with_readers(array: tf.Operation, stages: typing.Tuple[str, ...]) -> None:
    """Puts the operations that fill one TensorArray before a loop on the device of the operations
    that read it.

    Args:
      array: the operation that makes the TensorArray.
      stages: the devices of the tower's stages. If the readers are not all on one of these, the
        program has placed the readers, and the operations that fill the array stay where they are.
    """
    takers = _takers_of(array.outputs[0])
    readers = _readers_on_own_device(takers)
    device_of_loop = _common_device(readers)
    if device_of_loop not in stages:  # nor where it is None
        return
    for writer in _colocated_writers(array, takers):
        # Colocated with a reader, so that in another tower the copies of both are colocated.
        colocate(writer, [readers[0]])
        compat.set_device(writer, device_of_loop)


def _readers_on_own_device(takers: typing.Iterable[tf.Operation]) -> typing.List[tf.Operation]:
    """List of the operations that read a TensorArray, among the operations that take it. Readers
    that are colocated with other operations are left out: their own device does not say where they
    run."""
    return [reader for reader in of_types(takers, _READS) if not is_colocated(reader)]


def _colocated_writers(array: tf.Operation,
                       takers: typing.Iterable[tf.Operation]) -> typing.List[tf.Operation]:
    """List of the operations that write into a TensorArray before a loop, and that TensorFlow has
    colocated with the first value.

    Args:
      array: the operation that makes the TensorArray.
      takers: the operations that take it.
    """
    writers = []
    for writer in of_types(takers, _FILLS):
        # Within the loop an operation takes the array from an `Enter`, and not directly.
        is_before_loop = writer.inputs[0].op is array
        if is_before_loop and is_colocated(writer):
            writers.append(writer)
    return writers


def keep_stacks_with_loops(operations: typing.Iterable[tf.Operation]) -> None:
    """Puts the stacks on which loops (v1) keep values for the backward pass on the device of the
    operations that push and pop.

    TensorFlow colocates a stack, and its size, with the value that the stack keeps: with a
    variable, if the value is the variable's.
    """
    for stack in of_types(operations, ('StackV2',)):
        _keep_stack_with_loop(stack)


def _keep_stack_with_loop(stack: tf.Operation) -> None:
    """Puts one stack, the constant of its size, and the operations that hand it into the loop on
    the device of the operations that push and pop. Only operations that TensorFlow has colocated
    with a variable are moved, and this colocation ends; the others stay where they are."""
    takers = _takers_of(stack.outputs[0])
    device = _common_device(of_types(takers, _PUSHES_AND_POPS))
    if not device:  # None: pushes and pops ask for several devices; '': they ask for none
        return
    sizes = of_types(producers_of(stack), ('Const',))
    for op in [stack] + sizes + of_types(takers, HAND_ON):
        if _is_moved_to_variable(op):
            compat.set_device(op, device)
            colocate(op, [op])  # with itself alone, so that its own device decides


def _is_moved_to_variable(op: tf.Operation) -> bool:
    """Whether TensorFlow would move an operation to the device of a variable, or of another
    resource: it is colocated with an operation that takes the resource, such as a read."""
    return any(map(resources_taken, colocated_operations(op)))


def _common_device(operations: typing.Iterable[tf.Operation]) -> typing.Optional[str]:
    """The device that all these operations ask for; None if they ask for different
    devices, or if there are no operations."""
    devices = devices_of(operations)
    if len(devices) != 1:
        return None
    return devices.pop()


def _takers_of(handle: tf.Tensor) -> typing.List[tf.Operation]:
    """List of the operations that take an array or a stack, also within loops and branches. In it
    are also the operations that hand the array or stack on into these, such as an `Enter`.

    Args:
      handle: the tensor that stands for the array or the stack.
    """
    def takers_through(op: tf.Operation) -> typing.List[tf.Operation]:
        """The operations that take the array or stack from an operation that hands it on."""
        if op.type in HAND_ON:
            return takers_of_results([op])
        return []
    return list(reached(handle.consumers(), takers_through).values())
