"""Graph collections, as each tower's call of the model function would see them on one device.

`tf.losses`, `UPDATE_OPS` and summaries pile up in the graph's collections tower by tower: a
`tf.losses.get_total_loss()` in the second tower would return the first one's loss as well. Here
each call sees what was there before the towers, what is shared (variables), and its own; at the
end the collections hold what one device would have left in them: the first tower's.
"""

import tensorflow.compat.v1 as tf

_OF_EVERY_TOWER = frozenset([
    tf.GraphKeys.TABLE_INITIALIZERS, tf.GraphKeys.QUEUE_RUNNERS, tf.GraphKeys.COND_CONTEXT,
    tf.GraphKeys.WHILE_CONTEXT, tf.GraphKeys.ASSET_FILEPATHS, tf.GraphKeys.SAVEABLE_OBJECTS])
"""What has to be initialised or exported, whichever tower made it."""


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

    def finish(self):
        """Leaves in the collections what one device would have left: the first tower's."""
        self._put(self._final)

    def undo(self):
        """Puts every collection back to what it was before the first tower."""
        self._put(self._before)

    def _snapshot(self):
        # Keys that are no strings, or private ones, hold TF's own stores, not entries.
        return {key: list(self._graph.get_collection_ref(key))
                for key in self._graph.get_all_collection_keys()
                if isinstance(key, str) and not key.startswith('_')}

    def _put(self, wanted):
        for key in set(self._snapshot()) | set(wanted):
            self._graph.get_collection_ref(key)[:] = wanted.get(key, [])

    def _is_owned(self, entry):
        """Whether a tower's call made this entry, for itself: variables are made for all."""
        op = getattr(entry, 'op', entry)
        # Not by the type of the entry: what assigning a resource variable gives is a variable too.
        if getattr(op, 'type', None) in ('Variable', 'VariableV2', 'VarHandleOp'):
            return False
        return getattr(op, 'name', None) in self._owned
