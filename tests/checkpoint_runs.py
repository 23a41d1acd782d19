"""Small runs that save, for the tests of checkpoints."""

import functools
import os
import pathlib
import tempfile

import pytest
import tensorflow.compat.v1 as tf

from towers.checkpoint.newest import newest_checkpoint
from towers.run.checkpoint_hook import CheckpointHook
from towers.errors import CheckpointError

DATA = '.data-00000-of-00001'


class Recorder(tf.train.CheckpointSaverListener):
    """Writes down what it is called with."""

    def __init__(self, stop_at=None):
        self.calls = []
        self.stop_at = stop_at

    def begin(self):
        self.calls.append('begin')

    def before_save(self, session, step):
        self.calls.append('before %d' % step)

    def after_save(self, session, step):
        # What is in the session is what was saved.
        value, = [variable for variable in tf.global_variables() if variable.op.name == 'value']
        assert session.run(value)[0] == step
        self.calls.append('after %d' % step)
        return step == self.stop_at

    def end(self, session, step):
        self.calls.append('end %d' % step)


def run(directory, steps, save_steps=None, size=10, at_step=None, before=(), restore=True,
        increment=1, **options):
    """A run of its own graph to the step `steps`, which goes on from what is in the directory."""
    with tf.Graph().as_default():
        step = tf.train.get_or_create_global_step()
        value = tf.get_variable('value', [size], tf.float32, tf.zeros_initializer())
        with tf.control_dependencies([tf.assign_add(value, tf.fill([size], float(increment)))]):
            train_op = tf.assign_add(step, increment).op
        newest = newest_checkpoint(directory) if restore else None
        creator = tf.train.ChiefSessionCreator(
            tf.train.Scaffold(), checkpoint_filename_with_path=newest and newest.prefix)
        hook = CheckpointHook(directory, step, save_steps=save_steps, **options)
        with tf.train.MonitoredSession(creator, list(before) + [hook]) as session:
            current = newest.step if newest else 0
            while current < steps and not session.should_stop():
                session.run(train_op)
                current += increment
                if at_step:
                    at_step(current)


def saved_steps(directory):
    return sorted(int(name[len('model.ckpt-'):-len('.index')]) for name in os.listdir(directory)
                  if name.endswith('.index'))


def value_of(prefix):
    return tf.train.NewCheckpointReader(prefix).get_tensor('value')[0]


def error_of_run(directory, *args, **options):
    with pytest.raises(CheckpointError) as caught:
        run(directory, *args, **options)
    assert '\n' not in str(caught.value)
    return str(caught.value)


@functools.lru_cache(maxsize=None)  # many tests begin with the same files
def _saved_files(steps, saver_options):
    """`{name: content}` of a directory of checkpoints of these steps."""
    with tempfile.TemporaryDirectory() as folder, tf.Graph().as_default(), tf.Session() as session:
        step = tf.train.get_or_create_global_step()
        value = tf.get_variable('value', [50], tf.float32)
        tf.get_variable('name/of/another', [3, 7], tf.float64)
        session.run(tf.global_variables_initializer())
        saver = tf.train.Saver(save_relative_paths=True, **dict(saver_options))
        for number in steps:
            session.run([tf.assign(step, number),
                         tf.assign(value, tf.fill([50], float(number)))])
            saver.save(session, os.path.join(folder, 'model.ckpt'), number, write_meta_graph=False)
        return {path.name: path.read_bytes() for path in pathlib.Path(folder).iterdir()}


def save(directory, steps=(100, 200, 300), **saver_options):
    """Puts checkpoints of these steps into a directory, with variables that are as large as the
    step; returns the directory as a string."""
    for name, content in _saved_files(steps, tuple(saver_options.items())).items():
        directory.join(name).write_binary(content)
    return str(directory)


def change(path, position=None, length=None):
    """Turns a bit at `position`, or cuts the file after `length` bytes."""
    with open(path, 'rb') as source:
        content = bytearray(source.read())
    if position is not None:
        content[position] ^= 4
    with open(path, 'wb') as target:
        target.write(bytes(content[:length]))


def newest_error(directory, recover=False):
    """The text, on one line, of the error of `newest_checkpoint`."""
    with pytest.raises(CheckpointError) as caught:
        newest_checkpoint(directory, recover)
    assert '\n' not in str(caught.value)
    return str(caught.value)
