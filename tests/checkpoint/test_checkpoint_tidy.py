"""What a killed writer leaves is removed, what is damaged is put aside, nothing else is touched."""

import os

import pytest
import tensorflow.compat.v1 as tf
from checkpoint_runs import DATA, save

from towers.checkpoint.newest import Newest, newest_checkpoint
from towers.checkpoint.tidy import remove_leftovers, tidy_directory
from towers.errors import CheckpointError

HEX = '0123456789abcdef0123456789abcdef'


def names(directory):
    return sorted(os.listdir(directory))


def test_a_directory_in_order_is_left_as_it_is(tmpdir):
    directory = save(tmpdir)
    before = {name: tmpdir.join(name).read_binary() for name in names(directory)}
    assert tidy_directory(directory, newest_checkpoint(directory)) == []
    assert {name: tmpdir.join(name).read_binary() for name in names(directory)} == before
    assert tidy_directory(str(tmpdir.join('missing')), None) == []
    os.remove(directory + '/checkpoint')  # is written anew
    tidy_directory(directory, newest_checkpoint(directory, recover=True))
    assert tmpdir.join('checkpoint').read_binary() == before['checkpoint']


LEFTOVERS = [
    'model.ckpt-400.data-00000-of-00001.tempstate15028121745125191803',
    'model.ckpt-400.index.tempstate64',
    'model.ckpt-400.meta.tmp' + HEX,
    'checkpoint.tmp' + HEX,
    'model.ckpt-100' + DATA,  # its index is deleted already, by keep
    'model.ckpt-400' + DATA,  # its index is not yet written
    'model.ckpt-500.tempstate7',  # V1
]
OTHERS = ['events.out.tfevents.1.host', 'metrics.jsonl', 'run.lock', 'graph.pbtxt', 'notes.tmp',
          'my.data-00000-of-00001', 'export_temp', 'model.ckpt-200.meta.tmp', 'checkpoint.tmp']


def test_data_whose_index_was_lost_otherwise_stays(tmpdir):
    directory = save(tmpdir)
    os.remove(directory + '/model.ckpt-100.index')
    assert remove_leftovers(directory) == []  # the state file has it
    os.remove(directory + '/checkpoint')
    assert remove_leftovers(directory) == []  # it may have had it


def test_leftovers_are_removed_and_nothing_else(tmpdir):
    directory = save(tmpdir, steps=(200, 300))
    for suffix in ('.index', DATA):  # a whole one that the state file does not know
        tmpdir.join('model.ckpt-200' + suffix).copy(tmpdir.join('model.ckpt-50' + suffix))
    kept = names(directory)
    for name in LEFTOVERS + OTHERS:
        tmpdir.join(name).write('x')
    done = tidy_directory(directory, newest_checkpoint(directory))
    assert done == ['removed %s/%s, left by a killed writer' % (directory, name)
                    for name in sorted(LEFTOVERS)]
    assert names(directory) == sorted(kept + OTHERS)
    assert newest_checkpoint(directory).step == 300


def test_damaged_ones_are_put_aside_and_the_state_file_names_the_good_one(tmpdir):
    save(tmpdir)
    for step in (200, 300):
        tmpdir.join('model.ckpt-%d%s' % (step, DATA)).write('x')
    directory = '.'
    with tmpdir.as_cwd():
        newest = newest_checkpoint(directory, recover=True)
        done = tidy_directory(directory, newest)
        assert done == [
            'renamed {0}/model.ckpt-{1}{2} to model.ckpt-{1}{2}.damaged'.format(
                directory, step, suffix)
            for step in (300, 200) for suffix in ('.index', DATA)
        ] + ['wrote %s/checkpoint, which names model.ckpt-100' % directory]
        assert newest_checkpoint(directory) == Newest(directory + '/model.ckpt-100', 100, [])
        assert tidy_directory(directory, newest_checkpoint(directory)) == []
        assert os.path.samefile(tf.train.latest_checkpoint(directory) + '.index',
                                directory + '/model.ckpt-100.index')
    assert tmpdir.join('checkpoint').read() == (
        'model_checkpoint_path: "model.ckpt-100"\nall_model_checkpoint_paths: "model.ckpt-100"\n')
    assert tmpdir.join('model.ckpt-300%s.damaged' % DATA).read() == 'x'


def test_a_directory_that_cannot_be_written_to(tmpdir, monkeypatch):
    directory = save(tmpdir)
    tmpdir.join('checkpoint.tmp' + HEX).write('')

    def refuse(path):
        raise tf.errors.PermissionDeniedError(None, None, '%s; Read-only file system' % path)
    monkeypatch.setattr(tf.io.gfile, 'remove', refuse)
    with pytest.raises(CheckpointError) as caught:
        tidy_directory(directory, newest_checkpoint(directory))
    assert str(caught.value) == (
        '{0} cannot be written to: {0}/checkpoint.tmp{1}; Read-only file system. Safe and whole is '
        '{0}/model.ckpt-300 (step 300).'.format(directory, HEX))
