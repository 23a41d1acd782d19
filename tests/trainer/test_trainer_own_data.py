"""`train.py` with a broken data set of the user's own: one line names the set and the fault."""

import signal
import time

import pytest

from train_runs import newest, steps_saved, wait_until

MODULE = '''
import time
import numpy as np
import tensorflow.compat.v1 as tf

def batches(batch_size, **unused):
    return tf.data.Dataset.from_tensors((tf.zeros([batch_size, 8, 8, 1]), tf.ones(
        [batch_size], tf.int64))).repeat()

GOOD = dict(num_classes=3, num_examples=dict(train=20, test=20), train_batches=batches,
            eval_batches=lambda **given: batches(**given).take(2))

def train(change):
    return lambda data_dir: dict(GOOD, train_batches=lambda **given: change(batches(**given)))

def fail(labels):
    raise ValueError('file rotten')

ends = train(lambda dataset: dataset.take(2))
rotten = train(lambda dataset: dataset.map(lambda x, y: (x, tf.reshape(
    tf.py_func(fail, [y], tf.int64), [-1]))))

def raises(data_dir):
    raise KeyError('no such flower')

def no_test_found(data_dir):
    return dict(GOOD, eval_batches=lambda **given: batches(**given).take(3).filter(
        lambda x, y: tf.reduce_sum(y) < 0))

def slow(label):
    time.sleep(.2)
    return label

def endless(data_dir):
    return dict(GOOD, eval_batches=lambda **given: batches(**given).filter(
        lambda x, y: tf.reduce_sum(y) > 0))

def slow_test(data_dir):
    return dict(GOOD, num_examples=dict(train=20, test=10000), eval_batches=lambda **given:
                batches(**given).take(1000).map(lambda x, y: (x, tf.reshape(
                    tf.py_func(slow, [y], tf.int64), [-1]))))
'''
SHORT = ['--train_steps=4', '--batch_size=10', '--summary_steps=0']


@pytest.fixture
def start(runner, tmp_path):
    """Function that starts a run on a data set of the module."""
    (tmp_path / 'own_data.py').write_text(MODULE)
    return lambda function: runner.start(
        tmp_path / 'run', ['--dataset=own_data:' + function] + SHORT,
        'import sys; sys.path.insert(0, %r)' % str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize('function, status, said, saved', [
    ('ends', 1, 'train_batches of own_data:ends ended after 2 of 4 steps: expected batches without '
     'end. Add .repeat()', [0, 2]),
    ('raises', 1, "--dataset=own_data:raises: raises raised KeyError: 'no such flower'", []),
    ('rotten', 1, '--dataset=own_data:rotten: a batch could not be made: ValueError: file rotten',
     [0]),
    ('no_test_found', 2, 'the data set to be evaluated has no batch: expected one at least.', []),
    ('endless', 1, 'eval_batches of own_data:endless gives 30 examples or more, and its '
     'num_examples says 20 for test: correct that, or end the pipeline by .take(20)', [0, 4])])
def test_a_fault_is_one_line_and_what_was_trained_is_saved(start, function, status, said, saved):
    run = start(function)
    assert run.status() == status
    *above, last = run.stderr.strip().split('\n')
    assert last == 'train.py: ' + said
    assert steps_saved(run.train_dir) == saved
    assert ('test accuracy' in run.stdout) == (function == 'ends')
    # What the user's own function raises keeps its traceback.
    if function == 'raises':
        assert above[0] == 'Traceback (most recent call last):' and 'own_data.py' in above[1]
    elif function == 'rotten':
        assert any("raise ValueError('file rotten')" in line for line in above)
    else:
        assert above == []


@pytest.mark.slow
def test_a_signal_during_an_evaluation_gives_it_up_and_the_run_saves(start):
    run = start('slow_test')
    wait_until(lambda: run.has_ended() or 'step 4/4' in run.stdout)
    time.sleep(.5)
    begin = time.time()
    run.send(signal.SIGTERM)
    assert run.status() == 128 + signal.SIGTERM
    assert time.time() - begin < 60  # the evaluation takes 200 s
    assert 'SIGTERM: finishing this step and saving' in run.stderr
    assert newest(run.train_dir) == 4
    assert 'test accuracy' not in run.stdout
