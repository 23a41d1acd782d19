"""The launcher: real processes, without TensorFlow in them."""

import json
import signal
import sys

import pytest

from cluster_runs import Launch, is_running, wait_until
from towers import launch
from towers.launch import Processes
from towers.errors import ClusterError

HEAD = ("import json, os, signal, sys, time\n"
        "task = json.loads(os.environ['TF_CONFIG'])['task']\n"
        "me = task['type'], task['index']\n")


def run(code, workers=2, ps=0, **options):
    """`(status, lines)` of a cluster whose processes all run this code."""
    lines, command = [], [sys.executable, '-S', '-c', HEAD + code]
    status = Processes(command, workers, ps, write=lines.append, **options).run()
    assert sum(' is process ' in line for line in lines) % (workers + ps) == 0
    return status, [line for line in lines if ' is process ' not in line]


@pytest.mark.slow
def test_each_process_gets_the_cluster_and_its_own_place_in_it():
    status, lines = run("print(os.environ['TF_CONFIG'])\n"
                        "while me[0] == 'ps': time.sleep(1)", ps=1)
    assert status == 0
    configs = {line[:10]: json.loads(line[11:]) for line in lines if line.startswith('[worker')}
    assert {name: config['task'] for name, config in configs.items()} == {
        '[worker 0]': {'type': 'worker', 'index': 0}, '[worker 1]': {'type': 'worker', 'index': 1}}
    cluster = configs['[worker 0]']['cluster']
    assert configs['[worker 1]']['cluster'] == cluster
    assert {job: len(tasks) for job, tasks in cluster.items()} == {'worker': 2, 'ps': 1}
    addresses = sum(cluster.values(), [])
    assert len(set(addresses)) == 3 and all(each.startswith('127.0.0.1:') for each in addresses)


@pytest.mark.slow
def test_one_that_fails_ends_the_others_and_gives_the_status():
    status, lines = run("print(os.getpid(), flush=True)\n"
                        "if me[1] == 1: sys.exit(7)\ntime.sleep(600)", workers=3, grace=.5)
    assert status == 7
    assert '[launch] worker 1 ended with status 7: the others are ended' in lines
    assert not any(is_running(int(line.split()[-1])) for line in lines if 'launch' not in line)


@pytest.mark.slow
def test_one_that_does_not_end_is_killed_with_what_it_has_started():
    status, lines = run(
        "import subprocess\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "if me[1] == 1: sys.exit(1)\n"
        "print(subprocess.Popen(['sleep', '600']).pid, flush=True)\ntime.sleep(600)",
        grace=1.)
    assert status == 1
    assert '[launch] worker 0 did not end within 1 seconds: killed' in lines
    sleeper = [int(line.split()[-1]) for line in lines if line.startswith('[worker 0]')]
    assert len(sleeper) == 1
    wait_until(lambda: not is_running(sleeper[0]), 10)


FAILS_ONCE = ("path = %r\n"
              "if me[1] == 1 and not os.path.exists(path): open(path, 'w'); sys.exit(3)\n"
              "while not os.path.exists(path): time.sleep(0.02)\nprint('well')")


@pytest.mark.slow
@pytest.mark.parametrize('ends, how', [
    ('sys.exit(143)', 'ended with status 143'),
    ('os.kill(os.getpid(), signal.SIGTERM)', 'was killed by SIGTERM')])
def test_none_is_started_again_when_one_was_told_to_stop(ends, how):
    assert run("time.sleep(.6 - .6 * me[1])\n" + ends, restarts=3) == (143, [
        '[launch] worker 1 %s, since the run was told to stop: the others are ended' % how])


@pytest.mark.slow
def test_all_are_started_again_when_one_fails(tmp_path):
    """The one that ended well does its part once more, and the ports are others."""
    status, lines = run("print(os.environ['TF_CONFIG'])\n" + FAILS_ONCE % str(tmp_path / 'x'),
                        restarts=1)
    assert status == 0
    assert '[launch] worker 1 ended with status 3: all are ended, and started again (1 of 1)' in (
        lines)
    assert lines.count('[worker 0] well') == 2 and lines.count('[worker 1] well') == 1
    assert len({line for line in lines if '"cluster"' in line}) == 4


def test_a_program_that_does_not_exist_is_an_error():
    with pytest.raises(ClusterError, match='worker 0 cannot be started: /no/such: No such file'):
        Processes(['/no/such'], 1).run()


@pytest.mark.parametrize('argv, expected', [
    (['--workers=2'], 'nothing to start'), (['--workers=0', '--', 'true'], 'at least 1'),
    (['--grace=x', '--', 'true'], "--grace: invalid int value: 'x'")])
def test_what_makes_no_sense_is_one_line(argv, expected, capsys):
    with pytest.raises(SystemExit) as ended:
        launch.parse(argv)
    assert ended.value.code == 2
    assert expected in capsys.readouterr().err
    assert launch.parse(['--', 'train.py', '--x'])[1] == [sys.executable, 'train.py', '--x']
    assert launch.parse(['--', '-m', 'this'])[1] == [sys.executable, '-m', 'this']
    assert launch.parse(['--', 'true', '-x'])[1] == ['true', '-x']


@pytest.mark.slow
@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGKILL])
def test_signals_to_the_launcher(number, runner, tmp_path):
    program = tmp_path / 'program.py'
    program.write_text("import os, signal, sys, time\n"
                       "def end(number, frame): print('told', flush=True); sys.exit(0)\n"
                       "signal.signal(signal.SIGTERM, end)\n"
                       "print('pid', os.getpid(), flush=True)\ntime.sleep(600)\n")
    with Launch(runner, tmp_path / 'launch', ['--workers=2', '--restarts=3'], [],
                str(program)) as launch:
        wait_until(lambda: launch.output.count('] pid') == 2)
        launch.send_launcher(number)
        assert launch.status() == (143 if number == signal.SIGTERM else -9)
    assert launch.output.count('told') == (2 if number == signal.SIGTERM else 0)
