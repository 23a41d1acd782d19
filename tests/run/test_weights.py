"""Moving averages of weights by hand, and a SavedModel: the model alone, whole or not at all."""

import os

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from sample_models import keras, mutable_table
from towers.errors import CheckpointError, InvalidArgumentError
from towers.run.evaluation import Evaluation
from towers.run.weights import WeightAverages, export_saved_model

DATA = np.array([[1.], [2.], [3.], [4.]], np.float32)


def model_fn(x):
    """w grows by 2 and b by 1 a step of SGD at rate 1 with the mean of two towers' gradients."""
    w = tf.get_variable('net/w', [1], initializer=tf.ones_initializer())
    b = tf.get_variable('net/b', [1], initializer=tf.zeros_initializer())
    tf.get_variable('net/count', [1], initializer=tf.zeros_initializer(), trainable=False)
    prediction = x * w + b
    return towers.ModelOutput(tf.reduce_mean(0. * x) - 2. * w[0] - b[0],
                              metrics={'mean': tf.reduce_mean(prediction)})


def build(**options):
    step = tf.train.get_or_create_global_step()
    built = towers.build_towers(model_fn, DATA, tf.train.GradientDescentOptimizer(1.), 2, 'mean',
                                global_step=step, **options)
    averages = WeightAverages(0.9, step)
    train_op = averages.update_after(built.train_op, [v for _, v in built.gradients])
    return built, averages, train_op


def by_hand(values):
    """The average after each step, of the values before step 1 and after each step."""
    average, averages = values[0], []
    for step, value in enumerate(values[1:], 1):
        used = min(0.9, (1. + step) / (10. + step))
        average -= (1 - used) * (average - value)
        averages.append(average)
    return averages


def test_averages_are_those_worked_out_by_hand():
    built, _, train_op = build()
    average = {v.op.name: v for v in tf.global_variables()
               if 'ExponentialMovingAverage' in v.op.name}
    assert sorted(average) == ['net/b/ExponentialMovingAverage', 'net/w/ExponentialMovingAverage']
    with tf.Session(config=towers.session_config(built.devices)) as session:
        session.run(tf.global_variables_initializer())
        assert session.run(average['net/w/ExponentialMovingAverage']) == [1.]
        got = []
        for _ in range(6):
            session.run(train_op)
            got.append(session.run(average))
        assert session.run(built.variables[0]) == [13.]
    expected = by_hand([1., 3., 5., 7., 9., 11., 13.])
    # The first one: d = min(0.9, 2 / 11), 1 - 9 / 11 * (1 - 3).
    assert expected[0] == pytest.approx(1 + 18 / 11.)
    np.testing.assert_allclose([each['net/w/ExponentialMovingAverage'][0] for each in got],
                               expected, rtol=1e-6)
    np.testing.assert_allclose([each['net/b/ExponentialMovingAverage'][0] for each in got],
                               by_hand([0., 1., 2., 3., 4., 5., 6.]), rtol=1e-6)


def test_what_it_does_not_average():
    """All is said before an average is made."""
    step = tf.train.get_or_create_global_step()
    weights = tf.get_variable('weights', [2])
    counts = tf.get_variable('counts', [2], tf.int64, tf.zeros_initializer())
    with tf.Graph().as_default():
        other, other_op = tf.get_variable('other', [2]), tf.no_op(name='step')
    train_op = tf.no_op()
    for op, variables, text in (
            (None, [weights], 'train_op=None of type NoneType: expected the operation that updates'),
            (other_op, [weights], "train_op is 'step' of another graph"),
            (train_op, weights, 'expected a list of variables'),
            (train_op, [], 'variables=[]: expected the variables to average'),
            (train_op, [weights, None], 'variables holds None of type NoneType'),
            (train_op, [weights, weights], "variables holds 'weights' twice"),
            (train_op, [other], "variables holds 'other', which belongs to another graph"),
            (train_op, [counts], "variables holds 'counts' of type int64: expected variables of")):
        with pytest.raises(InvalidArgumentError) as caught:
            WeightAverages(0.9, step).update_after(op, variables)
        assert text in str(caught.value)
    assert len(tf.global_variables()) == 3
    averages = WeightAverages(0.9, step)
    averages.update_after(train_op, [weights])
    with pytest.raises(InvalidArgumentError, match='called before, for 1 variable:'):
        averages.update_after(train_op, [weights])


@pytest.mark.slow
def test_an_evaluation_takes_them_instead_of_weights():
    built, averages, train_op = build()
    before = {v.op.name for v in tf.global_variables()}
    dataset = tf.data.Dataset.from_tensor_slices(DATA).batch(3)
    plain = Evaluation(model_fn, dataset, trained=built)
    with averages.instead_of_weights():
        averaged = Evaluation(model_fn, dataset, trained=built)
    assert {v.op.name for v in tf.global_variables()} == before
    with tf.Session(config=towers.session_config(built.devices)) as session:
        session.run(tf.global_variables_initializer())
        for _ in range(3):
            session.run(train_op)
        assert plain.run(session)['mean'] == pytest.approx(2.5 * 7 + 3)
        w, b = by_hand([1., 3., 5., 7.])[-1], by_hand([0., 1., 2., 3.])[-1]
        assert averaged.run(session)['mean'] == pytest.approx(2.5 * w + b, rel=1e-6)
        # Reading them has changed nothing.
        assert plain.run(session)['mean'] == pytest.approx(2.5 * 7 + 3)


def test_a_decay_that_makes_no_sense_and_averages_that_are_not_there_yet():
    step = tf.train.get_or_create_global_step()
    for decay in (0, 1, float('nan')):
        with pytest.raises(InvalidArgumentError, match='expected a number between 0 and 1, such'):
            WeightAverages(decay, step)
    with pytest.raises(InvalidArgumentError, match='there are no averages yet: call update_after'):
        with WeightAverages(0.9, step).instead_of_weights():
            pass


@pytest.mark.slow
def test_weights_whose_averages_cannot_take_their_place():
    layer, step = keras.layers.Dense(1), tf.train.get_or_create_global_step()

    def model(x):
        return towers.ModelOutput(tf.reduce_mean(layer(x)[:, 0]))
    built = towers.build_towers(model, DATA, tf.train.GradientDescentOptimizer(1.), 2,
                                global_step=step)
    averages = WeightAverages(0.9, step)
    averages.update_after(built.train_op, [v for _, v in built.gradients])
    with pytest.raises(InvalidArgumentError, match='reads variable .* not its average: only '
                       'tf.get_variable can give another'):
        with averages.instead_of_weights():
            Evaluation(model, tf.data.Dataset.from_tensor_slices(DATA).batch(2), trained=built)


# ---- SavedModel ----------------------------------------------------------------------------------

X = np.arange(8, dtype=np.float32).reshape([4, 2])


def network(x):
    w = tf.get_variable('net/w', [2, 1], initializer=tf.ones_initializer())
    b = tf.get_variable('net/b', [1], initializer=tf.zeros_initializer())
    return tf.matmul(x, w) + b


@pytest.fixture(scope='module')
def checkpoint(tmp_path_factory):
    """(prefix of a checkpoint at step 3 of two towers, what the network then gives for X)."""
    with tf.Graph().as_default():
        step = tf.train.get_or_create_global_step()
        built = towers.build_towers(
            lambda x: tf.reduce_mean(network(x)), X, tf.train.MomentumOptimizer(0.5, 0.5), 2,
            global_step=step, variables=towers.VariablePlacement('/cpu:1'))
        train_op = WeightAverages(0.9, step).update_after(built.train_op, built.variables)
        with tf.Session(config=towers.session_config(built.devices)) as session:
            session.run(tf.global_variables_initializer())
            for _ in range(3):
                session.run(train_op)
            values = session.run({v.op.name: v for v in tf.global_variables()})
            suffix = '/ExponentialMovingAverage'  # which are exported, as they are there
            expected = X.dot(values['net/w' + suffix]) + values['net/b' + suffix]
            prefix = tf.train.Saver().save(
                session, str(tmp_path_factory.mktemp('train') / 'model.ckpt'), step)
    return prefix, expected


def serving():
    x = tf.placeholder(tf.float32, [None, 2], 'x')
    return {'x': x}, {'y': network(x)}


def loaded(folder, inputs, name='y'):
    with tf.Graph().as_default(), tf.Session() as session:
        model = tf.saved_model.load(session, [tf.saved_model.tag_constants.SERVING], folder)
        signature = model.signature_def['serving_default']
        assert signature.method_name == 'tensorflow/serving/predict'
        return session.run(signature.outputs[name].name,
                           {signature.inputs[each].name: value for each, value in inputs.items()})


@pytest.mark.slow
def test_a_plain_session_without_towers_loads_it(checkpoint, tmp_path, graph):
    prefix, expected = checkpoint
    folder = export_saved_model(serving, prefix, str(tmp_path / 'export'))
    assert folder == str(tmp_path / 'export' / '3')
    assert sorted(os.listdir(folder)) == ['saved_model.pb', 'variables']
    assert os.listdir(str(tmp_path / 'export')) == ['3']
    np.testing.assert_allclose(loaded(folder, {'x': X}), expected, rtol=1e-6)
    assert loaded(folder, {'x': X[:1]}).shape == (1, 1)  # any batch
    names = [name for name, _ in tf.train.list_variables(folder + '/variables/variables')]
    assert sorted(names) == ['net/b', 'net/w']
    assert not graph.get_operations()  # a graph of its own


def test_a_partitioned_variable_is_exported_as_a_whole(tmp_path):
    partitioner = tf.fixed_size_partitioner(2)
    with tf.variable_scope('', partitioner=partitioner):
        step = tf.train.get_or_create_global_step()
        built = towers.build_towers(
            lambda x: tf.reduce_mean(network(x)), X, tf.train.MomentumOptimizer(0.5, 0.5), 2,
            global_step=step)
    train_op = WeightAverages(0.9, step).update_after(built.train_op, built.variables)
    with tf.Session(config=towers.session_config(built.devices)) as session:
        session.run(tf.global_variables_initializer())
        session.run(train_op)
        prefix = tf.train.Saver().save(session, str(tmp_path / 'model.ckpt'), step)
    reader = tf.train.load_checkpoint(prefix)
    suffix = '/ExponentialMovingAverage'
    expected = X.dot(reader.get_tensor('net/w' + suffix)) + reader.get_tensor('net/b' + suffix)

    def in_parts():
        with tf.variable_scope('', partitioner=partitioner):
            return serving()
    folder = export_saved_model(in_parts, prefix, str(tmp_path / 'export'))
    np.testing.assert_allclose(loaded(folder, {'x': X}), expected, rtol=1e-6)


def test_the_content_of_a_table_is_exported(tmp_path):
    def looked_up():
        table = mutable_table()
        keys = tf.placeholder(tf.int64, [None])
        return table, {'keys': keys}, {'y': table.lookup(keys)}
    tf.train.get_or_create_global_step()
    table, _, _ = looked_up()
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        without = tf.train.Saver([tf.train.get_global_step()]).save(session, str(tmp_path / 'a'))
        session.run(table.insert(tf.constant([3], tf.int64), tf.constant([7], tf.int64)))
        prefix = tf.train.Saver().save(session, str(tmp_path / 'b'))
    folder = export_saved_model(lambda: looked_up()[1:], prefix, str(tmp_path / 'export'))
    assert loaded(folder, {'keys': [3, 4]}).tolist() == [7, -1]
    with pytest.raises(CheckpointError, match='cannot be exported: it has no table-'):
        export_saved_model(lambda: looked_up()[1:], without, str(tmp_path / 'other'))


@pytest.mark.slow
def test_what_is_there_already_is_not_touched(checkpoint, tmp_path):
    folder = str(tmp_path / 'export' / '3')
    os.makedirs(folder)
    with pytest.raises(InvalidArgumentError) as caught:
        export_saved_model(serving, checkpoint[0], str(tmp_path / 'export'))
    assert str(caught.value) == ('%s exists already: an export of step 3. Remove it, or export '
                                 'elsewhere.' % folder)
    assert os.listdir(folder) == []
    (tmp_path / 'file').write_text('')
    with pytest.raises(InvalidArgumentError, match='file/3 cannot be written: .*Export to a direc'):
        export_saved_model(serving, checkpoint[0], str(tmp_path / 'file'))


def test_a_checkpoint_of_another_model_is_refused(checkpoint, tmp_path):
    def other():
        x = tf.placeholder(tf.float32, [None, 2], 'x')
        return {'x': x}, {'y': x * tf.get_variable('other/w', [2])}
    with pytest.raises(CheckpointError, match='1 of the 1 variables of this model differ: not in '
                       'the checkpoint: other/w; only in the checkpoint: '):
        export_saved_model(other, checkpoint[0], str(tmp_path / 'export'))
    assert not (tmp_path / 'export').exists()


def test_what_is_no_model(checkpoint, tmp_path):
    of_another_graph = tf.zeros([2])
    for returned in (({}, {}), ({'x': 3}, {'y': 3}), ({'x': of_another_graph},) * 2):
        with pytest.raises(InvalidArgumentError, match='^build returned .*: expected .inputs'):
            export_saved_model(lambda: returned, checkpoint[0], str(tmp_path / 'export'))
    assert not (tmp_path / 'export').exists()
