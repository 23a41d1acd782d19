"""Costs against sizes, drawn; needs matplotlib, which the extra `plots` brings."""


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
