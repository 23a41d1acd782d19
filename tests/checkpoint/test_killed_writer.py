"""Processes killed with SIGKILL while they save: a whole newest checkpoint is always left."""

import os
import random
import re
import signal
import subprocess
import sys
import time

import checkpoint_writer
import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from towers.checkpoint.files import (files_of, list_checkpoints, newest_checkpoint,
                                     state_checkpoints)
from towers.checkpoint.tidy import tidy_directory

pytestmark = pytest.mark.slow


@pytest.fixture(scope='module')
def start_writer():
    """A function that starts a writer on a directory, and one that kills it, as a pair."""
    tests = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    process = subprocess.Popen(
        [sys.executable, os.path.join(tests, 'checkpoint_writer.py')], stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, universal_newlines=True, bufsize=1,
        env=dict(os.environ, PYTHONPATH=os.path.dirname(tests)))

    def start(directory, sharded):
        process.stdin.write('%s %d\n' % (directory, sharded))
        process.stdin.flush()
        return int(process.stdout.readline())

    def kill(pid):
        os.kill(pid, signal.SIGKILL)
        assert process.stdout.readline() == 'gone\n'
    yield start, kill
    process.stdin.close()
    process.wait()


def check(directory, last):
    """Asserts that the newest checkpoint is whole, of one moment, and not before `last`."""
    newest = newest_checkpoint(directory)
    assert newest is not None and newest.skipped == [] and newest.step >= last
    reader = tf.train.NewCheckpointReader(newest.prefix)
    assert reader.get_tensor('global_step') == newest.step
    names = [name for name in reader.get_variable_to_shape_map() if name.startswith('large_')]
    assert len(names) == 8
    for name in names:
        np.testing.assert_array_equal(reader.get_tensor(name), np.float32(newest.step))
    known = state_checkpoints(directory, list_checkpoints(directory))
    assert len(known) <= checkpoint_writer.KEEP and (known or newest.step == 0)
    return newest.step


def wait_for_step(directory, step):
    """Until the state file, which a process may be writing anew, names a later step."""
    deadline = time.time() + 60
    while time.time() < deadline:
        if os.path.exists(directory + '/checkpoint'):
            with open(directory + '/checkpoint') as state:
                found = re.search(r'model\.ckpt-(\d+)"', state.read())
            if found and int(found.group(1)) > step:
                return
        time.sleep(.001)


@pytest.mark.parametrize('sharded', [False, True], ids=['plain', 'sharded'])
def test_killed_at_any_moment(tmpdir, start_writer, sharded):
    start, kill = start_writer
    directory, chance, last, leftovers = str(tmpdir.join('run')), random.Random(1), -1, 0
    for _ in range(8):
        pid = start(directory, sharded)
        wait_for_step(directory, last + 2)
        time.sleep(chance.uniform(0, .1))
        kill(pid)
        leftovers += any(re.search('temp|tmp', name) for name in os.listdir(directory))
        last = check(directory, last)
    assert leftovers
    # What they left went with the next start: besides the lock and the state file there are whole
    # checkpoints, and what the last one left.
    tidy_directory(directory, newest_checkpoint(directory))
    names = set(os.listdir(directory)) - {'checkpoint', 'run.lock'}
    assert names == {os.path.basename(path) for prefix in list_checkpoints(directory)
                     for path in files_of(prefix)}
