"""The look of every chart here: plain, legible as a small picture, and for the colour-blind."""

# Okabe and Ito's colours, in the order in which they differ most.
COLOURS = ['#0072B2', '#D55E00', '#009E73', '#CC79A7', '#E69F00', '#56B4E9', '#000000']


def pyplot():
    """matplotlib.pyplot, set up for this; draws to files alone.

    Raises:
      SystemExit: matplotlib is not installed. The text says how to install it.
    """
    try:
        import matplotlib  # pylint: disable=import-outside-toplevel
    except ImportError:
        raise SystemExit('Plots need matplotlib: pip install matplotlib (the extra plots), or pass '
                         '--noplots.')
    matplotlib.use('Agg')
    from matplotlib import pyplot as plt  # pylint: disable=import-outside-toplevel
    plt.rcParams.update({
        'figure.dpi': 110, 'savefig.dpi': 110, 'font.size': 11, 'axes.titlesize': 12,
        'axes.titleweight': 'bold', 'axes.titlelocation': 'left', 'axes.spines.top': False,
        'axes.spines.right': False, 'axes.grid': True, 'grid.color': '#dddddd',
        'grid.linewidth': 0.7, 'axes.axisbelow': True, 'lines.linewidth': 2.,
        'legend.frameon': False, 'figure.facecolor': 'white', 'axes.edgecolor': '#666666'})
    return plt


def save(figure, path):
    """Writes a PNG in 128 colours, which a chart does not exceed visibly: a third of the bytes."""
    from PIL import Image  # pylint: disable=import-outside-toplevel; matplotlib needs it as well
    figure.savefig(path)
    with Image.open(path) as picture:
        small = picture.convert('RGB').quantize(128)
    small.save(path, optimize=True)


def log_axis(axis):
    """A logarithmic axis with plain numbers: 0.1, 0.3, 1."""
    from matplotlib import ticker  # pylint: disable=import-outside-toplevel
    axis.set_major_locator(ticker.LogLocator(subs=(1., 3.)))
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: '%g' % value))
    axis.set_minor_locator(ticker.NullLocator())


def label_lines(axes, ends, gap=0.055):
    """Writes the names of lines beside their right ends, apart from each other.

    Args:
      axes: whose limits are final.
      ends: list of `(x, y, name, colour)`.
      gap: least distance of two names, as a share of the height.
    """
    to_axes = axes.transAxes.inverted()
    placed = []
    for x, y, name, colour in ends:
        at = to_axes.transform(axes.transData.transform((x, y)))
        placed.append([min(max(at[1], 0.), 1.), at[0], name, colour])
    placed.sort(key=lambda each: each[0])
    heights = _apart([each[0] for each in placed], gap)
    right = max(each[1] for each in placed)
    for height, (_, _, name, colour) in zip(heights, placed):
        axes.text(right + 0.04, height, name, transform=axes.transAxes, color=colour,
                  va='center', ha='left', clip_on=False)


def _apart(heights, gap):
    """The sorted heights moved up and down as little as keeps them `gap` apart."""
    groups = []  # [sum of wished bottoms, members]: each group stands evenly spaced
    for height in heights:
        groups.append([height, 1])
        while len(groups) > 1 and _bottom(groups[-2], gap) + groups[-2][1] * gap > _bottom(
                groups[-1], gap):
            above = groups.pop()
            groups[-1] = [groups[-1][0] + above[0], groups[-1][1] + above[1]]
    placed = []
    for group in groups:
        placed += [_bottom(group, gap) + gap * index for index in range(group[1])]
    return placed


def _bottom(group, gap):
    total, count = group
    return total / count - gap * (count - 1) / 2.
