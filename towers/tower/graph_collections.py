"""Graph collections, as each tower's call of the model function would see them on one device.

`tf.losses`, `UPDATE_OPS` and summaries pile up in the graph's collections tower by tower: a
`tf.losses.get_total_loss()` in the second tower would return the first one's loss as well. Here
each call sees what was there before the towers, what is shared (variables), and its own; at the
end the collections hold what one device would have left in them: the first tower's.
"""

import tensorflow.compat.v1 as tf

_OF_EVERY_TOWER = frozenset([
    tf.GraphKeys.TABLE_INITIALIZERS, tf.GraphKeys.QUEUE_RUNNERS, tf.GraphKeys.COND_CONTEXT,
    tf.GraphKeys.WHILE_CONTEXT, tf.GraphKeys.ASSET_FILEPATHS, tf.GraphKeys.SAVEABLE_OBJECTS,
    tf.GraphKeys.LOCAL_VARIABLES])
"""What has to be initialised or exported, whichever tower made it."""

_UPDATES_OF_BUILDS = ('towers_update_ops',)
"""Key, no string as those of TF's own stores, so that no meta graph holds it."""


class TowerCollections:
    """Keeps the towers' entries in the graph's collections apart."""

    def __init__(self, graph):
        self._graph = graph
        self._before = self._snapshot()
        self._final = None
        self._owned = set()

    def enter_tower(self, index, shared=()):
        """Hides what earlier towers left, except `shared` entries (the weights' L2 losses)."""
        if index == 0:
            return
        shared = set(map(id, shared))
        self._put({key: [entry for entry in entries
                         if id(entry) in shared or not self._is_owned(entry)]
                   for key, entries in self._final.items()})

    def leave_tower(self, index, operations):
        """Notes what the tower added; `operations` are those that it made.

        Returns:
          Dict from collection key to the list of entries that are new since `enter_tower`.
        """
        now = self._snapshot()
        if index == 0:
            self._final = now
            added = {key: entries[len(self._before.get(key, ())):]
                     for key, entries in now.items()}
        else:
            added = {}
            for key, entries in now.items():
                known = set(map(id, self._final.get(key, ())))
                added[key] = [entry for entry in entries if id(entry) not in known]
                if key in _OF_EVERY_TOWER:
                    self._final[key] = self._final.get(key, []) + added[key]
        self._owned.update(op.name for op in operations)
        return added

    def keep_local_variables(self):
        """To be called after the first tower, when local variables were made for the others."""
        key = tf.GraphKeys.LOCAL_VARIABLES
        self._final[key] = self._graph.get_collection(key)

    def updates_before(self):
        """The `UPDATE_OPS` that were there before the towers: of a preprocessing batch norm, say.

        Those of towers that were built earlier in this graph are not among them: they belong to
        that build's step.
        """
        of_builds = set(self._graph.get_collection(_UPDATES_OF_BUILDS))
        return [entry for entry in self._before.get(tf.GraphKeys.UPDATE_OPS, ())
                if _name_of(entry) not in of_builds]

    def finish(self):
        """Leaves in the collections what one device would have left: the first tower's."""
        self._put(self._final)
        known = set(map(id, self._before.get(tf.GraphKeys.UPDATE_OPS, ())))
        for entry in self._final.get(tf.GraphKeys.UPDATE_OPS, ()):
            if id(entry) not in known:
                self._graph.add_to_collection(_UPDATES_OF_BUILDS, _name_of(entry))

    def undo(self):
        """Puts every collection back to what it was before the first tower."""
        self._put(self._before)

    def _snapshot(self):
        # Keys that are no strings, or private ones, hold TF's own stores, not entries.
        return {key: list(self._graph.get_collection_ref(key))
                for key in self._graph.get_all_collection_keys()
                if isinstance(key, str) and not key.startswith('_')}

    def _put(self, wanted):
        for key in set(self._snapshot()) | {key for key, entries in wanted.items() if entries}:
            self._graph.get_collection_ref(key)[:] = wanted.get(key, [])

    def _is_owned(self, entry):
        """Whether a tower's call made this entry, for itself: variables are made for all."""
        op = getattr(entry, 'op', entry)
        # Not by the type of the entry: what assigning a resource variable gives is a variable too.
        if getattr(op, 'type', None) in ('Variable', 'VariableV2', 'VarHandleOp'):
            return False
        return getattr(op, 'name', None) in self._owned


def _name_of(entry):
    return getattr(getattr(entry, 'op', entry), 'name', None)
