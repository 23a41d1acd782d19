"""The graph's collections around a build: `UPDATE_OPS`, and what an error puts back."""

import tensorflow.compat.v1 as tf

_UPDATES_OF_BUILDS = ('towers_update_ops',)
"""A key that is no string, like the keys of TF's own stores, so that no meta graph holds it."""


class BuildCollections:
    """The collections of a graph, as they were before a build.

    Attributes:
      updates: the `UPDATE_OPS` from before the build, of a batch norm in preprocessing for example.
        Those of an earlier build in this graph are not among them: they belong to its step.
    """

    def __init__(self, graph):
        self._graph, self._before = graph, _snapshot(graph)
        of_builds = set(graph.get_collection(_UPDATES_OF_BUILDS))
        before = self._before.get(tf.GraphKeys.UPDATE_OPS, ())
        self.updates = [entry for entry in before if _name_of(entry) not in of_builds]

    def new_updates(self):
        """The `UPDATE_OPS` that are there now and were not before the build: a list."""
        known = set(map(id, self._before.get(tf.GraphKeys.UPDATE_OPS, ())))
        return [entry for entry in self._graph.get_collection(tf.GraphKeys.UPDATE_OPS)
                if id(entry) not in known]

    def keep_updates_from_later_builds(self):
        """Notes in the graph that the new `UPDATE_OPS` belong to this build."""
        for entry in self.new_updates():
            self._graph.add_to_collection(_UPDATES_OF_BUILDS, _name_of(entry))

    def put_back(self):
        """Gives every collection the entries that it had before the build."""
        for key in set(_snapshot(self._graph)) | {key for key, entries in self._before.items()
                                                  if entries}:
            self._graph.get_collection_ref(key)[:] = self._before.get(key, [])


def _snapshot(graph):
    # Keys that are no strings, or private ones, hold TF's own stores, not entries.
    return {key: list(graph.get_collection_ref(key)) for key in graph.get_all_collection_keys()
            if isinstance(key, str) and not key.startswith('_')}


def _name_of(entry):
    return getattr(getattr(entry, 'op', entry), 'name', None)
