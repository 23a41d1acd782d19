"""Is a checkpoint this model's, and what of a published one fits another."""

import os

import make_checkpoints
import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from sample_models import mutable_table

from towers.checkpoint.match import check_fits, init_from
from towers.errors import CheckpointError, InvalidArgumentError

DATA_FOLDER = os.path.join(os.path.dirname(os.path.dirname(__file__)), 'data')
PUBLISHED = [os.path.join(DATA_FOLDER, folder, name + '.ckpt')
             for folder in ('ckpt_tf1.15', 'ckpt_tf2.21') for name in ('reference', 'resource',
                                                                       'v1')]


def message(error_type, function, *args, **options):
    """The text, on one line, of the error that a call raises."""
    with pytest.raises(error_type) as caught:
        function(*args, **options)
    assert '\n' not in str(caught.value)
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize('prefix, use_resource', [
    (PUBLISHED[1], True), (PUBLISHED[2], False), (PUBLISHED[3], True)])  # of each kind and version
def test_the_model_that_wrote_it_fits_and_restores(prefix, use_resource):
    make_checkpoints.build(use_resource)
    assert check_fits(prefix) == []
    assert check_fits(prefix, tf.trainable_variables()) == [
        'global_step', 'net/conv/biases/Momentum', 'net/conv/weights/Momentum',
        'net/logits/biases/Momentum', 'net/logits/weights/Momentum']
    initial = init_from(prefix, optimizer_state=True)
    assert initial.left == [] and initial.unused == []
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        initial.restore(session)
        for index, variable in enumerate(tf.global_variables()):
            values = session.run(variable).ravel()
            expected = [7] if values.shape == (1,) else index + .5 + np.arange(values.size)
            np.testing.assert_array_equal(values, expected, variable.name)


def test_what_is_no_list_of_variables():
    weights = tf.get_variable('weights', [2])
    with tf.Graph().as_default():
        other = tf.get_variable('other', [2])
    for function in (check_fits, init_from):
        for variables in (weights, tf.ones([2]), np.array(3), 'weights', tf.Variable, 3):
            assert message(InvalidArgumentError, function, PUBLISHED[0], variables).endswith(
                ': expected a list of variables, or a dict from names to them.')
        assert message(InvalidArgumentError, function, PUBLISHED[0], [other]) == (
            "variables holds 'other', which belongs to another graph.")
        assert 'a name in variables=3' in message(
            InvalidArgumentError, function, PUBLISHED[0], {3: weights})


def test_another_model_is_refused_with_the_names_that_differ():
    prefix = PUBLISHED[0]
    with tf.variable_scope('net'):
        tf.get_variable('conv/weights', [6, 4], tf.float64)
        tf.get_variable('logits/weights', [4, 5])
        tf.get_variable('logits/biases', [5])
        tf.get_variable('fc/weights', [2])
    assert message(CheckpointError, check_fits, prefix) == (
        'the checkpoint {0} is of another model: 4 of the 4 variables of this model differ: '
        'another shape: net/logits/biases ([3] there, [5] here), net/logits/weights ([4, 3] there, '
        '[4, 5] here); another type: net/conv/weights (float32 there, float64 here); not in the '
        'checkpoint: net/fc/weights; only in the checkpoint: global_step, net/conv/biases, '
        'net/conv/biases/Momentum, net/conv/weights/Momentum and 2 more. Nothing was changed. '
        'Build the model that wrote it, train in another directory, or take what fits with '
        '--init_from={0} (towers.init_from).'.format(prefix))


def test_parts_are_no_matter_but_the_whole_is():
    with tf.variable_scope('net', partitioner=tf.fixed_size_partitioner(3)):
        tf.get_variable('conv/weights', [6, 4])
    assert len(tf.global_variables()) == 3
    assert len(check_fits(PUBLISHED[0])) == 8
    with tf.Graph().as_default():
        with tf.variable_scope('net', partitioner=tf.fixed_size_partitioner(3)):
            tf.get_variable('conv/weights', [9, 4])
        assert ('1 of the 1 variables of this model differ: another shape: net/conv/weights '
                '([6, 4] there, [9, 4] here);') in message(
                    CheckpointError, check_fits, PUBLISHED[0])


def test_a_partitioned_variable_may_have_another_name_in_the_checkpoint():
    with tf.variable_scope('other', partitioner=tf.fixed_size_partitioner(3)):
        whole = tf.get_variable('weights', [6, 4])
    for given in whole, list(whole):
        names = {'net/conv/weights': given}
        assert len(check_fits(PUBLISHED[0], names)) == 8
        initial = init_from(PUBLISHED[0], names)
        with tf.Session() as session:
            initial.restore(session)
            np.testing.assert_array_equal(
                session.run(tf.convert_to_tensor(whole)),
                tf.train.load_variable(PUBLISHED[0], 'net/conv/weights'))
    for given in [], 3, tf.zeros([6, 4]):
        assert message(InvalidArgumentError, check_fits, PUBLISHED[0], {'w': given}).endswith(
            ': expected a variable of this graph, or the parts of a partitioned one.')
    assert message(InvalidArgumentError, init_from, PUBLISHED[0], list(whole) * 2) == (
        "variables holds 'other/weights/part_0' twice.")


def test_the_content_of_tables_belongs_to_the_model(tmpdir):
    tf.get_variable('weights', [2])
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        prefix = tf.train.Saver().save(session, str(tmpdir.join('without')))
        mutable_table()
        assert 'not in the checkpoint: table-keys, table-values' in message(
            CheckpointError, check_fits, prefix)
        prefix = tf.train.Saver().save(session, str(tmpdir.join('with')))
    names = {name for name, _ in tf.train.list_variables(prefix)}
    assert names == {'weights', 'table-keys', 'table-values'}
    assert check_fits(prefix) == []


@pytest.mark.slow
def test_a_published_checkpoint_into_a_model_with_other_classes():
    prefix = PUBLISHED[3]
    make_checkpoints.build(True, classes=5)
    initial = init_from(prefix)
    assert initial.prefix == prefix
    assert initial.taken == ['net/conv/biases', 'net/conv/weights']
    assert initial.left == [
        ('global_step', 'counter'),
        ('net/conv/biases/Momentum', 'optimizer state'),
        ('net/conv/weights/Momentum', 'optimizer state'),
        ('net/logits/biases', 'another shape: [3] there, [5] here'),
        ('net/logits/biases/Momentum', 'optimizer state'),
        ('net/logits/weights', 'another shape: [4, 3] there, [4, 5] here'),
        ('net/logits/weights/Momentum', 'optimizer state')]
    assert initial.unused == []
    assert str(initial) == (
        'from %s: took 2 of 9 variables (net: 2)\n'
        '  left, another shape: net/logits/biases ([3] there, [5] here), net/logits/weights '
        '([4, 3] there, [4, 5] here)\n'
        '  left, counter: global_step\n'
        '  left, optimizer state: net/conv/biases/Momentum, net/conv/weights/Momentum, '
        'net/logits/biases/Momentum, net/logits/weights/Momentum' % prefix)
    # As train.py does it: through a scaffold, in a finalized graph.
    scaffold = tf.train.Scaffold(init_fn=lambda scaffold, session: initial.restore(session))
    with tf.train.MonitoredSession(tf.train.ChiefSessionCreator(scaffold)) as session:
        values = session.run({variable.op.name: variable for variable in tf.global_variables()})
    np.testing.assert_array_equal(values['net/conv/biases'], 2.5 + np.arange(4))
    np.testing.assert_array_equal(values['net/conv/weights/part_1'].ravel(), 1.5 + np.arange(12))
    assert values['net/logits/biases'].shape == (5,)
    assert values['global_step'] == 0
    assert not values['net/conv/biases/Momentum'].any()


def test_excluded_scopes_and_names_are_left():
    make_checkpoints.build(True)
    initial = init_from(PUBLISHED[0], exclude=['net/logits', 'net/conv/biases'])
    assert initial.taken == ['net/conv/weights']
    assert [name for name, reason in initial.left if reason == 'excluded'] == [
        'net/conv/biases', 'net/conv/biases/Momentum', 'net/logits/biases',
        'net/logits/biases/Momentum', 'net/logits/weights', 'net/logits/weights/Momentum']
    assert initial.unused == []
    # Scopes are names, not beginnings of names.
    assert message(InvalidArgumentError, init_from, PUBLISHED[0], exclude=['net/log']).startswith(
        "exclude='net/log': no variable has that name or scope; there are global_step, ")
    assert message(InvalidArgumentError, init_from, PUBLISHED[0], exclude='net') == (
        "exclude='net': expected a list of names.")


@pytest.mark.slow
def test_adams_state_is_left(tmpdir):
    def build():
        weights = tf.get_variable('weights', [2])
        below = tf.get_variable('weights/scale', [2])  # trainable, so no slot
        average = tf.train.ExponentialMovingAverage(.9)
        loss = tf.reduce_sum(weights * below)
        train_op = tf.train.AdamOptimizer().minimize(loss)
        return tf.group(train_op, average.apply([weights])), average
    with tf.Graph().as_default(), tf.Session() as session:
        build()
        session.run(tf.global_variables_initializer())
        prefix = tf.train.Saver().save(session, str(tmpdir.join('model.ckpt')))
    _, average = build()
    initial = init_from(prefix)
    assert initial.taken == ['weights', 'weights/scale']
    assert {reason for _, reason in initial.left} == {'optimizer state'}
    assert len(initial.left) == 7
    # Averages may be asked for, in place of the weights.
    renamed = init_from(prefix, average.variables_to_restore(tf.trainable_variables()[:1]))
    assert renamed.taken == ['weights/ExponentialMovingAverage', 'weights/scale']
    assert len(init_from(prefix, optimizer_state=True).taken) == 9


def test_counters_are_left_of_a_run_of_ones_own(tmpdir):
    def build():
        tf.train.get_or_create_global_step()
        for use_resource in (False, True):
            tf.get_variable('examples_seen_%d' % use_resource, [], tf.int64, trainable=False,
                            initializer=tf.zeros_initializer(), use_resource=use_resource)
        tf.get_variable('moving_mean', [1], trainable=False)
        tf.get_variable('table', [3], tf.int64, tf.zeros_initializer(), trainable=False)
    with tf.Graph().as_default(), tf.Session() as session:
        build()
        session.run(tf.global_variables_initializer())
        prefix = tf.train.Saver().save(session, str(tmpdir.join('model.ckpt')))
    build()
    initial = init_from(prefix)
    assert initial.taken == ['moving_mean', 'table']
    assert initial.left == [('examples_seen_0', 'counter'), ('examples_seen_1', 'counter'),
                            ('global_step', 'counter')]
    assert len(init_from(prefix, optimizer_state=True).taken) == 5


def test_a_checkpoint_is_found_by_any_of_its_files(tmpdir):
    tf.get_variable('value', [3])
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        prefix = tf.train.Saver().save(session, str(tmpdir.join('model.ckpt')), 5)
    for suffix in ('', '.index', '.data-00000-of-00001', '.meta'):
        assert init_from(prefix + suffix).prefix == prefix
    assert init_from(str(tmpdir)).prefix == prefix
    assert message(CheckpointError, init_from, PUBLISHED[0]).startswith(
        'nothing in %s fits this model: it has global_step, net/conv/biases, ' % PUBLISHED[0])


def test_a_checkpoint_that_is_not_there(tmpdir):
    tf.get_variable('value', [3])
    for path in (str(tmpdir), str(tmpdir.join('model.ckpt-9'))):
        assert message(CheckpointError, init_from, path) == (
            'there is no checkpoint %s. Expected a directory, a prefix such as model.ckpt-500, or '
            'one of its files; in %s there is none.' % (path, tmpdir))
    folder = os.path.join(DATA_FOLDER, 'ckpt_tf2.21')
    assert message(CheckpointError, init_from, folder + '/model.ckpt').endswith(
        'in %s there is reference.ckpt, resource.ckpt, v1.ckpt.' % folder)
    assert message(CheckpointError, init_from, str(tmpdir.join('missing', 'model.ckpt'))).endswith(
        'in %s there is none.' % tmpdir.join('missing'))


def test_a_damaged_checkpoint_is_refused(tmpdir):
    make_checkpoints.build(False)
    for suffix in ('.index', '.data-00000-of-00001'):
        with open(PUBLISHED[0] + suffix, 'rb') as source:
            tmpdir.join('model.ckpt' + suffix).write_binary(source.read())
    data = tmpdir.join('model.ckpt.data-00000-of-00001')
    data.write_binary(data.read_binary()[:-20])
    assert message(CheckpointError, init_from, str(tmpdir.join('model.ckpt'))) == (
        '{0} is damaged: model.ckpt.data-00000-of-00001: tensor net/logits/weights/Momentum: Read '
        'less bytes than requested. Bring the file back, or fetch it again.'.format(
            tmpdir.join('model.ckpt')))
