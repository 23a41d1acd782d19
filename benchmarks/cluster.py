"""Examples per second of 2 towers, of clusters of 2 processes, and of others' clusters; and bytes.

    python -m benchmarks.cluster [--seconds=5] [--rounds=3] [--workloads=small_conv,dense]
                                  [--examples=512] [--ways=towers,ring,ring@1,ring-bfloat16]
                                  [--threads=1]

Ways: `towers`, one process with 2 towers; `ring` and `ps`, 2 workers with a tower each;
`ring-float16` and `ring-bfloat16`, whose gradients travel so; `ring@1`, with buffers of 1 MiB;
`ring+sync`, with `batch_norm='sync'`; `mirrored`, TensorFlow's `MultiWorkerMirroredStrategy`; where
Horovod is installed, `towers-horovod`, two workers by `kind='horovod'`, and `horovod`, its own
optimizer in a plain loop; `horovod-session`, its own optimizer in the loop of its examples, with a
session that has hooks and counts steps, as a member of a cluster of towers has. By Horovod, `:2x2`
has 2 processes with 2 towers each: `towers-horovod:2x2`. Beside it, `horovod:2x2` has 2 processes
with the examples of 2 towers each, and `horovod:4x1` has 4 processes.

All on this machine, over loopback, by turns, so that what else runs there hits all alike. Rates are
of all processes together; ratios are of the same round, medians over the rounds. Processor time is
that of the processes that train, without parameter servers; it is steadier than the rates where
other programs run. Bytes are what the kernel counts as acknowledged on this process's TCP
connections (`TCP_INFO`), so they hold for Linux alone.
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

_BY_HOROVOD = ('towers-horovod', 'horovod', 'horovod-session')
WAYS = ('towers', 'ring', 'ring-float16', 'ring-bfloat16', 'ring+sync', 'ps',
        'mirrored') + _BY_HOROVOD
HOROVODRUN = os.path.join(os.path.dirname(sys.executable), 'horovodrun')
_CHUNK = 10  # steps between two looks at the clock
_TCP_INFO, _BYTES_ACKED = 11, 120  # where struct tcp_info has tcpi_bytes_acked, from Linux 4.2 on


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__.split('\n', 1)[0])
    parser.add_argument('--seconds', type=float, default=5., help='a way and round')
    parser.add_argument('--rounds', type=int, default=3)
    parser.add_argument('--workloads', default='small_conv,dense,embedding',
                        help='some of benchmarks.workloads')
    parser.add_argument('--examples', type=int, default=0,
                        help='of a process or tower and step; 0: as many as the workload says')
    parser.add_argument('--threads', type=int, default=1, help="for one operation's work")
    left_out = dict(_left_out())
    parser.add_argument('--ways', default=','.join(way for way in WAYS if way not in left_out),
                        help='some of ' + ', '.join(WAYS))
    parser.add_argument('--worker', help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.worker:
        return worker(options)
    for way, why in left_out.items():
        print('%-20s left out: %s' % (way, why))
    for workload in options.workloads.split(','):
        compare(options, workload)


def _left_out():
    """(way, why) of each way that cannot be measured here."""
    if sys.version_info < (3, 8):
        yield 'mirrored', 'its processes find no device on TensorFlow 1.15'
    if not os.path.exists(HOROVODRUN):
        for way in _BY_HOROVOD:
            yield way, 'Horovod is not installed beside this Python'


def compare(options, workload):
    """Runs all ways by turns for one workload, and prints their rates."""
    ways, rates, used, wire = options.ways.split(','), {}, {}, {}
    for number in range(options.rounds):
        for way in ways:
            results = run(way, options, workload)
            rates.setdefault(way, []).append(sum(each['rate'] for each in results))
            used.setdefault(way, []).append(statistics.mean(each['used'] for each in results))
            print('%-10s %-13s round %d: %8.0f examples/s, %.3f ms of processor an example' % (
                workload, way, number + 1, rates[way][-1], used[way][-1]), flush=True)
            if way.startswith('ring'):
                wire[way] = next(each for each in results if each['rank'] == 0)
    for way in ways:
        ratios, costs = [[own / towers for own, towers in zip(found[way], found[ways[0]])]
                         for found in (rates, used)]
        print('%-10s %-13s %8.0f examples/s   %.2f of %s (%.2f to %.2f); processor %.2f of it' % (
            workload, way, statistics.median(rates[way]), statistics.median(ratios), ways[0],
            min(ratios), max(ratios), statistics.median(costs)), flush=True)
    for way, sent in wire.items():
        print('%-10s %s sends %d bytes a step and worker, %.3f of the least of float32, %d' % (
            workload, way, sent['bytes'], sent['bytes'] / sent['least'], sent['least']), flush=True)


def run(way, options, workload):
    """What the processes of a way report, a list of dicts."""
    command = [sys.executable, '-m', 'benchmarks.cluster', '--worker=' + way,
               '--seconds=%g' % options.seconds, '--workloads=' + workload,
               '--examples=%d' % options.examples, '--threads=%d' % options.threads]
    if way.partition(':')[0] in _BY_HOROVOD:
        command = [HOROVODRUN, '-np', str(_processes_and_towers(way)[0])] + command
    elif way != 'towers':
        command = [sys.executable, '-m', 'towers.launch', '--workers=2',
                   '--ps=%d' % (way == 'ps'), '--grace=1', '--'] + command
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    if done.returncode:
        said = (done.stdout + done.stderr).decode(errors='replace').rstrip()
        sys.exit('%s with %s ended with status %d:\n%s' % (
            way, workload, done.returncode, said[-2000:]))
    lines = [line[line.index('{'):] for line in done.stdout.decode().splitlines()
             if '"rate"' in line]
    return [json.loads(line) for line in lines]


def _processes_and_towers(way):
    """The number of processes of a way by Horovod, and of the towers of each."""
    return [int(number) for number in (way.partition(':')[2] or '2x1').split('x')]


def worker(options):
    """One process: steps for a while, then one line about them."""
    import tensorflow.compat.v1 as tf
    import towers
    from benchmarks import cluster_peers
    from benchmarks.workloads import WORKLOADS
    tf.logging.set_verbosity(tf.logging.ERROR)
    towers.mend_slim()
    workload = WORKLOADS[options.workloads]
    model_fn, batch = workload.model, options.examples or workload.batch
    way = options.worker.partition(':')[0]
    count = 2 if way == 'towers' else _processes_and_towers(options.worker)[1]
    batch *= count

    def arrays():
        # As from an input pipeline: of constants, and of placeholders that have one as default and
        # are not fed, TensorFlow would compute what they alone decide a single time, such as the
        # indices that Horovod gathers. A random number below 1 is 0, which TensorFlow does not
        # know.
        zero = tf.random_uniform([], maxval=1, dtype=tf.int32)
        return tuple(array + tf.cast(zero, array.dtype) for array in workload.arrays(batch))
    peers = {'mirrored': cluster_peers.mirrored, 'horovod': cluster_peers.horovod,
             'horovod-session': cluster_peers.horovod_session}
    if way in peers:
        peer = peers[way](model_fn, arrays, _CHUNK, options.threads)
        return report(*cluster_peers.timed(*peer, options.seconds, _CHUNK), 0, batch, 0, None)
    kind, _, sync = way.partition('+')
    kind, _, buffer_mb = kind.partition('@')
    kind, _, wire = kind.partition('-')
    tf.disable_v2_behavior()
    cluster = None
    if way == 'towers-horovod':
        cluster = towers.Cluster('horovod')
    elif way != 'towers':
        cluster = towers.Cluster.from_tf_config(kind, wire=wire or None,
                                                buffer_mb=float(buffer_mb) if buffer_mb else None)
        if cluster.job == 'ps':
            towers.serve(cluster, say=lambda line: None)
    step = tf.train.get_or_create_global_step()
    built = towers.build_towers(model_fn, arrays(), tf.train.GradientDescentOptimizer(
        cluster_peers.RATE), count, 'mean', global_step=step, cluster=cluster,
                                batch_norm=sync or 'shard')
    least = 2 * 1 / 2 * sum(
        each.dtype.size * each.get_shape().num_elements() for each in built.variables)
    config = towers.session_config(built.devices, intra_op_threads=options.threads)
    if cluster is None:
        with tf.Session(config=config) as session:
            session.run(tf.global_variables_initializer())
            step = session.make_callable(built.train_op)
            return report(*timed(lambda: [step() for _ in range(_CHUNK)], options.seconds), batch,
                          least, 0)
    signals = towers.StopTogetherHook(cluster, built)
    with towers.join(cluster, built, config) as member, member.session(
            [signals]) as session:
        def chunk():
            for _ in range(_CHUNK):
                if not session.should_stop():
                    session.run(built.train_op)
        result = timed(chunk, options.seconds, session.should_stop, forever=not cluster.is_chief)
    return report(*result, batch, least, cluster.rank)


def timed(run_step, seconds, should_stop=lambda: False, forever=False):
    """(steps, seconds, processor's seconds, bytes sent) after a warm-up; forever: until told to
    stop."""
    from tensorflow import errors
    run_step()
    sent, begin, used, steps = bytes_sent(), time.perf_counter(), time.process_time(), 0
    try:
        while not should_stop() and (forever or time.perf_counter() - begin < seconds):
            run_step()
            steps += _CHUNK
    except errors.OutOfRangeError:  # the chief of a ring has ended
        pass
    return (steps, time.perf_counter() - begin, time.process_time() - used,
            bytes_sent() - sent)


def report(steps, seconds, used, sent, batch, least, rank):
    """Prints one line of JSON. The chief's steps are exact; others are told to stop within a chunk.
    """
    print(json.dumps({'rate': steps * batch / seconds, 'bytes': sent / max(steps, 1),
                      'used': 1e3 * used / max(steps * batch, 1), 'least': least,
                      'rank': rank}), flush=True)


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
