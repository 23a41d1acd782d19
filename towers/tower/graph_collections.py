"""The `UPDATE_OPS` of a graph around a build."""

import tensorflow.compat.v1 as tf

_UPDATES_OF_BUILDS = ('towers_update_ops',)
"""A key that is no string, like the keys of TF's own stores, so that no meta graph holds it."""


class BuildCollections:
    """The `UPDATE_OPS` of a graph before a build, and those that are new.

    Attributes:
      updates: the `UPDATE_OPS` from before the build, of a batch norm in preprocessing for example.
        Those of an earlier build in this graph are not among them: they belong to its step.
    """

    def __init__(self, graph):
        self._graph = graph
        of_builds = set(graph.get_collection(_UPDATES_OF_BUILDS))
        before = graph.get_collection(tf.GraphKeys.UPDATE_OPS)
        self.updates = [entry for entry in before if _name_of(entry) not in of_builds]
        self._known_updates = set(map(id, before))

    def new_updates(self):
        """The `UPDATE_OPS` that are new since the last call, which are this build's from now on."""
        added = [entry for entry in self._graph.get_collection(tf.GraphKeys.UPDATE_OPS)
                 if id(entry) not in self._known_updates]
        for entry in added:
            self._known_updates.add(id(entry))
            self._graph.add_to_collection(_UPDATES_OF_BUILDS, _name_of(entry))
        return added


def _name_of(entry):
    return getattr(getattr(entry, 'op', entry), 'name', None)
