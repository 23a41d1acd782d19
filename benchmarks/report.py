"""The results as text: ratios first, then milliseconds, then everything else, then the aims."""

from benchmarks import aims, contest, machine

_OTHERS = [peer for peer in contest.PEERS if peer != 'towers']


def report(results):
    """The whole table, a string, from the results that there are."""
    lines = machine.lines(results['machine'])
    for run in results.get('runs', []):
        lines.append('run: %(arguments)s, %(when)s, load %(load).2f' % run)
    for part, to_lines in (('steps', _steps), ('combinations', _variants),
                           ('placements', _variants), ('threads', _variants),
                           ('memory', _memory), ('combination', _combination),
                           ('overlap', _overlap), ('overhead', _overhead),
                           ('start_up', _start_up), ('scale', _scale)):
        if results.get(part):
            lines += [''] + to_lines(results[part], part)
    for cell, reason in sorted(results.get('left_out', {}).items()):
        lines.append('left out: %s: %s' % (cell, reason))
    quick = any('--quick' in run['arguments'].split() for run in results.get('runs', []))
    return '\n'.join(lines + [''] + (QUICK if quick else [])
                     + aim_lines(aims.judge(results), judged=not quick))


QUICK = [
    'This was a quick run. It tells whether everything runs, whether all contenders compute the',
    'same numbers (DIFFERS where they do not), and differences of a factor of two or so. It cannot',
    'tell 10 % one way or the other, and on a machine that does other work (see load) still less:',
    'its few short rounds are no judgement of any aim. Without --quick it takes hours, and judges.']


def aim_lines(verdicts, judged=True):
    """One line an aim: target, worst measured value and where, met or missed.

    Args:
      verdicts: list of `Verdict`.
      judged: False leaves out what is met and missed: of a run too short to tell.
    """
    lines = ['%-52s %-15s %8s' % ('aim', 'target', 'measured')]
    for verdict in verdicts:
        if verdict.worst is None:
            lines.append('%-52s %-15s %8s  not measured' % (verdict.text, verdict.target, '-'))
            continue
        outcome = ('MISSED in %d of %d' % (len(verdict.missed), verdict.cells) if verdict.missed
                   else 'met' if verdict.cells == 1 and not verdict.absent
                   else 'met in %d' % verdict.cells)
        if not judged:
            outcome = 'not judged'
        elif verdict.absent:
            outcome += ', not measured in %d' % len(verdict.absent)
        lines.append('%-52s %-15s %8.3g  %s (%s: %s)' % (
            verdict.text, verdict.target, verdict.worst, outcome,
            'worst' if verdict.cells > 1 else 'in', verdict.where))
    return lines


def _by_number(cells):
    return sorted(cells.items(), key=lambda pair: int(pair[0]))


def _ratio(spread):
    return '-' if spread is None else '%.2f (%.2f..%.2f)' % (
        spread['median'], spread['least'], spread['most'])


def _steps(part, _):
    lines = ["a step of towers over the other's: median (least..most over rounds); below 1 towers "
             'are faster', '%-16s %6s %5s' % ('workload', 'towers', 'batch')
             + ''.join(' %-18s' % peer for peer in _OTHERS)]
    for workload, cells in part.items():
        for count, cell in _by_number(cells):
            lines.append('%-16s %6s %5d' % (workload, count, cell['batch']) + ''.join(
                ' %-18s' % _ratio(cell['ratios'].get(peer)) for peer in _OTHERS))
    lines += _medians(part, 'milliseconds', 'milliseconds a step (median)')
    lines += _medians(part, 'cpu_milliseconds', 'milliseconds of processor time a step, all cores '
                      'and processes together (median): a busy machine matters less to it')
    return lines + _failures(part)


def _medians(part, kind, title):
    lines = ['', title, '%-16s %6s' % ('workload', 'towers')
             + ''.join(' %17s' % peer for peer in contest.PEERS) + '  threads']
    for workload, cells in part.items():
        for count, cell in _by_number(cells):
            lines.append('%-16s %6s' % (workload, count) + ''.join(
                ' %17s' % _median(cell[kind].get(peer)) for peer in contest.PEERS)
                         + '  %s' % _threads(cell))
    return lines


def _threads(cell):
    """Each peer's number of intra-op threads, the fastest of those tried."""
    by_count = {}
    for peer, count in cell['threads'].items():
        by_count.setdefault(count, []).append(peer)
    return '; '.join('%s: %s' % ('default' if count == 0 else '%d thread%s' % (
        count, 's'[:count != 1]), ' '.join(peers)) for count, peers in sorted(by_count.items()))


def _median(spread):
    return '-' if spread is None else '%.2f' % spread['median']


def _failures(part):
    return ['%s, %s towers: %s: %s' % (workload, count, label,
                                       reason if not reason.startswith('DIFFERS')
                                       else '*** ' + reason + ' ***')
            for workload, cells in part.items() for count, cell in _by_number(cells)
            for label, reason in sorted(cell['failures'].items())]


def _variants(part, name):
    title = {'combinations': 'ways to add up gradients', 'placements': 'where variables live',
             'threads': 'intra-op threads of towers'}[name]
    lines = ['%s: ms a step (least..most), over the first of each cell, round by round; '
             'processor time' % title]
    for workload, cells in part.items():
        for count, cell in _by_number(cells):
            for label, spread in cell['milliseconds'].items():
                ratio = cell['ratios'].get(label)  # of the first one over this one
                lines.append('  %-12s %2s towers  %-26s %9.2f (%.2f..%.2f)  %5.2f  %9.2f' % (
                    workload, count, label, spread['median'], spread['least'], spread['most'],
                    1 / ratio['median'] if ratio else 1.,
                    cell['cpu_milliseconds'][label]['median']))
    return lines + _failures(part)


def _memory(part, _):
    lines = ["peak memory, MB: of TensorFlow's allocator in a step, and of the process; over the "
             "recipe's"]
    for workload, cells in part.items():
        for count, cell in _by_number(cells):
            recipe = cell['peaks'].get('recipe', {})
            for label, peak in cell['peaks'].items():
                lines.append('  %-12s %2s towers  %-26s %s' % (workload, count, label, peak.get(
                    'failure') or '%s  %s' % tuple(_megabytes(peak[kind], recipe.get(kind))
                                                   for kind in ('allocator', 'resident'))))
    return lines


def _megabytes(used, of_recipe):
    if not used:
        return '%9s       ' % 'not told'
    return '%9.0f %s' % (used / 1e6, ' %.2f ' % (used / float(of_recipe)) if of_recipe else '')


def _combination(part, _):
    lines = ['combination alone: GB/s, and its share of what memory gives the same access']
    for cell, rates in part['dense'].items():
        lines.append('  %-24s %6.1f GB/s  %s of %.1f;  %s of %.1f into fresh memory' % (
            cell, rates['combination']['median'], _ratio(rates['share']),
            rates['memory']['median'], _ratio(rates['share_fresh']),
            rates['memory_fresh']['median']))
    for kind, what in (('rows', 'touched rows'), ('tables', 'rows of the table')):
        grown = part['sparse'][kind]
        lines.append('  sparse, against %-18s slope %.2f  (%s)' % (what, grown['slope'], ', '.join(
            '%d: %.2f ms' % pair for pair in zip(grown['sizes'], grown['milliseconds']))))
    return lines


def _overlap(part, _):
    return ['%s, %s towers: %s' % (workload, count, cell.get('failure') or (
        '%.0f %% of the combination ran before the last gradient was there (%.1f ms of operations; '
        'backward pass to %.1f ms)' % (
            100 * cell['share'], cell['combination'], cell['backward'])))
            for workload, cells in part.items() for count, cell in _by_number(cells)]


def _overhead(part, _):
    lines = ['microseconds a step of a graph with next to nothing in it, and above a callable that '
             'fetches']
    for way, spread in part.items():
        lines.append('  %-32s %8.1f (%.1f..%.1f)  %+8.1f (%+.1f..%+.1f)' % (
            (way,) + tuple(each[kind] for each in (spread, spread['above'])
                           for kind in ('median', 'least', 'most'))))
    return lines


def _start_up(part, _):
    parts = ('import', 'build', 'session', 'initialisation', 'first run', 'total')
    lines = ['seconds from the start of the process to the end of step 1',
             '  %-20s %-6s %6s' % ('network', 'copies', 'towers')
             + ''.join(' %14s' % name for name in parts) + '  further tower']
    for network, ways in part.items():
        for copies, way in ways.items():
            for count, start in _by_number(way['starts']):
                cells = start.get('failure') or ''.join(' %14.2f' % start[name] for name in parts)
                share = way['further'].get(count)
                lines.append('  %-20s %-6s %6s%s%s' % (
                    network, copies, count, cells,
                    '' if share is None else '  %.2f of the first' % share))
    return lines


def _scale(part, _):
    lines = ['growth: slope over the larger half (1 is linear), and the largest value']
    for what, grown in part.items():
        for cost, values in grown['costs'].items():
            lines.append('  %-16s against %s to %-11d %s  %.4g' % (
                cost, what, grown['sizes'][-1],
                '%6.2f' % grown['slopes'][cost] if cost in grown['slopes'] else '     -',
                values[-1]))
    return lines
