"""One contender in a process of its own: commands come in, answers go out, a JSON object a line.

    {"do": "build", "peer": "towers", "workload": "digits", "num_towers": 2, "batch": 96, ...}
    {"do": "steps", "count": 20, "start_at": 123.4}
    {"do": "checksum"}, {"do": "allocator"}, {"do": "resident"}, {"do": "overlap"}, {"do": "stages"}

Started by `turns.Contender`. Between commands it sleeps, so that contenders take turns without
sharing sessions, thread pools or memory. Times are of `time.monotonic`, one clock for all processes
of a machine. Standard output carries the answers alone; what libraries print goes to standard
error.
"""

import json
import os
import sys
import time
import traceback


def main():
    """Answers commands until standard input ends."""
    answers = os.fdopen(os.dup(1), 'w')
    os.dup2(2, 1)
    worker = _Worker()
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = getattr(worker, command.pop('do'))(**command)
        except Exception as error:  # pylint: disable=broad-except; it is told to who asked
            traceback.print_exc()
            answer = {'error': _shortened('%s: %s' % (type(error).__name__, error))}
        answers.write(json.dumps(answer) + '\n')
        answers.flush()


def _shortened(text):
    """Beginning and end of an error's text, in one line: TF puts code between the two."""
    text = ' '.join(text.split())
    return text if len(text) <= 300 else '%s ... %s' % (text[:145], text[-145:])


class _Worker:
    """What each command does; its methods are the commands."""

    def __init__(self):
        self._program = None

    def build(self, peer, workload, num_towers, batch, threads=None, shard=None, options=None):
        """Builds a contender and sets its weights.

        Args:
          peer: a name of `graph_peers.BUILDERS`, 'mirrored_graph', 'mirrored_function', or 'floor'.
          workload: its name.
          num_towers: N.
          batch: examples of a step, of all towers.
          threads: intra-op threads, None for the contender's own default.
          shard: for the floor: which part of the batch.
          options: further arguments of the builder.
        """
        import tensorflow.compat.v1 as tf
        tf.logging.set_verbosity(tf.logging.ERROR)
        if peer == 'mirrored_function':
            tf.enable_v2_behavior()
        else:
            tf.disable_v2_behavior()
            tf.enable_resource_variables()
        import towers
        from benchmarks import graph_peers, mirrored_peers, programs, workloads
        if 'tf_slim' in sys.modules or workload not in ('dense', 'embedding'):
            import tf_slim  # noqa: F401  pylint: disable=unused-import
            towers.mend_slim()
        begin = time.monotonic()
        chosen = workloads.WORKLOADS[workload]
        arrays = chosen.arrays(batch)
        if peer == 'floor':
            size = batch // num_towers
            arrays = tuple(array[shard * size:(shard + 1) * size] for array in arrays)
            peer, num_towers, threads = 'one_device', 1, 1
        arguments = (chosen, arrays, num_towers)
        if peer == 'mirrored_function':
            self._program = mirrored_peers.FunctionProgram(*arguments, threads=threads)
        else:
            builders = dict(graph_peers.BUILDERS,
                            mirrored_graph=mirrored_peers.build_mirrored_graph)
            parts = builders[peer](*arguments, threads=threads, **(options or {}))
            built = time.monotonic()
            self._program = programs.GraphProgram(parts)
            return {'build_seconds': built - begin}
        return {}

    def steps(self, count, start_at=None):
        """Runs steps, from a given moment on; when it began and ended, processor time, losses."""
        if start_at is not None:
            time.sleep(max(0., start_at - time.monotonic()))
        step = self._program.step
        losses = []
        begin, busy = time.monotonic(), time.process_time()
        for _ in range(count):
            losses.append(step())
        return {'begin': begin, 'end': time.monotonic(), 'losses': losses,
                'cpu': time.process_time() - busy}

    def checksum(self):
        """See `programs.checksum`."""
        from benchmarks import programs
        return programs.checksum(self._program.trainable_weights())

    def allocator(self):
        """Peak bytes of TensorFlow's allocator in a step, or None."""
        return {'bytes': self._program.peak_bytes()}

    def resident(self):
        """Peak bytes of the process so far."""
        with open('/proc/self/status') as status:
            return {'bytes': [int(line.split()[1]) * 1024 for line in status
                              if line.startswith('VmHWM:')][0]}

    def overlap(self):
        """See `overlap.overlapped`: of the last of three traced steps."""
        from benchmarks import overlap
        metadata = [self._program.trace() for _ in range(3)][-1]
        return overlap.overlapped(overlap.operation_times(metadata))

    def stages(self):
        """See `stage_use.traced_step`: of the three of seven traced steps that took the least."""
        from benchmarks import stage_use
        return {'steps': stage_use.quickest(
            [stage_use.traced_step(self._program.trace()) for _ in range(7)], 3)}


if __name__ == '__main__':
    main()
