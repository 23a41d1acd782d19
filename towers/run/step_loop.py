"""A loop of steps that calls the session's hooks only in the steps in which one of them is due.

A step of `tf.train.MonitoredSession.run` takes some hundreds of microseconds of Python, whatever
the graph: the fetches are described anew, and `before_run` and `after_run` of every hook are
called. Most hooks act in one step of hundreds. An `OccasionalHook` says so, in a fraction of a
microsecond; where none is due, `LoopSession.run_steps` runs the step by a prepared callable.
"""

import tensorflow.compat.v1 as tf

from towers import compat


class OccasionalHook(tf.train.SessionRunHook):
    """A hook that knows whether it has something to do in the coming step.

    In a session that is no `LoopSession` it is called at every step, as any hook is.
    """

    def is_due(self):
        """Whether `before_run` and `after_run` have to be called for the coming step.

        Called before every step, when all hooks have done their work of the step before.
        """
        return True

    def step_done(self, fetched):
        """Called instead of `before_run` and `after_run`, after a step in which no hook was due.

        Args:
          fetched: the values of `always_fetched`; None where that is None.
        """

    def always_fetched(self):
        """The fetches of `before_run` that it asks for in every step: a nest of tensors, or None.

        Steps in which no hook is due fetch them, too. With the same fetches in all steps TensorFlow
        optimises the graph once.
        """


class NeverDueHook(OccasionalHook):
    """A hook that does what it does elsewhere, or by `step_done` as well."""

    def is_due(self):
        """Never."""
        return False


class LoopSession(tf.train.MonitoredSession):
    """A `tf.train.MonitoredSession` with a loop of its own for training steps."""

    def __init__(self, session_creator=None, hooks=None, **options):
        """As `tf.train.MonitoredSession`."""
        self._loop_hooks = list(hooks or [])
        self._newest, self._alone = _NewestSession(), None
        super(LoopSession, self).__init__(
            session_creator, self._loop_hooks + [self._newest], **options)

    def run_steps(self, train_op, steps):
        """Runs a number of training steps; fewer if a hook, or the end of the data, ends training.

        Where all hooks of the session are `OccasionalHook`s, the steps in which none is due are run
        by a callable. With another hook among them each step is as `run(train_op)`.

        Args:
          train_op: the operation of a step.
          steps: how many, an int. What is counted are runs of `train_op`, also where the session
            was lost with a machine and made anew from an earlier step.

        Returns:
          How many steps were run, an int.
        """
        hooks, done = self._loop_hooks, 0
        can_pass = all(isinstance(hook, OccasionalHook) for hook in hooks)

        def loop(step_context):
            nonlocal done
            while done < steps and not self.should_stop():
                if not can_pass or any([hook.is_due() for hook in hooks]):
                    step_context.run_with_hooks(train_op)
                else:
                    for hook, fetched in zip(hooks, self._step_alone(train_op)()):
                        hook.step_done(fetched)
                done += 1

        self.run_step_fn(loop)
        return done

    def _step_alone(self, train_op):
        """The function that runs a step in which no hook is due: the same one from call to call.

        A new one would have the graph of the step registered anew, which takes a session of
        `tf.train.Server` some tens of milliseconds.
        """
        # Not step_context.session, which is the lost one after the loss of a machine.
        session = self._newest.session
        if self._alone is None or (
                self._alone[0] is not session or self._alone[1] is not train_op):
            self._alone = session, train_op, _prepared(session, train_op, self._loop_hooks)
        return self._alone[2]


class _NewestSession(tf.train.SessionRunHook):
    """Keeps the `tf.Session` that was made last, without hooks.

    Attributes:
      session: it; None before the first.
    """

    session = None

    def after_create_session(self, session, coord):
        """Takes the session."""
        self.session = session


def _prepared(session, train_op, hooks):
    """A function that runs one step and returns a list: each hook's value of `always_fetched`."""
    wanted = [hook.always_fetched() for hook in hooks]
    places = [place for place, fetches in enumerate(wanted) if fetches is not None]
    step = session.make_callable([train_op] + [wanted[place] for place in places])

    def run():
        values = [None] * len(hooks)
        for place, fetched in zip(places, compat.call_in_session(session, step)[1:]):
            values[place] = fetched
        return values
    return run
