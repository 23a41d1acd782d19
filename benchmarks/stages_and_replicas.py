"""Stages beside `MirroredStrategy`: memory of each device and time of a step, on the same devices.

    $ python -m benchmarks.stages_and_replicas [--only=gpt,lstm] [--rounds=7] [--json=FILE]

The same model and batch: on one device; as two replicas of `MirroredStrategy`, half of the batch
each; in two stages, with the whole batch and with 4 micro-batches. A device is a process of its
own, a worker of TensorFlow's on this machine, with an allocator that counts; one device has as many
cores as the two together. Contenders take turns. Memory is the most that was in use in a step; a
ratio of times is the median over rounds, with the least and the greatest.
"""

import argparse
import contextlib
import json
import sys
import time

from benchmarks import turns
from benchmarks.stage_memory import peaks_of, workers

_DEVICES = 2
_STEPS = 3  # of a turn, and of those whose memory is looked at


class _Contender:
    """A session on workers of its own."""

    def __init__(self, label, count):
        self.label, self.seconds, self.losses, self.peaks = label, [], [], None
        self.close = lambda: None  # the session, while its workers are there: else it waits for them
        self.devices = ['/job:worker/task:%d/cpu:0' % task for task in range(count)]

    def begin(self, address, case, build):
        """Builds the graph, sets its variables, and looks at the memory of some steps.

        Args:
          address: the session's.
          case: `StageModel`.
          build: function of the case and the devices to `(loss, train op, feed)`.
        """
        import tensorflow.compat.v1 as tf
        from benchmarks.programs import copies_of
        with tf.Graph().as_default():
            loss, train_op, feed = build(case, self.devices)
            # Not soft: what cannot be on its device is an error, not somewhere else.
            session = tf.Session(address, config=tf.ConfigProto(allow_soft_placement=False))
            setters = [_set(copies_of(variable)) for variable in tf.global_variables()]
            session.run(setters)
            self.close = session.close
            self._step = lambda **options: session.run([loss, train_op], feed, **options)[0]
            metadata = tf.RunMetadata()
            self.peaks = [0] * len(self.devices)
            for _ in range(_STEPS):
                self.losses.append(float(self._step(
                    options=tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE),
                    run_metadata=metadata)))
                self.peaks = [max(pair) for pair in zip(
                    self.peaks, peaks_of(metadata, len(self.devices)))]

    def turn(self):
        """Times some steps."""
        begin = time.monotonic()
        for _ in range(_STEPS):
            self._step()
        self.seconds.append((time.monotonic() - begin) / _STEPS)


def _set(copies):
    """Gives each copy of a variable the same value, whatever it is called by."""
    import numpy as np
    import tensorflow.compat.v1 as tf
    name, shape = copies[0].op.name, copies[0].get_shape().as_list()
    slot = name.rsplit('/', 1)[-1].startswith('Momentum')
    scale = 0. if slot or len(shape) < 2 else (2. / np.prod(shape[:-1])) ** 0.5
    groups = []
    for copy in copies:
        with tf.device(copy.device):
            value = tf.fill(shape, tf.cast(1., copy.dtype.base_dtype)) if name.endswith('gain') else (
                scale * tf.random.stateless_normal(shape, [len(name), sum(map(ord, name))],
                                                   dtype=copy.dtype.base_dtype))
            groups.append(copy.assign(value, read_value=False))
    return tf.group(*groups)


def _inputs(case):
    import tensorflow.compat.v1 as tf
    arrays = case.arrays('float32')
    return [tf.placeholder(array.dtype, array.shape) for array in arrays], arrays


def _optimizer():
    import tensorflow.compat.v1 as tf
    return tf.train.MomentumOptimizer(1e-4, 0.9)


def one_device(case, devices):
    """The plain program."""
    import tensorflow.compat.v1 as tf
    with tf.device(devices[0]):
        inputs, arrays = _inputs(case)
        loss = case.model(*inputs)
        return loss, _optimizer().minimize(loss), dict(zip(inputs, arrays))


def mirrored(case, devices):
    """`MirroredStrategy`, each replica with its part of the batch."""
    import tensorflow.compat.v1 as tf
    from benchmarks.mirrored_peers import run_on_replicas
    strategy = tf.distribute.MirroredStrategy(devices)
    inputs, arrays = _inputs(case)
    parts = [tf.split(each, len(devices)) for each in inputs]
    with strategy.scope():
        optimizer = _optimizer()

        def replica():
            number = tf.get_static_value(
                tf.distribute.get_replica_context().replica_id_in_sync_group)
            loss = case.model(*[part[int(number)] for part in parts])
            return loss, optimizer.apply_gradients(
                optimizer.compute_gradients(loss / len(devices)))

        losses, trained = run_on_replicas(strategy)(replica)
        loss = tf.add_n(list(strategy.experimental_local_results(losses))) / len(devices)
        return (loss, tf.group(*strategy.experimental_local_results(trained)),
                dict(zip(inputs, arrays)))


def staged(micro_batches=1):
    """Two stages of one tower."""
    def build(case, devices):
        import towers
        inputs, arrays = _inputs(case)
        built = towers.build_towers(
            case.model, tuple(inputs), _optimizer(), towers.resolve_devices([devices], check=False),
            variables=towers.VariablePlacement('stage'),
            pipeline=towers.Pipeline(micro_batches, stages=case.stages))
        return built.loss, built.train_op, dict(zip(inputs, arrays))
    return build


CONTENDERS = [('one device', 1, one_device), ('MirroredStrategy, 2 replicas', _DEVICES, mirrored),
              ('2 stages', _DEVICES, staged()),
              ('2 stages, 4 micro-batches', _DEVICES, staged(4))]


def measure(case, rounds):
    """List of `_Contender`s that have had their turns.

    Raises:
      ValueError: they do not train the same.
    """
    found = []
    with contextlib.ExitStack() as running:
        for label, count, build in CONTENDERS:
            contender = _Contender(label, count)
            address = running.enter_context(workers(count))
            contender.begin(address, case, build)
            running.callback(contender.close)
            contender.turn()
            contender.seconds = []
            found.append(contender)
            for mine, first in zip(contender.losses, found[0].losses):
                if abs(mine - first) > 1e-3 * abs(first):
                    raise ValueError('%s has the losses %s, %s has %s' % (
                        label, contender.losses, found[0].label, found[0].losses))
        for number in range(rounds):
            for contender in found[number % len(found):] + found[:number % len(found)]:
                contender.turn()
    return found


def main(argv):
    """Measures the cases and prints a table of each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--only', help='cases by name')
    parser.add_argument('--rounds', type=int, default=7)
    parser.add_argument('--json', help='file for the results')
    options = parser.parse_args(argv)
    import tensorflow.compat.v1 as tf
    import towers
    from benchmarks.stage_models import STAGE_MODELS
    tf.logging.set_verbosity(tf.logging.ERROR)
    tf.disable_v2_behavior()
    tf.enable_resource_variables()
    towers.mend_slim()
    everything = {}
    for name in options.only.split(',') if options.only else STAGE_MODELS:
        case = STAGE_MODELS[name]
        if _DEVICES not in case.counts:
            continue
        print('\n%s\n\n| | MB on each device | ms a step | over one device |\n|---|---|---|---|'
              % case.what, flush=True)
        found = measure(case, options.rounds)
        for each in found:
            ratio = turns.ratios(each.seconds, found[0].seconds)
            print('| %s | %s | %.0f | %.2f (%.2f to %.2f) |' % (
                each.label, ', '.join('%.0f' % (peak / 1e6) for peak in each.peaks),
                1e3 * turns.spread(each.seconds)['median'], ratio['median'], ratio['least'],
                ratio['most']), flush=True)
        everything[name] = [dict(label=each.label, peaks=each.peaks, seconds=each.seconds,
                                 losses=each.losses) for each in found]
    if options.json:
        with open(options.json, 'w') as opened:
            json.dump(everything, opened, indent=1)


if __name__ == '__main__':
    main(sys.argv[1:])
