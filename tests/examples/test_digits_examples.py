"""The examples that train on the digits, for a few steps."""

import os
import sys

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from examples import finished_class, gan, slim_feed_dict, tower_loop
from towers import compat


@pytest.mark.slow
def test_a_class_with_placeholders_learns_by_one_line(capsys):
    assert finished_class.main(['--devices=2', '--steps=100']) > 0.8
    out = capsys.readouterr().out
    assert '1 import of the finished model, 1 copy of its graph' in out
    assert 'one device       proven' in out and 'after 100 steps' in out


@pytest.mark.slow
def test_data_of_ones_own_are_learnt_by_the_trainer(runner, tmp_path):
    done = runner.run(tmp_path / 'run', [
        '--model=examples.own_data:classify', '--dataset=examples.own_data:spirals',
        '--train_steps=300', '--base_learning_rate=0.01'])
    assert float(done.stdout.split('test accuracy')[1].split()[0]) > 0.95


@pytest.mark.slow
def test_a_slim_network_learns_and_goes_on_from_its_checkpoint_on_one_device(tmpdir, capsys):
    two = slim_feed_dict.main(['--devices=2', '--steps=40', '--checkpoint_dir=%s' % tmpdir])
    assert two > 0.6
    assert 'after 40 steps' in capsys.readouterr().out
    with tf.Graph().as_default():  # nothing but the checkpoint comes over
        one = slim_feed_dict.main(['--devices=1', '--steps=0', '--checkpoint_dir=%s' % tmpdir])
    assert one == pytest.approx(two, abs=1e-6)
    assert 'after 40 steps' in capsys.readouterr().out


@pytest.mark.slow
def test_the_tutorials_program_learns_without_its_loop(capsys):
    assert tower_loop.main(['--devices=2', '--steps=100']) > 0.8
    assert 'after 100 steps' in capsys.readouterr().out
    names = [variable.op.name for variable in tf.global_variables()]
    assert 'conv1/weights' in names and 'conv1/weights/ExponentialMovingAverage' in names
    # The model function was called once; the evaluation has a weight decay of its own.
    assert len(tf.get_collection('losses')) == 4 + 3


@pytest.mark.slow
def test_the_losses_of_the_gan_are_those_of_a_game(tmpdir, capsys):
    pytest.importorskip('matplotlib')
    picture = str(tmpdir.join('gan.png'))
    losses = gan.main(['--steps=100', '--picture=' + picture])
    assert set(losses) == {'discriminator', 'generator'}
    # Untrained, both are near 2 ln 2 and ln 2; the discriminator is ahead after some steps.
    assert losses['discriminator'] < 2 * np.log(2) and losses['generator'] > np.log(2)
    assert os.path.getsize(picture) > 1000
    out = capsys.readouterr().out
    assert 'discriminator: AdamOptimizer, 6 variables; generator: AdamOptimizer, 6 variables' in out
    assert '2 towers' in out


def test_the_gan_asks_for_its_picture_before_it_trains(tmpdir, capsys, monkeypatch):
    pytest.importorskip('matplotlib')
    with pytest.raises(EnvironmentError, match='missing'):
        gan.main(['--picture=%s' % tmpdir.join('missing', 'gan.png')])
    monkeypatch.setitem(sys.modules, 'matplotlib', None)
    with pytest.raises(SystemExit, match='takes matplotlib: pip install it'):
        gan.main(['--picture=%s' % tmpdir.join('gan.png')])
    assert capsys.readouterr().out == ''


def test_the_gan_draws_nothing_where_it_cannot_and_nobody_asked(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, 'matplotlib', None)
    assert gan.checked_picture(None) == ''
    assert capsys.readouterr().out == (
        'The picture takes matplotlib: pip install it. Training without one.\n')
    with pytest.raises(SystemExit, match='pip install it, or give --picture='):
        gan.checked_picture('mine.png')


@pytest.mark.skipif(compat.has_estimator(), reason='this TensorFlow has an Estimator')
def test_the_example_of_an_estimator_says_what_it_needs():
    from examples import estimator
    with pytest.raises(SystemExit, match='needs tf.estimator, which TensorFlow has up to 2.15'):
        estimator.main([])


@pytest.mark.slow
@pytest.mark.skipif(not compat.has_estimator(), reason='this TensorFlow has no Estimator')
def test_the_example_of_an_estimator_learns(tmpdir, capsys):
    from examples import estimator
    assert estimator.main(['--steps', '40', '--model_dir', str(tmpdir)]) > 0.8
    assert 'after 40 steps' in capsys.readouterr().out
