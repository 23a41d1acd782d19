"""Starts a cluster on this machine: `python -m towers.launch --workers=2 --ps=1 -- train.py …`.

Each process gets a `TF_CONFIG` of its own. When one process fails, all others are ended; with
`--restarts`, all are then started again, since the workers of a ring meet only at the start.
Parameter servers let a worker join again, so with `--ps` only the one that has failed is started.
"""

import argparse
import json
import os
import signal
import shutil
import sys

from towers.cluster.ports import free_ports
from towers.cluster.processes import Processes, Task
from towers.errors import ClusterError


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
                        'again when one fails; with --ps, how often each process that fails is (0)')
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


def main(argv):
    """Runs a launch to its end; returns the exit status."""
    options, command = parse(argv)

    def tasks():
        return tasks_of(options.workers, options.ps, command, options.host)
    try:
        first = tasks()
    except ClusterError as error:
        sys.stderr.write('towers.launch: %s\n' % error)
        return 2
    # All again on new ports: what was left of the former processes may still hold theirs.
    processes = Processes(first, options.restarts, options.linger, options.grace, announce=True,
                          again=None if options.ps else tasks)
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
