"""Damage of every kind is noticed and named, and what is no damage is not."""

import os
import re

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from checkpoint_runs import DATA, change, newest_error, save

from towers.checkpoint.files import damage, describe_safe, newest_checkpoint

@pytest.mark.parametrize('suffix, position, length, reason', [
    (DATA, 30, None, 'tensor name/of/another: .*hecksum'),
    (DATA, None, 0, 'Read less bytes than requested'),
    (DATA, None, None, 'no data file: tensor global_step: '),
    ('.index', None, 100, 'bad magic number'),
    ('.index', None, 0, 'too short')])
@pytest.mark.slow
def test_damage_of_the_newest_is_named_and_the_one_before_used_only_when_told(
        tmpdir, suffix, position, length, reason):
    directory = save(tmpdir)
    if position is None and length is None:
        os.remove(directory + '/model.ckpt-300' + suffix)
    else:
        change(directory + '/model.ckpt-300' + suffix, position, length)
    text = newest_error(directory)
    assert re.match('%s/model.ckpt-300 is damaged: .*%s' % (directory, reason), text)
    assert text.endswith(
        'The one to go on from is %s/model.ckpt-200 (step 200), which is whole: --recover '
        '(recover=True) does so. Or bring the files back from a copy.' % directory)
    newest = newest_checkpoint(directory, recover=True)
    assert newest[:2] == (directory + '/model.ckpt-200', 200)
    assert [(skipped.prefix, skipped.step) for skipped in newest.skipped] == [
        (directory + '/model.ckpt-300', 300)]
    assert str(newest.skipped[0]) in text
    assert describe_safe(directory) == (
        'Safe and whole is %s/model.ckpt-200 (step 200).' % directory)


def test_all_damaged_is_an_error_with_recover_too(tmpdir):
    directory = save(tmpdir)
    for step in (100, 200, 300):
        change(directory + '/model.ckpt-%d%s' % (step, DATA), 5)
    text = newest_error(directory, recover=True)
    assert text == newest_error(directory)
    assert text.count('is damaged') == 3
    assert text.endswith('No other checkpoint there can be used: bring the files back from a copy, '
                         'or start anew in another directory.')
    assert describe_safe(directory).startswith('No checkpoint there is safe: ')


def test_only_older_ones_of_the_series_are_taken_in_place_of_a_damaged_one(tmpdir):
    directory = save(tmpdir)
    for suffix in ('.index', DATA):
        tmpdir.join('model.ckpt-100' + suffix).copy(tmpdir.join('best.ckpt-150' + suffix))
    tmpdir.join('checkpoint').write('model_checkpoint_path: "model.ckpt-200"')
    change(directory + '/model.ckpt-200' + DATA, 5)
    assert newest_checkpoint(directory, recover=True).step == 100


@pytest.mark.parametrize('version, suffix', [
    (tf.train.SaverDef.V2, '.index'),
    pytest.param(tf.train.SaverDef.V2, DATA, marks=pytest.mark.slow),
    pytest.param(tf.train.SaverDef.V1, '', marks=pytest.mark.slow)])
def test_any_one_byte_that_matters_is_noticed(tmpdir, version, suffix):
    prefix = save(tmpdir, steps=(1,), write_version=version) + '/model.ckpt-1'
    path = prefix + suffix
    with open(path, 'rb') as source:
        original = source.read()
    intact = _tensors(prefix)
    noticed = 0
    # Every byte; for the large ones, of the blocks that end the file, and a sample.
    positions = sorted(set(range(0, len(original), max(1, len(original) // 60)))
                       | set(range(max(0, len(original) - 20), len(original))))
    for position in positions:
        change(path, position)
        if damage(prefix) is None:
            # Padding, which nobody reads.
            assert _tensors(prefix) == intact
        else:
            noticed += 1
        with open(path, 'wb') as target:
            target.write(original)
    assert noticed == len(positions) if suffix == DATA else noticed > len(positions) // 2
    for length in positions:
        change(path, length=length)
        assert damage(prefix), length
        with open(path, 'wb') as target:
            target.write(original)
    assert damage(prefix) is None


def _tensors(prefix):
    reader = tf.train.NewCheckpointReader(prefix)
    return {name: np.asarray(reader.get_tensor(name)).tobytes()
            for name in reader.get_variable_to_shape_map()}


@pytest.mark.parametrize('version', [tf.train.SaverDef.V1, tf.train.SaverDef.V2])
def test_types_that_the_reader_does_not_hand_out_are_no_damage(tmpdir, version):
    with tf.Session() as session:
        for dtype in (tf.float16, tf.bool, tf.complex64, tf.uint8, tf.string):
            value = tf.constant(['a']) if dtype == tf.string else tf.cast([1.], dtype)
            session.run(tf.Variable(value, name=dtype.name).initializer)
        prefix = tf.train.Saver(write_version=version).save(session, str(tmpdir.join('m.ckpt')))
    assert damage(prefix) is None
