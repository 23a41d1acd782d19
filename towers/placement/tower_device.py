"""Tells operations that the tower put on its device from those that the model put there itself.

A model that says `tf.device('/cpu:0')` around its embedding wants it there in every tower. In the
finished graph of a first tower on `/cpu:0`, operations of the embedding look like all others. But
TensorFlow keeps with each operation the device scopes that it was made under, and the scope of a
tower is a `TowerDevice`.
"""

import tensorflow.compat.v1 as tf

from towers import compat
from towers.graph.colocation import colocate, group_of, names_beside
from towers.graph.variable_access import variable_op


class StagedDevices(str):
    """The devices of one tower: a string with the first device's name, and all names in `stages`.

    Attributes:
      stages: tuple of the names, stage by stage.
    """

    def __new__(cls, stages):
        devices = super().__new__(cls, stages[0])
        devices.stages = tuple(str(name) for name in stages)
        return devices

    def __repr__(self):
        return repr('+'.join(self.stages))


def stages_of(device):
    """The devices of a tower, one a stage, as a tuple; one device for a tower without stages."""
    return getattr(device, 'stages', (str(device),))


def all_devices(devices):
    """The devices of all towers, each once, in order."""
    return tuple(dict.fromkeys(name for device in devices for name in stages_of(device)))


class TowerDevice(str):
    """The name of a tower's device, for `tf.device`; a string like any other but for its type.

    Attributes:
      stages: as of `StagedDevices`.
    """

    def __new__(cls, device, stages=None):
        name = super().__new__(cls, device)
        name.stages = stages or stages_of(device)
        return name

    def __str__(self):
        return self  # what TensorFlow keeps of the argument of `tf.device` is its str()


class StageDevice(TowerDevice):
    """A `TowerDevice` around one stage of the model."""


class BackwardDevice(TowerDevice):
    """A `TowerDevice` around `compute_gradients`: a `tf.device` in it is not the model's."""


def chosen_inside(op, is_models_place=lambda place: False):
    """Whether a `tf.device` of the model's own, inside the tower's, decides about an op's device.

    False for operations that are colocated with others, and so have the device of those.

    Args:
      op: an operation of a tower that is no copy.
      is_models_place: called with the place `(file, line)` of a `with tf.device` around an
        operation of the backward pass; returns whether it is the model's. The scope of an
        optimizer is not; but a model function that runs again for its gradient (`recompute_grad`)
        passes the same places as in the forward pass.
    """
    places, tower = _inside(op)
    return bool(places) and (
        not isinstance(tower, BackwardDevice) or all(map(is_models_place, places)))


def places_inside(op):
    """The places `(file, line)` of the model's own `tf.device`s around an op of the forward pass.
    """
    places, tower = _inside(op)
    return [] if tower is None or isinstance(tower, BackwardDevice) else places


def _inside(op):
    """`(places, tower)`: the places of all `tf.device`s in the innermost `TowerDevice`; and that.
    """
    places = []
    for scope, place in zip(compat.device_scopes(op), compat.device_scope_places(op)):
        if isinstance(scope, TowerDevice):
            return places, scope
        places.append(place)
    return places, None


def follows_tower(op):
    """Whether an operation would be on another device in another tower.

    False for operations that are colocated with others, and so have the device of those.

    Returns:
      True; False; or None where it cannot be told: under a device function, or under
      `tf.device(other_op.device)`.
    """
    for scope in compat.device_scopes(op):
        if isinstance(scope, TowerDevice):
            return True
        if scope == 'None':
            return False
        if '<' in scope:  # TensorFlow's way to write a function
            return None
        if scope == op.device and '/device:' in scope:  # as `op.device` spells it
            return None
        spec = tf.DeviceSpec.from_string(scope)
        if spec.device_type is not None or spec.device_index is not None:
            return False
    return False


def device_like(op):
    """An argument for `tf.device` that puts operations on the device of `op`, in any tower."""
    return TowerDevice(op.device) if follows_tower(op) else op.device


def keep_with_tower(operations, own, device):
    """Keeps gradient operations that are colocated with a variable, too, on their tower.

    `colocate_gradients_with_ops` puts a gradient operation with its forward operation, and some
    gradients (of a gather) are also colocated with the variable, which may be on another device:
    TensorFlow then says "Cannot colocate nodes" when the session runs.

    Args:
      operations: the operations of a tower's backward pass.
      own: names of the tower's operations. Colocations with them are kept; where these are on
        several devices, only the colocations with operations on the operation's own device.
      device: the tower's device. An operation that has none by these rules, as the sum over the
        turns of a loop that reads a resource variable, is on its first stage.
    """
    for op in operations:
        names = names_beside(op)
        inside = [name for name in names if name in own]
        if not inside:
            continue
        kept = [name for name in inside if not _reads_resource_outside(op.graph, name, own)]
        if len({_device_of(op, name) for name in kept}) > 1:
            kept = [name for name in kept if _device_of(op, name) == op.device] or kept[:1]
        if len(kept) < len(names):
            colocate(op, kept or [op.name])
            compat.set_device(op, _device_of(op, (kept or inside)[0]) or stages_of(device)[0])


def keep_off_resources(operations):
    """Frees gradient operations that are colocated with the gather of a resource variable.

    The gradient of `tf.gather(x, …)` takes the shape of `x` where `x` is. Where that is the gather
    of a resource variable itself, TensorFlow moves the gather to the variable, and says "Cannot
    colocate nodes … GatherV2_grad/Shape" when the session runs.

    Args:
      operations: the operations of a tower's backward pass.
    """
    for op in operations:
        names = group_of(op)
        kept = [name for name in names if name == op.name or (
            op.graph.get_operation_by_name(name).type != 'ResourceGather')]
        if len(kept) < len(names) and not any(tensor.dtype == tf.resource for tensor in op.inputs):
            there = op.device
            colocate(op, kept or [op.name])
            compat.set_device(op, there)


def _reads_resource_outside(graph, name, own):
    """Whether TensorFlow moves an operation to a variable, whatever device it was made for."""
    return any(tensor.dtype == tf.resource and tensor.op.name not in own
               for tensor in graph.get_operation_by_name(name).inputs)


def _device_of(op, name):
    return op.graph.get_operation_by_name(name).device


def current_tower_device(graph):
    """The `TowerDevice` of the innermost such scope that is open; None outside of towers."""
    return next((scope for scope in compat.current_device_scopes(graph)
                 if isinstance(scope, TowerDevice)), None)


def moved(device, source, target):
    """A device in which the part of tower device `source` is exchanged for that of `target`.

    In towers with several devices, the device of a stage is exchanged for the same stage's.

    >>> moved('/job:a/device:CPU:0', '/device:CPU:0', '/device:GPU:1')
    '/job:a/device:GPU:1'
    """
    if device in stages_of(source):
        return stages_of(target)[stages_of(source).index(device)]
    have, old, new = map(tf.DeviceSpec.from_string, (device, source, target))
    return tf.DeviceSpec(**{
        field: getattr(new, field) if (
            getattr(old, field) == getattr(have, field) and getattr(new, field) is not None)
        else getattr(have, field)
        for field in ('job', 'replica', 'task', 'device_type', 'device_index')}).to_string()


def overlaps(device, tower_device):
    """Whether a device may be that of a tower: same type and number."""
    one = tf.DeviceSpec.from_string(device)
    return any((one.device_type, one.device_index) == (other.device_type, other.device_index)
               for other in map(tf.DeviceSpec.from_string, stages_of(tower_device)))


def keep_reads_in_loops(operations):
    """Puts operations within a loop that take a reference variable itself on its device.

    `v.read_value()` in a loop of control flow v1 takes the variable from a `RefEnter`. On another
    device than the variable's it would wait for ever: in a loop a value is sent from device to
    device, a reference is not. TensorFlow lets operations of the backward pass take the variable
    instead of the value that was read, so these are moved, too.

    Args:
      operations: the operations that a model function made, or those of its gradients.
    """
    moved_to = {}
    for op in operations:
        names = names_beside(op)
        for tensor in op.inputs if not names else ():
            if tensor.dtype != tensor.dtype.base_dtype and _comes_from_loop(tensor):
                variable = variable_op(tensor)
                if variable is not None:
                    colocate(op, [variable.name])
                    moved_to[op.name] = variable.device
        for name in names:
            if name in moved_to:  # which TensorFlow has put with one of those
                moved_to[op.name] = moved_to[name]
        if op.name in moved_to:
            compat.set_device(op, moved_to[op.name])


def _comes_from_loop(tensor):
    seen = set()
    while tensor.op.inputs and tensor.op.name not in seen:
        if tensor.op.type == 'RefEnter':
            return True
        seen.add(tensor.op.name)
        tensor = tensor.op.inputs[0]
    return False
