"""Which checkpoint is the newest, and whether damage of every kind is noticed."""

import os
import shutil

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from towers.checkpoint_files import (Newest, damage, describe_safe, first_line, list_checkpoints,
                                     newest_checkpoint)
from towers.errors import CheckpointError

DATA = '.data-00000-of-00001'
DATA_FOLDER = os.path.join(os.path.dirname(__file__), 'data')


def save(directory, steps=(100, 200, 300), **saver_options):
    """Saves variables that are as large as the step; returns the directory as a string."""
    with tf.Graph().as_default(), tf.Session() as session:
        step = tf.train.get_or_create_global_step()
        value = tf.get_variable('value', [50], tf.float32)
        tf.get_variable('name/of/another', [3, 7], tf.float64)
        session.run(tf.global_variables_initializer())
        saver = tf.train.Saver(save_relative_paths=True, **saver_options)
        for number in steps:
            session.run([tf.assign(step, number),
                         tf.assign(value, tf.fill([50], float(number)))])
            saver.save(session, str(directory.join('model.ckpt')), number, write_meta_graph=False)
    return str(directory)


def error_of(directory, recover=False):
    with pytest.raises(CheckpointError) as caught:
        newest_checkpoint(directory, recover)
    assert '\n' not in str(caught.value)
    return str(caught.value)


def change(path, position=None, length=None):
    """Turns a bit at `position`, or cuts the file after `length` bytes."""
    with open(path, 'rb') as source:
        content = bytearray(source.read())
    if position is not None:
        content[position] ^= 4
    with open(path, 'wb') as target:
        target.write(bytes(content[:length]))


def test_a_missing_and_an_empty_directory_have_none(tmpdir):
    assert newest_checkpoint(str(tmpdir.join('missing'))) is None
    assert newest_checkpoint(str(tmpdir)) is None
    tmpdir.join('run.lock').write('{}')
    assert newest_checkpoint(str(tmpdir)) is None
    assert not tmpdir.join('missing').exists()


def test_a_file_is_no_directory(tmpdir):
    tmpdir.join('file').write('')
    assert error_of(str(tmpdir.join('file'))) == (
        '%s is a file: expected a directory of checkpoints.' % tmpdir.join('file'))


@pytest.mark.parametrize('version', [tf.train.SaverDef.V1, tf.train.SaverDef.V2])
def test_the_newest_is_what_the_state_file_names(tmpdir, version):
    directory = save(tmpdir, write_version=version)
    assert newest_checkpoint(directory) == Newest(directory + '/model.ckpt-300', 300, [])
    # As people do to go back.
    state = tmpdir.join('checkpoint').read().splitlines()
    tmpdir.join('checkpoint').write('\n'.join(['model_checkpoint_path: "model.ckpt-100"']
                                              + state[1:]))
    assert newest_checkpoint(directory) == Newest(directory + '/model.ckpt-100', 100, [])


def test_sharded_checkpoints_are_read_wholly(tmpdir):
    directory = save(tmpdir, sharded=True)
    assert newest_checkpoint(directory).step == 300
    change(directory + '/model.ckpt-300' + DATA, 5)
    assert newest_checkpoint(directory, recover=True).step == 200


def test_steps_are_compared_as_numbers(tmpdir):
    directory = save(tmpdir, steps=(9, 10, 1000))
    assert list_checkpoints(directory) == [directory + '/model.ckpt-%d' % step
                                           for step in (9, 10, 1000)]


def test_a_step_that_is_not_in_the_name_is_read(tmpdir):
    save(tmpdir, steps=(100,))
    for suffix in ('.index', DATA):
        tmpdir.join('model.ckpt-100' + suffix).rename(tmpdir.join('model.ckpt' + suffix))
    tmpdir.join('checkpoint').write('model_checkpoint_path: "model.ckpt"')
    assert newest_checkpoint(str(tmpdir)) == Newest(str(tmpdir.join('model.ckpt')), 100, [])


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
    text = error_of(directory)
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
    assert ': tensor name/of/another: ' in error_of(directory)


def test_a_data_file_that_is_gone(tmpdir):
    directory = save(tmpdir)
    os.remove(directory + '/model.ckpt-300' + DATA)
    text = error_of(directory)
    assert 'model.ckpt-300 is damaged: no data file: tensor global_step: ' in text
    assert 'model.ckpt-200 (step 200)' in text


def test_two_damaged_ones_are_both_named(tmpdir):
    directory = save(tmpdir)
    change(directory + '/model.ckpt-300' + DATA, 5)
    change(directory + '/model.ckpt-200.index', length=70)
    text = error_of(directory)
    assert 'model.ckpt-300 is damaged' in text and 'model.ckpt-200 is damaged' in text
    assert 'model.ckpt-100 (step 100), which is whole' in text
    newest = newest_checkpoint(directory, recover=True)
    assert newest.step == 100 and [skipped.step for skipped in newest.skipped] == [300, 200]


def test_all_damaged_is_an_error_with_recover_too(tmpdir):
    directory = save(tmpdir)
    for step in (100, 200, 300):
        change(directory + '/model.ckpt-%d%s' % (step, DATA), 5)
    text = error_of(directory, recover=True)
    assert text == error_of(directory)
    assert text.count('is damaged') == 3
    assert text.endswith('No other checkpoint there can be used: bring the files back from a copy, '
                         'or start anew in another directory.')
    assert describe_safe(directory).startswith('No checkpoint there is safe: ')


def test_only_older_ones_are_taken_in_place_of_a_damaged_one(tmpdir):
    directory = save(tmpdir)
    tmpdir.join('checkpoint').write('model_checkpoint_path: "model.ckpt-200"')
    change(directory + '/model.ckpt-200' + DATA, 5)
    assert newest_checkpoint(directory, recover=True).step == 100


def test_a_lost_state_file(tmpdir):
    directory = save(tmpdir)
    os.remove(directory + '/checkpoint')
    text = error_of(directory)
    assert text.startswith('%s/checkpoint is missing, and only it says which of the 3 checkpoints '
                           'is the newest. ' % directory)
    assert '%s/model.ckpt-300 (step 300), which is whole: --recover' % directory in text
    newest = newest_checkpoint(directory, recover=True)
    assert newest.step == 300 and newest.skipped[0].step is None


def test_a_lone_checkpoint_needs_no_state_file(tmpdir):
    # As a process leaves it that was killed in its first save.
    directory = save(tmpdir, steps=(100,))
    os.remove(directory + '/checkpoint')
    assert newest_checkpoint(directory) == Newest(directory + '/model.ckpt-100', 100, [])


@pytest.mark.parametrize('folder', ['model.ckpt-100_temp', 'model.ckpt-100_temp_0123456789abcdef'])
def test_a_first_save_whose_shards_are_not_merged_is_none(tmpdir, folder):
    # As a process leaves it that was killed while it wrote the index, which TF does in place.
    directory = save(tmpdir, steps=(100,), sharded=True)
    os.remove(directory + '/checkpoint')
    change(directory + '/model.ckpt-100.index', length=40)
    tmpdir.mkdir(folder)
    assert newest_checkpoint(directory) is None


@pytest.mark.parametrize('content', [b'', b'model_checkpoint_path: "model.ck', b'\x00\x00\x00',
                                     b'model_checkpoint_path: "\xff\xfe"', b'nonsense: 3'])
def test_a_damaged_state_file(tmpdir, content):
    directory = save(tmpdir)
    tmpdir.join('checkpoint').write_binary(content)
    text = error_of(directory)
    assert text.startswith('%s/checkpoint is damaged, and only it says which checkpoint is the '
                           'newest. ' % directory)
    assert 'model.ckpt-300 (step 300), which is whole' in text
    assert newest_checkpoint(directory, recover=True).step == 300


def test_a_state_file_that_names_what_is_gone(tmpdir):
    directory = save(tmpdir)
    for suffix in ('.index', DATA):
        os.remove(directory + '/model.ckpt-300' + suffix)
    text = error_of(directory)
    assert text.startswith('%s/checkpoint names model.ckpt-300 as the newest checkpoint, which is '
                           'not there. ' % directory)
    assert newest_checkpoint(directory, recover=True).step == 200
    for step in (100, 200):
        os.remove(directory + '/model.ckpt-%d.index' % step)
    assert 'No other checkpoint there can be used' in error_of(directory, recover=True)


def test_a_moved_directory_is_read_where_it_is(tmpdir):
    # With absolute paths in the state file, as a Saver has them by default.
    old = tmpdir.mkdir('old')
    save(old)
    state = old.join('checkpoint').read().replace('"model', '"%s/model' % old)
    old.join('checkpoint').write(state)
    assert newest_checkpoint(str(old)).prefix == str(old.join('model.ckpt-300'))
    shutil.copytree(str(old), str(tmpdir.join('new')))
    # The copy's own files, not those it was copied from.
    assert newest_checkpoint(str(tmpdir.join('new'))).prefix == str(
        tmpdir.join('new', 'model.ckpt-300'))


@pytest.mark.parametrize('name', ['run[1]', 'run\\1'])
def test_a_name_that_tf_takes_for_a_pattern_is_refused(tmpdir, name):
    assert error_of(str(tmpdir.mkdir(name))) == (
        '%s is a pattern to TensorFlow, for its [ ] or \\: it would write checkpoints there and '
        'not find them again. Give a directory without these in its path.' % tmpdir.join(name))


@pytest.mark.parametrize('name', ['run [', 'a*b?', 'run 1', '{a,b}', u'\xe4'])
def test_other_names_are_fine(tmpdir, name):
    directory = save(tmpdir.mkdir(name))
    assert newest_checkpoint(directory).step == 300
    assert newest_checkpoint(directory + '/').step == 300
    change(directory + '/model.ckpt-300' + DATA, 5)
    assert newest_checkpoint(directory, recover=True).step == 200


def test_a_relative_directory(tmpdir):
    save(tmpdir.mkdir('run'))
    with tmpdir.as_cwd():
        assert newest_checkpoint('run').prefix == 'run/model.ckpt-300'
    with tmpdir.join('run').as_cwd():
        assert newest_checkpoint('.').prefix == './model.ckpt-300'


def test_other_series_in_the_directory_are_no_substitute(tmpdir):
    directory = save(tmpdir, steps=(100, 200))
    for suffix in ('.index', DATA):
        shutil.copy(directory + '/model.ckpt-100' + suffix, directory + '/best.ckpt-150' + suffix)
    change(directory + '/model.ckpt-200' + DATA, 5)
    assert newest_checkpoint(directory, recover=True).step == 100


@pytest.mark.parametrize('version, suffix', [(tf.train.SaverDef.V2, '.index'),
                                             (tf.train.SaverDef.V2, DATA),
                                             (tf.train.SaverDef.V1, '')])
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
