"""Where a worker of synchronous training on parameter servers begins, and begins again.

An accumulator takes every gradient of its round, from whomever it is. So a worker that was killed
in a step and is started again has to know whether the accumulators have its gradients of the round
already: given twice, they would be counted twice, without a word.
"""

import time

import numpy as np
import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import ClusterError
from towers.placement.variable_device import only_device

FIRST_SERVER = '/job:ps/task:0/device:CPU:0'
_MOST = 7  # what a token is at most more than the round of its step: 4 and the mark of an end
_POLL = 0.05  # seconds between two looks at what a worker waits for
_UNTIL_ANEW = 20.
"""Seconds in which a chief that has lost its session, with a server, begins the rounds anew."""


class SentGradients:
    """Records on the first server which gradients each worker has sent.

    A worker records the round before it adds its first gradient to an accumulator, and again when
    all have been added. The chief, which begins the rounds anew when it is started again, records
    only that its step has begun: all that its step before does is then done.

    Attributes:
      begun, sent: int64 variables with the round of each worker's first and second record.
      begun_now: operation of the first record.
      all_sent: operation of the second record; None on the chief.
    """

    def __init__(self, cluster):
        self._cluster, self.begun_now, self.all_sent = cluster, None, None
        with only_device(FIRST_SERVER):
            self.begun, self.sent = [
                tf.Variable(tf.zeros([cluster.num_workers], tf.int64), trainable=False,
                            use_resource=True, collections=['towers_rounds'], name=name)
                for name in ('begun', 'sent')]

    def record_begun(self, after, own_round):
        """Makes `begun_now`, to run after some tensors are there; returns it."""
        self.begun_now = self._recorded(self.begun, after, own_round)
        return self.begun_now

    def record_sent(self, pushes, own_round):
        """Makes `all_sent`, to run after some operations."""
        if not self._cluster.is_chief:
            self.all_sent = self._recorded(self.sent, pushes, own_round)

    def begin(self, first):
        """The operation by which the chief begins the rounds anew, with the number `first`."""
        rounds = tf.fill([self._cluster.num_workers], tf.zeros([], tf.int64))
        of_chief = tf.concat([tf.reshape(first, [1]), rounds[1:]], 0)
        return tf.group(tf.assign(self.begun, of_chief), tf.assign(self.sent, rounds))

    def _recorded(self, variable, after, own_round):
        with only_device(FIRST_SERVER):
            own_round = tf.reshape(own_round, [1])
            with tf.control_dependencies(after):
                return tf.raw_ops.ResourceScatterUpdate(
                    resource=variable.handle, indices=tf.constant([self._cluster.rank]),
                    updates=own_round)


class RoundsHook(tf.train.SessionRunHook):
    """Begins the rounds when a session is made, or made again.

    Attributes:
      chief_is_anew: whether the session of the chief's that this worker has joined last is another
        one than that before.
      chief_has_ended: whether a step of this session was not made since the chief had ended.
    """

    def __init__(self, cluster, shared_round, own_round, first_round, accumulators, tokens,
                 sent_gradients):
        """
        Args:
          cluster: `Cluster`.
          shared_round, own_round, first_round: variables of `ServedMachines`.
          accumulators, tokens: its accumulators, and dict of its queues of tokens.
          sent_gradients: `SentGradients`.
        """
        self._is_anew = False
        self._connection = self._make_wait = None
        self._joined = None  # the first round of the chief's session that this worker has joined
        self.chief_is_anew = self.chief_has_ended = False
        self._first_round = first_round
        self._cluster, self._round, self._own_round = cluster, shared_round, own_round
        self._accumulators, self._tokens = accumulators, tokens
        self._sent_gradients = sent_gradients

    def join(self, connection, make_wait):
        """Notes that this worker is a member.

        Args:
          connection: `ServedConnection`.
          make_wait: function from words to a `ChiefWait`.
        """
        self._connection, self._make_wait = connection, make_wait

    def begin(self):
        with tf.name_scope('served/begin'), only_device(FIRST_SERVER):
            self._first = tf.placeholder(tf.int64, [])
            self._set_round = tf.assign(self._round, self._first).op
            self._value = self._round.read_value()
            self._set_own = tf.assign(self._own_round, self._first).op
            self._set_first = tf.assign(self._first_round, self._first).op
            if not self._cluster.is_chief:
                self._is_set = tf.is_variable_initialized(self._round)
                gradients = self._sent_gradients
                self._state = [self._value, gradients.begun.read_value(),
                               gradients.sent.read_value(), self._first_round.read_value()]
                return
            self._set_steps = tf.group(*[each.set_global_step(self._first)
                                         for each in self._accumulators])
            self._counts = [each.num_accumulated() for each in self._accumulators]
            self._drop_count = tf.placeholder(tf.int32, [])
            self._drops = [
                (each.take_indexed_slices_grad(self._drop_count).indices
                 if isinstance(each, tf.SparseConditionalAccumulator) else
                 each.take_grad(self._drop_count)) for each in self._accumulators]
            self._nothing_sent = self._sent_gradients.begin(self._first)
            self._give_tokens = tf.group(*[queue.enqueue([self._first])
                                           for _, queue in sorted(self._tokens.items())])

    def after_create_session(self, session, coord):
        self._is_anew = self.chief_has_ended = False
        if self._cluster.is_chief:
            first = {self._first: 4 * int(time.time() * 1e6)}
            session.run(self._set_steps, first)  # from here on older gradients are refused
            for drop, count in zip(self._drops, session.run(self._counts)):
                if count:
                    session.run(drop, {self._drop_count: count})
            session.run([self._set_steps, self._set_own, self._set_first, self._nothing_sent],
                        first)
            session.run(self._set_round, first)
            session.run(self._give_tokens, first)
            return
        wait = self._make_wait('the next step of ')
        while not session.run(self._is_set):
            wait.pause(_POLL)
        before, newest = self._joined, self._round_to_join(session, wait)
        self.chief_is_anew = before not in (None, self._joined)
        session.run(self._set_own, {self._first: newest})

    def _round_to_join(self, session, wait):
        """Waits for the first round that this worker has given no gradients for, an int.

        It also waits until the chief is in its step of that round, so that what its step before
        writes last, such as the place in the data, is there for the hooks that come next. After the
        last round there is no such step.

        Raises:
          ClusterError: some gradients of the round have been given.
        """
        rank, deadline = self._cluster.rank, None
        while True:
            newest, begun, sent, first = session.run(self._state)
            # The chief records that its session has begun before it sets the first round.
            if newest >= first and (
                    self._connection.is_over or begun[rank] != newest and begun[0] >= newest):
                self._joined = first
                return newest
            if begun[rank] == newest != sent[rank]:
                # With backup workers the round may end without the others, and a server that was
                # lost has the chief begin anew.
                deadline = deadline or time.monotonic() + _UNTIL_ANEW
                if time.monotonic() > deadline:
                    raise ClusterError(
                        '%s was ended while it sent the gradients of a step, and nobody can tell '
                        'which of them have been added up. End all workers and start them again: '
                        'they go on from the last checkpoint.' % self._cluster.who(rank))
            wait.pause(_POLL)

    def end(self, session):
        """Tells those who wait for a token that the chief has ended."""
        if self._cluster.is_chief:
            newest = session.run(self._value)
            session.run(self._give_tokens, {self._first: newest + 1})

    def detect_anew(self, before, newest):
        """The operation of a worker's step that finds whether its token is of rounds begun anew.

        They begin anew when the chief is started again, or has lost its session with a server: at
        its last checkpoint. This worker's next example then is not the one of its next step.

        Args:
          before, newest: int64 scalars: the round of this step, and its token.
        """
        def notice():
            self._is_anew = True
            return np.int32(0)
        return _called_if(newest > before + _MOST, notice)

    def raise_if_over(self, newest):
        """The operation that raises `tf.errors.OutOfRangeError` where the chief has ended.

        The step was not made: the chief has not taken this worker's gradients. As the end of the
        data does, the error ends a `tf.train.MonitoredSession` in good order.

        Args:
          newest: int64 scalar: the token of this step; 1 more than a round's number after the last.
        """
        def end():
            self.chief_has_ended = True
            # TensorFlow makes an OutOfRangeError of it.
            raise StopIteration('%s has ended its training, and this step was not made.'
                                % self._cluster.who(0))
        return _called_if(tf.equal(newest % 4, 1), end)

    def after_run(self, run_context, run_values):
        """Begins the session anew if the rounds have.

        It raises what `MonitoredSession` makes another session for, with all that hooks do then.

        The step is run again: its gradients are of an older round, and have been dropped.
        """
        if not self._is_anew:
            return
        self._is_anew = False
        raise tf.errors.AbortedError(None, None, '%s has begun again.' % self._cluster.who(0))


def _called_if(condition, function):
    """The operation that calls a Python function, which returns 0 as int32, on a condition.

    Python, since no fetch of a hook may depend on the step: a session may run something else. An
    operation waits for all of a branch of control flow v1, see `raise_at_end`.
    """
    with only_device('/cpu:0'), compat.control_flow_v1():
        # Not `tf.py_func`, which warns of its end on TensorFlow 2; both are stateful.
        return tf.identity(tf.cond(condition, lambda: tf.numpy_function(
            function, [], tf.int32), lambda: tf.constant(0))).op
