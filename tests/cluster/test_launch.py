"""The launcher: real processes, without TensorFlow in them."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from towers import launch
from towers.cluster.processes import Processes
from towers.errors import ClusterError


def run(code, workers=2, ps=0, **options):
    """`(status, lines)` of a cluster whose processes all run this code."""
    lines = []
    head = ("import json, os, signal, sys, time\n"
            "task = json.loads(os.environ['TF_CONFIG'])['task']\n"
            "me = task['type'], task['index']\n")
    tasks = launch.tasks_of(workers, ps, [sys.executable, '-S', '-c', head + code])
    processes = Processes(tasks, write=lines.append, **options)
    return processes.run(), lines


def is_running(pid):
    """Whether there is such a process that is no zombie."""
    try:
        with open('/proc/%d/stat' % pid) as stat:
            return stat.read().rpartition(')')[2].split()[0] != 'Z'
    except FileNotFoundError:
        return False


def wait_until(condition, seconds=60):
    deadline = time.time() + seconds
    while not condition():
        assert time.time() < deadline
        time.sleep(0.02)


def test_each_process_gets_the_cluster_and_its_own_place_in_it():
    tasks = launch.tasks_of(2, 1, ['true'], environment={})
    configs = [json.loads(task.environment['TF_CONFIG']) for task in tasks]
    assert [config['task'] for config in configs] == [
        {'type': 'worker', 'index': 0}, {'type': 'worker', 'index': 1}, {'type': 'ps', 'index': 0}]
    assert all(config['cluster'] == configs[0]['cluster'] for config in configs)
    addresses = sum(configs[0]['cluster'].values(), [])
    assert len(set(addresses)) == 3 and all(each.startswith('127.0.0.1:') for each in addresses)


@pytest.mark.parametrize('environment, expected', [({}, '1'), ({'PYTHONUNBUFFERED': ''}, '')])
def test_lines_are_written_at_once_where_the_environment_does_not_say_otherwise(
        environment, expected):
    task, = launch.tasks_of(1, 0, ['true'], environment=environment)
    assert task.environment['PYTHONUNBUFFERED'] == expected


def test_output_is_prefixed_and_the_status_is_zero():
    status, lines = run("print('I am', *me)")
    assert status == 0
    assert sorted(lines) == ['[worker 0] I am worker 0', '[worker 1] I am worker 1']


def test_a_parameter_server_ends_when_the_workers_have():
    status, lines = run("print(os.getpid(), flush=True)\nif me[0] == 'ps': time.sleep(600)", ps=1)
    assert status == 0
    assert not any(is_running(int(line.split()[-1])) for line in lines)


def test_one_that_fails_ends_the_others_and_gives_the_status():
    status, lines = run("print(os.getpid(), flush=True)\n"
                        "if me[1] == 1: sys.exit(7)\ntime.sleep(600)", workers=3, linger=0.)
    assert status == 7
    assert '[launch] worker 1 ended with status 7: the others are ended' in lines
    assert not any(is_running(int(line.split()[-1])) for line in lines if 'launch' not in line)


def test_one_that_is_killed_gives_128_and_the_signal():
    status, lines = run("if me[1] == 1: os.kill(os.getpid(), 9)\ntime.sleep(600)", linger=0.)
    assert status == 137
    assert '[launch] worker 1 was killed by SIGKILL: the others are ended' in lines


@pytest.mark.slow
@pytest.mark.version_independent
def test_one_that_does_not_end_is_killed_with_what_it_has_started():
    status, lines = run(
        "import subprocess\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "if me[1] == 1: sys.exit(1)\n"
        "print(subprocess.Popen(['sleep', '600']).pid, flush=True)\ntime.sleep(600)",
        linger=1., grace=0.5)
    assert status == 1
    assert '[launch] worker 0 did not end within 0.5 seconds: killed' in lines
    sleeper = [int(line.split()[-1]) for line in lines if line.startswith('[worker 0]')]
    assert len(sleeper) == 1
    wait_until(lambda: not is_running(sleeper[0]), 10)


def test_one_that_fails_is_started_again_if_asked_for(tmp_path):
    code = ("path = %r\nif me[1] == 1 and not os.path.exists(path): open(path, 'w'); sys.exit(3)\n"
            "while not os.path.exists(path): time.sleep(0.02)\nprint('well')" % str(tmp_path / 'x'))
    status, lines = run(code, restarts=1)
    assert status == 0
    assert '[launch] worker 1 ended with status 3: it is started again' in lines
    assert sorted(line for line in lines if 'well' in line) == [
        '[worker 0] well', '[worker 1] well']


def test_a_program_that_does_not_exist_is_an_error():
    with pytest.raises(ClusterError, match='worker 0 cannot be started: /no/such: No such file'):
        Processes(launch.tasks_of(1, 0, ['/no/such'])).run()


@pytest.mark.parametrize('argv, expected', [
    (['--workers=2'], 'nothing to start'), (['--workers=0', '--', 'true'], 'at least 1'),
    (['--', 'no-such-program'], 'no-such-program is no program'),
    (['--linger=-1', '--', 'true'], "'-1' is no number of seconds"),
    (['--linger=nan', '--', 'true'], "'nan' is no number of seconds"),
    (['--grace=x', '--', 'true'], "'x' is no number of seconds")])
def test_what_makes_no_sense_is_one_line(argv, expected, capsys):
    with pytest.raises(SystemExit) as ended:
        launch.parse(argv)
    assert ended.value.code == 2
    assert expected in capsys.readouterr().err


def test_a_host_that_is_not_here_is_one_line(capsys):
    assert launch.main(['--host=nowhere.invalid', '--', 'true']) == 2
    line, = capsys.readouterr().err.splitlines()
    assert line.startswith('towers.launch: ') and 'nowhere.invalid' in line


def test_python_files_and_modules_are_run_by_this_python():
    assert launch.parse(['--', 'train.py', '--x'])[1] == [sys.executable, 'train.py', '--x']
    assert launch.parse(['--', '-m', 'this'])[1] == [sys.executable, '-m', 'this']
    assert launch.parse(['--', 'true', '-x'])[1] == ['true', '-x']


@pytest.mark.slow
@pytest.mark.version_independent
@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGKILL])
def test_signals_to_the_launcher(number, tmp_path):
    code = ("import os, signal, sys, time\n"
            "def end(number, frame): print('told', flush=True); sys.exit(0)\n"
            "signal.signal(signal.SIGTERM, end)\n"
            "print('pid', os.getpid(), flush=True)\ntime.sleep(600)")
    with open(str(tmp_path / 'output'), 'w+') as output:
        launcher = subprocess.Popen(
            [sys.executable, '-m', 'towers.launch', '--workers=2', '--', sys.executable, '-S', '-c',
             code], stdout=output, cwd=os.path.dirname(os.path.dirname(launch.__file__)))
        written = (tmp_path / 'output').read_text
        wait_until(lambda: written().count('pid') == 2)
        launcher.send_signal(number)
        assert launcher.wait(60) == (143 if number == signal.SIGTERM else -9)
    pids = [int(line.split()[-1]) for line in written().splitlines() if 'pid' in line]
    wait_until(lambda: not any(is_running(pid) for pid in pids), 10)
    assert written().count('told') == (2 if number == signal.SIGTERM else 0)
