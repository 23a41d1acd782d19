"""What a call of `session.run` is: a step, something else that needs other workers, or neither.

Hooks of a `tf.train.MonitoredSession` are called for all of them: also for a look at a weight, or a
summary, that one worker takes alone.
"""

import tensorflow.compat.v1 as tf

from towers.graph.graph_walk import step_operations

_OF_OTHERS = ('Collective', 'Horovod', 'ResourceAccumulator', 'Accumulator', 'SparseAccumulator',
              'ResourceConditionalAccumulator', 'ConditionalAccumulator', 'QueueDequeue')
"""Beginnings of types of operations that may wait for another worker."""


class StepFetches:
    """Answers both questions about the fetches of a call, once for each that are different."""

    def __init__(self, builds, is_of_others=None):
        """
        Args:
          builds: function that returns the list of the `BuiltTowers` whose steps count.
          is_of_others: function that tells of an operation whether it may wait for another worker;
            None: by its type.
        """
        self._builds = builds
        self._is_of_others = is_of_others or (lambda op: op.type.startswith(_OF_OTHERS))
        self._known = {}

    def steps(self, fetches):
        """The `BuiltTowers` whose train op they run. What is not understood counts as all steps."""
        return self._of(fetches)[0]

    def need_others(self, fetches):
        """Whether they run something that may wait for another worker."""
        return self._of(fetches)[1]

    def _of(self, fetches):
        try:
            fetched = [getattr(leaf, 'op', leaf) for leaf in _leaves(fetches)]
            key = tuple(op.name if isinstance(op, tf.Operation) else op for op in fetched)
            if key not in self._known:
                self._known[key] = self._looked_at(fetched)
            return self._known[key]
        except (TypeError, ValueError, KeyError):  # an object of its own, or a name of nothing
            return list(self._builds()), True

    def _looked_at(self, fetched):
        builds = self._builds()
        graph = builds[0].train_op.graph
        operations = []
        for each in fetched:
            element = graph.as_graph_element(each)
            operations.append(getattr(element, 'op', element))
        run = step_operations(operations)
        names = {op.name for op in run}
        stepped = [built for built in builds if not names.isdisjoint(
            op.name for op in [built.train_op] + list(built.train_ops.values()))]
        return stepped, bool(stepped) or any(map(self._is_of_others, run))


def _leaves(fetches):
    """The tensors, operations and names in some fetches; the keys of dicts need have no order."""
    if isinstance(fetches, dict):
        fetches = list(fetches.values())
    if isinstance(fetches, (list, tuple)):
        return [leaf for each in fetches for leaf in _leaves(each)]
    return tf.nest.flatten(fetches, expand_composites=True)
