"""XLA: each tower's forward and backward pass compiled for its own device."""

import collections
import contextlib

import tensorflow.compat.v1 as tf

from towers.errors import InvalidArgumentError
from towers.graph.graph_walk import is_random
from towers.placement.devices import is_gpu


@contextlib.contextmanager
def compiled(enabled):
    """A scope whose operations, and the gradients taken of them, XLA compiles, one tower a scope.

    This is `tf.xla.experimental.jit_scope`, which needs no flag and no environment variable, also
    on CPUs. The session-wide `global_jit_level` is not used: on CPUs it needs TF_XLA_FLAGS=
    --tf_xla_cpu_global_jit before TensorFlow starts, and on TF 2.15 and later it puts operations
    of several virtual CPUs into one cluster, which then fails ("Multiple CPU devices").

    Left out are random operations, for which XLA draws other numbers; initial values, which are
    computed once and would be compiled one by one; and reads and writes of variables, which stay on
    the variables' devices. (On TF 1.15 a compiled `is_variable_initialized` returns False.)

    The first steps of a session may run before a cluster is compiled, and sums in a cluster are
    added in another order, so a run that resumes is the same only to rounding.

    Args:
      enabled: whether to compile.
    """
    if not enabled:
        yield
        return
    with tf.xla.experimental.jit_scope(_is_to_be_compiled):
        yield


def describe(devices):
    """The plan's line about XLA for towers on these devices."""
    text = "each tower's forward and backward pass, but for random operations"
    if not all(is_gpu(device) for device in devices):
        # benchmarks/precision_and_xla.py: 1.4 to 6 times the step, with oneDNN's kernels beside it.
        text += '; on CPUs that was slower in every model measured'
    return text


_OF_VARIABLES = ('Var', 'ReadVariable', 'Assign', 'Resource')


def clusters(run_metadata):
    """How many clusters XLA compiled for each device.

    Args:
      run_metadata: of a step that was run with `tf.RunOptions(output_partition_graphs=True)`.

    Returns:
      `Counter` from devices such as `'/device:CPU:1'` to numbers; empty where nothing was compiled.
    """
    return collections.Counter(
        node.device[node.device.index('/device:'):] for graph in run_metadata.partition_graphs
        for node in graph.node if node.op == '_XlaRun')


@contextlib.contextmanager
def explained(enabled):
    """Turns TensorFlow's error about loops that XLA cannot differentiate into a typed error."""
    try:
        yield
    except ValueError as error:
        if not enabled or 'XLA while_loop' not in str(error):
            raise
        raise InvalidArgumentError(
            'xla=True: the model has a tf.while_loop without maximum_iterations, whose gradient '
            'XLA cannot compile (%s). Pass maximum_iterations, or leave xla out.'
            % ' '.join(str(error).split())) from error


def _is_to_be_compiled(node):
    return not (_is_random(node) or '/Initializer/' in node.name or '/initial_value' in node.name
                or node.op.startswith(_OF_VARIABLES))


def _is_random(node):
    return node.op.startswith('Stateless') or is_random(_Operation(node.op))


_Operation = collections.namedtuple('_Operation', 'type')  # what `is_random` looks at
