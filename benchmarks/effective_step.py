"""`sum` against `mean`: how far a step really goes on 1, 2, 4 and 8 towers.

    python -m benchmarks.effective_step [--results=benchmarks/results]

The digits network takes some steps with each optimizer and reduction on each number of towers,
always with the same batch, split among them. Measured is

    effective step = |change of the weights| / |gradient of the batch's mean loss|

the median over the steps, relative to one tower. SGD follows the gradient's size, so that with
`sum` it goes N times as far: a linear scaling of the learning rate that no flag shows. Adam divides
by the gradient's own size, and goes (nearly) as far with either.
"""

import argparse
import collections
import csv
import os
import statistics
import sys
import warnings

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import numpy as np  # noqa: E402
import tensorflow.compat.v1 as tf  # noqa: E402

import datasets  # noqa: E402
from models import registry  # noqa: E402
import towers  # noqa: E402
from towers.gradients.stateless_random import make_initial_values_stateless  # noqa: E402

OPTIMIZERS = collections.OrderedDict([
    ('SGD', lambda: tf.train.GradientDescentOptimizer(0.01)),
    ('momentum', lambda: tf.train.MomentumOptimizer(0.002, 0.9)),
    ('Adam', lambda: tf.train.AdamOptimizer(0.001))])
TOWERS = (1, 2, 4, 8)

Measured = collections.namedtuple('Measured', 'optimizer reduction towers step relative')
Measured.__doc__ = """`step`: the effective step, median over steps; `relative`: to one tower's."""


def measure(optimizer, reduction, num_towers, batch_size=160, steps=20):
    """The effective step of each of some steps: a list of floats.

    Args:
      optimizer: one of `OPTIMIZERS`.
      reduction: 'sum' or 'mean'.
      num_towers: that the batch is split among.
      batch_size: examples a step, over all towers.
      steps: how many.
    """
    with tf.Graph().as_default():
        tf.set_random_seed(1)
        network, dataset = registry.get_network('digits'), datasets.get_dataset('digits')
        iterator = tf.data.make_initializable_iterator(dataset.train_batches(
            batch_size=batch_size, seed=1))
        step = tf.train.get_or_create_global_step()

        def model_fn(images, labels):
            logits, _ = network.build(images, dataset.num_classes)
            return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(
                labels=labels, logits=logits))
        built = towers.build_towers(model_fn, iterator.get_next(), OPTIMIZERS[optimizer](),
                                    num_towers, reduction, global_step=step,
                                    numerics=towers.Numerics(stateless_random=True))
        make_initial_values_stateless(built.variables, 1)
        factor = num_towers if reduction == 'sum' else 1
        gradient = tf.global_norm([each for each, _ in built.gradients]) / factor
        weights = [variable for _, variable in built.gradients]
        with tf.Session(config=towers.session_config(built.devices)) as session:
            session.run([tf.global_variables_initializer(), iterator.initializer])
            before, found = session.run(weights), []
            for _ in range(steps):
                size, _ = session.run([gradient, built.train_op])
                after = session.run(weights)
                found.append(_distance(before, after) / float(size))
                before = after
    return found


def _distance(before, after):
    return float(np.sqrt(sum(np.sum((np.float64(new) - old) ** 2)
                             for old, new in zip(before, after))))


def measure_all(say=print):
    """A list of `Measured`: every optimizer and reduction on every number of towers."""
    found = []
    for optimizer in OPTIMIZERS:
        for reduction in ('sum', 'mean'):
            one = None
            for count in TOWERS:
                step = statistics.median(measure(optimizer, reduction, count))
                one = one or step
                found.append(Measured(optimizer, reduction, count, step, step / one))
                say('%-8s  %-4s  %d towers  effective step %.6f, %.2f times that of one tower'
                    % found[-1])
    return found


def write_csv(path, found):
    """Writes one row a `Measured`."""
    with open(path, 'w', newline='') as table:
        rows = csv.writer(table, lineterminator='\n')
        rows.writerow(Measured._fields)
        rows.writerows(found)


def draw(found, path):
    """Writes the picture: how the step grows with the towers, a panel an optimizer."""
    from benchmarks import charts  # pylint: disable=import-outside-toplevel
    plt = charts.pyplot()
    figure, axes = plt.subplots(1, len(OPTIMIZERS), figsize=(10.8, 4.), sharey=True)
    for plot, optimizer in zip(axes, OPTIMIZERS):
        ends = []
        for reduction, colour in (('mean', charts.COLOURS[0]), ('sum', charts.COLOURS[1])):
            rows = [row for row in found
                    if (row.optimizer, row.reduction) == (optimizer, reduction)]
            x, y = [row.towers for row in rows], [row.relative for row in rows]
            plot.plot(x, y, color=colour, marker='o')
            ends.append((x[-1], y[-1], '%s: x %.2g' % (reduction, y[-1]), colour))
        plot.set_xscale('log', base=2)
        plot.set_yscale('log', base=2)
        for axis in (plot.xaxis, plot.yaxis):
            axis.set_ticks(TOWERS)
            axis.set_major_formatter(lambda value, _: '%g' % value)
        plot.set_xlim(0.9, 9)
        plot.set_ylim(0.7, 11)
        plot.set_title(optimizer)
        plot.set_xlabel('towers')
        charts.label_lines(plot, ends, gap=0.09)
    axes[0].set_ylabel('effective step, one tower = 1')
    figure.tight_layout(w_pad=4)
    charts.save(figure, path)
    plt.close(figure)


def main():
    """Measures, prints, and writes CSV and picture."""
    parser = argparse.ArgumentParser('make scaling-step', description=__doc__.splitlines()[0])
    parser.add_argument('--results', default='runs/effective-step',
                        help='folder for CSV and picture')
    parser.add_argument('--noplots', dest='plots', action='store_false',
                        help='draw no picture, which takes matplotlib')
    options = parser.parse_args()
    tf.logging.set_verbosity(tf.logging.ERROR)
    warnings.filterwarnings('ignore', module='tensorflow|tf_slim')  # of TF to tf_slim, not to us
    tf.disable_v2_behavior()
    tf.enable_resource_variables()
    towers.mend_slim()
    if options.plots:
        from benchmarks.charts import pyplot  # pylint: disable=import-outside-toplevel
        pyplot()
    found = measure_all()
    os.makedirs(options.results, exist_ok=True)
    base = os.path.join(options.results, 'effective_step')
    write_csv(base + '.csv', found)
    if options.plots:
        draw(found, base + '.png')
    print('written: %s.csv%s' % (base, ', %s.png' % base if options.plots else ''))


if __name__ == '__main__':
    main()
