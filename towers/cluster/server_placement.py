"""Puts the operations of a finished graph on the parameter servers and on this worker.

When the graph is complete, its global variables are spread over the servers, by size, and all other
operations are put on this worker, but for those that look up rows of a variable. So gradients are
added up within the machine before they go over the wire, and rows go, not their table.
"""

import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import ClusterError
from towers.graph.edit import group_of
from towers.graph.graph_walk import behind, bytes_of, step_operations
from towers.graph.op_types import CALLS, LEAD_IN, RESHAPES, VARIABLE_OPS
from towers.graph.order import Precedence
from towers.graph.variable_access import REFERENCE_VARIABLES, Writes


def spread(cluster, built, scaffold):
    """Spreads the complete graph of a build, and of the `tf.train.Scaffold` of its session."""
    graph, trained = tf.get_default_graph(), [variable for _, variable in built.gradients]
    if cluster.is_chief and cluster.workers_a_step > 1:
        check_writes(graph, built)
    read_after_writes(graph, trained + tf.global_variables(), built.train_op)
    scaffold.finalize()
    spread_over_servers(cluster, graph, trained)


def check_writes(graph, built):
    """Raises `ClusterError` if something beside the step computes new values of trained variables,
    which other workers would read before or after that, by chance. Values may be loaded."""
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
                    "UPDATE_OPS, or use kind='ring'." % (op.name, variable.op.name))


def read_after_writes(graph, variables, train_op=None):
    """Gives what waits for a write of a reference variable the value from after that write.

    Between a server and a worker the value is sent at the start of the step: moving averages that
    take the global step after the train op would get the one before it. Here such an operation gets
    a read of its own, on the server, which waits for all else that the operation waits for;
    `ClusterError` in a loop or branch (v1), or through a reshape. `train_op`, or None, counts as a
    write of all variables: it waits for the chief's.
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
    for op in operations if writes else ():
        for place, tensor in enumerate(op.inputs):
            source = behind(tensor, LEAD_IN | RESHAPES).op
            if (source.name not in writes or not waits(op, source) or waits(tensor.op, source)
                    or source.name in _taken(op) or op.type in ('Merge', 'RefMerge')):
                continue
            if behind(tensor, ('Identity',)).op is not source:
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


def spread_over_servers(cluster, graph, first=()):
    """Gives a task to each operation without one; returns what `servers_of_variables` does."""
    tasks = servers_of_variables(cluster, graph, first)
    # Name of an operation -> its server: variables, accumulators and token queues here; in the loop
    # also what takes a variable, or is colocated with one (the operations of initial values are).
    servers = {name: device_of_server(task) for name, task in tasks.items()}
    servers.update((op.name, op.device) for op in graph.get_operations() if '/job:ps' in op.device)
    for op in graph.get_operations():
        device = tf.DeviceSpec.from_string(op.device or '')
        if device.job is not None:
            continue
        around = [op.name] + ([] if op.type in CALLS else _taken(op) + group_of(op))
        known = [servers[name] for name in around if name in servers]
        if known:
            servers[op.name] = known[0]
        compat.set_device(op, known[0] if known else tf.DeviceSpec(
            job='worker', task=cluster.rank, device_type=device.device_type,
            device_index=device.device_index).to_string())
    return tasks


def device_of_server(task):
    """The device of a parameter server, by its number."""
    return '/job:ps/task:%d/device:CPU:0' % task


def servers_of_variables(cluster, graph, first=()):
    """{name: number of the server} of the global variables of a graph, in whatever order they were
    made: those in `first` are dealt out before all others, a slot with its weight."""
    variables = {variable.op.name: variable for variable in
                 list(first) + graph.get_collection(tf.GraphKeys.GLOBAL_VARIABLES)}

    def leader(name):
        beside = [each for each in group_of(variables[name].op) if each in variables]
        return name if not beside or name in beside else leader(beside[0])
    leaders, is_first = {name: leader(name) for name in variables}, {each.op.name for each in first}
    tasks = tasks_by_size({name: bytes_of(variables[name]) for name in set(leaders.values())},
                          len(cluster.ps), is_first)
    return {name: tasks[leaders[name]] for name in variables}


def tasks_by_size(sizes, count, first=()):
    """{name: number of the server}: each goes to the one that has the fewest bytes so far, the
    largest first, those of the names `first` before all others."""
    used, tasks = [0] * count, {}
    for name in sorted(sizes, key=lambda each: (each not in first, -sizes[each], each)):
        tasks[name] = used.index(min(used))
        used[tasks[name]] += sizes[name]
    return tasks


def _taken(op):
    """Names of the variables that an operation takes by handle or reference, not by value."""
    by_reference = any(argument.is_ref for argument in op.op_def.input_arg)
    return [behind(tensor, LEAD_IN).op.name for tensor in op.inputs if tensor.dtype == tf.resource
            or by_reference and tensor.dtype != tensor.dtype.base_dtype]
