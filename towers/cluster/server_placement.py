"""Puts the operations of a finished graph on the parameter servers and on this worker.

When the graph is complete, its global variables are spread over the servers, by size. All other
operations are put on this worker, except the operations that look up rows of a variable. So the
gradients of a machine are added up before they go over the wire, and rows go, not their table.

Words of other rooms used here: operations of the types `LEAD_IN` hand a value on, also into a loop
or a branch; `RESHAPES` are types that give a value in another shape; `CALLS` are types that call
functions; `SETS` are types that set a variable. A `Precedence` knows which of some operations
another operation waits for.
"""

import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import ClusterError
from towers.gradients.gradient_pairs import variables_of
from towers.graph.edit import colocation_group
from towers.graph.graph_walk import (
    bytes_of,
    names_of,
    operation_names,
    source_through,
    step_operations,
    variables_by_name,
)
from towers.graph.op_types import CALLS, LEAD_IN, RESHAPES, SETS, VARIABLE_OPS
from towers.graph.variable_access import REFERENCE_VARIABLES, Writes
from towers.graph.waits import Precedence


def spread(cluster: typing.Any, built: typing.Any, scaffold: tf.train.Scaffold) -> None:
    """Spreads the complete graph of a build, and of the `tf.train.Scaffold` of its session."""
    graph = tf.get_default_graph()
    trained = variables_of(built.gradients)
    are_workers_in_step = cluster.workers_a_step > 1  # asynchronous ones are not
    if cluster.is_chief and are_workers_in_step:  # all workers read what its update writes
        check_writes(graph, built)
    read_after_writes(graph, trained + tf.global_variables(), built.train_op)
    # The scaffold makes operations of its own, such as initializers, which are to be spread, too.
    scaffold.finalize()
    spread_over_servers(cluster, graph, trained)


def check_writes(graph: tf.Graph, built: typing.Any) -> None:
    """Raises `ClusterError` if something beside the step computes new values of trained variables:
    it is left to chance whether other workers read a variable before or after such a write. A write
    that loads values, which are computed from no variable, is allowed."""
    fetches = [built.train_op]
    for tower in built.towers:
        fetches.extend(tower.updates)  # which the program may run with the train op
    step_names = names_of(step_operations(fetches))
    writes = Writes(graph)
    for variable in variables_of(built.gradients):
        initializer = variable.initializer.name
        for op in writes.writers_of(variable):
            may_write = op.name in step_names or op.name == initializer or _loads(op)
            if may_write:
                continue
            raise ClusterError(
                '%r writes the trained variable %r beside built.train_op, and other workers '
                'may read it before or after that: put the write into the collection '
                "UPDATE_OPS, or use kind='ring'." % (op.name, variable.op.name))


def _loads(op: tf.Operation) -> bool:
    """Whether an operation sets a variable to a value that is computed from no variable, as a
    program does that loads weights."""
    if op.type not in SETS:
        return False
    return all(source.type not in VARIABLE_OPS for source in step_operations([op.inputs[1]]))


def read_after_writes(graph: tf.Graph, variables: typing.Iterable[tf.Variable],
                      train_op: typing.Optional[tf.Operation] = None) -> None:
    """Gives each operation that waits for a write of a reference variable the new value.

    On one device an operation that takes a reference variable reads its memory when it runs. But
    from a server to a worker TensorFlow sends the value at the start of the step: moving averages
    that take the global step after the train op would get the number from before the step. Here
    each such operation gets a read of its own. It is on the server, and waits for all that the
    operation waits for, the write among them.

    Args:
      graph: the graph of the operations.
      variables: the variables that may be written.
      train_op: counts as a write of all variables, since it waits for the chief's update; or None.

    Raises:
      ClusterError: such an operation gets the value by way of a loop or a branch (v1), or reshaped.
    """
    names = {variable.op.name for variable in variables if variable.op.type in REFERENCE_VARIABLES}
    reads = _LateReads(graph, names, train_op)
    if not reads.writes:
        return
    for op in graph.get_operations():
        for position, tensor in enumerate(op.inputs):
            # The variable, if the tensor has its value: perhaps by way of operations that lead into
            # a loop or a branch (`LEAD_IN`), or reshaped.
            source = source_through(tensor, LEAD_IN | RESHAPES).op
            if reads.needs_late_read(op, tensor, source):
                _check_is_plain_read(op, tensor, source)
                _replace_by_late_read(op, position, source)


def _check_is_plain_read(op: tf.Operation, tensor: tf.Tensor, source: tf.Operation) -> None:
    """Raises `ClusterError` unless another read of the variable `source` can take the place of a
    tensor that an operation takes. A read gives the value as it is, outside of loops: so nothing
    but `Identity` may be between the variable and the operation."""
    is_plain_read = source_through(tensor, ('Identity',)).op is source
    if not is_plain_read:
        raise ClusterError(
            '%r takes the value of the variable %r after a write that it waits for. %r is a '
            'reference variable on a parameter server, whose value is sent at the start of the '
            'step. Make it with tf.get_variable(…, use_resource=True), and read it there by '
            'read_value().' % (op.name, source.name, source.name))


class _LateReads:
    """Which operations take the value of a reference variable, and wait for a write of it.

    Attributes:
      writes: the operations that write each variable, by its name.
    """

    def __init__(self, graph: tf.Graph, names: typing.Set[str],
                 train_op: typing.Optional[tf.Operation]):
        """Looks for the writes of the variables of these `names`; `train_op`, if there is one,
        counts as a write of each of these variables."""
        self.writes: typing.Dict[str, typing.List[tf.Operation]] = {}
        if names:  # to find the writes of a large graph takes long
            finder = Writes(graph)
            for op in graph.get_operations():
                written = names if op is train_op else names.intersection(finder.written_by(op))
                for name in written:
                    self.writes.setdefault(name, []).append(op)
        all_writes: typing.List[tf.Operation] = sum(self.writes.values(), [])
        self._order = Precedence(all_writes)  # knows what comes after which write

    def needs_late_read(self, op: tf.Operation, tensor: tf.Tensor, source: tf.Operation) -> bool:
        """Whether an operation takes a value that is too old: it waits for a write of the variable
        `source`, and its input `tensor`, which has the variable's value, does not.

        Args:
          op: the operation.
          tensor: one of its inputs.
          source: the operation of the variable that the tensor is read from; or any other
            operation, if the tensor is read from no variable.
        """
        if source.name not in self.writes:  # no variable, or a variable that nothing writes
            return False
        if op.type in ('Merge', 'RefMerge'):
            # One of its inputs is dead in a step. A late read in the place of the live input would
            # wait for the dead input, and be dead with it.
            return False
        if source.name in _variables_taken(op):
            # It runs on the server, where it reads the variable's memory itself.
            return False
        return self._waits_for_write(op, source) and not self._waits_for_write(tensor.op, source)

    def _waits_for_write(self, op: tf.Operation, source: tf.Operation) -> bool:
        """Whether an operation waits for another operation that writes the variable `source`."""
        return any(op is not write and self._order.waits_for(op, write)
                   for write in self.writes[source.name])


def _replace_by_late_read(op: tf.Operation, position: int, source: tf.Operation) -> None:
    """Gives an operation, in the place of an input, a read of the variable `source` that waits for
    all else that the operation waits for. The read is on the variable's server."""
    replaced = op.inputs[position]
    awaited = list(op.control_inputs)
    awaited += [tensor.op for tensor in op.inputs if tensor is not replaced]
    with op.graph.as_default(), tf.name_scope('served/after/'), \
            op.graph.colocate_with(source, ignore_existing=True):
        with tf.control_dependencies(None), tf.control_dependencies(awaited):  # and nothing else
            read = tf.identity(source.outputs[0], source.name + '/read')
    compat.replace_input(op, position, read)


def spread_over_servers(cluster: typing.Any, graph: tf.Graph,
                        first: typing.Iterable[tf.Variable] = ()) -> typing.Dict[str, int]:
    """Gives a job and a task to each operation of a graph that has no job.

    Args:
      cluster: the `Cluster`.
      graph: the complete graph.
      first: the variables that are dealt out to the servers before all others.

    Returns:
      What `servers_of_variables` returns.
    """
    tasks = servers_of_variables(cluster, graph, first)
    # {name of an operation on a server: its device}. The loop below adds operations to it.
    servers = {name: device_of_server(task) for name, task in tasks.items()}
    servers.update(_devices_with_server(graph))
    for op in graph.get_operations():
        device = tf.DeviceSpec.from_string(op.device or '')
        has_job = device.job is not None
        if has_job:
            continue
        server = _server_of(op, servers)
        if server is not None:
            servers[op.name] = server
            compat.set_device(op, server)
        else:
            on_this_worker = tf.DeviceSpec(
                job='worker', task=cluster.rank, device_type=device.device_type,
                device_index=device.device_index)
            compat.set_device(op, on_this_worker.to_string())
    return tasks


def _devices_with_server(graph: tf.Graph) -> typing.Dict[str, str]:
    """{name of an operation: its device} of those operations that were made for a server, such as
    the accumulators and the queues of tokens."""
    return {op.name: op.device for op in graph.get_operations() if '/job:ps' in op.device}


def _server_of(op: tf.Operation, servers: typing.Dict[str, str]) -> typing.Optional[str]:
    """The device of the server on which an operation runs; None if it runs on this worker. On a
    server are variables, operations that take a variable on it, and operations that are colocated
    with an operation on it.

    Args:
      op: the operation.
      servers: {name of an operation on a server: its device}.
    """
    companions = [op.name]
    calls_functions = op.type in CALLS
    if not calls_functions:  # functions run on this worker, whatever variables they take
        companions += _variables_taken(op) + colocation_group(op)
    for name in companions:
        if name in servers:
            return servers[name]
    return None


def device_of_server(task: int) -> str:
    """The device of a parameter server, by its number."""
    return '/job:ps/task:%d/device:CPU:0' % task


def servers_of_variables(cluster: typing.Any, graph: tf.Graph,
                         first: typing.Iterable[tf.Variable] = ()) -> typing.Dict[str, int]:
    """Deals out the global variables of a graph to the servers; a slot goes with its variable.

    Args:
      cluster: the `Cluster`.
      graph: the graph.
      first: the variables that are dealt out before all others. All workers have these variables.
        Dealt out first, they are on the same servers for all workers, whatever other variables a
        worker makes.

    Returns:
      {name of a variable: number of its server}, whatever the order in which the variables were
      made.
    """
    first = list(first)
    variables = variables_by_name(first + graph.get_collection(tf.GraphKeys.GLOBAL_VARIABLES))
    leaders = {name: _leader_of(name, variables) for name in variables}
    sizes = {leader: bytes_of(variables[leader]) for leader in set(leaders.values())}
    tasks = tasks_by_size(sizes, len(cluster.ps), operation_names(first))
    return {name: tasks[leader] for name, leader in leaders.items()}


def _leader_of(name: str, variables: typing.Dict[str, tf.Variable]) -> str:
    """The name of the variable that a variable is colocated with, as a slot is with the variable it
    belongs to; its own name where there is no such variable. A leader may have a leader in turn, so
    the search goes on from there.

    Args:
      name: of the variable.
      variables: {name: variable} of all variables.
    """
    leaders = [other for other in colocation_group(variables[name].op) if other in variables]
    leads_itself = name in leaders  # TensorFlow's way to say that an operation has no leader
    if leads_itself or not leaders:
        return name
    return _leader_of(leaders[0], variables)


def tasks_by_size(sizes: typing.Dict[str, int], count: int,
                  first: typing.Container[str] = ()) -> typing.Dict[str, int]:
    """Deals out variables to servers, the largest first, each to the server with the fewest bytes
    so far.

    Args:
      sizes: bytes of each variable, by its name.
      count: how many servers there are.
      first: names of the variables that are dealt out before all others.

    Returns:
      {name of a variable: number of its server}.
    """
    def order(name: str) -> tuple:
        """The key to sort the variables by: `first`, then the largest, then by name."""
        return name not in first, -sizes[name], name
    bytes_of_servers = [0] * count
    tasks = {}
    for name in sorted(sizes, key=order):
        server = bytes_of_servers.index(min(bytes_of_servers))
        bytes_of_servers[server] += sizes[name]
        tasks[name] = server
    return tasks


def _variables_taken(op: tf.Operation) -> typing.List[str]:
    """Names of the variables that an operation takes by handle or reference, not by value."""
    # An operation without an argument of a reference type takes the value of a reference.
    may_take_reference = any(argument.is_ref for argument in op.op_def.input_arg)
    names = []
    for tensor in op.inputs:
        is_handle = tensor.dtype == tf.resource
        has_type_of_reference = tensor.dtype != tensor.dtype.base_dtype  # such as `float32_ref`
        if is_handle or (may_take_reference and has_type_of_reference):
            variable = source_through(tensor, LEAD_IN).op  # from outside of loops and branches
            names.append(variable.name)
    return names
