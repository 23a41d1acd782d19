"""The order of the towers' writes and reads before the update, and in turn."""

import time

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
import tf_slim as slim
from case_marks import first_fast

import towers
from sample_models import sgd, switched

ONES, ZEROS = tf.ones_initializer(), tf.zeros_initializer()


def losses_and_values(model_fn, inputs, count, names=(), steps=3, **options):
    """(losses of some steps, {name: value} after them) of towers."""
    built = towers.build_towers(model_fn, inputs, sgd(.01), count, 'mean', **options)
    assert not towers.audit(built).broken
    variables = {v.op.name: v for v in tf.global_variables() if v.op.name in names}
    with tf.Session(config=towers.session_config(built.devices)) as session:
        session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
        losses = [session.run([built.loss, built.train_op])[0] for _ in range(steps)]
        return losses, session.run(variables)


def clock_beside(write, x):
    """Update ops that write what a clock says, by `write`, and let the clock tick."""
    clock = tf.get_variable('clock', [], tf.float32, ZEROS, trainable=False, use_resource=True)
    loss = tf.reduce_mean(tf.square(x * tf.get_variable('w', [], initializer=ONES)))
    # The second tower reads late.
    late = tf.py_func(lambda x: time.sleep(.1 * float(x.max())), [x], [])
    with tf.control_dependencies([late]):
        now = clock.read_value() + 1.
    tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, write(now))
    tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.assign(clock, now))
    return loss


def rows_of_examples(now, ids):
    rows = tf.get_variable('rows', [4], tf.float32, ZEROS, trainable=False, use_resource=True)
    return tf.scatter_update(rows, ids, tf.fill(tf.shape(ids), now))


def state_of_each_tower(now):
    own = tf.get_variable('own', [], tf.float32, ZEROS, trainable=False, use_resource=True,
                          collections=[tf.GraphKeys.LOCAL_VARIABLES])
    return tf.assign(own, now)


@pytest.mark.parametrize('write, inputs, copies', [
    (rows_of_examples, [[0., 0., 1., 1.], [0, 1, 2, 3]], 'clone'),
    pytest.param(state_of_each_tower, [[0., 0., 1., 1.]], 'clone', marks=pytest.mark.slow),
    (state_of_each_tower, [[0., 0., 1., 1.]], 'reuse')])
def test_what_tower_0_writes_comes_after_reads_of_the_updates_of_other_towers(
        write, inputs, copies):
    tensors = tuple(tf.placeholder_with_default(values, [None]) for values in inputs)
    built = towers.build_towers(
        lambda x, *ids: clock_beside(lambda now: write(now, *ids), x), tensors, sgd(.01), 2,
        copies=copies)
    clocks = [v for v in tf.global_variables() + tf.local_variables() if v.op.name != 'w']
    with tf.Session(config=towers.session_config(built.devices)) as session:
        session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
        for _ in range(2):
            session.run(built.train_op)
        for clock in clocks:
            np.testing.assert_array_equal(session.run(clock), 2. * np.ones(clock.shape))


# ---- rows, and moving averages in branches -------------------------------------------------------

def face_net(images, labels, centers=None):
    """Batch norm whose mode is fed and whose averages are written in the forward pass, in branches;
    and centers of the classes, rows that the forward pass moves towards the examples."""
    is_training = tf.placeholder_with_default(True, [], 'is_training')
    net = slim.conv2d(images, 4, 3, scope='conv', normalizer_fn=slim.batch_norm,
                      weights_initializer=tf.random_normal_initializer(seed=3),
                      normalizer_params=dict(updates_collections=None, is_training=is_training,
                                             decay=.9, fused=True))
    net = tf.reduce_mean(net, [1, 2])
    if centers is None:
        centers = tf.get_variable('centers', [3, 4], initializer=ZEROS, trainable=False)
    distance = tf.gather(centers, labels) - net
    moved = tf.scatter_sub(centers, labels, .25 * distance)
    with tf.control_dependencies([moved]):
        return tf.reduce_mean(tf.square(distance)) + tf.reduce_mean(tf.square(net - 1.))


@pytest.mark.slow
@pytest.mark.parametrize('made_before', ['reference', None])
def test_class_centers_beside_averages_in_branches_are_as_on_one_device(made_before):
    images = np.tile(np.random.RandomState(0).randn(4, 6, 6, 3), [2, 1, 1, 1]).astype('float32')
    labels = np.arange(8) % 4 % 3  # both shards have the same statistics
    names = ['centers', 'conv/BatchNorm/moving_mean', 'conv/BatchNorm/moving_variance']
    found = []
    for count in (1, 2):
        with tf.Graph().as_default(), switched('control_flow_v2', False):
            centers = None
            if made_before is not None:
                centers = tf.get_variable('centers', [3, 4], initializer=ZEROS, trainable=False,
                                          use_resource=False)
            found.append(losses_and_values(
                lambda x, y: face_net(x, y, centers), (tf.constant(images), tf.constant(labels)),
                count, names))
    (losses, values), (losses_of_two, values_of_two) = found
    np.testing.assert_allclose(losses_of_two, losses, 1e-5)
    assert set(values) == set(names)
    # A variance over 144 numbers has another correction than one over 288.
    for name, limit in zip(names, (1e-4, 1e-4, 1e-2)):
        np.testing.assert_allclose(values_of_two[name], values[name], limit, 1e-6, err_msg=name)


# ---- update_ops='all' ----------------------------------------------------------------------------

X = np.array([1., 2., 4., 8.], 'float32')


def average(place, variable=None):
    """A moving average of decay 1/2, written in the forward pass or by `UPDATE_OPS`."""
    def model_fn(x):
        mean = variable
        if mean is None:
            mean = tf.get_variable('mean', [], initializer=ZEROS, trainable=False)
        w = tf.get_variable('w', [], initializer=ONES)
        written = tf.assign_sub(mean, (mean - tf.reduce_mean(x)) * .5)
        if place == 'collection':
            tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, written)
            return tf.reduce_mean(x) * w
        with tf.control_dependencies([written]):
            return tf.reduce_mean(x) * w
    return model_fn


@pytest.mark.parametrize('place, options', [
    ('forward', {}), ('collection', dict(copies='reuse')),
    ('collection', dict(memory=towers.Memory(accumulate=2)))] + [
        pytest.param(*case, marks=pytest.mark.slow) for case in [
            ('collection', {}), ('forward', dict(memory=towers.Memory(accumulate=2)))]])
@pytest.mark.parametrize('made_before', first_fast(1, [None, 'reference', 'resource']))
def test_updates_of_all_towers_are_steps_one_after_the_other(place, options, made_before, graph):
    count, shards = 4, X
    if 'memory' in options:  # the first micro-batch of each tower, then the second
        count, shards = 2, X[[0, 2, 1, 3]]
    variable = None
    if made_before is not None:
        variable = tf.get_variable('mean', [], initializer=ZEROS, trainable=False,
                                   use_resource=made_before == 'resource')
    wanted = 0.
    for x in list(shards) * 3:
        wanted -= (wanted - x) * .5
    _, values = losses_and_values(average(place, variable), tf.constant(X), count, ['mean'],
                                  update_ops='all', **options)
    assert values['mean'] == np.float32(wanted)


def test_updates_of_layers_in_sync_are_in_turn_layer_by_layer(graph):
    """Each layer's statistic is of all towers: a tower that waited for all layers of the one before
    would wait for itself."""
    def model_fn(x):
        net = x[:, None]
        for layer in range(2):
            w = tf.get_variable('w%d' % layer, [1, 1], initializer=ONES)
            mean = tf.get_variable('mean%d' % layer, [], initializer=ZEROS, trainable=False)
            net = tf.matmul(net, w)
            written = tf.assign_sub(mean, (mean - towers.batch_mean(tf.reduce_mean(net))) * .5)
            with tf.control_dependencies([written]):
                net = tf.identity(net)
        return tf.reduce_mean(net)
    _, values = losses_and_values(model_fn, tf.constant(X), 2, ['mean0', 'mean1'], 1,
                                  update_ops='all')
    assert values == {'mean0': .75 * X.mean(), 'mean1': .75 * X.mean()}


def test_updates_that_would_start_from_one_value_are_refused(graph):
    def model_fn(x):
        mean = tf.get_variable('mean', [], initializer=ZEROS, trainable=False)
        old = mean.read_value()
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.assign(mean, .5 * old + x[0]))
        return tf.reduce_mean(x) * tf.get_variable('w', [], initializer=ONES) + old
    with pytest.raises(towers.SharedVariableError, match='mean .* starts from a value that the '
                       "forward pass has read .*: read the variable in the update, or pass"):
        towers.build_towers(model_fn, tf.constant(X), sgd(.01), 2, update_ops='all')


# ---- an update after the model's own read --------------------------------------------------------

def late(x):
    """1, a while later."""
    ones = tf.ones([200, 200]) * (1. + 0. * x[0]) / 200.
    for _ in range(5):
        ones = tf.matmul(ones, ones)
    return tf.reduce_sum(ones) / 200.


def soft_target(x):
    """Reads late, and then counts by an update that waits for this read alone."""
    count = tf.get_variable('count', [], initializer=ZEROS, trainable=False)
    with tf.control_dependencies([late(x)]):
        before = count.read_value()
    with tf.control_dependencies([before]):
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.assign_add(count, 1.))
    return before + 0. * tf.get_variable('w', [], initializer=ONES)


@pytest.mark.parametrize('copies', first_fast(1, ['clone', 'reuse']))
def test_an_update_waits_for_the_reads_of_all_towers(copies, graph):
    losses, _ = losses_and_values(soft_target, tf.constant(X), 2, copies=copies)
    np.testing.assert_allclose(losses, [0., 1., 2.], atol=1e-4)


@pytest.mark.parametrize('made_before', first_fast(1, ['reference', 'resource']))
@pytest.mark.parametrize('read', first_fast(1, [
    lambda count: count + 0., tf.identity, tf.convert_to_tensor]))
def test_a_counter_from_before_the_build_has_one_devices_order(made_before, read):
    def losses(count):
        with tf.Graph().as_default():
            counter = tf.get_variable('count', [], initializer=ZEROS, trainable=False,
                                      use_resource=made_before == 'resource')

            def model_fn(x):
                before = read(counter)
                with tf.control_dependencies([before]):
                    written = tf.assign_add(counter, 1.)
                with tf.control_dependencies([written]):
                    w = tf.get_variable('w', [], initializer=ONES)
                    return .5 * w + 0. * tf.reduce_mean(x) + before
            if count:
                return losses_and_values(model_fn, tf.constant(X), count)[0]
            loss = model_fn(tf.constant(X))
            with tf.control_dependencies([loss]):
                train_op = sgd(.01).minimize(loss)
            with tf.Session() as session:
                session.run(tf.global_variables_initializer())
                return [session.run([loss, train_op])[0] for _ in range(3)]
    np.testing.assert_allclose(losses(2), losses(0))


def count_before_a_loop(x, count):
    with tf.control_dependencies([tf.assign_add(count, 1.)]):
        _, total = tf.while_loop(lambda i, _: i < 3, lambda i, total: (i + 1, 2. * total),
                                 (tf.constant(0), x))
    return tf.reduce_mean(total) * tf.get_variable('w', [], initializer=ONES)


@pytest.mark.parametrize('device', first_fast(2, ['', '/cpu:1', '/cpu:0']))
def test_a_loop_after_a_write_of_a_reference_variable_of_another_device_is_refused(device, graph):
    """In a hand-written tower loop the step never ends."""
    with tf.device(device or None), switched('control_flow_v2', False):
        count = tf.get_variable('count', [], initializer=ZEROS, trainable=False, use_resource=False)
    with switched('control_flow_v2', False), pytest.raises(
            towers.SharedVariableError, match=r'^a loop of tower %d \(.*RefEnter\) takes the '
            'reference variable count, which is on another .*: make it with use_resource=True.$'
            % (device != '/cpu:1')):
        towers.build_towers(lambda x: count_before_a_loop(x, count), tf.constant(X), sgd(.01),
                            ['/cpu:0', '/cpu:1'])


def test_a_loop_after_a_write_is_one_devices(graph):
    with switched('control_flow_v2', False):
        count = tf.get_variable('count', [], initializer=ZEROS, trainable=False, use_resource=True)
        losses, values = losses_and_values(
            lambda x: count_before_a_loop(x, count), tf.constant(X), 2, ['count'], 1)
    assert losses == [8. * X.mean()] and values == {'count': 1.}


@pytest.mark.parametrize('is_finished', first_fast(1, [False, True]))
@pytest.mark.parametrize('use_resource', first_fast(1, [False, True]))
def test_rows_that_an_update_computes_from_the_variable_are_of_before_the_step(use_resource,
                                                                               is_finished):
    """Class centers, whose labels repeat across shards: only the update reads the old rows."""
    features = np.random.RandomState(0).randn(6, 4)
    labels = np.array([0, 1, 0, 1, 0, 2])

    def trained(num_towers):
        with tf.Graph().as_default():
            inputs = (tf.placeholder(tf.float64, [None, 4]), tf.placeholder(tf.int32, [None]))
            centers = tf.get_variable('centers', [3, 4], tf.float64, tf.ones_initializer(),
                                      trainable=False, use_resource=use_resource)
            weights = tf.get_variable('weights', [4], tf.float64, tf.ones_initializer(),
                                      use_resource=use_resource)

            def model_fn(features, labels):
                hidden = features * weights
                difference = tf.gather(centers, labels) - hidden
                tf.add_to_collection(tf.GraphKeys.UPDATE_OPS,
                                     tf.scatter_sub(centers, labels, .5 * difference))
                return tf.reduce_mean(tf.square(hidden))

            optimizer = tf.train.GradientDescentOptimizer(.01)
            if num_towers:
                model = model_fn(*inputs) if is_finished else model_fn
                train_op = towers.build_towers(model, inputs, optimizer, num_towers,
                                               'mean').train_op
            else:
                loss = model_fn(*inputs)
                with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
                    train_op = optimizer.minimize(loss)
            with tf.Session(config=towers.session_config(num_towers or 1)) as session:
                session.run(tf.global_variables_initializer())
                for _ in range(3):
                    session.run(train_op, dict(zip(inputs, (features, labels))))
                return session.run(centers)

    expected = trained(0)
    for num_towers in 2, 3:
        np.testing.assert_allclose(trained(num_towers), expected, rtol=1e-12)


@pytest.mark.slow
def test_a_write_waits_for_one_operation_of_each_other_device():
    """As the soft target of DDPG, whose memory many operations of a tower read: a wait for an
    operation of another device is a transfer of its own."""
    x = tf.placeholder_with_default(tf.constant([[1.], [2.], [3.], [4.]]), [None, 1])
    online = tf.get_variable('online', [], initializer=ONES, use_resource=False)
    target = tf.get_variable('target', [], initializer=ZEROS, trainable=False, use_resource=False)
    moved = tf.assign_add(target, .5 * (online - target))
    readers = [target * x, target + x, tf.maximum(target, x), target - x]
    with tf.control_dependencies([moved]):
        loss = tf.reduce_mean(online * x + tf.add_n([tf.stop_gradient(each) for each in readers]))
    built = towers.build_towers(loss, x, sgd(.1), ['/cpu:0', '/cpu:1'], 'mean')
    assert not towers.audit(built).broken

    waits = [wait for wait in built.plan.waits if wait.awaited.startswith('tower_1/')]
    held = {wait.operation for wait in waits if 'target before this write' in wait.reason}
    assert len(held) == 1 and len(waits) > 3
    write = x.graph.get_operation_by_name(held.pop())
    assert len([op for op in write.control_inputs if op.device.endswith('CPU:1')]) == 1

    # The wait of the program's loss for the write is the write's for all reads: they read zero.
    with tf.Session(config=towers.session_config(built.devices)) as session:
        session.run(tf.global_variables_initializer())
        assert session.run([built.loss, built.train_op])[0] == 2.5 + 2.5
        np.testing.assert_allclose(session.run([target, online]), [.5, 1. - .25], rtol=1e-6)
