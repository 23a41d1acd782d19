"""What `train.py` makes of a trained model: evaluation, predictions, an exported model."""

import csv
import os
import pathlib
import types

from absl.testing import flagsaver
import numpy as np
import pytest
import tensorflow.compat.v1 as tf
import tf_slim as slim

import datasets
from models.digits import digits, digits_arg_scope
from train_runs import metrics
from towers.slim_mend import mend_slim
from trainer.flags import FLAGS
from trainer.results import report
from trainer.speed import Mark


@pytest.fixture(scope='module')
def predicted(runner, reference, tmp_path_factory):
    """The run of --mode=predict on the reference's checkpoint, and its rows."""
    table = str(tmp_path_factory.mktemp('predicted') / 'rows.csv')
    run = runner.run(reference.train_dir, ['--mode=predict', '--predictions=' + table,
                                           '--devices=/cpu:0', '--batch_size=400'])
    with open(table, newline='') as opened:
        return run, list(csv.DictReader(opened))


@pytest.fixture(scope='module')
def plain_logits(reference):
    """Logits of the test images by a plain program of slim; the checkpoint loads by its names."""
    mend_slim()
    images, _ = datasets.get_dataset('digits').load('test')
    with tf.Graph().as_default(), tf.Session() as session:
        with slim.arg_scope(digits_arg_scope()):
            logits, _ = digits(tf.constant(images), is_training=False)
        # The averages of the weights, as the reference evaluates and exports them.
        names = {variable.op.name + ('/ExponentialMovingAverage' if variable in
                                     tf.trainable_variables() else ''): variable
                 for variable in tf.global_variables()}
        assert len(names) == 14
        tf.train.Saver(names).restore(session, reference.train_dir + '/model.ckpt-30')
        return session.run(logits)


def test_results_are_no_zeros_and_no_wrong_plurals(capsys):
    setup = types.SimpleNamespace(model=types.SimpleNamespace(unit='image'),
                                  dataset=types.SimpleNamespace(num_examples={'test': 1}))
    with flagsaver.flagsaver():
        FLAGS(['train.py'])
        report(Mark(2., 10, 0.), {'accuracy': 3e-7, 'top': 0., 'half': .5, 'examples': 1}, setup)
    assert capsys.readouterr().out.splitlines() == [
        'test accuracy  3e-07 on 1 image', 'test half      0.5000 on 1 image',
        'test top       0.0000 on 1 image', 'speed          5 images/s']


@pytest.mark.slow
def test_evaluation_alone_is_that_at_the_end_of_training(runner, reference):
    def contents():
        return {path.name: path.read_bytes() for path in pathlib.Path(reference.train_dir).iterdir()
                if path.name != 'export'}
    before = contents()
    run = runner.run(reference.train_dir, ['--mode=eval', '--num_towers=3', '--batch_size=70'])
    lines = run.stdout.splitlines()
    accuracy = metrics(reference.train_dir)[-1]['test_accuracy']
    assert lines[-2:] == ['checkpoint     %s/model.ckpt-30, moving averages' % reference.train_dir,
                          'test accuracy  %.4f on 360 images' % accuracy]
    assert lines[-1] in reference.stdout.splitlines()
    assert run.stderr == ''
    assert contents() == before  # it only reads


@pytest.mark.slow
def test_there_is_a_row_an_image(reference, predicted, plain_logits):
    run, rows = predicted
    _, labels = datasets.get_dataset('digits').load('test')
    assert list(rows[0]) == ['image', 'label', 'predicted', 'probability']
    assert [int(row['image']) for row in rows] == list(range(360))
    assert [int(row['label']) for row in rows] == labels.tolist()
    right = sum(row['label'] == row['predicted'] for row in rows)
    assert right / 360. == pytest.approx(metrics(reference.train_dir)[-1]['test_accuracy'],
                                         abs=1e-12)
    assert [int(row['predicted']) for row in rows] == plain_logits.argmax(1).tolist()
    likely = np.exp(plain_logits - plain_logits.max(1, keepdims=True))
    np.testing.assert_allclose([float(row['probability']) for row in rows],
                               (likely.max(1) / likely.sum(1)), atol=2e-6)
    assert run.stdout.endswith('rows.csv, 360 images\n')


def test_what_is_exported_loads_with_the_v1_loader(reference, plain_logits):
    images, _ = datasets.get_dataset('digits').load('test')
    with tf.Session() as session:
        model = tf.saved_model.load(session, ['serve'], reference.train_dir + '/export/30')
        signature = model.signature_def['serving_default']
        assert signature.method_name == 'tensorflow/serving/predict'
        assert list(signature.inputs) == ['images']
        assert sorted(signature.outputs) == ['classes', 'logits', 'probabilities']
        fetches = {name: info.name for name, info in signature.outputs.items()}
        outputs = session.run(fetches, {signature.inputs['images'].name: images})
        # No towers, and no devices but those that TF gives to saving and restoring.
        assert not [op.name for op in session.graph.get_operations() if 'tower' in op.name
                    or op.device and not op.name.startswith('save')]
    np.testing.assert_allclose(outputs['logits'], plain_logits, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(outputs['classes'], plain_logits.argmax(1))
    np.testing.assert_allclose(outputs['probabilities'].sum(1), np.ones(360), rtol=1e-5)
    assert sorted(os.listdir(reference.train_dir + '/export')) == ['30']


def test_nothing_to_evaluate_and_nowhere_to_write(runner, tmp_path):
    run = runner.run(tmp_path / 'none', ['--mode=eval'], status=1)
    assert run.stderr == ('train.py: %s/none holds no checkpoint: train first, or give the '
                          '--train_dir of a run.\n' % tmp_path)
    assert run.stdout == '' and not (tmp_path / 'none').exists()
