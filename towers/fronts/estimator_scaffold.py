"""The scaffold of a replicated model function: the first tower's, for the tables of all towers."""

import tensorflow.compat.v1 as tf

from towers import compat

_KEYS = (tf.GraphKeys.TABLE_INITIALIZERS, tf.GraphKeys.LOCAL_VARIABLES)


class ScaffoldOfTowers:
    """Makes the `local_init_op` of the first tower's scaffold that of all towers.

    A `local_init_op` that the model function gives, such as `tf.group(tf.tables_initializer(), …)`,
    was made before the later towers: their tables and local variables are not in it.
    """

    def __init__(self, graph):
        self._graph = graph
        self._known = None  # ids of what was there when the first tower's call had ended

    def note_call(self):
        """Call this when the model function was called for a tower; the first one counts."""
        if self._known is None:
            self._known = {id(entry) for key in _KEYS for entry in self._graph.get_collection(key)}

    def initialize_all_towers(self, scaffold):
        """Call this when all towers are built.

        Args:
          scaffold: the `tf.train.Scaffold` of the first tower, or None. It stays the same object,
            since hooks of the model function may hold it.
        """
        if scaffold is None or scaffold.local_init_op is None:
            return
        tables, variables = [[entry for entry in self._graph.get_collection(key)
                              if id(entry) not in self._known] for key in _KEYS]
        if tables or variables:
            compat.set_local_init_op(scaffold, tf.group(
                scaffold.local_init_op, tf.variables_initializer(variables), *tables))
