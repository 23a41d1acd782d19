"""A built graph as something that can be stepped: session, weights, trace."""

import collections

import numpy as np
import tensorflow.compat.v1 as tf

from benchmarks.workloads import initial_value

GraphParts = collections.namedtuple('GraphParts', [
    'loss', 'train_op', 'weights', 'initializers', 'config', 'tower_0'], defaults=(None,))
"""What a builder of a graph returns.

Fields:
  loss: scalar, the batch's mean loss before the update.
  train_op: operation.
  weights: dict from the name of a model variable to its copies, trainable ones first or not.
  initializers: operations to run before the first step, such as an iterator's.
  config: `ConfigProto` of the session.
  tower_0: the first `Tower`; or None.
"""

TRACED = 5  # steps whose peak memory is taken
_HANDFUL = 5e7  # bytes


class GraphProgram:
    """A session on the default graph, its model variables set to the common initial values."""

    def __init__(self, parts):
        self._parts = parts
        self._session = tf.Session(config=parts.config)
        ours = {copy.op.name for copies in parts.weights.values() for copy in copies}
        setters = {}
        for name, copies in parts.weights.items():
            with tf.device(copies[0].device):
                given = tf.placeholder(tf.float32, copies[0].get_shape())
            setters[name] = given, [set_to(copy, given) for copy in copies]
        for names in self._handfuls():
            self._session.run(
                [setters[name][1] for name in names],
                {setters[name][0]: initial_value(name, setters[name][0].get_shape().as_list())
                 for name in names})
        # Slots and counters have their initializers run; last those of towers' copies, which take
        # what weights and slots hold.
        for collection in (tf.global_variables(), tf.local_variables()):
            self._session.run([copy.initializer for variable in collection
                               for copy in copies_of(variable) if copy.op.name not in ours])
        self._session.run(list(parts.initializers))
        fetches = [parts.loss, parts.train_op]
        self._step = self._session.make_callable(fetches)
        self._traced = self._session.make_callable(fetches, accept_options=True)

    def step(self):
        """One training step; the loss before it, a float."""
        return float(self._step()[0])

    def trainable_weights(self):
        """Yields (name, array) of the first copy of each trainable weight."""
        trainable = {copies_of(variable)[0].op.name for variable in tf.trainable_variables()}
        for names in self._handfuls():
            firsts = {name: self._parts.weights[name][0] for name in names
                      if self._parts.weights[name][0].op.name in trainable}
            for name, value in self._session.run(firsts).items():
                yield name, value

    def _handfuls(self):
        """Lists of names of weights: all at once would hold much memory, and a run for each would
        have the whole graph optimized for each."""
        names, size = [], 0
        for name, copies in self._parts.weights.items():
            size += 4 * copies[0].get_shape().num_elements()
            names.append(name)
            if size > _HANDFUL:
                yield names
                names, size = [], 0
        if names:
            yield names

    def trace(self):
        """`RunMetadata` of one step under FULL_TRACE; see `tell_tower_0`."""
        metadata = tf.RunMetadata()
        self._traced(options=tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE),
                     run_metadata=metadata)
        if self._parts.tower_0 is not None:
            tell_tower_0(metadata, self._parts.tower_0)
        return metadata

    def peak_bytes(self):
        """Most bytes that TensorFlow's CPU allocator held during a step, variables included.

        Of several steps: it depends on which operations happen to run at the same time. 0 where the
        allocator does not count; it does with TF_CPU_ALLOCATOR_USE_BFC=true.
        """
        return max([memory.allocator_bytes_in_use for _ in range(TRACED)
                    for device in self.trace().step_stats.dev_stats for node in device.node_stats
                    for memory in node.memory] or [0])

    def graph_size(self):
        """(nodes, bytes) of the graph."""
        definition = tf.get_default_graph().as_graph_def()
        return len(definition.node), definition.ByteSize()

    def close(self):
        """Ends the session."""
        self._session.close()


def tell_tower_0(metadata, tower):
    """Puts `tower_0/` before the names of the first tower's operations, which have no scope."""
    for device in metadata.step_stats.dev_stats:
        for node in device.node_stats:
            if tower.has(node.node_name.split(':')[0]):
                node.node_name = 'tower_0/' + node.node_name


def copies_of(variable):
    """The plain variables that a variable consists of: several if a strategy mirrors it."""
    return list(getattr(variable, 'values', None) or [variable])


def set_to(variable, value):
    """Operation that gives a variable a value, set before or not."""
    return variable.assign(value, read_value=False) if is_resource(variable) else tf.assign(
        variable, value).op


def is_resource(variable):
    """Whether it is a resource variable."""
    return variable.dtype == variable.dtype.base_dtype


def checksum(weights):
    """What training has done to the weights, in numbers that other contenders' can be held to.

    Args:
      weights: iterable of (name, array), trained from `initial_value`.

    Returns:
      dict: `change`, the Euclidean length of all that has changed, and `projection`, the change
      along a fixed random direction (of at most 100,000 weights of each variable).
    """
    squares, projection = 0., 0.
    for name, array in weights:
        change = (array - initial_value(name, array.shape)).ravel()
        squares += float(np.dot(change, change))
        sampled = change[::max(1, change.size // 100000)]
        direction = np.random.RandomState(len(name)).standard_normal(sampled.size)
        projection += float(np.dot(sampled.astype(np.float64), direction))
    return {'change': squares ** 0.5, 'projection': projection}
