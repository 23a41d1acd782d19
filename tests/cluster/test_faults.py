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
         '--config={"augment_shift": 1}']
RING = FLAGS + ['--cluster=ring', '--config={"dead_after": 3}']


def values(folder, step=STEPS):
    """What a checkpoint holds; batch-norm averages are those of the chief."""
    return train_runs.values_of(folder, step)


def is_lost(number, why, launch):
    return re.search(r'worker %d \(127.0.0.1:\d+\) is lost: .*%s' % (number, why), launch.output)


@pytest.mark.slow
def test_a_ring_goes_on_exactly_after_a_frozen_worker_and_a_signal_to_one(runner, tmp_path):
    """One machine, two of which one is lost, two that are told to stop: as if undisturbed."""
    folder, undisturbed = str(tmp_path / 'run'), str(tmp_path / 'undisturbed')
    runner.run(folder, FLAGS[:2] + ['--train_steps=20', '--batch_size=20'])
    of_one_machine = set(values(folder, 20))
    shutil.copytree(folder, undisturbed)
    with Launch(folder, ['--workers=2'], RING + ['--train_dir=' + folder,
                                                               '--train_steps=10000']) as launch:
        launch.wait_for('step 50/')
        launch.send('worker 1', signal.SIGSTOP)
        launch.wait_for('[launch] worker 0 ended')  # to be frozen is no failure to the launcher
        launch.send('worker 1', signal.SIGCONT)
        assert launch.status() != 0
        assert is_lost(1, 'no sign of life', launch), launch.output
    assert 20 <= train_runs.newest(folder)
    with Launch(folder, ['--workers=2'], RING + [
            '--train_dir=' + folder, '--train_steps=10000', '--save_steps=10000']) as launch:
        launch.wait_for('%d/10000' % (train_runs.newest(folder) // 10 * 10 + 20))
        launch.send('worker 1', signal.SIGTERM)
        assert launch.status() == 143, launch.output
        assert 'lost' not in launch.output, launch.output
        assert len(re.findall(r'] stopped: worker 1 was told to stop '
                              r'\(SIGTERM\)$', launch.output, re.M)) == 2, launch.output
        assert 'test accuracy' not in launch.output
    step = train_runs.newest(folder)  # saved, though no step to save had come
    with Launch(undisturbed, ['--workers=2'], RING + [
            '--train_dir=' + undisturbed, '--train_steps=%d' % step]) as launch:
        assert launch.status() == 0, launch.output
    found = values(folder, step)
    assert train_runs.names_that_differ(values(undisturbed, step), found) == []
    assert found['examples_seen'] == step * 20 and found['global_step'] == step
    assert set(found) == of_one_machine
    accuracy = re.search(r'test accuracy  ([\d.]+) on 360', launch.output).group(1)
    evaluated = runner.run(undisturbed, ['--mode=eval'])
    assert 'test accuracy  %s on 360' % accuracy in evaluated.stdout


@pytest.mark.slow
@pytest.mark.parametrize('kind, killed', [
    ('ring', ['worker 1']), ('ps', ['ps 0', 'worker 1'])])
def test_a_process_that_is_killed_is_named_and_all_end_as_an_unbroken_run(kind, killed, tmp_path):
    """Bit for bit: of two workers, the order in which gradients are added up is no matter."""
    folder, unbroken = str(tmp_path / 'run'), str(tmp_path / 'unbroken')
    launcher = ['--workers=2'] + ['--ps=1'] * (kind == 'ps')
    flags = FLAGS + ['--cluster=' + kind, '--config={"dead_after": 3}']
    with Launch(folder, launcher + ['--restarts=%d' % len(killed)],
                flags + ['--train_dir=' + folder]) as launch:
        for place, name in enumerate(killed):
            launch.wait_for('step %d/' % (30 + 30 * place))
            launch.send(name, signal.SIGKILL)
            launch.wait_for('%s was killed by SIGKILL: all are ended, and started again (%d of %d)'
                            % (name, place + 1, len(killed)))
        assert launch.status() == 0, launch.output
        for name in killed:
            says = (r'ps 0 \(127.0.0.1:\d+\) does not answer' if name == 'ps 0' else
                    r'%s \(127.0.0.1:\d+\) is lost: its process has ended' % name)
            assert re.search(says, launch.output), launch.output
        assert launch.output.count('[launch] worker 0 is process') == 1 + len(killed)
    with Launch(unbroken, launcher, flags + ['--train_dir=' + unbroken]) as launch:
        assert launch.status() == 0, launch.output
    found = values(folder)
    assert train_runs.names_that_differ(values(unbroken), found) == []
    assert found['examples_seen'] == STEPS * 20


@pytest.mark.slow
def test_a_frozen_parameter_server_is_named_and_ends_the_run(tmp_path):
    folder = str(tmp_path / 'run')
    with Launch(folder, ['--workers=2', '--ps=2'],
                FLAGS + ['--cluster=ps', '--config={"dead_after": 3}', '--train_steps=100000',
                         '--train_dir=' + folder]) as launch:
        launch.wait_for('step 50/')
        launch.send('ps 1', signal.SIGSTOP)
        launch.wait_for('[launch] worker')
        launch.wait_for('ended with status 1')
        launch.send('ps 1', signal.SIGCONT)
        assert launch.status() == 1, launch.output
    for text in ('waiting        %s', '%s.* start all again, and it goes on from the last'):
        assert re.search(text % r'ps 1 \(127.0.0.1:\d+\) takes connections and says nothing',
                         launch.output), launch.output


@pytest.mark.slow
def test_the_program_of_the_docs_trains_on_the_same_data_after_a_restart(tmp_path):
    """A hook chooses the batch, by the step of the session that makes the step."""
    folder, steps = str(tmp_path), 120
    program = own_program(folder, steps, pause=0.02)
    with Launch(folder, ['--workers=2', '--ps=1', '--restarts=1'], [],
                program) as launch:
        deadline = time.time() + PATIENCE
        while not (tmp_path / 'run' / 'model.ckpt-60.index').exists():
            assert time.time() < deadline and launch.process.poll() is None, launch.output
            time.sleep(0.02)
        time.sleep(0.2)  # some steps further, which are made again
        launch.send('worker 0', signal.SIGKILL)
        assert launch.status() == 0, launch.output
    newest = tf.train.latest_checkpoint(str(tmp_path / 'run'))
    assert newest.endswith('model.ckpt-%d' % steps), launch.output
    found = tf.train.load_checkpoint(newest).get_tensor('weights')
    np.testing.assert_allclose(found, weights_of_own_program(steps), rtol=0, atol=2e-5)
