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
    """The devices of one tower with stages: the name of the first one, and all names in `stages`.

    It is a string because TensorFlow takes nothing else where a tower's device goes: `tf.device`
    keeps the `str()` of its argument, and `op.device` and `tf.DeviceSpec.from_string` are strings.
    So a tower of one device, which is a plain name, and one of several go the same way.
    """

    stages: typing.Tuple[str, ...]

    def __new__(cls, stages: typing.Sequence[str]) -> 'StagedDevices':
        """Makes it from the names of the devices, one a stage."""
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
    names = [name for device in devices for name in stages_of(device)]
    return tuple(dict.fromkeys(names))


class TowerDevice(str):
    """The name of a tower's device, for `tf.device`, with all its `stages`.

    TensorFlow keeps the `str()` of what `tf.device` gets with each operation that is made in that
    scope, and this one is its own `str()`. So an operation tells that a tower's scope put it there.
    """

    stages: typing.Tuple[str, ...]

    def __new__(cls, device: str,
                stages: typing.Optional[typing.Tuple[str, ...]] = None) -> 'TowerDevice':
        """Makes it from a device, and the devices of all stages; None for those of the device."""
        name = super().__new__(cls, device)
        name.stages = stages or stages_of(device)
        return name

    def __str__(self):
        return self


class StageDevice(TowerDevice):
    """A `TowerDevice` around one stage of the model."""


def follows_tower(op: tf.Operation) -> typing.Optional[bool]:
    """Whether an operation would be on another device in another tower; False for one colocated
    with others. None where it cannot be told: under a device function, or under
    `tf.device(other_op.device)`."""
    for scope in compat.device_scopes(op):
        if isinstance(scope, TowerDevice):
            return True
        if scope == 'None':  # tf.device(None): the scopes around it do not count
            return False
        is_function = '<' in scope  # TensorFlow's way to write one
        is_operations_device = scope == op.device and '/device:' in scope  # as `op.device` spells
        if is_function or is_operations_device:
            return None
        spec = tf.DeviceSpec.from_string(scope)
        if spec.device_type is not None or spec.device_index is not None:
            return False
    return False  # colocated with others: TensorFlow drops the scopes of such an operation


def device_like(op: tf.Operation) -> str:
    """An argument for `tf.device` that puts operations on the device of `op`, in any tower."""
    return TowerDevice(op.device) if follows_tower(op) else op.device


def keep_with_tower(operations: typing.Iterable[tf.Operation], own: typing.Container[str],
                    device: str) -> None:
    """Keeps gradient operations on their tower.

    Some (of a gather) are colocated with a variable on another device, or with what TensorFlow
    moves there: the session would say "Cannot colocate nodes". Colocations with the tower's own
    operations are kept; where these are on several devices, those with the operation's own.

    Args:
      operations: the gradient operations of a tower.
      own: the names of the operations that the tower has made itself.
      device: the tower's.
    """
    for op in operations:
        names = names_beside(op)
        in_tower = [op.graph.get_operation_by_name(name) for name in names if name in own]
        if not in_tower:
            continue
        kept = _leaders_to_keep(op, in_tower, own)
        keeps_all = len(kept) == len(names)
        if keeps_all:
            continue
        if kept:
            colocate(op, [leader.name for leader in kept])
            leader_device = kept[0].device
        else:
            colocate(op, [op.name])  # with itself: with nothing
            leader_device = in_tower[0].device
        compat.set_device(op, leader_device or stages_of(device)[0])


def _leaders_to_keep(op: tf.Operation, in_tower: typing.List[tf.Operation],
                     own: typing.Container[str]) -> typing.List[tf.Operation]:
    """The operations, all on one device, that an operation stays colocated with.

    Args:
      op: a gradient operation.
      in_tower: the operations of the tower that it is colocated with.
      own: as of `keep_with_tower`.
    """
    leaders = [other for other in in_tower if not _reads_resource_outside(other, own)]
    devices = {leader.device for leader in leaders}
    if len(devices) <= 1:
        return leaders
    on_same_device = [leader for leader in leaders if leader.device == op.device]
    return on_same_device or leaders[:1]


def _reads_resource_outside(op: tf.Operation, own: typing.Container[str]) -> bool:
    """Whether an operation takes a resource that is not among a tower's own operations: TensorFlow
    moves it to that resource, whatever device it was made for."""
    return any(resource.name not in own for resource in resources_taken(op))


def resources_taken(op: tf.Operation) -> typing.List[tf.Operation]:
    """The operations of the resources that an operation takes, such as a variable's handle."""
    return [tensor.op for tensor in op.inputs if tensor.dtype == tf.resource]


def current_tower_device(graph: tf.Graph) -> typing.Optional[TowerDevice]:
    """The `TowerDevice` of the innermost such scope that is open; None outside of towers."""
    for scope in compat.current_device_scopes(graph):
        if isinstance(scope, TowerDevice):
            return scope
    return None


def moved(device: str, source: str, target: str) -> str:
    """A device with `target` in place of tower device `source`, stage by stage.

    >>> moved('/job:a/device:CPU:0', '/device:CPU:0', '/device:GPU:1')
    '/job:a/device:GPU:1'
    """
    if device in stages_of(source):
        return stages_of(target)[stages_of(source).index(device)]
    device_spec = tf.DeviceSpec.from_string(device)
    source_spec = tf.DeviceSpec.from_string(source)
    target_spec = tf.DeviceSpec.from_string(target)
    fields = {}
    for field in ('job', 'replica', 'task', 'device_type', 'device_index'):
        value = getattr(device_spec, field)
        wanted = getattr(target_spec, field)
        is_of_source = getattr(source_spec, field) == value
        if is_of_source and wanted is not None:
            fields[field] = wanted
        else:
            fields[field] = value
    return tf.DeviceSpec(**fields).to_string()


def overlaps(device: str, tower_device: str) -> bool:
    """Whether a device may be that of a tower: same type and number."""
    spec = tf.DeviceSpec.from_string(device)
    for stage_device in stages_of(tower_device):
        stage_spec = tf.DeviceSpec.from_string(stage_device)
        if (spec.device_type, spec.device_index) == (
                stage_spec.device_type, stage_spec.device_index):
            return True
    return False


def check_reads_in_loops(operations: typing.Iterable[tf.Operation],
                         devices: typing.Iterable[str]) -> None:
    """Raises `SharedVariableError` for an operation within a loop (v1) that takes a reference
    variable which is not on the `devices`, such as `v.read_value()`. It would wait for ever: a
    reference is never sent to another device."""
    for op in operations:
        hands_reference_on = op.type.startswith('Ref')
        if hands_reference_on:
            continue
        for tensor in op.inputs:
            variable = _reference_entered(tensor)
            if variable is not None and set(devices) != {variable.device}:
                raise SharedVariableError(
                    'operation %s, within a loop, reads the reference variable %s, which is on '
                    'another device: make that with use_resource=True, or in the model function, '
                    'or read it before the loop.' % (op.name, variable.name))


def _reference_entered(tensor: tf.Tensor) -> typing.Optional[tf.Operation]:
    """The operation of the reference variable that comes into a loop (v1) as a tensor; None for
    another tensor."""
    entered = behind(tensor, ('RefIdentity', 'RefMerge', 'RefSwitch'))
    if entered.op.type != 'RefEnter':
        return None
    return variable_op(entered)


def operation_device(op: tf.Operation) -> str:
    """The canonical device that an operation asks for; '' for none.

    An operation that asks for none is looked for where the runtime has to put it: with the resource
    that it reads, with what it is colocated with, or with what takes it.
    """
    stack = [op]
    seen = set()
    while stack:  # depth first
        current = stack.pop()
        if current.device:
            return resolved(current.device)
        if current.name not in seen:
            seen.add(current.name)
            stack.extend(reversed(_placed_together(current)))
    return ''


def _placed_together(op: tf.Operation) -> typing.List[tf.Operation]:
    """The operations on whose device the runtime puts an operation, or which it puts on that."""
    takers: typing.List[tf.Operation] = []
    for tensor in op.outputs:
        if tensor.dtype == tf.resource or op.type == 'Const':
            takers.extend(tensor.consumers())
    return resources_taken(op) + beside(op) + takers


def resolved(device: str) -> str:
    """`'/job:localhost/replica:0/task:0/device:CPU:0'` as `'/device:CPU:0'`, '' as ''."""
    if not device:
        return ''
    spec = tf.DeviceSpec.from_string(device)
    if spec.job == 'localhost':
        spec = tf.DeviceSpec(device_type=spec.device_type, device_index=spec.device_index)
    return spec.to_string()


def was_chosen(op: tf.Operation, tower: typing.Any, first: typing.Any) -> bool:
    """Whether the program's own `tf.device`, or a colocation, has put an operation of a tower where
    it is. The operation of the `first` tower says it, of which the other towers have copies."""
    if tower is first:
        original = op
    else:
        name_in_tower = op.name[len(tower.name_scope):]
        original = operation_named(op.graph, first.name_scope + name_in_tower)
    if original is None or follows_tower(original):
        return False
    original_device = operation_device(original)
    return operation_device(op) in (
        original_device, moved(original_device, first.device, tower.device))
