"""make scaling [ARGS='--model=digits --seeds=2 --epochs=2']: 1 x B at r against N x B at r sqrt(N).

Runs train.py once an arm and seed, and writes table, CSV and picture. Ctrl-C stops it, the same
command goes on with it; what is finished is not run again. `arms.py` says what is compared.
"""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from absl import app, flags  # noqa: E402

from benchmarks.batch_scaling import arms, claim, report, results, runs  # noqa: E402
from benchmarks.batch_scaling.display import Display  # noqa: E402
import datasets  # noqa: E402
from towers.errors import TowersError  # noqa: E402

FLAGS = flags.FLAGS
flags.DEFINE_string('model', 'inception_resnet_v2', 'network by name')
flags.DEFINE_string('dataset', 'digits', 'data set by name')
flags.DEFINE_string('data_dir', '', 'folder of the data set, for one that is not part of this')
flags.DEFINE_integer('image_size', None, 'height and width in pixels; default: 75 for '
                     'inception_resnet_v2, its smallest, else what the network asks for')
flags.DEFINE_float('aux_loss_weight', None, 'of auxiliary logits; default: none for '
                   'inception_resnet_v2 below its 107 pixels, else as in train.py')
flags.DEFINE_integer('num_towers', 4, 'N', lower_bound=2)
flags.DEFINE_integer('batch_size', 25, 'B, examples a tower', lower_bound=1)
flags.DEFINE_float('learning_rate', 0.0005, 'r, the rate of 1 x B', lower_bound=0)
flags.DEFINE_enum('optimizer', 'adam', ['adam', 'momentum', 'sgd', 'rmsprop'], 'update rule')
flags.DEFINE_enum('reduction', 'mean', ['mean', 'sum'], "gradient applied; under 'sum' momentum's "
                  'and SGD\'s rates are N times what the arms say')
flags.DEFINE_list('warmup_epochs', '0', 'lengths of the warm-up: arms whose rate is scaled run '
                  "with each; '0,1' for without and with")
flags.DEFINE_float('batch_norm_decay', 0.9, "of batch norm's moving averages at batch B; -1: the "
                   "network's own, which wants 10,000s of steps for the inceptions")
flags.DEFINE_float('epochs', 3, 'passes over the data, rounded to full batches of N B between '
                   'evaluations', lower_bound=0)
flags.DEFINE_integer('examples', None, 'examples that each arm sees, instead of --epochs; rounded '
                     'likewise', lower_bound=1)
flags.DEFINE_integer('evaluations', 6, 'how often an arm is evaluated', lower_bound=1)
flags.DEFINE_integer('seeds', 2, 'how many seeds', lower_bound=1)
flags.DEFINE_list('arms', '', "a subset: 'one,sqrt'; default: all of %s" % ', '.join(arms.ARMS))
flags.DEFINE_float('accuracy', 0.9, "of the table's column 'examples to'", lower_bound=0,
                   upper_bound=1)
flags.DEFINE_string('directory', '', "folder of the runs; default: 'runs/scaling-<model>'")
flags.DEFINE_string('results', '', 'folder for table, CSV and picture; default: --directory')
flags.DEFINE_boolean('plots', True, 'draw the picture, which takes matplotlib')
flags.DEFINE_boolean('keep_checkpoints', False, 'leave the checkpoints of finished runs')
flags.DEFINE_boolean('report_only', False, 'run nothing: table, CSV and picture of what is there')


def main(unused_argv):
    """Runs what is left, and reports."""
    try:
        settings = settings_of_flags()
        the_arms = arms.make_arms(settings, [name for name in FLAGS.arms if name])
        directory = FLAGS.directory or os.path.join('runs', 'scaling-' + FLAGS.model)
        the_runs = arms.make_runs(settings, the_arms, directory)
        if FLAGS.plots:
            from benchmarks.charts import pyplot  # pylint: disable=import-outside-toplevel
            pyplot()  # what is missing should be told before an hour, not after it
        runner = None
        runs.check_folders(the_runs)
        if not FLAGS.report_only:
            runner = runs.Runner(the_runs, settings.examples,
                                 Display(len(the_runs), settings.examples),
                                 FLAGS.keep_checkpoints)
            runner.run()
    except TowersError as error:
        sys.stderr.write('batch_scaling: %s\n' % error)
        sys.exit(2)
    found = [results.run_result(run, *runs.status(run, settings.examples)) for run in the_runs]
    write(found, settings, FLAGS.results or directory)
    if runner is not None and runner.stopped:
        sys.exit(130)
    if any(result.status == runs.FAILED for result in found):
        sys.exit(1)


def settings_of_flags():
    """The `Settings` that the flags describe; raises `TowersError` for those that make no sense."""
    from models import registry  # pylint: disable=import-outside-toplevel
    network = registry.get_network(FLAGS.model)
    dataset = datasets.get_dataset(FLAGS.dataset, FLAGS.data_dir or None)
    image_size, aux = FLAGS.image_size, FLAGS.aux_loss_weight
    if image_size is None:
        image_size = (network.image_sizes_without_aux[0] if network.image_sizes_without_aux
                      else network.default_image_size)
    if aux is None and network.image_sizes_without_aux and image_size < network.image_sizes[0]:
        aux = 0.
    examples = FLAGS.examples
    if examples is None:
        examples = FLAGS.epochs * dataset.num_examples['train']
    return arms.Settings(
        FLAGS.model, FLAGS.dataset, os.path.abspath(FLAGS.data_dir) if FLAGS.data_dir else '',
        image_size, FLAGS.num_towers, FLAGS.batch_size, FLAGS.learning_rate, FLAGS.optimizer,
        FLAGS.reduction, [float(each) for each in FLAGS.warmup_epochs],
        None if FLAGS.batch_norm_decay < 0 else FLAGS.batch_norm_decay, aux,
        arms.rounded_examples(examples, FLAGS.num_towers * FLAGS.batch_size, FLAGS.evaluations),
        FLAGS.evaluations,
        FLAGS.seeds)


def write(found, settings, directory):
    """Prints the table and the verdict, and writes them, the CSV and the picture to a folder."""
    os.makedirs(directory, exist_ok=True)
    text = '\n'.join([report.table(found, FLAGS.accuracy), ''] + claim.sentences(found))
    print(text)
    base = os.path.join(directory, 'batch_scaling')
    results.write_csv(base + '.csv', found)
    with open(base + '.txt', 'w') as opened:
        opened.write(text + '\n')
    written = [base + '.csv', base + '.txt']
    if FLAGS.plots and any(result.points for result in found):
        from benchmarks.batch_scaling import plots  # pylint: disable=import-outside-toplevel
        plots.draw(found, base + '.png', 'Network %s on data set %s, %d x %d pixels, %s' % (
            settings.model, settings.dataset, settings.image_size, settings.image_size,
            settings.optimizer))
        written.append(base + '.png')
    print('written: %s' % ', '.join(written))


if __name__ == '__main__':
    app.run(main)
