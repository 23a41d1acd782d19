"""What is written beside the step of synchronous parameter servers, and what comes after the
chief's last one. Slow reads are by `time.sleep`."""

import time
import types

import pytest
import tensorflow.compat.v1 as tf

import towers
from towers.cluster.server_placement import SpreadingCreator, check_writes
from towers.errors import ClusterError
from one_process import StopWithoutSignals, serve, together


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
    make = serve(2)

    def call(rank):
        with tf.Graph().as_default():
            return work(make(rank), rank)
    return together(call, 2)


def squared(numbers):
    """The gradient is `w` times the mean of the numbers."""
    w = tf.get_variable('w', [], tf.float64, tf.constant_initializer(8.), use_resource=True)
    return tf.reduce_mean(numbers) * w * w / 2.


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


def of_chief():
    """A build of the chief's, whose model has a moving average and two towers."""
    def model_fn(numbers):
        mean = tf.get_variable('mean', [], tf.float64, tf.zeros_initializer(), trainable=False)
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS,
                             tf.assign_sub(mean, .1 * (mean - tf.reduce_mean(numbers))))
        return squared(numbers)
    return towers.build_towers(
        model_fn, tf.ones([2], tf.float64), tf.train.MomentumOptimizer(1., .9), 2, 'mean',
        global_step=tf.train.get_or_create_global_step(),
        cluster=towers.Cluster('ps', ['a:1', 'b:1'], ['c:1']))


def test_what_is_loaded_and_what_reads_the_weights_is_no_write_beside_the_step(graph, tmp_path):
    built = of_chief()
    [(_, w)] = built.gradients
    with tf.control_dependencies([built.train_op]):
        tf.train.ExponentialMovingAverage(0.5).apply([w])
    tf.global_variables_initializer()
    saver = tf.train.Saver()
    with tf.Graph().as_default(), tf.Session() as session:
        saved = tf.train.Saver([tf.get_variable('w', [], tf.float64)])
        session.run(tf.global_variables_initializer())
        path = saved.save(session, str(tmp_path / 'saved'))
    tf.train.init_from_checkpoint(path, {'w': w})  # gives it another initializer
    tf.assign(w, tf.placeholder(tf.float64, []))
    tf.assign_add(built.global_step, 1)
    check_writes(graph, built)
    assert saver


def test_the_chief_whose_program_clips_the_weights_says_so(graph):
    """With one worker, or asynchronous ones, it may."""
    for count, synchronous in ((2, True), (1, True), (2, False)):
        with tf.Graph().as_default():
            cluster = towers.Cluster('ps', ['a:1', 'b:1'][:count], ['c:1'], synchronous=synchronous)
            built = towers.build_towers(squared, tf.ones([2], tf.float64),
                                        tf.train.GradientDescentOptimizer(1.), 1, cluster=cluster)
            [w] = built.variables
            tf.assign(w, tf.clip_by_value(w, -1., 1.))
            made = types.SimpleNamespace(create_session=lambda: 'a session')
            creator = SpreadingCreator(cluster, made, tf.train.Scaffold(), built)
            if count > 1 and synchronous:
                with pytest.raises(ClusterError, match='beside built.train_op'):
                    creator.create_session()
            else:
                assert creator.create_session() == 'a session'


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
