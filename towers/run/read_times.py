"""When the operations that read a step's input began and ended, recorded in the graph.

The times go to variables, on the way from a reading operation to the operations that take what it
reads. Nothing else waits for the reading: where a step does not read, since it is fed what would be
computed from it, these operations are left out with it, and the variables keep the times of an
earlier step.
"""

import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import InvalidArgumentError
from towers.graph.frames import Frames
from towers.graph.graph_walk import reachable_from
from towers.graph.op_types import PLACEHOLDERS

_READS = frozenset([
    'IteratorGetNext', 'IteratorGetNextSync', 'IteratorGetNextAsOptional',
    'MultiDeviceIteratorGetNextFromShard', 'QueueDequeue', 'QueueDequeueV2', 'QueueDequeueMany',
    'QueueDequeueManyV2', 'QueueDequeueUpTo', 'QueueDequeueUpToV2', 'Unstage'])


class ReadTimes:
    """The times of the reading operations of a step.

    Attributes:
      initializers: list of operations that set all times to 0.
    """

    def __init__(self, reads, step, begin):
        """
        Args:
          reads: what `reads_of` returned; not empty.
          step: the operations of the step.
          begin: the time when the step began, a tensor.
        """
        self._begin = begin
        takers = takers_of(reads, step)
        self._turns = _turns(takers, step)
        self._last = {}  # name of an operation: the records that it waits for
        self._started, self._ended, self.initializers = {}, {}, []
        for turn in self._turns:
            for read in turn:
                started = begin if turn is self._turns[0] else time_after(
                    arrivals(read), 'ready')
                self._started[read], recorded = self._record(started, 'started')
                # Else the runtime could read before it, and reading would seem to take no time.
                compat.add_control_inputs(read, [recorded])
                self._ended[read] = self._record_end(read, takers[read])

    def _record_end(self, read, takers):
        """Records when an operation has read, by its outputs: any of them may be fed instead.

        Returns:
          List of variables.
        """
        ways = {}  # number of an output, or None for control edges: list of takers
        for taker in takers:
            for way in {tensor.value_index for tensor in taker.inputs if tensor.op is read} | (
                    {None} if read in taker.control_inputs else set()):
                ways.setdefault(way, []).append(taker)
        ended = []
        for way in sorted(ways, key=str):
            variable, recorded = self._record(time_after(
                [read if way is None else arrival(read.outputs[way])], 'read'), 'ended')
            ended.append(variable)
            # Else the end could be recorded long after it: a thread with more than one operation to
            # do takes the newest first, and the towers' work is newer than the record.
            for taker in ways[way]:
                compat.add_control_inputs(taker, [recorded])
                self._last.setdefault(taker.name, []).append(recorded)
        return ended

    def _record(self, time, name):
        """`(variable, operation that gives it the time)`."""
        variable = time_variable(name)
        self.initializers.append(variable.initializer)
        return variable, variable.assign(time).op

    def _times(self):
        """`(started, ended)`: dicts from the operations to their times, as they are now."""
        return ({read: variable.read_value() for read, variable in self._started.items()},
                {read: _most([each.read_value() for each in variables])
                 for read, variables in self._ended.items()})

    def waited(self, op, end):
        """The seconds that the step has waited for them, a tensor.

        Args:
          op: the operation of the step.
          end: the time when all is done that it waits for.
        """
        with tf.control_dependencies([end] + self._last.get(op.name, [])):
            started, ended = self._times()
        waited = []
        for turn in self._turns:
            waited.append(_most([tf.where(
                # Else it did not read in this step.
                tf.logical_and(started[read] >= self._begin, ended[read] >= started[read]),
                ended[read] - started[read], tf.zeros([], tf.float64)) for read in turn]))
        return tf.add_n(waited)

    def latest(self, begun):
        """When a step last had all of its input, a tensor.

        Args:
          begun: the time when the latest step began, a tensor of now.
        """
        started, ended = self._times()
        reading = tf.reduce_any(tf.stack([tf.logical_and(
            started[read] >= begun, ended[read] < started[read]) for read in started]))
        times = tf.stack(list(ended.values()) + [begun])
        return tf.where(reading, tf.reduce_min(times), tf.reduce_max(times))


def time_variable(name):
    """A variable for a time; in no collection: it is not saved, nor initialized with the others."""
    return tf.Variable(tf.zeros([], tf.float64), trainable=False, collections=[],
                       use_resource=True, name=name)


def _most(times):
    return times[0] if len(times) == 1 else tf.reduce_max(tf.stack(times))


def reads_of(op, step):
    """The operations that read a step's input, without those in branches and loops; a list.

    Args:
      op: the operation of the step.
      step: the operations of the step.

    Raises:
      InvalidArgumentError: all of them are in branches or loops; or `op` is one.
    """
    if op.type in _READS:
        raise InvalidArgumentError('train_op is %r, which reads the input itself: watch an '
                                   'operation that uses what it reads.' % op.name)
    found = [each for each in step
             if each.type in _READS and not _is_token(each)]
    if not found:
        return []
    frames = Frames(step)
    certain = [each for each in found if frames.always_runs(each)]
    if not certain:
        raise InvalidArgumentError(
            'the step reads its input, %r, within a tf.cond or tf.while_loop, where the time that '
            'it takes cannot be measured: watch a step that reads outside of it.' % found[0].name)
    return sorted(certain, key=lambda each: each.name)


def _before(op):
    return [tensor.op for tensor in op.inputs] + list(op.control_inputs)


def arrivals(op):
    """The operations to wait for, to know when an operation has all that it waits for; a list."""
    return [arrival(tensor) for tensor in op.inputs] + list(op.control_inputs)


def arrival(tensor):
    """The operation to wait for, to know when a tensor is there; also where it is fed.

    Whoever waits for the tensor's own operation has it run where the tensor is fed, too. So does,
    on TensorFlow 2, who waits for a `tf.identity` of it: Grappler takes that out, and leaves
    placeholders.
    """
    if tensor.dtype == tf.resource or tensor.dtype != tensor.dtype.base_dtype:
        return tensor.op
    with tf.get_default_graph().colocate_with(tensor.op, ignore_existing=True):
        return tf.placeholder_with_default(tensor, tensor.shape).op


def takers_of(reads, step):
    """{each operation of `reads`: list of the operations of the step that wait for it}."""
    found = {read.name: [] for read in reads}
    for op in step:
        for name in {each.name for each in _before(op)}:
            if name in found:
                found[name].append(op)
    return {read: found[read.name] for read in reads}


def takers_of_fed(step):
    """The operations of a step that take what is fed to it; a list.

    A tower's own placeholder has its shard of another one by default, which is computed.
    """
    fed = [op for op in step if op.type.startswith('Placeholder')]
    takers = takers_of(fed, step)
    after = reachable_from([taker for op in fed for taker in takers[op]], step)
    return [taker for op in fed if op.name not in after for taker in takers[op]]


def _turns(takers, step):
    """Lists of the operations that read: those of each list come after some of the list before."""
    turns, reads = [], list(takers)
    while reads:
        after = reachable_from([op for read in reads for op in takers[read]], step, control=True)
        turns.append([read for read in reads if read.name not in after])
        reads = [read for read in reads if read.name in after]
    return turns


def _is_token(op):
    """Whether a queue holds no examples but one number: `SyncReplicasOptimizer`'s tokens."""
    return (op.type.startswith('QueueDequeue') and len(op.outputs) == 1
            and op.outputs[0].dtype.is_integer and op.outputs[0].shape.ndims == 0)


def are_examples_fed(step, also_reads):
    """Whether a step is fed its examples, by what its placeholders can hold.

    Rates of learning and of dropout, and whether it is training, are no examples. They often have
    no shape: beside an iterator, what may be a number is taken for one.

    Args:
      step: the operations of the step.
      also_reads: whether it reads from an iterator or a queue.
    """
    for op in step:
        if op.type not in PLACEHOLDERS:
            continue
        value = op.outputs[0]
        if op.type == 'PlaceholderWithDefault':
            # A batch of any size, with something to fall back on; not a shard of a tower's.
            fed = (not also_reads and op.inputs[0].op.type == 'Const' and value.shape.ndims != 0
                   and not value.shape.is_fully_defined())
        elif also_reads:
            fed = value.shape.ndims not in (None, 0)
        else:  # a whole number may be the number of a batch
            fed = value.dtype != tf.bool and not (
                value.dtype.is_floating and value.shape.ndims == 0)
        if fed:
            return True
    return False


def time_after(operations, name):
    """The time when these operations are done, a float64 scalar tensor in seconds."""
    with tf.control_dependencies(operations):
        return tf.timestamp(name=name)
