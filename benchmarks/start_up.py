"""Seconds from the start of a process to the end of its first step, and where they go.

    python -m benchmarks.start_up --network=inception_v3 --towers=2 --begun=T      prints JSON

T is `time.monotonic()` of the moment at which the process was started; `measure` does that.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

_SIDE, _PER_TOWER = 96, 2  # pixels, examples: the first run is not to be about computing


def main():
    """Trains one step of a network on some towers and prints where the time went."""
    parser = argparse.ArgumentParser()
    parser.add_argument('--network')
    parser.add_argument('--towers', type=int)
    parser.add_argument('--copies', default='clone')
    parser.add_argument('--begun', type=float)
    arguments = parser.parse_args()
    moments = [arguments.begun]
    import numpy as np
    import tensorflow.compat.v1 as tf
    import towers
    from benchmarks import graph_peers, workloads
    from models import registry
    tf.logging.set_verbosity(tf.logging.ERROR)
    tf.disable_v2_behavior()
    tf.enable_resource_variables()
    towers.mend_slim()
    moments.append(time.monotonic())

    network = registry.get_network(arguments.network)
    options = {} if network.image_sizes_without_aux is None else {'create_aux_logits': False}
    side = _SIDE if network.default_image_size > _SIDE else network.default_image_size

    def model_fn(images, labels):
        logits, _ = network.build(images, 10, **options)
        return tf.reduce_mean(
            tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits))

    examples = _PER_TOWER * arguments.towers
    batch, start = graph_peers.input_batches(
        (np.zeros([examples, side, side, network.default_channels], np.float32),
         np.zeros([examples], np.int64)), examples)
    built = towers.build_towers(model_fn, batch, workloads.optimizer(0.01), arguments.towers,
                                copies=arguments.copies)
    moments.append(time.monotonic())
    session = tf.Session(config=towers.session_config(built.devices))
    moments.append(time.monotonic())
    session.run([tf.global_variables_initializer(), start])
    moments.append(time.monotonic())
    session.run([built.loss, built.train_op])
    moments.append(time.monotonic())
    parts = ('import', 'build', 'session', 'initialisation', 'first run')
    result = {part: end - begin for part, begin, end in zip(parts, moments, moments[1:])}
    result['total'] = moments[-1] - moments[0]
    print(json.dumps(result))


def measure(network, num_towers, copies, root):
    """The splits of one start, a dict of seconds, or {'failure': text}."""
    command = [sys.executable, '-m', 'benchmarks.start_up', '--network=%s' % network,
               '--towers=%d' % num_towers, '--copies=%s' % copies,
               '--begun=%r' % time.monotonic()]
    done = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          universal_newlines=True,
                          env=dict(os.environ, TF_CPP_MIN_LOG_LEVEL='3'))
    if done.returncode:
        return {'failure': (done.stderr.strip().splitlines() or ['?'])[-1][:300]}
    return json.loads(done.stdout.splitlines()[-1])


def medians(starts):
    """The median of each part over several starts, or the first failure among them."""
    failed = [start for start in starts if 'failure' in start]
    return failed[0] if failed else {
        part: statistics.median(start[part] for start in starts) for part in starts[0]}


def further_tower(starts, num_towers):
    """The build time of each tower after the first, over the first one's.

    Args:
      starts: dict from a number of towers, a string, to what `measure` returned; '1' among them.
      num_towers: from whose start it is taken.
    """
    first = starts['1']['build']
    return (starts[str(num_towers)]['build'] - first) / (num_towers - 1) / first


if __name__ == '__main__':
    main()
