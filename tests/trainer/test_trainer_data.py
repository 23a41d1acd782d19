"""`train.py` and its data: remainders, bad examples, the modes that look at data."""

import csv
import json
import re

import pytest

from image_files import jpeg, write_folder
from train_runs import newest, steps_saved

FOLDER = ['--dataset=folder', '--model=digits', '--image_size=8', '--batch_size=4', '--log_every=1',
          '--summary_steps=0', '--save_steps=2', '--config={"augment": "crop"}']


def images(folder, bad):
    files = {'train/%s/%d.jpg' % (name, number): jpeg(40 * number, 12, 12)
             for name in 'ab' for number in range(5)}
    files.update({'test/%s/%d.jpg' % (name, number): jpeg(50, 12, 12)
                  for name in 'ab' for number in range(2)})
    for name in bad:
        files[name] = jpeg(70, 40, 40)[:-9]  # few crops come to where its data end
    return write_folder(folder, files)


BAD = ['train/a/1.jpg', 'train/b/3.jpg', 'test/a/0.jpg']


@pytest.fixture(scope='module')
def model_for_three_channels():
    """Code that gives the digits' network three channels, as these images have."""
    return ('from models import registry\n'
            'network = registry.get_network("digits")\n'
            'registry.get_network = lambda name: network._replace(default_channels=3)\n')


@pytest.mark.slow
def test_bad_images_are_listed_and_left_out(runner, tmp_path, model_for_three_channels):
    folder = images(tmp_path / 'data', BAD)
    flags = FOLDER + ['--data_dir=' + folder,
                      '--config={"bad_examples": "%s"}' % (tmp_path / 'bad')]
    run = runner.start(tmp_path / 'run', ['--mode=check_data'] + flags[:1] + flags[-2:])
    assert run.status() == 1
    assert 'train          8 images that can be used, 2 bad' in run.stdout
    assert run.stdout.splitlines()[-2:] == ['check          3 bad examples',
                                            'list           %s' % (tmp_path / 'bad')]
    whole = runner.run(tmp_path / 'whole', flags + ['--train_steps=2'],
                       before=model_for_three_channels)
    assert 'left out       3 examples that %s lists\n' % (tmp_path / 'bad') in whole.stdout
    assert re.search(r'test accuracy  [\d.]+ on 3 images', whole.stdout)
    table = tmp_path / 'rows.csv'
    runner.run(tmp_path / 'whole', FOLDER[:3] + ['--mode=predict', '--predictions=%s' % table]
               + flags[-2:], before=model_for_three_channels)
    # The image that is left out, the first of four, has its number as well.
    assert [row.split(',')[:3:2] for row in table.read_text().splitlines()] == [
        ['image', 'label'], ['1', '0'], ['2', '1'], ['3', '1']]


@pytest.mark.slow
def test_a_bad_training_image_ends_the_run_by_name(runner, tmp_path, model_for_three_channels):
    folder = images(tmp_path / 'data', [])
    write_folder(folder, {'train/a/3.jpg': b''})  # by the default seed at place 9
    flags = FOLDER + ['--data_dir=' + folder]
    run = runner.run(tmp_path / 'run', flags + ['--train_steps=3'], 1, model_for_three_channels)
    assert newest(tmp_path / 'run') == 2
    assert re.match(r'train.py: \S+train/a/3.jpg is empty. --mode=check_data with bad', run.stderr)
    assert run.stderr.count('\n') == 1


@pytest.mark.slow
def test_predictions_of_files_and_of_images_without_labels(runner, tmp_path,
                                                           model_for_three_channels):
    folder = images(tmp_path / 'data', ())
    flags = FOLDER + ['--data_dir=' + folder]
    runner.run(tmp_path / 'run', flags + ['--train_steps=2'], before=model_for_three_channels)
    write_folder(tmp_path / 'new', {'b.jpg': jpeg(40), 'a/c.jpg': jpeg(200)})

    def predicted(config):
        table = str(tmp_path / 'table.csv')
        runner.run(tmp_path / 'run', flags + [
            '--mode=predict', '--predictions=' + table, '--config=' + json.dumps(config)],
                   before=model_for_three_channels)
        with open(table, newline='') as opened:
            return list(csv.DictReader(opened))
    rows = predicted({})
    assert rows and all(row['file'].startswith(folder) and row['label'] for row in rows)
    rows = predicted({'unlabelled': str(tmp_path / 'new'), 'probabilities': True})
    assert [row['file'] for row in rows] == [str(tmp_path / 'new' / name)
                                             for name in ('a/c.jpg', 'b.jpg')]
    for row in rows:
        assert row['class'] == 'ab'[int(row['predicted'])]
        assert 'label' not in row and sum(json.loads(row['probabilities'])) == pytest.approx(
            1, abs=1e-4)


# ---- `train.py` with a broken data set of the user's own: one line names the set and the fault ---

MODULE = '''
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

def endless(data_dir):
    return dict(GOOD, eval_batches=lambda **given: batches(**given).filter(
        lambda x, y: tf.reduce_sum(y) > 0))
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
    ('no_test_found', 1, 'the data set to be evaluated has no batch: expected one at least.', []),
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
