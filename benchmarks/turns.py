"""Contenders measured in turns: one runs while the others sleep, round after round."""

import concurrent.futures
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_LEAST_MEMORY = 2e9  # bytes that have to be free before another process is started
_MOST_STEPS = 500  # of a turn


class ContenderError(Exception):
    """A contender that could not be built or run; the text says why."""


class Contender:
    """One contender: a process, or for the floor several that work at the same time.

    Attributes:
      label: its name in the results.
      seconds: list, seconds a step of each turn.
      cpu_seconds: list, processor seconds a step of each turn, of all its processes together.
      failure: None, or why it is out.
    """

    def __init__(self, label, specs):
        """
        Args:
          label: its name.
          specs: list of dicts, the arguments of the `build` command, one a process.
        """
        self.label, self.failure = label, None
        self.seconds, self.cpu_seconds = [], []
        self.losses, self.checksum, self.build_seconds = None, None, None
        self._specs, self._environment = specs, {}
        self._processes, self._logs = [], []

    @property
    def batch(self):
        """Examples of a step, of all its towers."""
        return self._specs[0]['batch']

    def set_environment(self, environment):
        """Environment variables of its processes, to be set before it is started."""
        self._environment = dict(environment)

    def start(self):
        """Starts the processes and builds in them; a failure is noted, not raised."""
        try:
            for _ in self._specs:
                self._start_process()
            answers = self._ask_all([dict(spec, do='build') for spec in self._specs])
            self.build_seconds = max(answer.get('build_seconds', 0) for answer in answers)
        except ContenderError as error:
            self.fail(str(error))

    def run(self, count):
        """Runs steps in all processes at once: seconds and processor seconds a step, and the
        losses of each process.

        Several processes are started by one clock, and a step's time is the wall time from the
        first's start to the last's end.
        """
        command = {'do': 'steps', 'count': count}
        if len(self._specs) > 1:
            command['start_at'] = time.monotonic() + 0.02
        answers = self._ask_all([command] * len(self._specs))
        wall = max(each['end'] for each in answers) - min(each['begin'] for each in answers)
        return (wall / count, sum(each['cpu'] for each in answers) / count,
                [each['losses'] for each in answers])

    def ask(self, command):
        """The answers of all processes to a command without arguments."""
        return self._ask_all([{'do': command}] * len(self._specs))

    def fail(self, reason):
        """Takes it out of the contest."""
        self.failure = reason
        self.close()

    def close(self):
        """Ends its processes."""
        for process in self._processes:
            process.kill()  # it has nothing to save, and takes seconds to end by itself
        for process in self._processes:
            process.wait()
            with contextlib.suppress(BrokenPipeError):  # a command that it died before reading
                process.stdin.close()
            process.stdout.close()
        for log in self._logs:
            log.close()
        self._processes, self._logs = [], []

    def _start_process(self):
        free = free_memory()
        if free < _LEAST_MEMORY:
            raise ContenderError('left out: %.1f GB of memory left' % (free / 1e9))
        log = tempfile.TemporaryFile('w+')
        self._logs.append(log)
        self._processes.append(subprocess.Popen(
            [sys.executable, '-m', 'benchmarks.contender'], cwd=ROOT, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=log, universal_newlines=True,
            env=dict(os.environ, TF_CPP_MIN_LOG_LEVEL='3', **self._environment)))

    def _ask_all(self, commands):
        for process, command in zip(self._processes, commands):
            try:
                process.stdin.write(json.dumps(command) + '\n')
                process.stdin.flush()
            except BrokenPipeError:
                pass  # it has died: its answer is empty
        answers = []
        for process, log in zip(self._processes, self._logs):
            line = process.stdout.readline()
            if not line:
                log.seek(0)
                status = process.wait()
                if status == -signal.SIGKILL:
                    raise ContenderError('the process was killed: no memory left, as a rule')
                raise ContenderError('the process ended (%s): %s' % (
                    status, log.read().strip()[-200:]))
            answers.append(json.loads(line))
        errors = [answer['error'] for answer in answers if 'error' in answer]
        if errors:
            raise ContenderError(errors[0])
        return answers


def start_all(contenders, at_once=None):
    """Starts contenders, as many at once as there are cores."""
    with concurrent.futures.ThreadPoolExecutor(at_once or os.cpu_count() or 1) as pool:
        list(pool.map(lambda contender: contender.start(), contenders))


def first_steps(contender, count):
    """Its first steps: the mean over processes of each step's loss, and the weights' checksum."""
    try:
        _, _, losses = contender.run(count)
        contender.losses = [statistics.mean(step) for step in zip(*losses)]
        contender.checksum = contender.ask('checksum')[0]
    except ContenderError as error:
        contender.fail(str(error))


def take_turns(contenders, rounds, turn_seconds, log=None):
    """Times contenders in turns; each gets `seconds`, one entry a round.

    Each does as many steps a turn as take it `turn_seconds`, one at least; a slow one would leave
    the fast ones too few steps to time. Who begins changes from round to round.

    Args:
      contenders: those that have not failed.
      rounds: turns of each.
      turn_seconds: length of a turn, about.
      log: called with a line of text now and then, or None.

    Returns:
      dict from label to the steps of a turn.
    """
    # The better of two tries: a neighbour's burst of work must not shorten every turn.
    for contender in contenders + contenders:
        if contender.failure is None:
            _turn(contender, 2)
    steps = {}
    for contender in contenders:
        if contender.failure is None:
            wanted = int(round(turn_seconds / min(contender.seconds)))
            steps[contender.label] = max(1, min(_MOST_STEPS, wanted))
        contender.seconds, contender.cpu_seconds = [], []
    for number in range(rounds):
        first = number % max(1, len(contenders))
        for contender in contenders[first:] + contenders[:first]:
            if contender.failure is None:
                _turn(contender, steps[contender.label])
        if log:
            log('round %d of %d' % (number + 1, rounds))
    return steps


def _turn(contender, steps):
    try:
        seconds, cpu_seconds, _ = contender.run(steps)
    except ContenderError as error:
        contender.fail(str(error))
        return
    contender.seconds.append(seconds)
    contender.cpu_seconds.append(cpu_seconds)


def spread(values):
    """{'median', 'least', 'most'} of a list of numbers, or None of none."""
    if not values:
        return None
    return {'median': statistics.median(values), 'least': min(values), 'most': max(values)}


def ratios(ours, theirs):
    """`spread` of our time over theirs, round by round, so that both had the same neighbours."""
    if len(ours) != len(theirs):
        raise ValueError('%d rounds against %d' % (len(ours), len(theirs)))
    return spread([mine / other for mine, other in zip(ours, theirs)])


def free_memory():
    """Bytes that a new process can have."""
    with open('/proc/meminfo') as meminfo:
        for line in meminfo:
            if line.startswith('MemAvailable:'):
                return int(line.split()[1]) * 1024.
    raise OSError('/proc/meminfo has no MemAvailable')
