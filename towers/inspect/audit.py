"""The audit: does the finished graph, and what the runtime placed, keep the plan's promises?"""

import collections
import typing

import tensorflow.compat.v1 as tf

from towers.api.built import BuiltTowers
from towers.arguments import check_instance
from towers.errors import AuditError, InvalidArgumentError
from towers.graph.edit import beside
from towers.graph.graph_walk import leaves_of, operation_named, step_operations
from towers.graph.order import circle
from towers.inspect.gpu_kernels import (
    CPU,
    computes_floats,
    knows_gpu_kernels,
    moved_operations,
)
from towers.model.objectives import flat
from towers.placement.devices import is_gpu, short_name
from towers.placement.numerics import converted_operations, xla_clusters
from towers.placement.tower_device import (
    all_devices,
    operation_device,
    resolved,
    stages_of,
    was_chosen,
)
from towers.variables.new_variables import owner_by_name

Transfers = collections.namedtuple('Transfers', 'source target tensors bytes unknown')
"""Tensors that cross from one device to another in a step; `unknown` have no static size."""


_BROKEN, _NOTE = 'broken', 'note'


class Audit(collections.namedtuple('Audit', 'broken notes transfers')):
    """The findings of the audit.

    Attributes:
      broken: list of lines: promises of the plan that do not hold.
      notes: list of lines: facts that are no faults.
      transfers: list of `Transfers`, the largest first.
    """
    __slots__ = ()

    def __str__(self):
        lines = ['audit: %s' % ('%d broken promise%s' % (
            len(self.broken), '' if len(self.broken) == 1 else 's') if self.broken
            else 'every promise kept')]
        lines += ['  BROKEN  ' + line for line in self.broken]
        lines += ['  note    ' + line for line in self.notes]
        for pair in self.transfers[:6]:
            lines.append('  sent    %s -> %s: %s a step in %d tensor%s%s' % (
                short_name(pair.source), short_name(pair.target), _bytes(pair.bytes), pair.tensors,
                '' if pair.tensors == 1 else 's',
                ', and %d of unknown size' % pair.unknown if pair.unknown else ''))
        if self.transfers[6:]:
            lines.append('  sent    %d other pairs: %s a step' % (
                len(self.transfers[6:]), _bytes(sum(pair.bytes for pair in self.transfers[6:]))))
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
      run_metadata: None to read the graph alone; or the `tf.RunMetadata` of a step that was run
        with `tf.RunOptions(output_partition_graphs=True)`, to check where the runtime has placed
        operations.

    Returns:
      `Audit`. Broken are: operations that wait for each other in a circle; a variable, a replica of
      one, or a slot off its device; an operation or gradient operation of a tower on another
      device, unless it reads or writes a variable there or the model itself put it there by
      `tf.device`; on GPUs, an operation with floating-point results for whose types this TensorFlow
      has no GPU kernel, or that is colocated with one without a kernel: soft placement would take
      it to the CPU. Kernels are looked up in TensorFlow's registry, for which no GPU is needed.
      Notes are, beside what the plan says: operations colocated with their variable, or put
      elsewhere by the model's own `tf.device`, and the bytes of replicas.

    Raises:
      InvalidArgumentError: `run_metadata` has no partition graphs; `built` is something else.
    """
    check_instance('built', built, BuiltTowers, 'the result of build_towers')
    if run_metadata is not None:
        check_instance('run_metadata', run_metadata, tf.RunMetadata, 'a tf.RunMetadata, or None')
    operations = step_operations(
        [fetch for fetch in [built.train_op] + list(built.train_ops.values()) + flat(built.loss)
         if fetch is not None]
        + leaves_of(built.predictions))
    found = list(_of_order(operations))
    found += _of_variables(built, lambda variable: resolved(variable.device))
    found += _of_operations(built, operations)
    found += _of_gpu_kernels(built, operations)
    if built.replicas is not None:
        found.append((_NOTE, '%d replicas of trainable variables, and their %d slots, take %s on '
                      '%s' % (len(built.replicas.variables), len(built.replicas.slots),
                              _bytes(built.replicas.bytes()),
                              ', '.join(short_name(device) for device in built.devices[1:]))))
    if run_metadata is not None:
        found += _of_runtime(built, run_metadata)
    found = collections.OrderedDict.fromkeys(found)  # micro-batches of a tower are alike
    return Audit([line for kind, line in found if kind == _BROKEN],
                 [line for kind, line in found if kind == _NOTE], _transfers(operations))


def _of_order(operations):
    """Yields a finding where operations wait for each other. TensorFlow looks at all of a graph
    before it runs any of it, so that not even variables could be initialized."""
    for graph in {op.graph for op in operations[:1]}:
        found = circle(graph.get_operations())
        if found:
            yield _BROKEN, (
                '%s wait for each other in a circle, so that the graph never runs: %s' % (
                    _operations(found), _some([op.name for op in found])))


def _of_variables(built, device_of):
    """Yields the findings about variables, replicas and slots: pairs (_BROKEN or _NOTE, line),
    by the function `device_of` a variable."""
    by_name = {variable.op.name: variable for variable in built.variables}
    allowed = built.placement.devices()
    for name, variable in by_name.items():
        device = device_of(variable)
        if device not in allowed and name in built.made:
            yield _BROKEN, 'variable %s is on %s, not on %s' % (
                name, _named(device), ' or '.join(map(short_name, allowed)))
        elif device not in allowed:
            yield _NOTE, 'variable %s, made before the towers, is on %s%s' % (
                name, _named(device), '' if device else ': the runtime chooses')
    yield from _of_slots(built.slots, by_name, device_of, 'its variable')
    if built.replicas is None:
        return
    for variable in built.variables:
        for tower in built.towers[1:]:
            replica = built.replicas.replica_of(variable, tower.index)
            if replica is not variable and device_of(replica) != tower.device:
                yield _BROKEN, "tower %d's replica of %s is on %s, not on %s" % (
                    tower.index, variable.op.name, _named(device_of(replica)),
                    short_name(tower.device))
    yield from _of_slots(built.replicas.slots, {
        replica.op.name: replica for replica in built.replicas.variables}, device_of,
                         'the replica of its variable')


def _of_slots(slots, by_name, device_of, owner_is):
    for slot in slots:
        owner = owner_by_name(slot.op.name, by_name)
        if owner is None or not device_of(owner):
            continue  # without a device the runtime chooses one, which a step's metadata tells
        if device_of(slot) != device_of(owner):
            yield _BROKEN, 'slot %s is on %s, %s on %s' % (
                slot.op.name, _named(device_of(slot)), owner_is, _named(device_of(owner)))


def _of_operations(built, operations):
    """Yields the findings about the towers' operations off their devices."""
    variables = {variable.op.name for variable in list(built.variables) + (
        [] if built.replicas is None else list(built.replicas.variables))}
    for tower in built.towers:
        stray, with_variable, chosen = [], [], []
        for op in operations:
            device = operation_device(op)
            if not tower.has(op.name) or op.type == 'NoOp' or (  # it only waits for others
                    device in stages_of(tower.device) or _follows_input(op, tower)):
                continue
            (with_variable if _touches_variable(op, variables) else
             chosen if was_chosen(op, tower, built.towers[0]) else stray).append((op, device))
        if stray:
            yield _BROKEN, '%s of tower %d off %s: %s' % (
                _operations(stray), tower.index, short_name(tower.device),
                _some(['%s on %s' % (op.name, _named(device)) for op, device in stray]))
        if with_variable:
            yield _NOTE, '%s of tower %d, with a variable that is read or written, kept on %s' % (
                _operations(with_variable), tower.index, _all_named(with_variable))
        if chosen:
            yield _NOTE, "%s of tower %d on %s by the model's own tf.device: %s" % (
                _operations(chosen), tower.index, _all_named(chosen),
                _some([op.name for op, _ in chosen]))


def _of_gpu_kernels(built, operations):
    """Yields the findings about operations on GPUs that have no kernel there, in this TensorFlow.
    """
    if not any(is_gpu(device) for device in all_devices(built.devices)):
        return
    if not knows_gpu_kernels():
        yield _NOTE, ('this TensorFlow was built without GPUs: it cannot tell which operations '
                      'have no kernel on them')
        return
    for moved in moved_operations(operations, built.towers):
        owner = 'no tower' if moved.owner is None else 'tower %d' % moved.owner
        crosses = 'soft placement takes %%s to %s, and %s a step cross%s' % (
            short_name(CPU), _bytes(moved.bytes),
            ', with %d tensors of unknown size' % moved.unknown if moved.unknown else '')
        if moved.on_floats:
            yield _BROKEN, '%s of %s on %s without a GPU kernel: %s; %s' % (
                _operations(moved.on_floats), owner, short_name(moved.device),
                _typed(moved.on_floats), crosses % 'them')
        if moved.on_others:
            yield _NOTE, ('%s of %s on integers, strings and the like without a GPU kernel, which '
                          'belong on the CPU: %s; %s' % (
                              _operations(moved.on_others), owner, _typed(moved.on_others),
                              crosses % 'them'))
        if moved.pulled:
            on_floats = any(computes_floats(op) for op in moved.pulled)
            yield _BROKEN if on_floats else _NOTE, (
                '%s of %s colocated with one without a GPU kernel: %s; %s' % (
                    _operations(moved.pulled), owner, _typed(moved.pulled), crosses % 'them along'))


def _typed(ops):
    """Some operations with their types: `'x (Unique of int64)'`."""
    texts = []
    for op in ops:
        tensors = list(op.inputs) + list(op.outputs)
        dtypes = sorted({tensor.dtype.base_dtype.name for tensor in tensors})
        texts.append('%s (%s of %s)' % (op.name, op.type, ', '.join(dtypes)))
    return _some(texts)


def _touches_variable(op, names, depth=3):
    """Whether an operation gets a variable itself, not its value alone, or TF colocated it with one
    that does."""
    if any(tensor.dtype == tf.resource or tensor.op.name in names for tensor in op.inputs):
        return True
    return any(other.name in names or depth and _touches_variable(other, names, depth - 1)
               for other in beside(op))


def _follows_input(op, tower):
    """Whether TensorFlow puts an operation with a value that it gets: a `Switch` of `tf.cond` (v1)
    with its input; a TensorArray (v1), and its size, with the first value that is written to it."""
    source = op
    while source.type in ('Switch', 'RefSwitch'):  # of a branch in a branch, too
        source = source.inputs[0].op
    if source is not op and not tower.has(source.name):
        return operation_device(op) == operation_device(source)
    readers = [op] + [reader for tensor in op.outputs for reader in tensor.consumers()
                      if op.type == 'Const']
    return any(reader.type == 'TensorArrayV3' for reader in readers)


def _of_runtime(built, run_metadata):
    """Yields the findings about the devices on which the runtime placed a step."""
    placed = {node.name: resolved(node.device) for graph in run_metadata.partition_graphs
              for node in graph.node}
    if not placed:
        raise InvalidArgumentError(
            'run_metadata holds no partition graphs: run the step with options='
            'tf.RunOptions(output_partition_graphs=True).')
    yield from _of_variables(
        built._replace(variables=[v for v in built.variables if v.op.name in placed],
                       slots=[s for s in built.slots if s.op.name in placed]),
        lambda variable: placed.get(variable.op.name, resolved(variable.device)))
    graph = leaves_of(built.towers[0].inputs)[0].graph
    for tower in built.towers:
        moved_away, without_kernel = [], []
        for name, device in placed.items():
            if not tower.has(name) or device in stages_of(tower.device):
                continue
            op = operation_named(graph, name)
            # The runtime's own is a transfer, or a folded constant. A device named in the graph is
            # what the audit of the graph has checked. A variable, or a TensorArray, binds the rest.
            if op is None or operation_device(op) not in stages_of(tower.device) or any(
                    tensor.dtype == tf.resource for tensor in op.inputs) or op.type == 'Enter':
                continue
            # Integers and strings have few kernels on a GPU; operations on floats have one.
            floats = any(output.dtype.is_floating for output in op.outputs)
            (moved_away if floats or not is_gpu(tower.device) else without_kernel).append(
                '%s to %s' % (name, _named(device)))
        if moved_away:
            yield _BROKEN, 'the runtime moved %s of tower %d off %s: %s' % (
                _operations(moved_away), tower.index, short_name(tower.device), _some(moved_away))
        if without_kernel:
            yield _NOTE, 'the runtime moved %s of tower %d that %s has no kernel for' % (
                _operations(without_kernel), tower.index, short_name(tower.device))
    yield from _of_rewrites(built, run_metadata)
    yield _NOTE, 'what the runtime placed was checked: %s on %s' % (
        _operations(placed), ', '.join(short_name(name) for name in sorted(set(placed.values()))))


def _of_rewrites(built, run_metadata):
    """Yields whether a precision and XLA, which the runtime's rewrites bring, are in the step."""
    if built.precision != 'float32':
        converted = converted_operations(run_metadata, built.precision)
        if converted:
            yield _NOTE, 'in %s: %s' % (built.precision, ', '.join(
                '%d %s' % (count, kind) for kind, count in converted.most_common(6)))
        else:
            yield _BROKEN, (
                'no operation ran in %s: was the session made with use_precision(config, %r, '
                'built.devices)? bf16 on CPUs needs TF_ENABLE_ONEDNN_OPTS=1, fp16 a GPU of compute '
                'capability 7.0' % (built.precision, built.precision))
    if built.xla:
        found = xla_clusters(run_metadata)
        yield _NOTE, 'XLA compiled %s' % (', '.join('%d clusters for %s' % (
            found[tower.device], short_name(tower.device)) for tower in built.towers))
        if not all(found[tower.device] for tower in built.towers):
            yield _BROKEN, 'XLA compiled nothing for some tower'


def _transfers(operations):
    tensors = {(operation_device(tensor.op), operation_device(op), tensor.name): tensor
               for op in operations for tensor in op.inputs if tensor.dtype != tf.resource}
    by_pair = collections.OrderedDict()
    for (source, target, _), tensor in tensors.items():
        if source and target and source != target:
            count = None if tensor.dtype == tf.string else tensor.shape.num_elements()
            by_pair.setdefault((source, target), []).append(
                None if count is None else count * tensor.dtype.base_dtype.size)
    return sorted((Transfers(source, target, len(sizes), sum(size or 0 for size in sizes),
                             sizes.count(None)) for (source, target), sizes in by_pair.items()),
                  key=lambda pair: -pair.bytes)


def _bytes(count):
    for unit, size in (('GB', 1e9), ('MB', 1e6), ('kB', 1e3)):
        if count >= size:
            return '%.1f %s' % (count / size, unit)
    return '%d bytes' % count


def _operations(some):
    return '%d operation%s' % (len(some), '' if len(some) == 1 else 's')


def _named(device):
    return short_name(device) if device else 'no device'


def _all_named(operations_on_devices):
    return ', '.join(sorted({_named(device) for _, device in operations_on_devices}))


def _some(items, limit=3):
    more = ', ... (%d more)' % (len(items) - limit) if len(items) > limit else ''
    return ', '.join(items[:limit]) + more
