"""Measures towers beside what people would pick instead: `make bench`.

    python -m benchmarks.bench                                   everything: takes hours
    python -m benchmarks.bench --quick                           a little of everything, a minute
    python -m benchmarks.bench --only=steps --workloads=dense --towers=2,4
    python -m benchmarks.bench report                            the table of what has been measured

Results are merged into one JSON file, cell by cell, so parts can be run one by one; the table of
all that is in it is printed at the end. Contenders: see `contest.PEERS`; how they take turns:
`turns`; what they train: `workloads`; what is aimed at: `aims`.
"""

import argparse
import functools
import json
import os
import subprocess
import sys
import time

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from benchmarks import contest, machine, memory, plots, start_up, turns  # noqa: E402
from benchmarks.report import report  # noqa: E402
from benchmarks.results import Results  # noqa: E402
from benchmarks.workloads import DEFAULT, WORKLOADS  # noqa: E402


class Bench:
    """The parts; each is a method that measures and keeps its results."""

    def __init__(self, results, quick, workloads, towers, minutes):
        self._results, self._quick = results, quick
        self._workloads, self._towers = workloads, towers
        self._effort = contest.Effort(quick)
        self._begin, self._seconds = time.monotonic(), 60. * minutes

    def steps(self):
        """Towers against every peer."""
        for name in self._workloads or (('digits',) if self._quick else DEFAULT):
            for count in self._counts((2,) if self._quick else WORKLOADS[name].towers):
                self._contest('steps', [functools.partial(
                    contest.peers, names=names, probe=not self._quick,
                    known=self._threads_of_fewer(name, count))
                    for names in contest.heats(name, count)], name, count)

    def _threads_of_fewer(self, name, count):
        """{peer: threads} that were fastest for fewer towers of a deep network, or None.

        Its peers are slow to start: what was found on as many towers as there are cores, or on the
        next number, is taken for more.
        """
        cores = os.cpu_count() or 1
        measured = {}
        if WORKLOADS[name].deep:
            measured = self._results.values.get('steps', {}).get(name, {})
        fewer = [each for each in map(int, measured) if cores <= each < count]
        return measured[str(min(fewer))]['threads'] if fewer else None

    def combinations(self):
        """Ways to add up gradients, on the parameter-heavy net."""
        self._variants('combinations', contest.combinations, ('dense',), (4,))

    def placements(self):
        """Where variables live."""
        self._variants('placements', contest.placements, ('dense', 'small_conv'), (2,))

    def threads(self):
        """Thread settings for towers."""
        self._variants('threads', contest.threads, ('small_conv', 'dense'), (2, 4))

    def memory(self):
        """Peak memory."""
        names = self._workloads or (('digits',) if self._quick else ('dense',))
        peers = ('towers', 'recipe') if self._quick else contest.PEERS
        for name in names:
            for count in self._counts((2,) if self._quick else (4,)):
                if self._has_time('memory', name, count):
                    for label, peak in memory.measure(name, count, peers,
                                                      variants=not self._quick):
                        self._log('%s: %s' % (label, peak))
                        self._results.put(['memory', name, str(count), 'peaks', label], peak)

    def overlap(self):
        """Combination under the backward pass, from a trace, with a picture of it."""
        for name in self._workloads or (('digits',) if self._quick else ('dense', 'small_conv')):
            for count in self._counts((2,) if self._quick else (4,)):
                if self._has_time('overlap', name, count):
                    traced = self._traced(name, count)
                    self._results.put(['overlap', name, str(count)], traced)
                    if 'timeline' in traced:
                        self._draw('overlap-%s-%d' % (name, count), plots.draw_timeline,
                                   'a step of %d towers, %s' % (count, name), traced['timeline'])

    def combination(self):
        """The combination alone, against the memory's bandwidth."""
        self._results.put(['combination'], self._json_of('combination'))

    def overhead(self):
        """A step with nothing in it."""
        self._results.put(['overhead'], self._json_of('step_overhead'))

    def scale(self):
        """Growth with towers and parameters, with pictures where matplotlib is."""
        grown = self._json_of('scale', {'TF_CPU_ALLOCATOR_USE_BFC': 'true'})
        self._results.put(['scale'], grown)
        for what, costs in grown.items():
            self._draw('scale-%s' % what, plots.draw_growth, what, costs)

    def start_up(self):
        """To the end of step 1. Towers beyond one need the start with one, so that comes first."""
        networks = {'digits': 1} if self._quick else {'inception_v3': 3, 'inception_resnet_v2': 2}
        for network, rounds in networks.items():
            for copies, counts in (('clone', (1, 2) if self._quick else (1, 2, 4, 8)),
                                   ('reuse', () if self._quick else (1, 2))):
                counts = sorted(set((1,) + tuple(self._counts(counts)))) if counts else ()
                found = {str(count): [] for count in counts}
                for _ in range(rounds):
                    for count in counts:
                        if self._has_time('start_up', '%s, %s' % (network, copies), count):
                            found[str(count)].append(
                                start_up.measure(network, count, copies, turns.ROOT))
                            self._log(str(found[str(count)][-1]))
                starts = {count: start_up.medians(each) for count, each in found.items() if each}
                further = {count: start_up.further_tower(starts, int(count)) for count in starts
                           if count != '1' and 'build' in starts[count] and 'build' in starts['1']}
                if starts:
                    self._results.put(['start_up', network, copies],
                                      {'starts': starts, 'further': further, 'every': found})

    def _draw(self, name, draw, *arguments):
        path = self._results.beside(name + '.png')
        try:
            draw(*(arguments + (path,)))
            self._log('wrote %s' % path)
        except ImportError:
            self._log('no picture %s: that takes matplotlib (the extra plots)' % name)

    def _variants(self, part, contenders, names, counts):
        for name in self._workloads or names:
            for count in self._counts(counts):
                self._contest(part, [contenders], name, count)

    def _contest(self, part, contenders, name, count):
        """Holds one, unless the time is over.

        Args:
          part: its name in the results.
          contenders: one function a heat, from workload and number of towers to contenders.
          name: of the workload.
          count: number of towers.
        """
        if self._has_time(part, name, count):
            self._results.put([part, name, str(count)], contest.joined([
                contest.hold(heat(name, count), WORKLOADS[name], self._effort, self._log)
                for heat in contenders]))

    def _traced(self, name, count):
        contender = turns.Contender('towers', [contest.spec(name, count, 'towers')])
        try:
            contender.start()
            return contender.ask('overlap')[0] if not contender.failure else {
                'failure': contender.failure}
        except turns.ContenderError as error:
            return {'failure': str(error)}
        finally:
            contender.close()

    def _json_of(self, module, environment=None):
        command = [sys.executable, '-m', 'benchmarks.%s' % module]
        done = subprocess.run(command + ['--quick'] * self._quick, cwd=turns.ROOT,
                              env=dict(os.environ, **(environment or {})), check=True,
                              stdout=subprocess.PIPE, universal_newlines=True)
        return json.loads(done.stdout.splitlines()[-1])

    def _counts(self, default):
        return self._towers or default

    def _has_time(self, part, name, count):
        cell = '%s, %s, %d towers' % (part, name, count)
        if time.monotonic() - self._begin > self._seconds:
            self._results.leave_out(cell, 'the time given was over')
            return False
        self._results.take_back_in(cell)
        self._log(cell)
        return True

    def _log(self, text):
        print('%6.0f s  %s' % (time.monotonic() - self._begin, text), file=sys.stderr)


PARTS = ('steps', 'combinations', 'placements', 'threads', 'memory', 'overlap', 'combination',
         'overhead', 'scale', 'start_up')
QUICK_PARTS = ('steps', 'overlap', 'combination', 'overhead', 'scale')


def main(arguments=None):
    """Runs what the command line says; prints the table."""
    parser = argparse.ArgumentParser(prog='bench', description=__doc__.split('\n')[0])
    parser.add_argument('what', nargs='?', choices=('run', 'report'), default='run')
    parser.add_argument('--quick', action='store_true',
                        help='a little of everything in a minute or so, noisy')
    parser.add_argument('--only', type=_names(PARTS), help='parts: ' + ', '.join(PARTS))
    parser.add_argument('--workloads', type=_names(WORKLOADS),
                        help='instead of each part\'s own: ' + ', '.join(WORKLOADS))
    parser.add_argument('--towers', type=_counts, help="numbers, instead of each part's own")
    parser.add_argument('--minutes', type=float, default=float('inf'),
                        help='no further cell is begun after so long; the table says which')
    parser.add_argument('--results', help='JSON file to merge into')
    options = parser.parse_args(arguments)
    described = machine.describe()
    results = Results(options.results or os.path.join(turns.ROOT, 'benchmarks', 'results', (
        'quick-%s.json' if options.quick else 'bench-%s.json') % described['tensorflow']))
    if options.what == 'run':
        for line in machine.lines(described):
            print(line, file=sys.stderr)
        results.begin(described, ' '.join(sys.argv[1:] if arguments is None else arguments))
        bench = Bench(results, options.quick, options.workloads, options.towers, options.minutes)
        for part in options.only or (QUICK_PARTS if options.quick else PARTS):
            getattr(bench, part)()
    elif not results.exists():
        parser.error('%s is not there: nothing has been measured' % results.path)
    print(report(results.values))
    print('\nresults: %s' % results.path)
    if options.what == 'report':
        draw_peers(results)


def draw_peers(results):
    """Writes the picture of four towers beside the peers, if both were measured.

    Args:
      results: `Results`.
    """
    ratios = {workload: {peer: ratio['median'] for peer, ratio in cells['4']['ratios'].items()}
              for workload, cells in results.values.get('steps', {}).items() if '4' in cells}
    peaks = results.values.get('memory', {}).get('dense', {}).get('4', {}).get('peaks', {})
    if ratios and peaks:
        path = results.beside('peers.png')
        try:
            plots.draw_peers(ratios, {peer: peak['allocator'] for peer, peak in peaks.items()
                                      if peak.get('allocator')}, path)
            print('picture: %s' % path)
        except ImportError:
            print('no picture: that takes matplotlib (the extra plots)')


def _names(known):
    def parse(text):
        names = text.split(',')
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError('there is no %r: expected %s' % (
                    name, ', '.join(known)))
        return names
    return parse


def _counts(text):
    counts = [int(each) if each.isdigit() else 0 for each in text.split(',')]
    if min(counts) < 1:
        raise argparse.ArgumentTypeError('%r: expected numbers such as 2,4' % text)
    return counts


if __name__ == '__main__':
    main()
