"""The steps of a session: which call of `session.run` is one, and that the session has begun.

Hooks of a `tf.train.MonitoredSession` are called for steps, and for looks at something else that
one worker takes alone.

In a plain `tf.Session` nobody would give the workers of a ring the initial values of worker 0, and
on parameter servers nobody would have put the variables on the servers: each worker would train by
itself, without a word. So a step reads a variable that has no value but from the hooks that begin
a session. It is in no collection of TensorFlow's, so that no initializer of a program writes it.
"""

import functools
import re

import tensorflow.compat.v1 as tf

from towers.errors import ClusterError, reason_of
from towers.graph.graph_walk import step_operations
from towers.placement.variable_device import only_device

COLLECTIONS = ['towers_begun']
"""For the variables that the hooks alone give a value to."""

_NAMES = ('own_round', 'session_begun')
_FOUND = re.compile(r'\b(?:%s)\b' % '|'.join(_NAMES))


class SessionBegun:
    """A variable that says that the session has begun, for steps that read no other one of
    `COLLECTIONS`.

    Attributes:
      begin: operation by which a hook records that the session has begun.
    """

    def __init__(self):
        with only_device('/cpu:0'):
            self._value = tf.Variable(0., trainable=False, collections=COLLECTIONS,
                                      name=_NAMES[-1])
            self.begin = self._value.initializer

    def check(self):
        """An operation that fails where it has not."""
        with only_device('/cpu:0'):
            return tf.identity(self._value.read_value()).op


def explained(error):
    """The `ClusterError` about a session that has not begun; None where it was something else."""
    if not (isinstance(error, tf.errors.FailedPreconditionError)
            and _FOUND.search(reason_of(error))):
        return None
    return ClusterError(
        'a step was run in a session that has not begun as those of a cluster do: with the initial '
        'values of worker 0, and with the variables on the servers where there are some. A plain '
        'tf.Session does not. Make it by member.session(hooks), or, to save as well, by '
        'towers.training_session(directory, …, member=member) on the chief.')


def not_by_member():
    """The `ClusterError` about a session on parameter servers that `Member` has no part in."""
    return ClusterError(
        'this session is not made by the member of the cluster, which puts the variables on the '
        'parameter servers when the graph is complete: without that, all operations of all workers '
        'would be on one server. Make it by member.session(hooks), or, to save as well, by '
        'towers.training_session(directory, …, member=member) on the chief, and not by '
        'tf.train.MonitoredTrainingSession.')


def begin_together(session, builds, connection):
    """Has the steps of a session begin on all workers or on none, and refuses parts of them.

    Args:
      session: the `tf.Session` of which the hooks are told: what they fetch is seen nowhere else.
      builds: list of the `BuiltTowers` whose steps count.
      connection: `Connection`.

    Calls that take the sums of all workers' gradients without the step are a `ClusterError`: the
    other workers would wait, or take these sums for those of their next step.
    """
    run, make_callable, known = session.run, session.make_callable, {}

    def steps_of(fetches):
        try:
            fetched = [getattr(leaf, 'op', leaf) for leaf in _leaves(fetches)]
            key = tuple(op.name if isinstance(op, tf.Operation) else op for op in fetched)
            if key not in known:
                known[key] = _steps_of(fetched, builds)
            return known[key]
        except (TypeError, ValueError, KeyError):  # an object of its own, or a name of nothing
            return ' '.join(map(str, range(len(builds))))

    def made(steps, step):
        if not steps:
            return step()
        connection.begin_step(steps)
        result = step()
        connection.step_ended()
        return result

    @functools.wraps(run)
    def checked(fetches, *given, **named):
        return made(steps_of(fetches), lambda: run(fetches, *given, **named))

    @functools.wraps(make_callable)
    def checked_callable(fetches, *given, **named):
        steps, step = steps_of(fetches), make_callable(fetches, *given, **named)
        return lambda *fed, **options: made(steps, lambda: step(*fed, **options))
    session.run, session.make_callable = checked, checked_callable


def _steps_of(fetched, builds):
    """The numbers of the builds whose train op some fetches run, in words: `'0'`, `'0 1'`; or ''.

    Raises:
      ClusterError: they take sums without their step.
    """
    graph, operations = builds[0].train_op.graph, []
    for each in fetched:
        element = graph.as_graph_element(each)
        operations.append(getattr(element, 'op', element))
    names = {op.name for op in step_operations(operations)}
    left_out = [built for built in builds if built.train_op.name not in names]
    if any(not names.isdisjoint(built.machines.sums) for built in left_out):
        raise ClusterError(_SUMS_ALONE)
    return ' '.join(str(place) for place, built in enumerate(builds) if built not in left_out)


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
