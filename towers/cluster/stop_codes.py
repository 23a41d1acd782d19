"""How a worker tells the others that it wants to stop, and why; and that it runs no more steps.

All workers of a ring, or of Horovod, add up some numbers in each step before they send gradients,
a code of each worker among them: 0, or why it wants to stop. A worker whose loop is over adds the
code `OVER`, by what depends on no batch, placeholder or weight. The others may have begun another
step, which one machine would not make: it ends by `tf.errors.OutOfRangeError`, as at the end of the
data, before anything is sent or updated. On parameter servers the code is a number on a server.
"""

import numpy as np
import tensorflow.compat.v1 as tf

from towers import compat
from towers.cluster import data_end
from towers.graph.frames import Frames
from towers.graph.graph_walk import step_operations
from towers.placement.variable_device import only_device

OVER = 1000
"""The code of a worker that runs no more steps; codes below are numbers of signals."""

CHECK = 500
"""The code by which the chief asks all to compare their weights after a step, see `DriftHook`."""


class Codes:
    """The codes of all workers of a ring, among the numbers that a step adds up first.

    Attributes:
      stops: int32 [W]: the codes of all workers in this step; None before `read`.
      checks: bool scalar: whether one of them is `CHECK`, which is 0 in `stops`.
      set_code, code: operation by which this worker gives its code, and the scalar to feed it.
      told: int32 [W] variable: the codes in the step that `OVER` of some worker has ended; zeros
        before.
      tell: what a worker of a ring runs, once, that runs no more steps; None before `finish`.
      skip: what a worker of a ring runs whose step `OVER` has ended, before its next session: its
        count of steps, which TensorFlow keeps, is then that of the worker that has told. By Horovod
        there is nothing to be run.
    """

    skip = ()

    def __init__(self, rank, num_workers):
        """Makes the variables, on the current device."""
        self._rank, self._num_workers = rank, num_workers
        self._own = tf.Variable(0., trainable=False, dtype=tf.float64, name='wants_to_stop',
                                use_resource=True, collections=[tf.GraphKeys.LOCAL_VARIABLES])
        self.code = tf.placeholder(tf.float64, [], 'stop_code')
        self.set_code = tf.assign(self._own, self.code).op
        self.told = tf.Variable(tf.zeros([num_workers], tf.int32), trainable=False,
                                use_resource=True, name='told_to_stop',
                                collections=[tf.GraphKeys.LOCAL_VARIABLES])
        self.stops = self.checks = self.tell = self._goes_on = self._reduced = None

    def say(self, session, number):
        """Gives the code of a signal; the next step of this worker tells the others."""
        session.run(self.set_code, {self.code: number})

    def found(self, session, stops):
        """The first worker that got a signal, `(rank, number)`, from a value of `stops`; or None.
        """
        return next(((rank, int(code)) for rank, code in enumerate(stops) if 0 < code < OVER),
                    None)

    def own(self):
        """This worker's numbers: float64 [W], its code in its own place."""
        return tf.one_hot(self._rank, self._num_workers, dtype=tf.float64) * self._own

    def read(self, reduced):
        """Makes `stops`, which raises where a worker runs no more steps.

        Args:
          reduced: float64 vector, the sums over all workers; those of `own` come first. After them
            a worker without an example adds zeros.
        """
        self._reduced = reduced
        codes = tf.cast(tf.round(reduced[:self._num_workers]), tf.int32)
        self._goes_on = data_end.raise_at_end(tf.reduce_any(codes >= OVER), self.told, codes)
        with tf.control_dependencies([self._goes_on]):
            asks = tf.equal(codes, CHECK)
            self.stops = tf.identity(tf.where_v2(asks, tf.zeros_like(codes), codes), name='stops')
            self.checks = tf.reduce_any(asks, name='checks')

    def finish(self, train_op, device):
        """Makes `tell`, when the operation of a step is there; all that it sends waits for `stops`.

        TensorFlow counts the steps of each set of collective operations apart, by their keys, and
        brings together what is in steps of one number. So `tell` names all those of a step, and
        executes the one: the others get their inputs from a branch that is never taken. A step that
        has failed is not counted; `skip` names all, too, and executes none.
        """
        first = self._reduced.op
        others = [op for op in step_operations([train_op])
                  if op.type.startswith('Collective') and op is not first]
        for op in others:
            compat.add_control_inputs(op, [self._goes_on])
        with only_device(device), tf.name_scope('tell'), tf.control_dependencies(None):
            own = tf.one_hot(self._rank, self._reduced.shape.num_elements(),
                             dtype=tf.float64) * OVER
            never = self.told.read_value()[0] < 0  # no constant: what is never run is cut off then
            unused = [_copy(op, [_never_made(each, never) for each in op.inputs],
                            _in_branch(never, never).op) for op in [first] + others]
            self.tell, self.skip = [_copy(first, [own]).outputs[0]] + unused[1:], unused


class FedCodes(Codes):
    """The codes where operations meet by their names alone, as those of Horovod do.

    What a worker tells is fed to the operation that adds up in a step. A plain session that
    initialises no local variables, of which the ring has nothing, makes steps, too: it says 0.
    """

    def own(self):
        """As `Codes.own`."""
        with compat.control_flow_v1():
            code = tf.cond(self._own.is_initialized(), self._own.read_value,
                           lambda: tf.zeros([], tf.float64))
        return tf.one_hot(self._rank, self._num_workers, dtype=tf.float64) * code

    def finish(self, train_op, added):
        """Has all that is sent in a step, besides gradients, wait for `stops`.

        Args:
          train_op: the operation of a step.
          added: the tensor that the workers add up, a vector that begins with `own()`.
        """
        before = {op.name for op in step_operations([self._reduced])}
        step = step_operations([train_op])
        frames = Frames(step)
        for op in step:  # the model may have some, too: batch norm over all workers
            if op.type.startswith('Horovod') and op.name not in before and frames.is_outside(op):
                compat.add_control_inputs(op, [self._goes_on])
        self.tell = added

    def tell_others(self, session):
        """Adds `OVER` up, alone; the sums over all workers."""
        numbers = np.zeros(self.tell.shape.as_list())
        numbers[self._rank] = OVER
        return session.run(self._reduced, {self.tell: numbers})


class ServedCode:
    """The code of the worker of a cluster with parameter servers that got a signal, on a server."""

    def __init__(self, cluster, variable):
        """
        Args:
          cluster: `Cluster`.
          variable: int32 scalar on a server, 0 while nobody wants to stop.
        """
        self._rank = cluster.rank
        with only_device(variable.device):
            self._code = tf.placeholder(tf.int32, [], 'stop_code')
            self._set = tf.assign(variable, self._code).op
            self._read = variable.read_value()

    def say(self, session, number):
        """Gives the code of a signal."""
        session.run(self._set, {self._code: (self._rank + 1) * OVER + number})

    def found(self, session, stops):
        """As `Codes.found`; `stops` is that of the chief, or what the chief's last token says."""
        code = int(session.run(self._read))
        return (code // OVER - 1, code % OVER) if code else None


def _in_branch(value, is_taken):
    """The value, in a branch of control flow v1 that is taken or not."""
    return tf.identity(tf.raw_ops.Switch(data=value, pred=is_taken).output_true)


def _never_made(tensor, never):
    """A tensor of the same type and rank that no step makes."""
    value = _in_branch(tf.zeros([], tensor.dtype.base_dtype), never)
    return value if tensor.shape.ndims is None else tf.fill(
        [1 if size is None else size for size in tensor.shape.as_list()], value)


def _copy(op, inputs, after=None):
    """Another operation with the same attributes."""
    attributes = {name: value for name, value in op.node_def.attr.items()
                  if not name.startswith('_')}
    with tf.control_dependencies([] if after is None else [after]):
        return tf.get_default_graph().create_op(
            op.type, inputs, [output.dtype.base_dtype for output in op.outputs],
            name=op.type, attrs=attributes)
