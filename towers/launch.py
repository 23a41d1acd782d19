"""Starts a cluster on this machine: `python -m towers.launch --workers=2 --ps=1 -- train.py …`.

Each process gets a `TF_CONFIG` of its own. When one process fails, all others are ended; with
`--restarts`, all are then started again, since they meet only at the start.

Its test is tests/cluster/test_launch.py.
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
# The return codes of a process that was told to stop: by one that handles the signal and exits with
# such a status, and by one that the signal kills.
_TOLD_TO_STOP = [128 + number for number in _SIGNALS] + [-number for number in _SIGNALS]
_NEVER = float('inf')  # a time that does not come


def parse(argv: typing.List[str]) -> typing.Tuple[argparse.Namespace, typing.List[str]]:
    """Parses the arguments of a launch, without the program's name.

    Returns:
      `(options, command)`: the launcher's options, and the program to start with its arguments.
    """
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
    """One process of the cluster, in its own process group, so that its children get its signals;
    its lines of output go to a queue.

    On Linux it is killed when its parent ends.

    Attributes:
      name: such as `'worker 0'`.
      serves: whether it is a parameter server, which never ends by itself.
    """

    def __init__(self, command: typing.List[str], cluster: dict, job: str, index: int,
                 lines: queue.Queue):
        """Starts the process.

        Args:
          command: the program and its arguments.
          cluster: dict from jobs to their addresses, for `TF_CONFIG`.
          job, index: the job of this process, and its index in that.
          lines: the queue that gets the output, line by line.

        Raises:
          ClusterError: the program cannot be started.
        """
        self.name = '%s %d' % (job, index)
        self.serves = job == 'ps'
        config = json.dumps({'cluster': cluster, 'task': {'type': job, 'index': index}})
        environment = dict(os.environ)
        environment.setdefault('PYTHONUNBUFFERED', '1')  # lines come when they are printed
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
        """Puts the lines of a pipe into the queue until the pipe ends.

        Of a line that was written over, as by a progress bar, it takes the last version.
        """
        for line in iter(pipe.readline, b''):
            text = line.decode('utf-8', 'replace').rstrip('\n')
            last_version = text.rpartition('\r')[2]
            lines.put('[%s] %s' % (self.name, last_version))

    def send(self, number: int) -> None:
        """Sends a signal to its process group; a group that is gone is no error."""
        # A group of zombies gives a PermissionError on some systems.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def end(self) -> None:
        """Kills the process with its children; returns when its output has ended."""
        self.send(signal.SIGKILL)
        self.wait()
        # Not for ever: a child in a process group of its own is not killed, and may keep the pipe
        # open.
        self._reader.join(2.)


class Processes:
    """All processes of a cluster; `run` returns when they have ended."""

    def __init__(self, command: typing.List[str], workers: int, ps: int = 0, restarts: int = 0,
                 grace: float = 30.,
                 write: typing.Callable = functools.partial(print, flush=True)):
        """
        Args:
          command: the program of each process, and its arguments.
          workers, ps, restarts, grace: the options of the command line of these names.
          write: called with each line of output.
        """
        self._command = command
        self._num_workers = workers
        self._num_servers = ps
        self._restarts = restarts
        self._grace = grace
        self._write = write
        self._lines: queue.Queue = queue.Queue()
        self._signals: typing.Deque[int] = collections.deque()  # those not passed on yet
        self._first_signal: typing.Optional[int] = None
        self._processes: typing.List[TaskProcess] = []

    def signal(self, number: int) -> None:
        """Notes a signal, which `run` then passes on to all processes; for a signal handler."""
        self._signals.append(number)

    def run(self) -> int:
        """Starts all processes, again after a failure if that is allowed, and waits for their end.

        Returns:
          The exit status of the launch: 0; the status of the process that failed first; or 128 plus
          the number of a signal that ended this process, or that was passed on.
        """
        try:
            num_starts = 0
            while True:
                num_starts += 1
                self._start()
                failed = self._wait(num_starts)
                if self._first_signal is not None:
                    return 128 + self._first_signal
                if failed is None:
                    return 0
                code = failed.returncode
                may_start_again = num_starts <= self._restarts
                if code in _TOLD_TO_STOP or not may_start_again:
                    return _exit_status(code)
                self._end_all()
        finally:
            self._end_all()

    def _start(self) -> None:
        """Starts all processes, on other ports each time: former processes may still hold theirs.
        """
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

    def _wait(self, num_starts: int) -> typing.Optional[TaskProcess]:
        """Waits until all workers have ended, or until they had enough time to end after a failure
        or a signal.

        After a failure the others get `grace` seconds to end by themselves, then SIGTERM and as
        many seconds again. After a signal, which was passed on, they get `grace` seconds.

        Args:
          num_starts: how often the processes have been started, this time included.

        Returns:
          The process that failed first; None where none failed.
        """
        failed = None
        terminate_at = _NEVER  # when to send SIGTERM to those that have not ended
        kill_at = _NEVER  # when to give up waiting: `run` kills them
        while True:
            self._show()  # waits up to 0.1 seconds
            now = time.monotonic()
            had_signals = self._pass_signals_on()
            if had_signals:
                kill_at = min(kill_at, now + self._grace)
            running_workers = self._running_workers()
            if failed is None:
                failed = self._failed_without_signal()
                if failed is not None:
                    terminate_at = now + self._grace
                    self._say_failed(failed, num_starts)
            if not running_workers:
                return failed
            if now >= terminate_at:
                terminate_at = _NEVER  # it is sent once
                kill_at = now + self._grace
                self._send(signal.SIGTERM)
            if now >= kill_at:
                self._say('%s did not end within %g seconds: killed' % (
                    ', '.join(process.name for process in running_workers), self._grace))
                return failed

    def _pass_signals_on(self) -> bool:
        """Sends the noted signals to all processes; returns whether there were any."""
        had_signals = bool(self._signals)
        while self._signals:
            number = self._signals.popleft()
            self._first_signal = self._first_signal or number
            self._send(number)
        return had_signals

    def _running_workers(self) -> typing.List[TaskProcess]:
        """The workers that have not ended, as `_running` tells."""
        return [process for process in self._running() if not process.serves]

    def _failed_without_signal(self) -> typing.Optional[TaskProcess]:
        """The first process of the cluster's list that has failed, or None. After a signal no
        process counts as failed: it ends since it was told to.

        It goes by the return codes that `_running` has found. A process that has ended since then
        is found in the next round.
        """
        if self._first_signal is not None:
            return None
        for process in self._processes:
            if process.returncode:  # neither None, of a running process, nor 0
                return process
        return None

    def _say_failed(self, failed: TaskProcess, num_starts: int) -> None:
        """Says which process has failed, how, and what becomes of the others.

        `num_starts` is how often the processes have been started.
        """
        code = failed.returncode
        if code >= 0:
            how = 'ended with status %d' % code
        else:
            how = 'was killed by %s' % signal.Signals(-code).name
        consequence = 'the others are ended'
        if code in _TOLD_TO_STOP:
            how += ', since the run was told to stop'
        elif num_starts <= self._restarts:
            consequence = 'all are ended, and started again (%d of %d)' % (
                num_starts, self._restarts)
        self._say('%s %s: %s' % (failed.name, how, consequence))

    def _running(self) -> typing.List[TaskProcess]:
        """The processes that have not ended; asks each of them, which sets its `returncode`."""
        return [process for process in self._processes if process.poll() is None]

    def _send(self, number: int) -> None:
        """Sends a signal to all running processes; a parameter server ends after the workers, see
        `serve`."""
        for process in self._running():
            process.send(number)

    def _show(self) -> None:
        """Writes the next line of output; waits a moment for it if there is none."""
        with contextlib.suppress(queue.Empty):
            self._put(self._lines.get(timeout=0.1))

    def _say(self, text: str) -> None:
        """Writes a line of the launcher's own."""
        self._put('[launch] ' + text)

    def _put(self, line: str) -> None:
        """Writes a line. If nobody can read it, as on a closed terminal, all processes are told to
        stop."""
        try:
            self._write(line)
        except OSError:
            self._write = lambda unread: None
            self.signal(signal.SIGHUP)  # as a terminal does that is closed

    def _end_all(self) -> None:
        """Kills all processes with their children, and writes the rest of their output."""
        for process in self._processes:
            process.end()
        while not self._lines.empty():
            self._show()


def _exit_status(code: int) -> int:
    """The exit status, as a shell has it, for the return code of a process: Python gives a process
    that a signal has killed the negative number of the signal."""
    was_killed = code < 0
    return 128 - code if was_killed else code


def _die_with_parent() -> typing.Optional[typing.Callable]:
    """A function with which a process asks Linux to kill it when its parent ends; None on other
    systems."""
    if not sys.platform.startswith('linux'):
        return None
    prctl = ctypes.CDLL(None).prctl
    set_death_signal = 1  # PR_SET_PDEATHSIG of <sys/prctl.h>
    return lambda: prctl(set_death_signal, signal.SIGKILL, 0, 0, 0)


def main(argv: typing.List[str]) -> int:
    """Runs a launch to its end; returns the exit status."""
    options, command = parse(argv)
    processes = Processes(command, options.workers, options.ps, options.restarts, options.grace)
    for number in _SIGNALS:
        # `nohup` starts a program with the signal of a closed terminal ignored: that stays so.
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
