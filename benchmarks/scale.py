"""How building, graph, step and memory grow with towers to 32 and with parameters to 10^9.

    python -m benchmarks.scale [--quick]      prints JSON; started by bench.py

Parameters are the static part: the graph is built and its variables' bytes are added up; nothing
of it is run.
"""

import json
import sys
import time

import tensorflow.compat.v1 as tf

import towers
from benchmarks import fits, graph_peers, programs, turns, workloads

_WIDTH = 2048  # of a layer: 4.2 M parameters


def main():
    """Measures both and prints one JSON object."""
    quick = '--quick' in sys.argv
    tf.logging.set_verbosity(tf.logging.ERROR)
    tf.disable_v2_behavior()
    tf.enable_resource_variables()
    _of_towers(2)  # what only the first graph of a process does
    counts = (1, 2, 4, 8) if quick else (1, 2, 4, 8, 16, 32)
    layers = (1, 4, 16) if quick else (1, 4, 16, 60, 240)
    print(json.dumps({
        'towers': with_slopes(counts, [_of_towers(count) for count in counts]),
        'parameters': with_slopes([each * _WIDTH ** 2 for each in layers],
                                  [_of_layers(each) for each in layers])}))


def with_slopes(sizes, measured):
    """{'sizes', 'costs': name to list, 'slopes': name to exponent over the larger half}.

    Args:
      sizes: numbers of towers, or of parameters.
      measured: list of dicts from a cost's name to its value, one a size. A cost that is zero
        where it was not measured gets no slope.
    """
    costs = {name: [each[name] for each in measured] for name in measured[0]}
    large = fits.large_half(sizes)
    slopes = {name: fits.slope([sizes[index] for index in large],
                               [values[index] for index in large])
              for name, values in costs.items() if all(values)}
    return {'sizes': list(sizes), 'costs': costs, 'slopes': slopes}


def _of_towers(num_towers, steps=30):
    """Costs of a tiny model on so many towers, two examples each."""
    workload = workloads.WORKLOADS['tiny']
    arrays = workload.arrays(2 * num_towers)
    with tf.Graph().as_default():
        begin = time.perf_counter()
        parts = graph_peers.build_with_towers(workload, arrays, num_towers)
        built = time.perf_counter() - begin
        program = programs.GraphProgram(parts)
        try:
            nodes, graph_bytes = program.graph_size()
            times = []
            for _ in range(steps):
                begin = time.perf_counter()
                program.step()
                times.append(time.perf_counter() - begin)
            return {'build seconds': built, 'graph nodes': nodes, 'graph bytes': graph_bytes,
                    'step seconds': turns.spread(times[5:])['median'],
                    'peak bytes': program.peak_bytes()}
        finally:
            program.close()


def _of_layers(layers):
    """Costs of building two towers of so many dense layers."""
    with tf.Graph().as_default() as graph:
        features = tf.placeholder(tf.float32, [4, _WIDTH])
        labels = tf.placeholder(tf.int64, [4])
        begin = time.perf_counter()
        built = towers.build_towers(workloads.dense_stack(layers, _WIDTH), (features, labels),
                                    workloads.optimizer(0.1), 2)
        seconds = time.perf_counter() - begin
        definition = graph.as_graph_def()
        return {'build seconds': seconds, 'graph nodes': len(definition.node),
                'graph bytes': definition.ByteSize(),
                'variable bytes': sum(
                    variable.get_shape().num_elements() * variable.dtype.base_dtype.size
                    for variable in built.variables + built.slots)}


if __name__ == '__main__':
    main()
