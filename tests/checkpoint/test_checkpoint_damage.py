"""Damage of every kind is noticed and named, and what is no damage is not."""

import os
import shutil

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from checkpoint_runs import DATA, change, newest_error, save

from towers.checkpoint.files import damage, describe_safe, first_line, newest_checkpoint

DATA_FOLDER = os.path.join(os.path.dirname(os.path.dirname(__file__)), 'data')


@pytest.mark.parametrize('suffix, position, length, reason', [
    (DATA, 5, None, 'hecksum'),
    (DATA, None, 50, 'Read less bytes than requested'),
    (DATA, None, 0, 'Read less bytes than requested'),
    ('.index', 20, None, 'hecksum'),
    ('.index', None, 100, 'bad magic number'),
    ('.index', None, 0, 'too short')])
def test_damage_of_the_newest_is_named_and_the_one_before_used_only_when_told(
        tmpdir, suffix, position, length, reason):
    directory = save(tmpdir)
    change(directory + '/model.ckpt-300' + suffix, position, length)
    text = newest_error(directory)
    assert text.startswith('%s/model.ckpt-300 is damaged: model.ckpt-300%s: ' % (directory, suffix))
    assert reason in text
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


def test_the_tensor_that_cannot_be_read_is_named(tmpdir):
    directory = save(tmpdir)
    change(directory + '/model.ckpt-300' + DATA, 30)
    assert ': tensor name/of/another: ' in newest_error(directory)


def test_a_data_file_that_is_gone(tmpdir):
    directory = save(tmpdir)
    os.remove(directory + '/model.ckpt-300' + DATA)
    text = newest_error(directory)
    assert 'model.ckpt-300 is damaged: no data file: tensor global_step: ' in text
    assert 'model.ckpt-200 (step 200)' in text


def test_two_damaged_ones_are_both_named(tmpdir):
    directory = save(tmpdir)
    change(directory + '/model.ckpt-300' + DATA, 5)
    change(directory + '/model.ckpt-200.index', length=70)
    text = newest_error(directory)
    assert 'model.ckpt-300 is damaged' in text and 'model.ckpt-200 is damaged' in text
    assert 'model.ckpt-100 (step 100), which is whole' in text
    newest = newest_checkpoint(directory, recover=True)
    assert newest.step == 100 and [skipped.step for skipped in newest.skipped] == [300, 200]


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


def test_only_older_ones_are_taken_in_place_of_a_damaged_one(tmpdir):
    directory = save(tmpdir)
    tmpdir.join('checkpoint').write('model_checkpoint_path: "model.ckpt-200"')
    change(directory + '/model.ckpt-200' + DATA, 5)
    assert newest_checkpoint(directory, recover=True).step == 100


def test_other_series_in_the_directory_are_no_substitute(tmpdir):
    directory = save(tmpdir, steps=(100, 200))
    for suffix in ('.index', DATA):
        shutil.copy(directory + '/model.ckpt-100' + suffix, directory + '/best.ckpt-150' + suffix)
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
    positions = sorted(set(range(0, len(original), max(1, len(original) // 150)))
                       | set(range(max(0, len(original) - 60), len(original))))
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


@pytest.mark.parametrize('folder', ['ckpt_tf1.15', 'ckpt_tf2.21'])
@pytest.mark.parametrize('name', ['reference.ckpt', 'resource.ckpt', 'v1.ckpt'])
def test_checkpoints_of_both_versions_are_read(folder, name):
    prefix = os.path.join(DATA_FOLDER, folder, name)
    assert damage(prefix) is None
    values = tf.train.NewCheckpointReader(prefix).get_tensor('net/logits/biases')
    np.testing.assert_array_equal(values, [4.5, 5.5, 6.5])


def test_first_line_has_the_reason():
    assert first_line(ValueError('a reason.\nmore')) == 'a reason'
    assert first_line(ValueError()) == 'ValueError()'
    assert first_line(ValueError(
        "Graph execution error:\n\nDetected at node 'save/SaveV2' defined at (most recent call "
        "last):\n  File \"a.py\", line 3\nNode: 'save/SaveV2'\nm.ckpt; No space left on device\n"
        '\t [[{{node save/SaveV2}}]]')) == 'm.ckpt; No space left on device'
