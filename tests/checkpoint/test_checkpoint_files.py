"""Which checkpoint is the newest, by the state file, by name, and when the state file is lost."""

import os
import re
import shutil

import pytest
import tensorflow.compat.v1 as tf

from checkpoint_runs import DATA, change, newest_error, save
from towers.checkpoint.files import damage
from towers.checkpoint.newest import Newest, describe_safe, newest_checkpoint


def test_a_missing_and_an_empty_directory_have_none(tmpdir):
    assert newest_checkpoint(str(tmpdir.join('missing'))) is None
    assert newest_checkpoint(str(tmpdir)) is None
    tmpdir.join('run.lock').write('{}')
    assert newest_checkpoint(str(tmpdir)) is None
    assert not tmpdir.join('missing').exists()
    assert newest_error(str(tmpdir.join('run.lock'))) == (
        '%s is a file: expected a directory of checkpoints.' % tmpdir.join('run.lock'))


@pytest.mark.parametrize('version', [tf.train.SaverDef.V1, tf.train.SaverDef.V2])
def test_the_newest_is_what_the_state_file_names(tmpdir, version):
    directory = save(tmpdir, write_version=version)
    assert newest_checkpoint(directory) == Newest(directory + '/model.ckpt-300', 300, [])
    # As people do to go back.
    state = tmpdir.join('checkpoint').read().splitlines()
    tmpdir.join('checkpoint').write('\n'.join(['model_checkpoint_path: "model.ckpt-100"']
                                              + state[1:]))
    assert newest_checkpoint(directory) == Newest(directory + '/model.ckpt-100', 100, [])


def test_a_lone_checkpoint_needs_no_state_file_and_its_step_may_be_inside(tmpdir):
    # As a process leaves it that was killed in its first save.
    directory = save(tmpdir, steps=(100,))
    os.remove(directory + '/checkpoint')
    assert newest_checkpoint(directory) == Newest(directory + '/model.ckpt-100', 100, [])
    for suffix in ('.index', DATA):
        tmpdir.join('model.ckpt-100' + suffix).rename(tmpdir.join('model.ckpt' + suffix))
    assert newest_checkpoint(directory) == Newest(directory + '/model.ckpt', 100, [])


@pytest.mark.parametrize('content, reason', [
    (None, 'missing, and only it says which of the 3 checkpoints is the newest. '),
    pytest.param(b'', 'damaged, and only it says which checkpoint is the newest. ',
                 marks=pytest.mark.slow),
    (b'model_checkpoint_path: "\xff\xfe', 'damaged, and only it says')])
def test_a_lost_or_damaged_state_file(tmpdir, content, reason):
    directory = save(tmpdir.mkdir(u'a*b? {a,b} [\xe4'))
    if content is None:
        os.remove(directory + '/checkpoint')
    else:
        with open(directory + '/checkpoint', 'wb') as state:
            state.write(content)
    text = newest_error(directory)
    assert text.startswith('%s/checkpoint is %s' % (directory, reason))
    assert '%s/model.ckpt-300 (step 300), which is whole: --recover' % directory in text
    newest = newest_checkpoint(directory, recover=True)
    assert newest.step == 300 and newest.skipped[0].step is None
    change(directory + '/model.ckpt-300' + DATA, 5)
    assert newest_checkpoint(directory, recover=True).step == 200


def test_a_state_file_that_names_what_is_gone(tmpdir):
    directory = save(tmpdir)
    for suffix in ('.index', DATA):
        os.remove(directory + '/model.ckpt-300' + suffix)
    text = newest_error(directory)
    assert text.startswith('%s/checkpoint names model.ckpt-300 as the newest checkpoint, which is '
                           'not there. ' % directory)
    assert newest_checkpoint(directory, recover=True).step == 200
    for step in (100, 200):
        os.remove(directory + '/model.ckpt-%d.index' % step)
    assert 'No other checkpoint there can be used' in newest_error(directory, recover=True)


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
    assert newest_error(str(tmpdir.mkdir(name))) == (
        '%s is a pattern to TensorFlow, for its [ ] or \\: it would write checkpoints there and '
        'not find them again. Give a directory without these in its path.' % tmpdir.join(name))


# ---- Damage of every kind is noticed and named, and what is no damage is not ---------------------

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


@pytest.mark.parametrize('version', [tf.train.SaverDef.V1, tf.train.SaverDef.V2])
def test_types_that_the_reader_does_not_hand_out_are_no_damage(tmpdir, version):
    with tf.Session() as session:
        for dtype in (tf.float16, tf.bool, tf.complex64, tf.uint8, tf.string):
            value = tf.constant(['a']) if dtype == tf.string else tf.cast([1.], dtype)
            session.run(tf.Variable(value, name=dtype.name).initializer)
        prefix = tf.train.Saver(write_version=version).save(session, str(tmpdir.join('m.ckpt')))
    assert damage(prefix) is None
