"""metrics.jsonl as a file: its lines, and what a kill may leave of them."""

import json
import math

import numpy as np
import pytest

from towers.errors import BadFileError, InvalidArgumentError, LogFileError
from trainer import metrics_log
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


@pytest.mark.slow
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


@pytest.mark.parametrize('tail, kept', [
    (b'\x00\x00\x00', b''), (b'{"step": 2, "lo', b''), (b'{"st\x00', b''), (b'\n\n', b''),
    (b'{"step": 2}', b'{"step": 2}\n')])
def test_mends_a_spoilt_last_line(tmp_path, tail, kept):
    path = tmp_path / 'metrics.jsonl'
    path.write_bytes(b'{"step": 1}\n' + tail)
    MetricsLog(str(path)).resume(5)
    assert path.read_bytes() == b'{"step": 1}\n' + kept


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


def test_a_link_is_not_written_to_and_a_file_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    (tmp_path / 'mine').write_text('{"step": 1}\n')
    (tmp_path / 'metrics.jsonl').symlink_to(tmp_path / 'mine')
    log = MetricsLog(str(tmp_path / 'metrics.jsonl'))
    with pytest.raises(BadFileError, match='metrics.jsonl is a symbolic link, and a file belongs'):
        log.resume(1)
        log.add(2, {})
        log.flush()
    assert (tmp_path / 'mine').read_text() == '{"step": 1}\n'

    def fail(*unused):
        raise PermissionError(13, 'Permission denied')
    monkeypatch.setattr(metrics_log, 'read_data', fail)
    with pytest.raises(LogFileError, match='^run: Permission denied.$'):
        metrics_log.entries('run')
