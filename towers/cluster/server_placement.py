"""Puts the operations of a finished graph on the parameter servers and on this worker.

The towers are built as on one machine, their variables on its CPU. When the graph is complete, its
global variables are spread over the servers, by size, and all other operations are put on this
worker, but for those that look up rows of a variable. So gradients are added up within the machine
before they go over the wire, rows go over the wire and not their table, and the program's other
operations (savers, summaries, input) are on no server.
"""

import re

import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import ClusterError
from towers.graph.edit import group_of
from towers.graph.graph_walk import behind, bytes_of, step_operations
from towers.graph.op_types import LEAD_IN, RESHAPES, VARIABLE_OPS
from towers.graph.order import Frames, Precedence
from towers.graph.variable_access import REFERENCE_VARIABLES, Writes
from towers.tensorflow_errors import reason_of

# These take the handles of variables that the functions use which they call.
_CALLS = ('If', 'StatelessIf', 'While', 'StatelessWhile', 'Case', 'StatelessCase',
          'PartitionedCall', 'StatefulPartitionedCall')
# They take the value of a reference variable, all of which would be sent to the worker.
_LOOKUPS = ('Gather', 'GatherV2', 'GatherNd')


def spread(cluster, built, scaffold):
    """Spreads the graph of a build, when it is complete.

    Args:
      cluster: `Cluster` with parameter servers.
      built: `BuiltTowers`.
      scaffold: the `tf.train.Scaffold` of the session to be made.

    Raises:
      ClusterError: an operation that cannot be placed, or whose place in the order cannot be kept.
    """
    graph, trained = tf.get_default_graph(), [variable for _, variable in built.gradients]
    if cluster.is_chief and built.machines.sums_up:
        check_writes(graph, built)
    read_after_writes(graph, trained + _global_variables(graph), built.train_op)
    scaffold.finalize()
    spread_over_servers(cluster, graph, trained)


def check_writes(graph, built):
    """Raises `ClusterError` if something beside the step computes new values of trained variables.

    Other workers would read them before or after that, by chance. What is only loaded, from a
    checkpoint or by a feed, is what a program begins with.

    Args:
      graph: a `tf.Graph`.
      built: `BuiltTowers` of the chief, whose step has the update.
    """
    updates = [update for tower in built.towers for update in tower.updates]
    step, writes = {op.name for op in step_operations([built.train_op] + updates)}, Writes(graph)
    for _, variable in built.gradients:
        for op in writes.to(variable):
            if op.name not in step and op.name != variable.initializer.name and (
                    op.type not in ('Assign', 'AssignVariableOp')
                    or any(each.type in VARIABLE_OPS for each in step_operations([op.inputs[1]]))):
                raise ClusterError(
                    '%r writes the trained variable %r beside built.train_op, and other workers '
                    'may read it before or after that: put the write into the collection '
                    "UPDATE_OPS, or into the optimizer's apply_gradients, or use kind='ring'."
                    % (op.name, variable.op.name))


def read_after_writes(graph, variables, train_op=None):
    """Gives what waits for a write of a reference variable the value from after that write.

    On one machine an operation that takes the value of a reference variable gets the variable's
    memory: if it waits for a write, it sees what was written. Between a server and a worker the
    value is sent at the start of the step: moving averages that take the global step after the
    train op would get the one before it. Here such an operation gets a read of its own, on the
    server, which waits for all else that the operation waits for. (The variables that the model
    makes in the build are resource variables, which TensorFlow reads anew.)

    Args:
      graph: a `tf.Graph` that no session has run yet.
      variables: the variables that are on servers.
      train_op: operation that counts as a write of all of them: on a worker that does not make the
        update itself, it waits for the one that does; or None.

    Raises:
      ClusterError: an operation that has to be given another value is within a loop or branch (v1),
        or takes it through a reshape, which others may take as it was.
    """
    names = {variable.op.name for variable in variables if variable.op.type in REFERENCE_VARIABLES}
    finder, operations, writes = Writes(graph), graph.get_operations(), {}
    for op in operations if names else ():
        for name in names if op is train_op else names.intersection(finder.of(op)):
            writes.setdefault(name, []).append(op)
    order = Precedence([op for each in writes.values() for op in each])

    def waits(op, source):
        return any(order.waits_for(op, write) and op is not write
                   for write in writes.get(source.name, ()))
    frames = None
    for op in operations if writes else ():
        for place, tensor in enumerate(op.inputs):
            source = behind(tensor, LEAD_IN | RESHAPES).op
            if (source.name not in writes or not waits(op, source) or waits(tensor.op, source)
                    or _takes_reference(op, place, tensor) or op.type in ('Merge', 'RefMerge')):
                continue
            frames = frames or Frames(operations)
            if tensor.op.type not in ('Identity', source.type) or not frames.always_runs(op):
                raise ClusterError(
                    '%r takes the value of the variable %r after a write that it waits for. %r is '
                    'a reference variable on a parameter server, whose value is sent at the start '
                    'of the step. Make it with tf.get_variable(…, use_resource=True), and read it '
                    'there by read_value().' % (op.name, source.name, source.name))
            others = [each.op for each in op.inputs if each is not tensor] + list(op.control_inputs)
            with graph.as_default(), tf.control_dependencies(None), tf.name_scope(
                    'served/after/'), graph.colocate_with(source, True):
                with tf.control_dependencies(others):
                    compat.replace_input(op, place, tf.identity(
                        source.outputs[0], source.name + '/read'))


def _takes_reference(op, place, tensor):
    """Whether an operation takes the variable itself as this input, and not its value."""
    if tensor.dtype == tensor.dtype.base_dtype:
        return False
    arguments = op.op_def.input_arg
    return any(each.is_ref for each in arguments) and (
        len(arguments) != len(op.inputs) or arguments[place].is_ref)


def spread_over_servers(cluster, graph, first=()):
    """Gives a job and a task to each operation of a graph whose device names none.

    Args:
      cluster: `Cluster` with parameter servers.
      graph: a `tf.Graph` that no session has run yet.
      first: list of variables to be dealt out before all others.

    Returns:
      Dict from names of global variables to numbers of servers.
    """
    tasks = servers_of_variables(cluster, graph, first)
    worker = tf.DeviceSpec(job='worker', task=cluster.rank)
    # Name of an operation -> its server: variables here; in the loop below also the operations that
    # take a variable, or are colocated with one (the operations of initial values are).
    servers = {name: '/job:ps/task:%d/device:CPU:0' % task for name, task in tasks.items()}
    servers.update((op.name, op.device) for op in graph.get_operations()
                   if '/job:ps' in op.device)  # the accumulators and token queues
    for op in graph.get_operations():
        spec = tf.DeviceSpec.from_string(op.device or '')
        if spec.job is not None:
            continue
        server = servers.get(op.name)
        if server is None and op.type not in _CALLS:
            server = (_server_of_inputs(op, servers) or _server_of_class(op, servers)
                      or _server_of_table(op, servers))
        if server is not None:
            servers[op.name] = server
            compat.set_device(op, server)
        else:
            compat.set_device(op, tf.DeviceSpec(
                job=worker.job, task=worker.task, device_type=spec.device_type,
                device_index=spec.device_index).to_string())
    return tasks


def servers_of_variables(cluster, graph, first=()):
    """Deals the global variables of a graph out over the parameter servers.

    Every worker has to come to the same, in whatever order it made its variables.

    Args:
      cluster, graph, first: as for `spread_over_servers`.

    Returns:
      Dict from names of variables to numbers of servers.
    """
    variables = {variable.op.name: variable for some in (first, _global_variables(graph))
                 for variable in sorted(some, key=lambda each: each.op.name)}
    owners, sizes = _used_together(graph, variables), {}  # of groups, by their first variables
    for name, variable in variables.items():
        sizes[owners[name]] = sizes.get(owners[name], 0) + bytes_of(variable)
    names, used, tasks = {variable.op.name for variable in first}, [0] * len(cluster.ps), {}
    for are_first in (True, False):
        tasks.update(tasks_by_size({name: size for name, size in sizes.items()
                                    if (name in names) == are_first}, used))
    return {name: tasks[owners[name]] for name in variables}


def tasks_by_size(sizes, used):
    """Deals variables out over servers: each goes to the server that has the fewest bytes so far.

    The largest comes first. Every worker computes the same, in whatever order it made them: it
    depends on their sizes and names alone.

    Args:
      sizes: dict from names of variables to bytes.
      used: list of the bytes that each server has already; grows here.

    Returns:
      Dict from names of variables to numbers of servers.
    """
    tasks = {}
    for name in sorted(sizes, key=lambda each: (-sizes[each], each)):
        tasks[name] = used.index(min(used))
        used[tasks[name]] += sizes[name]
    return tasks


def explained(error):
    """A `ClusterError` for an error of TensorFlow's about operations of two processes; or None.

    A loop or branch of control flow v2 runs where it is called. TensorFlow 2 would keep operations
    in it beside a reference variable, 1.15 those that hand on a resource variable.
    """
    found = _APART.search(reason_of(error))
    return found and ClusterError(
        'TensorFlow would have %r and %r in one process, and one of them is on a parameter server, '
        'the other on a worker: this version cannot take that variable into a loop or branch of '
        'control flow v2. Call tf.disable_control_flow_v2() before the model is built.'
        % found.groups())


_APART = re.compile(r'Cannot colocate nodes \{\{colocation_node ([^}]*)\}\} and '
                    r'\{\{colocation_node ([^}]*)\}\}: Cannot merge devices with incompatible jobs')


def _global_variables(graph):
    with graph.as_default():
        return tf.global_variables()


def _used_together(graph, variables):
    """Groups the variables that have to be on one server.

    An optimizer's operation takes a variable and its slots: they are one group. So are variables
    that are colocated by name: Adam's powers of beta with the first variable.

    Returns:
      Dict from the name of each variable to the name of the first variable of its group.
    """
    first = {name: name for name in variables}

    def root(name):
        while first[name] != name:
            name = first[name]
        return name
    order = {name: place for place, name in enumerate(variables)}
    for op in graph.get_operations():
        if op.type in _CALLS:
            continue
        names = {root(each) for each in _variables_of(op) if each in first}
        if op.name in first:
            names |= {root(each) for each in [op.name] + group_of(op) if each in first}
        names = sorted(names, key=order.get)
        for name in names[1:]:
            first[name] = names[0]
    return {name: root(name) for name in variables}


def _variables_of(op):
    """Names of the variables that an operation takes by handle or reference, not by value."""
    by_reference = any(argument.is_ref for argument in op.op_def.input_arg)
    return [behind(tensor, LEAD_IN).op.name for tensor in op.inputs if tensor.dtype == tf.resource
            or by_reference and tensor.dtype != tensor.dtype.base_dtype]


def _server_of_inputs(op, servers):
    return next((servers[name] for name in _variables_of(op) if name in servers), None)


def _server_of_table(op, servers):
    """Where a lookup's table is; None where the rows are known to be as large as the table."""
    if op.type not in _LOOKUPS:
        return None
    table = behind(op.inputs[0], ('Identity',)).op
    rows, of_table = [tensor.shape.num_elements() for tensor in (op.outputs[0], op.inputs[0])]
    if rows is not None and of_table is not None and rows >= of_table:
        return None
    return servers.get(table.name)


def _server_of_class(op, servers):
    for name in group_of(op):
        if name in servers:
            return servers[name]
    return None
