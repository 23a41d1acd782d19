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

    def steps(self, fetches):
        """The numbers of the builds whose train op they run, in words: `'0'`, `'0 1'`; or ''.

        What is not understood counts as a step of all.
        """
        return self._of(fetches)[0]

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
            return ' '.join(map(str, range(len(self._builds())))), False

    def _looked_at(self, fetched):
        builds = self._builds()
        graph = builds[0].train_op.graph
        operations = []
        for each in fetched:
            element = graph.as_graph_element(each)
            operations.append(getattr(element, 'op', element))
        names = {op.name for op in step_operations(operations)}
        stepped = ' '.join(str(place) for place, built in enumerate(builds)
                           if built.train_op.name in names)
        return stepped, any(built.train_op.name not in names
                            and not names.isdisjoint(built.machines.sums) for built in builds)


def begin_together(session, step_fetches, connection):
    """Has the steps of a session begin on all workers or on none, and refuses parts of them.

    Args:
      session: the `tf.Session` of which the hooks are told: what they fetch is seen nowhere else.
      step_fetches: `StepFetches`.
      connection: `Connection`; None where steps wait for nobody.

    Calls that take the sums of all workers' gradients without the step are a `ClusterError`: the
    other workers would wait, or take these sums for those of their next step.
    """
    run, make_callable = session.run, session.make_callable

    def made(builds, step):
        if connection is None or not builds:
            return step()
        connection.begin_step(builds)
        result = step()
        connection.step_ended()
        return result

    @functools.wraps(run)
    def checked(fetches, *given, **named):
        if step_fetches.take_sums_alone(fetches):
            raise ClusterError(_SUMS_ALONE)
        return made(step_fetches.steps(fetches), lambda: run(fetches, *given, **named))

    @functools.wraps(make_callable)
    def checked_callable(fetches, *given, **named):
        builds, step = step_fetches.steps(fetches), make_callable(fetches, *given, **named)
        return lambda *fed, **options: made(builds, lambda: step(*fed, **options))
    session.run, session.make_callable = checked, checked_callable


_SUMS_ALONE = (
    "session.run takes built.gradients, the sums of all workers' gradients, without the step, "
    'which alone brings the workers together: fetch them, or a summary of them, with '
    'built.train_op. Beside a hook that fetches them in every call, look at other things by '
    'session.run_step_fn(lambda step_context: step_context.session.run(…)).')


def _leaves(fetches):
    """The tensors, operations and names in some fetches; the keys of dicts need have no order."""
    if isinstance(fetches, dict):
        fetches = list(fetches.values())
    if isinstance(fetches, (list, tuple)):
        return [leaf for each in fetches for leaf in _leaves(each)]
    return tf.nest.flatten(fetches, expand_composites=True)
