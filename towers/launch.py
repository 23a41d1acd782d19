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
import typing

from towers.cluster.addresses import free_ports
from towers.errors import ClusterError

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# The return codes of a process that was told to stop: of one that says so, and of one that does not
# handle the signal.
_TOLD_TO_STOP = [128 + number for number in _SIGNALS] + [-number for number in _SIGNALS]
_NEVER = float('inf')


def parse(argv: typing.List[str]) -> typing.Tuple[argparse.Namespace, typing.List[str]]:
    """The `(options, command)` of a launch, from arguments without the program's name."""
    parser = argparse.ArgumentParser(
        prog='python -m towers.launch', description='Starts a cluster on this machine, with a '
        'TF_CONFIG for each process, and ends all of it when one process fails.')
    parser.add_argument('--workers', type=int, default=2,
                        help='workers, the first of which is the chief (%(default)s)')
    parser.add_argument('--ps', type=int, default=0, help='parameter servers (%(default)s)')
    parser.add_argument('--restarts', type=int, default=0,
                        help='how often all are started again when one fails (%(default)s)')
    parser.add_argument('--grace', type=int, default=30,
                        help='seconds from one failure to SIGTERM, and from that to SIGKILL '
                        '(%(default)s)')
    parser.add_argument('command', nargs=argparse.REMAINDER, help='-- program and its arguments; a '
                        '.py file, or -m and a module, is run by this Python')
    options = parser.parse_args(argv)
    if options.workers < 1 or min(options.ps, options.restarts, options.grace) < 0:
        parser.error('--workers has to be at least 1, and no number below 0')
    command = options.command
    if command[:1] == ['--']:
        command = command[1:]
    if not command:
        parser.error('there is nothing to start: add -- and a program, such as -- train.py '
                     '--cluster=ring')
    if command[0].endswith('.py') or command[0] == '-m':
        command = [sys.executable] + command
    return options, command


class TaskProcess(subprocess.Popen):
    """One process, in a process group of its own, whose lines go to a queue. On Linux it is killed
    when its parent ends.

    Attributes:
      name: such as `'worker 0'`.
      serves: whether it is a parameter server, which never ends by itself.
    """

    def __init__(self, command: typing.List[str], cluster: dict, job: str, index: int,
                 lines: queue.Queue):
        """Starts it.

        Args:
          command: the program and its arguments.
          cluster: dict from jobs to their addresses, for `TF_CONFIG`.
          job, index: the place of this process in it.
          lines: gets its output, line by line.

        Raises:
          ClusterError: the program cannot be started.
        """
        self.name = '%s %d' % (job, index)
        self.serves = job == 'ps'
        config = json.dumps({'cluster': cluster, 'task': {'type': job, 'index': index}})
        environment = dict({'PYTHONUNBUFFERED': '1'}, **os.environ)
        environment['TF_CONFIG'] = config
        try:
            super(TaskProcess, self).__init__(
                command, env=environment,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                start_new_session=True, preexec_fn=_die_with_parent())
        except OSError as error:
            raise ClusterError('%s cannot be started: %s: %s' % (
                self.name, command[0], error.strerror)) from None
        self._reader = threading.Thread(target=self._read, args=(self.stdout, lines), daemon=True)
        self._reader.start()

    def _read(self, pipe: typing.IO[bytes], lines: queue.Queue) -> None:
        """Hands on the lines of a pipe until it ends; of a line that was written over (a progress
        bar), what is there in the end."""
        for line in iter(pipe.readline, b''):
            text = line.decode('utf-8', 'replace').rstrip('\n')
            lines.put('[%s] %s' % (self.name, text.rpartition('\r')[2]))

    def send(self, number: int) -> None:
        """Sends a signal to its process group; a group that is gone is no error."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # the second: of a zombie
            os.killpg(self.pid, number)

    def end(self) -> None:
        """Kills it, with its children; returns when its output has ended."""
        self.send(signal.SIGKILL)
        self.wait()
        self._reader.join(2.)


class Processes:
    """All processes of a cluster; `run` returns when they have ended."""

    def __init__(self, command: typing.List[str], workers: int, ps: int = 0, restarts: int = 0,
                 grace: float = 30.,
                 write: typing.Callable = functools.partial(print, flush=True)):
        """
        Args:
          command: the program of each process, and its arguments.
          workers, ps, restarts, grace: as the options of the command line.
          write: called with each line of output.
        """
        self._command = command
        self._num_workers = workers
        self._num_servers = ps
        self._restarts = restarts
        self._grace = grace
        self._write = write
        self._lines: queue.Queue = queue.Queue()
        self._signals: typing.Deque[int] = collections.deque()  # not passed on yet
        self._first_signal: typing.Optional[int] = None
        self._processes: typing.List[TaskProcess] = []

    def signal(self, number: int) -> None:
        """Notes a signal, which is then passed on to all; for a signal handler."""
        self._signals.append(number)

    def run(self) -> int:
        """Starts all, and waits for the end of all. Returns 0, or the status of the process that
        failed first: 128 plus the number of a signal that ended it, or that was passed on."""
        try:
            number = 0
            while True:
                number += 1
                self._start()
                failed = self._wait(number)
                if self._first_signal is not None:
                    return 128 + self._first_signal
                if failed is None:
                    return 0
                code = failed.returncode
                if code in _TOLD_TO_STOP or number > self._restarts:
                    return code if code >= 0 else 128 - code
                self._end_all()
        finally:
            self._end_all()

    def _start(self) -> None:
        """Starts all, on ports that are free: what is left of former processes may hold theirs."""
        ports = free_ports(self._num_workers + self._num_servers)
        addresses = ['127.0.0.1:%d' % port for port in ports]
        cluster = {'worker': addresses[:self._num_workers]}
        if self._num_servers:
            cluster['ps'] = addresses[self._num_workers:]
        self._processes = []
        for job, tasks in cluster.items():
            for index in range(len(tasks)):
                process = TaskProcess(self._command, cluster, job, index, self._lines)
                self._processes.append(process)
                self._say('%s is process %d' % (process.name, process.pid))

    def _wait(self, number: int) -> typing.Optional[TaskProcess]:
        """Waits for the end of all workers of start number 1, 2, …, or until they had enough time
        to end; returns the process that has failed first, or None."""
        failed = None
        terminate_at = _NEVER
        kill_at = _NEVER
        while True:
            self._show()
            now = time.monotonic()
            if self._pass_signals_on():
                kill_at = min(kill_at, now + self._grace)
            # Asked once a round, so that no failure is passed over: what ends meanwhile runs still.
            running = [process for process in self._running() if not process.serves]
            if failed is None and self._first_signal is None:
                failed = self._first_failed()
                if failed is not None:
                    terminate_at = now + self._grace
                    self._say_failed(failed, number)
            if not running:
                return failed
            if now >= terminate_at:
                terminate_at = _NEVER
                kill_at = now + self._grace
                self._send(signal.SIGTERM)
            if now >= kill_at:
                self._say('%s did not end within %g seconds: killed' % (
                    ', '.join(process.name for process in running), self._grace))
                return failed

    def _pass_signals_on(self) -> bool:
        """Sends the signals that have come to all processes; whether there were any."""
        had_signals = bool(self._signals)
        while self._signals:
            number = self._signals.popleft()
            self._first_signal = self._first_signal or number
            self._send(number)
        return had_signals

    def _first_failed(self) -> typing.Optional[TaskProcess]:
        """The first process, by its place in the cluster, that is known to have failed."""
        for process in self._processes:
            if process.returncode:
                return process
        return None

    def _say_failed(self, failed: TaskProcess, number: int) -> None:
        """Says which process has failed, how, and what becomes of the others of start `number`."""
        code = failed.returncode
        if code >= 0:
            how = 'ended with status %d' % code
        else:
            how = 'was killed by %s' % signal.Signals(-code).name
        consequence = 'the others are ended'
        if code in _TOLD_TO_STOP:
            how += ', since the run was told to stop'
        elif number <= self._restarts:
            consequence = 'all are ended, and started again (%d of %d)' % (number, self._restarts)
        self._say('%s %s: %s' % (failed.name, how, consequence))

    def _running(self) -> typing.List[TaskProcess]:
        """The processes that have not ended, each asked."""
        return [process for process in self._processes if process.poll() is None]

    def _send(self, number: int) -> None:
        """Sends a signal to all that run; parameter servers end after the workers, see `serve`."""
        for process in self._running():
            process.send(number)

    def _show(self) -> None:
        """Writes a line that has come, or comes within a moment."""
        with contextlib.suppress(queue.Empty):
            self._put(self._lines.get(timeout=0.1))

    def _say(self, text: str) -> None:
        """Writes a line of the launcher's own."""
        self._put('[launch] ' + text)

    def _put(self, line: str) -> None:
        """Writes a line. Where nobody reads, such as a terminal that is closed, all stop, and
        save."""
        try:
            self._write(line)
        except OSError:
            self._write = lambda unread: None
            self.signal(signal.SIGHUP)

    def _end_all(self) -> None:
        """Kills all processes with their children; writes what they have said."""
        for process in self._processes:
            process.end()
        while not self._lines.empty():
            self._show()


def _die_with_parent() -> typing.Optional[typing.Callable]:
    """A function by which a process asks Linux to kill it with its parent; None elsewhere."""
    if not sys.platform.startswith('linux'):
        return None
    prctl = ctypes.CDLL(None).prctl
    set_death_signal = 1
    return lambda: prctl(set_death_signal, signal.SIGKILL, 0, 0, 0)


def main(argv: typing.List[str]) -> int:
    """Runs a launch to its end; returns the exit status."""
    options, command = parse(argv)
    processes = Processes(command, options.workers, options.ps, options.restarts, options.grace)
    for number in _SIGNALS:
        is_under_nohup = (number == signal.SIGHUP
                          and signal.getsignal(number) is signal.SIG_IGN)
        if not is_under_nohup:
            signal.signal(number, lambda received, frame: processes.signal(received))
    try:
        return processes.run()
    except ClusterError as error:
        sys.stderr.write('towers.launch: %s\n' % error)
        return 2


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
