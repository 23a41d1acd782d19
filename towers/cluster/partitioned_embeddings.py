"""Variables that are cut into a part for each parameter server, and how rows are found in them.

`tf.nn.embedding_lookup` takes row i of a variable of P parts from part i mod P unless it is told
otherwise, which is another row than row i of the variable in one piece. With a number of parts that
follows from the number of servers, the same checkpoint would then mean other rows on another
cluster, and on one machine.
"""

import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import ClusterError
from towers.graph.graph_walk import behind
from towers.graph.op_types import SAME_NUMBERS
from towers.graph.variable_access import read_from

_CUT = 'towers_cut_for_servers'  # a collection: the full shapes of variables that are cut here


def partitioner(num_servers, partition_bytes):
    """See `Cluster.partitioner`."""
    cut = tf.min_max_variable_partitioner(num_servers, min_slice_size=partition_bytes)

    def cut_and_record(shape, dtype):
        parts = cut(shape=shape, dtype=dtype)
        if max(parts) > 1:
            tf.add_to_collection(_CUT, tuple(shape.as_list()))
        return parts
    return cut_and_record


def check_lookups():
    """Refuses lookups that take other rows of a cut variable than of one in one piece.

    Raises:
      ClusterError: there is such a lookup in a variable that `partitioner` has cut.
    """
    shapes, whole = set(tf.get_collection(_CUT)), {}
    for variable in tf.global_variables() if shapes else ():
        name, shape = compat.saved_as(variable)
        if name != variable.op.name and tuple(shape.as_list()) in shapes:
            whole[variable.op.name] = name
    for op in tf.get_default_graph().get_operations() if whole else ():
        if op.type != 'DynamicPartition' or not _is_remainder(op.inputs[1]):
            continue
        for taker in (taker for output in op.outputs for taker in _takers(output)):
            for source in read_from(taker.inputs[0]) if 'Gather' in taker.type else ():
                if source.name in whole:
                    raise ClusterError(
                        '%r is cut into %d parts, and %r looks up its rows by '
                        "partition_strategy='mod', the default, which are other rows than those of "
                        "one machine: pass partition_strategy='div' to the lookup." % (
                            whole[source.name], len(op.outputs), taker.name))


def _is_remainder(tensor):
    """Whether the numbers of parts are the remainders of a division."""
    return behind(tensor, SAME_NUMBERS).op.type == 'FloorMod'


def _takers(tensor):
    """The operations that take a tensor, directly or through operations that leave it as it is."""
    found = []
    for op in tensor.consumers():
        found += [each for out in op.outputs for each in _takers(out)] if (
            op.type in SAME_NUMBERS) else [op]
    return found
