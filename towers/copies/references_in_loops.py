"""Loops of control flow v1 that take a reference variable of another device: refused.

A `RefEnter` leads the memory of a reference variable into a loop. On another device than the
variable's the loop never ends, in a hand-written tower loop either (measured on 1.15.5 and 2.21).

Its test is `tests/roles/test_write_order.py`.
"""

import typing

import tensorflow.compat.v1 as tf

from towers.errors import SharedVariableError
from towers.gradients.tower import Tower
from towers.graph.op_types import VARIABLE_OPS
from towers.placement.tower_device import stages_of


def check_references_in_loops(towers: typing.Sequence[Tower]) -> None:
    """Refuses a loop (v1) of a tower that takes a reference variable of another device."""
    device_of_tower_0 = stages_of(towers[0].device)[0]
    # A `RefEnter` leads the memory of a reference variable into a loop: from the variable, or from
    # a write of it, whose result is the same memory.
    entering = [op for op in tf.get_default_graph().get_operations() if op.type == 'RefEnter']
    for tower in towers:
        for op in tower.own(entering):
            variable = _reference_variable(op)
            # A variable without a device is from before the build. TensorFlow puts it on the device
            # that it prefers, the first GPU or else the CPU, which is taken to be tower 0's. It
            # puts a taker without a device ('') beside the variable.
            devices_beside_variable = {'', variable.device or device_of_tower_0}
            taker_devices = {taker.device for taker in op.outputs[0].consumers()}
            is_taken_elsewhere = not taker_devices <= devices_beside_variable
            if is_taken_elsewhere:
                raise SharedVariableError(
                    'a loop of tower %d (operation %s) takes the reference variable %s, which is '
                    'on another device, or waits for a write of it, and would never end: make it '
                    'with use_resource=True.' % (tower.index, op.name, variable.name))


def _reference_variable(op: tf.Operation) -> tf.Operation:
    """The operation of the reference variable that an operation hands on or writes. (An `Assign`
    gives the variable that it writes as its result.)"""
    while op.type not in VARIABLE_OPS:
        op = op.inputs[0].op
    return op
