"""The first day with GPUs: everything that was never run on one, as one page.

    python -m benchmarks.gpus                                   all GPUs of this machine
    python -m benchmarks.gpus --network=resnet_v1_50 --batch_size=64
    python -m benchmarks.gpus --devices=/cpu:0,/cpu:1 --network=digits --steps=2   a rehearsal

It writes `gpus.html`: the audit of a real step, the memory account beside the measured peak, steps
on 1, 2, 4, 8 devices, half precision, batch norm over the whole batch; and `step.html`, the report
of a step on all devices. A part that fails is written with its error, and the others go on.
"""

import argparse
import html
import os
import time

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')

import numpy as np  # noqa: E402
import tensorflow.compat.v1 as tf  # noqa: E402

from models import registry  # noqa: E402
from models.classifier import Classifier  # noqa: E402
import towers  # noqa: E402
from towers.memory.measure import count_on_cpus  # noqa: E402

_COUNTS = (1, 2, 4, 8)
_WARM_UP = 3  # steps
_CLASSES = 10
_FULL = tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE, output_partition_graphs=True)


def main():
    """Runs all parts as a program of its own."""
    options = parse()
    tf.logging.set_verbosity(tf.logging.ERROR)
    tf.disable_v2_behavior()
    tf.enable_resource_variables()
    count_on_cpus()
    run(options)


def run(options):
    """Runs all parts and writes the page; returns its name."""
    towers.mend_slim()
    devices = devices_of(options)
    parts = [('The machine', lambda: machine(devices)),
             ('1. The audit of a step', lambda: audit_of_step(devices, options)),
             ('2. Memory, predicted and measured', lambda: memory(devices, options)),
             ('3. Steps on 1, 2, 4, 8 devices', lambda: scaling(devices, options)),
             ('4. Half precision and loss scaling', lambda: precision(devices, options)),
             ("5. batch_norm='sync'", lambda: sync(devices, options))]
    os.makedirs(options.directory, exist_ok=True)
    sections = []
    for title, part in parts:
        print('%s …' % title, flush=True)
        text = _text_or_error(part)
        print(text, flush=True)
        sections.append((title, text))
    path = os.path.join(options.directory, 'gpus.html')
    with open(path, 'w', encoding='utf-8') as page:
        page.write(page_of(sections))
    print('page: %s' % path)
    return path


def parse(arguments=None):
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('--devices', default='', help='names with commas; all GPUs if empty')
    parser.add_argument('--network', default='resnet_v1_50', help='one of models.registry')
    parser.add_argument('--image_size', type=int, default=0, help="0: the network's own")
    parser.add_argument('--batch_size', type=int, default=32, help='examples a device')
    parser.add_argument('--steps', type=int, default=30, help='timed steps')
    parser.add_argument('--directory', default='gpus', help='where the pages go')
    return parser.parse_args(arguments)


def devices_of(options):
    """The names of the devices; exits where there is no GPU and no device is named."""
    if options.devices:
        return list(towers.resolve_devices(options.devices))
    gpus = towers.visible_gpus()
    if not gpus:
        raise SystemExit('TensorFlow sees no GPU here (docs/install.md says why that may be): a '
                         'rehearsal is --devices=/cpu:0,/cpu:1 --network=digits --steps=2')
    return list(gpus)


def _text_or_error(part):
    """The text of a part of the page, or the error that it ended with."""
    try:
        return part()
    except (towers.TowersError, tf.errors.OpError) as error:
        return '%s: %s' % (type(error).__name__, error)


# ---- the parts -----------------------------------------------------------------------------------

def machine(devices):
    """TensorFlow's version, its CUDA, and the devices."""
    build = getattr(getattr(tf, 'sysconfig', None), 'get_build_info', dict)()
    lines = ['TensorFlow %s' % tf.version.VERSION]
    for name in ('cuda_version', 'cudnn_version'):
        lines.append('%s %s' % (name, build.get(name, 'not told')))
    return '\n'.join(lines + ['devices: %s' % ', '.join(devices)])


def audit_of_step(devices, options):
    """Plan, and audit of what the runtime placed; writes the report of the step, too."""
    with tf.Graph().as_default():
        built = build(devices, options)
        metadata = tf.RunMetadata()
        with session_of(built) as session:
            for _ in range(_WARM_UP):
                session.run(built.train_op)
            session.run(built.train_op, options=_FULL, run_metadata=metadata)
        report = towers.step_report(built, metadata,
                                    os.path.join(options.directory, 'step.html'))
        return '%s\n\n%s\n\n%s' % (built.plan, towers.audit(built, metadata), report)


def memory(devices, options):
    """The account of all devices, and what TensorFlow's allocators measured."""
    with tf.Graph().as_default():
        built = build(devices, options)
        account = towers.memory_account(built)
        try:
            measured = towers.measure_memory(built)
        except towers.MeasurementError as error:
            return '%s\n\nnot measured: %s' % (account, error)
        return '%s\n\n%s\n\n%s' % (account, measured, measured.against(account))


def scaling(devices, options):
    """Milliseconds a step and images a second on 1, 2, 4, 8 devices, the batch growing with them,
    with variables shared and replicated."""
    lines = ['%-10s %-12s %10s %10s %8s' % ('devices', 'variables', 'ms', 'images/s', 'times')]
    first = None
    for count in [each for each in _COUNTS if each <= len(devices)]:
        for placement in (None, 'replicated'):
            if count == 1 and placement is not None:
                continue
            seconds = seconds_a_step(
                devices[:count], options, variables=towers.VariablePlacement(placement))
            rate = count * options.batch_size / seconds
            first = first or rate
            lines.append('%-10d %-12s %10.1f %10.1f %8.2f' % (
                count, placement or 'shared', 1e3 * seconds, rate, rate / first))
    return '\n'.join(lines)


def precision(devices, options):
    """Milliseconds a step in float32 and in fp16, and what the loss scale did."""
    lines = ['float32 %10.1f ms' % (1e3 * seconds_a_step(devices, options))]
    seconds = seconds_a_step(devices, options, numerics=towers.Numerics('fp16'))
    lines.append('fp16    %10.1f ms' % (1e3 * seconds))
    return '\n'.join(lines)


def sync(devices, options):
    """Milliseconds a step with batch norm of each shard, and of the whole batch."""
    lines = []
    for word in ('shard', 'sync'):
        seconds = seconds_a_step(devices, options, batch_norm=word)
        lines.append('%-8s %10.1f ms' % (word, 1e3 * seconds))
    return '\n'.join(lines)


# ---- a model on some devices ---------------------------------------------------------------------

def build(devices, options, **further):
    """The towers of the network on these devices, with `batch_size` examples each."""
    network = registry.get_network(options.network)
    size = options.image_size or network.default_image_size
    classifier = Classifier(network, _CLASSES, image_size=size)
    count = len(devices) * options.batch_size
    chance = np.random.RandomState(0)
    images = chance.rand(count, size, size, classifier.image_format['channels'])
    labels = chance.randint(0, _CLASSES, count)
    # Variables, so that the batch is made once, and comes from the CPU in each step.
    with tf.device('/cpu:0'):
        batch = [tf.get_variable(name, initializer=values, trainable=False) for name, values in (
            ('images', images.astype(np.float32)), ('labels', labels.astype(np.int64)))]
    inputs = tuple(variable.read_value() for variable in batch)
    return towers.build_towers(
        classifier.model_fn('train'), inputs, tf.train.MomentumOptimizer(0.01, 0.9), devices,
        reduction='mean', **further)


def session_of(built):
    """An initialized session for a build."""
    config = towers.use_precision(
        towers.session_config(built.devices), built.precision, built.devices)
    session = tf.Session(config=config)
    session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
    return session


def seconds_a_step(devices, options, **further):
    """The mean of the timed steps, after some that are not."""
    with tf.Graph().as_default():
        built = build(devices, options, **further)
        with session_of(built) as session:
            step = session.make_callable(built.train_op)
            for _ in range(_WARM_UP):
                step()
            begin = time.perf_counter()
            for _ in range(options.steps):
                step()
            return (time.perf_counter() - begin) / options.steps


def page_of(sections):
    """The page as HTML: a heading and a text for each of the sections."""
    parts = ['<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>GPUs</title>'
             '<meta name="viewport" content="width=device-width, initial-scale=1">'
             '<style>:root{color-scheme:light dark} body{font:16px/1.5 sans-serif;max-width:70em;'
             'margin:auto;padding:1em} pre{overflow-x:auto}</style></head><body>',
             '<p><a href="step.html">The report of a step on all devices</a></p>']
    for title, text in sections:
        parts.append('<h2>%s</h2><pre>%s</pre>' % (html.escape(title), html.escape(text)))
    return '\n'.join(parts + ['</body></html>\n'])


if __name__ == '__main__':
    main()
