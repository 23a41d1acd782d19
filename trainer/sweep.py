"""--sweep: one command trains once for each value of a flag, or each combination of flags' values.

    python train.py --sweep=seed=1,2,3 --sweep=base_learning_rate=0.01,0.001 --train_dir=runs/sweep

Each run is `train.py` in a process of its own with the other flags as given, and with a folder of
its own, `runs/sweep/seed=1,base_learning_rate=0.01`. The same command goes on with a sweep: runs
that have ended are passed over, and a run that was stopped goes on from its checkpoint. `sweep.csv`
has a row for each run: the values, the last step, and the last results of the test set.

This module does not import TensorFlow; the runs do.
"""

import csv
import itertools
import json
import os
import signal
import subprocess
import sys
import typing

from trainer.command_line import parse_flags, refuse
from trainer.flags import FLAGS, FLAGS_BY_NAME, ONCE, SETTINGS, train_dir

_TABLE = 'sweep.csv'
# The values of `evaluator.END` and `run_settings.FILE`, in modules that import TensorFlow.
_ENDED = 'ended.json'
_SETTINGS = 'settings.json'
_NOT_SWEPT = ('sweep', 'train_dir', 'mode', 'config', 'plan_only', 'job_name')


class SweptRun(typing.NamedTuple):
    """One run of a sweep.

    Attributes:
      values: the values of the flags that the sweep changes, by name.
      folder: the folder of the run.
    """
    values: typing.Dict[str, str]
    folder: str

    @property
    def flags(self) -> typing.List[str]:
        """The flags that are added to the flags of the command for this run."""
        changed = ['--%s=%s' % item for item in self.values.items()]
        return changed + ['--train_dir=%s' % self.folder]


def swept_values(texts: typing.List[str]) -> typing.Dict[str, typing.List[str]]:
    """The values of each flag of --sweep.

    Args:
      texts: a text for each flag, such as `'seed=1,2,3'`.

    Returns:
      {name of a flag: list of its values, as texts}.

    Raises:
      SystemExit: one of the texts is something else; a line says so.
    """
    values: typing.Dict[str, typing.List[str]] = {}
    for text in texts:
        name, _, listed = text.partition('=')
        name = name.lstrip('-')
        if name not in FLAGS_BY_NAME or name in _NOT_SWEPT:
            refuse('--sweep=%.60a: %.60a is no flag to sweep over: give one that changes a run, as '
                   'in --sweep=seed=1,2,3' % (text, name))
        if name in values:
            refuse('--sweep=%.60a: %s is swept over already: give all its values at once' % (
                text, name))
        values[name] = listed.split(',')
        if len(set(values[name])) < len(values[name]) or '' in values[name]:
            refuse('--sweep=%.60a: expected different values, with commas between, as in '
                   '--sweep=seed=1,2,3' % text)
    return values


def swept_runs(texts: typing.List[str], folder: str) -> typing.List[SweptRun]:
    """The runs of a sweep, one for each combination. In their order the last flag changes fastest.

    Args:
      texts: a text for each flag, such as `'seed=1,2,3'`.
      folder: the folder of the sweep; each run has a folder in it.

    Raises:
      SystemExit: one of the texts is something else, or two runs would have one folder; a line says
        so.
    """
    values = swept_values(texts)
    runs: typing.List[SweptRun] = []
    names: typing.Set[str] = set()
    for combination in itertools.product(*values.values()):
        chosen = dict(zip(values, combination))
        # A '/' would begin a folder in the run's folder.
        name = ','.join('%s=%s' % item for item in chosen.items()).replace('/', '_')
        if name in names:
            refuse('--sweep: two runs would have the folder %.60a, in which a _ stands for a /: '
                   'give values that differ in more' % name)
        names.add(name)
        runs.append(SweptRun(chosen, os.path.join(folder, name)))
    return runs


def without_sweep(argv: typing.List[str]) -> typing.List[str]:
    """The command line of the runs: the sweep's command line without --sweep and --train_dir.

    Args:
      argv: the command line of the sweep, the program first; the value of a flag comes after `=`,
        or is the next argument.
    """
    kept = []
    value_comes_next = False  # after a removed flag without `=`, as in `--sweep seed=1,2`
    for argument in argv:
        name, equals_sign, _ = argument.lstrip('-').partition('=')
        if value_comes_next:
            value_comes_next = False
        elif argument.startswith('-') and name in ('sweep', 'train_dir'):
            value_comes_next = not equals_sign
        else:
            kept.append(argument)
    return kept


def sweep(argv: typing.List[str]) -> int:
    """Runs the sweep of a parsed command line.

    The flags of all runs are checked before the first one starts. The sweep ends with the first run
    that fails or is stopped by a signal.

    Args:
      argv: the command line, the program first.

    Returns:
      The exit status: 0, or the status of the run that ended the sweep.

    Raises:
      SystemExit: flags of a run are refused.
    """
    folder = train_dir()
    runs = swept_runs(FLAGS.sweep, folder)
    command = without_sweep(argv)
    settings_of_runs = [_checked_settings(command + run.flags) for run in runs]
    status = 0
    for number, (run, settings) in enumerate(zip(runs, settings_of_runs), 1):
        _say('run %d of %d     %s' % (number, len(runs), run.folder))
        if _has_ended(run.folder, settings):
            _say('               has ended already')
            continue
        status = _run_process([sys.executable] + command + run.flags)
        if status:
            _say('stopped        with status %d; the same command goes on' % status)
            break
    rows = [_results_of(run) for run in runs]
    _show(rows)
    _write(rows, os.path.join(folder, _TABLE))
    return status


def _checked_settings(command: typing.List[str]) -> typing.Dict[str, typing.Any]:
    """The settings that `settings.json` records for a run of this command line.

    Raises:
      SystemExit: its flags are refused.
    """
    FLAGS.unparse_flags()  # so that absl parses another command line
    parse_flags(command)
    # A setting of the kind `ONCE`, such as --report, is of one start: no run records it.
    settings = {name: FLAGS[name].value
                for name, setting in SETTINGS.items() if setting.kind != ONCE}
    if settings['batch_size'] == 'auto':  # the run records the number that it has chosen
        del settings['batch_size']
    return settings


def _has_ended(folder: str, settings: typing.Dict[str, typing.Any]) -> bool:
    """Whether a run has ended, and nothing is left to do for the current settings.

    A run that has ended with other settings, such as fewer --train_steps, is started again: it goes
    on from its last checkpoint.

    Args:
      folder: the folder of the run.
      settings: the settings of the command, by name.
    """
    if not os.path.exists(os.path.join(folder, _ENDED)):
        return False
    try:
        with open(os.path.join(folder, _SETTINGS), encoding='utf-8') as file:
            recorded = json.load(file)['settings']
        return all(recorded.get(name) == value for name, value in settings.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False  # so the sweep starts the run, whose error says what is wrong with the file


def _run_process(command: typing.List[str]) -> int:
    """Runs a command to its end; returns its exit status, 128 plus the number of a signal that
    killed it.

    Signals to this process are passed on to the command, except SIGINT: at Ctrl-C a terminal sends
    that to both processes.
    """
    process = subprocess.Popen(command)

    def pass_on(number: int, unused_frame: typing.Any) -> None:
        """The handler of a signal, which sends it to the run."""
        process.send_signal(number)
    former_handlers = {}
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        former_handlers[number] = signal.signal(number, pass_on)
    former_handlers[signal.SIGINT] = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        status = process.wait()
    finally:
        for number, handler in former_handlers.items():
            signal.signal(number, handler)
    if status < 0:  # how `subprocess` says that the signal -status has killed the process
        return 128 - status
    return status


def _results_of(run: SweptRun) -> dict:
    """The row of the table for a run: its values, its last step, and its latest results.

    The step is None for a run without a line in its `metrics.jsonl`. The file of a run that was
    killed may end with half a line, which is no JSON.
    """
    row: dict = dict(run.values, step=None)
    path = os.path.join(run.folder, 'metrics.jsonl')
    if not os.path.exists(path):
        return row
    with open(path, encoding='utf-8', errors='replace') as lines:
        for line in lines:
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            row['step'] = entry.get('step')
            for name, value in entry.items():
                if name.startswith('test_'):  # the result of an evaluation; a later one replaces it
                    row[name] = value
    return row


def _columns(rows: typing.List[dict]) -> typing.List[str]:
    """The names of the columns: all names of values in the rows, in order."""
    names: typing.Dict[str, None] = {}
    for row in rows:
        names.update(dict.fromkeys(row))
    return list(names)


def _show(rows: typing.List[dict]) -> None:
    """Prints the table, with columns as wide as their texts."""
    # Without the number of test examples, which is the same for all runs.
    columns = [name for name in _columns(rows) if name != 'test_examples']
    table = [columns]
    for row in rows:
        table.append([_text(row.get(name)) for name in columns])
    widths = [max(map(len, column)) for column in zip(*table)]
    for cells in table:
        _say('  '.join(cell.ljust(width) for cell, width in zip(cells, widths)).rstrip())


def _text(value: typing.Any) -> str:
    """The text of a value in the printed table."""
    if value is None:
        return '-'
    if isinstance(value, float):
        return '%.4g' % value
    return str(value)


def _write(rows: typing.List[dict], path: str) -> None:
    """Writes the rows to a CSV file."""
    os.makedirs(os.path.dirname(path) or '.', exist_ok=True)
    # The file is renamed when it is whole. `towers.safe_files` does this, but imports TensorFlow.
    with open(path + '.new', 'w', newline='', encoding='utf-8') as table:
        writer = csv.DictWriter(table, _columns(rows))
        writer.writeheader()
        writer.writerows(rows)
    os.replace(path + '.new', path)
    _say('table          %s' % path)


def _say(line: str) -> None:
    """Prints a line at once."""
    print(line, flush=True)
