"""The batch-scaling benchmark: its arms, the verdict on the claim, results, a set of runs."""

import json
import os
import signal
import threading
import time

from absl.testing import flagsaver
import pytest

from benchmarks.batch_scaling import results
from benchmarks.batch_scaling.arms import Run, Settings, make_arms, train_flags
from benchmarks.batch_scaling.claim import judge, sentences
from benchmarks.batch_scaling.runs import Runner, status
from towers.errors import InvalidArgumentError
from trainer.command_line import parse_flags
from trainer.flags import FLAGS


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

# Stands for train.py: a line a step; the arm sqrt waits, at first, for a signal in its second step.
TRAIN = '''
import json, os, signal, sys
stopped = []
signal.signal(signal.SIGINT, lambda number, frame: stopped.append(number))
flags = dict(each[2:].partition('=')[::2] for each in sys.argv[1:])
path, steps = os.path.join(flags['train_dir'], 'metrics.jsonl'), int(flags['train_steps'])
before = len(open(path).readlines()) if os.path.exists(path) else 0
for step in range(before + 1, steps + 1):
    line = {'step': step, 'examples': step * int(flags['batch_size']), 'images_per_second': 9.}
    if step % int(flags['eval_steps']) == 0:
        line.update(test_accuracy=.5, test_loss=1.)
    with open(path, 'a') as log:
        log.write(json.dumps(line) + chr(10))
    if flags['train_dir'].endswith('sqrt') and step == 2:
        while not stopped:
            signal.pause()
        sys.exit(130)
'''


@pytest.mark.slow
def test_a_signal_stops_the_run_under_way_and_the_set_goes_on_later(tmp_path):
    (tmp_path / 'train.py').write_text(TRAIN)
    runs = [Run(arm, 1, str(tmp_path / arm.key), train_flags(settings(), arm, 1))
            for arm in make_arms(settings(), ['one', 'sqrt'])]
    with flagsaver.flagsaver():
        FLAGS.unparse_flags()
        for run in runs:
            parse_flags(['train.py'] + run.flags)  # the real one takes them

    def steps(run):
        return [line['step'] for line in results.read_metrics(run.folder)]

    def stop():
        while len(steps(runs[1])) < 2:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)
    said, stopper = [], threading.Thread(target=stop)
    stopper.start()
    for _ in range(2):
        Runner(runs, 600, train=str(tmp_path / 'train.py'), say=said.append).run()
    stopper.join()
    assert [line.partition(': ')[2] for line in said if 'examples' not in line] == [
        'starting', 'starting', 'the run finishes its step and saves; start the same command again '
        'to go on', 'finished already', 'starting']  # a run that is stopped has not failed
    assert steps(runs[0]) == list(range(1, 25)) and steps(runs[1]) == list(range(1, 7))
    found = [results.run_result(run, *status(run, 600)) for run in runs]
    assert [each.status for each in found] == ['finished'] * 2
    assert [[point.examples for point in each.points] for each in found] == [[200, 400, 600]] * 2
    results.write_csv(str(tmp_path / 'all.csv'), found)
    assert results.read_csv(str(tmp_path / 'all.csv')) == found
