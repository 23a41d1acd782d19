"""Table, CSV and picture of the cells."""

import csv
import statistics

from benchmarks import charts
from benchmarks.tower_speed.trace_split import PARTS

KINDS = ('batch a tower', 'batch in all')  # what stays the same while the towers grow in number


def figures(cell):
    """What a row shows of a cell that `measure` measured: a dict of numbers.

    `speed`: images/s, of the median step; `slowest` and `fastest`: of the slowest and of the
    fastest step.
    """
    seconds = cell['step_seconds']
    return {'speed': cell['batch_size'] / statistics.median(seconds),
            'slowest': cell['batch_size'] / max(seconds),
            'fastest': cell['batch_size'] / min(seconds)}


def table(rows):
    """The table as text.

    Args:
      rows: list of `(kind, cell or None, towers, batch_size, reason)`: a cell that failed has None
        and a reason.
    """
    lines = [['fixed', 'towers', 'batch', 'images/s', 'of 1 tower', 'step ms', 'build s',
              'step 1 s'] + ['%s ms' % part for part in PARTS] + ['not overlapped ms']]
    for kind, cell, towers, batch_size, reason in rows:
        start = [kind, '%d' % towers, '%d' % batch_size]
        if cell is None:
            lines.append(start + ['FAILED: ' + reason])
            continue
        speed, one = figures(cell), _one(rows, kind)
        lines.append(start + [
            '%s (%s-%s)' % tuple(_speed(speed[key]) for key in ('speed', 'slowest', 'fastest')),
            '-' if one is None else '%.2f' % (speed['speed'] / one),
            '%.1f' % (1e3 * statistics.median(cell['step_seconds'])),
            '%.1f' % cell['build_seconds'], '%.1f' % cell['first_step_seconds']]
            + ['%.1f' % (1e3 * cell['covered'][part]) for part in PARTS]
            + ['%.1f' % (1e3 * cell['not_overlapped'])])
    widths = [max(len(line[column]) for line in lines if column < len(line) and (
        column != 3 or len(line) > 4)) for column in range(len(lines[0]))]
    return '\n'.join('  '.join(text.ljust(width) for text, width in zip(line, widths)).rstrip()
                     for line in lines)


def write_csv(path, rows):
    """Writes a row a cell; times in seconds."""
    with open(path, 'w', newline='') as opened:
        writer = csv.writer(opened, lineterminator='\n')
        writer.writerow(['fixed', 'towers', 'batch_size', 'images_per_second', 'slowest',
                         'fastest', 'build_seconds', 'first_step_seconds', 'traced_step']
                        + ['covered_' + part for part in PARTS]
                        + ['exposed_' + part for part in PARTS] + ['not_overlapped', 'failure'])
        for kind, cell, towers, batch_size, reason in rows:
            values = [''] * (7 + 2 * len(PARTS))
            if cell is not None:
                speed = figures(cell)
                values = ['%.6g' % value for value in (
                    [speed['speed'], speed['slowest'], speed['fastest'], cell['build_seconds'],
                     cell['first_step_seconds'], cell['traced_step']]
                    + [cell['covered'][part] for part in PARTS]
                    + [cell['exposed'][part] for part in PARTS]
                    + [cell['not_overlapped']])]
            writer.writerow([kind, towers, batch_size] + values + [reason])


def draw(rows, path, title):
    """Writes the picture: images/s by towers, and the parts of a step by towers."""
    plt = charts.pyplot()
    figure, (speeds, parts) = plt.subplots(1, 2, figsize=(11.6, 4.4))
    ends, counts = [], sorted({towers for _, _, towers, _, _ in rows})
    for kind, colour in zip(KINDS, charts.COLOURS):
        done = [(towers, figures(cell)) for row_kind, cell, towers, _, _ in rows
                if cell is not None and row_kind == kind]
        if not done:
            continue
        x = [towers for towers, _ in done]
        speeds.fill_between(x, [f['slowest'] for _, f in done], [f['fastest'] for _, f in done],
                            color=colour, alpha=0.13, linewidth=0)
        speeds.plot(x, [f['speed'] for _, f in done], color=colour, marker='o')
        ends.append((x[-1], done[-1][1]['speed'], 'fixed ' + kind, colour))
    speeds.set_xscale('log', base=2)
    speeds.set_ylim(bottom=0)
    speeds.set_title('Images per second')
    if ends:
        charts.label_lines(speeds, ends, gap=0.08)
    fixed = [(towers, cell) for kind, cell, towers, _, _ in rows
             if cell is not None and kind == KINDS[1]]
    for part, colour in zip(PARTS, charts.COLOURS):
        parts.plot([towers for towers, _ in fixed],
                   [1e3 * max(cell['covered'][part], 1e-6) for _, cell in fixed], color=colour,
                   marker='o', label=part)
    parts.plot([towers for towers, _ in fixed], [1e3 * cell['traced_step'] for _, cell in fixed],
               color='#555555', linestyle='--', label='whole step')
    parts.set_xscale('log', base=2)
    parts.set_yscale('log')
    charts.log_axis(parts.yaxis)
    parts.set_title('Time that each part covers, ms, fixed batch in all')
    if fixed:
        charts.label_lines(parts, [
            (line.get_xdata()[-1], line.get_ydata()[-1], line.get_label(), line.get_color())
            for line in parts.get_lines()], gap=0.07)
    for plot in (speeds, parts):
        plot.set_xticks(counts)
        plot.xaxis.set_major_formatter(lambda value, _: '%g' % value)
        plot.minorticks_off()
        plot.set_xlabel('towers')
    figure.suptitle(title, x=0.01, ha='left', fontsize=13)
    figure.tight_layout(w_pad=3)
    charts.save(figure, path)
    plt.close(figure)


def _one(rows, kind):
    """Images/s of one tower among the rows of a kind, or None."""
    for row_kind, cell, towers, _, _ in rows:
        if row_kind == kind and towers == 1 and cell is not None:
            return figures(cell)['speed']
    return None


def _speed(value):
    return '%.0f' % value if value >= 10 else '%.2g' % value
