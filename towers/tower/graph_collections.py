"""Graph collections, as each tower's call of the model function would see them on one device.

`tf.losses`, `UPDATE_OPS` and summaries pile up in the graph's collections tower by tower: a
`tf.losses.get_total_loss()` in the second tower would return the first one's loss as well. Here
each call sees the entries from before the towers, the shared entries, and its own; at the end the
collections hold what one device would have left in them: the first tower's entries.

Shared entries are the variables, in the collections that they joined as they were made: a later
call gets the variables without making them. What the model function itself puts into a collection,
variables too, each call puts there itself.
"""

import collections

import tensorflow.compat.v1 as tf

from towers.errors import SharedVariableError
from towers.graph.variable_access import VARIABLE_OPS, count_reads

_OF_EVERY_TOWER = frozenset([
    tf.GraphKeys.TABLE_INITIALIZERS, tf.GraphKeys.QUEUE_RUNNERS, tf.GraphKeys.COND_CONTEXT,
    tf.GraphKeys.WHILE_CONTEXT, tf.GraphKeys.ASSET_FILEPATHS, tf.GraphKeys.SAVEABLE_OBJECTS,
    tf.GraphKeys.LOCAL_VARIABLES])
"""Collections of what has to be initialised or exported, whichever tower made it."""

_OF_MODELS_OWN = frozenset([
    tf.GraphKeys.GLOBAL_VARIABLES, tf.GraphKeys.LOCAL_VARIABLES, tf.GraphKeys.TRAINABLE_VARIABLES,
    tf.GraphKeys.MODEL_VARIABLES])
"""Collections in which every tower sees the model's own variables, even if it reads replicas."""

_OF_ALL_CALLS = frozenset([
    tf.GraphKeys.GLOBAL_VARIABLES, tf.GraphKeys.LOCAL_VARIABLES,
    tf.GraphKeys.MOVING_AVERAGE_VARIABLES])
"""Collections in which TensorFlow looks for variables or puts them only once: they stay there."""

_UPDATES_OF_BUILDS = ('towers_update_ops',)
"""A key that is no string, like the keys of TF's own stores, so that no meta graph holds it."""


class TowerCollections:
    """Keeps the towers' entries in the graph's collections apart."""

    def __init__(self, graph):
        self._graph = graph
        self._before = self._snapshot()
        self._final = None
        self._entered = None
        self._known_updates = set()
        self._put_there = []  # (key, variable) of what the model function's first call put there
        self._reads = collections.Counter()  # of the first tower, by the variable's name

    def enter_tower(self, index, shared=(), of_tower=None):
        """Hides the entries of earlier towers, except shared ones.

        Args:
          index: the tower's number.
          shared: further entries that all towers see (the L2 losses of the weights).
          of_tower: function from a variable to the replica or state that this tower reads in its
            place; or None.
        """
        if index == 0:
            return
        shared = set(map(id, shared))
        hidden = {(key, id(entry)) for key, entry in self._put_there}

        def seen(key):
            added = [entry for entry in _since(self._before.get(key, ()), self._final[key])
                     if id(entry) in shared or (
                         _is_variable(entry) and (key, id(entry)) not in hidden)]
            if of_tower is not None and key not in _OF_MODELS_OWN:
                added = [of_tower(entry) if _is_variable(entry) else entry for entry in added]
            return self._before.get(key, []) + added
        self._put({key: seen(key) for key in self._final})
        self._entered = self._snapshot()

    def leave_tower(self, index, operations, joined=(), owned=(), original=None):
        """Notes the entries that the tower added.

        Args:
          index: the tower's number.
          operations: the operations that it made.
          joined: of the first tower: set of `(key, id of a variable)`, the collections that
            variables joined as they were made.
          owned: names of the operations that were made with variables, as parts of them.
          original: function from a variable that this tower reads to the model's own, or None.

        Returns:
          Dict from collection key to the list of entries that are new since `enter_tower`.

        Raises:
          SharedVariableError: the tower reads a variable less often than the first tower, and has
            not put it into a collection that the first tower's call put it into.
        """
        now = self._snapshot()
        if index == 0:
            self._final = now
            added = {key: _since(self._before.get(key, ()), entries)
                     for key, entries in now.items()}
            self._put_there = [
                (key, entry) for key, entries in added.items() if key not in _OF_ALL_CALLS
                for entry in entries if _is_variable(entry) and (key, id(entry)) not in joined]
            if self._put_there:
                self._reads = count_reads(operations, owned)
        else:
            added = {}
            for key, entries in now.items():
                known = set(map(id, self._final.get(key, ())))
                known.update(map(id, self._entered.get(key, ())))
                added[key] = [entry for entry in entries if id(entry) not in known]
                if key in _OF_EVERY_TOWER:
                    self._final[key] = self._final.get(key, []) + added[key]
            self._check_put_there(index, operations, owned, original or (lambda entry: entry), now)
        return added

    def _check_put_there(self, index, operations, owned, original, now):
        reads = None
        for key, variable in self._put_there:
            if any(original(entry) is variable for entry in now.get(key, ())
                   if _is_variable(entry)):
                continue
            if reads is None:
                reads = count_reads(operations, owned)
            here, first = reads[variable.op.name], self._reads[variable.op.name]
            if here < first:
                raise SharedVariableError(
                    'the first call of the model function put variable %r into the collection %r, '
                    'that of tower %d did not, and uses the variable %d times instead of %d. Put '
                    'it there in every call, or name the collection where the variable is made '
                    '(collections=[…]).' % (variable.op.name, key, index, here, first))

    def keep_local_variables(self):
        """Call this after the first tower, when the other towers' local variables are made."""
        key = tf.GraphKeys.LOCAL_VARIABLES
        self._final[key] = self._graph.get_collection(key)

    def updates_before(self):
        """The `UPDATE_OPS` from before the towers, of a batch norm in preprocessing for example.

        `UPDATE_OPS` of an earlier build in this graph are not among them: they belong to the step
        of that build.
        """
        of_builds = set(self._graph.get_collection(_UPDATES_OF_BUILDS))
        return [entry for entry in self._before.get(tf.GraphKeys.UPDATE_OPS, ())
                if _name_of(entry) not in of_builds]

    def finish(self):
        """Leaves in the collections what one device would have left: the first tower's entries."""
        self._put(self._final)
        self._known_updates = set(map(id, self._before.get(tf.GraphKeys.UPDATE_OPS, ())))
        self.note_updates()

    def note_updates(self):
        """Notes the `UPDATE_OPS` that are new since the last call, as this build's; a list."""
        added = [entry for entry in self._graph.get_collection(tf.GraphKeys.UPDATE_OPS)
                 if id(entry) not in self._known_updates]
        for entry in added:
            self._known_updates.add(id(entry))
            self._graph.add_to_collection(_UPDATES_OF_BUILDS, _name_of(entry))
        return added

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


def _since(before, now):
    """The entries that a list has now and did not have before, each as often as it was added."""
    count = collections.Counter(map(id, before))
    added = []
    for entry in now:
        if count[id(entry)]:
            count[id(entry)] -= 1
        else:
            added.append(entry)
    return added


def _is_variable(entry):
    # Not by the entry's type: assigning a resource variable returns an object of that type, too.
    return getattr(getattr(entry, 'op', entry), 'type', None) in VARIABLE_OPS


def _name_of(entry):
    return getattr(getattr(entry, 'op', entry), 'name', None)
