"""Gradients over the machines of a ring, by TensorFlow's collective operations.

Each worker has a session of its own, which sees this worker's devices alone. All workers run the
same collective operations; TensorFlow brings them together by their keys. Dense gradients share
buffers, which are filled in the reverse order of the variables: a backward pass computes the
gradients of the last variables first, so that the first buffers are sent while the backward pass
goes on. Sparse gradients are sent as rows.
"""

import tensorflow.compat.v1 as tf

from towers import compat
from towers.cluster import data_end, wire_types
from towers.cluster.machines import Machines
from towers.cluster.ring_rows import SparseGradients
from towers.cluster.session_guard import SessionBegun
from towers.cluster.signature import signature_of_update
from towers.cluster.batch_weights import Shares
from towers.cluster.state_from_worker_0 import share_state
from towers.errors import ClusterError
from towers.graph.nests import bytes_of
from towers.placement.variable_device import only_device
from towers.reduce import all_reduce
from towers.reduce.sparse_rows import rows_once, scaled

_GROUP = 7919  # no group of `all_reduce`, whose keys count from 1
_HALVED = 1 << 20  # bytes from which one half of a tensor is added up while the other is sent
_CPU = '/cpu:0'


class Collectives:
    """Makes the collective operations of one worker, with the same keys on all workers.

    Keys are counted on within a graph, so that no two builds of one graph use the same key.
    """

    def __init__(self, rank, num_workers):
        self.rank, self.num_workers = rank, num_workers
        keys = [op.get_attr('instance_key') for op in tf.get_default_graph().get_operations()
                if op.type.startswith('Collective') and 'group_key' in op.node_def.attr
                and op.get_attr('group_key') == _GROUP]
        self._key = max(keys or [0])

    def reduce(self, tensor, mean=False):
        """The sum, or the mean, of the workers' tensors of one shape."""
        reduced = tf.raw_ops.CollectiveReduce(
            input=tensor, group_size=self.num_workers, group_key=_GROUP,
            instance_key=self._next(), merge_op='Add', final_op='Div' if mean else 'Id',
            subdiv_offsets=[0, 0] if bytes_of(tensor) >= _HALVED else [0])
        reduced.set_shape(tensor.shape)
        return reduced

    def reduce_in_turns(self, tensor, mean, last):
        """As `reduce`, for a tensor of any size: one of 64 MB takes twice as long in one piece.

        Args:
          tensor, mean: as for `reduce`.
          last: list of the tensors that the first piece has to wait for; then of the last piece.
        """
        turns = -(-bytes_of(tensor) // all_reduce.BUFFER_BYTES)
        flat = tensor if turns < 2 else tf.reshape(tensor, [-1])
        pieces = [flat] if turns < 2 else tf.split(
            flat, _even_sizes(flat.shape.num_elements(), turns))
        reduced = []
        for piece in pieces:
            with tf.control_dependencies(last):
                reduced.append(self.reduce(piece, mean))
            last[:] = [reduced[-1]]
        return reduced[0] if turns < 2 else tf.reshape(tf.concat(reduced, 0), tensor.shape)

    def gather(self, rows):
        """The workers' tensors `rows` [n, …] one after the other: [W n, …] for W workers.

        n may differ from step to step, and has to be the same on all workers in a step.
        """
        if compat.GATHERS_ANY_ROWS:
            return tf.raw_ops.CollectiveGather(
                input=rows, group_size=self.num_workers, group_key=_GROUP,
                instance_key=self._next(), shape=[None] + rows.shape.as_list()[1:])
        # On 1.15 that kernel takes the first step's number of rows for ever. So each worker's rows
        # stand among zeros here, and are summed up.
        dtype, count = rows.dtype, tf.shape(rows)[0]
        if dtype not in compat.COLLECTIVE_DTYPES:
            rows = tf.cast(rows, tf.float64)
        padding = [[count * self.rank, count * (self.num_workers - 1 - self.rank)]] + (
            [[0, 0]] * (rows.shape.ndims - 1))
        return tf.cast(self.reduce(tf.pad(rows, padding)), dtype)

    def broadcast(self, tensor, shape, dtype):
        """Worker 0's tensor, of static shape, on every worker."""
        common = dict(group_size=self.num_workers, group_key=_GROUP, instance_key=self._next(),
                      shape=shape)
        if self.rank == 0:
            return tf.raw_ops.CollectiveBcastSend(input=tensor, **common)
        return tf.raw_ops.CollectiveBcastRecv(T=dtype, **common)

    def _next(self):
        self._key += 1
        return self._key


class RingMachines(Machines):
    """Combines the gradients of one build over the workers of a ring.

    Attributes:
      data_ended: bool variable, True after the step in which no worker had an example; None where
        every worker always has examples.
      examples: float64 scalar: the number of examples of this step on all workers; None where each
        worker has the same number, so that nothing is counted.
      state: list of the variables that worker 0 gives to the others in each step.
    """

    def __init__(self, cluster, examples, reduction, num_towers):
        """See `Cluster.machines`."""
        self._cluster = cluster
        self._shares = Shares(cluster, examples, reduction)
        self.examples = self.data_ended = None
        self.hook, self.state = None, []
        self._own = []  # the gradients of this machine, with their variables

    @property
    def same_examples(self):
        """This machine's number of examples, if all machines need the same number; else None."""
        return self._shares.same_examples

    def _over_machines(self, gradients, loss):
        if self._cluster.num_workers == 1:
            gradients, self.gates = data_end.own_data(self._cluster, rows_once(gradients))
            return gradients
        self._own = list(gradients)
        ring = Collectives(self._cluster.rank, self._cluster.num_workers)
        with only_device(_CPU), tf.name_scope('ring'):
            dense = [(variable, [(0, gradient)]) for gradient, variable in gradients
                     if not isinstance(gradient, tf.IndexedSlices)]
            sparse = [(gradient, variable) for gradient, variable in gradients
                      if isinstance(gradient, tf.IndexedSlices)]
            rows = SparseGradients(sparse, ring.rank, ring.num_workers) if sparse else None
            begun = SessionBegun()
            self.begin, begun = begun.begin, begun.check()
            weight, counts, first = self._count(ring, rows, begun)
            # Dense gradients wait for each other, and so do sparse ones, in one order on all
            # workers; the backward pass ends with both.
            last, last_rows = [first], [first]
            reduced = self._dense(ring, dense, weight, last)
            if rows is not None:
                if counts is None:
                    with tf.control_dependencies(last_rows):
                        counts = ring.reduce(rows.counts)
                    last_rows = [counts]
                reduced.update(rows.gathered(
                    ring, self._shares.constant() if weight is None else weight, counts,
                    last_rows))
                last += last_rows
            with tf.control_dependencies(last):
                ended = self._ended() or tf.no_op()
            if self._cluster.active is not None:
                self.gates = [ended]
            return data_end.after(ended, [(reduced[variable.op.name], variable)
                                          for _, variable in gradients])

    updates_here = True
    """Whether this worker makes the update; on parameter servers the chief alone does."""

    def counted(self, examples):
        """The number of examples that this worker adds to the count of all workers in a step."""
        return examples * self._cluster.num_workers

    def added_up(self, numbers, name):
        """The sum of all workers' float64 numbers, a tensor; made in the same order on all."""
        with only_device(_CPU), tf.name_scope(name):
            return Collectives(self._cluster.rank, self._cluster.num_workers).reduce(numbers)

    def train_op(self, update, before=(), replicated=()):
        """The operation of a step: the update, which every worker makes.

        What training reads of worker 0's state goes to the others, see `share_state`.
        """
        if self._cluster.num_workers == 1:
            return update
        self.update = signature_of_update(update, before, self.combined)
        update, self.state = share_state(
            update, before, self._own, self.combined,
            lambda variable: broadcast_variables(self._cluster, [variable]), replicated)
        return update

    def _count(self, ring, rows, begun):
        """Adds up the numbers that are known when the batch is.

        The reduction waits for the batch alone, and so ends before the backward pass does.

        Args:
          ring: `Collectives`.
          rows: `SparseGradients`, or None.
          begun: operation that fails where the session has not begun.

        Returns:
          `(weight, counts, first)`: the weight of this worker's gradient, None where all weigh the
          same; the sum of `rows.counts`, None where they are not known yet; and what all that is
          sent later waits for.
        """
        shares, own = self._shares, []
        if shares.are_weighted:
            own.append(tf.reshape(shares.own_examples(), [1]))
        counted = rows is not None and rows.are_counted_early
        if counted:
            own.append(rows.counts)
        if not own:
            return None, None, begun
        with tf.control_dependencies([begun]):
            total = ring.reduce(tf.concat(own, 0))
        counts = total[-rows.counts.shape.num_elements():] if counted else None
        if not shares.are_weighted:
            return None, counts, total
        self.examples = total[0]
        return shares.weight(self.examples), counts, total

    def _dense(self, ring, dense, weight, last):
        """Dict from names of variables to reduced gradients."""
        reduced = {}
        for buffer in all_reduce.buffers_of(dense):
            variables = [variable for variable, _ in buffer]
            added = [present[0][1] for _, present in buffer]
            packed = added[0] if len(added) == 1 else tf.concat(
                [tf.reshape(each, [-1]) for each in added], 0)
            dtype = packed.dtype.base_dtype
            if weight is not None:
                packed = scaled(packed, weight)
            packed = wire_types.from_added(ring.reduce_in_turns(
                wire_types.to_added(packed), weight is None and self._shares.is_mean, last), dtype)
            pieces = [packed] if len(added) == 1 else all_reduce.unpacked(packed, variables)
            reduced.update(zip((variable.op.name for variable in variables), pieces))
        return reduced

    def _ended(self):
        """An operation that raises `OutOfRangeError` in the step in which no worker has examples.

        None where batches are always full. It runs after all collective operations of the step:
        the other workers would wait for these.
        """
        if self.examples is None:
            return None
        self.data_ended = tf.Variable(False, trainable=False, use_resource=True, name='data_ended',
                                      collections=[tf.GraphKeys.LOCAL_VARIABLES])
        return data_end.raise_at_end(self.examples <= 0., self.data_ended)


def broadcast_variables(cluster, variables):
    """An operation that gives variables their values on worker 0.

    All workers have to run it at the same time.

    Args:
      cluster: `Cluster`, a ring.
      variables: list of variables, the same on every worker, in any order.

    Raises:
      ClusterError: a variable whose type or shape cannot be sent.
    """
    ring = Collectives(cluster.rank, cluster.num_workers)
    last, done = [], []
    for variable in sorted(variables, key=lambda each: each.op.name):
        dtype, shape = variable.dtype.base_dtype, variable.get_shape()
        sent = wire_types.sent_type(dtype)
        if sent is None or not shape.is_fully_defined():
            raise ClusterError(
                'variable %r is %s of shape %s, which a ring cannot send to the other workers: '
                'make it a local variable, or one of a number type and a static shape.' % (
                    variable.op.name, dtype.name, shape))
        with only_device(_CPU), tf.name_scope('broadcast'):
            with tf.control_dependencies(last):
                value = (wire_types.to_sent(variable.read_value()) if cluster.rank == 0
                         else None)
                value = ring.broadcast(value, wire_types.sent_shape(shape, dtype), sent)
            last = [value]
            done.append(value.op if cluster.rank == 0 else
                        tf.assign(variable, wire_types.from_sent(value, dtype)).op)
    return tf.group(*done)


def _even_sizes(count, number):
    """The sizes of so many pieces of `count` things, as equal as possible."""
    return [count // number + (place < count % number) for place in range(number)]
