"""The audit: do the graph of a build, and a step that was run, keep the plan's promises?

Words of other modules used here: `operation_device` gives the device that an operation will be on,
by the device that it asks for, or by the operations that it is colocated with; `stages_of` gives
the devices of a tower, one for each stage; `tower.has` says whether the tower has an operation of a
name.

Its test is tests/inspect/test_audit.py.
"""

import collections
import typing

import tensorflow.compat.v1 as tf

from towers.api.built import BuiltTowers
from towers.arguments import check_instance
from towers.cluster.machines import connection_of, on_own_devices
from towers.errors import AuditError, ClusterError, counted
from towers.gradients.tower import Tower
from towers.graph.edit import colocated_operations
from towers.graph.graph_walk import leaves_of, operation_names, reached, step_operations
from towers.graph.order import find_cycle
from towers.inspect.audit_step import findings_of_step
from towers.inspect.findings import (
    Findings,
    broken,
    bytes_text,
    counted_operations,
    device_name,
    findings_of_variables,
    first_few,
    note,
)
from towers.inspect.gpu_kernels import (
    CPU,
    MovedOperations,
    computes_floats,
    knows_gpu_kernels,
    moved_operations,
)
from towers.model.objectives import flat
from towers.placement.devices import has_gpus, short_name
from towers.placement.tower_device import (
    operation_device,
    stages_of,
    was_placed_by_program,
    without_localhost,
)


class Transfers(typing.NamedTuple):
    """Tensors that cross from one device to another in a step.

    Attributes:
      source: the device on which they are computed.
      target: the device that gets them.
      tensors: the number of these tensors.
      bytes: the size of all tensors whose shape is static.
      unknown: the number of tensors whose shape is not static.
    """

    source: str
    target: str
    tensors: int
    bytes: int
    unknown: int

    def __str__(self):
        """The transfers in a line: `'/cpu:0 -> /gpu:1: 1.2 MB a step in 3 tensors'`."""
        text = '%s -> %s: %s a step in %s' % (
            short_name(self.source), short_name(self.target), bytes_text(self.bytes),
            counted(self.tensors, 'tensor'))
        if self.unknown:
            text += ', and %d of unknown size' % self.unknown
        return text


SentTensors = typing.Dict[typing.Tuple[str, str], typing.Dict[str, tf.Tensor]]
"""{(source, target): {name of a tensor: the tensor}}; a target gets a tensor once, for all takers.
"""

_MOST_TRANSFERS = 6  # pairs of devices that an audit prints one by one


class Audit(typing.NamedTuple):
    """The findings of the audit.

    Attributes:
      broken: list of lines: promises of the plan that do not hold.
      notes: list of lines: facts that are no faults.
      transfers: list of `Transfers`, the largest first.
    """

    broken: typing.List[str]
    notes: typing.List[str]
    transfers: typing.List[Transfers]

    def __str__(self):
        """The verdict, and a line for each finding."""
        verdict = 'every promise kept'
        if self.broken:
            verdict = counted(len(self.broken), 'broken promise')
        lines = ['audit: ' + verdict]
        for line in self.broken:
            lines.append('  BROKEN  ' + line)
        for line in self.notes:
            lines.append('  note    ' + line)
        for transfers in self.transfers[:_MOST_TRANSFERS]:
            lines.append('  sent    ' + str(transfers))
        others = self.transfers[_MOST_TRANSFERS:]
        if others:
            size = sum(transfers.bytes for transfers in others)
            lines.append('  sent    %d other pairs: %s a step' % (len(others), bytes_text(size)))
        return '\n'.join(lines)

    def raise_if_broken(self) -> 'Audit':
        """Raises `AuditError` with everything that is broken, or returns the audit."""
        if self.broken:
            raise AuditError('the graph breaks what the plan promises: %s' % '; '.join(self.broken))
        return self


def audit(built: BuiltTowers, run_metadata: typing.Optional[tf.RunMetadata] = None) -> Audit:
    """Checks variables, slots, operations and gradient operations against the plan.

    Args:
      built: the result of `build_towers`.
      run_metadata: None to read only the graph; or the `tf.RunMetadata` of a step that was run
        with `tf.RunOptions(output_partition_graphs=True)`, to check where the runtime has placed
        operations.

    Returns:
      `Audit`. Broken are: operations that wait for each other in a circle; a variable, a replica
      or a slot off its device; an operation or gradient operation of a tower on another device,
      unless it reads or writes a variable there or the model itself put it there by `tf.device`;
      on GPUs, an operation with floating-point results for whose types this TensorFlow has no GPU
      kernel, or that is colocated with an operation without a kernel: soft placement would take it
      to the CPU. Kernels are looked up in TensorFlow's registry, for which no GPU is needed.
      Notes are facts beside the plan: operations colocated with their variable, or put elsewhere
      by the model's own `tf.device`, and the bytes of replicas.

    Raises:
      InvalidArgumentError: `run_metadata` has no partition graphs; `built` is not the result of
        `build_towers`.
      ClusterError: a build for parameter servers, after `join`.
    """
    check_instance('built', built, BuiltTowers, 'the result of build_towers')
    why_not = why_not_audited(built)
    if why_not is not None:
        raise ClusterError('towers.audit: %s.' % why_not)
    if run_metadata is not None:
        check_instance('run_metadata', run_metadata, tf.RunMetadata, 'a tf.RunMetadata, or None')
    operations = operations_of_step(built)
    findings = list(_findings_of_order(operations))
    findings += findings_of_variables(built, lambda variable: without_localhost(variable.device))
    findings += _findings_of_operations(built, operations)
    findings += _findings_of_gpu_kernels(built, operations)
    findings += _note_on_replicas(built)
    if run_metadata is not None:
        findings += findings_of_step(built, on_own_devices(built, run_metadata))
    findings = list(dict.fromkeys(findings))  # micro-batches of a tower give the same lines
    return Audit(
        broken=[finding.line for finding in findings if finding.is_broken],
        notes=[finding.line for finding in findings if not finding.is_broken],
        transfers=transfers_of(operations))


def why_not_audited(built: BuiltTowers) -> typing.Optional[str]:
    """Why a build cannot be audited; None for a build that can.

    With parameter servers, `join` puts the graph on the devices of several processes, and the plan
    names the devices from before.
    """
    if built.machines is None or not built.machines.exchange.cluster.is_served:
        return None
    has_joined = connection_of(built) is not None
    if not has_joined:
        return None
    return ('join has put this build on parameter servers and a worker, and the plan names the '
            'devices from before: audit it before join')


def operations_of_step(built: BuiltTowers) -> typing.List[tf.Operation]:
    """List of the operations that a step may run: for the update by all losses, for the update by
    each loss, for the losses and for the predictions."""
    train_ops = [built.train_op] + list(built.train_ops.values())
    outputs = flat(built.loss) + leaves_of(built.predictions)
    # A build without an optimizer has no train op.
    fetches = [fetch for fetch in train_ops + outputs if fetch is not None]
    return step_operations(fetches)


def _findings_of_order(operations: typing.List[tf.Operation]) -> Findings:
    """Yields a finding where operations of the graph wait for each other in a circle.

    TensorFlow looks at the whole graph before it runs a part of it, so with a circle not even
    variables can be initialized.
    """
    if not operations:  # the build has nothing to run
        return
    cycle = find_cycle(operations[0].graph.get_operations())
    if cycle:
        yield broken('%s wait for each other in a circle, so that the graph never runs: %s' % (
            counted_operations(cycle), _some_names(cycle)))


def _some_names(operations: typing.Iterable[tf.Operation]) -> str:
    """The names of the first operations, and how many more there are."""
    return first_few([op.name for op in operations])


def _note_on_replicas(built: BuiltTowers) -> Findings:
    """Yields a note on the memory of the replicas of variables, if there are any."""
    replicas = built.replicas
    if replicas is not None:
        devices = ', '.join(map(short_name, built.devices[1:]))
        yield note('%d replicas of trainable variables, and their %d slots, take %s on %s' % (
            len(replicas.variables), len(replicas.slots), bytes_text(replicas.bytes()), devices))


# ---- operations ----------------------------------------------------------------------------------

class _OffDevice(typing.NamedTuple):
    """The operations of a tower that are not on the tower's devices, by the reason for it.

    Attributes:
      at_variables: operations that read or write a variable where it is.
      chosen_by_model: operations that the model has put there by `tf.device`.
      unexplained: all others.
    """
    at_variables: typing.List[tf.Operation]
    chosen_by_model: typing.List[tf.Operation]
    unexplained: typing.List[tf.Operation]


def _findings_of_operations(built: BuiltTowers, operations: typing.Iterable[tf.Operation]
                            ) -> Findings:
    """Yields the findings about operations of towers that are not on their tower's devices."""
    variables = operation_names(built.variables)
    if built.replicas is not None:
        variables |= operation_names(built.replicas.variables)
    for tower in built.towers:
        off_device = _off_device(operations, tower, built.towers[0], variables)
        if off_device.unexplained:
            yield broken('%s of tower %d off %s: %s' % (
                counted_operations(off_device.unexplained), tower.index, short_name(tower.device),
                _some_places(off_device.unexplained)))
        at_variables = off_device.at_variables
        if at_variables:
            yield note('tower %d reads and writes variables where they are, on %s: %s' % (
                tower.index, _devices_of(at_variables), counted_operations(at_variables)))
        chosen_by_model = off_device.chosen_by_model
        if chosen_by_model:
            yield note("%s of tower %d on %s by the model's own tf.device: %s" % (
                counted_operations(chosen_by_model), tower.index, _devices_of(chosen_by_model),
                _some_names(chosen_by_model)))


def _off_device(operations: typing.Iterable[tf.Operation], tower: Tower, first_tower: Tower,
                variables: typing.Set[str]) -> _OffDevice:
    """Finds the operations of a tower that are not on the tower's devices.

    Args:
      operations: the operations of a step.
      tower: the tower.
      first_tower: tower 0, whose operations tell what the model itself has placed.
      variables: names of all variables.
    """
    found = _OffDevice(at_variables=[], chosen_by_model=[], unexplained=[])
    for op in operations:
        if not tower.has(op.name) or not _is_off_device(op, tower):
            continue
        if _touches_variable(op, variables):
            found.at_variables.append(op)
        elif was_placed_by_program(op, tower, first_tower):
            found.chosen_by_model.append(op)
        else:
            found.unexplained.append(op)
    return found


def _some_places(operations: typing.Iterable[tf.Operation]) -> str:
    """The first operations, each with its device, and how many more there are."""
    places = ['%s on %s' % (op.name, device_name(operation_device(op))) for op in operations]
    return first_few(places)


def _is_off_device(op: tf.Operation, tower: Tower) -> bool:
    """Whether an operation should be on a device of its tower, and is on another one."""
    device = operation_device(op)
    if op.type == 'NoOp' or device in stages_of(tower.device):  # a NoOp only waits for others
        return False
    return not _follows_input(op, tower)


def _touches_variable(op: tf.Operation, variables: typing.Set[str]) -> bool:
    """Whether an operation takes a variable, and not only its value; or is colocated with a
    variable, or with an operation that takes one. Such an operation runs where the variable is.

    Args:
      op: the operation.
      variables: names of all variables.
    """
    if _takes_variable(op, variables):
        return True
    # An operation that it is colocated with may be colocated with a third one, and so on.
    kept_with_it = reached(colocated_operations(op), colocated_operations)
    for name, other in kept_with_it.items():
        if name in variables or _takes_variable(other, variables):
            return True
    return False


def _takes_variable(op: tf.Operation, variables: typing.Set[str]) -> bool:
    """Whether an operation has a variable itself among its inputs: a handle (also the handle of
    a table or the like), or a reference variable. `variables` are the names of all variables."""
    for tensor in op.inputs:
        if tensor.dtype == tf.resource or tensor.op.name in variables:
            return True
    return False


def _follows_input(op: tf.Operation, tower: Tower) -> bool:
    """Whether TensorFlow chooses the device of an operation by a value that the operation gets.

    A `Switch` of `tf.cond` (v1) is put beside its input. A TensorArray (v1), and the constant of
    its size, is put beside the first value that is written to it.
    """
    if op.type in _SWITCHES:
        return _is_with_value_from_outside(op, tower)
    return op.type == 'TensorArrayV3' or _is_size_of_array(op)


def _is_size_of_array(op: tf.Operation) -> bool:
    """Whether an operation is the constant of the size of a TensorArray (v1)."""
    if op.type != 'Const':
        return False
    return any(taker.type == 'TensorArrayV3' for taker in op.outputs[0].consumers())


_SWITCHES = ('Switch', 'RefSwitch')


def _is_with_value_from_outside(switch: tf.Operation, tower: Tower) -> bool:
    """Whether a `Switch` takes a value from outside of the tower, and is on that value's device."""
    source = switch
    while source.type in _SWITCHES:  # a branch in a branch has several in a row
        source = source.inputs[0].op
    is_from_outside = not tower.has(source.name)
    return is_from_outside and operation_device(switch) == operation_device(source)


def _devices_of(operations: typing.Iterable[tf.Operation]) -> str:
    """The devices of some operations: `'/cpu:0, /gpu:1'`."""
    return ', '.join(sorted({device_name(operation_device(op)) for op in operations}))


# ---- kernels on GPUs -----------------------------------------------------------------------------

def _findings_of_gpu_kernels(built: BuiltTowers, operations: typing.Iterable[tf.Operation]
                             ) -> Findings:
    """Yields the findings about operations on GPUs that have no kernel there, in this TensorFlow.
    """
    if not has_gpus(built.devices):
        return
    if not knows_gpu_kernels():
        yield note('this TensorFlow was built without GPUs: it cannot tell which operations '
                   'have no kernel on them')
        return
    for moved in moved_operations(operations, built.towers):
        yield from _findings_of_moved(moved)


def _findings_of_moved(moved: MovedOperations) -> Findings:
    """Yields the findings about operations that soft placement takes from one GPU to the CPU.

    There is one finding for each of three groups, if the group has operations: operations on floats
    without a kernel, operations on other types without a kernel, and operations with a kernel that
    are colocated with an operation without a kernel.
    """
    owner = 'no tower' if moved.owner is None else 'tower %d' % moved.owner
    cross = '%s a step cross' % bytes_text(moved.bytes)
    if moved.unknown:
        cross += ', with %d tensors of unknown size' % moved.unknown
    cpu = short_name(CPU)
    if moved.on_floats:
        yield broken('%s of %s on %s without a GPU kernel: %s; soft placement takes them to %s, '
                     'and %s' % (
                         counted_operations(moved.on_floats), owner, short_name(moved.device),
                         _some_with_types(moved.on_floats), cpu, cross))
    if moved.on_others:
        yield note('%s of %s on integers, strings and the like without a GPU kernel, which belong '
                   'on the CPU: %s; soft placement takes them to %s, and %s' % (
                       counted_operations(moved.on_others), owner,
                       _some_with_types(moved.on_others), cpu, cross))
    if moved.pulled:
        # Operations on integers and strings lose nothing by being on the CPU.
        has_floats = any(map(computes_floats, moved.pulled))
        finding = broken if has_floats else note
        yield finding('%s of %s colocated with one without a GPU kernel: %s; soft placement takes '
                      'them along to %s, and %s' % (
                          counted_operations(moved.pulled), owner,
                          _some_with_types(moved.pulled), cpu, cross))


def _some_with_types(operations: typing.Iterable[tf.Operation]) -> str:
    """The first operations with their types, and how many more: `'x (Unique of int64)'`."""
    texts = []
    for op in operations:
        tensors = list(op.inputs) + list(op.outputs)
        dtypes = sorted({tensor.dtype.base_dtype.name for tensor in tensors})
        texts.append('%s (%s of %s)' % (op.name, op.type, ', '.join(dtypes)))
    return first_few(texts)


# ---- transfers -----------------------------------------------------------------------------------

def transfers_of(operations: typing.Iterable[tf.Operation]) -> typing.List[Transfers]:
    """The `Transfers` of a step for each pair of devices, the largest first."""
    transfers = []
    for (source, target), tensors in sent_tensors(operations).items():
        transfers.append(_transfers_of_pair(source, target, tensors.values()))
    return sorted(transfers, key=lambda transfers_of_pair: -transfers_of_pair.bytes)


def sent_tensors(operations: typing.Iterable[tf.Operation]) -> SentTensors:
    """The tensors that a step of these operations sends from each device to each other one."""
    sent: SentTensors = collections.OrderedDict()
    for op in operations:
        target = operation_device(op)
        for tensor in op.inputs:
            source = operation_device(tensor.op)
            if _crosses(tensor, source, target):
                sent.setdefault((source, target), {})[tensor.name] = tensor
    return sent


def _transfers_of_pair(source: str, target: str, tensors: typing.Collection[tf.Tensor]
                       ) -> Transfers:
    """The `Transfers` from one device to another, of these tensors."""
    total = 0
    unknown = 0
    for tensor in tensors:
        size = _size_of(tensor)
        if size is None:
            unknown += 1
        else:
            total += size
    return Transfers(source, target, tensors=len(tensors), bytes=total, unknown=unknown)


def _crosses(tensor: tf.Tensor, source: str, target: str) -> bool:
    """Whether a tensor is sent from one device to another.

    Args:
      tensor: the tensor. A handle of a variable is not sent: its takers are with the variable.
      source: the device on which it is computed, `''` for none.
      target: the device of the operation that takes it, `''` for none.
    """
    if not source or not target:  # the runtime chooses the device
        return False
    return source != target and tensor.dtype != tf.resource


def _size_of(tensor: tf.Tensor) -> typing.Optional[int]:
    """The size of a tensor in bytes; None for strings, and where its shape is not static."""
    elements = tensor.shape.num_elements()
    if tensor.dtype == tf.string or elements is None:
        return None
    return elements * tensor.dtype.base_dtype.size
