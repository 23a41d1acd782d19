"""Runs of `train.py` for tests: started in processes of their own, and what they left behind."""

import collections
import json
import os
import re
import subprocess
import sys
import time

import tensorflow.compat.v1 as tf

TRAIN = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), 'train.py')
RUNNER = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'train_runner.py')
PATIENCE = 240  # seconds for what takes some on an idle machine

# One run that much is asked of. Everything that has a place to resume at is switched on: the order
# of the images crosses into a second epoch, they are shifted, there is dropout, Adam has slots and
# beta powers, the rate rises and falls, and weights are averaged.
STEPS = 30
FLAGS = ['--train_steps=%d' % STEPS, '--batch_size=100', '--eval_steps=7',
         '--log_every=5', '--summary_steps=10', '--average_decay=0.9', '--warmup_epochs=0.5',
         '--decay=exponential', '--decay_epochs=1', '--base_learning_rate=0.01',
         '--config={"augment_shift": 1, "keep": 99}']


class Runner:
    """The process that forks runs of train.py."""

    def __init__(self, log):
        # Where a user has set nothing, train.py itself keeps TF's messages off the screen.
        environment = {name: value for name, value in os.environ.items()
                       if name != 'TF_CPP_MIN_LOG_LEVEL'}
        with open(str(log), 'w') as stderr:
            self.process = subprocess.Popen([sys.executable, RUNNER], stdin=subprocess.PIPE,
                                            stderr=stderr, env=environment)

    def start(self, folder, argv, before=None):
        return Run(self, folder, argv, before)

    def run(self, folder, argv, status=0, before=None):
        """A run to its end, which has to have that exit status."""
        run = self.start(folder, argv, before)
        assert run.status() == status, run.stdout + run.stderr
        return run

    def python(self, argv, folder, **environment):
        """The run of another program, `[path, argument, …]`, in a folder, to its good end."""
        before = ('import os, runpy, sys\nos.chdir(%r)\nos.environ.update(%r)\nsys.argv = %r\n'
                  'sys.path.insert(0, os.path.dirname(sys.argv[0]))\n'
                  'runpy.run_path(sys.argv[0], run_name="__main__")\nsys.exit()' % (
                      str(folder), environment, argv))  # before train.py, which never comes
        return self.run(os.path.join(str(folder), 'unused'), [], before=before)

    def source(self, text, folder, **environment):
        """As `python`, of a program's text."""
        path = os.path.join(str(folder), 'program.py')
        with open(path, 'wb') as opened:
            opened.write(text.encode())
        return self.python([path], folder, **environment)


class Run:
    """One run of train.py; its output goes to a folder of its own beside `folder`."""

    def __init__(self, runner, folder, argv, before=None):
        number = 0
        while os.path.exists('%s.%d' % (folder, number)):
            number += 1
        self.output = '%s.%d' % (folder, number)
        os.makedirs(self.output)
        self.train_dir = str(folder)
        line = json.dumps({'argv': ['--train_dir=%s' % folder] + argv, 'output': self.output,
                           'before': before})
        runner.process.stdin.write(line.encode() + b'\n')
        runner.process.stdin.flush()
        wait_until(lambda: os.path.exists(os.path.join(self.output, 'pid')))
        self.pid = int(self._read('pid'))

    def has_ended(self):
        return os.path.exists(os.path.join(self.output, 'status'))

    def status(self):
        """Its exit status, or minus the signal that ended it."""
        wait_until(self.has_ended)
        return int(self._read('status'))

    def send(self, number):
        if not self.has_ended():
            os.kill(self.pid, number)

    @property
    def stdout(self):
        return self._read('stdout')

    @property
    def stderr(self):
        return without_noise(self._read('stderr'))

    def _read(self, name):
        if not os.path.exists(os.path.join(self.output, name)):
            return ''  # the process has not come so far yet
        with open(os.path.join(self.output, name)) as opened:
            return opened.read()


def without_noise(text):
    """What was written on stderr, without what TF itself says on some versions."""
    return ''.join(line for line in text.splitlines(True)
                   if not re.match(r'[IWE]0000 |WARNING: All log messages before absl::', line))


def wait_until(condition, seconds=PATIENCE, pause=0.005):
    deadline = time.time() + seconds
    while not condition():
        assert time.time() < deadline, 'waited for %d seconds' % seconds
        time.sleep(pause)


def values_of(folder, step):
    """Dict from the names in a checkpoint to arrays."""
    reader = tf.train.NewCheckpointReader('%s/model.ckpt-%d' % (folder, step))
    return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}


def steps_saved(folder):
    if not os.path.exists(str(folder)):
        return []
    return sorted(int(name[len('model.ckpt-'):-len('.index')]) for name in os.listdir(str(folder))
                  if name.endswith('.index'))


def newest(folder):
    """The step that the state file names."""
    return int(tf.train.latest_checkpoint(str(folder)).rpartition('-')[2])


def names_that_differ(one, other):
    """Names of what is not in both, or not bit by bit the same."""
    return sorted(name for name in set(one) | set(other)
                  if name not in one or name not in other or one[name].dtype != other[name].dtype
                  or one[name].tobytes() != other[name].tobytes())


def metrics(folder):
    with open(os.path.join(str(folder), 'metrics.jsonl')) as log:
        return [json.loads(line, object_pairs_hook=collections.OrderedDict) for line in log]


def untimed(lines):
    """Lines of metrics.jsonl without what depends on the time of day."""
    return [[(name, value) for name, value in line.items()
             if name not in ('images_per_second', 'input_wait', 'wall_time')] for line in lines]


# Names under which TF writes before it renames, and data without an index.
HALF_WRITTEN = re.compile(r'\.tempstate\d+$|^checkpoint\.tmp')


def half_written(folder):
    names = os.listdir(str(folder)) if os.path.exists(str(folder)) else []
    return [name for name in names if HALF_WRITTEN.search(name) or (
        '.data-' in name and name.split('.data-')[0] + '.index' not in names)]
