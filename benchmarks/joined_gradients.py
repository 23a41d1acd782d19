"""Gradients of dense layers, joined by their factors against added up.

It shows where `towers/reduce/sufficient_factors.py` should join them.

    python -m benchmarks.joined_gradients     the limits' neighbourhood
    python -m benchmarks.joined_gradients --cells=3x4096:2x16,1x2048:4x8
                                              LAYERSxWIDTH:TOWERSxEXAMPLES

A cell is a model of so many dense layers of width x width weights, on so many towers with so many
examples each. Two graphs train it from the same weights, each in a session of its own: one adds up
each variable's gradients by `add_n`, the other makes one product of the towers' joined factors. The
sessions take turns. Printed is a step of the one that joins over the other's, below 1 where joining
is faster: wall clock (least to most) and processor time. The limits in that module follow from it;
both ways are written out here, so that neither depends on them.
"""

import argparse
import os
import statistics
import sys
import time

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import tensorflow.compat.v1 as tf  # noqa: E402

from benchmarks import turns, workloads  # noqa: E402
from benchmarks.graph_peers import input_batches  # noqa: E402
import towers  # noqa: E402
from towers.tower.stateless_random import make_initial_values_stateless  # noqa: E402

CELLS = ('3x4096:2x16,3x4096:8x16,3x4096:2x32,3x4096:4x32,3x4096:2x64,3x4096:2x128,'
         '1x4096:2x4,1x4096:2x16,1x4096:2x32,1x4096:2x64,3x2048:2x16,3x1024:2x16')


def main(arguments=None):
    """Prints a line a cell."""
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('--cells', default=CELLS, type=parse_cells)
    parser.add_argument('--rounds', default=5, type=int, help='turns of each of the two')
    parser.add_argument('--turn_seconds', default=0.7, type=float)
    options = parser.parse_args(arguments)
    tf.disable_v2_behavior()
    tf.enable_resource_variables()
    print('TensorFlow %s, oneDNN %s, %d cores, load average %.2f\n%-34s %10s   %s' % (
        tf.version.VERSION, os.environ.get('TF_ENABLE_ONEDNN_OPTS', 'by default'), os.cpu_count(),
        os.getloadavg()[0], 'layers x width, towers x examples', 'adding, ms',
        'joined over added (least to most), processor time'))
    for layers, width, count, examples in options.cells:
        added, wall, cpu = compare(layers, width, count, examples, options.rounds,
                                   options.turn_seconds)
        print('%-34s %10.1f   %.2f (%.2f to %.2f), %.2f' % (
            '%d x %d, %d x %d' % (layers, width, count, examples), 1e3 * added, wall['median'],
            wall['least'], wall['most'], cpu['median']), flush=True)


def parse_cells(text):
    """[(layers, width, towers, examples a tower)] of '3x4096:2x16,…'."""
    try:
        cells = [tuple(int(number) for half in cell.split(':') for number in half.split('x'))
                 for cell in text.split(',')]
    except ValueError:
        cells = []
    if not cells or any(len(cell) != 4 or min(cell) < 1 for cell in cells):
        raise argparse.ArgumentTypeError(
            '%r: expected LAYERSxWIDTH:TOWERSxEXAMPLES, several divided by commas' % text)
    return cells


def compare(layers, width, num_towers, examples, rounds, turn_seconds):
    """(seconds of a step that adds up, joined over added by wall clock, by processor time).

    The latter two are as `turns.spread` gives them.

    Raises:
      ValueError: if the two do not have the same losses.
    """
    added, joined = [Arm(combine, layers, width, num_towers, examples) for combine in (add, join)]
    try:
        steps = max(1, int(turn_seconds / min(arm.try_out() for arm in (added, joined))))
        for number in range(rounds):
            for arm in (added, joined) if number % 2 == 0 else (joined, added):
                arm.turn(steps)
        losses = [arm.loss() for arm in (added, joined)]
        if abs(losses[0] - losses[1]) > 1e-3 * abs(losses[0]):
            raise ValueError('added and joined gradients lead to losses of %r and %r'
                             % tuple(losses))
        return (statistics.median(added.seconds), turns.ratios(joined.seconds, added.seconds),
                turns.ratios(joined.cpu_seconds, added.cpu_seconds))
    finally:
        added.close()
        joined.close()


def add(gradients):
    """Their sum by `add_n`."""
    return tf.add_n(gradients)


def join(gradients):
    """Their sum as one product, where each is a product; else by `add_n`, as of biases."""
    products = [_made_by(gradient) for gradient in gradients]
    if any(op.type != 'MatMul' for op in products):
        return tf.add_n(gradients)
    transposed = {name: products[0].get_attr(name) for name in ('transpose_a', 'transpose_b')}
    return tf.matmul(tf.concat([op.inputs[0] for op in products],
                               0 if transposed['transpose_a'] else 1),
                     tf.concat([op.inputs[1] for op in products],
                               1 if transposed['transpose_b'] else 0), **transposed)


def _made_by(gradient):
    op = gradient.op
    while op.type == 'Identity':  # tf.gradients puts one after what an operation has several of
        op = op.inputs[0].op
    return op


class Arm:
    """A graph with one way to combine, and its session.

    Attributes:
      train_op: a step.
      seconds, cpu_seconds: lists, a step's of each turn; of all threads, the latter.
    """

    def __init__(self, combine, layers, width, num_towers, examples):
        """
        Args:
          combine: function from a variable's gradients, one a tower, to their sum.
          layers, width: of the model.
          num_towers, examples: how many towers, and examples of each.
        """
        self.seconds, self.cpu_seconds = [], []
        workload = workloads.WORKLOADS['dense']
        with tf.Graph().as_default():
            tf.set_random_seed(1)
            arrays = workloads.features(width, width)(num_towers * examples)
            batch, start = input_batches(arrays, len(arrays[0]))
            optimizer = workloads.optimizer(workload.learning_rate)
            built = towers.build_towers(workloads.dense_stack(layers, width), batch, optimizer,
                                        ['/cpu:%d' % index for index in range(num_towers)], 'mean')
            make_initial_values_stateless(built.variables, 1)
            with tf.device('/cpu:0'):
                pairs = zip(*[tower.gradients for tower in built.towers])
                # The step that was built is left out by the runtime: nothing asks for it.
                self.train_op = optimizer.apply_gradients(
                    [(combine([gradient for gradient, _ in each]), each[0][1]) for each in pairs])
            self._loss = built.loss
            self._session = tf.Session(config=towers.session_config(built.devices))
            self._session.run([tf.global_variables_initializer(), start])
        self._step = self._session.make_callable(self.train_op)

    def try_out(self):
        """Runs some steps; the seconds of the fastest."""
        self._step()
        seconds = []
        for _ in range(3):
            begin = time.perf_counter()
            self._step()
            seconds.append(time.perf_counter() - begin)
        return min(seconds)

    def turn(self, steps):
        """Times so many steps."""
        begin, cpu_begin = time.perf_counter(), time.process_time()
        for _ in range(steps):
            self._step()
        self.seconds.append((time.perf_counter() - begin) / steps)
        self.cpu_seconds.append((time.process_time() - cpu_begin) / steps)

    def loss(self):
        """That of the batch, with the weights as they are."""
        return float(self._session.run(self._loss))

    def close(self):
        """Lets go of the memory."""
        self._session.close()


if __name__ == '__main__':
    main()
