"""datasets.atomic_file: whole or not at all."""

import os
import stat
import threading

import pytest

from datasets.atomic_file import moved_aside, written_whole
from towers.errors import InvalidArgumentError, LogFileError


def names(folder):
    return sorted(os.listdir(str(folder)))


def test_it_takes_the_place_of_the_file_at_the_end(tmp_path):
    path = tmp_path / 'table'
    path.write_text('before')
    with written_whole(str(path)) as opened:
        opened.write('after')
        opened.flush()
        assert path.read_text() == 'before'
    assert path.read_text() == 'after' and names(tmp_path) == ['table']


def test_an_error_leaves_what_was_there(tmp_path):
    path = tmp_path / 'table'
    for error in (FloatingPointError, KeyboardInterrupt, InvalidArgumentError):
        with pytest.raises(error), written_whole(str(path)) as opened:
            opened.write('half')
            raise error()
        assert names(tmp_path) == []


def test_a_full_disk(tmp_path):
    path = tmp_path / 'table'
    path.write_text('before')
    with pytest.raises(LogFileError) as caught, written_whole(str(path), 'Give another.') as opened:
        opened.write('half')
        raise OSError(28, 'No space left on device')
    assert str(caught.value) == (
        '%s cannot be written: No space left on device. Give another.' % path)
    assert path.read_text() == 'before' and names(tmp_path) == ['table']


def test_a_link_stays_one(tmp_path):
    (tmp_path / 'target').write_text('before')
    (tmp_path / 'link').symlink_to(tmp_path / 'target')
    with written_whole(str(tmp_path / 'link')) as opened:
        opened.write('after')
    assert (tmp_path / 'link').is_symlink() and (tmp_path / 'target').read_text() == 'after'


def test_a_pipe_is_written_to(tmp_path):
    path, seen = str(tmp_path / 'pipe'), []
    os.mkfifo(path)

    def read():
        with open(path) as opened:
            seen.append(opened.read())
    reader = threading.Thread(target=read)
    reader.start()
    with written_whole(path) as opened:
        opened.write('text')
    reader.join()
    assert seen == ['text'] and stat.S_ISFIFO(os.stat(path).st_mode)


def test_the_first_name_that_is_free(tmp_path):
    path = str(tmp_path / 'log')
    for number in (1, 2, 3):
        with open(path, 'w') as opened:
            opened.write('%d' % number)
        assert moved_aside(path) == '%s.%d' % (path, number)
    assert (tmp_path / 'log.2').read_text() == '2'
    assert names(tmp_path) == ['log.1', 'log.2', 'log.3']
    with pytest.raises(LogFileError, match='log cannot be renamed to .*log.4: No such file'):
        moved_aside(path)
