"""The device of an operation, and whether the model itself has put the operation there."""

import os
import re

import tensorflow.compat.v1 as tf

from towers.graph.colocation import beside
from towers.graph.graph_walk import operation_named
from towers.placement.tower_device import chosen_inside, moved, places_inside

_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep


def operation_device(op):
    """The canonical device that an operation asks for.

    An operation that asks for none goes where the runtime has to put it: to the resource that it
    reads; to the operation that it is colocated with; to the operation that takes its resource (a
    TensorArray of an RNN, which TF leaves without a device until the first write); a constant, to
    the operation that takes it.
    """
    decides = _decides_device_of(op, set())
    return '' if decides is None else resolved(decides.device)


def _decides_device_of(op, seen):
    """The operation whose device `op` has: itself, or one that it has to be with; or None."""
    if op.device:
        return op
    if op.name in seen:
        return None
    seen.add(op.name)
    near = [tensor.op for tensor in op.inputs if tensor.dtype == tf.resource]
    near += beside(op)
    near += [taker for tensor in op.outputs if tensor.dtype == tf.resource or op.type == 'Const'
             for taker in tensor.consumers()]
    found = (_decides_device_of(other, seen) for other in near)
    return next((decides for decides in found if decides is not None), None)


def resolved(device):
    """`'/job:localhost/replica:0/task:0/device:CPU:0'` as `'/device:CPU:0'`, '' as ''."""
    if not device:
        return ''
    spec = tf.DeviceSpec.from_string(device)
    if spec.job == 'localhost':
        spec = tf.DeviceSpec(device_type=spec.device_type, device_index=spec.device_index)
    return spec.to_string()


def _forward_of(op):
    """The operation whose gradient `op` is, told by the name of `op`; or None."""
    found = re.search(r'(?:^|/)gradients(?:_\d+)?/(.+)_grad/', op.name)
    return found and operation_named(op.graph, found.group(1))


class ModelsChoices:
    """The operations that the model function itself has put on their device, by `tf.device`."""

    def __init__(self, built):
        self._first = built.towers[0]
        self._places = None

    def include(self, op, tower):
        """Whether the model function has put an operation of a tower on its device."""
        device = operation_device(op)
        decides = _decides_device_of(op, set()) or op
        for other in beside(decides):
            if tower.has(other.name) and operation_device(other) == device:
                return self.include(other, tower)
        if chosen_inside(decides, lambda place: place in self._models_places(op.graph)):
            return True
        forward = _forward_of(decides)
        if forward is not None and operation_device(forward) == device:
            return self.include(forward, tower)
        if decides.type == 'Identity':  # it passes a value on, on the value's device
            source = decides.inputs[0].op
            if (tower.has(source.name) and operation_device(source) == device
                    and self.include(source, tower)):
                return True  # a lookup, which is with its variable, was put nowhere by the model
        original = self._original(decides, tower)
        if original is None:
            return False
        there = operation_device(original)
        return (device in (there, moved(there, self._first.device, tower.device))
                and self.include(original, self._first))

    def _original(self, op, tower):
        """The operation of the first tower that `op` is a copy of, if it is one."""
        if tower is self._first or not tower.has(op.name):
            return None
        return operation_named(
            op.graph, self._first.name_scope + op.name[len(tower.name_scope):])

    def _models_places(self, graph):
        if self._places is None:
            self._places = {place for op in graph.get_operations()
                            if self._first.has(op.name)
                            for place in places_inside(op) if not place[0].startswith(_HERE)}
        return self._places
