"""The picture of a set: loss and accuracy of every arm, by examples and by time."""

from benchmarks import charts
from benchmarks.batch_scaling.results import by_arm

# One colour an arm, whichever others are there; with warm-up, its line is dashed. Points of another
# batch than N B are its factor.
_COLOURS = dict(zip(['one', 'sqrt', 'same', 'linear', 'big', 'sync'], charts.COLOURS))
_NOTES = {'one': 'one tower', 'sqrt': 'the claim', 'same': 'unscaled', 'linear': 'linear',
          'big': 'no towers', 'sync': 'batch norm in sync'}


def draw(results, path, title):
    """Writes a PNG.

    Args:
      results: list of `RunResult`; those that failed are drawn as far as they came.
      path: of the file.
      title: over all of it.
    """
    plt = charts.pyplot()
    figure, axes = plt.subplots(2, 2, figsize=(12.4, 7.6), sharey='row', sharex='col')
    for row, (measure, name) in enumerate((('accuracy', 'Test accuracy'), ('loss', 'Test loss'))):
        for column, (position, unit) in enumerate((
                ('examples', 'examples seen'),
                ('seconds', 'seconds of training, without evaluations'))):
            plot = axes[row][column]
            ends = [_draw_arm(plot, arm, of_arm, position, measure)
                    for arm, of_arm in by_arm(results).items()]
            ends = [end for end in ends if end is not None]
            if measure == 'loss':
                _log_scale(plot, results)
            else:
                plot.set_ylim(min(0.5, _least_accuracy(results)), 1.0)
            plot.set_xlim(left=0)
            plot.set_title('%s by %s' % (name, 'examples' if column == 0 else 'time'))
            if row == 1:
                plot.set_xlabel(unit)
            if column == 1 and row == 0:
                _legend(figure, ends, results)
    figure.suptitle(title, x=0.01, ha='left', fontsize=13)
    figure.tight_layout(rect=(0, 0.07, 1, 0.98))
    charts.save(figure, path)
    plt.close(figure)


def _draw_arm(plot, arm, results, position, measure):
    """One arm's mean line and its band from least to greatest; returns the line's handle."""
    curves = [result.points for result in results if result.points]
    if not curves:
        return None
    colour = _COLOURS[arm.kind]
    style = '--' if arm.warmup_epochs else '-'
    factor = [part[1:] for part in arm.key.split('-') if part[0] == 'x']
    marker = dict(marker='$%s$' % factor[0], markersize=8) if factor else dict(
        marker='o', markersize=4)
    # Seeds are compared where all of them have an evaluation.
    common = min(len(points) for points in curves)
    x = [_mean([getattr(points[i], position) for points in curves]) for i in range(common)]
    values = [[getattr(points[i], measure) for points in curves] for i in range(common)]
    if len(curves) > 1:
        plot.fill_between(x, [min(v) for v in values], [max(v) for v in values], color=colour,
                          alpha=0.13, linewidth=0)
    line, = plot.plot(x, [_mean(v) for v in values], style, color=colour, **marker)
    for points in curves:  # one that ended early, a failure too, goes on thin
        if len(points) > common:
            plot.plot([getattr(p, position) for p in points[common - 1:]],
                      [getattr(p, measure) for p in points[common - 1:]], style, color=colour,
                      linewidth=0.9)
    return line, arm


def _legend(figure, ends, results):
    failed = {result.arm for result in results if result.status != 'finished'}
    names = ['%s (%s)%s' % (arm.label, _NOTES[arm.kind],
                            ', not all finished' if arm in failed else '') for _, arm in ends]
    figure.legend([line for line, _ in ends], names, loc='lower center', ncol=3,
                  fontsize=10.5, handlelength=2.4)


def _log_scale(plot, results):
    losses = [p.loss for result in results for p in result.points if p.loss > 0]
    if losses and max(losses) > 8 * min(losses):
        plot.set_yscale('log')
        charts.log_axis(plot.yaxis)


def _least_accuracy(results):
    """The bottom of the axis: 0 where there are bad ones, else closer to what there is."""
    least = min([p.accuracy for result in results for p in result.points] or [0.])
    return 0. if least < 0.5 else 0.05 * int(least / 0.05)


def _mean(values):
    return sum(values) / float(len(values))
