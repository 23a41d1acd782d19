"""How long a step is busy with each operation of a model, from the trace of a few steps."""

import collections
import re
import statistics
import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.arguments import check_config, check_count, check_feed, check_instance
from towers.api.built import BuiltTowers
from towers.errors import MeasurementError
from towers.graph.variable_access import variable_op
from towers.memory.measure import (checked_start, explained_input, initialized_session,
                                   traced_steps)
from towers.placement.devices import session_config
from towers.placement.precision import use_precision
from towers.tower.auto_stages import OperationTimes

_TRANSFERS = re.compile(r' = _?(Host)?(Send|Recv)\(')


def operation_times(built: BuiltTowers, feed_dict: typing.Optional[dict] = None, *,
                    warm_up: int = 2, steps: int = 3, start: typing.Sequence = (),
                    config: typing.Optional[tf.ConfigProto] = None) -> OperationTimes:
    """Traces a few steps of a model, and says how long each of its operations takes.

    For `AutoStages`: build the model on one device, in a graph of its own. On CPUs the session runs
    one operation after the other, so that none waits for another's processor.

    Args:
      built: what `build_towers` returned; only its first tower is looked at.
      feed_dict: for `session.run`.
      warm_up: steps before it looks, at least 1.
      steps: how many are traced; of each operation the median counts.
      start: operations that the session runs after the initializers: of the input.
      config: `tf.ConfigProto` of the session; None for `session_config`'s, with one inter-op
        thread.

    Returns:
      `OperationTimes`. The time of an operation of the backward pass is added to that of the
      operation that it is the gradient of; an update's is its variable's.

    Raises:
      MeasurementError: TensorFlow traced none of the model's operations; a step lacks its input.
      InvalidArgumentError: not what `build_towers` returned; an argument of another kind.
    """
    check_instance('built', built, BuiltTowers, 'what build_towers returned')
    check_count('warm_up', warm_up)
    check_count('steps', steps)
    check_feed(feed_dict)
    check_config(config)
    start, graph = checked_start('start', start), built.loss.graph
    if config is None:
        config = use_precision(session_config(built.devices, inter_op_threads=1), built.precision,
                               built.devices)
    step = built.train_op if built.train_op is not None else built.loss
    with explained_input(), initialized_session(graph, config, start) as session:
        traces = [kernel_seconds(metadata)
                  for metadata in traced_steps(session, step, feed_dict, warm_up, steps)]
    seconds = {name: statistics.median(trace.get(name, 0) for trace in traces)
               for name in set().union(*traces)}
    times = times_of_model(seconds, built)
    if not times.seconds:
        raise MeasurementError(
            'TensorFlow traced no operation of the first tower: of GPUs it needs CUPTI (libcupti '
            'on LD_LIBRARY_PATH).')
    return times


def kernel_seconds(metadata):
    """{name of an operation: seconds of its kernels in a traced step}.

    Of a GPU those of its streams count, not the time in which they were launched.
    """
    devices = {device.device for device in metadata.step_stats.dev_stats}
    with_streams = {name.split('/stream:')[0] for name in devices if '/stream:all' in name}
    found = collections.Counter()
    for device in metadata.step_stats.dev_stats:
        if device.device in with_streams or (
                '/stream:' in device.device and not device.device.endswith('/stream:all')):
            continue
        for node in device.node_stats:
            if not _TRANSFERS.search(node.timeline_label):
                name = node.node_name.split(':')[0]
                found[name] += (node.op_end_rel_micros - node.op_start_rel_micros) / 1e6
    return found


def times_of_model(seconds, built):
    """`OperationTimes` of the seconds of a step's operations by their names.

    Args:
      seconds: dict, as `kernel_seconds` returns.
      built: what `build_towers` returned.
    """
    graph, tower = built.loss.graph, built.towers[0]
    known = {op.name: op for op in graph.get_operations()}
    owners = _Owners(tower, graph)
    operations, variables = collections.Counter(), collections.Counter()
    for name, spent in seconds.items():
        op = _operation(name, known)
        owner = None if op is None else owners.of(op)
        if owner is None:
            continue
        if tower.has(owner.name):
            operations[owner.name] += spent
        else:
            variables[owner.name] += spent
    return OperationTimes(dict(operations), dict(variables))


def _operation(name, known):
    """The operation of a kernel; of one within a function, the operation that calls it."""
    while name and name not in known:
        name = name.rpartition('/')[0]
    return known.get(name)


class _Owners:
    """Tells which operation of the forward pass, or which variable, the time of one belongs to."""

    def __init__(self, tower, graph):
        self._tower = tower
        self._variables = {variable.op.name for variable in tower.variables}
        self._found = {}
        place = {op.name: number for number, op in enumerate(graph.get_operations())}
        for op in graph.get_operations():
            if op.name not in tower.backward:
                continue
            of = compat.differentiated_operation(op)
            if of is None or of.name in tower.backward:
                # A sum of gradients, say: the first of those that they are of, as for stages.
                owners = [self._found.get(tensor.op.name) for tensor in op.inputs]
                of = min([owner for owner in owners if owner is not None],
                         key=lambda owner: place[owner.name], default=None)
            self._found[op.name] = of

    def of(self, op):
        """An operation of the tower's forward pass, a variable's operation, or None."""
        if op.name in self._tower.backward:
            return self._found[op.name]
        if self._tower.has(op.name):
            return op
        variables = [variable_op(tensor) for tensor in op.inputs]
        return next((each for each in variables if each is not None
                     and each.name in self._variables), None)
