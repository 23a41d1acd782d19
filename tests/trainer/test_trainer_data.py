"""`train.py` and its data: remainders, bad examples, the modes that look at data."""

import csv
import json
import os
import re
import shutil
import types

from absl.testing import flagsaver
import pytest
import tensorflow.compat.v1 as tf

import datasets
from datasets.bad_examples import Bad, Skipped
from datasets.pipeline import epoch_order
from image_files import jpeg, write_folder
from models import registry
from train_runs import newest, names_that_differ, values_of
import towers
from trainer.bad_examples import leave_out_first_bad, trying
from trainer.data import unknown_failure
from trainer.flags import FLAGS

FOLDER = ['--dataset=folder', '--model=digits', '--image_size=8', '--batch_size=4', '--log_every=1',
          '--summary_steps=0', '--save_steps=2', '--config={"augment": "crop"}']


@pytest.fixture
def parsed():
    with flagsaver.flagsaver():
        FLAGS(['train.py', '--seed=5'])
        yield


OF_INPUT = tf.errors.InvalidArgumentError(None, None, 'rotten\n\t [[IteratorGetNext]]')


class Rotten:
    """A data set whose examples 3 and 7 are bad."""

    num_examples = {'train': 10}

    def __init__(self, most):
        self.skipped, self.looked_at = Skipped(most), []

    def find_bad(self, split, numbers):
        numbers = list(numbers)
        self.looked_at.append(numbers)
        bad = [number for number in numbers
               if number in (3, 7) and number not in self.skipped.numbers('train')]
        for number in bad:
            self.skipped.add(Bad(split, number, -1, 'example %d is rotten' % number))
        return len(bad)


def test_where_bad_examples_are_looked_for(parsed):
    """In the order of the first epoch, in twice as many as before each time."""
    with tf.Session() as session:
        order = session.run(epoch_order(10, 5)(tf.constant(0, tf.int64))).tolist()
    dataset = Rotten(0)
    dataset.find_bad = lambda split, numbers: dataset.looked_at.append(list(numbers))
    assert not leave_out_first_bad(dataset, 1, OF_INPUT)
    assert dataset.looked_at == [order[:2], order[2:6], order[6:]]
    other = tf.errors.InvalidArgumentError(None, None, 'of the model\n\t [[{{node a}}]]')
    assert not leave_out_first_bad(dataset, 1, other) and len(dataset.looked_at) == 3
    # Nothing bad is found: a line all the same, of the input alone.
    assert str(unknown_failure(OF_INPUT)) == (
        'a batch of --dataset=digits could not be made: rotten. Looked at one by one, its examples '
        'are good: was a file out of reach for a while, or replaced? Start the same command again; '
        '--mode=check_data reads them all.')
    assert unknown_failure(other) is None


def test_a_trial_begins_anew_without_what_is_bad(parsed, capsys):
    def trial(say):
        for number in range(4):
            say('line %d' % number)
            if number == 2 and len(dataset.skipped.examples) < 2:
                raise OF_INPUT
        return 'found'
    dataset = Rotten(1)
    assert trying(dataset, 1, trial) == 'found' and dataset.skipped.examples == []
    assert capsys.readouterr().out == 'line 0\nline 1\nline 2\nline 3\n'
    with pytest.raises(datasets.BadExampleError, match='skip_bad=1 allows no more'):
        trying(dataset, 5, trial, keep=True)
    dataset = Rotten(2)
    trying(dataset, 1, trial, keep=True)
    assert dataset.skipped.numbers('train') == {3, 7}
    dataset = Rotten(0)
    with pytest.raises(datasets.BadExampleError, match='is rotten. --skip_bad=10'):
        trying(dataset, 1, trial)


def test_a_trial_that_fails_for_another_reason(parsed):
    def fail(error):
        def trial(say):
            raise error
        return trial
    for error in (tf.errors.InvalidArgumentError(None, None, 'of the model'),
                  towers.MeasurementError('not counted'), KeyError('w')):
        with pytest.raises(type(error)) as caught:
            trying(Rotten(9), 1, fail(error))
        assert caught.value is error
    ended = towers.MeasurementError('the input ended')
    ended.__cause__ = tf.errors.OutOfRangeError(None, None, 'End\n\t [[IteratorGetNext]]')
    with flagsaver.flagsaver(dataset='own:data'):
        for error, text in ((OF_INPUT, 'own:data: a batch could not be made: rotten'),
                            (ended, 'train_batches of own:data ended')):
            with pytest.raises(datasets.OwnDataError, match=text):
                trying(types.SimpleNamespace(), 1, fail(error))


@pytest.mark.slow
@pytest.mark.parametrize('remainder, steps, examples', [('drop', 14, 1400), ('weight', 15, 1437)])
def test_an_epoch_with_each_remainder(runner, tmp_path, remainder, steps, examples):
    # 1,437 images: an epoch is 14, or 14.37, or 15 batches of 100.
    done = runner.run(tmp_path / 'run', ['--batch_size=100', '--train_epochs=1', '--log_every=50',
                                         '--summary_steps=0',
                                         '--config={"remainder": "%s"}' % remainder])
    values = values_of(done.train_dir, steps)
    assert (values['global_step'], values['examples_seen']) == (steps, examples)


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
def test_bad_images_are_left_out_listed_and_resumed(runner, tmp_path, model_for_three_channels):
    folder = images(tmp_path / 'data', BAD)
    flags = FOLDER + ['--data_dir=' + folder, '--config={"skip_bad": 3}']
    whole = runner.run(tmp_path / 'whole', flags + ['--train_steps=8'],
                       before=model_for_three_channels)
    assert 'skipped        3 bad examples\n' in whole.stdout
    assert all(name in whole.stdout for name in BAD)
    assert re.search(r'test accuracy  [\d.]+ on 3 images', whole.stdout)
    for steps in (3, 8):
        runner.run(tmp_path / 'parts', flags + ['--train_steps=%d' % steps],
                   before=model_for_three_channels)
    assert names_that_differ(values_of(tmp_path / 'whole', 8), values_of(tmp_path / 'parts', 8)
                             ) == []
    assert listed(tmp_path / 'whole') == listed(tmp_path / 'parts')
    table = tmp_path / 'rows.csv'
    run = runner.run(tmp_path / 'whole', FOLDER[:3] + [
        '--mode=predict', '--predictions=%s' % table, '--data_dir=' + folder,
        '--config={"skip_bad": 3}'],
                     before=model_for_three_channels)
    assert 'skipped        1 bad example\n' in run.stdout and BAD[2] in run.stdout
    # The one that is left out, the first of four, has its number as well.
    assert [row.split(',')[:2] for row in table.read_text().splitlines()] == [
        ['image', 'label'], ['1', '0'], ['2', '1'], ['3', '1']]
    run = runner.start(tmp_path / 'few', FOLDER + ['--data_dir=' + folder, '--train_steps=6',
                                                   '--config={"skip_bad": 1}'],
                       model_for_three_channels)
    assert run.status() == 1 and 'skip_bad=1 of --config allows no more' in run.stderr


def listed(train_dir):
    with open(os.path.join(str(train_dir), 'skipped_examples.jsonl')) as lines:
        return [tuple(json.loads(line)[name] for name in ('split', 'number', 'position'))
                for line in lines]


@pytest.mark.slow
def test_what_is_bad_after_the_end_of_a_run_does_not_end_it(runner, tmp_path,
                                                            model_for_three_channels):
    folder = images(tmp_path / 'data', [])
    write_folder(folder, {'train/a/3.jpg': b''})  # by the default seed at place 9
    flags = FOLDER + ['--data_dir=' + folder]
    runner.run(tmp_path / 'run', flags + ['--train_steps=2'], before=model_for_three_channels)
    assert newest(tmp_path / 'run') == 2
    run = runner.start(tmp_path / 'run', flags + ['--train_steps=3'], model_for_three_channels)
    assert run.status() == 1
    assert re.match(r'train.py: \S+train/a/3.jpg is empty. skip_bad=10 of --config would', run.stderr)


@pytest.mark.slow
def test_a_run_that_resumes_looks_at_what_it_left_out_again(runner, tmp_path,
                                                            model_for_three_channels):
    folder = images(tmp_path / 'data', BAD[:2])
    flags = FOLDER + ['--data_dir=' + folder]
    runner.run(tmp_path / 'run', flags + ['--train_steps=4', '--config={"skip_bad": 3}'],
               before=model_for_three_channels)
    left_out = listed(tmp_path / 'run')
    assert len(left_out) == 2
    run = runner.start(tmp_path / 'run', flags + ['--train_steps=8'], model_for_three_channels)
    assert run.status() == 1
    assert re.match(r'train.py: \S+train/(a/1|b/3).jpg is a damaged JPEG: .*The run in \S+ left it '
                    'out, and may leave out none now: give skip_bad of --config again', run.stderr)
    assert listed(tmp_path / 'run') == left_out
    images(tmp_path / 'data', [])  # mends them
    shutil.copytree(str(tmp_path / 'run'), str(tmp_path / 'new'))
    (tmp_path / 'new' / 'skipped_examples.jsonl').unlink()
    again = runner.run(tmp_path / 'run', flags + ['--train_steps=8'],
                       before=model_for_three_channels)
    assert re.search(r'used again     2 examples that the run left out before: .*\n'
                     r'  \S+jpg is good now\n  \S+jpg is good now\n', again.stdout)
    assert 'skipped  ' not in again.stdout and listed(tmp_path / 'run') == []
    runner.run(tmp_path / 'new', flags + ['--train_steps=8'], before=model_for_three_channels)
    assert names_that_differ(values_of(tmp_path / 'run', 8), values_of(tmp_path / 'new', 8)) == []


@pytest.mark.slow
def test_a_test_set_without_a_good_image_is_said_before_the_run(runner, tmp_path,
                                                                model_for_three_channels):
    folder = images(tmp_path / 'data', ['test/%s/%d.jpg' % (name, number)
                                        for name in 'ab' for number in (0, 1)])
    run = runner.start(tmp_path / 'run', FOLDER + ['--data_dir=' + folder, '--train_steps=2',
                                                   '--config={"skip_bad": 9}'],
                       model_for_three_channels)
    assert run.status() == 1
    assert re.match(r'train.py: All 4 images of the test set are bad; the first: '
                    r'\S+test/a/0.jpg is a damaged JPEG: ', run.stderr)
    assert 'step 1/2' not in run.stdout


@pytest.mark.slow
def test_a_bad_test_image_is_named_when_what_was_trained_is_saved(runner, tmp_path,
                                                                  model_for_three_channels):
    folder = images(tmp_path / 'data', ['test/a/0.jpg'])
    run = runner.start(tmp_path / 'run', FOLDER + ['--data_dir=' + folder, '--train_steps=3'],
                       model_for_three_channels)
    assert run.status() == 1
    assert re.search(r'train.py: \S+test/a/0.jpg is a damaged JPEG', run.stderr)
    assert newest(tmp_path / 'run') == 3


def test_check_data(runner, tmp_path):
    folder = images(tmp_path / 'data', BAD)
    run = runner.start(tmp_path / 'run', ['--mode=check_data', '--dataset=folder',
                                          '--data_dir=' + folder])
    assert run.status() == 1
    assert 'train          8 images that can be used, 2 bad' in run.stdout
    assert run.stdout.splitlines()[-1] == 'check          3 bad examples'


@pytest.mark.slow
def test_a_bad_image_whose_name_is_no_utf8(runner, tmp_path, model_for_three_channels):
    folder = images(tmp_path / 'data', [])
    os.rename(os.path.join(folder, 'train/b/3.jpg'), os.path.join(folder, 'train/b/m\udcfc.jpg'))
    with open(os.path.join(folder, 'train/b/m\udcfc.jpg'), 'wb') as image:
        image.write(b'')
    flags = FOLDER + ['--data_dir=' + folder, '--config={"skip_bad": 1}']
    for steps in (4, 6):
        done = runner.run(tmp_path / 'run', flags + ['--train_steps=%d' % steps],
                          before=model_for_three_channels)
        assert re.search(r'skipped        1 bad example\n  \S+/train/b/m\\xfc.jpg is empty\n',
                         done.stdout), done.stdout


@pytest.mark.slow
def test_diagnose_names_a_bad_image_or_leaves_it_out(runner, tmp_path, model_for_three_channels):
    folder = images(tmp_path / 'data', ['train/b/3.jpg'])
    flags = FOLDER + ['--data_dir=' + folder, '--mode=diagnose',
                      '--config={"diagnose_seconds": 0.1}']
    run = runner.start(tmp_path / 'run', flags, model_for_three_channels)
    assert run.status() == 1, run.stderr
    assert re.search(r'train.py: \S+data/train/b/3.jpg is a damaged JPEG: .*skip_bad=10 of',
                     run.stderr), run.stderr
    assert 'Traceback' not in run.stderr
    done = runner.run(tmp_path / 'run', flags + ['--config={"skip_bad": 1}'],
                      before=model_for_three_channels)
    assert re.search(r'measuring      6 times 0.1 s, .*\n(.*\n)*together ', done.stdout)
    assert re.search(r'skipped        1 bad example\n  \S+train/b/3.jpg', done.stdout)


@pytest.mark.slow
def test_steps_before_the_run_name_a_bad_image_or_leave_it_out(runner, tmp_path,
                                                              model_for_three_channels):
    folder = images(tmp_path / 'data', BAD[:1])
    write_folder(folder, {BAD[0]: b''})
    flags = FOLDER + ['--data_dir=' + folder, '--train_steps=3']
    run = runner.start(tmp_path / 'run', flags, model_for_three_channels)
    assert run.status() == 1, run.stderr
    assert re.search(r'train.py: \S+data/train/a/1.jpg is empty. skip_bad=10 of', run.stderr)
    assert 'Traceback' not in run.stderr
    done = runner.run(tmp_path / 'run', flags + ['--config={"skip_bad": 1}'],
                      before=model_for_three_channels)
    assert re.search(r'skipped        1 bad example\n  \S+train/a/1.jpg', done.stdout)


@pytest.mark.slow
def test_synthetic_images(runner, tmp_path):
    run = runner.run(tmp_path / 'run', ['--dataset=synthetic', '--image_size=8',
                                        '--config={"num_classes": 10}',
                                        '--batch_size=8', '--train_steps=3', '--summary_steps=0'])
    assert 'test accuracy' in run.stdout


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
        assert 'label' not in row and sum(json.loads(row['probabilities'])) == pytest.approx(
            1, abs=1e-4)
