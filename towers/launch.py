"""Starts a cluster on this machine: `python -m towers.launch --workers=2 --ps=1 -- train.py …`.

Each process gets a `TF_CONFIG` of its own. When one process fails, all others are ended; with
`--restarts`, all are then started again, since they meet only at the start.
"""

import argparse
import collections
import ctypes
import json
import os
import queue
import signal
import shutil
import subprocess
import sys
import threading
import time

from towers.cluster.ports import free_ports
from towers.errors import ClusterError

Task = collections.namedtuple('Task', 'job index command environment')
"""What to start: `command` a list of strings, `environment` a dict."""


def parse(argv):
    """The options and the command of a launch.

    Args:
      argv: list of strings, without the program's name.

    Returns:
      `(options, command)`.
    """
    parser = argparse.ArgumentParser(
        prog='python -m towers.launch', description='Starts a cluster on this machine, with a '
        'TF_CONFIG for each process, and ends all of it when one process fails.')
    parser.add_argument('--workers', type=_count(1), default=2, help='workers, the first of which '
                        'is the chief (2)')
    parser.add_argument('--ps', type=_count(0), default=0, help='parameter servers (0)')
    parser.add_argument('--host', default='127.0.0.1', help='address of all (127.0.0.1)')
    parser.add_argument('--restarts', type=_count(0), default=0, help='how often all are started '
                        'again when one fails (0)')
    parser.add_argument('--linger', type=_seconds, default=5., help='seconds in which the others '
                        'can notice that one has failed, before they are told to end (5)')
    parser.add_argument('--grace', type=_seconds, default=30., help='seconds from SIGTERM to '
                        'SIGKILL (30)')
    parser.add_argument('command', nargs=argparse.REMAINDER, help='-- program and its arguments; a '
                        '.py file, or -m and a module, is run by this Python')
    options = parser.parse_args(argv)
    command = options.command[1:] if options.command[:1] == ['--'] else options.command
    if not command:
        parser.error('there is nothing to start: add -- and a program, such as -- train.py '
                     '--cluster=ring')
    if command[0].endswith('.py') or command[0] == '-m':
        command = [sys.executable] + command
    elif shutil.which(command[0]) is None:
        parser.error('%s is no program that can be run' % command[0])
    return options, command


def tasks_of(workers, ps, command, host='127.0.0.1', environment=None):
    """The `Task`s of a cluster on this machine, on ports that are free.

    Args:
      workers, ps: number of workers, number of parameter servers.
      command: list of strings.
      host: the host in all addresses.
      environment: dict of the tasks' environment variables; None for this process's.

    Returns:
      List of `Task`, workers first.
    """
    ports = iter(free_ports(workers + ps, host))
    cluster = {'worker': ['%s:%d' % (host, next(ports)) for _ in range(workers)]}
    if ps:
        cluster['ps'] = ['%s:%d' % (host, next(ports)) for _ in range(ps)]
    tasks = []
    for job in ('worker', 'ps'):
        for index in range(len(cluster.get(job, ()))):
            own = dict(os.environ if environment is None else environment)
            own['TF_CONFIG'] = json.dumps({'cluster': cluster,
                                           'task': {'type': job, 'index': index}})
            own.setdefault('PYTHONUNBUFFERED', '1')
            tasks.append(Task(job, index, list(command), own))
    return tasks


def _count(least):
    def number(text):
        if not text.isdigit() or int(text) < least:
            raise argparse.ArgumentTypeError('%r is no whole number of at least %d' % (text, least))
        return int(text)
    return number


def _seconds(text):
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.
    if not 0. <= seconds < float('inf'):
        raise argparse.ArgumentTypeError('%r is no number of seconds' % text)
    return seconds


_PR_SET_PDEATHSIG = 1
_TOLD = tuple(128 + number for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
_LAST = ('ps',)  # jobs that never end by themselves: they are ended after all others


class TaskProcess:
    """One process, in a process group of its own, whose lines go to a queue.

    On Linux the kernel kills it when the process that started it ends, for whatever reason.

    Attributes:
      name: such as `'worker 0'`.
      task: the `Task`.
      pid: the number of the process.
    """

    def __init__(self, task, lines):
        """Starts it.

        Raises:
          ClusterError: the program does not exist, or cannot be run.
        """
        self.name, self.task, self._lines = '%s %d' % (task.job, task.index), task, lines
        parent, die_with = os.getpid(), _die_with_parent()

        def before_exec():
            os.setpgid(0, 0)
            # A signal that this process ignores, its children would ignore, too.
            for number in (signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_DFL)
            if die_with is not None:
                die_with()
                if os.getppid() != parent:  # the parent ended before the kernel was asked
                    os._exit(1)
        try:
            self._process = subprocess.Popen(
                task.command, env=task.environment, stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, preexec_fn=before_exec)
        except OSError as error:
            raise ClusterError('%s cannot be started: %s: %s' % (
                self.name, task.command[0], error.strerror)) from None
        self.pid = self._process.pid
        self._reader = threading.Thread(target=self._read, args=(self._process.stdout,),
                                        daemon=True)
        self._reader.start()

    def status(self):
        """None while it runs; then its exit status, or 128 plus the number of the ending signal."""
        code = self._process.poll()
        return code if code is None or code >= 0 else 128 - code

    def ending(self):
        """How it ended, in words."""
        code = self._process.poll()
        return 'ended with status %d' % code if code >= 0 else (
            'was killed by %s' % signal.Signals(-code).name)

    def was_told(self):
        """Whether it has ended in good order since a signal told it to, as its status says."""
        return self._process.poll() in _TOLD

    def send(self, number):
        """Sends a signal to its process group; a group that is gone is no error."""
        try:
            os.killpg(self._process.pid, number)
        except (ProcessLookupError, PermissionError):  # PermissionError: nothing but a zombie
            pass

    def wait(self):
        """Waits for the end of the process, which was killed, and of its output."""
        self._process.wait()
        self._reader.join(2.)

    def _read(self, stream):
        with stream:
            for line in iter(stream.readline, b''):
                text = line.decode('utf-8', 'replace').rstrip('\n')
                self._lines.put((self, text.rpartition('\r')[2]))


class Processes:
    """All processes of a cluster; `run` returns when they have ended."""

    def __init__(self, make_tasks, restarts=0, linger=5., grace=30., write=None, announce=False):
        """
        Args:
          make_tasks: function that returns the list of `Task`s to start.
          restarts: how often all are started again when one has failed. They are not when one ends
            with the status of SIGTERM, SIGINT or SIGHUP (143, 130, 129): it was told to stop, and
            has ended in good order.
          linger: seconds between the failure of one process and SIGTERM to the others, in which
            the others can notice the failure and say so themselves; `grace`, if that is longer,
            where it was told to stop.
          grace: seconds from SIGTERM to SIGKILL.
          write: called with each line of output, prefixed; None for standard output.
          announce: whether to write the number of each process that is started.
        """
        self._make_tasks, self._restarts, self._restarts_left = make_tasks, restarts, restarts
        self._linger, self._grace, self._announce = linger, grace, announce
        self._write = write or _write_line
        self._lines, self._signals = queue.Queue(), collections.deque()
        self._processes = []
        self._signalled = self._failed = self._terminate_at = self._kill_at = None

    def signal(self, number):
        """Has a signal passed on to all; may be called from a signal handler."""
        self._signals.append(number)

    def run(self):
        """Starts all, and waits for the end of all.

        Returns:
          0 if all have ended with 0; the status of the process that failed first, after the last
          start (128 plus a signal's number); or 128 plus the number of the signal that was passed
          on.

        Raises:
          ClusterError: a process cannot be started; the others are ended.
        """
        try:
            while True:
                self._start_all()
                status = self._wait()
                if self._failed is None or self._signalled is not None or not self._restarts_left:
                    break
                self._restarts_left -= 1
                self._end_groups()
        finally:
            self._kill_all()
        if status and self._restarts and self._signalled is None:
            self._say('the restarts are used up (--restarts=%d): the status is %d' % (
                self._restarts, status))
        return status

    def _start_all(self):
        self._failed = self._terminate_at = self._kill_at = None
        self._processes = []
        for task in self._make_tasks():
            self._processes.append(TaskProcess(task, self._lines))
            if self._announce:
                self._say('%s is process %d' % (self._processes[-1].name, self._processes[-1].pid))

    def _wait(self):
        """Waits for the end of all but servers; returns the status."""
        while True:
            self._show()
            now = time.monotonic()
            while self._signals:
                number = self._signals.popleft()
                self._signalled = self._signalled or number
                self._send_to_workers(number)
                self._kill_at = self._kill_at or now + self._grace
            # Asked once a round: what ends meanwhile still counts as running, so that no failure
            # is passed over because nothing runs any more.
            status = {process: process.status() for process in self._processes}
            failed = [process for process in self._processes if status[process]]
            if failed and self._failed is None and self._signalled is None:
                self._note_failure(failed[0], now)
            working = [process for process in status if process.task.job not in _LAST]
            running = [process for process in working if status[process] is None]
            if not running:
                break
            self._end_late_ones(running, now)
        if self._failed is not None:
            return status[self._failed]
        if self._signalled is not None:
            return 128 + self._signalled
        return max([status[process] for process in working] or [0])

    def _note_failure(self, process, now):
        """Has the others ended after some time."""
        self._failed, self._terminate_at = process, now + self._linger
        consequence = ': the others are ended'
        if process.was_told():  # nobody wants the run to go on, and the others have to save
            self._restarts = self._restarts_left = 0
            self._terminate_at = now + max(self._linger, self._grace)
            consequence = ', since the run was told to stop' + consequence
        elif self._restarts_left:
            consequence = ': all are ended, and started again (%d of %d)' % (
                self._restarts - self._restarts_left + 1, self._restarts)
        self._say('%s %s%s' % (process.name, process.ending(), consequence))

    def _end_late_ones(self, running, now):
        """Sends SIGTERM, and later SIGKILL, to what runs on when another has failed."""
        if self._terminate_at is not None and now >= self._terminate_at:
            self._terminate_at, self._kill_at = None, now + self._grace
            self._send_to_workers(signal.SIGTERM)
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_at = float('inf')
            self._say('%s did not end within %g seconds: killed' % (
                ', '.join(process.name for process in running), self._grace))
            for process in running:
                process.send(signal.SIGKILL)

    def _send_to_workers(self, number):
        # A server ends after the workers: they need it to save, and to say why they end.
        running = self._running()
        for process in [each for each in running if each.task.job not in _LAST] or running:
            process.send(number)

    def _running(self):
        return [process for process in self._processes if process.status() is None]

    def _show(self, wait=0.1):
        """Writes a line that has come; waits for one for a moment."""
        try:
            process, line = self._lines.get(timeout=wait)
        except queue.Empty:
            return
        self._write('[%s] %s' % (process.name, line))

    def _say(self, text):
        self._write('[launch] ' + text)

    def _kill_all(self):
        """Ends all running processes: by SIGTERM, and 3 s later by SIGKILL, with their children."""
        for process in self._running():
            process.send(signal.SIGTERM)
        deadline = time.monotonic() + 3.
        while self._running() and time.monotonic() < deadline:
            time.sleep(0.02)
        self._end_groups()

    def _end_groups(self):
        """Kills what is left of all processes and their children; writes what they have said."""
        for process in self._processes:
            process.send(signal.SIGKILL)  # the group: also what a process left behind
        for process in self._processes:
            process.wait()
        while not self._lines.empty():
            self._show()


def _die_with_parent():
    """A function by which a process asks the kernel to kill it with its parent.

    None on systems other than Linux.
    """
    if not sys.platform.startswith('linux'):
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    return lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _write_line(line):
    sys.stdout.write(line + '\n')
    sys.stdout.flush()


def main(argv):
    """Runs a launch to its end; returns the exit status."""
    options, command = parse(argv)

    def tasks():
        return tasks_of(options.workers, options.ps, command, options.host)
    # All again on new ports: what was left of the former processes may still hold theirs.
    processes = Processes(tasks, options.restarts, options.linger, options.grace, announce=True)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            signal.signal(number, lambda received, frame: processes.signal(received))
    try:
        return processes.run()
    except ClusterError as error:
        sys.stderr.write('towers.launch: %s\n' % error)
        return 2
    except (BrokenPipeError, OSError) as error:  # nobody reads; `run` has ended all processes
        sys.stderr.write('towers.launch: standard output is lost: %s\n' % error)
        return 1


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
