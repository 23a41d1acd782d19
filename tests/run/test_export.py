"""What is exported: the model alone, under the names of the signature, whole or not at all."""

import os

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from towers.run.averages import WeightAverages
from towers.errors import CheckpointError, InvalidArgumentError
from towers.run.export import export_saved_model

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


def build():
    x = tf.placeholder(tf.float32, [None, 2], 'x')
    return {'x': x}, {'y': network(x)}


def loaded(folder, inputs, name='y'):
    with tf.Graph().as_default(), tf.Session() as session:
        model = tf.saved_model.load(session, [tf.saved_model.tag_constants.SERVING], folder)
        signature = model.signature_def['serving_default']
        assert signature.method_name == 'tensorflow/serving/predict'
        return session.run(signature.outputs[name].name,
                           {signature.inputs[each].name: value for each, value in inputs.items()})


def test_a_plain_session_without_towers_loads_it(checkpoint, tmp_path, graph):
    prefix, expected = checkpoint
    folder = export_saved_model(build, prefix, str(tmp_path / 'export'))
    assert folder == str(tmp_path / 'export' / '3')
    assert sorted(os.listdir(folder)) == ['saved_model.pb', 'variables']
    assert os.listdir(str(tmp_path / 'export')) == ['3']
    np.testing.assert_allclose(loaded(folder, {'x': X}), expected, rtol=1e-6)
    assert loaded(folder, {'x': X[:1]}).shape == (1, 1)  # any batch
    names = [name for name, _ in tf.train.list_variables(folder + '/variables/variables')]
    assert sorted(names) == ['net/b', 'net/w']
    assert not graph.get_operations()  # a graph of its own


def test_what_is_there_already_is_not_touched(checkpoint, tmp_path):
    folder = str(tmp_path / 'export' / '3')
    os.makedirs(folder)
    with pytest.raises(InvalidArgumentError) as caught:
        export_saved_model(build, checkpoint[0], str(tmp_path / 'export'))
    assert str(caught.value) == ('%s exists already: an export of step 3. Remove it, or export '
                                 'elsewhere.' % folder)
    assert os.listdir(folder) == []
    (tmp_path / 'file').write_text('')
    with pytest.raises(InvalidArgumentError, match='file/3 cannot be written: .*Export to a direc'):
        export_saved_model(build, checkpoint[0], str(tmp_path / 'file'))


def test_a_checkpoint_of_another_model_is_refused(checkpoint, tmp_path):
    def other():
        x = tf.placeholder(tf.float32, [None, 2], 'x')
        return {'x': x}, {'y': x * tf.get_variable('other/w', [2])}
    with pytest.raises(CheckpointError, match='1 of the 1 variables of this model differ: not in '
                       'the checkpoint: other/w; only in the checkpoint: '):
        export_saved_model(other, checkpoint[0], str(tmp_path / 'export'))
    assert not (tmp_path / 'export').exists()


@pytest.mark.parametrize('returned, text', [
    (lambda: ({}, {}), 'build returned ({}, {}): expected (inputs, outputs), two dicts from names '
                       'to tensors.'),
    (lambda: ({'x': 3}, build()[1]), "build returned 3 for the name 'x': expected a tensor of the "
                                     'graph that it is called under.'),
    (lambda: ({'x': tf.zeros([2])}, {'y': tf.zeros([2])}),
     'build made no variable: expected those of the model, under their names in the checkpoint.')])
def test_what_is_no_model(checkpoint, tmp_path, returned, text):
    with pytest.raises(InvalidArgumentError) as caught:
        export_saved_model(returned, checkpoint[0], str(tmp_path / 'export'))
    assert str(caught.value) == text
    assert not (tmp_path / 'export').exists()
