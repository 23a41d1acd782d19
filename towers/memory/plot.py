"""A picture of a step's memory against the batch size: predicted, by kind, and measured."""

import typing

from towers.arguments import check_instance, check_number, directory_name
from towers.errors import InvalidArgumentError, MissingPackageError
from towers.memory.account import KINDS, MemoryAccount
from towers.safe_files import written_whole

# Okabe and Ito's colours and tints of them, which the colour-blind can tell apart as neighbours.
_COLOURS = {'parameters': '#0072B2', 'slots': '#56B4E9', 'other variables': '#9ad0ee',
            'initial values': '#cce5f5', 'constants': '#dddddd', 'input': '#000000',
            'activations': '#E69F00', 'forward': '#f5cf7a', 'gradients': '#009E73',
            'backward': '#7fceb9', 'updates': '#CC79A7', 'scratch': '#D55E00',
            'copies': '#F0E442', 'allocator': '#999999'}


def draw_memory(accounts: typing.Sequence, path: str, measured: typing.Sequence = (),
                limit: typing.Optional[float] = None, title: str = 'memory of a step') -> None:
    """Writes a PNG: the kinds of memory stacked, measured peaks as points, the limit as a line.

    Args:
      accounts: list of `MemoryAccount` at different batch sizes.
      path: name of the file.
      measured: list of `(batch size, bytes)`.
      limit: bytes that a step may take, or None.
      title: title of the picture.

    Raises:
      MissingPackageError: matplotlib is not installed.
      LogFileError: the file cannot be written.
      InvalidArgumentError: an argument of another kind.
    """
    path = directory_name('path', path, 'the name of a file')
    _check_arguments(accounts, measured, limit, title)
    try:
        import matplotlib  # pylint: disable=import-outside-toplevel
    except ImportError:
        raise MissingPackageError(
            'Plots need matplotlib: pip install matplotlib (the extra plots).') from None
    from matplotlib import ticker  # pylint: disable=import-outside-toplevel
    from matplotlib.backends import backend_agg  # pylint: disable=import-outside-toplevel
    from matplotlib.figure import Figure  # pylint: disable=import-outside-toplevel
    del matplotlib
    accounts = sorted(accounts, key=lambda account: account.batch_size)
    fullest = [max(account.pools(), key=lambda each: each.peak) for account in accounts]
    batches = [account.batch_size for account in accounts]
    highest = max([each.peak for each in fullest] + [bytes_ for _, bytes_ in measured])
    unit, name = (1e9, 'GB') if highest >= 2e9 else (1e6, 'MB')
    kinds = [kind for kind in KINDS if any(  # those that can be seen
        each.kinds.get(kind, 0) > 0.003 * highest for each in fullest)]
    figure = Figure(figsize=(8.4, 4.8), dpi=110)  # without pyplot, whose state is the program's
    backend_agg.FigureCanvasAgg(figure)
    axes = figure.add_subplot(111)
    rows = [[each.kinds.get(kind, 0) / unit for each in fullest] for kind in kinds]
    others = [sum(bytes_ for kind, bytes_ in each.kinds.items() if kind not in kinds) / unit
              for each in fullest]
    rows, labels = rows + [others], kinds + ['other']
    colours = [_COLOURS[kind] for kind in kinds] + ['#bbbbbb']
    if max(others) < 1e-2 * highest / unit:  # too little to be seen
        rows, labels, colours = rows[:-1], labels[:-1], colours[:-1]
    if len(batches) == 1:
        bottom = 0.
        for row, label, colour in zip(rows, labels, colours):
            axes.bar([batches[0]], row, bottom=bottom, color=colour, label=label, width=0.6)
            bottom += row[0]
    else:
        axes.stackplot(batches, rows, labels=labels, colors=colours, linewidth=0)
        axes.set_xlim(min(batches), max(batches))
    axes.plot(batches, [each.peak / unit for each in fullest], color='#333333', linewidth=1.5,
              label='predicted')
    if measured:
        axes.plot([batch for batch, _ in measured], [bytes_ / unit for _, bytes_ in measured],
                  'o', color='white', markeredgecolor='black', markersize=7, clip_on=False,
                  zorder=5, label='measured')
    top = highest / unit * 1.08
    if limit is not None and limit / unit < 3 * top:
        axes.axhline(limit / unit, color='#cc0000', linestyle='--', linewidth=1.5,
                     label='limit, %.3g %s' % (limit / unit, name))
        top = max(top, limit / unit * 1.08)
    elif limit is not None:
        title += ' (the limit, %.3g %s, is far above)' % (limit / unit, name)
    axes.set_ylim(0, top)
    axes.set_xticks(batches)
    axes.xaxis.set_major_formatter(ticker.FormatStrFormatter('%d'))
    axes.set_xlabel('batch size, examples of a step over all towers')
    axes.set_ylabel('memory at the worst moment, %s' % name)
    axes.set_title(title, fontsize=11, loc='left')
    for side in ('top', 'right'):
        axes.spines[side].set_visible(False)
    handles, names = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], names[::-1], loc='center left', bbox_to_anchor=(1.01, 0.5),
                frameon=False, fontsize=9)
    with written_whole(path, 'wb') as picture:
        figure.savefig(picture, bbox_inches='tight', format='png')


def _check_arguments(accounts, measured, limit, title):
    if not isinstance(accounts, (list, tuple)) or isinstance(accounts, MemoryAccount) or (
            not accounts):
        raise InvalidArgumentError('accounts=%.80r of type %s: expected a list of at least one '
                                   'MemoryAccount.' % (accounts, type(accounts).__name__))
    for account in accounts:
        check_instance('one of accounts', account, MemoryAccount, 'what memory_account returned')
        if account.batch_size is None:
            raise InvalidArgumentError('one of accounts has no batch size: pass batch_size= to '
                                       'memory_account.')
    pairs = measured if isinstance(measured, (list, tuple)) else [measured]
    for pair in pairs:
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise InvalidArgumentError('measured=%.80r: expected a list of (batch size, bytes).'
                                       % (measured,))
        for value in pair:
            check_number('a number of measured', value, least=0, expected='a batch size or bytes')
    if limit is not None:
        check_number('limit', limit, above=0, expected='bytes, or None')
    check_instance('title', title, str, 'a text')
