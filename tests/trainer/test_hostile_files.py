"""Files in the folder of a run that the run did not write: train.py ends in one line, status 2."""

import json
import os
import shutil

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from image_files import jpeg, write_folder
from train_runs import wait_until

SETTINGS = {'batch_size': 20, 'names of classes': 'a\nb'}


def checkpoint(folder, **values):
    """Writes model.ckpt-2 with these values, of `global_step` 2 and `examples_seen` 40 else."""
    values = dict({'global_step': np.int64(2), 'examples_seen': np.int64(40)}, **values)
    with tf.Graph().as_default(), tf.Session() as session:
        variables = [tf.get_variable(name, initializer=value, trainable=False)
                     for name, value in values.items()]
        session.run(tf.global_variables_initializer())
        tf.train.Saver(variables, save_relative_paths=True).save(
            session, os.path.join(str(folder), 'model.ckpt'), 2, write_meta_graph=False)


@pytest.fixture(scope='module')
def begun(tmp_path_factory):
    """The folder of a run that has come to step 2."""
    folder = tmp_path_factory.mktemp('begun') / 'run'
    folder.mkdir()
    checkpoint(folder)
    (folder / 'settings.json').write_text(json.dumps({'settings': SETTINGS, 'changes': []}))
    (folder / 'metrics.jsonl').write_text('{"step": 2}\n')
    return str(folder)


def instead(name, put):
    """Puts something in the place of the file, which may be there."""
    def make(folder):
        if (folder / name).exists():
            (folder / name).unlink()
        put(folder / name)
    return make


def fifo(name):
    return instead(name, os.mkfifo)


def link(name, target='../precious'):
    return instead(name, lambda path: path.symlink_to(target))


def text(name, content):
    return lambda folder: (folder / name).write_text(content)


def settings(**values):
    return text('settings.json', json.dumps({'settings': dict(SETTINGS, **values), 'changes': []}))


CLASSES = ['--dataset=folder', '--data_dir={}/data', '--model=alexnet_v2']
CASES = [
    (fifo('checkpoint'), [], 'checkpoint is a pipe, and a file belongs there'),
    (link('run.lock'), [], 'run.lock is a symbolic link, and a file belongs there'),
    (link('checkpoint', '/dev/zero'), [], 'checkpoint is a device, and a file belongs there'),
    (lambda folder: checkpoint(folder, global_step=np.int64([1, 2])), [],
     'its global_step is [1, 2], of type int64: expected a whole number from 0 to 2^53'),
    (lambda folder: checkpoint(folder, examples_seen=np.int64(2 ** 63 - 1)), [],
     'its examples_seen is 9223372036854775807'),
    (fifo('settings.json'), ['--batch_size=auto'], 'settings.json is a pipe, and a file belongs'),
    (settings(batch_size={'a': [1]}), ['--batch_size=auto'],
     'settings.json cannot be read (it has other keys, or values of other types'),
    (settings(**{'names of classes': '\x1b[2J'}), CLASSES, r"class 0 is 'a', and was '\x1b[2J'"),
    (fifo('data/labels.txt'), ['--mode=check_data', '--dataset=tfrecords', '--data_dir={}/data'],
     'labels.txt is a pipe')]


@pytest.mark.slow
@pytest.mark.parametrize('make, argv, said', CASES)
def test_a_hostile_file_ends_in_one_line(runner, begun, tmp_path, make, argv, said):
    folder = tmp_path / 'run'
    shutil.copytree(begun, str(folder))
    write_folder(folder, {'data/%s/%s/1.jpg' % (split, name): jpeg(1)
                          for split in ('train', 'test') for name in 'ab'})
    (tmp_path / 'precious').write_text('precious')
    make(folder)
    run = runner.start(folder, [each.replace('{}', str(folder)) for each in argv])
    wait_until(run.has_ended, 60)  # a pipe would be waited for
    lines = run.stderr.splitlines()
    assert (run.status(), len(lines)) == (2, 1), run.stdout + run.stderr
    assert said in lines[0] and lines[0].isprintable()
    assert '\x1b' not in run.stdout
    assert (tmp_path / 'precious').read_text() == 'precious'
