"""Images per second of 2 towers, of a ring, of parameter servers; and bytes on the wire.

    python -m benchmarks.cluster [--seconds=5] [--rounds=3] [--width=256]

All on this machine, over loopback, by turns, so that what else runs there hits all alike. Rates are
of all processes together; ratios are of the same round, medians over the rounds. Bytes are what the
kernel counts as acknowledged on this process's TCP connections (`TCP_INFO`), so they hold for
Linux alone.
"""

import argparse
import json
import os
import socket
import statistics
import struct
import subprocess
import sys
import time

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')

WAYS = ('towers', 'ring', 'ps')
_CHUNK = 10  # steps between two looks at the clock
_TCP_INFO, _BYTES_ACKED = 11, 120  # where struct tcp_info has tcpi_bytes_acked, from Linux 4.2 on


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__.split('\n', 1)[0])
    parser.add_argument('--seconds', type=float, default=5., help='a way and round')
    parser.add_argument('--rounds', type=int, default=3)
    parser.add_argument('--width', type=int, default=256, help='of the dense layers')
    parser.add_argument('--ways', default='towers,ring,ps', help='some of ' + ', '.join(WAYS))
    parser.add_argument('--worker', help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.worker:
        return worker(options)
    ways, rates, wire = options.ways.split(','), {}, {}
    for _ in range(options.rounds):
        for way in ways:
            results = run(way, options)
            rates.setdefault(way, []).append(sum(each['rate'] for each in results))
            if way == 'ring':
                wire = results[0]
    for way in ways:
        ratios = [own / towers for own, towers in zip(rates[way], rates[ways[0]])]
        print('%-12s %9.0f images/s   %.2f of %s (%.2f to %.2f)' % (
            way, statistics.median(rates[way]), statistics.median(ratios), ways[0], min(ratios),
            max(ratios)))
    if wire:
        print('ring         %d bytes a step and worker, the least is %d: %.3f of it' % (
            wire['bytes'], wire['least'], wire['bytes'] / wire['least']))


def run(way, options):
    """What the processes of a way report, a list of dicts."""
    command = [sys.executable, '-m', 'benchmarks.cluster', '--worker=' + way,
               '--seconds=%g' % options.seconds, '--width=%d' % options.width]
    if way != 'towers':
        command = [sys.executable, '-m', 'towers.launch', '--workers=2',
                   '--ps=%d' % (way == 'ps'), '--linger=0', '--'] + command
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True)
    lines = [line[line.index('{'):] for line in done.stdout.decode().splitlines()
             if '"rate"' in line]
    return [json.loads(line) for line in lines]


def model_fn_of(width):
    """A perceptron of two hidden layers of that width, on 784 numbers."""
    import tensorflow.compat.v1 as tf

    def model_fn(images, labels):
        hidden = images
        for place, units in enumerate((width, width, 10)):
            kernel = tf.get_variable('kernel_%d' % place, [hidden.shape[1], units])
            hidden = tf.matmul(hidden, kernel)
            hidden = tf.nn.relu(hidden) if place < 2 else hidden
        return tf.losses.sparse_softmax_cross_entropy(labels, hidden)
    return model_fn


def worker(options):
    """One process: steps for a while, then one line about them."""
    import tensorflow.compat.v1 as tf
    import towers
    from towers.run.step_loop import LoopSession
    tf.logging.set_verbosity(tf.logging.ERROR)
    tf.disable_v2_behavior()
    cluster = None
    if options.worker != 'towers':
        cluster = towers.Cluster.from_tf_config(options.worker)
        if cluster.job == 'ps':
            towers.serve(cluster, say=lambda line: None)
    count = 2 if cluster is None else 1
    batch = 64 * count
    images, labels = tf.random_uniform([batch, 784]), tf.zeros([batch], tf.int64)
    step = tf.train.get_or_create_global_step()
    built = towers.build_towers(model_fn_of(options.width), (images, labels),
                                tf.train.GradientDescentOptimizer(0.01), count, 'mean',
                                global_step=step, cluster=cluster)
    least = 2 * 1 / 2 * built.plan.parameter_bytes
    if cluster is None:
        with tf.Session(config=towers.session_config(built.devices)) as session:
            session.run(tf.global_variables_initializer())
            step = session.make_callable(built.train_op)
            return report(*timed(lambda: [step() for _ in range(_CHUNK)], options.seconds), batch,
                          least)
    config = towers.session_config(built.devices, intra_op_threads=1)
    signals = towers.StopTogetherHook(cluster, built)
    with towers.join(cluster, built, config) as member, member.session(
            [signals], LoopSession) as session:
        result = timed(lambda: session.run_steps(built.train_op, _CHUNK), options.seconds,
                       session.should_stop, forever=not cluster.is_chief)
    return report(*result, batch, least)


def timed(run_step, seconds, should_stop=lambda: False, forever=False):
    """(steps, seconds, bytes sent) after a warm-up; forever: until told to stop."""
    run_step()
    sent, begin, steps = bytes_sent(), time.perf_counter(), 0
    while not should_stop() and (forever or time.perf_counter() - begin < seconds):
        run_step()
        steps += _CHUNK
    return steps, time.perf_counter() - begin, bytes_sent() - sent


def report(steps, seconds, sent, batch, least):
    print(json.dumps({'rate': steps * batch / seconds, 'bytes': sent / max(steps, 1),
                      'least': least}), flush=True)


def bytes_sent():
    """Bytes that other processes have acknowledged, on all TCP connections of this process."""
    total = 0
    for name in os.listdir('/proc/self/fd') if os.path.isdir('/proc/self/fd') else ():
        try:
            if not os.readlink('/proc/self/fd/' + name).startswith('socket:'):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                info = connection.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, 256)
                total += struct.unpack_from('Q', info, _BYTES_ACKED)[0]
        except (OSError, struct.error):
            continue  # closed meanwhile, or no TCP
    return total


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
