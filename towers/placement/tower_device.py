"""The devices of towers, and the operations that follow a tower to its device.

A model that says `tf.device('/cpu:0')` around its embedding wants it there in every tower.
TensorFlow keeps with each operation the device scopes that it was made under, and the scope of a
tower is a `TowerDevice`.
"""

import itertools
import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import SharedVariableError
from towers.graph.edit import colocate, colocated_operations
from towers.graph.graph_walk import (
    devices_of,
    operation_named,
    source_through,
    with_names,
    without_names,
)
from towers.graph.variable_access import variable_op


class StagedDevices(str):
    """The devices of one tower with stages: the string is the name of the first device, and
    `stages` has the names of all, one a stage.

    It is a string because TensorFlow takes nothing else where a tower's device goes: `tf.device`
    keeps the `str()` of its argument, and `op.device` and `tf.DeviceSpec.from_string` are strings.
    So the code need not tell a tower of one device, which is a plain name, from a tower of several.
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


def stages_of_all(devices: typing.Iterable[str]) -> typing.List[str]:
    """List of the devices of all stages of all towers, in order; a device that several towers or
    stages share is in the list several times."""
    return list(itertools.chain.from_iterable(map(stages_of, devices)))


def all_devices(devices: typing.Iterable[str]) -> typing.Tuple[str, ...]:
    """Tuple of the devices of all towers and their stages, each once, in order."""
    return tuple(dict.fromkeys(stages_of_all(devices)))


class TowerDevice(str):
    """A tower's device, as an argument of `tf.device`. By it an operation shows whether the scope
    of its tower, or a scope of the program, has put the operation on its device.

    TensorFlow keeps with each operation the `str()` of the scopes that it was made in. The `str()`
    of this object is the object itself, so the object is found again among an operation's scopes.

    Attributes:
      stages: the devices of all stages of the tower.
    """

    stages: typing.Tuple[str, ...]

    def __new__(cls, device: str,
                stages: typing.Optional[typing.Tuple[str, ...]] = None) -> 'TowerDevice':
        """Makes it from a device and the devices of all stages; None for `stages_of(device)`."""
        if stages is None:
            stages = stages_of(device)
        name = super().__new__(cls, device)
        name.stages = stages
        return name

    def __str__(self):
        return self


class StageDevice(TowerDevice):
    """A `TowerDevice` of one stage of the model: the device of that stage, in `towers.stage`."""


def follows_tower(op: tf.Operation) -> bool:
    """Whether the scope of its tower, and not the program, has put an operation on its device, so
    that the same operation of another tower is on another device.

    It is also False where the operation's scopes do not show the tower's scope: under a device
    function, under `tf.device(other_op.device)`, and for an operation that is colocated.
    """
    # TensorFlow drops the scopes of an operation that is colocated with others: it has none.
    for scope in compat.device_scopes(op):  # from the inside to the outside
        if isinstance(scope, TowerDevice):
            return True
        if _may_give_device(scope):
            return False
    return False


def _may_give_device(scope: str) -> bool:
    """Whether a `tf.device` scope of the program may give operations their device, so that the
    scopes around it do not count.

    Args:
      scope: the scope as `compat.device_scopes` gives it.
    """
    if scope == 'None':  # tf.device(None), which ends the scopes around it
        return True
    if '<' in scope:  # of a device function there is only a text such as 'name<file, line>'
        return True
    # A job alone, as in '/job:worker', leaves the device to the scopes around.
    return type_and_index(scope) != (None, None)


def device_like(op: tf.Operation) -> str:
    """The device of an operation as an argument of `tf.device`. New operations in this scope follow
    their tower to its device if the operation does."""
    if follows_tower(op):
        return TowerDevice(op.device)
    return op.device


def keep_with_tower(operations: typing.Iterable[tf.Operation],
                    tower_names: typing.Container[str], device: str) -> None:
    """Ends colocations that would take gradient operations away from their tower.

    TensorFlow colocates some gradients, such as the gradients of a gather, with a variable on
    another device, and at the same time with operations of the tower: the session would say "Cannot
    colocate nodes". Then only colocations with operations of the tower stay. If these operations
    are on several devices, as stages are, only colocations with operations on one device stay.

    Args:
      operations: the gradient operations of a tower.
      tower_names: the names of the operations that the tower has made itself.
      device: the tower's device.
    """
    first_stage = stages_of(device)[0]
    for op in operations:
        leaders = colocated_operations(op)
        leaders_in_tower = with_names(leaders, tower_names)
        if not leaders_in_tower:
            continue  # colocated with nothing, or with a variable alone: no conflict
        kept_leaders = _leaders_to_keep(op, leaders_in_tower, tower_names)
        if len(kept_leaders) == len(leaders):
            continue  # no colocation has to end
        if kept_leaders:
            colocate(op, kept_leaders)
            new_device = kept_leaders[0].device
        else:
            colocate(op, [op])  # with itself alone: then its own device decides
            new_device = leaders_in_tower[0].device
        compat.set_device(op, new_device or first_stage)  # '': the leader asks for no device


def _leaders_to_keep(op: tf.Operation, leaders_in_tower: typing.List[tf.Operation],
                     tower_names: typing.Container[str]) -> typing.List[tf.Operation]:
    """List of the operations, all on one device, that a gradient operation stays colocated with.

    Args:
      op: the gradient operation.
      leaders_in_tower: the operations of the tower that it is colocated with.
      tower_names: the names of all operations that the tower has made itself.
    """
    leaders = [leader for leader in leaders_in_tower
               if not _is_moved_out_of_tower(leader, tower_names)]
    if len(devices_of(leaders)) <= 1:
        return leaders
    # The runtime cannot put the operation beside operations on several devices: it stays beside the
    # leaders on its own device; if none is there, beside the first leader.
    on_device_of_op = [leader for leader in leaders if leader.device == op.device]
    return on_device_of_op or leaders[:1]


def _is_moved_out_of_tower(op: tf.Operation, tower_names: typing.Container[str]) -> bool:
    """Whether the runtime may put an operation on another device than its tower's: it puts an
    operation that takes a resource, such as a variable, beside the resource.

    Args:
      op: the operation.
      tower_names: the names of all operations that the tower has made itself; a resource that is
        not among them may be anywhere.
    """
    return bool(without_names(resources_taken(op), tower_names))


def resources_taken(op: tf.Operation) -> typing.List[tf.Operation]:
    """List of the operations of the resources that an operation takes, such as `VarHandleOp`s."""
    return [tensor.op for tensor in op.inputs if tensor.dtype == tf.resource]


def current_tower_device(graph: tf.Graph) -> typing.Optional[TowerDevice]:
    """The `TowerDevice` of the tower or stage whose scope is open now; None outside of towers."""
    for scope in compat.current_device_scopes(graph):
        if isinstance(scope, TowerDevice):
            return scope
    return None


def current_stages(graph: tf.Graph) -> typing.Tuple[str, ...]:
    """The devices of all stages of the tower whose scope is open now; () outside of towers."""
    tower_device = current_tower_device(graph)
    if tower_device is None:
        return ()
    return tower_device.stages


def device_in_other_tower(device: str, source: str, target: str) -> str:
    """The device in the tower `target` that corresponds to a device in the tower `source`.

    For the device of a stage, that is the device of the same stage. The name of any other device
    gets the fields of `target`, but keeps the fields in which it differs from `source`, here the
    job:

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
        is_value_of_source = value == getattr(source_spec, field)
        value_in_target = getattr(target_spec, field)
        is_in_target = value_in_target is not None  # the name of the target has this field
        if is_value_of_source and is_in_target:
            value = value_in_target
        fields[field] = value
    return tf.DeviceSpec(**fields).to_string()


def may_be_of_tower(device: str, tower_device: str) -> bool:
    """Whether a device may be a device of a tower: one of the tower's devices has the same type and
    index. The jobs may differ, since a program may name a job in a scope within the tower's scope.
    """
    kinds_in_tower = set(map(type_and_index, stages_of(tower_device)))
    return type_and_index(device) in kinds_in_tower


def type_and_index(device: str) -> typing.Tuple[typing.Optional[str], typing.Optional[int]]:
    """The type and the index in a device's name, such as `('CPU', 1)`; None for a missing part."""
    spec = tf.DeviceSpec.from_string(device)
    return spec.device_type, spec.device_index


def check_reads_in_loops(operations: typing.Iterable[tf.Operation],
                         devices: typing.Iterable[str]) -> None:
    """Refuses operations within a loop (v1) that read a reference variable of another device, such
    as `v.read_value()`: they would wait for ever, since a reference is never sent to a device.

    Args:
      operations: the operations of a tower.
      devices: the devices on which the operations, or their copies, will be.

    Raises:
      SharedVariableError: an operation reads such a variable within a loop.
    """
    reading_devices = set(devices)
    for op in operations:
        for variable in _references_read_in_loop(op):
            are_all_beside_variable = reading_devices == {variable.device}
            if not are_all_beside_variable:
                raise SharedVariableError(
                    'operation %s, within a loop, reads the reference variable %s, which is on '
                    'another device: make that with use_resource=True, or in the model function, '
                    'or read it before the loop.' % (op.name, variable.name))


def _references_read_in_loop(op: tf.Operation) -> typing.List[tf.Operation]:
    """List of the operations of the reference variables that an operation within a loop (v1) reads
    from their memory; [] for an operation outside of loops."""
    only_hands_reference_on = op.type.startswith('Ref')  # `RefSwitch`, `RefIdentity`
    if only_hands_reference_on:
        return []
    variables = []
    for tensor in op.inputs:
        entered = source_through(tensor, ('RefIdentity', 'RefMerge', 'RefSwitch'))
        if entered.op.type == 'RefEnter':  # by which a reference goes into a loop
            variable = variable_op(entered)
            if variable is not None:
                variables.append(variable)
    return variables


def operation_device(op: tf.Operation) -> str:
    """The canonical name of the device that an operation will be on; '' if the device is open.

    An operation that asks for no device goes where the runtime has to put it: to the resource that
    it reads, to what it is colocated with, or, of a resource or a constant, to what takes it.
    """
    to_visit = [op]
    seen = set()
    while to_visit:
        current = to_visit.pop()
        if current.device:
            return without_localhost(current.device)
        if current.name not in seen:
            seen.add(current.name)
            # `pop` takes the last entry: so the first neighbour is visited first.
            to_visit.extend(reversed(_placed_together(current)))
    return ''


def _placed_together(op: tf.Operation) -> typing.List[tf.Operation]:
    """List of the operations that the runtime puts on the same device as an operation: the
    resources that it takes, what it is colocated with, and what takes its own resource. A constant
    that asks for no device is put beside an operation that takes it."""
    together = resources_taken(op) + colocated_operations(op)
    for tensor in op.outputs:
        if tensor.dtype == tf.resource or op.type == 'Const':
            together.extend(tensor.consumers())
    return together


def without_localhost(device: str) -> str:
    """A device name without what the runtime puts before it in a process without a cluster:
    `'/device:CPU:0'` for `'/job:localhost/replica:0/task:0/device:CPU:0'`; '' for ''."""
    spec = tf.DeviceSpec.from_string(device)
    is_of_this_process = spec.job == 'localhost' and not spec.task and not spec.replica
    if is_of_this_process:
        spec = tf.DeviceSpec(device_type=spec.device_type, device_index=spec.device_index)
    return spec.to_string()


def was_placed_by_program(op: tf.Operation, tower: typing.Any, first: typing.Any) -> bool:
    """Whether the program's own `tf.device`, or a colocation, and not the tower's scope, has put an
    operation of a tower on its device. Then an audit takes the device as intended.

    Args:
      op: the operation.
      tower: the `Tower` that has the operation.
      first: the first `Tower`. Only its operations have the device scopes that the program has made
        them in; their copies in other towers have no scopes.
    """
    original = op  # the same operation in the first tower
    if tower is not first:
        # Where the tower has a call of its own (copies='reuse'), TensorFlow names a gradient after
        # the operation that it is of: `'tower_1/gradients/tower_1/Prod_grad/mul'`.
        name_in_first = op.name.replace(tower.name_scope, first.name_scope)
        original = operation_named(op.graph, name_in_first)
    if original is None:  # only this tower has the operation: the program has not made it
        return False
    if follows_tower(original):
        return False
    original_device = operation_device(original)
    corresponding_device = device_in_other_tower(original_device, first.device, tower.device)
    # The program wants the operation on one of two devices: on the original's device, which the
    # program has named; or, if the original is colocated with another operation, on the
    # corresponding device of this tower, beside the copy of that other operation.
    return operation_device(op) in (original_device, corresponding_device)
