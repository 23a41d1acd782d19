"""What the chief of synchronous parameter servers does after a step comes before the others' next
one, and before a worker's own results no other's: slow writes and slow reads by `time.sleep`."""

import time

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from towers.cluster.member import start_server
from towers.cluster.written_besides import written_besides
from one_process import StopWithoutSignals, addresses, together


def slowly(value):
    """The same number, 0.4 seconds later."""
    def wait(number):
        time.sleep(0.4)
        return number
    late = tf.py_func(wait, [value], value.dtype)
    late.set_shape(value.shape)
    return late


def two_workers(work):
    """Calls work(cluster, rank) for each in a graph of its own."""
    workers, ps = addresses(2, 1)
    make = lambda job, rank: towers.Cluster('ps', workers, ps, job, rank)
    server = start_server(make('ps', 0), make('ps', 0).session_config(tf.ConfigProto()))
    assert server

    def call(rank):
        with tf.Graph().as_default():
            return work(make('worker', rank), rank)
    return together(call, 2)


def squared(numbers):
    """The gradient is `w` times the mean of the numbers."""
    w = tf.get_variable('w', [], tf.float64, tf.constant_initializer(8.), use_resource=True)
    return tf.reduce_mean(numbers) * w * w / 2.


@pytest.mark.slow
@pytest.mark.parametrize('in_one_call', [True, False])
def test_the_others_begin_a_step_when_the_chief_has_written_the_weights(in_one_call):
    """The mean of 0.25 and 0.75 halves the weight, and then it is halved again, late: 8, 2, 0.5.
    Of a worker that does not wait the second gradient is 0.75 * 4."""
    counts = []

    def work(cluster, rank):
        built = towers.build_towers(
            squared, tf.constant([.25 + .5 * rank], tf.float64),
            tf.train.GradientDescentOptimizer(1.), 1, 'mean', cluster=cluster)
        [w] = built.variables
        with tf.control_dependencies([built.train_op] if in_one_call else []):
            halved = tf.assign(w, slowly(w.read_value() / 2.)).op
        steps = [halved] if in_one_call else [built.train_op, halved]
        losses = []
        with towers.join(cluster, built, start_timeout=30.) as member, member.session() as session:
            for _ in range(2):
                step = built.train_op if rank else steps[0]
                losses.append(session.run([built.loss, step])[0])
                for each in steps[1:] if not rank else []:
                    session.run(each)
            counts.append(built.machines.hook.holds)
            value = session.run(w)
        return losses, value
    (of_chief, value), (of_other, _) = two_workers(work)
    assert of_chief == [8., 0.5] and of_other == [24., 1.5]
    assert value == 0.5 and sorted(counts) == [False, True]


@pytest.mark.slow
def test_a_loss_is_of_the_weights_before_the_update():
    """A part of the loss that no gradient is of reads the weight late."""
    def work(cluster, rank):
        def model_fn(numbers):
            late = slowly(tf.reduce_sum(numbers))
            with tf.control_dependencies([late]):
                w = tf.get_variable('w', [], tf.float64, tf.constant_initializer(8.),
                                    use_resource=True).read_value()
            return squared_again(numbers) + tf.stop_gradient(w)

        def squared_again(numbers):
            with tf.variable_scope(tf.get_variable_scope(), reuse=True):
                return squared(numbers)
        built = towers.build_towers(
            model_fn, tf.constant([1.], tf.float64), tf.train.GradientDescentOptimizer(.5), 1,
            'mean', cluster=cluster)
        with towers.join(cluster, built, start_timeout=30.) as member, member.session() as session:
            return [session.run([built.loss, built.train_op])[0] for _ in range(2)]
    assert two_workers(work) == [[40., 12.]] * 2  # 8 * 8 / 2 + 8, 4 * 4 / 2 + 4


def test_what_counts_as_written_besides_a_step(graph):
    """Averages are read by no step; initial values, those of a checkpoint, and the second tower's
    updates do not count."""
    step = tf.train.get_or_create_global_step()

    def model_fn(numbers):
        mean = tf.get_variable('mean', [], tf.float64, tf.zeros_initializer(), trainable=False)
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS,
                             tf.assign_sub(mean, .1 * (mean - tf.reduce_mean(numbers))))
        return squared(numbers)
    built = towers.build_towers(model_fn, tf.ones([2], tf.float64),
                                tf.train.MomentumOptimizer(1., .9), 2, 'mean', global_step=step)
    with tf.control_dependencies([built.train_op]):
        tf.train.ExponentialMovingAverage(0.5).apply(built.variables)
    tf.global_variables_initializer()
    tf.train.Saver()
    assert written_besides(graph, tf.global_variables(), built) == []
    tf.assign(built.gradients[0][1], np.float64(1.))
    tf.assign_add(step, 1)
    assert written_besides(graph, tf.global_variables(), built) == ['global_step', 'w']


@pytest.mark.parametrize('how', [
    pytest.param('alone', marks=pytest.mark.slow),
    pytest.param('together', marks=pytest.mark.slow), 'by hand'])
def test_no_step_seems_to_be_made_after_the_chiefs_last(how):
    """Each halves the weight, by the mean of 0.25 and 0.75; the chief makes two."""
    def work(cluster, rank):
        built = towers.build_towers(
            squared, tf.constant([.25 + .5 * rank], tf.float64),
            tf.train.GradientDescentOptimizer(1.), 1, 'mean', cluster=cluster)
        stop, losses = StopWithoutSignals(cluster, built), []
        fetches = [built.loss, built.train_op]
        with towers.join(cluster, built, start_timeout=30., dead_after=20.) as member:
            with member.session([stop] if how == 'together' else []) as session:
                while not session.should_stop() and (rank or len(losses) < 2):
                    if how == 'by hand':  # no hook sees such a step
                        losses.append(session.run_step_fn(
                            lambda step_context: step_context.session.run(fetches))[0])
                    else:
                        losses.append(session.run(fetches)[0])
        return losses, stop.is_told, built.machines.chief_has_ended
    chief, other = two_workers(work)
    assert chief == ([.25 * 64. / 2., .25 * 16. / 2.], False, False)
    assert other == ([.75 * 64. / 2., .75 * 16. / 2.], how == 'together', True)


def test_a_worker_hears_why_its_step_was_not_made():
    def work(cluster, rank):
        built = towers.build_towers(
            squared, tf.constant([.25 + .5 * rank], tf.float64),
            tf.train.GradientDescentOptimizer(1.), 1, 'mean', cluster=cluster)
        with towers.join(cluster, built, start_timeout=30., dead_after=20.) as member, \
                member.session() as session:
            session.run(built.train_op)
            if rank:
                with pytest.raises(tf.errors.OutOfRangeError, match=(
                        r'worker 0 \(.*\) has ended its training, and this step was not made')):
                    session.run(built.train_op)
    two_workers(work)
