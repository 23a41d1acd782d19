"""make scaling-speed [ARGS='--quick']: images/s on 1, 2, 4, 8 towers, and where the time goes.

Each cell is train.py's graph in a process of its own; cells that are done are not measured again
(delete --directory for that). Ctrl-C stops; the same command goes on.
"""

import argparse
import json
import os
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, ROOT)

from benchmarks.tower_speed import report  # noqa: E402


def parse(argv):
    """The options of the command line."""
    parser = argparse.ArgumentParser('make scaling-speed', description=__doc__,
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add('--model', default='inception_resnet_v2', help='network by name')
    add('--image_size', type=int, help='height and width in pixels; if not given, 75 for '
        'inception_resnet_v2, else what the network asks for')
    add('--towers', type=lambda text: [int(each) for each in text.split(',')],
        default=[1, 2, 4, 8], help='numbers of towers')
    add('--batch_size', type=int, default=8, help='examples a tower where that is fixed; and, '
        'times the most towers, in all where that is')
    add('--steps', type=int, default=6, help='timed steps a cell')
    add('--traces', type=int, default=3, help='traced steps a cell')
    add('--quick', action='store_true', help='the digits network, in about a minute')
    add('--train_flags', default='', help="more flags of train.py: '--optimizer=sgd --seed=2'")
    add('--directory', help="folder of the cells; if not given, 'runs/speed-<model>'")
    add('--results', help='folder for table, CSV and picture; if not given, --directory')
    add('--noplots', dest='plots', action='store_false', help='draw no picture, which takes '
        'matplotlib')
    options = parser.parse_args(argv)
    for name in ('steps', 'traces', 'batch_size'):
        if getattr(options, name) < 1:
            parser.error('--%s=%d: expected at least 1' % (name, getattr(options, name)))
    if options.quick:
        options.model, options.batch_size, options.steps = 'digits', 32, 20
    options.directory = options.directory or os.path.join('runs', 'speed-' + options.model)
    options.results = options.results or options.directory
    return options


def main(options):
    """Measures what is left, reports, and returns the exit status."""
    if options.plots:
        from benchmarks.charts import pyplot  # pylint: disable=import-outside-toplevel
        pyplot()  # what is missing should be told before, not after
    os.makedirs(options.directory, exist_ok=True)
    cells = make_cells(options.towers, options.batch_size)
    rows = []
    from tqdm import tqdm  # pylint: disable=import-outside-toplevel
    with tqdm(total=len(cells), unit=' cells', disable=not sys.stderr.isatty()) as bar:
        for kind, towers, batch_size in cells:
            bar.set_description('%d towers, batch %d' % (towers, batch_size))
            cell, reason = measured(options, towers, batch_size)
            rows.append((kind, cell, towers, batch_size, reason))
            bar.update()
            if not sys.stderr.isatty():
                sys.stderr.write('[%d/%d] %d towers, batch %d: %s\n' % (
                    len(rows), len(cells), towers, batch_size,
                    'FAILED, ' + reason if cell is None else
                    '%.3g images/s' % report.figures(cell)['speed']))
    write(rows, options)
    return 1 if any(cell is None for _, cell, _, _, _ in rows) else 0


def make_cells(counts, batch_size):
    """The cells: list of `(what is fixed, towers, batch over all towers)`."""
    fixed_each = [(report.KINDS[0], count, batch_size * count) for count in counts]
    fixed_all = [(report.KINDS[1], count, batch_size * max(counts)) for count in counts]
    return fixed_each + fixed_all


def measured(options, towers, batch_size):
    """`(figures, '')` of a cell, from its file where it is done; or `(None, why not)`."""
    command = cell_flags(options, towers, batch_size)
    path = os.path.join(options.directory, '%d-towers-batch-%d.json' % (towers, batch_size))
    if os.path.exists(path):
        with open(path) as opened:
            earlier = json.load(opened)
        if earlier['flags'] == command:
            return earlier['figures'], ''
    done = subprocess.run(
        [sys.executable, '-m', 'benchmarks.tower_speed.measure'] + command, cwd=ROOT,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        universal_newlines=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return None, lines[-1] if lines else 'exit status %d' % done.returncode
    found = json.loads(done.stdout.strip().splitlines()[-1])
    with open(path + '.new', 'w') as opened:
        json.dump({'flags': command, 'figures': found}, opened)
    os.replace(path + '.new', path)
    return found, ''


def cell_flags(options, towers, batch_size):
    """Arguments of `measure`: counts, and the flags of train.py."""
    found = ['%d' % options.steps, '%d' % options.traces, '--model=%s' % options.model,
             '--num_towers=%d' % towers, '--batch_size=%d' % batch_size]
    image_size = options.image_size
    if options.model == 'inception_resnet_v2' and image_size is None:
        image_size = 75  # which is too small for auxiliary logits
        found.append('--config={"aux_loss_weight": 0}')
    if image_size is not None:
        found.append('--image_size=%d' % image_size)
    return found + options.train_flags.split()


def write(rows, options):
    """Prints the table, and writes it, the CSV and the picture to a folder."""
    os.makedirs(options.results, exist_ok=True)
    text = report.table(rows)
    print(text)
    base = os.path.join(options.results, 'tower_speed')
    report.write_csv(base + '.csv', rows)
    with open(base + '.txt', 'w') as opened:
        opened.write(text + '\n')
    written = [base + '.csv', base + '.txt']
    if options.plots and any(cell is not None for _, cell, _, _, _ in rows):
        report.draw(rows, base + '.png', '%s, %d CPU cores' % (
            options.model, os.cpu_count() or 0))
        written.append(base + '.png')
    print('written: %s' % ', '.join(written))


if __name__ == '__main__':
    sys.exit(main(parse(sys.argv[1:])))
