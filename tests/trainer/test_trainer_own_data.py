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

def no_test(data_dir):
    return dict(GOOD, eval_batches=lambda **given: batches(**given).take(0))

def no_test_found(data_dir):
    return dict(GOOD, eval_batches=lambda **given: batches(**given).take(3).filter(
        lambda x, y: tf.reduce_sum(y) < 0))

def few_test(data_dir):
    return dict(GOOD, num_examples=dict(train=20, test=350))

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
def failing(runner, tmp_path):
    (tmp_path / 'own_data.py').write_text(MODULE)

    def run(function, *flags, status=1):
        arguments = ['--dataset=own_data:' + function] + SHORT + list(flags)
        done = runner.run(tmp_path / 'run', arguments, status=status,
                          before='import sys; sys.path.insert(0, %r)' % str(tmp_path))
        return done, done.stderr.strip().split('\n')
    return run


@pytest.mark.slow
def test_training_data_that_end_are_an_error_and_what_was_done_is_saved(failing):
    done, lines = failing('ends')
    assert lines == ['train.py: train_batches of own_data:ends ended after 2 of 4 steps: expected '
                     'batches without end. Add .repeat()']
    assert newest(done.train_dir) == 2
    assert 'checkpoint     %s/model.ckpt-2' % done.train_dir in done.stdout
    _, lines = failing('ends', '--train_steps=5')  # it goes on where it was, and ends again
    assert lines == ['train.py: train_batches of own_data:ends ended after 4 of 5 steps: expected '
                     'batches without end. Add .repeat()']


@pytest.mark.slow
def test_what_the_users_function_raises_keeps_its_traceback(failing):
    _, lines = failing('raises')
    assert lines[0] == 'Traceback (most recent call last):' and 'own_data.py' in lines[1]
    assert lines[-2:] == ["KeyError: 'no such flower'",
                          "train.py: --dataset=own_data:raises: raises "
                          "raised KeyError: 'no such flower'"]
    _, lines = failing('rotten')
    assert any("raise ValueError('file rotten')" in line for line in lines)
    assert lines[-1] == ('train.py: --dataset=own_data:rotten: a batch could not be made: '
                         'ValueError: file rotten')


@pytest.mark.slow
def test_an_empty_test_set_shows_before_the_training(failing):
    _, lines = failing('no_test', status=2)
    assert lines == ['train.py: the data set to be evaluated has no batch: expected one at least.']
    done, lines = failing('no_test_found', status=2)
    assert lines == ['train.py: the data set to be evaluated has no batch: expected one at least.']
    assert steps_saved(done.train_dir) == []


@pytest.mark.slow
def test_a_test_set_without_end_is_an_error_and_what_was_trained_is_saved(failing):
    done, lines = failing('endless')
    assert lines == [
        'train.py: eval_batches of own_data:endless gives 30 examples or more, and its '
        'num_examples says 20 for test: correct that, or end the pipeline by .take(20)']
    assert newest(done.train_dir) == 4
    assert 'test accuracy' not in done.stdout
    done, lines = failing('endless', '--mode=eval')
    assert lines[-1].startswith('train.py: eval_batches of own_data:endless gives 30 examples or')


@pytest.mark.slow
def test_a_signal_during_an_evaluation_gives_it_up_and_the_run_saves(runner, tmp_path):
    (tmp_path / 'own_data.py').write_text(MODULE)
    run = runner.start(tmp_path / 'run', ['--dataset=own_data:slow_test'] + SHORT,
                       'import sys; sys.path.insert(0, %r)' % str(tmp_path))
    wait_until(lambda: run.has_ended() or 'step 4/4' in run.stdout)
    time.sleep(.5)
    begin = time.time()
    run.send(signal.SIGTERM)
    assert run.status() == 128 + signal.SIGTERM
    assert time.time() - begin < 60  # the evaluation takes 200 s
    assert 'SIGTERM: finishing this step and saving' in run.stderr
    assert newest(run.train_dir) == 4
    assert 'test accuracy' not in run.stdout
