"""The devices of towers, and the operations that follow a tower to its device.

A model that says `tf.device('/cpu:0')` around its embedding wants it there in every tower.
TensorFlow keeps with each operation the device scopes that it was made under, and the scope of a
tower is a `TowerDevice`.
"""

import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import SharedVariableError
from towers.graph.edit import colocate, colocated_names, colocated_operations
from towers.graph.graph_walk import operation_named, source_through
from towers.graph.variable_access import variable_op


class StagedDevices(str):
    """The devices of one tower with stages: the string is the name of the first device, and
    `stages` has the names of all, one a stage.

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
    """Tuple of the devices of a tower, one a stage; it has one device for a tower without stages.

    Args:
      device: the device of the tower, a name or a `StagedDevices`.
    """
    return getattr(device, 'stages', (str(device),))


def all_devices(devices: typing.Iterable[str]) -> typing.Tuple[str, ...]:
    """Tuple of the devices of all towers and their stages, each one once, in order."""
    names = [name for device in devices for name in stages_of(device)]
    return tuple(dict.fromkeys(names))


class TowerDevice(str):
    """A tower's device as `tf.device` takes it, so that an operation tells whether the tower's
    scope, or one of the program's own, has put it where it is.

    TensorFlow keeps with each operation the `str()` of the scopes that it was made in. The `str()`
    of this object is the object itself, so it is found again among an operation's scopes.

    Attributes:
      stages: the devices of all stages of the tower.
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
    """A `TowerDevice` of one stage of the model: the device of that stage, in `towers.stage`."""


def follows_tower(op: tf.Operation) -> typing.Optional[bool]:
    """Whether the tower's scope, and not the program, has put an operation on its device, so that
    it is on another device in another tower.

    Returns:
      True or False; False for an operation that is colocated with others. None where it cannot be
      told: under a device function, or under `tf.device(other_op.device)`.
    """
    # The innermost scope that names a device has put the operation there.
    for scope in compat.device_scopes(op):  # from the inside to the outside
        if isinstance(scope, TowerDevice):
            return True
        if scope == 'None':  # tf.device(None): the scopes around it do not count
            return False
        if '<' in scope:  # of a device function there is only a text such as '<function …>'
            return None
        # A program spells '/cpu:0'. The full spelling '/device:CPU:0' comes from another
        # operation's `op.device`, and that operation may follow the tower or not.
        is_from_another_operation = scope == op.device and '/device:' in scope
        if is_from_another_operation:
            return None
        spec = tf.DeviceSpec.from_string(scope)
        names_device = spec.device_type is not None or spec.device_index is not None
        if names_device:  # a job alone leaves the device to the scopes around
            return False
    # It has no scopes: TensorFlow drops those of an operation that is colocated with others.
    return False


def device_like(op: tf.Operation) -> str:
    """An argument for `tf.device` that puts new operations on the device of `op`; if `op` follows
    its tower, copies of these follow theirs, too."""
    return TowerDevice(op.device) if follows_tower(op) else op.device


def keep_with_tower(operations: typing.Iterable[tf.Operation],
                    tower_names: typing.Container[str], device: str) -> None:
    """Ends colocations that would take gradient operations away from their tower.

    TensorFlow colocates some gradients, such as those of a gather, with a variable on another
    device, and at the same time with operations of the tower: the session would say "Cannot
    colocate nodes". Then only colocations with operations of the tower stay, and of these only such
    as are on one device.

    Args:
      operations: the gradient operations of a tower.
      tower_names: the names of the operations that the tower has made itself.
      device: the tower's device.
    """
    for op in operations:
        leader_names = colocated_names(op)
        tower_leaders = [op.graph.get_operation_by_name(name) for name in leader_names
                         if name in tower_names]
        if not tower_leaders:
            continue  # colocated with nothing, or with a variable alone: no conflict
        kept_leaders = _leaders_to_keep(op, tower_leaders, tower_names)
        keeps_all = len(kept_leaders) == len(leader_names)
        if keeps_all:
            continue
        if kept_leaders:
            colocate(op, [leader.name for leader in kept_leaders])
            leader_device = kept_leaders[0].device
        else:  # TensorFlow would move each of the leaders to a variable
            colocate(op, [op.name])  # with itself alone, so that its own device decides
            leader_device = tower_leaders[0].device
        compat.set_device(op, leader_device or stages_of(device)[0])


def _leaders_to_keep(op: tf.Operation, tower_leaders: typing.List[tf.Operation],
                     tower_names: typing.Container[str]) -> typing.List[tf.Operation]:
    """List of the operations, all on one device, that a gradient operation stays colocated with.

    Args:
      op: the gradient operation.
      tower_leaders: the operations of the tower that it is colocated with.
      tower_names: the names of all operations that the tower has made itself.
    """
    # TensorFlow moves an operation that takes a variable to that variable, maybe out of the tower.
    leaders = [leader for leader in tower_leaders
               if not _takes_resource_outside(leader, tower_names)]
    devices = {leader.device for leader in leaders}
    if len(devices) <= 1:
        return leaders
    # The runtime cannot put the operation beside operations on several devices.
    on_device_of_op = [leader for leader in leaders if leader.device == op.device]
    return on_device_of_op or leaders[:1]


def _takes_resource_outside(op: tf.Operation, tower_names: typing.Container[str]) -> bool:
    """Whether an operation takes a resource, such as a variable, from outside of its tower.

    Args:
      op: the operation.
      tower_names: the names of all operations that the tower has made itself.
    """
    return any(resource.name not in tower_names for resource in resources_taken(op))


def resources_taken(op: tf.Operation) -> typing.List[tf.Operation]:
    """List of the operations of the resources that an operation takes, such as `VarHandleOp`s."""
    return [tensor.op for tensor in op.inputs if tensor.dtype == tf.resource]


def current_tower_device(graph: tf.Graph) -> typing.Optional[TowerDevice]:
    """The `TowerDevice` of the tower or stage whose scope is open now; None outside of towers."""
    for scope in compat.current_device_scopes(graph):
        if isinstance(scope, TowerDevice):
            return scope
    return None


def device_in_other_tower(device: str, source: str, target: str) -> str:
    """The device in the tower `target` that corresponds to a device in the tower `source`.

    That is the device of the same stage. A device of no stage keeps the fields of its name, such as
    its job, in which it differs from `source`:

    >>> device_in_other_tower('/job:a/device:CPU:0', '/device:CPU:0', '/device:GPU:1')
    '/job:a/device:GPU:1'

    Args:
      device: the device of an operation of a tower.
      source: the device of that tower.
      target: the device of the other tower.
    """
    if device in stages_of(source):
        stage = stages_of(source).index(device)
        return stages_of(target)[stage]
    device_spec = tf.DeviceSpec.from_string(device)
    source_spec = tf.DeviceSpec.from_string(source)
    target_spec = tf.DeviceSpec.from_string(target)
    fields = {}
    for field in ('job', 'replica', 'task', 'device_type', 'device_index'):
        value = getattr(device_spec, field)
        target_value = getattr(target_spec, field)
        is_as_in_source = value == getattr(source_spec, field)
        if is_as_in_source and target_value is not None:  # None: the target's name leaves it out
            fields[field] = target_value
        else:
            fields[field] = value
    return tf.DeviceSpec(**fields).to_string()


def may_be_of_tower(device: str, tower_device: str) -> bool:
    """Whether a device may be that of a tower, or of one of its stages: it has the same type and
    index, whatever its job."""
    spec = tf.DeviceSpec.from_string(device)
    for stage_device in stages_of(tower_device):
        stage_spec = tf.DeviceSpec.from_string(stage_device)
        has_type = spec.device_type == stage_spec.device_type
        if has_type and spec.device_index == stage_spec.device_index:
            return True
    return False


def check_reads_in_loops(operations: typing.Iterable[tf.Operation],
                         devices: typing.Iterable[str]) -> None:
    """Refuses operations within a loop (v1) that take a reference variable of another device, such
    as `v.read_value()`: they would wait for ever, since a reference is never sent to a device.

    Args:
      operations: the operations of a tower.
      devices: the devices on which the operations, or their copies, will be.

    Raises:
      SharedVariableError: such an operation.
    """
    tower_devices = set(devices)
    for op in operations:
        only_hands_reference_on = op.type.startswith('Ref')  # `RefSwitch`, `RefIdentity`
        if only_hands_reference_on:
            continue
        for tensor in op.inputs:
            variable = _reference_entered(tensor)
            if variable is None:
                continue
            are_all_beside_variable = tower_devices == {variable.device}
            if not are_all_beside_variable:
                raise SharedVariableError(
                    'operation %s, within a loop, reads the reference variable %s, which is on '
                    'another device: make that with use_resource=True, or in the model function, '
                    'or read it before the loop.' % (op.name, variable.name))


def _reference_entered(tensor: tf.Tensor) -> typing.Optional[tf.Operation]:
    """The operation of the reference variable whose memory a tensor in a loop (v1) stands for; None
    for a tensor that is no reference, or is outside of loops."""
    entered = source_through(tensor, ('RefIdentity', 'RefMerge', 'RefSwitch'))
    if entered.op.type != 'RefEnter':  # by which a reference goes into a loop
        return None
    return variable_op(entered)


def operation_device(op: tf.Operation) -> str:
    """The canonical name of the device that an operation will be on; '' if that is open.

    An operation that asks for no device goes where the runtime has to put it: to the resource that
    it reads, to what it is colocated with, or, of a resource or a constant, to what takes it.
    """
    stack = [op]
    seen = set()
    while stack:  # depth first
        current = stack.pop()
        if current.device:
            return without_localhost(current.device)
        if current.name not in seen:
            seen.add(current.name)
            stack.extend(reversed(_placed_together(current)))
    return ''


def _placed_together(op: tf.Operation) -> typing.List[tf.Operation]:
    """List of the operations that the runtime puts on the same device as an operation: the
    resources that it takes, what it is colocated with, and what takes its own resource; beside a
    constant, too, what takes it."""
    takers: typing.List[tf.Operation] = []
    for tensor in op.outputs:
        if tensor.dtype == tf.resource or op.type == 'Const':
            takers.extend(tensor.consumers())
    return resources_taken(op) + colocated_operations(op) + takers


def without_localhost(device: str) -> str:
    """A device name without the job of a program without a cluster: `'/device:CPU:0'` for
    `'/job:localhost/replica:0/task:0/device:CPU:0'`; '' for ''."""
    if not device:
        return ''
    spec = tf.DeviceSpec.from_string(device)
    if spec.job == 'localhost':
        spec = tf.DeviceSpec(device_type=spec.device_type, device_index=spec.device_index)
    return spec.to_string()


def was_placed_by_program(op: tf.Operation, tower: typing.Any, first: typing.Any) -> bool:
    """Whether the program's own `tf.device`, or a colocation, has put an operation of a tower where
    it is; the tower's scope has not. An audit takes the device as intended then.

    Args:
      op: the operation.
      tower: `Tower` that has it.
      first: the first `Tower`. Only in it do operations have the device scopes that the program has
        made them in; the copies in other towers have none.
    """
    if tower is first:
        original = op
    else:
        name_in_tower = op.name[len(tower.name_scope):]
        original = operation_named(op.graph, first.name_scope + name_in_tower)
    if original is None or follows_tower(original):
        return False
    # The copy is where the program wants it in two cases: on the original's device, which the
    # program has named; or on the one that corresponds to it in this tower, where the operation is
    # that the copy is colocated with.
    original_device = operation_device(original)
    corresponding_device = device_in_other_tower(original_device, first.device, tower.device)
    return operation_device(op) in (original_device, corresponding_device)
