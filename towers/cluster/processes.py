"""The processes of a cluster on one machine: started, listened to, and ended together."""

import collections
import ctypes
import os
import queue
import signal
import subprocess
import sys
import threading
import time

from towers.errors import ClusterError

Task = collections.namedtuple('Task', 'job index command environment')
"""What to start: `command` a list of strings, `environment` a dict."""

_PR_SET_PDEATHSIG = 1
_TOLD = tuple(128 + number for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
_LAST = ('ps',)  # jobs that never end by themselves: they are ended after all others


class TaskProcess:
    """One process, in a process group of its own, whose lines go to a queue.

    On Linux the kernel kills it when the process that started it ends, for whatever reason.

    Attributes:
      name: such as `'worker 0'`.
      task: the `Task`.
      restarts_left: how often it may be started again.
    """

    def __init__(self, task, lines, restarts):
        self.name = '%s %d' % (task.job, task.index)
        self.task = task
        self.restarts_left = restarts
        self._lines = lines
        self.start()

    def start(self):
        """Starts it, or starts it again.

        Raises:
          ClusterError: the program does not exist, or cannot be run.
        """
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
                self.task.command, env=self.task.environment, stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, preexec_fn=before_exec)
        except OSError as error:
            raise ClusterError('%s cannot be started: %s: %s' % (
                self.name, self.task.command[0], error.strerror)) from None
        self._reader = threading.Thread(target=self._read, args=(self._process.stdout,),
                                        daemon=True)
        self._reader.start()

    @property
    def pid(self):
        """The number of the process."""
        return self._process.pid

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
        """Waits for the end of the process, which was killed."""
        self._process.wait()

    def finish(self):
        """Waits for the end of its output."""
        self._reader.join(2.)

    def _read(self, stream):
        with stream:
            for line in iter(stream.readline, b''):
                text = line.decode('utf-8', 'replace').rstrip('\n')
                self._lines.put((self, text.rpartition('\r')[2]))


class Processes:
    """All processes of a cluster; `run` returns when they have ended."""

    def __init__(self, tasks, restarts=0, linger=5., grace=30., write=None, announce=False,
                 again=None):
        """
        Args:
          tasks: list of `Task`s.
          restarts: how often each process that fails is started again; with `again`, how often all
            are. None is when one ends with the status of SIGTERM, SIGINT or SIGHUP (143, 130, 129):
            it was told to stop, and has ended in good order.
          linger: seconds between the failure of one process and SIGTERM to the others, in which
            the others can notice the failure and say so themselves; `grace`, if that is longer,
            where it was told to stop.
          grace: seconds from SIGTERM to SIGKILL.
          write: called with each line of output, prefixed; None for standard output.
          announce: whether to write the number of each process that is started.
          again: function without arguments that returns the tasks to start all again with when one
            has failed, for processes that cannot go on without it. None: the one that has failed is
            started again.
        """
        self._announce = announce
        self._tasks, self._restarts = tasks, restarts
        self._again, self._restarts_left = again, 0 if again is None else restarts
        self._linger, self._grace = linger, grace
        self._write = write or _write_line
        self._lines = queue.Queue()
        self._signals = collections.deque()
        self._signalled = None
        self._processes = []
        self._failed = self._terminate_at = self._kill_at = None

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
            self._start_all()
            status = self._wait()
        finally:
            self._kill_all()
        if status and self._restarts and self._signalled is None:
            self._say('the restarts are used up (--restarts=%d): the status is %d' % (
                self._restarts, status))
        return status

    def _start_all(self):
        for task in self._tasks:
            self._processes.append(TaskProcess(task, self._lines, self._restarts))
            self._started(self._processes[-1])

    def _wait(self):
        while True:
            self._show()
            now = time.monotonic()
            self._pass_signals_on(now)
            # Asked once a round: what ends meanwhile still counts as running, so that no failure
            # is passed over because nothing runs any more.
            status = {process: process.status() for process in self._processes}
            self._look_for_failures(status, now)
            working = [process for process in status if process.task.job not in _LAST]
            running = [process for process in working if status[process] is None]
            if not running:
                if self._failed is None or self._signalled is not None or not self._restarts_left:
                    break
                self._start_all_again()
                continue
            self._end_late_ones(running, now)
        if self._failed is not None:
            return status[self._failed]
        if self._signalled is not None:
            return 128 + self._signalled
        return max([status[process] for process in working] or [0])

    def _pass_signals_on(self, now):
        while self._signals:
            number = self._signals.popleft()
            self._signalled = self._signalled or number
            self._send_to_workers(number)
            self._kill_at = self._kill_at or now + self._grace

    def _look_for_failures(self, status, now):
        """Starts what has failed again, or notes the first failure.

        Args:
          status: dict from processes to their status; None for what is started again here.
        """
        for process in self._processes:
            if not status[process] or self._failed is not None or self._signalled is not None:
                continue
            told = process.was_told()
            if process.restarts_left and self._again is None and not told:
                process.finish()
                process.restarts_left -= 1
                self._say('%s %s: it is started again' % (process.name, process.ending()))
                process.start()
                self._started(process)
                status[process] = None
                continue
            self._failed, self._terminate_at = process, now + self._linger
            consequence = ': the others are ended'
            if told:  # nobody wants the run to go on, and the others have to save
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

    def _start_all_again(self):
        """Starts all in new processes; none of the former ones runs any more."""
        self._restarts_left -= 1
        self._end_groups()
        self._failed = self._terminate_at = self._kill_at = None
        self._tasks, self._processes = self._again(), []
        self._start_all()

    def _running(self):
        return [process for process in self._processes if process.status() is None]

    def _show(self, wait=0.1):
        """Writes a line that has come; waits for one for a moment."""
        try:
            process, line = self._lines.get(timeout=wait)
        except queue.Empty:
            return
        self._write('[%s] %s' % (process.name, line))

    def _started(self, process):
        if self._announce:
            self._say('%s is process %d' % (process.name, process.pid))

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
            process.finish()
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
