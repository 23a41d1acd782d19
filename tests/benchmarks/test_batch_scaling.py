"""The batch-scaling benchmark: its arms, the verdict on the claim, results, a set of runs."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from benchmarks.batch_scaling import results
from benchmarks.batch_scaling.arms import Run, Settings, make_arms, train_flags
from benchmarks.batch_scaling.claim import judge, sentences
from towers.errors import InvalidArgumentError


def settings(**changes):
    values = dict(model='digits', dataset='digits', data_dir='', image_size=8, num_towers=4,
                  batch_size=25, learning_rate=0.001, optimizer='adam', reduction='mean',
                  warmup_epochs=[0.], batch_norm_decay=0.9, aux_loss_weight=None, examples=600,
                  evaluations=3, seeds=2)
    return Settings(**dict(values, **changes))


def result(name, seed, accuracies, losses, status='finished', reason=''):
    """A run of the arm `name` whose evaluations, every 200 examples, gave these."""
    arm, = make_arms(settings(), [name])
    points = [results.Point(200 * (number + 1), 0.5 * (number + 1), loss, accuracy)
              for number, (accuracy, loss) in enumerate(zip(accuracies, losses))]
    return results.RunResult(arm, seed, status, reason, points, 400.)


def test_larger_factors_are_accumulated_and_not_in_sync():
    arms = make_arms(settings(factors=[1, 2, 4, 16]), ['one', 'linear', 'sync'])
    assert [(arm.key, arm.towers, arm.accumulate, arm.batch_size, arm.rate, arm.batch_norm)
            for arm in arms] == [
        ('one', 1, 1, 25, 0.001, 'shard'), ('linear-x2', 2, 1, 50, 0.002, 'shard'),
        ('linear', 4, 1, 100, 0.004, 'shard'), ('linear-x16', 4, 4, 400, 0.016, 'shard'),
        ('sync-x2', 2, 1, 50, pytest.approx(0.001 * 2 ** 0.5), 'sync'),
        ('sync', 4, 1, 100, 0.002, 'sync')]
    assert arms[3].label == '4 x 4 x 25 at 0.016' and arms[3].kind == 'linear'
    flags = train_flags(settings(factors=[1, 2, 4, 16]), arms[3], 1)
    assert '--accumulate=4' in flags and '--log_every=1' in flags
    assert '--batch_norm=sync' in train_flags(settings(), arms[5], 1)
    with pytest.raises(InvalidArgumentError, match='does not divide among 4 towers'):
        make_arms(settings(factors=[6]))


# ---- The verdict on the claim, in every outcome, from made-up numbers ----------------------------

def runs(name, *ends):
    """A run a seed, with that accuracy at the end and the loss 1 - accuracy."""
    return [result(name, seed + 1, [0.5, 0.6, end], [1., 0.5, 1 - end])
            for seed, end in enumerate(ends)]


def outcomes(base, claim):
    return [verdict.outcome for verdict in judge(base, claim)]


def test_better_and_worse_by_more_than_the_spread():
    low, high = (0.80, 0.82), (0.90, 0.91)
    assert outcomes(runs('one', *low), runs('sqrt', *high)) == ['better'] * 3
    assert outcomes(runs('one', *high), runs('sqrt', *low)) == ['worse'] * 3


def test_seeds_are_compared_with_themselves_and_more_of_them_tell_more():
    """Arms that differ by 0.02 in every seed, while the seeds themselves are far apart."""
    low, high = (0.5, 0.7, 0.9), (0.521, 0.719, 0.92)
    assert outcomes(runs('one', *low), runs('sqrt', *high))[:2] == ['better'] * 2
    differences = (0.03, -0.01)
    spreads = [judge(runs('one', *[0.5] * 2 * times),
                     runs('sqrt', *[0.5 + each for each in differences * times]))[0]
               for times in (1, 16)]
    assert [verdict.outcome for verdict in spreads] == ['even', 'better']
    assert spreads[0].spread == pytest.approx(0.04)
    assert spreads[1].spread == pytest.approx(2 * 0.02 / 31 ** .5)


def test_sentences_when_it_held():
    lines = sentences(runs('one', 0.80, 0.82) + runs('sqrt', 0.90, 0.91))
    assert lines[0] == ('Here the claim held: 4 x 25 at 0.002 against 1 x 25 at 0.001, both after '
                        '600 examples, in 6 steps against 24.')
    assert lines[1] == ('Test accuracy at the end: 0.9050 against 0.8100, a difference of +0.0950 '
                        '(+0.1000, +0.0900 by seed), better by more than twice its standard error, '
                        '0.0100.')
    assert len(lines) == 4


def test_sentences_when_a_run_failed():
    broken = result('sqrt', 2, [0.5], [1.], status='failed', reason='NaN in tower 1')
    lines = sentences(runs('one', 0.8, 0.82) + [broken])
    assert lines == ['The claim cannot be judged: no seed of both 4 x 25 at 0.002 and 1 x 25 at '
                     '0.001 is finished (4 x 25 at 0.002, seed 2: NaN in tower 1).']


# ---- What is read from a run's folder ------------------------------------------------------------

def run_in(folder, lines, tail=''):
    folder.mkdir()
    with open(str(folder / 'metrics.jsonl'), 'w') as log:
        log.write(''.join(json.dumps(line) + '\n' for line in lines) + tail)
    arm, = make_arms(settings(), ['sqrt'])
    return Run(arm, 1, str(folder), [])


def test_a_run_is_read(tmp_path):
    run = run_in(tmp_path / 'run', [
        {'step': 0, 'examples': 0},
        {'step': 1, 'examples': 100, 'images_per_second': None},
        {'step': 2, 'examples': 200, 'images_per_second': 50., 'test_accuracy': 0.5,
         'test_loss': 1.5},
        {'step': 3, 'examples': 300, 'images_per_second': 25.},
        {'step': 4, 'examples': 400, 'images_per_second': None,
         'test_accuracy': 0.75, 'test_loss': 1.}], tail='{"step": 5, "exam')
    found = results.run_result(run, 'finished', '')
    # A line without a speed is as fast as the next one, or as the one before where there is none.
    assert found.points == [results.Point(200, 4., 1.5, 0.5), results.Point(400, 12., 1., 0.75)]
    assert found.images_per_second == round(400 / 12., 3)



# ---- Running a set: in order, resumable, stopped cleanly -----------------------------------------

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


@pytest.mark.slow
def test_a_signal_stops_the_run_under_way_and_the_set_goes_on_later(tmp_path):
    """Real runs on the digits; the CSV; nothing run twice."""
    folder = str(tmp_path / 'set')

    def start():
        return subprocess.Popen(
            [sys.executable, '-m', 'benchmarks.batch_scaling', '--model=digits', '--seeds=1',
             '--arms=one,sqrt', '--batch_size=25', '--examples=2000', '--evaluations=2',
             '--num_towers=2', '--noplots', '--directory=' + folder], cwd=ROOT,
            env=dict(os.environ, TF_CPP_MIN_LOG_LEVEL='3'), stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, universal_newlines=True)

    def steps_of(arm):
        return [line['step'] for line in results.read_metrics('%s/%s/seed-1' % (folder, arm))]

    stopped, deadline = start(), time.time() + 120
    while len(steps_of('sqrt')) < 2 and time.time() < deadline:
        time.sleep(0.02)
    stopped.send_signal(signal.SIGTERM)
    _, said = stopped.communicate()
    assert said.count('stopping: the run finishes its step and saves') == 1
    assert 'FAILED' not in said  # it is no failure, and has saved
    assert any(name.startswith('model.ckpt-') for name in os.listdir(folder + '/sqrt/seed-1'))
    process = start()
    _, said = process.communicate()
    assert process.returncode == 0 and said.count('finished already') == 1, said
    assert steps_of('sqrt') == sorted(set(steps_of('sqrt')))
    found = results.read_csv(folder + '/batch_scaling.csv')
    assert [(each.arm.key, each.status) for each in found] == [
        ('one', 'finished'), ('sqrt', 'finished')]
    assert [[point.examples for point in each.points] for each in found] == [[1000, 2000]] * 2
