"""Costs against sizes, and a step's trace, drawn.

They need matplotlib, which the extra `plots` brings.
"""

_COLOURS = {'forward': '#56B4E9', 'backward': '#0072B2', 'combination': '#D55E00',
            'update': '#009E73'}


def draw_growth(name, grown, path):
    """Writes a picture of what `scale.with_slopes` returned, on logarithmic axes.

    Args:
      name: what grows, 'towers' or 'parameters'.
      grown: dict.
      path: of the PNG file.

    Raises:
      ImportError: there is no matplotlib.
    """
    import matplotlib
    matplotlib.use('Agg')
    from matplotlib import pyplot
    costs = grown['slopes']
    figure, axes = pyplot.subplots(1, len(costs), figsize=(4 * len(costs), 3.4))
    for axis, (cost, slope) in zip(axes, costs.items()):
        values = grown['costs'][cost]
        axis.loglog(grown['sizes'], values, 'o-')
        axis.loglog(grown['sizes'], [values[-1] * size / float(grown['sizes'][-1])
                                     for size in grown['sizes']], ':', color='gray')
        axis.minorticks_off()
        axis.set_title('%s, slope %.2f' % (cost, slope), fontsize=10)
        axis.set_xlabel('%s (dotted: linear)' % name)
    figure.tight_layout()
    figure.savefig(path, dpi=80)
    pyplot.close(figure)


def draw_timeline(title, rows, path):
    """Writes a picture of what `overlap.timeline` returned: a bar a tower, and what follows them.

    Args:
      title: of the picture.
      rows: list of `[row, kind, spans]`.
      path: of the PNG file.

    Raises:
      ImportError: there is no matplotlib.
    """
    import matplotlib
    matplotlib.use('Agg')
    from matplotlib import patches, pyplot
    names = list(dict.fromkeys(row for row, _, _ in rows))
    figure, axes = pyplot.subplots(figsize=(9, 0.8 + 0.42 * len(names)))
    for row, kind, spans in rows:
        # A thin edge of its own colour keeps the shortest operations visible.
        axes.broken_barh([(begin, end - begin) for begin, end in spans],
                         (names.index(row) - 0.38, 0.76), color=_COLOURS[kind], linewidth=0.6)
    axes.set_yticks(range(len(names)))
    axes.set_yticklabels(names)
    axes.invert_yaxis()
    axes.set_xlabel('milliseconds')
    axes.set_title(title, fontsize=10, loc='left')
    axes.legend(handles=[patches.Patch(color=colour, label=kind)
                         for kind, colour in _COLOURS.items()],
                fontsize=8, frameon=False, ncol=len(_COLOURS), loc='lower right',
                bbox_to_anchor=(1., 1.))
    for side in ('top', 'right'):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
