"""The memory of each stage, measured: is every device below the one that holds it all?

    $ python -m benchmarks.stage_memory [--only=gpt,lstm] [--json=FILE]

Each stage is a process of its own on this machine, a worker of TensorFlow's, with an allocator that
counts: virtual CPUs of one process share theirs. One device is one such worker. The gradients are
held to those of one device besides, in float64 (`check_towers`), on virtual CPUs.
"""

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys

STEPS = 3


def serve(addresses, task):
    """Is a worker, for ever."""
    import tensorflow.compat.v1 as tf
    tf.train.Server({'worker': addresses}, 'worker', task).join()


@contextlib.contextmanager
def workers(count):
    """Starts workers whose allocators count; gives the session's address, and ends them after."""
    from towers.cluster.addresses import free_ports
    addresses = ['127.0.0.1:%d' % port for port in free_ports(count)]
    environment = dict(os.environ, TF_CPU_ALLOCATOR_USE_BFC='true', TF_CPP_MIN_LOG_LEVEL='3')
    processes = [subprocess.Popen(
        [sys.executable, '-m', 'benchmarks.stage_memory', '--serve=%d' % task,
         '--addresses=' + ','.join(addresses)], env=environment, stderr=subprocess.DEVNULL)
                 for task in range(count)]
    try:
        yield 'grpc://' + addresses[0]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def measured_peaks(case, num_stages):
    """Bytes in use at the most on each worker, of a few steps; a list, stage by stage.

    Raises:
      ValueError: a worker's allocator said nothing.
    """
    import tensorflow.compat.v1 as tf
    import towers
    devices = ['/job:worker/task:%d/cpu:0' % task for task in range(num_stages)]
    peaks = [0] * num_stages
    with workers(num_stages) as address, tf.Graph().as_default():
        images, targets = case.arrays('float32')
        # Fed: a constant would be in the memory of a device besides.
        inputs = (tf.placeholder(tf.float32, images.shape), tf.placeholder(tf.int64, targets.shape))
        built = towers.build_towers(
            case.model, inputs, tf.train.MomentumOptimizer(1e-4, 0.9),
            towers.resolve_devices([devices], check=False),
            variables=towers.VariablePlacement('stage' if num_stages > 1 else devices[0]),
            pipeline=towers.Pipeline(stages=case.stages if num_stages > 1 else None))
        with tf.Session(address, config=towers.session_config(built.devices)) as session:
            session.run(tf.global_variables_initializer())
            for _ in range(STEPS):
                metadata = tf.RunMetadata()
                session.run(built.train_op, dict(zip(inputs, (images, targets))),
                            options=tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE),
                            run_metadata=metadata)
                peaks = [max(pair) for pair in zip(peaks, peaks_of(metadata, num_stages))]
    return peaks


def peaks_of(metadata, num_workers):
    """Bytes in use at the most on each worker, of one traced step; a list by their numbers.

    Raises:
      ValueError: a worker's allocator said nothing.
    """
    peaks = [0] * num_workers
    for device in metadata.step_stats.dev_stats:
        task = re.search(r'/task:(\d+)/', device.device)
        for node in device.node_stats if task else ():
            for memory in node.memory:
                number = int(task.group(1))
                peaks[number] = max(peaks[number], memory.allocator_bytes_in_use)
    if not all(peaks):
        raise ValueError('the allocators of the workers counted %s bytes' % peaks)
    return peaks


def check(case, num_stages):
    """`TowersReport` of the model in float64 on so many stages, against one device."""
    import tensorflow.compat.v1 as tf
    import towers
    with tf.Graph().as_default():
        return towers.check_towers(
            case.model, case.arrays('float64'), steps=1,
            devices=[['/cpu:%d' % number for number in range(num_stages)]],
            pipeline=towers.Pipeline(stages=case.stages))


def main(argv):
    """Measures the cases and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--only', help='cases by name')
    parser.add_argument('--json', help='file for the results')
    parser.add_argument('--serve', type=int, help=argparse.SUPPRESS)
    parser.add_argument('--addresses', help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.serve is not None:
        serve(options.addresses.split(','), options.serve)
    import tensorflow.compat.v1 as tf
    import towers
    from benchmarks.stage_models import STAGE_MODELS
    tf.logging.set_verbosity(tf.logging.ERROR)
    tf.disable_v2_behavior()
    towers.mend_slim()
    print('| model | one device, MB | stages, MB each | fullest over one device | %s |\n'
          '|---|---|---|---|---|' % 'float64 against one device', flush=True)
    results = []
    for name in options.only.split(',') if options.only else STAGE_MODELS:
        case = STAGE_MODELS[name]
        alone = measured_peaks(case, 1)[0]
        for num_stages in case.counts:
            peaks, report = measured_peaks(case, num_stages), check(case, num_stages)
            results.append(dict(case=name, stages=num_stages,
                                one_device=alone, peaks=peaks,
                                check=str(report).splitlines()[0]))
            print('| %s | %.0f | %s | %.2f | %s |' % (
                case.what, alone / 1e6, ', '.join('%.0f' % (peak / 1e6) for peak in peaks),
                max(peaks) / float(alone), results[-1]['check']), flush=True)
    if options.json:
        with open(options.json, 'w') as opened:
            json.dump(results, opened, indent=1)


if __name__ == '__main__':
    main(sys.argv[1:])
