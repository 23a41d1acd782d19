"""A pipeline of two stages on two CPUs: a step's time, and how busy each stage was.

    $ python -m benchmarks.pipeline_use [--workloads=dense_halves,conv_halves] [--rounds=7]
          [--turn_seconds=2] [--plot=FILE.png] [--json=FILE.json]

The same model, weights and batch, each contender in a process of its own, in turns: one device with
both cores; two stages with the whole batch; two stages with 4 and 8 micro-batches, in both
schedules. Printed are milliseconds a step, and ratios to one device and to the stages without
micro-batches: medians over rounds of what the same round gave, with the least and the greatest. Of
traced steps: the share of the step in which each stage computed, the mean over stages beside the
M / (M + K - 1) of K equal stages and M micro-batches.
"""

import argparse
import json
import os
import statistics
import sys

from benchmarks import charts, turns, workloads
from benchmarks.stage_use import predicted_use

_STAGES = 2
_MICRO_BATCHES = (4, 8)
_SCHEDULES = ('one_forward_one_backward', 'all_forward')
_ONE_DEVICE, _WHOLE_BATCH = 'one device', '2 stages'
_COLOURS = {'forward': '#56B4E9', 'backward': '#D55E00'}


def contenders(workload):
    """List of `(micro-batches or None, Contender)`."""
    batch = workloads.WORKLOADS[workload].batch_size(1)
    spec = dict(workload=workload, num_towers=1, batch=batch)
    found = [(None, turns.Contender(_ONE_DEVICE, [dict(
        spec, peer='one_device', threads=os.cpu_count())])),
             (1, _staged(_WHOLE_BATCH, spec))]
    for schedule in _SCHEDULES:
        for count in _MICRO_BATCHES:
            found.append((count, _staged('%d micro-batches, %s' % (
                count, schedule.replace('_', ' ')), spec, micro_batches=count, schedule=schedule)))
    return found


def _staged(label, spec, **options):
    return turns.Contender(label, [dict(spec, peer='towers', options=dict(
        num_stages=_STAGES, pipeline=dict(options, stages='auto')))])


def measure(workload, rounds, turn_seconds, log=None):
    """Lets the contenders of a workload take turns, and traces a few steps of each.

    Returns:
      list of dicts, one a contender: `label`, `micro_batches`, `failure`, `milliseconds`,
      `to_one_device`, `to_whole_batch` (`turns.spread`s or None), `losses` of the first steps,
      `steps` (of `stage_use`; none for one device), `use` and `predicted` or None.
    """
    pairs = contenders(workload)
    alone = [contender for _, contender in pairs]
    try:
        turns.start_all(alone)
        for contender in alone:
            if contender.failure is None:
                turns.first_steps(contender, 3)
        turns.take_turns(alone, rounds, turn_seconds, log)
        return [_result(count, contender, *alone[:2]) for count, contender in pairs]
    finally:
        for contender in alone:
            contender.close()


def _result(count, contender, one_device, whole_batch):
    found = dict(label=contender.label, micro_batches=count, failure=contender.failure,
                 losses=contender.losses, steps=[], use=None, milliseconds=None, to_one_device=None,
                 to_whole_batch=None, predicted=count and predicted_use(_STAGES, count))
    if contender.failure is not None:
        return found
    found['milliseconds'] = turns.spread([1e3 * each for each in contender.seconds])
    for name, other in (('to_one_device', one_device), ('to_whole_batch', whole_batch)):
        if other.failure is None:
            found[name] = turns.ratios(contender.seconds, other.seconds)
    if count:
        found['steps'] = contender.ask('stages')[0]['steps']
        found['use'] = [statistics.median(step['use'][device] for step in found['steps'])
                        for device in sorted(found['steps'][0]['use'])]
    return found


def lines(results):
    """The table of a workload, in Markdown."""
    yield ('| | ms a step | over one device | over 2 stages | use of each stage | mean | predicted '
           '| part |')
    yield '|---|---|---|---|---|---|---|---|'
    for each in results:
        if each['failure'] is not None:
            yield '| %s | failed: %s |' % (each['label'], each['failure'])
            continue
        cells = [each['label'], _spread(each['milliseconds'], '%.0f'),
                 _spread(each['to_one_device']), _spread(each['to_whole_batch'])]
        if each['use']:
            mean = statistics.mean(each['use'])
            cells += [' '.join('%.2f' % use for use in each['use']), '%.2f' % mean,
                      '%.2f' % each['predicted'], '%.2f' % (mean / each['predicted'])]
        else:
            cells += [''] * 4
        yield '| %s |' % ' | '.join(cells)


def _spread(spread, number='%.2f'):
    if spread is None:
        return ''
    return ('%s (%s to %s)' % (number, number, number)) % (
        spread['median'], spread['least'], spread['most'])


def check_losses(results):
    """Raises `ValueError` where contenders did not train the same.

    The losses of the first three steps are held to those of the first contender that ran: to 1e-3
    of them, since sums of float32 in other orders differ.
    """
    ran = [each for each in results if each['failure'] is None]
    for each in ran:
        for mine, first in zip(each['losses'], ran[0]['losses']):
            if abs(mine - first) > 1e-3 * abs(first):
                raise ValueError('%s has the losses %s, %s has %s' % (
                    each['label'], each['losses'], ran[0]['label'], ran[0]['losses']))


def draw(results, title, path):
    """Writes a picture: what each stage did when, a panel for each number of micro-batches."""
    plt = charts.pyplot()
    drawn = [each for each in results if each['steps'] and 'all forward' not in each['label']]
    figure, panels = plt.subplots(len(drawn), 1, figsize=(9, 1.1 + 1.35 * len(drawn)), sharex=True,
                                  squeeze=False)
    for axis, each in zip(panels[:, 0], drawn):
        step = each['steps'][0]
        devices = sorted(step['use'])
        for device, what, spans in step['rows']:
            axis.broken_barh([(begin, end - begin) for begin, end in spans],
                             (devices.index(device) - 0.38, 0.76), color=_COLOURS[what],
                             linewidth=0)
        axis.set_yticks(range(len(devices)))
        axis.set_yticklabels(['stage %d' % number for number in range(len(devices))])
        axis.invert_yaxis()
        axis.grid(axis='y', visible=False)
        axis.set_title('%s: busy %.0f %% of the step, %.0f %% predicted' % (
            'whole batch' if each['micro_batches'] == 1 else '%d micro-batches' % (
                each['micro_batches']), 100 * statistics.mean(step['use'].values()),
            100 * each['predicted']), fontsize=10)
    panels[-1, 0].set_xlabel('milliseconds of one traced step')
    figure.suptitle(title, fontsize=12, x=0.01, ha='left')
    figure.legend(
        handles=[plt.Rectangle((0, 0), 1, 1, color=colour) for colour in _COLOURS.values()],
        labels=['forward, sums, update', 'backward'], ncol=2, loc='upper right', fontsize=9)
    figure.tight_layout(rect=(0, 0, 1, 0.97))
    charts.save(figure, path)
    plt.close(figure)


def main(argv):
    """Measures, prints, draws."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--workloads', default='dense_halves,conv_halves')
    parser.add_argument('--rounds', type=int, default=7)
    parser.add_argument('--turn_seconds', type=float, default=2.)
    parser.add_argument('--plot', help='file for the picture, of the first workload')
    parser.add_argument('--json', help='file for the results')
    options = parser.parse_args(argv)
    everything = {}
    for number, workload in enumerate(options.workloads.split(',')):
        what = workloads.WORKLOADS[workload].what
        print('\n%s, batch %d' % (what, workloads.WORKLOADS[workload].batch_size(1)), flush=True)
        results = measure(workload, options.rounds, options.turn_seconds)
        check_losses(results)
        print('\n'.join(lines(results)), flush=True)
        everything[workload] = [dict(each, steps=len(each['steps'])) for each in results]
        if options.plot and number == 0:
            draw(results, '%s: two stages on two cores' % what, options.plot)
    if options.json:
        with open(options.json, 'w') as opened:
            json.dump(everything, opened, indent=1)


if __name__ == '__main__':
    main(sys.argv[1:])
