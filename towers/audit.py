"""The audit: does the finished graph, and what the runtime placed, keep the plan's promises?"""

import collections

import tensorflow.compat.v1 as tf

from towers.devices import is_gpu, short_name
from towers.errors import AuditError, InvalidArgumentError
from towers.graph_walk import step_operations
from towers.precision import converted_operations
from towers.variables import owner_by_name
from towers.xla import clusters

Copies = collections.namedtuple('Copies', 'source target tensors bytes unknown')
"""Tensors that cross from one device to another in a step; `unknown` have no static size."""


class Audit(collections.namedtuple('Audit', 'broken notes copies')):
    """What the audit found.

    Attributes:
      broken: list of lines: promises of the plan that do not hold.
      notes: list of lines: what one may want to know.
      copies: list of `Copies`, the largest first.
    """
    __slots__ = ()

    def __str__(self):
        lines = ['audit: %s' % ('%d broken promise%s' % (
            len(self.broken), '' if len(self.broken) == 1 else 's') if self.broken
            else 'every promise kept')]
        lines += ['  BROKEN  ' + line for line in self.broken]
        lines += ['  note    ' + line for line in self.notes]
        for copy in self.copies[:6]:
            lines.append('  copies  %s -> %s: %s a step in %d tensor%s%s' % (
                short_name(copy.source), short_name(copy.target), _bytes(copy.bytes), copy.tensors,
                '' if copy.tensors == 1 else 's',
                ', and %d of unknown size' % copy.unknown if copy.unknown else ''))
        if len(self.copies) > 6:
            rest = self.copies[6:]
            lines.append('  copies  %d other pairs: %s a step' % (
                len(rest), _bytes(sum(copy.bytes for copy in rest))))
        return '\n'.join(lines)

    def raise_if_broken(self):
        """Raises `AuditError` with everything that is broken, or returns the audit."""
        if self.broken:
            raise AuditError('the graph breaks what the plan promises: %s' % '; '.join(self.broken))
        return self


def audit(built, run_metadata=None):
    """Checks variables, slots, operations and gradient operations against the plan.

    Args:
      built: what `build_towers` returned.
      run_metadata: None to read the graph alone; or the `tf.RunMetadata` of a step that was run
        with `tf.RunOptions(output_partition_graphs=True)`, to check what was really placed.

    Returns:
      `Audit`. Broken are: a variable, a copy of one, or a slot off its device; an operation or
      gradient operation of a tower on another device, unless it reads or writes a variable there.
      Notes are: variables that only some towers use, trainable variables without a gradient,
      operations beside their variable, what copies of variables take.

    Raises:
      InvalidArgumentError: `run_metadata` without partition graphs.
    """
    operations = step_operations(
        [fetch for fetch in (built.train_op, built.loss) if fetch is not None]
        + [t for t in tf.nest.flatten(built.predictions, expand_composites=True) if t is not None])
    broken, notes = [], []
    _check_variables(built, lambda variable: _resolved(variable.device), broken, notes)
    _check_operations(built, operations, broken, notes)
    for variable, towers in _used_by_some(built):
        notes.append('variable %s is used by tower %s only' % (
            variable, ', '.join(map(str, towers))))
    if built.plan.without_gradient:
        notes.append('no gradient, hence never trained: ' + _some(built.plan.without_gradient))
    if built.replicas is not None:
        notes.append('%d copies of trainable variables, and their %d slots, take %s on %s' % (
            len(built.replicas.variables), len(built.replicas.slots),
            _bytes(built.replicas.bytes()),
            ', '.join(short_name(device) for device in built.devices[1:])))
    if run_metadata is not None:
        _check_runtime(built, run_metadata, broken, notes)
    return Audit(broken, notes, _copies(operations))


def _check_variables(built, device_of, broken, notes):
    by_name = {variable.op.name: variable for variable in built.variables}
    allowed = built.placement.devices()
    trained = {variable.op.name for _, variable in built.gradients}
    for variable in built.variables:
        device = device_of(variable)
        if allowed is None or device in allowed:
            continue
        if not device and variable.op.name not in trained:
            notes.append('variable %s, made before the towers, is on no device: the runtime '
                         'chooses' % variable.op.name)
            continue
        broken.append('variable %s is on %s, not on %s' % (
            variable.op.name, _named(device),
            ' or '.join(short_name(each) for each in allowed)))
    for slot in built.slots:
        owner = owner_by_name(slot.op.name, by_name)
        if owner is not None and device_of(slot) != device_of(owner):
            broken.append('slot %s is on %s, its variable on %s' % (
                slot.op.name, _named(device_of(slot)), _named(device_of(owner))))
    if built.replicas is not None:
        _check_copies(built, device_of, broken)


def _check_copies(built, device_of, broken):
    for variable in built.variables:
        for tower in built.towers[1:]:
            copy = built.replicas.replica_of(variable, tower.index)
            if copy is not variable and device_of(copy) != tower.device:
                broken.append("tower %d's copy of %s is on %s, not on %s" % (
                    tower.index, variable.op.name, _named(device_of(copy)),
                    short_name(tower.device)))
    by_name = {copy.op.name: copy for copy in built.replicas.variables}
    for slot in built.replicas.slots:
        owner = owner_by_name(slot.op.name, by_name)
        if device_of(slot) != device_of(owner):
            broken.append('slot %s is on %s, its copy of the variable on %s' % (
                slot.op.name, _named(device_of(slot)), _named(device_of(owner))))


def _check_operations(built, operations, broken, notes):
    by_name = {variable.op.name for variable in built.variables}
    if built.replicas is not None:
        by_name |= {copy.op.name for copy in built.replicas.variables}
    for tower in built.towers:
        stray, beside = [], []
        for op in operations:
            if not op.name.startswith(tower.name_scope):
                continue
            device = operation_device(op)
            if device == tower.device:
                continue
            (beside if _touches_variable(op, by_name) else stray).append((op, device))
        if stray:
            broken.append('%s of tower %d off %s: %s' % (
                _operations(stray), tower.index, short_name(tower.device),
                _some(['%s on %s' % (op.name, _named(device)) for op, device in stray])))
        if beside:
            notes.append('%s of tower %d beside the variable read or written, on %s' % (
                _operations(beside), tower.index,
                ', '.join(sorted({_named(device) for _, device in beside}))))


def _touches_variable(op, names, depth=3):
    """Whether an operation gets a variable itself, or TF put it beside one that does.

    One that gets a variable's value is free to be on its tower's device.
    """
    if any(tensor.dtype == tf.resource or tensor.op.name in names for tensor in op.inputs):
        return True
    return any(name in names or depth and _touches_variable(other, names, depth - 1)
               for name, other in _colocated_with(op))


def _colocated_with(op):
    """[(name, operation)] of those that an operation is to be placed beside."""
    names = [group.decode()[len('loc:@'):] for group in op.colocation_groups()]
    return [(name, op.graph.get_operation_by_name(name)) for name in names if name != op.name]


def _used_by_some(built):
    users = collections.OrderedDict()
    for tower in built.towers:
        for variable in tower.variables:
            users.setdefault(variable.op.name, []).append(tower.index)
    return [(name, towers) for name, towers in users.items() if len(towers) < len(built.towers)]


def _check_runtime(built, run_metadata, broken, notes):
    placed = {node.name: _resolved(node.device) for graph in run_metadata.partition_graphs
              for node in graph.node}
    if not placed:
        raise InvalidArgumentError(
            'run_metadata holds no partition graphs: run the step with options='
            'tf.RunOptions(output_partition_graphs=True).')
    seen = [v for v in built.variables + built.slots if v.op.name in placed]
    _check_variables(built._replace(variables=[v for v in built.variables if v in seen],
                                    slots=[s for s in built.slots if s in seen]),
                     lambda variable: placed.get(variable.op.name, _resolved(variable.device)),
                     broken, notes)
    leaves = tf.nest.flatten(built.towers[0].inputs, expand_composites=True)
    graph = next(leaf.graph for leaf in leaves if leaf is not None)
    for tower in built.towers:
        moved, without_kernel = [], []
        for name, device in placed.items():
            if not name.startswith(tower.name_scope) or device == tower.device:
                continue
            try:
                op = graph.get_operation_by_name(name)
            except KeyError:
                continue  # the runtime's own: a copy, a folded constant
            if operation_device(op) != tower.device:
                continue  # the graph's own choice, which the audit of the graph has judged
            if any(tensor.dtype == tf.resource for tensor in op.inputs):
                continue  # has to be where the variable is
            # Integers and strings have few kernels on a GPU; what computes floats has one.
            floats = any(output.dtype.is_floating for output in op.outputs)
            (moved if floats or not is_gpu(tower.device) else without_kernel).append(
                '%s to %s' % (name, _named(device)))
        if moved:
            broken.append('the runtime moved %s of tower %d off %s: %s' % (
                _operations(moved), tower.index, short_name(tower.device), _some(moved)))
        if without_kernel:
            notes.append('the runtime moved %s of tower %d that %s has no kernel for' % (
                _operations(without_kernel), tower.index, short_name(tower.device)))
    if built.precision != 'float32':
        converted = converted_operations(run_metadata, built.precision)
        if converted:
            notes.append('in %s: %s' % (built.precision, ', '.join(
                '%d %s' % (count, kind) for kind, count in converted.most_common(6))))
        else:
            broken.append('no operation ran in %s: was the session made with use_precision(config, '
                          '%r, built.devices)?' % (built.precision, built.precision))
    if built.xla:
        found = clusters(run_metadata)
        notes.append('XLA compiled %s' % (', '.join('%d clusters for %s' % (
            found[tower.device], short_name(tower.device)) for tower in built.towers)))
        if not all(found[tower.device] for tower in built.towers):
            broken.append('XLA compiled nothing for some tower')
    notes.append('what the runtime placed was checked: %s on %s' % (
        _operations(placed), ', '.join(short_name(name) for name in sorted(set(placed.values())))))


def operation_device(op):
    """The canonical device that an operation asks for.

    One that asks for none goes where the runtime has to put it: to the resource that it reads, to
    the operation that it is to be beside, to the one that takes its resource (a TensorArray of an
    RNN, which TF itself leaves open until the first write); a constant, to the one that takes it.
    """
    return _device(op, set())


def _device(op, seen):
    if op.device or op.name in seen:
        return _resolved(op.device)
    seen.add(op.name)
    near = [tensor.op for tensor in op.inputs if tensor.dtype == tf.resource]
    near += [other for _, other in _colocated_with(op)]
    near += [taker for tensor in op.outputs if tensor.dtype == tf.resource or op.type == 'Const'
             for taker in tensor.consumers()]
    return next((device for device in (_device(other, seen) for other in near) if device), '')


def _resolved(device):
    """`'/job:localhost/replica:0/task:0/device:CPU:0'` as `'/device:CPU:0'`, '' as ''."""
    if not device:
        return ''
    spec = tf.DeviceSpec.from_string(device)
    if spec.job == 'localhost':
        spec = tf.DeviceSpec(device_type=spec.device_type, device_index=spec.device_index)
    return spec.to_string()


def _copies(operations):
    sizes = {}
    for op in operations:
        target = operation_device(op)
        for tensor in op.inputs:
            source = operation_device(tensor.op)
            if source and target and source != target and tensor.dtype != tf.resource:
                count = tensor.shape.num_elements()
                known = count is not None and tensor.dtype != tf.string
                sizes[(source, target, tensor.name)] = (
                    count * tensor.dtype.base_dtype.size if known else None)
    totals = collections.OrderedDict()
    for (source, target, _), size in sizes.items():
        tensors, total, unknown = totals.get((source, target), (0, 0, 0))
        totals[source, target] = (tensors + 1, total + (size or 0), unknown + (size is None))
    return sorted((Copies(source, target, tensors, total, unknown)
                   for (source, target), (tensors, total, unknown) in totals.items()),
                  key=lambda copy: -copy.bytes)


def _bytes(count):
    for unit, size in (('GB', 1e9), ('MB', 1e6), ('kB', 1e3)):
        if count >= size:
            return '%.1f %s' % (count / size, unit)
    return '%d bytes' % count


def _operations(some):
    return '%d operation%s' % (len(some), '' if len(some) == 1 else 's')


def _named(device):
    return short_name(device) if device else 'no device'


def _some(items, limit=3):
    more = ', ... (%d more)' % (len(items) - limit) if len(items) > limit else ''
    return ', '.join(items[:limit]) + more
