"""Variables that an optimizer makes in `compute_gradients`, such as the scale of a loss.

On one device it makes them once. Here `compute_gradients` may be called for each tower: the first
call makes them, under the names that they have on one device, and the later calls share them.
"""

import collections
import contextlib

import tensorflow.compat.v1 as tf

from towers.errors import SharedVariableError
from towers.placement.variable_device import only_device


class OptimizersVariables:
    """Makes such variables in the first tower, and hands them over in the others."""

    def __init__(self, placement, graph):
        self._placement = placement
        self._graph = graph
        self._made = collections.defaultdict(list)  # by the name that was asked for
        self._asked = collections.Counter()

    @contextlib.contextmanager
    def of_tower(self, index, root, outer):
        """The context in which the gradients of tower `index` are taken.

        Args:
          index: the tower's number.
          root: the name scope of the tower's operations, such as `'tower_1/'`.
          outer: the name scope around all towers, `''` or such as `'train/'`.

        Raises:
          SharedVariableError: inside it, when a later tower's call makes a variable that the first
            one's did not make.
        """
        self._asked.clear()

        def create(next_creator, **kwargs):
            name = kwargs.get('name') or 'Variable'
            if index:
                return self._first(index, name)
            scope = (self._graph.get_name_scope() or '') + '/'  # None on TensorFlow 1
            if scope.startswith(root):  # not so in get_variable, which goes by variable scopes
                scope = outer + scope[len(root):]
            with tf.name_scope(None if scope in ('', '/') else scope), only_device(
                    self._placement.main):
                variable = next_creator(**kwargs)
            self._made[name].append(variable)
            return variable
        with tf.variable_creator_scope(create):
            yield

    def _first(self, index, name):
        number = self._asked[name]
        self._asked[name] += 1
        if number >= len(self._made[name]):
            raise SharedVariableError(
                'the compute_gradients of an optimizer makes variable %r in tower %d, and did not '
                'in the first tower: make the same variables in every call, or make them with '
                'tf.get_variable under tf.AUTO_REUSE.' % (name, index))
        return self._made[name][number]
