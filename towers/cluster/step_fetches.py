"""What a call of `session.run` is: a step, or a look at something else that one worker takes alone.

Hooks of a `tf.train.MonitoredSession` are called for both.
"""

import functools

import tensorflow.compat.v1 as tf

from towers.errors import ClusterError
from towers.graph.graph_walk import step_operations


class StepFetches:
    """Answers questions about the fetches of a call, once for each that are different."""

    def __init__(self, builds):
        """
        Args:
          builds: function that returns the list of the `BuiltTowers` whose steps count.
        """
        self._builds = builds
        self._known = {}

    def steps(self, fetches, unknown_are_all=True):
        """The `BuiltTowers` whose train op they run.

        Args:
          fetches: of a call.
          unknown_are_all: whether what is not understood counts as all steps, or as none.
        """
        stepped, _, is_known = self._of(fetches)
        return stepped if is_known or unknown_are_all else []

    def take_sums_alone(self, fetches):
        """Whether they take the sums of all workers' gradients, and not the step of these sums."""
        return self._of(fetches)[1]

    def _of(self, fetches):
        try:
            fetched = [getattr(leaf, 'op', leaf) for leaf in _leaves(fetches)]
            key = tuple(op.name if isinstance(op, tf.Operation) else op for op in fetched)
            if key not in self._known:
                self._known[key] = self._looked_at(fetched)
            return self._known[key]
        except (TypeError, ValueError, KeyError):  # an object of its own, or a name of nothing
            return list(self._builds()), False, False

    def _looked_at(self, fetched):
        builds = self._builds()
        graph = builds[0].train_op.graph
        operations = []
        for each in fetched:
            element = graph.as_graph_element(each)
            operations.append(getattr(element, 'op', element))
        names = {op.name for op in step_operations(operations)}
        stepped = [built for built in builds if built.train_op.name in names]
        return stepped, any(built.train_op.name not in names
                            and not names.isdisjoint(built.machines.sums) for built in builds), True


def refuse_sums_alone(session, step_fetches):
    """Has a session refuse calls that take the sums of all workers' gradients without the step.

    The other workers would wait, or take these sums for those of their next step.

    Args:
      session: the `tf.Session` of which the hooks are told: what they fetch is seen nowhere else.
      step_fetches: `StepFetches`.
    """
    run = session.run

    @functools.wraps(run)
    def checked(fetches, *given, **named):
        if step_fetches.take_sums_alone(fetches):
            raise ClusterError(
                "session.run takes built.gradients, the sums of all workers' gradients, without "
                'the step, which alone brings the workers together: fetch them, or a summary of '
                'them, with built.train_op. Beside a hook that fetches them in every call, look at '
                'other things by session.run_step_fn(lambda step_context: '
                'step_context.session.run(…)).')
        return run(fetches, *given, **named)
    session.run = checked


def _leaves(fetches):
    """The tensors, operations and names in some fetches; the keys of dicts need have no order."""
    if isinstance(fetches, dict):
        fetches = list(fetches.values())
    if isinstance(fetches, (list, tuple)):
        return [leaf for each in fetches for leaf in _leaves(each)]
    return tf.nest.flatten(fetches, expand_composites=True)
