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

pytestmark = [pytest.mark.slow, pytest.mark.version_independent]

# What a writer leaves, by the moment of its death.
MOMENTS = {
    'writes data': lambda names: _any(r'data-\d+-of-\d+\.tempstate', names),
    'has data without index': lambda names: _halves(names),
    'writes the index': lambda names: _any(r'index\.tempstate', names),
    'writes the state file': lambda names: _any(r'checkpoint\.tmp', names),
    'merges shards': lambda names: _any(r'_temp', names),
}


def _any(pattern, names):
    return any(re.search(pattern, name) for name in names)


def _halves(names):
    return [name for name in names if re.search(r'\.data-\d+-of-\d+$', name)
            and name.split('.data-')[0] + '.index' not in names]


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


@pytest.mark.parametrize('sharded', [False, True], ids=['plain', 'sharded'])
def test_killed_at_any_moment(tmpdir, start_writer, sharded):
    start, kill = start_writer
    directory = str(tmpdir.join('run'))
    chance = random.Random(1)
    wanted = sorted(set(MOMENTS) - (set() if sharded else {'merges shards'}))
    left = dict.fromkeys(MOMENTS, 0)
    last, kills = -1, 9 if sharded else 12
    # On a busy machine a writer is seldom where it was seen to be: it takes some more then.
    for kill_number in range(10 * kills):
        if kill_number >= kills and sum(left.values()) >= kills // 3:
            break
        pid = start(directory, sharded)
        deadline = time.time() + 60
        _wait(lambda: os.path.exists(directory + '/checkpoint')
              and newest_step(directory) > last + 2, deadline)
        if kill_number % 3:
            time.sleep(chance.uniform(0, .1))
        else:
            # Not at random but in a certain moment, as well as one can see it from here.
            moment = MOMENTS[wanted[kill_number // 3 % len(wanted)]]
            _wait(lambda: moment(os.listdir(directory)), time.time() + 5)
        kill(pid)
        names = os.listdir(directory)
        for name, is_left in MOMENTS.items():
            left[name] += bool(is_left(names))
        last = check(directory, last)
    print('%d kills, %d steps; left behind: %s' % (kill_number, last, left))
    assert sum(left.values()) >= kills // 3
    # What they left went with the next start: besides the lock and the state file there are whole
    # checkpoints, and what the last one left.
    newest = newest_checkpoint(directory)
    tidy_directory(directory, newest)
    names = set(os.listdir(directory)) - {'checkpoint', 'run.lock'}
    assert names == {os.path.basename(path) for prefix in list_checkpoints(directory)
                     for path in files_of(prefix)}


def test_killed_in_the_first_save(tmpdir, start_writer):
    start, kill = start_writer
    for number in range(4):
        directory = str(tmpdir.join('run%d' % number))
        os.mkdir(directory)
        pid = start(directory, False)
        # From the first data file on, a little later each time.
        _wait(lambda: _any('data-', os.listdir(directory)), time.time() + 60)
        time.sleep(.006 * number)
        kill(pid)
        newest = newest_checkpoint(directory)
        assert newest is None or newest.step == check(directory, 0)
        # It goes on from there without being told.
        pid = start(directory, False)
        _wait(lambda: os.path.exists(directory + '/checkpoint')
              and newest_step(directory) > 2, time.time() + 60)
        kill(pid)
        check(directory, 3)


def newest_step(directory):
    """The step that the state file names, which a process may be writing anew."""
    with open(directory + '/checkpoint') as state:
        return int(re.search(r'model\.ckpt-(\d+)"', state.read()).group(1))


def _wait(condition, deadline):
    while not condition() and time.time() < deadline:
        pass
