"""The table: one row an arm, none left out."""

from benchmarks.batch_scaling.results import by_arm, examples_to, finished


def table_rows(results, accuracy):
    """Header and rows as lists of strings.

    Args:
      results: list of `RunResult`.
      accuracy: that 'examples to' is about.
    """
    rows = [['arm', '', 'batch', 'rate', 'steps', 'examples', 'test loss', 'test accuracy',
             'examples to %g' % accuracy, 'images/s', 'seeds']]
    for arm, of_arm in by_arm(results).items():
        done = finished(of_arm)
        examples = max([r.points[-1].examples for r in of_arm if r.points] or [0])
        row = [arm.label, arm.key, '%d' % arm.batch_size, '%.4g' % arm.rate,
               '%d' % (examples // arm.batch_size), '{:,}'.format(examples)]
        if done:
            row += [spread([r.points[-1].loss for r in done], '%.4f'),
                    spread([r.points[-1].accuracy for r in done], '%.4f'),
                    _reached([examples_to(r, accuracy) for r in done]),
                    _speeds([r.images_per_second for r in done
                             if r.images_per_second is not None])]
        else:
            row += ['-', '-', '-', '-']
        row.append('%d of %d' % (len(done), len(of_arm)))
        rows.append(row)
    return rows


def spread(values, form):
    """The mean, and the least and the greatest where there are several: '0.95 (0.93-0.97)'."""
    if not values:
        return '-'
    mean = form % (sum(values) / len(values))
    if len(values) == 1:
        return mean
    return '%s (%s-%s)' % (mean, form % min(values), form % max(values))


def _speeds(values):
    return spread(values, '%.0f' if values and min(values) >= 10 else '%.3g')


def _reached(examples):
    reached = [each for each in examples if each is not None]
    if not reached:
        return 'never'
    text = spread(reached, '%.0f')
    return text if len(reached) == len(examples) else '%s in %d of %d' % (
        text, len(reached), len(examples))


def table(results, accuracy):
    """The table as text, and below it what failed."""
    rows = table_rows(results, accuracy)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ['  '.join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip()
             for row in rows]
    for result in results:
        if result.status != 'finished':
            lines.append('%s, seed %d: %s%s' % (
                result.arm.label, result.seed, result.status.upper(),
                ', ' + result.reason if result.reason else ''))
    return '\n'.join(lines)
