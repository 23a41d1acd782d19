"""Faults of real processes on loopback: killed, frozen, told to end, started again."""

import re
import shutil
import signal
import time

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from cluster_runs import PATIENCE, Launch, own_program, weights_of_own_program
import train_runs

STEPS = 100
FLAGS = ['--num_towers=1', '--batch_size=10', '--train_steps=%d' % STEPS, '--save_steps=20',
         '--log_every=10', '--summary_steps=0', '--weight_decay=0.001',
         '--config={"augment_shift": 1, "dead_after": 3}']
AGAIN = '%s: all are ended, and started again (%d of 2)'


def values(folder, step=STEPS):
    """What a checkpoint holds; batch-norm averages are those of the chief."""
    return train_runs.values_of(folder, step)


def is_lost(number, why, launch):
    return re.search(r'worker %d \(127.0.0.1:\d+\) is lost: .*%s' % (number, why), launch.output)


@pytest.mark.slow
def test_a_ring_goes_on_exactly_after_a_worker_is_frozen_killed_and_told_to_stop(runner, tmp_path):
    """One machine, then two, of which one is lost, twice, and told to stop: as if undisturbed."""
    folder, undisturbed = str(tmp_path / 'run'), str(tmp_path / 'undisturbed')
    runner.run(folder, ['--num_towers=1', '--train_steps=20', '--batch_size=20'])
    of_one_machine = set(values(folder, 20))
    shutil.copytree(folder, undisturbed)
    with Launch(runner, folder, ['--workers=2', '--restarts=2'], FLAGS + [
            '--cluster=ring', '--train_dir=' + folder, '--train_steps=9910']) as launch:
        launch.wait_for('step 50/')
        launch.send('worker 1', signal.SIGSTOP)  # to be frozen is no failure to the launcher
        launch.wait_for(AGAIN % ('worker 0 ended with status 1', 1))
        launch.send('worker 1', signal.SIGCONT)
        launch.wait_for('0/9910', start=2)
        launch.send('worker 1', signal.SIGKILL)
        launch.wait_for(AGAIN % ('worker 1 was killed by SIGKILL', 2))
        launch.wait_for('0/9910', start=3)
        seen = int(re.findall(r'step (\d+)/', launch.since(3))[-1])
        launch.send('worker 1', signal.SIGTERM)
        assert launch.status() == 143, launch.output
        for why in 'no sign of life', 'its process has ended':
            assert is_lost(1, why, launch), launch.output
        assert 'lost' not in launch.since(3), launch.output
        assert len(re.findall(r'] stopped: worker 1 was told to stop '
                              r'\(SIGTERM\)$', launch.output, re.M)) == 2, launch.output
        assert 'test accuracy' not in launch.output
        assert launch.output.count('[launch] worker 0 is process') == 3
    step = train_runs.newest(folder)
    assert step >= seen  # saved, though its time had not come: a multiple of 20
    with Launch(runner, undisturbed, ['--workers=2'], FLAGS + [
            '--cluster=ring', '--train_dir=' + undisturbed, '--train_steps=%d' % step]) as launch:
        assert launch.status() == 0, launch.output
    found = values(folder, step)
    assert train_runs.names_that_differ(values(undisturbed, step), found) == []
    assert found['examples_seen'] == step * 20 and found['global_step'] == step
    assert set(found) == of_one_machine
    accuracy = re.search(r'test accuracy  ([\d.]+) on 360', launch.output).group(1)
    evaluated = runner.run(undisturbed, ['--mode=eval'])
    assert 'test accuracy  %s on 360' % accuracy in evaluated.stdout


MODEL = "    weights = tf.get_variable('weights'"
DIES = """
    images -= towers.batch_mean(tf.reduce_mean(images + tf.py_func(may_die, [], tf.float32), 0))
"""
MAY_DIE = """
import os, signal, time
calls = []
def may_die():
    calls.append(None)
    if cluster.rank == 1 and len(calls) == 5:  # two in a step: worker 0 is in the third one
        time.sleep(1.)
        os.kill(os.getpid(), signal.SIGKILL)
    return np.float32(0.)
"""


@pytest.mark.slow
def test_a_worker_that_dies_in_the_forward_pass_is_named(runner, tmp_path):
    """Before its value of the whole batch, for which worker 0 waits, is sent."""
    program = own_program(str(tmp_path), 40)
    with open(program) as opened:
        text = opened.read()
    with open(program, 'w') as opened:
        opened.write(text.replace(MODEL, DIES + MODEL).replace('def model_fn', MAY_DIE
                                                               + '\n\ndef model_fn'))
    with Launch(runner, str(tmp_path), ['--workers=2', '--grace=20'], [], program) as launch:
        launch.wait_for('worker 1 was killed by SIGKILL')
        launch.wait_for('[worker 0] worker 1 (')
        assert launch.status() == 137, launch.output
    assert is_lost(1, 'its process has ended', launch), launch.output


MAY_FAIL = """
calls = []
def may_die():
    calls.append(None)
    if cluster.rank == 1 and len(calls) == 5:
        raise %s('0007.jpg is bad')
    return np.float32(0.)
"""
CATCHES = """
                try:
                    session.run(built.train_op)
                except tf.errors.InvalidArgumentError:
                    pass
"""


@pytest.mark.slow
@pytest.mark.parametrize('kind_of_error, name, expected', [
    # The program catches it, and begins its next step.
    ('ValueError', 'InvalidArgumentError', r'own.py: worker 1 \(.*\) is lost: a step has failed'),
    # It ends the program. The loss of another worker may be such an error of TensorFlow's.
    ('OSError', 'UnknownError', '.*UnknownError')])
def test_a_step_that_fails_on_one_worker_is_named_on_both(runner, tmp_path, kind_of_error, name,
                                                          expected):
    program = own_program(str(tmp_path), 40)
    with open(program) as opened:
        text = opened.read()
    step = 'session.run(built.train_op); __import__("time").sleep(0)'
    assert step in text
    with open(program, 'w') as opened:
        opened.write(text.replace(MODEL, DIES + MODEL).replace(
            'def model_fn', MAY_FAIL % kind_of_error + '\n\ndef model_fn').replace(
                step, CATCHES.strip()))
    with Launch(runner, str(tmp_path), ['--workers=2', '--grace=20'], [], program) as launch:
        assert launch.status() == 1, launch.output
    why = 'a step has failed on it, and others wait in that step: %s: %s: 0007.jpg is bad' % (
        name, kind_of_error)
    assert re.search(r'\[worker 0\] worker 1 \(.*\) is lost: ' + why, launch.output), launch.output
    assert re.search(r'\[worker 1\] ' + expected, launch.output), launch.output


@pytest.mark.slow
def test_with_servers_what_is_killed_is_named_and_all_end_as_an_unbroken_run(runner, tmp_path):
    """Bit for bit: of two workers, the order in which gradients are added up is no matter."""
    folder, unbroken = str(tmp_path / 'run'), str(tmp_path / 'unbroken')
    launcher, flags = ['--workers=2', '--ps=1'], FLAGS + [
        '--cluster=ps', '--config={"augment_shift": 1, "dead_after": 60}']  # nothing waits for it
    with Launch(runner, folder, launcher + ['--restarts=2'],
                flags + ['--train_dir=' + folder]) as launch, Launch(
                    runner, unbroken, launcher, flags + ['--train_dir=' + unbroken]) as other:
        for place, name in enumerate(('ps 0', 'worker 1')):
            launch.wait_for('step %d/' % (30 + 30 * place))
            launch.send(name, signal.SIGKILL)
            launch.wait_for(AGAIN % (name + ' was killed by SIGKILL', place + 1))
        assert launch.status() == 0, launch.output
        assert re.search(r'ps 0 \(127.0.0.1:\d+\) does not answer: Connection refused. Start '
                         'all again', launch.output), launch.output
        assert is_lost(1, 'its process has ended', launch), launch.output
        assert launch.output.count('[launch] worker 0 is process') == 3
        assert other.status() == 0, other.output
    found = values(folder)
    assert train_runs.names_that_differ(values(unbroken), found) == []
    assert found['examples_seen'] == STEPS * 20


@pytest.mark.slow
def test_a_frozen_parameter_server_is_named_and_ends_the_run(runner, tmp_path):
    folder = str(tmp_path / 'run')
    with Launch(runner, folder, ['--workers=2', '--ps=2'], FLAGS + [
            '--cluster=ps', '--train_steps=100000', '--train_dir=' + folder]) as launch:
        launch.wait_for('step 50/')
        launch.send('ps 1', signal.SIGSTOP)
        launch.wait_for('ended with status 1')
        launch.send('ps 1', signal.SIGCONT)
        assert launch.status() == 1, launch.output
    for text in ('waiting        %s', '%s.* Start all again, and the run goes on from the last'):
        assert re.search(text % r'ps 1 \(127.0.0.1:\d+\) takes connections and says nothing',
                         launch.output), launch.output


@pytest.mark.slow
def test_a_server_that_gets_a_signal_serves_until_the_workers_have_saved(runner, tmp_path):
    folder = str(tmp_path / 'run')
    with Launch(runner, folder, ['--workers=2', '--ps=1'], FLAGS + [
            '--cluster=ps', '--train_steps=100000', '--train_dir=' + folder]) as launch:
        launch.wait_for('step 20/')
        launch.send('ps 0', signal.SIGTERM)
        launch.wait_for('[ps 0] told to stop')
        seen = int(re.findall(r'step (\d+)/', launch.output)[-1])
        launch.wait_for('step %d/' % (seen + 30))
        launch.send('worker 1', signal.SIGTERM)
        assert launch.status() == 143, launch.output
    assert train_runs.newest(folder) >= seen + 30
    assert 'lost' not in launch.output and 'Error' not in launch.output, launch.output


@pytest.mark.slow
def test_the_program_of_the_docs_trains_on_the_same_data_after_a_restart(runner, tmp_path):
    """A hook chooses the batch, by the step of the session that makes the step."""
    folder, steps = str(tmp_path), 120
    program = own_program(folder, steps, pause=0.02)
    with Launch(runner, folder, ['--workers=2', '--ps=1', '--restarts=1'], [],
                program) as launch:
        deadline = time.time() + PATIENCE
        while not (tmp_path / 'run' / 'model.ckpt-60.index').exists():
            assert time.time() < deadline and not launch.has_ended, launch.output
            time.sleep(0.02)
        time.sleep(0.2)  # some steps further, which are made again
        launch.send('worker 0', signal.SIGKILL)
        assert launch.status() == 0, launch.output
    newest = tf.train.latest_checkpoint(str(tmp_path / 'run'))
    assert newest.endswith('model.ckpt-%d' % steps), launch.output
    found = tf.train.load_checkpoint(newest).get_tensor('weights')
    np.testing.assert_allclose(found, weights_of_own_program(steps), rtol=0, atol=2e-5)
