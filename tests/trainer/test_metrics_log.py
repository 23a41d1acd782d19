"""metrics.jsonl as a file: its lines, and what a kill may leave of them."""

import json
import math
import os
import shutil

import numpy as np
import pytest

from towers.errors import BadFileError, InvalidArgumentError, LogFileError
from trainer.metrics_log import MetricsLog


def strict(path):
    """The objects of a file, which has to be JSON by the letter, one whole line each."""
    def refuse(constant):
        raise AssertionError(constant)
    text = path.read_text()
    assert text == '' or text.endswith('\n')
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def test_lines_are_flat_objects_in_order(tmp_path):
    path = tmp_path / 'new' / 'metrics.jsonl'
    log = MetricsLog(str(path))
    log.resume(0)
    assert path.read_text() == ''
    log.add(10, {'loss': np.float32(0.1), 'examples': np.int64(1000), 'rate': 0.1, 'name': b'a'})
    assert path.read_text() == ''  # an evaluation of step 10 may yet come
    log.add(10, {'test_accuracy': np.float64(0.25), 'good': np.bool_(True)})
    log.add(20, {'loss': np.array(2.5, np.float16), 'examples': np.array([2000])})
    assert path.read_text() == ('{"step": 10, "loss": 0.1, "examples": 1000, "rate": 0.1, '
                                '"name": "a", "test_accuracy": 0.25, "good": true}\n')
    log.flush()
    assert strict(path)[1] == {'step': 20, 'loss': 2.5, 'examples': 2000}


def test_what_json_cannot_say_is_null(tmp_path):
    path = tmp_path / 'metrics.jsonl'
    log = MetricsLog(str(path))
    log.resume(0)
    log.add(1, {'loss': float('nan'), 'rate': 0.5, 'norm': np.float32('inf')})
    log.flush()
    log.add(1, {'test_loss': -math.inf})
    log.add(2, {'loss': None})
    log.sync()
    assert strict(path) == [
        {'step': 1, 'loss': None, 'rate': 0.5, 'norm': None, 'test_loss': None},
        {'step': 2, 'loss': None}]


def test_joins_a_line_that_is_written_already(tmp_path):
    path = tmp_path / 'metrics.jsonl'
    log = MetricsLog(str(path))
    log.resume(0)
    for step in (1, 2):
        log.add(step, {'loss': 0.5})
    log.sync()
    log.add(2, {'test_accuracy': 0.75})
    expected = [{'step': 1, 'loss': 0.5}, {'step': 2, 'loss': 0.5, 'test_accuracy': 0.75}]
    assert strict(path) == expected
    again = MetricsLog(str(path))
    again.resume(2)
    again.add(2, {'test_accuracy': 0.75})
    assert strict(path) == expected
    with pytest.raises(InvalidArgumentError, match='step 1 is before step 2'):
        again.add(1, {'test_accuracy': 0.75})
    again.add(3, {})
    again.flush()
    assert strict(path) == expected + [{'step': 3}]
    assert [each.name for each in tmp_path.iterdir()] == ['metrics.jsonl']


def test_resumes_from_whatever_a_kill_left(tmp_path):
    """Cut anywhere after the restored step's line, the file comes back to that line."""
    path = tmp_path / 'metrics.jsonl'
    log = MetricsLog(str(path))
    log.resume(0)
    for step in (10, 20, 30, 40):
        log.add(step, {})
    log.flush()
    content = path.read_bytes()
    lines = content.splitlines(True)
    for restored, kept in ((0, 0), (20, 2), (25, 2), (30, 3)):
        expected = b''.join(lines[:kept])
        for cut in range(len(expected), len(content) + 1):
            path.write_bytes(content[:cut])
            log.resume(restored)
            assert path.read_bytes() == expected
    log.add(40, {})
    log.flush()
    assert path.read_bytes() == content


def test_the_file_is_cut_in_one_go(tmp_path, monkeypatch):
    path = tmp_path / 'metrics.jsonl'
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n')

    def full(source, target):
        assert open(source).read() == '{"step": 1}\n'
        raise OSError(28, 'No space left on device')
    monkeypatch.setattr(os, 'replace', full)
    with pytest.raises(LogFileError, match='metrics.jsonl cannot be written: No space left on'):
        MetricsLog(str(path)).resume(1)
    assert path.read_bytes() == b'{"step": 1}\n{"step": 2}\n'
    monkeypatch.undo()
    MetricsLog(str(path)).resume(1)
    assert [each.name for each in tmp_path.iterdir()] == ['metrics.jsonl']
    assert path.read_bytes() == b'{"step": 1}\n'


@pytest.mark.parametrize('tail', [b'\x00\x00\x00', b'{"step": 2, "lo', b'{"st\x00', b'\n\n'])
def test_drops_a_spoilt_last_line(tmp_path, tail):
    path = tmp_path / 'metrics.jsonl'
    path.write_bytes(b'{"step": 1}\n' + tail)
    MetricsLog(str(path)).resume(5)
    assert path.read_bytes() == b'{"step": 1}\n'


def test_mends_a_missing_last_line_feed(tmp_path):
    path = tmp_path / 'metrics.jsonl'
    path.write_bytes(b'{"step": 1}\n{"step": 2}')
    MetricsLog(str(path)).resume(5)
    assert path.read_bytes() == b'{"step": 1}\n{"step": 2}\n'


@pytest.mark.parametrize('tail', [
    b'loss,accuracy\n{"step": 2}\n', b'\xff\xfe\n', b'notes of mine', b'{"step": "2"}\n',
    b'{"step": 1, "a": [3]}\n', b'{"step": 1e999}\n', b'{"step": -1}\n',
    b'{"step": 9223372036854775807}\n', b'[' * 9999 + b'\n'])
def test_refuses_a_file_that_is_something_else(tmp_path, tail):
    path = tmp_path / 'metrics.jsonl'
    path.write_bytes(b'{"step": 1}\n' + tail)
    with pytest.raises(BadFileError, match=r'^line 2 of .*metrics.jsonl is no JSON object with'):
        MetricsLog(str(path)).resume(5)
    assert path.read_bytes() == b'{"step": 1}\n' + tail


def test_refuses_what_is_no_file(tmp_path):
    path = tmp_path / 'metrics.jsonl'
    path.write_text('')
    with pytest.raises(BadFileError, match=r'^%s is a folder, and a file belongs ' % tmp_path):
        MetricsLog(str(tmp_path)).resume(0)
    with pytest.raises(LogFileError, match='File exists|Not a directory'):
        MetricsLog(str(path / 'metrics.jsonl')).resume(0)


def test_refuses_what_is_no_number(tmp_path):
    log = MetricsLog(str(tmp_path / 'metrics.jsonl'))
    log.resume(0)
    with pytest.raises(InvalidArgumentError, match=r'^image=.* cannot be logged'):
        log.add(1, {'image': np.zeros([2, 2])})


# ---- a file of another run -----------------------------------------------------------------------

def test_the_file_of_a_run_that_was_deleted_is_kept(tmp_path):
    path = tmp_path / 'metrics.jsonl'
    former = b'{"step": 0, "a": 1}\n{"step": 7, "loss": 1.5}\n'
    path.write_bytes(former)
    log = MetricsLog(str(path))
    assert log.resume(0, is_new=True) == (
        '{0} is of an earlier run, whose checkpoints are gone: renamed to {0}.1'.format(path))
    log.add(1, {'loss': 2.})
    log.flush()
    assert (tmp_path / 'metrics.jsonl.1').read_bytes() == former
    assert path.read_text() == '{"step": 1, "loss": 2.0}\n'
    # One more is deleted, and what is no log at all is kept, too.
    path.write_bytes(b'notes of mine\n')
    assert MetricsLog(str(path)).resume(0, is_new=True).endswith('renamed to %s.2' % path)
    assert (tmp_path / 'metrics.jsonl.2').read_bytes() == b'notes of mine\n'


@pytest.mark.parametrize('content', [b'', b'\n', b'{"step": 0, "initial_weights": "ab"}\n'])
def test_what_a_run_has_that_was_killed_before_it_saved_is_its_own(tmp_path, content):
    path = tmp_path / 'metrics.jsonl'
    path.write_bytes(content)
    assert MetricsLog(str(path)).resume(0, is_new=True) is None
    assert [each.name for each in tmp_path.iterdir()] == ['metrics.jsonl']


@pytest.mark.parametrize('steps, text', [
    ([1, 2], None),
    ([1, 3, 9], 'the lines of steps 3 to 9 from {0}: those steps are done again')])
def test_what_is_cut_is_said(tmp_path, steps, text):
    path = tmp_path / 'metrics.jsonl'
    path.write_text(''.join('{"step": %d}\n' % step for step in steps) + '{"ste')
    assert MetricsLog(str(path)).resume(2) == (text and 'cut ' + text.format(path))
    assert path.read_text() == ''.join('{"step": %d}\n' % step for step in steps if step <= 2)


def test_a_folder_that_is_gone(tmp_path):
    folder = tmp_path / 'run'
    log = MetricsLog(str(folder / 'metrics.jsonl'))
    log.resume(0)
    log.add(5, {'loss': 1.})
    log.flush()
    shutil.rmtree(str(folder))
    log.add(6, {'loss': 1.})
    with pytest.raises(LogFileError) as caught:
        log.flush()
    assert str(caught.value) == '%s: No such file or directory.' % (folder / 'metrics.jsonl')
