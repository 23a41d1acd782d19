"""The aims, as data: what is wanted, and where in the results it is measured."""

import collections

from benchmarks.workloads import DEFAULT

Aim = collections.namedtuple('Aim', 'text limit at_most values expected')
Aim.__new__.__defaults__ = (lambda results: [],)
"""One aim.

Fields:
  text: what is wanted, in words.
  limit: the number.
  at_most: True where a measured value may not be above the limit, False where not below.
  values: function from results to a dict from a cell's name to its measured value.
  expected: function from results to the names of cells that are meant, measured or not.
"""

Verdict = collections.namedtuple('Verdict', 'text target worst where cells missed absent')
"""An aim and what was measured: the worst value, its cell, of how many cells which missed it, and
which are meant and were not measured. `worst` is None where nothing was measured."""

_CONVOLUTIONAL = ('digits', 'small_conv', 'resnet50', 'inception_resnet')
_SHARD = 8  # the least examples of a tower for the floor's aim
_LINEAR = 1.05  # slopes above it are worse than linear; the rest is the clock's noise


def judge(results, aims=None):
    """List of `Verdict`, one an aim, in order."""
    verdicts = []
    for aim in AIMS if aims is None else aims:
        values = aim.values(results)
        worst = None
        if values:
            worst = (max if aim.at_most else min)(values, key=values.get)
        missed = [cell for cell, value in values.items()
                  if (value > aim.limit if aim.at_most else value < aim.limit)]
        target = '%s %g' % ('at most' if aim.at_most else 'at least', aim.limit)
        verdicts.append(Verdict(aim.text, target, values[worst] if values else None, worst,
                                len(values), missed,
                                [cell for cell in aim.expected(results) if cell not in values]))
    return verdicts


def _ratio(peer, workloads=None, towers=None, cores_only=False, of_cell=None):
    """Values: the median of towers' step over a peer's, or `of_cell(cell, peer)`, cell by cell."""
    def values(results):
        found = {}
        for workload, cells in results.get('steps', {}).items():
            for count, cell in cells.items():
                fits = ((workloads is None or workload in workloads)
                        and (towers is None or int(count) in towers)
                        and (not cores_only or int(count) == results['machine']['cores'])
                        and (peer != 'floor' or cell['batch'] // int(count) >= _SHARD))
                if fits and peer in cell['ratios']:
                    found['%s, %s towers' % (workload, count)] = (
                        of_cell(cell, peer) if of_cell else cell['ratios'][peer]['median'])
        return found
    return values


def _of_processor_time(cell, peer):
    if 'cpu_ratios' in cell:
        return cell['cpu_ratios'][peer]['median']
    medians = cell['cpu_milliseconds']  # a cell of before there were heats
    return medians['towers']['median'] / medians[peer]['median']


def _cells(workloads, towers):
    """Expected: all of these workloads on all of these numbers of towers; None: what there is."""
    def cells(results):
        counts = (results['machine']['cores'],) if towers is None else towers
        return ['%s, %d towers' % (workload, count)
                for workload in workloads or DEFAULT for count in counts]
    return cells


def _memory(kind):
    """Values: towers' peak over the recipe's, on the parameter-heavy net at 4 towers."""
    def values(results):
        peaks = results.get('memory', {}).get('dense', {}).get('4', {}).get('peaks', {})
        ours, theirs = [peaks.get(label, {}).get(kind) for label in ('towers', 'recipe')]
        return {'dense, 4 towers': ours / float(theirs)} if ours and theirs else {}
    return values


def _dense_shares(results):
    return {cell: rates['share']['median']
            for cell, rates in results.get('combination', {}).get('dense', {}).items()}


def _sparse(kind):
    def values(results):
        grown = results.get('combination', {}).get('sparse', {}).get(kind)
        return {kind: grown['slope']} if grown else {}
    return values


def _overlap(results):
    return {'%s, %s towers' % (workload, count): cell['share']
            for workload, cells in results.get('overlap', {}).items()
            for count, cell in cells.items() if 'share' in cell}


def _python(way):
    """Values: microseconds a step of one way of running it, above a callable's with its fetches."""
    def values(results):
        measured = results.get('overhead', {})
        return {way: measured[way]['above']['median']} if way in measured else {}
    return values


def _further_towers(results):
    return {'%s, %s towers' % (network, count): share
            for network, starts in results.get('start_up', {}).items()
            for count, share in starts.get('clone', {}).get('further', {}).items()}


def _eight_towers(results):
    found = {}
    for network, starts in results.get('start_up', {}).items():
        ways = starts.get('clone', {}).get('starts', {})
        if 'total' in ways.get('1', {}) and 'total' in ways.get('8', {}):
            found[network] = ways['8']['total'] / ways['1']['total']
    return found


def _slopes(results):
    return {'%s against %s' % (cost, what): slope
            for what, grown in results.get('scale', {}).items()
            for cost, slope in grown['slopes'].items()}


_MANY = (2, 4, 8)
AIMS = (
    Aim('a step over the floor, conv nets', 1.02, True, _ratio('floor', _CONVOLUTIONAL, _MANY),
        _cells(_CONVOLUTIONAL, _MANY)),
    Aim("processor time over the floor's, conv nets", 1.02, True,
        _ratio('floor', _CONVOLUTIONAL, _MANY, of_cell=_of_processor_time),
        _cells(_CONVOLUTIONAL, _MANY)),
    Aim('a step over the floor, parameter-heavy', 0.95, True, _ratio('floor', ('dense',), _MANY),
        _cells(('dense',), _MANY)),
    Aim('never slower than one device, towers = cores', 1., True,
        _ratio('one_device', cores_only=True), _cells(None, None)),
    Aim('a step over the recipe, dense, 4 towers', 0.55, True, _ratio('recipe', ('dense',), (4,))),
    Aim("peak memory over the recipe's (TF's allocator)", 0.65, True, _memory('allocator')),
    Aim("peak memory over the recipe's (whole process)", 0.65, True, _memory('resident')),
    Aim('ahead of MirroredStrategy, graph, everywhere', 1., True,
        _ratio('mirrored_graph', towers=_MANY), _cells(None, _MANY)),
    Aim('ahead of MirroredStrategy, tf.function, everywhere', 1., True,
        _ratio('mirrored_function', towers=_MANY), _cells(None, _MANY)),
    Aim('MirroredStrategy, graph, small net, 4 towers', 0.80, True,
        _ratio('mirrored_graph', ('small_conv',), (4,))),
    Aim('MirroredStrategy, tf.function, small net, 4 towers', 0.70, True,
        _ratio('mirrored_function', ('small_conv',), (4,))),
    Aim("combination, share of the memory's bandwidth", 0.80, False, _dense_shares),
    Aim('sparse combination, slope in touched rows', _LINEAR, True, _sparse('rows')),
    Aim('sparse combination, slope in rows of the table', 0.1, True, _sparse('tables')),
    Aim('combination that overlaps with the backward pass', 0.01, False, _overlap),
    Aim("Python a step, train.py's loop, microseconds", 50., True, _python("train.py's loop")),
    Aim("build of a further tower over the first one's", 0.15, True, _further_towers),
    Aim('to the end of step 1: 8 towers over 1', 2., True, _eight_towers),
    Aim('growth, slope', _LINEAR, True, _slopes),
)
