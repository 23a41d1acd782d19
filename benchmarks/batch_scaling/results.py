"""What the runs of a set measured, and the one CSV file that holds all of it."""

import collections
import csv
import json
import os

from benchmarks.batch_scaling.arms import Arm
from towers.safe_files import written_whole

Point = collections.namedtuple('Point', 'examples seconds loss accuracy')
Point.__doc__ = """One evaluation: after how many examples and seconds of training, loss and
accuracy on the test set. The seconds leave out the start of the program, evaluations and
checkpoints."""

RunResult = collections.namedtuple('RunResult', [
    'arm', 'seed', 'status', 'reason', 'points', 'images_per_second'])
RunResult.__doc__ = """What one run measured.

Fields:
  arm, seed: `arms.Arm` and int.
  status, reason: as `runs.status` gives them.
  points: list of `Point`, by examples; empty where there was no evaluation.
  images_per_second: in training, or None.
"""

_COLUMNS = ['arm', 'towers', 'batch_size', 'rule', 'rate', 'warmup_epochs', 'seed', 'status',
            'reason', 'step', 'examples', 'seconds', 'test_loss', 'test_accuracy',
            'images_per_second', 'accumulate', 'batch_norm']


def read_metrics(folder):
    """The lines of a run's metrics.jsonl: a list of dicts. One that is half written is left out."""
    path = os.path.join(folder, 'metrics.jsonl')
    if not os.path.exists(path):
        return []
    with open(path, 'rb') as log:
        lines = log.read().split(b'\n')
    return [json.loads(line.decode('utf-8')) for line in lines[:-1] if line.strip()]


def run_result(run, status, reason):
    """The `RunResult` of an `arms.Run`, from its folder."""
    lines = read_metrics(run.folder)
    seconds = _seconds(lines)
    points = [Point(line['examples'], at, line['test_loss'], line['test_accuracy'])
              for line, at in zip(lines, seconds) if 'test_accuracy' in line]
    latest = lines[-1] if lines else {}
    speed = None
    if seconds and seconds[-1]:
        speed = round(latest['examples'] / seconds[-1], 3)
    return RunResult(run.arm, run.seed, status, reason, points, speed)


def _seconds(lines):
    """Seconds of training at each line, from the speed since the line before.

    A run's first steps, and those after a resumption, have no speed of their own, since they
    build kernels: they are taken to be as fast as the next line's.
    """
    speeds = [line.get('images_per_second') for line in lines]
    following = None
    for index in reversed(range(len(speeds))):
        speeds[index] = following = speeds[index] or following
    latest = None
    seconds, before, total = [], 0, 0.
    for line, speed in zip(lines, speeds):
        speed = latest = speed or latest
        examples = line.get('examples', before)
        if speed:
            total += (examples - before) / speed
        before = examples
        seconds.append(round(total, 3))
    return seconds


def write_csv(path, results):
    """Writes all results: a row an evaluation; a run without any has one row all the same."""
    with written_whole(path, newline='') as table:
        rows = csv.writer(table, lineterminator='\n')
        rows.writerow(_COLUMNS)
        for result in results:
            arm = result.arm
            for point in result.points or [None]:
                measured = ['', '', '', '', ''] if point is None else [
                    point.examples // arm.batch_size, point.examples, point.seconds, point.loss,
                    point.accuracy]
                rows.writerow(
                    [arm.key, arm.towers, arm.batch_size, arm.rule, arm.rate, arm.warmup_epochs,
                     result.seed, result.status, result.reason] + measured
                    + [result.images_per_second or '', arm.accumulate, arm.batch_norm])


def read_csv(path):
    """The results that `write_csv` wrote: a list of `RunResult`."""
    found = collections.OrderedDict()
    with open(path, newline='') as table:
        for row in csv.DictReader(table):
            found.setdefault((row['arm'], int(row['seed'])), []).append(row)
    results = []
    for (key, seed), rows in found.items():
        row = rows[0]
        arm = Arm(key, int(row['towers']), int(row['batch_size']), row['rule'],
                  float(row['rate']), float(row['warmup_epochs']),
                  int(row.get('accumulate') or 1), row.get('batch_norm') or 'shard')
        points = [Point(int(each['examples']), float(each['seconds']), float(each['test_loss']),
                        float(each['test_accuracy'])) for each in rows if each['examples']]
        results.append(RunResult(
            arm, seed, row['status'], row['reason'], points,
            float(row['images_per_second']) if row['images_per_second'] else None))
    return results


def by_arm(results):
    """The results of each arm: an OrderedDict from `Arm` to a list of `RunResult`."""
    arms = collections.OrderedDict()
    for result in results:
        arms.setdefault(result.arm, []).append(result)
    return arms


def finished(results):
    """Those that ran to their end."""
    return [result for result in results if result.status == 'finished']


def examples_to(result, accuracy):
    """Examples at the first evaluation with at least that accuracy, or None."""
    return next((point.examples for point in result.points if point.accuracy >= accuracy), None)
