"""Names of files that are no UTF-8, or have line breaks: named on a line, left out, resumed."""

import os

import pytest

import datasets
from towers.errors import shown
from image_files import batches, jpeg, write_folder

NAME = b'm\xfc\nller.jpg'.decode('utf-8', 'surrogateescape')
SHOWN = r'm\xfc\nller.jpg'


@pytest.mark.parametrize('name, text', [
    ('plain name.jpg', 'plain name.jpg'),
    ('m\xfcller \u4e2d\u3000.jpg', 'm\xfcller \u4e2d\u3000.jpg'),
    ('m\udcfcller', r'm\xfcller'), ('a\nb\tc\x7f', r'a\nb\tc\x7f'), ('\ud800', r'\ud800'),
    ('\u2028', r'\u2028'), (r'a\xfc', r'a\xfc')])
def test_what_is_escaped(name, text):
    assert shown(name) == text
    assert str(datasets.BadExampleError(name)) == text


@pytest.fixture
def folder(tmp_path):
    found = write_folder(tmp_path, {'%s/a/%d.jpg' % (split, number): jpeg(number)
                                    for split in ('train', 'test') for number in range(3)})
    # Links to nothing: the reader fails, and the error has the name.
    for split in ('train', 'test'):
        os.symlink('nowhere', os.path.join(found, split, 'a', NAME))
    return found


@pytest.mark.slow
def test_it_is_left_out_listed_and_resumed(folder, tmp_path):
    found = datasets.get_dataset('folder', folder, skip_bad=2)
    probe = found.stream_probe(1, 4, 8)
    assert found.skipped.resume(str(tmp_path / 'run'), 0, probe.look_again) == []
    assert found.find_bad('test', range(4)) == probe.find_bad(0, 4) == 1
    assert batches(found.eval_batches(batch_size=4, image_size=8), 1)[0][0].shape[0] == 3
    text = 'Cannot read %s: No such file or directory.'
    assert found.skipped.describe() == '\n'.join(
        ['skipped        2 bad examples'] + [
            '  ' + text % os.path.join(folder, split, 'a', SHOWN) for split in ('test', 'train')])
    again = datasets.get_dataset('folder', folder, skip_bad=2)
    look_again = again.stream_probe(1, 4, 8).look_again
    assert again.skipped.resume(str(tmp_path / 'run'), 4, look_again) == []
    assert again.skipped.examples == found.skipped.examples[1:]  # the test set is looked at anew
    assert again.find_bad('test', range(4)) == 1


def test_check_data_says_it_on_a_line(folder):
    for place in ('train', 'train/a'):  # beside the classes, and no image
        write_folder(folder, {'%s/%s' % (place, NAME if place == 'train' else NAME + '.txt'): b''})
    os.mkdir(os.path.join(folder, 'train', 'empty' + NAME))
    write_folder(folder, {'test/a/%s.png' % NAME: b'a'})
    said = []
    assert datasets.check_data(datasets.get_dataset('folder', folder, skip_bad=9), said.append) == 4
    for line in said:
        line.encode('utf-8')
        assert '\n' not in line
    assert sum(SHOWN in line for line in said) == 8, said
