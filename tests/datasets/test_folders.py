"""Folders that may not be looked into: one line, or left out."""

import os
import shutil
import tempfile

import pytest

import datasets
from image_files import jpeg, write_folder, write_records


@pytest.fixture
def closed():
    """A function that closes paths below a folder to this process; and that folder."""
    user, folder = os.geteuid(), tempfile.mkdtemp()
    os.chmod(folder, 0o755)
    closed = []

    def close(*paths):
        closed.extend(paths)
        for path in paths:
            os.chmod(os.path.join(folder, path), 0)
        if user == 0:
            os.seteuid(65534)  # nobody: the administrator may read them all the same
    yield close, folder
    os.seteuid(user)
    for path in closed:
        os.chmod(os.path.join(folder, path), 0o755)
    shutil.rmtree(folder)


IMAGES = {'%s/%s/1.jpg' % (split, name): jpeg() for split in ('train', 'test') for name in 'ab'}


@pytest.mark.parametrize('kind, path', [
    ('folder', ''), ('folder', 'train'), ('folder', 'test'), ('tfrecords', '')])
def test_a_folder_that_may_not_be_read_is_named(closed, kind, path):
    close, folder = closed
    write_folder(folder, IMAGES)
    write_records(os.path.join(folder, 'train-00000-of-00001'), [(jpeg(), 0)])
    write_records(os.path.join(folder, 'test-00000-of-00001'), [(jpeg(), 0)])
    close(path)
    with pytest.raises(datasets.DatasetError) as caught:
        datasets.get_dataset(kind, folder, 3 * (kind == 'tfrecords'), skip_bad=9)
    assert str(caught.value) == 'Cannot read the folder %s: Permission denied.' % (
        os.path.join(folder, path).rstrip(os.sep))


def test_a_class_folder_that_may_not_be_read_is_left_out_as_an_empty_one_is(closed):
    close, folder = closed
    write_folder(folder, IMAGES)
    close('train/b')
    text = 'Cannot read the folder %s/train/b: Permission denied.' % folder
    with pytest.raises(datasets.BadExampleError) as caught:
        datasets.get_dataset('folder', folder)
    assert str(caught.value).startswith(text + ' --skip_bad=10 would leave out')
    found = datasets.get_dataset('folder', folder, skip_bad=1)
    assert found.num_examples == {'train': 1, 'test': 2} and found.num_classes == 2
    assert found.skipped.describe() == (
        'skipped        1 class folder that cannot be read\n  ' + text)
    said = []
    assert datasets.check_data(found, said.append) == 1
    assert '  bad          ' + text in said
