"""Batch norm of a finished model in `tf.cond`, with control dependencies: as many programs have it,
that of PointNet for one."""

import pytest
import sample_models as samples
import tensorflow.compat.v1 as tf

import towers
from finished_programs import check_equal, dense, mean_square, placeholders, trained
from sample_models import momentum, relative_difference, switched

X, Y = samples.vectors(6)


def pointnet(h, is_training):
    """The averages are written in one branch, and read in the other one of another `tf.cond`."""
    moments = tf.nn.moments(h, [0])
    average = tf.train.ExponentialMovingAverage(.9)
    written = tf.cond(is_training, lambda: average.apply(moments), lambda: tf.no_op())

    def with_update():
        with tf.control_dependencies([written]):
            return tf.identity(moments[0]), tf.identity(moments[1])
    return tf.cond(is_training, with_update,
                   lambda: tuple(average.average(each) for each in moments))


def in_one_branch(h, is_training):
    moments = tf.nn.moments(h, [0])
    average = tf.train.ExponentialMovingAverage(.9)

    def with_update():
        with tf.control_dependencies([average.apply(moments)]):
            return tf.identity(moments[0]), tf.identity(moments[1])
    return tf.cond(is_training, with_update,
                   lambda: tuple(average.average(each) for each in moments))


def program(x, y, normalized, num_layers=2):
    is_training = tf.placeholder(tf.bool, [], 'is_training')
    h = x
    for layer in range(num_layers):
        h = dense(h, 4, 'layer_%d' % layer)
        mean, variance = normalized(h, is_training)
        h = tf.tanh(tf.nn.batch_normalization(h, mean, variance, None, None, 1e-3))
    return mean_square(dense(h, 3, 'last'), y), is_training


def steps(train_op, loss, inputs, is_training, initial):
    """[losses of three steps and then of an evaluation], the initial variables, those after."""
    with tf.Session(config=towers.session_config(2)) as session:
        feed = dict(zip(inputs, (X, Y)))
        feed[is_training] = True
        losses, before, after = trained(session, loss, train_op, feed, initial)
        feed[is_training] = False
        return losses + [session.run(loss, feed)], before, after


@pytest.mark.slow
@pytest.mark.parametrize('normalized', [pointnet, in_one_branch])
def test_averages_in_branches_in_sync_equal_one_device(normalized):
    with switched('resource_variables', False), switched('control_flow_v2', False):
        with tf.Graph().as_default():
            inputs = placeholders((X, Y))
            loss, is_training = program(*inputs, normalized)
            built = towers.build_towers(loss, inputs, momentum(), 2, 'mean', batch_norm='sync')
            ours, initial, after = steps(built.train_op, built.loss, inputs, is_training, {})
        with tf.Graph().as_default():
            inputs = placeholders((X, Y))
            loss, is_training = program(*inputs, normalized)
            theirs, _, expected = steps(momentum().minimize(loss), loss, inputs, is_training,
                                        initial)
    assert sorted(after) == sorted(expected)
    assert '2 in sync' in built.plan.line('batch norm')
    for name, value in expected.items():
        assert relative_difference(after[name], value) < 1e-11, name
    assert relative_difference(ours, theirs) < 1e-11


def uses_what_it_writes(h, is_training):
    """The average is read in the branch that has written it."""
    moments = tf.nn.moments(h, [0])
    average = tf.train.ExponentialMovingAverage(.9)

    def with_update():
        with tf.control_dependencies([average.apply(moments)]):
            return tuple(average.average(each) + 0. for each in moments)
    return tf.cond(is_training, with_update, lambda: moments)


def test_a_value_that_is_written_in_a_branch_and_used_is_refused():
    with switched('resource_variables', False), switched('control_flow_v2', False):
        inputs = placeholders((X, Y))
        loss, _ = program(*inputs, uses_what_it_writes, num_layers=1)
        with pytest.raises(towers.SharedVariableError, match=(
                "wait for it by tf.control_dependencies; or pass update_ops='all'")) as caught:
            towers.build_towers(loss, inputs, momentum(), 2, 'mean')
    assert '\n' not in str(caught.value)


def counts_where(condition):
    """A loss; and in UPDATE_OPS, as an assignment of a branch, a count of the steps in which the
    batch, or the count itself, meets a condition."""
    def program(x, y):
        count = tf.get_variable('count', [], x.dtype, tf.zeros_initializer(), trainable=False)
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.cond(
            condition(x, count), lambda: tf.identity(tf.assign_add(count, 1.)),
            lambda: tf.identity(count)))
        return mean_square(dense(x, 3, 'only'), y)
    return program


def test_a_count_in_a_branch_of_its_own_value_is_that_of_one_device():
    with switched('control_flow_v2', False), switched('resource_variables', True):
        built = check_equal(counts_where(lambda x, count: count < 2.), (X, Y))
    assert built.plan.line('one device').startswith('proven: ')


def test_a_count_in_a_branch_on_the_batch_is_refused():
    """An operation without results, as the write of a resource variable, is in its branch, too."""
    with switched('control_flow_v2', False), switched('resource_variables', True):
        inputs = placeholders((X, Y))
        loss = counts_where(lambda x, count: tf.shape(x)[0] > 4)(*inputs)
        with pytest.raises(towers.SharedVariableError, match='is not linear in a sum over the ex'):
            towers.build_towers(loss, inputs, momentum(), 2, 'mean')


def test_a_count_in_a_loop_over_the_batch_is_refused():
    with switched('control_flow_v2', False), switched('resource_variables', True):
        x, y = placeholders((X, Y))
        count = tf.get_variable('count', [], x.dtype, tf.zeros_initializer(), trainable=False)

        def turn(number):
            with tf.control_dependencies([tf.assign_add(count, 1.).op]):
                return number + 1
        counted = tf.while_loop(lambda number: number < tf.shape(x)[0], turn, [0])
        model = towers.ModelOutput(mean_square(dense(x, 3, 'only'), y), updates=[counted])
        with pytest.raises(towers.SharedVariableError, match='is in a branch or a loop that dep'):
            towers.build_towers(model, (x, y), momentum(), 2, 'mean')
