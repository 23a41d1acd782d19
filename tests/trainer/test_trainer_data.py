"""`train.py` and its data: remainders, bad examples, the modes that look at data."""

import csv
import json
import re

import pytest

from image_files import jpeg, write_folder
from train_runs import newest, names_that_differ, values_of

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
def test_bad_images_are_listed_left_out_and_resumed(runner, tmp_path, model_for_three_channels):
    folder = images(tmp_path / 'data', BAD)
    flags = FOLDER + ['--data_dir=' + folder,
                      '--config={"bad_examples": "%s"}' % (tmp_path / 'bad')]
    run = runner.start(tmp_path / 'run', ['--mode=check_data'] + flags[:1] + flags[-2:])
    assert run.status() == 1
    assert 'train          8 images that can be used, 2 bad' in run.stdout
    assert run.stdout.splitlines()[-2:] == ['check          3 bad examples',
                                            'list           %s' % (tmp_path / 'bad')]
    whole = runner.run(tmp_path / 'whole', flags + ['--train_steps=8'],
                       before=model_for_three_channels)
    assert 'left out       3 examples that %s lists\n' % (tmp_path / 'bad') in whole.stdout
    assert re.search(r'test accuracy  [\d.]+ on 3 images', whole.stdout)
    for steps in (3, 8):
        runner.run(tmp_path / 'parts', flags + ['--train_steps=%d' % steps],
                   before=model_for_three_channels)
    assert names_that_differ(values_of(tmp_path / 'whole', 8), values_of(tmp_path / 'parts', 8)
                             ) == []
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
    runner.run(tmp_path / 'run', flags + ['--train_steps=2'], before=model_for_three_channels)
    assert newest(tmp_path / 'run') == 2
    for options in (['--train_steps=3'],
                    ['--mode=diagnose', '--config={"diagnose_seconds": 0.1}']):
        run = runner.start(tmp_path / 'run', flags + options, model_for_three_channels)
        assert run.status() == 1
        assert re.search(r'train.py: \S+train/a/3.jpg is empty. --mode=check_data with bad',
                         run.stderr), run.stderr
        assert 'Traceback' not in run.stderr


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
