"""Costs against sizes, and a step's trace, drawn.

They need matplotlib, which the extra `plots` brings.
"""

# Okabe and Ito's, of which no two that touch are alike to the colour-blind.
_COLOURS = {'forward': '#56B4E9', 'backward': '#CC79A7', 'combination': '#D55E00',
            'update': '#009E73'}
# 'update' is all that is in no tower and no combination: it begins before the towers do.
_NAMES = {'update': 'cutting the batch, loss, update'}
_ROWS = {'update': 'outside of towers'}


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
    from matplotlib import pyplot, ticker
    costs = grown['slopes']
    figure, axes = pyplot.subplots(1, len(costs), figsize=(4 * len(costs), 3.4), squeeze=False)
    for axis, (cost, slope) in zip(axes[0], costs.items()):
        values = grown['costs'][cost]
        axis.loglog(grown['sizes'], values, 'o-')
        axis.loglog(grown['sizes'], [values[-1] * size / float(grown['sizes'][-1])
                                     for size in grown['sizes']], ':', color='gray')
        axis.set_xticks(grown['sizes'])
        axis.xaxis.set_major_formatter(ticker.EngFormatter(places=0, sep=''))
        axis.yaxis.set_major_locator(ticker.LogLocator(subs=(1., 2., 5.)))
        axis.yaxis.set_major_formatter(ticker.EngFormatter(unit=_unit(cost)))
        axis.minorticks_off()
        axis.grid(True, color='#dddddd', linewidth=0.7)
        axis.set_title('%s, slope %.2f' % (cost, slope), fontsize=10)
        axis.set_xlabel('%s (dotted: linear)' % name)
    figure.tight_layout()
    figure.savefig(path, dpi=80)
    pyplot.close(figure)


def _unit(cost):
    """`'s'` of 'build seconds', `'B'` of 'graph bytes', else none."""
    return {'seconds': 's', 'bytes': 'B'}.get(cost.rsplit(' ', 1)[-1], '')


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
    axes.set_yticklabels([_ROWS.get(name, name) for name in names])
    axes.invert_yaxis()
    axes.set_xlabel('milliseconds')
    axes.set_title(title, fontsize=10, loc='left')
    axes.legend(handles=[patches.Patch(color=colour, label=_NAMES.get(kind, kind))
                         for kind, colour in _COLOURS.items()],
                fontsize=8, frameon=False, ncol=len(_COLOURS), loc='lower right',
                bbox_to_anchor=(1., 1.))
    for side in ('top', 'right'):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


# The peers of `contest.PEERS` as a reader knows them, and the workloads that the picture shows.
_PEERS = {'one_device': 'one device, the whole batch', 'recipe': 'tower loop written by hand',
          'slim': "slim's model_deploy", 'mirrored_graph': 'MirroredStrategy, graph',
          'mirrored_function': 'MirroredStrategy, tf.function'}
_WORKLOADS = {'resnet50': 'ResNet-50', 'inception_resnet': 'InceptionResNet-v2', 'lstm': 'LSTM',
              'embedding': 'embedding, 10⁶ rows', 'dense': 'dense, 50 M weights'}


def draw_peers(ratios, peaks, path):
    """Writes a picture of the peers' steps and peak memory beside those of four towers.

    Args:
      ratios: dict from workloads to dicts from peers to the step of towers over that of the peer.
      peaks: dict from peers to their peak memory on the dense workload, in bytes.
      path: of the PNG file.

    Raises:
      ImportError: there is no matplotlib.
    """
    import matplotlib  # noqa: F401, raises where there is none
    from benchmarks import charts
    pyplot = charts.pyplot()
    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(10.5, 3.8), gridspec_kw={'width_ratios': [3, 2]})
    workloads = [each for each in _WORKLOADS if each in ratios]
    for number, (peer, name) in enumerate(_PEERS.items()):
        rows = [row for row, each in enumerate(workloads) if peer in ratios[each]]
        left.plot([1. / ratios[workloads[row]][peer] for row in rows],
                  [row + 0.13 * (number - 2) for row in rows], 'o', markersize=6,
                  color=charts.COLOURS[number], label=name)
    left.axvline(1., color='black', linewidth=1.2)
    left.set_xscale('log')
    left.set_xticks([1, 2, 4, 8, 16], labels=['1×', '2×', '4×', '8×', '16×'])
    left.set_xticks([], minor=True)
    left.set_yticks(range(len(workloads)), labels=[_WORKLOADS[each] for each in workloads])
    left.set_ylim(len(workloads) - 0.5, -0.5)
    left.set_title('Time of a step, four towers = 1×')
    left.set_xlabel('right of the line: slower than towers')
    left.legend(fontsize=8, loc='upper right')
    shown = {'towers': 'four towers', **_PEERS}
    bars = right.barh(range(len(shown)), [peaks.get(peer, 0) / 1e6 for peer in shown],
                      color=[charts.COLOURS[-1]] + charts.COLOURS[:len(_PEERS)])
    right.bar_label(bars, fmt='%.0f', padding=3, fontsize=9)
    right.set_yticks(range(len(shown)), labels=list(shown.values()), fontsize=9)
    right.invert_yaxis()
    right.set_xticks([])
    right.grid(False)
    right.spines['bottom'].set_visible(False)
    right.set_title('Peak memory, dense, MB')
    figure.tight_layout()
    charts.save(figure, path)
    pyplot.close(figure)
