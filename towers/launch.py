"""Starts a cluster on this machine: `python -m towers.launch --workers=2 --ps=1 -- train.py …`.

Each process gets a `TF_CONFIG` of its own. When one process fails, all others are ended; with
`--restarts`, all are then started again, since they meet only at the start.
"""

import argparse
import collections
import contextlib
import ctypes
import functools
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time

from towers.cluster.addresses import free_ports
from towers.errors import ClusterError

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_TOLD = [128 + number for number in _SIGNALS] + [-number for number in _SIGNALS]


def parse(argv):
    """The `(options, command)` of a launch, from arguments without the program's name."""
    parser = argparse.ArgumentParser(
        prog='python -m towers.launch', description='Starts a cluster on this machine, with a '
        'TF_CONFIG for each process, and ends all of it when one process fails.')
    for name, default, text in (
            ('--workers', 2, 'workers, the first of which is the chief'),
            ('--ps', 0, 'parameter servers'),
            ('--restarts', 0, 'how often all are started again when one fails'),
            ('--grace', 30, 'seconds from one failure to SIGTERM, and from that to SIGKILL')):
        parser.add_argument(name, type=int, default=default, help=text + ' (%(default)s)')
    parser.add_argument('command', nargs=argparse.REMAINDER, help='-- program and its arguments; a '
                        '.py file, or -m and a module, is run by this Python')
    options = parser.parse_args(argv)
    if options.workers < 1 or min(options.ps, options.restarts, options.grace) < 0:
        parser.error('--workers has to be at least 1, and no number below 0')
    command = options.command[1:] if options.command[:1] == ['--'] else options.command
    if not command:
        parser.error('there is nothing to start: add -- and a program, such as -- train.py '
                     '--cluster=ring')
    if command[0].endswith('.py') or command[0] == '-m':
        command = [sys.executable] + command
    return options, command


class TaskProcess(subprocess.Popen):
    """One process, in a process group of its own, whose lines go to a queue. On Linux it is killed
    when its parent ends. One that `serves`, a parameter server, never ends by itself."""

    def __init__(self, command, cluster, job, index, lines):
        self.name, self.serves = '%s %d' % (job, index), job == 'ps'
        config = json.dumps({'cluster': cluster, 'task': {'type': job, 'index': index}})
        try:
            super(TaskProcess, self).__init__(
                command, env=dict({'PYTHONUNBUFFERED': '1'}, **dict(os.environ, TF_CONFIG=config)),
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                start_new_session=True, preexec_fn=_die_with_parent())
        except OSError as error:
            raise ClusterError('%s cannot be started: %s: %s' % (
                self.name, command[0], error.strerror)) from None
        self._reader = threading.Thread(target=self._read, args=(lines,), daemon=True)
        self._reader.start()

    def _read(self, lines):
        for line in iter(self.stdout.readline, b''):
            text = line.decode('utf-8', 'replace').rstrip('\n')
            lines.put('[%s] %s' % (self.name, text.rpartition('\r')[2]))

    def send(self, number):
        """Sends a signal to its process group; a group that is gone is no error."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # the second: of a zombie
            os.killpg(self.pid, number)

    def end(self):
        """Kills it, with its children; returns when its output has ended."""
        self.send(signal.SIGKILL)
        self.wait()
        self._reader.join(2.)


class Processes:
    """All processes of a cluster; `run` returns when they have ended."""

    def __init__(self, command, workers, ps=0, restarts=0, grace=30.,
                 write=functools.partial(print, flush=True)):
        """`command` is a list of strings, the numbers are those of the options, and `write` is
        called with each line of output."""
        self._command, self._workers, self._ps = command, workers, ps
        self._restarts, self._grace, self._write = restarts, grace, write
        self._lines, self._signals = queue.Queue(), collections.deque()
        self._processes, self._signalled = [], None

    def signal(self, number):
        """Has a signal passed on to all; for a signal handler."""
        self._signals.append(number)

    def run(self):
        """Starts all, and waits for the end of all. Returns 0, or the status of the process that
        failed first: 128 plus the number of a signal that ended it, or that was passed on."""
        try:
            for number in range(1, self._restarts + 2):
                self._start()
                failed = self._wait(number)
                if self._signalled is not None:
                    return 128 + self._signalled
                if failed is None or failed.returncode in _TOLD:
                    break
                self._end_all()
            code = 0 if failed is None else failed.returncode
            return code if code >= 0 else 128 - code
        finally:
            self._end_all()

    def _start(self):
        """Starts all, on ports that are free: what is left of former processes may hold theirs."""
        addresses = ['127.0.0.1:%d' % port for port in free_ports(self._workers + self._ps)]
        cluster = {'worker': addresses[:self._workers]}
        if self._ps:
            cluster['ps'] = addresses[self._workers:]
        self._processes = []
        for job in cluster:
            for index in range(len(cluster[job])):
                process = TaskProcess(self._command, cluster, job, index, self._lines)
                self._processes.append(process)
                self._say('%s is process %d' % (process.name, process.pid))

    def _wait(self, number):
        """Waits for the end of all workers of start 1, 2, …, or until they had enough time to end;
        returns the process that has failed first, or None."""
        failed, terminate_at, kill_at = None, float('inf'), float('inf')
        while True:
            self._show()
            now = time.monotonic()
            while self._signals:
                self._signalled = self._signalled or self._signals[0]
                self._send(self._signals.popleft())
                kill_at = min(kill_at, now + self._grace)
            # Asked once a round, so that no failure is passed over: what ends meanwhile runs still.
            running = [process for process in self._running() if not process.serves]
            if failed is None and self._signalled is None:
                failed = next((process for process in self._processes if process.returncode), None)
                if failed is not None:
                    terminate_at = now + self._grace
                    self._say_failed(failed, number)
            if not running:
                return failed
            if now >= terminate_at:
                terminate_at, kill_at = float('inf'), now + self._grace
                self._send(signal.SIGTERM)
            if now >= kill_at:
                self._say('%s did not end within %g seconds: killed' % (
                    ', '.join(process.name for process in running), self._grace))
                return failed

    def _say_failed(self, failed, number):
        code, then = failed.returncode, 'the others are ended'
        how = 'ended with status %d' % code if code >= 0 else (
            'was killed by %s' % signal.Signals(-code).name)
        if code in _TOLD:
            how += ', since the run was told to stop'
        elif number <= self._restarts:
            then = 'all are ended, and started again (%d of %d)' % (number, self._restarts)
        self._say('%s %s: %s' % (failed.name, how, then))

    def _running(self):
        return [process for process in self._processes if process.poll() is None]

    def _send(self, number):
        for process in self._running():  # a server ends after the workers, see `serve`
            process.send(number)

    def _show(self):
        """Writes a line that has come, or comes within a moment."""
        with contextlib.suppress(queue.Empty):
            self._put(self._lines.get(timeout=0.1))

    def _say(self, text):
        self._put('[launch] ' + text)

    def _put(self, line):
        try:
            self._write(line)
        except OSError:  # nobody reads, such as a terminal that is closed: all stop, and save
            self._write = lambda unread: None
            self.signal(signal.SIGHUP)

    def _end_all(self):
        """Kills all processes with their children; writes what they have said."""
        for process in self._processes:
            process.end()
        while not self._lines.empty():
            self._show()


def _die_with_parent():
    """A function by which a process asks Linux to kill it with its parent; None elsewhere."""
    if not sys.platform.startswith('linux'):
        return None
    prctl, set_death_signal = ctypes.CDLL(None).prctl, 1
    return lambda: prctl(set_death_signal, signal.SIGKILL, 0, 0, 0)


def main(argv):
    """Runs a launch to its end; returns the exit status."""
    options, command = parse(argv)
    processes = Processes(command, options.workers, options.ps, options.restarts, options.grace)
    for number in _SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            signal.signal(number, lambda received, frame: processes.signal(received))
    try:
        return processes.run()
    except ClusterError as error:
        sys.stderr.write('towers.launch: %s\n' % error)
        return 2


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
