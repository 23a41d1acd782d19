"""What a later tower's call sees of the variables, as far as the first tower's call had come then.

When the model function is called for tower 1, all of the variables are there; when it was called
for tower 0, each was there from the moment it was made. A model function that looks around half-way
(`tf.trainable_variables()` after the encoder, for the encoder's L2 loss or the generator's
`var_list`; `tf.train.init_from_checkpoint` before the optimizer's slots) would get more in tower 1,
and would have another loss there. So each look of the first call is noted by the place in the
program, and the same look of a later call is given no variable that was made after it.
"""

import collections
import contextlib
import sys

import tensorflow.compat.v1 as tf

from towers import compat
from towers.tower.scoped_collections import looks_by
from towers.graph.variable_access import VARIABLE_OPS

_MADE_IF_MISSING = frozenset([tf.GraphKeys.GLOBAL_STEP])
"""Where a look before it is made is followed by a look by name, which knows no towers."""


class SeenVariables:
    """Hides from the calls for later towers what the call for the first tower had not made yet.

    What looks from a place where the first call did not, or more often, gets everything.
    """

    def __init__(self, graph):
        self._graph = graph
        self._noted = {}    # look of the first call -> what it knew
        self._made = {}     # collection key, or None of the store -> all that the first call knew
        self._counts = None  # of this call's looks, by place

    @contextlib.contextmanager
    def call(self, index):
        """Around the call of the model function for tower number `index`.

        Only what is looked at by way of the graph's `get_collection` is cut down, which all of TF's
        functions go through; the collections themselves stay whole.
        """
        self._counts = collections.Counter()
        bottom, original = sys._getframe(2), self._graph.get_collection

        def get_collection(name, scope=None):
            found = original(name, scope)
            if isinstance(name, str) and name not in _MADE_IF_MISSING and not name.startswith('_'):
                return self._as_then(index, name, found, bottom)
            if found and compat.is_variable_store_of_checkpoint(name, sys._getframe(1)):
                return self._store_as_then(index, found, bottom)
            return found
        try:
            with looks_by(self._graph, get_collection):
                yield
        finally:
            if not index:
                self._made = {key: self._known(key) for key in {key for key, _, _ in self._noted}}

    def _as_then(self, index, key, found, bottom):
        hidden = self._hidden(index, key, bottom)
        return [entry for entry in found if id(entry) not in hidden]

    def _store_as_then(self, index, stores, bottom):
        hidden = self._hidden(index, None, bottom)
        if not hidden:
            return stores
        return [compat.VariablesOfStore({name: variable for name, variable in
                                         compat.variables_by_name(self._graph).items()
                                         if name not in hidden})]

    def _hidden(self, index, key, bottom):
        """What the look at a collection from here is not given."""
        place = _place(bottom)
        if place is None:
            return frozenset()
        self._counts[key, place] += 1
        look = key, place, self._counts[key, place]
        if not index:
            self._noted[look] = self._known(key)
            return frozenset()
        if look not in self._noted:
            return frozenset()
        return self._made[key] - self._noted[look]

    def _known(self, key):
        """What the call for the first tower has made so far: ids, or names of the store."""
        if key is None:
            return frozenset(compat.variables_by_name(self._graph))
        # Not `get_collection_ref`, which would make a collection that is not there.
        return frozenset(id(entry) for entry in type(self._graph).get_collection(self._graph, key)
                         if _is_variable(entry))


def _place(bottom):
    """The place in the program that a collection is looked at from: all calls above `bottom`.

    None for a layer of `tf.layers`, which looks whether a weight that it shares is new.
    """
    place, frame = [], sys._getframe(3)
    while frame is not None and frame is not bottom:
        if compat.is_making_a_weight(frame.f_code):
            return None
        place.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return tuple(place)


def _is_variable(entry):
    return isinstance(entry, compat.VARIABLE_TYPES) or getattr(
        getattr(entry, 'op', entry), 'type', None) in VARIABLE_OPS
