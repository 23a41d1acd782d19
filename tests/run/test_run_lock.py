"""Two runs in one directory: the second is refused, told who has it, until the first is gone."""

import errno
import json
import os
import signal
import socket
import time

import pytest

from towers.run import run_lock
from towers.errors import CheckpointError, RunLockedError
from towers.run.run_lock import hold_directory

def test_a_second_process_is_refused_until_the_first_is_killed(tmpdir):
    directory, before = str(tmpdir.join('made', 'for', 'it')), time.time()
    read_end, write_end = os.pipe()
    holder = os.fork()
    if holder == 0:
        with hold_directory(directory):
            os.write(write_end, b'held')
            time.sleep(60)
    try:
        os.read(read_end, 4)
        with pytest.raises(RunLockedError) as caught:
            with hold_directory(directory):
                pytest.fail('two processes hold one directory')
    finally:
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)
    text = str(caught.value)
    start = '%s is in use by process %d on %s, since ' % (directory, holder, socket.gethostname())
    assert text.startswith(start) and text.endswith(
        "Two runs in one directory would overwrite and delete each other's checkpoints; nothing "
        'was written. Wait for that run, end it, or give this one another directory.')
    since = time.mktime(time.strptime(text[len(start):][:19], '%Y-%m-%d %H:%M:%S'))
    assert before - 1 <= since <= time.time()
    # What the killed one wrote is still there, and says nothing.
    lock = tmpdir.join('made', 'for', 'it', 'run.lock')
    assert json.loads(lock.read())['pid'] == holder
    with hold_directory(directory) as locked:
        assert locked is True and json.loads(lock.read())['pid'] == os.getpid()


def test_it_is_released_at_the_end_and_after_an_error(tmpdir):
    for _ in range(2):
        with pytest.raises(KeyError):
            with hold_directory(str(tmpdir)):
                raise KeyError('in the run')
    with hold_directory(str(tmpdir)):
        with pytest.raises(RunLockedError):
            with hold_directory(str(tmpdir)):
                pass
        # Other directories are free.
        with hold_directory(str(tmpdir.join('other'))):
            pass


@pytest.mark.parametrize('content', [b'', b'{"pid": 1', b'\xff'])
def test_a_holder_that_has_not_written_yet(tmpdir, content):
    with hold_directory(str(tmpdir)):
        tmpdir.join('run.lock').write_binary(content)
        with pytest.raises(RunLockedError, match='is in use by another process, which has not '
                                                 'said yet which one it is. Two runs'):
            with hold_directory(str(tmpdir)):
                pass


def test_a_file_in_the_place_of_the_directory(tmpdir):
    tmpdir.join('file').write('')
    for path in ('file', 'file/below'):
        with pytest.raises(CheckpointError) as caught:
            with hold_directory(str(tmpdir.join(path))):
                pass
        assert str(caught.value).startswith('%s cannot be written to: ' % tmpdir.join(path))
        assert str(caught.value).endswith(
            '. Nothing was written. There is no checkpoint there. Give a directory that can be '
            'made and written to.')


def test_a_file_system_without_locks(tmpdir, monkeypatch):
    def flock(*unused_args):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
    monkeypatch.setattr(run_lock.fcntl, 'flock', flock)
    with pytest.warns(RuntimeWarning) as warned:
        with hold_directory(str(tmpdir)) as locked:
            assert locked is False
    assert [str(warning.message) for warning in warned] == [
        '%s is not locked, as its file system has no file locks (%s): see to it yourself that no '
        'other run uses it.' % (tmpdir, os.strerror(errno.ENOLCK))]
    assert warned[0].filename == __file__
