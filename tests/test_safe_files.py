"""towers.safe_files: written whole or not at all, regular files alone, what they say as data."""

import os

import pytest

from towers.errors import BadFileError, InvalidArgumentError, LogFileError
from towers.safe_files import (SCALAR, folder_written_whole, parsed, read_data, read_json, regular,
                               written_whole)


def names(folder):
    return sorted(os.listdir(str(folder)))


def test_it_takes_the_place_of_the_file_at_the_end(tmp_path):
    path = tmp_path / 'table'
    path.write_text('before')
    (tmp_path / 'table.new').write_text('mine')
    with written_whole(str(path)) as opened:
        opened.write('after')
        opened.flush()
        assert path.read_text() == 'before'
    assert path.read_text() == 'after' and names(tmp_path) == ['table', 'table.new']
    (tmp_path / 'other').write_text('')
    assert path.stat().st_mode == (tmp_path / 'other').stat().st_mode  # as the umask says


@pytest.mark.parametrize('error, raised, text', [
    (FloatingPointError('x'), FloatingPointError, 'x'),
    (KeyboardInterrupt('x'), KeyboardInterrupt, 'x'),
    (InvalidArgumentError('x'), InvalidArgumentError, 'x'),
    (OSError(28, 'No space left on device'), LogFileError,
     '{} cannot be written: No space left on device. Give another.')])
def test_an_error_leaves_what_was_there(tmp_path, error, raised, text):
    path, folder = tmp_path / 'table', tmp_path / '60'
    path.write_text('before')
    with pytest.raises(raised) as caught:
        with written_whole(str(path), advice='Give another.') as opened:
            opened.write('half')
            raise error
    assert str(caught.value) == text.format(path)
    with pytest.raises(type(error)), folder_written_whole(str(folder)) as unfinished:
        os.mkdir(unfinished)
        raise error
    assert path.read_text() == 'before' and names(tmp_path) == ['table']


def link(path):
    (path.parent / 'target').write_text('precious')
    path.symlink_to(path.parent / 'target')


HOSTILE = [(link, 'a symbolic link'), (lambda path: path.symlink_to('/dev/null'),
                                       'a symbolic link'),
           (lambda path: path.symlink_to(path), 'a symbolic link'),
           (lambda path: os.mkfifo(str(path)), 'a pipe'), (lambda path: path.mkdir(), 'a folder')]


@pytest.mark.parametrize('make, kind', HOSTILE)
def test_what_is_no_regular_file_is_not_written_to(tmp_path, make, kind):
    path = tmp_path / 'table'
    make(path)
    before = names(tmp_path)
    said = r'^%s is %s, and a file belongs there: move it away, or give another path\.$' % (
        path, kind)
    with pytest.raises(BadFileError, match=said), written_whole(str(path)):
        pytest.fail('opened')
    with pytest.raises(BadFileError, match=said):
        open(str(path), 'ab', opener=regular)
    assert names(tmp_path) == before
    if make is link:
        assert read_data(str(path)) == b'precious'  # reading does no harm
    elif kind != 'a symbolic link':
        with pytest.raises(BadFileError, match=said):
            read_data(str(path))


def test_a_device_is_no_file():
    with pytest.raises(BadFileError, match='^/dev/null is a device, '), written_whole('/dev/null'):
        pass
    with pytest.raises(BadFileError, match='^/dev/zero is a device, '):
        read_data('/dev/zero')


FORM = {'step': int, 'of': [{str: SCALAR}]}


@pytest.mark.parametrize('data, why', [
    (b'{"step": 3, "of": [{"a": null, "b": 1.5}, {}]}', None),
    (b'{"step": true, "of": []}', 'it has other keys'), (b'{"of": []}', 'it has other keys'),
    (b'{"step": 3, "of": [], "more": 1}', 'it has other keys'),
    (b'{"step": 3, "of": [{"a": [1]}]}', 'it has other keys'), (b'[]', 'it has other keys'),
    (b'{"step": NaN, "of": []}', 'NaN is no number of JSON'),
    (b'[' * 10 ** 5, 'it is nested too deeply'), (b'{"st', 'Unterminated string'),
    (b'\xff\x00', "'utf-8' codec can't decode")])
def test_what_a_file_says_is_data(tmp_path, data, why):
    path = tmp_path / 'file'
    path.write_bytes(data)
    if why is None:
        assert read_json(str(path), FORM, 'remove it') == parsed(data, FORM) == {
            'step': 3, 'of': [{'a': None, 'b': 1.5}, {}]}
        return
    with pytest.raises(BadFileError) as caught:
        read_json(str(path), FORM, 'remove it')
    assert str(caught.value).startswith('%s cannot be read (%s' % (path, why))
    assert str(caught.value).endswith('): remove it.')


def test_a_file_that_is_missing_or_too_large(tmp_path):
    path = tmp_path / 'file'
    assert read_data(str(path)) is read_json(str(path), FORM, '') is None
    path.write_bytes(b'12345')
    assert read_data(str(path), 5) == b'12345'
    with pytest.raises(BadFileError, match='file has 5 bytes, and such a file has 4 at most: move'):
        read_data(str(path), 4)
