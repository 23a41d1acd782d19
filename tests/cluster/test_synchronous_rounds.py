"""Workers of synchronous parameter servers that are killed, and started again: no gradient of
theirs is counted twice, and none is left out; the others are where the chief is."""

import contextlib
import threading
import time

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from towers.cluster import synchronous_rounds
from towers.errors import ClusterError
from one_process import let_workers_come_again, serve


class Gone(Exception):
    """What ends a worker without a word, as a signal does."""


class StartData(tf.train.SessionRunHook):
    """Starts the data at the place that a variable says, as train.py does."""

    def __init__(self, iterator):
        self._iterator = iterator

    def after_create_session(self, session, coord):
        session.run(self._iterator.initializer)


class Workers:
    """Two workers and a server in this process.

    In step n (from 0) the chief's example is 100 and the other's 2 ** n, the gradient of `w` their
    mean; the gradient of row r of `table` is a half from worker r."""

    def __init__(self, monkeypatch):
        let_workers_come_again(monkeypatch)
        self._cluster_of, self.lost, self.said = serve(2), [], []

    def join(self, rank, train):
        """Calls `train(member, built, train_op, [hook])` in a graph of its own."""
        with tf.Graph().as_default():
            cluster = self._cluster_of(rank)
            place = tf.get_variable('place', [], tf.int64, tf.zeros_initializer(), trainable=False,
                                    use_resource=True)
            data = tf.data.Dataset.range(tf.identity(place), 100).map(
                lambda step: (2. ** tf.cast(step, tf.float64) if rank else
                              tf.constant(100., tf.float64))).batch(1)
            iterator = tf.data.make_initializable_iterator(data)

            def model_fn(example):
                w, table = [tf.get_variable(name, shape, tf.float64, tf.zeros_initializer(),
                                            use_resource=True)
                            for name, shape in (('w', []), ('table', [2]))]
                return tf.reduce_mean(example) * w + tf.reduce_mean(tf.gather(table, [rank]))
            example = iterator.get_next()
            example.set_shape([1])
            built = towers.build_towers(
                model_fn, example, tf.train.GradientDescentOptimizer(1.), 1, 'mean',
                global_step=tf.train.get_or_create_global_step(), cluster=cluster)
            with tf.control_dependencies([built.train_op]):  # late, when others have begun
                one = tf.py_func(lambda: time.sleep(0.2) or np.int64(1), [], tf.int64)
                train_op = built.train_op if rank else tf.assign_add(place, one).op
            with towers.join(cluster, built, dead_after=20., say=self.said.append,
                             on_lost=self.lost.append) as joined:
                return train(joined, built, train_op, [StartData(iterator)])


@pytest.fixture
def workers(monkeypatch):
    return Workers(monkeypatch)


class Chief:
    """The chief in a thread: before a step it waits until it may do it.

    With a folder it saves every second step, and goes on from there.

    Attributes:
      values: the weights when all steps are done.
    """

    def __init__(self, workers, steps, folder=None, is_gone=False):
        self._steps, self._allowed, self.values = steps, threading.Semaphore(0), None
        self._folder, self._is_gone = folder, is_gone

        def work():
            with contextlib.suppress(Gone):
                workers.join(0, self._train)
        self._thread = threading.Thread(target=work, daemon=True)
        self._thread.start()

    def allow(self, steps):
        for _ in range(steps):
            self._allowed.release()

    def join(self):
        self._thread.join(60)
        assert not self._thread.is_alive()

    def _train(self, joined, built, train_op, hooks):
        session = joined.session(hooks) if self._folder is None else towers.training_session(
            self._folder, tf.train.get_global_step(), hooks, save_steps=2, member=joined,
            say=lambda line: None)
        with session as session:
            for _ in range(self._steps):
                assert self._allowed.acquire(timeout=60)
                session.run(train_op)
            assert self._allowed.acquire(timeout=60)
            self.values = session.run_step_fn(
                lambda step_context: step_context.session.run(built.variables))
            if self._is_gone:
                raise Gone()


def until_it_stops(joined, built, train_op, hooks):
    """A worker's training; the number of its steps. `OutOfRangeError` ends the session."""
    steps = 0
    with joined.session(hooks) as session:
        while True:
            session.run(train_op)
            steps += 1
    return steps


def one_step_and_then(send):
    """A worker's training: a step, and of the next what `send(machines)` gives."""
    def train(joined, built, train_op, hooks):
        with joined.session(hooks) as session:
            session.run(train_op)
            session.run_step_fn(
                lambda step_context: step_context.session.run(send(built.machines)))
            raise Gone()
    return train


def all_its_gradients(machines):
    return machines._sent_gradients.all_sent


def a_part_of_them(machines):
    return machines._pushes[0]


@pytest.mark.slow
def test_gradients_of_a_worker_that_is_started_again_are_not_counted_twice(workers):
    """By hand the weight is -(3 * 100 + 1 + 2 + 4) / 2."""
    chief = Chief(workers, 3)
    chief.allow(1)
    with pytest.raises(Gone):
        workers.join(1, one_step_and_then(all_its_gradients))

    def train(*arguments):  # twice, if it did not wait, before the chief's
        timer = threading.Timer(1., chief.allow, [3])
        timer.start()
        steps.append(until_it_stops(*arguments))
    steps = []
    workers.join(1, train)
    chief.join()
    np.testing.assert_array_equal(chief.values[0], -153.5)
    np.testing.assert_array_equal(chief.values[1], [-1.5, -1.5])
    assert steps == [1] and not workers.lost


@pytest.mark.slow
def test_a_worker_that_had_sent_some_gradients_says_that_all_have_to_begin_again(
        workers, monkeypatch):
    monkeypatch.setattr(synchronous_rounds, '_UNTIL_ANEW', 0.3)
    chief = Chief(workers, 1)
    chief.allow(1)
    with pytest.raises(Gone):
        workers.join(1, one_step_and_then(a_part_of_them))
    with pytest.raises(ClusterError, match=r'^worker 1 \(.*\) was ended while it sent the '
                       'gradients of a step, .* End all workers and start them again'):
        workers.join(1, until_it_stops)
    chief.allow(1)
    chief.join()


@pytest.mark.slow
def test_workers_begin_again_where_the_chief_does(workers, tmp_path):
    """The chief is gone after step 3 and goes on from 2: by hand the weight after step 5 is
    -(5 * 100 + 1 + 2 + 4 + 8 + 16) / 2, and not with 16 + 32 + 64 from a worker that goes on.

    The other's step 4 had begun; it is not counted, nor is its gradient."""
    last = []

    def chiefs():
        for is_gone in (True, False):
            chief = Chief(workers, 3, str(tmp_path), is_gone)
            chief.allow(4)
            chief.join()
        last.append(chief.values)
    thread = threading.Thread(target=chiefs, daemon=True)
    thread.start()
    steps = workers.join(1, until_it_stops)
    thread.join(60)
    np.testing.assert_array_equal(last[0][0], -265.5)
    np.testing.assert_array_equal(last[0][1], [-2.5, -2.5])
    assert steps == 6  # three, and three again from the checkpoint
    [line] = workers.said
    assert line.startswith('beginning anew worker 0 (') and ', and so does worker 1 (' in line
