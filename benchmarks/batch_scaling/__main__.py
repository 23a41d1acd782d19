"""make scaling [ARGS='--model=digits --seeds=2 --epochs=2']: 1 x B at r against N x B at r sqrt(N).

Runs train.py once an arm and seed, and writes table, CSV and picture. Ctrl-C stops it, the same
command goes on with it; what is finished is not run again. `arms.py` says what is compared.
"""

import argparse
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from benchmarks.batch_scaling import arms, claim, report, results, runs  # noqa: E402
import datasets  # noqa: E402
from models import registry  # noqa: E402
from towers.errors import TowersError  # noqa: E402


def parse(argv):
    """The options of the command line."""
    parser = argparse.ArgumentParser('make scaling', description=__doc__,
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add('--model', default='inception_resnet_v2', help='network by name')
    add('--dataset', default='digits', help='data set by name')
    add('--data_dir', default='', help='folder of the data set, for one that is not part of this')
    add('--image_size', type=_whole, help='height and width in pixels; if not given, the smallest '
        'of a network with auxiliary logits (75), else what the network asks for')
    add('--aux_loss_weight', type=float, help='of auxiliary logits; if not given, none where the '
        'image is too small for them, else as in train.py')
    add('--num_towers', type=_whole, default=4, help='N')
    add('--batch_size', type=_whole, default=16, help='B, examples a tower')
    add('--factors', type=_wholes, help='how many times B the larger batches are, such as '
        '1,4,16,32; each has to divide the next; above N towers they are accumulated; if not '
        'given, N')
    add('--learning_rate', type=float, default=0.0005, help='r, the rate of 1 x B')
    add('--optimizer', default='adam', choices=['adam', 'momentum', 'sgd', 'rmsprop'],
        help='update rule')
    add('--reduction', default='mean', choices=['mean', 'sum'],
        help="gradient applied; under 'sum' "
        "momentum's and SGD's rates are N times what the arms say")
    add('--warmup_epochs', type=_numbers, default=[0.], help='lengths of the warm-up: arms whose '
        "rate is scaled run with each; '0,1' for without and with")
    add('--batch_norm_decay', type=float, default=0.9, help="of batch norm's moving averages at "
        "batch B; -1: the network's own, which wants 10,000s of steps for the inceptions")
    add('--epochs', type=float, default=2., help='passes over the data, rounded to full batches, '
        'the largest ones, between evaluations')
    add('--examples', type=_whole, help='examples that each arm sees, instead of --epochs; rounded '
        'likewise')
    add('--evaluations', type=_whole, default=4, help='how often an arm is evaluated')
    add('--seeds', type=_whole, default=2, help='how many seeds')
    add('--arms', type=lambda text: text.split(','), help='a subset, such as one,sqrt; if not '
        'given, all of ' + ', '.join(arms.ARMS))
    add('--accuracy', type=float, default=0.9, help="of the table's column 'examples to'")
    add('--directory', help="folder of the runs; if not given, 'runs/scaling-<model>'")
    add('--results', help='folder for table, CSV and picture; if not given, --directory')
    add('--noplots', dest='plots', action='store_false', help='draw no picture, which takes '
        'matplotlib')
    add('--keep_checkpoints', action='store_true', help='leave the checkpoints of finished runs')
    add('--report_only', action='store_true', help='run nothing: table, CSV and picture of what '
        'is there')
    options = parser.parse_args(argv)
    if options.num_towers < 2:
        parser.error('--num_towers=%d: the claim is about 2 or more' % options.num_towers)
    factors = sorted(set(options.factors or ()))
    if any(larger % smaller for smaller, larger in zip(factors, factors[1:])):
        parser.error('--factors=%s: each has to divide the next one, so that all batches end '
                     'at the same examples' % ','.join(map(str, factors)))
    if not options.learning_rate > 0:
        parser.error('--learning_rate=%g: expected more than 0' % options.learning_rate)
    options.directory = options.directory or os.path.join('runs', 'scaling-' + options.model)
    options.results = options.results or options.directory
    return options


def main(options):
    """Runs what is left, reports, and returns the exit status."""
    if options.plots:
        from benchmarks.charts import pyplot  # pylint: disable=import-outside-toplevel
        pyplot()  # what is missing should be told before an hour, not after it
    try:
        settings = make_settings(options)
        the_runs = arms.make_runs(settings, arms.make_arms(settings, options.arms),
                                  options.directory)
        runs.check_folders(the_runs)
        runner = None
        if not options.report_only:
            runner = runs.Runner(the_runs, settings.examples, options.keep_checkpoints)
            runner.run()
    except TowersError as error:
        sys.stderr.write('make scaling: %s\n' % error)
        return 2
    found = [results.run_result(run, *runs.status(run, settings.examples)) for run in the_runs]
    write(found, settings, options)
    if runner is not None and runner.stopped:
        return 130
    return 1 if any(result.status == runs.FAILED for result in found) else 0


def make_settings(options):
    """The `Settings` of the options; raises `TowersError` for those that make no sense."""
    network = registry.get_network(options.model)
    dataset = datasets.get_dataset(options.dataset, options.data_dir or None)
    image_size, aux = options.image_size, options.aux_loss_weight
    smallest = network.image_sizes_without_aux
    if image_size is None:
        image_size = smallest[0] if smallest else network.default_image_size
    if aux is None and smallest and image_size < network.image_sizes[0]:
        aux = 0.
    examples = options.examples or options.epochs * dataset.num_examples['train']
    largest = max(options.factors or [options.num_towers]) * options.batch_size
    return arms.Settings(
        options.model, options.dataset,
        os.path.abspath(options.data_dir) if options.data_dir else '', image_size,
        options.num_towers, options.batch_size, options.learning_rate, options.optimizer,
        options.reduction, options.warmup_epochs,
        None if options.batch_norm_decay < 0 else options.batch_norm_decay, aux,
        arms.rounded_examples(examples, largest, options.evaluations), options.evaluations,
        options.seeds, options.factors)


def write(found, settings, options):
    """Prints the table and the verdict, and writes them, the CSV and the picture to a folder."""
    os.makedirs(options.results, exist_ok=True)
    text = '\n'.join([report.table(found, options.accuracy), ''] + claim.sentences(found))
    print(text)
    base = os.path.join(options.results, 'batch_scaling')
    results.write_csv(base + '.csv', found)
    with open(base + '.txt', 'w') as opened:
        opened.write(text + '\n')
    written = [base + '.csv', base + '.txt']
    if options.plots and any(result.points for result in found):
        from benchmarks.batch_scaling import plots  # pylint: disable=import-outside-toplevel
        plots.draw(found, base + '.png', 'Network %s on data set %s, %d x %d pixels, %s' % (
            settings.model, settings.dataset, settings.image_size, settings.image_size,
            settings.optimizer))
        written.append(base + '.png')
    print('written: %s' % ', '.join(written))


def _whole(text):
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError('%s is below 1' % text)
    return number


def _wholes(text):
    return [_whole(each) for each in text.split(',')]


def _numbers(text):
    return [float(each) for each in text.split(',')]


if __name__ == '__main__':
    sys.exit(main(parse(sys.argv[1:])))
