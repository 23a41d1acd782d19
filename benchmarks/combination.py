"""The combination alone, against the memory's bandwidth; sparse ones against touched rows.

    python -m benchmarks.combination [--quick]      prints JSON; started by bench.py

The time is that of the combination's own operations, from a step's trace, from the first's begin to
the last's end; gradients are results of other operations, as they are in training, so that a sum
may be made in the buffer of one of them. Bandwidth is measured with the same access pattern, N
reads and one write, in turns with it: numpy adds blocks that stay in the cache, one thread a core,
in blocks of the size that is fastest. Once into the first of the arrays, as the combination does,
and once into a fresh one: the system hands out zeroed pages, which is traffic too.
"""

import concurrent.futures
import json
import os
import sys
import time

import numpy as np
import tensorflow.compat.v1 as tf

import towers
from benchmarks import fits, overlap, turns

# Floats of a block: the small one stays in the cache nearest to a core, of the large ones a thread
# takes fewer, and waits less often for Python's lock.
_BLOCKS = (1 << 15, 1 << 17, 1 << 19, 1 << 22)
_BLOCK_RUNS = 5  # to find the fastest


def main():
    """Measures all and prints one JSON object."""
    quick = '--quick' in sys.argv
    tf.logging.set_verbosity(tf.logging.ERROR)
    tf.disable_v2_behavior()
    tf.enable_resource_variables()
    megabytes, rounds = (16, 3) if quick else (64, 15)
    dense = {}
    for num_towers in (2, 4) if quick else (2, 4, 8):
        for variables in (1, 4):
            dense['%d towers, %d variables' % (num_towers, variables)] = dense_share(
                num_towers, variables, megabytes * 1000 * 1000 // 4 // variables, rounds)
    print(json.dumps({'dense': dense, 'sparse': sparse_growth(quick)}))


def dense_share(num_towers, variables, floats, rounds):
    """GB/s of `combine_gradients` for N dense gradients of each variable, and of plain memory.

    Returns:
      dict: `combination`, `memory`, `memory_fresh`: `spread` of GB/s; `share`, `share_fresh`:
      `spread` of the combination's rate over the memory's, round by round; `bytes` of a run.
    """
    moved = (num_towers + 1) * variables * floats * 4
    with tf.Graph().as_default():
        gradients, owners = [], []
        for index in range(variables):
            with tf.device('/cpu:0'):
                owners.append(tf.get_variable('owner%d' % index, [floats]))
        for tower in range(num_towers):
            with tf.device('/cpu:%d' % tower):
                sources = [tf.get_variable('gradient%d_%d' % (tower, index), [floats],
                                           initializer=tf.ones_initializer())
                           for index in range(variables)]
                # Results of an operation, whose buffers nothing else holds.
                scale = tf.placeholder_with_default(1., [])
                gradients.append([(source.read_value() * scale, owner)
                                  for source, owner in zip(sources, owners)])
        combined = towers.combine_gradients(gradients)
        # The sum's buffer becomes the variable's, without a copy; unused, it is optimised away.
        done = tf.group(*[owner.assign(gradient, read_value=False)
                          for gradient, owner in combined])
        with tf.Session(config=towers.session_config(num_towers)) as session:
            session.run(tf.global_variables_initializer())
            combine = session.make_callable(done, accept_options=True)
            plain, fresh = _memory_runs(num_towers, variables * floats)
            timed = {'combination': [], 'memory': [], 'memory_fresh': []}
            ways = (('combination', lambda: _traced_seconds(combine)),
                    ('memory', lambda: _seconds(plain)), ('memory_fresh', lambda: _seconds(fresh)))
            for _, seconds in ways + ways:
                seconds()
            for _ in range(rounds):
                for name, seconds in ways:
                    timed[name].append(moved / seconds() / 1e9)
    result = {name: turns.spread(rates) for name, rates in timed.items()}
    result.update(share=turns.ratios(timed['combination'], timed['memory']),
                  share_fresh=turns.ratios(timed['combination'], timed['memory_fresh']),
                  bytes=moved)
    return result


def _traced_seconds(combine):
    """Seconds from the begin of the first operation of the combination to the end of the last."""
    metadata = tf.RunMetadata()
    combine(options=tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE), run_metadata=metadata)
    added = [each for each in overlap.operation_times(metadata) if 'AddN' in each.name]
    return (max(each.end for each in added) - min(each.begin for each in added)) / 1e6


def _seconds(run):
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def _memory_runs(num_arrays, floats):
    """(into the first array, into a fresh one): functions that add up arrays in every core."""
    arrays = [np.ones(floats, np.float32) for _ in range(num_arrays)]
    cores = os.cpu_count() or 1
    pool = concurrent.futures.ThreadPoolExecutor(cores)
    bounds = np.linspace(0, floats, cores + 1).astype(int)

    def add(out, length):
        def part(core):
            for start in range(bounds[core], bounds[core + 1], length):
                block = slice(start, min(start + length, bounds[core + 1]))
                np.add(arrays[0][block], arrays[1][block], out=out[block])
                for array in arrays[2:]:
                    np.add(out[block], array[block], out=out[block])
        list(pool.map(part, range(cores)))

    fastest = min(_BLOCKS, key=lambda length: min(
        _seconds(lambda: add(arrays[0], length)) for _ in range(_BLOCK_RUNS)))
    return (lambda: add(arrays[0], fastest),
            lambda: add(np.empty(floats, np.float32), fastest))


def sparse_growth(quick):
    """Time of combining and applying sparse gradients, against touched rows and table size.

    Returns:
      dict: `rows` and `tables`, each {'sizes', 'milliseconds', 'slope'}: of touched rows a tower
      with one table, and of the table's rows with one number of touched rows.
    """
    table, touched = (10 ** 6, 10 ** 3) if quick else (4 * 10 ** 6, 10 ** 4)
    growing = [touched // 2 * 2 ** power for power in range(6)]
    tables = [table // 4, table // 2, table]
    runs = 5 if quick else 25
    # Of every table the same rows, as many as the smallest has: else what would grow is the time
    # that memory takes to reach a row of a larger one.
    by_rows = [_sparse_milliseconds(table, tables[0], rows, runs) for rows in growing]
    by_table = [_sparse_milliseconds(size, tables[0], touched, runs) for size in tables]
    large = fits.large_half(growing)
    return {'rows': {'sizes': growing, 'milliseconds': by_rows, 'slope': fits.slope(
                [growing[index] for index in large], [by_rows[index] for index in large])},
            'tables': {'sizes': tables, 'milliseconds': by_table,
                       'slope': fits.slope(tables, by_table)}}


def _sparse_milliseconds(table_rows, reached, touched, runs, num_towers=4, width=32):
    """Median milliseconds of combining towers' sparse gradients and applying them.

    Each tower touches `touched` rows, drawn from the table's first `reached`.
    """
    with tf.Graph().as_default():
        with tf.device('/cpu:0'):
            table = tf.get_variable('table', [table_rows, width],
                                    initializer=tf.zeros_initializer())
        random, gradients = np.random.RandomState(1), []
        for tower in range(num_towers):
            with tf.device('/cpu:%d' % tower):
                values = tf.get_variable('values%d' % tower, [touched, width])
                indices = tf.placeholder_with_default(
                    random.randint(reached, size=touched).astype(np.int64), [touched])
                gradients.append([(tf.IndexedSlices(
                    values.read_value(), indices, tf.constant([table_rows, width], tf.int64)),
                                   table)])
        combined = towers.combine_gradients(gradients)
        done = tf.train.GradientDescentOptimizer(0.1).apply_gradients(combined)
        with tf.Session(config=towers.session_config(num_towers)) as session:
            session.run(tf.global_variables_initializer())
            run = session.make_callable(done)
            times = []
            for _ in range(runs + 3):
                begin = time.perf_counter()
                run()
                times.append(1e3 * (time.perf_counter() - begin))
    return turns.spread(times[3:])['median']


if __name__ == '__main__':
    main()
