"""make scaling-speed [ARGS='--quick']: images/s on 1, 2, 4, 8 towers, and where the time goes.

Each cell is train.py's graph in a process of its own; cells that are done are not measured again
(delete --directory for that). Ctrl-C stops; the same command goes on.
"""

import json
import os
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, ROOT)

from absl import app, flags  # noqa: E402

from benchmarks.tower_speed import report  # noqa: E402

FLAGS = flags.FLAGS
flags.DEFINE_string('model', 'inception_resnet_v2', 'network by name')
flags.DEFINE_integer('image_size', None, 'height and width in pixels; default: 75 for '
                     'inception_resnet_v2, else what the network asks for')
flags.DEFINE_list('towers', '1,2,4,8', 'numbers of towers')
flags.DEFINE_integer('batch_size', 8, 'examples a tower where that is fixed; and, times the most '
                     'towers, in all where that is', lower_bound=1)
flags.DEFINE_integer('steps', 6, 'timed steps a cell', lower_bound=1)
flags.DEFINE_integer('traces', 3, 'traced steps a cell', lower_bound=1)
flags.DEFINE_boolean('quick', False, 'the digits network, in about a minute')
flags.DEFINE_list('train_flags', '', "more flags of train.py: '--optimizer=sgd'")
flags.DEFINE_string('directory', '', "folder of the cells; default: 'runs/speed-<model>'")
flags.DEFINE_string('results', '', 'folder for table, CSV and picture; default: --directory')
flags.DEFINE_boolean('plots', True, 'draw the picture, which takes matplotlib')


def main(unused_argv):
    """Measures what is left, and reports."""
    if FLAGS.plots:
        from benchmarks.charts import pyplot  # pylint: disable=import-outside-toplevel
        pyplot()  # what is missing should be told before, not after
    model = 'digits' if FLAGS.quick else FLAGS.model
    directory = FLAGS.directory or os.path.join('runs', 'speed-' + model)
    os.makedirs(directory, exist_ok=True)
    cells = make_cells([int(count) for count in FLAGS.towers],
                       32 if FLAGS.quick else FLAGS.batch_size)
    rows = []
    from tqdm import tqdm  # pylint: disable=import-outside-toplevel
    with tqdm(total=len(cells), unit=' cells', disable=not sys.stderr.isatty()) as bar:
        for kind, towers, batch_size in cells:
            bar.set_description('%d towers, batch %d' % (towers, batch_size))
            cell, reason = measured(model, towers, batch_size, directory)
            rows.append((kind, cell, towers, batch_size, reason))
            bar.update()
            if not sys.stderr.isatty():
                sys.stderr.write('[%d/%d] %d towers, batch %d: %s\n' % (
                    len(rows), len(cells), towers, batch_size,
                    'FAILED, ' + reason if cell is None else
                    '%.3g images/s' % report.figures(cell)['speed']))
    write(rows, FLAGS.results or directory, model)
    if any(cell is None for _, cell, _, _, _ in rows):
        sys.exit(1)


def make_cells(counts, batch_size):
    """The cells: list of `(what is fixed, towers, batch over all towers)`."""
    fixed_each = [(report.KINDS[0], count, batch_size * count) for count in counts]
    fixed_all = [(report.KINDS[1], count, batch_size * max(counts)) for count in counts]
    return fixed_each + fixed_all


def measured(model, towers, batch_size, directory):
    """`(figures, '')` of a cell, from its file where it is done; or `(None, why not)`."""
    command = cell_flags(model, towers, batch_size)
    path = os.path.join(directory, '%d-towers-batch-%d.json' % (towers, batch_size))
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


def cell_flags(model, towers, batch_size):
    """Arguments of `measure`: counts, and the flags of train.py."""
    steps, traces = (20, 3) if FLAGS.quick else (FLAGS.steps, FLAGS.traces)
    flags_of_cell = ['--model=%s' % model, '--num_towers=%d' % towers,
                     '--batch_size=%d' % batch_size]
    image_size = FLAGS.image_size
    if model == 'inception_resnet_v2' and image_size is None:
        image_size = 75
        flags_of_cell.append('--aux_loss_weight=0')
    if image_size is not None:
        flags_of_cell.append('--image_size=%d' % image_size)
    return ['%d' % steps, '%d' % traces] + flags_of_cell + [f for f in FLAGS.train_flags if f]


def write(rows, directory, model):
    """Prints the table, and writes it, the CSV and the picture to a folder."""
    os.makedirs(directory, exist_ok=True)
    text = report.table(rows)
    print(text)
    base = os.path.join(directory, 'tower_speed')
    report.write_csv(base + '.csv', rows)
    with open(base + '.txt', 'w') as opened:
        opened.write(text + '\n')
    written = [base + '.csv', base + '.txt']
    if FLAGS.plots and any(cell is not None for _, cell, _, _, _ in rows):
        report.draw(rows, base + '.png', '%s, %d CPU cores' % (model, os.cpu_count() or 0))
        written.append(base + '.png')
    print('written: %s' % ', '.join(written))


if __name__ == '__main__':
    app.run(main)
