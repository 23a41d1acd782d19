"""The lines of a process that waits at the start."""

import threading
import time

from towers.cluster import wait_notice
from towers.cluster.wait_notice import Waiting


def test_it_is_said_once_and_again(monkeypatch):
    monkeypatch.setattr(wait_notice, 'FIRST', 0.05)
    monkeypatch.setattr(wait_notice, 'AGAIN', 0.3)
    said, lines, missing = threading.Event(), [], ['worker 1 (b:2), worker 2 (c:3)']

    def say(line):
        lines.append((time.monotonic(), line))
        missing[0] = 'worker 2 (c:3)'
        if len(lines) == 2:
            said.set()
    begin = time.monotonic()
    with Waiting(lambda: missing[0], 120., say):
        assert said.wait(20.)
    assert [line for _, line in lines] == [
        'waiting        for worker 1 (b:2), worker 2 (c:3), start_timeout is 120 s',
        'waiting        for worker 2 (c:3), start_timeout is 120 s']
    assert 0.05 <= lines[0][0] - begin and 0.25 < lines[1][0] - lines[0][0]
