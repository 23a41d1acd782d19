"""The calls of the model function, one for each tower, and which operations of them are alike."""

import collections
import re

from towers.graph import graph_walk

Call = collections.namedtuple('Call', 'operations root sources')
"""A call of the model function.

Fields:
  operations: the operations that it made.
  root: its name scope, with '/' at the end, or ''.
  sources: the operations of its inputs.
"""

Place = collections.namedtuple('Place', 'call key number')
"""Of an operation: the number of its call, its type and name, its number among those alike."""


class ModelCalls:
    """What the model function made in each call, in the order of the towers.

    Operations of two calls are alike if their types and names are the same, but for the numbers by
    which names are unique.
    """

    def __init__(self):
        self._calls = []
        self._places, self._alike = None, None

    def note(self, operations, root, sources):
        """Call this for each call, in the order of the towers; see `Call`."""
        self._calls.append(Call(operations, root, sources))
        self._places = None

    def __len__(self):
        return len(self._calls)

    def __getitem__(self, index):
        return self._calls[index]

    def place(self, op):
        """`Place` of an operation that a call made; else None."""
        if self._places is None:
            self._places, self._alike = {}, collections.defaultdict(list)
            for index, call in enumerate(self._calls):
                for each in call.operations:
                    key = each.type, _without_numbers(each.name, call.root)
                    self._places[each.name] = Place(index, key, len(self._alike[index, key]))
                    self._alike[index, key].append(each)
        return self._places.get(op.name)

    def twin(self, op, index):
        """The operation of call `index` that is like one of any call.

        None if the other call made another number of such operations.
        """
        place = self.place(op)
        if place.call == index:
            return op
        others = self._alike[index, place.key]
        if len(others) != len(self._alike[place.call, place.key]):
            return None
        return others[place.number]

    def is_partial(self, op):
        """Whether an operation of a call is computed from the call's examples, or draws."""
        call = self._calls[self.place(op).call]
        return op.name in graph_walk.reachable_from(
            list(call.sources) + [each for each in call.operations if graph_walk.is_random(each)],
            call.operations)


def _without_numbers(name, root):
    """The name within a tower, without the numbers that make names unique."""
    name = name[len(root):] if name.startswith(root) else name
    return re.sub(r'_\d+(?=/|$)', '', name)
