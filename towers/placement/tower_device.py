"""The devices of towers, and the operations that follow a tower to its device.

A model that says `tf.device('/cpu:0')` around its embedding wants it there in every tower.
TensorFlow keeps with each operation the device scopes that it was made under, and the scope of a
tower is a `TowerDevice`.
"""

import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import SharedVariableError
from towers.graph.edit import beside, colocate, names_beside
from towers.graph.graph_walk import behind, operation_named
from towers.graph.variable_access import variable_op


class StagedDevices(str):
    """The devices of one tower: the name of the first one, and all names in `stages`."""

    def __new__(cls, stages: typing.Sequence[str]):
        devices = super().__new__(cls, stages[0])
        devices.stages = tuple(str(name) for name in stages)
        return devices

    def __repr__(self):
        return repr('+'.join(self.stages))


def stages_of(device: str) -> typing.Tuple[str, ...]:
    """The devices of a tower, one a stage, as a tuple; one device for a tower without stages."""
    return getattr(device, 'stages', (str(device),))


def all_devices(devices: typing.Iterable[str]) -> typing.Tuple[str, ...]:
    """The devices of all towers, each once, in order."""
    return tuple(dict.fromkeys(name for device in devices for name in stages_of(device)))


class TowerDevice(str):
    """The name of a tower's device, for `tf.device`, with all its `stages`."""

    def __new__(cls, device: str, stages: typing.Optional[typing.Tuple[str, ...]] = None):
        name = super().__new__(cls, device)
        name.stages = stages or stages_of(device)
        return name

    def __str__(self):
        return self  # what TensorFlow keeps of the argument of `tf.device` is its str()


class StageDevice(TowerDevice):
    """A `TowerDevice` around one stage of the model."""


def follows_tower(op: tf.Operation) -> typing.Optional[bool]:
    """Whether an operation would be on another device in another tower; False for one colocated
    with others. None where it cannot be told: under a device function, or under
    `tf.device(other_op.device)`."""
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


def device_like(op: tf.Operation) -> str:
    """An argument for `tf.device` that puts operations on the device of `op`, in any tower."""
    return TowerDevice(op.device) if follows_tower(op) else op.device


def keep_with_tower(operations, own: typing.Container[str], device: str) -> None:
    """Keeps gradient operations on their tower.

    Some (of a gather) are colocated with a variable on another device, or with what TensorFlow
    moves there: the session would say "Cannot colocate nodes". Colocations with the tower's `own`
    operations are kept; where these are on several devices, those with the operation's own.
    """
    for op in operations:
        names = names_beside(op)
        inside = [op.graph.get_operation_by_name(name) for name in names if name in own]
        # TensorFlow moves what reads a resource to that, whatever device it was made for.
        kept = [other for other in inside if not any(
            tensor.dtype == tf.resource and tensor.op.name not in own for tensor in other.inputs)]
        if len({other.device for other in kept}) > 1:
            kept = [other for other in kept if other.device == op.device] or kept[:1]
        if inside and len(kept) < len(names):
            colocate(op, [other.name for other in kept] or [op.name])
            compat.set_device(op, (kept or inside)[0].device or stages_of(device)[0])


def current_tower_device(graph: tf.Graph) -> typing.Optional[TowerDevice]:
    """The `TowerDevice` of the innermost such scope that is open; None outside of towers."""
    return next((scope for scope in compat.current_device_scopes(graph)
                 if isinstance(scope, TowerDevice)), None)


def moved(device: str, source: str, target: str) -> str:
    """A device with `target` in place of tower device `source`, stage by stage.

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


def overlaps(device: str, tower_device: str) -> bool:
    """Whether a device may be that of a tower: same type and number."""
    one = tf.DeviceSpec.from_string(device)
    return any((one.device_type, one.device_index) == (other.device_type, other.device_index)
               for other in map(tf.DeviceSpec.from_string, stages_of(tower_device)))


def check_reads_in_loops(operations, devices):
    """Refuses operations within a loop (v1) that take a reference variable of another device, such
    as `v.read_value()`, which would wait for ever: a reference is never sent to a device."""
    for op in operations:
        for tensor in op.inputs if not op.type.startswith('Ref') else ():
            tensor = behind(tensor, ('RefIdentity', 'RefMerge', 'RefSwitch'))
            variable = variable_op(tensor) if tensor.op.type == 'RefEnter' else None
            if variable is not None and set(devices) != {variable.device}:
                raise SharedVariableError(
                    'operation %s, within a loop, reads the reference variable %s, which is on '
                    'another device: make that with use_resource=True, or in the model function, '
                    'or read it before the loop.' % (op.name, variable.name))


def operation_device(op: tf.Operation) -> str:
    """The canonical device that an operation asks for; of one that asks for none, where the runtime
    has to put it: with the resource that it reads, what it is colocated with, or what takes it."""
    stack, seen = [op], set()
    while stack:  # depth first
        op = stack.pop()
        if op.device:
            return resolved(op.device)
        if op.name not in seen:
            seen.add(op.name)
            near = [tensor.op for tensor in op.inputs if tensor.dtype == tf.resource] + beside(op)
            near += [taker for tensor in op.outputs if tensor.dtype == tf.resource
                     or op.type == 'Const' for taker in tensor.consumers()]
            stack.extend(reversed(near))
    return ''


def resolved(device: str) -> str:
    """`'/job:localhost/replica:0/task:0/device:CPU:0'` as `'/device:CPU:0'`, '' as ''."""
    if not device:
        return ''
    spec = tf.DeviceSpec.from_string(device)
    if spec.job == 'localhost':
        spec = tf.DeviceSpec(device_type=spec.device_type, device_index=spec.device_index)
    return spec.to_string()


def was_chosen(op, tower, first):
    """Whether the program's own `tf.device`, or a colocation, has put a tower's operation there:
    that of tower `first`, of which others are copies."""
    original = op if tower is first else operation_named(
        op.graph, first.name_scope + op.name[len(tower.name_scope):])
    return original is not None and follows_tower(original) is not True and (
        operation_device(op) in (
            operation_device(original),
            moved(operation_device(original), first.device, tower.device)))
