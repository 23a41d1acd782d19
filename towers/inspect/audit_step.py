"""The audit of a step that was run: did TensorFlow place and rewrite it as the plan says?

Its test is tests/inspect/test_audit.py.
"""

import typing

import tensorflow.compat.v1 as tf

from towers.api.built import BuiltTowers
from towers.errors import InvalidArgumentError
from towers.gradients.tower import Tower
from towers.graph.graph_walk import leaves_of, operation_named
from towers.inspect.findings import (
    Findings,
    broken,
    counted_operations,
    device_name,
    findings_of_variables,
    first_few,
    note,
)
from towers.placement.devices import is_gpu, short_name
from towers.placement.numerics import converted_operations, xla_clusters
from towers.placement.tower_device import operation_device, stages_of, without_localhost


def findings_of_step(built: BuiltTowers, run_metadata: tf.RunMetadata) -> Findings:
    """Yields the findings about the devices on which a step ran, and how it was rewritten.

    Raises:
      InvalidArgumentError: the metadata has no partition graphs.
    """
    device_of = _devices_of_step(run_metadata)
    if not device_of:
        raise InvalidArgumentError(
            'run_metadata holds no partition graphs: run the step with options='
            'tf.RunOptions(output_partition_graphs=True).')
    # Only variables and slots that the step uses have a device in the metadata: only these are
    # checked. Replicas are all checked; see `device_of_variable`.
    used = built._replace(
        variables=[variable for variable in built.variables if variable.op.name in device_of],
        slots=[slot for slot in built.slots if slot.op.name in device_of])

    def device_of_variable(variable: tf.Variable) -> str:
        """Where a variable was placed. A replica that the step does not use counts as being where
        the graph puts it."""
        device_in_graph = without_localhost(variable.device)
        return device_of.get(variable.op.name, device_in_graph)

    yield from findings_of_variables(used, device_of_variable)
    graph = leaves_of(built.towers[0].inputs)[0].graph
    for tower in built.towers:
        yield from _findings_of_moves(tower, graph, device_of)
    yield from _findings_of_precision(built, run_metadata)
    yield from _findings_of_xla(built, run_metadata)
    devices = ', '.join(map(short_name, sorted(set(device_of.values()))))
    yield note('what the runtime placed was checked: %s on %s' % (
        counted_operations(device_of), devices))


def _devices_of_step(run_metadata: tf.RunMetadata) -> typing.Dict[str, str]:
    """{name of an operation: the device on which it ran}; {} without partition graphs."""
    device_of = {}
    for partition in run_metadata.partition_graphs:
        for node in partition.node:
            device_of[node.name] = without_localhost(node.device)
    return device_of


def _findings_of_moves(tower: Tower, graph: tf.Graph,
                       device_of: typing.Dict[str, str]) -> Findings:
    """Yields the operations of a tower that the runtime has moved off the tower's devices.

    Args:
      tower: the tower.
      graph: the graph of the tower.
      device_of: {name of an operation: the device on which it ran}.
    """
    moved_away = []
    without_kernel = []
    for op in _moved_operations(tower, graph, device_of):
        place = '%s to %s' % (op.name, device_name(device_of[op.name]))
        # On a GPU, operations on floats have a kernel, and few operations on integers and strings
        # have one. On a CPU all operations have a kernel.
        has_floats = any(output.dtype.is_floating for output in op.outputs)
        should_have_kernel = has_floats or not is_gpu(tower.device)
        if should_have_kernel:
            moved_away.append(place)
        else:
            without_kernel.append(place)
    if moved_away:
        yield broken('the runtime moved %s of tower %d off %s: %s' % (
            counted_operations(moved_away), tower.index, short_name(tower.device),
            first_few(moved_away)))
    if without_kernel:
        yield note('the runtime moved %s of tower %d that %s has no kernel for' % (
            counted_operations(without_kernel), tower.index, short_name(tower.device)))


def _moved_operations(tower: Tower, graph: tf.Graph,
                      device_of: typing.Dict[str, str]) -> typing.List[tf.Operation]:
    """Lists the operations of a tower that ran elsewhere than on the device they ask for.

    Args:
      tower: the tower.
      graph: the graph of the tower.
      device_of: {name of an operation: the device on which it ran}.
    """
    moved = []
    for name, device in device_of.items():
        ran_on_tower = device in stages_of(tower.device)
        if not tower.has(name) or ran_on_tower:
            continue
        op = operation_named(graph, name)  # None: made by the runtime, such as a transfer
        if op is not None and _has_to_stay(op, tower):
            moved.append(op)
    return moved


def _has_to_stay(op: tf.Operation, tower: Tower) -> bool:
    """Whether an operation asks for a device of its tower, and the runtime has to keep it there.

    The audit of the graph has checked operations that ask for another device. An operation that
    takes a variable or a TensorArray runs where this variable or array is; so does an `Enter`,
    which takes a variable or an array into a loop.
    """
    asks_for_tower = operation_device(op) in stages_of(tower.device)
    takes_resource = any(tensor.dtype == tf.resource for tensor in op.inputs)
    return asks_for_tower and op.type != 'Enter' and not takes_resource


def _findings_of_precision(built: BuiltTowers, run_metadata: tf.RunMetadata) -> Findings:
    """Yields whether operations of the step ran in the precision of the build; nothing for float32.

    The runtime rewrites a graph to float16 or bfloat16, in a session whose config asks for it.
    """
    if built.precision == 'float32':
        return
    converted = converted_operations(run_metadata, built.precision)
    if converted:
        counts = ['%d %s' % (count, kind) for kind, count in converted.most_common(6)]
        yield note('in %s: %s' % (built.precision, ', '.join(counts)))
        return
    yield broken(
        'no operation ran in %s: was the session made with use_precision(config, %r, '
        'built.devices)? bf16 on CPUs needs TF_ENABLE_ONEDNN_OPTS=1, fp16 a GPU of compute '
        'capability 7.0' % (built.precision, built.precision))


def _findings_of_xla(built: BuiltTowers, run_metadata: tf.RunMetadata) -> Findings:
    """Yields how many clusters of each tower XLA has compiled; nothing for a build without XLA."""
    if not built.xla:
        return
    clusters_of_devices = xla_clusters(run_metadata)
    texts = []
    has_tower_without = False
    for tower in built.towers:
        num_clusters = clusters_of_devices[tower.device]
        texts.append('%d clusters for %s' % (num_clusters, short_name(tower.device)))
        if num_clusters == 0:
            has_tower_without = True
    yield note('XLA compiled %s' % ', '.join(texts))
    if has_tower_without:
        yield broken('XLA compiled nothing for some tower')
