"""Steps by a prepared callable, and with the session's hooks only where one has something to do.

A step of `tf.train.MonitoredSession.run` is some hundreds of microseconds of Python, whatever the
graph: a new description of what is fetched, every hook asked and told. Most hooks act in one step
of hundreds. Those that can tell (`OccasionalHook`) are asked in a fraction of a microsecond, and
where none has anything to do `LoopSession.run_steps` calls the step that it prepared once.
"""

import tensorflow.compat.v1 as tf

from towers import compat


class OccasionalHook(tf.train.SessionRunHook):
    """A hook that knows whether it has something to do in the coming step.

    In any session but a `LoopSession` it is a hook like any other, called at every step.
    """

    def is_due(self):
        """Whether `before_run` and `after_run` have to be called for the coming step.

        Asked before every step, after everything that the step before it called for.
        """
        return True

    def step_done(self, fetched):
        """Called in their place, after a step in which no hook was due.

        Args:
          fetched: the values of `always_fetched`; None where that is None.
        """

    def always_fetched(self):
        """What `before_run` asks for in every step, due or not: a nest of tensors, or None.

        It is fetched with every step, so that the session optimises the graph for one set of
        fetches less.
        """


class LoopSession(tf.train.MonitoredSession):
    """A `tf.train.MonitoredSession` with a loop of its own for training steps."""

    def __init__(self, session_creator=None, hooks=None, **options):
        """As `tf.train.MonitoredSession`."""
        self._loop_hooks = list(hooks or [])
        self._newest = _NewestSession()
        super(LoopSession, self).__init__(
            session_creator, self._loop_hooks + [self._newest], **options)

    def run_steps(self, train_op, steps):
        """Runs a number of training steps; fewer if a hook, or the end of the data, ends training.

        Where all hooks of the session are `OccasionalHook`s, those steps in which none is due are
        run by a callable. With any other hook among them each step is as `run(train_op)`.

        Args:
          train_op: the operation of a step.
          steps: how many, an int. Runs are counted: a session that is made anew after the loss of a
            machine goes on counting, whatever step it was restored to.

        Returns:
          How many steps were run.
        """
        hooks, done = self._loop_hooks, 0
        can_pass = all(isinstance(hook, OccasionalHook) for hook in hooks)

        def loop(step_context):
            nonlocal done
            alone = None
            while done < steps and not self.should_stop():
                if not can_pass or any([hook.is_due() for hook in hooks]):
                    step_context.run_with_hooks(train_op)
                else:
                    # Not step_context's: after a lost machine that is still the lost session.
                    alone = alone or _prepared(self._newest.session, train_op, hooks)
                    for hook, fetched in zip(hooks, alone()):
                        hook.step_done(fetched)
                done += 1

        self.run_step_fn(loop)
        return done


class _NewestSession(tf.train.SessionRunHook):
    """Knows the session that runs now, without hooks."""

    session = None

    def after_create_session(self, session, coord):
        self.session = session


def _prepared(session, train_op, hooks):
    """Function that runs one step and returns what each hook always fetches, a list."""
    wanted = [hook.always_fetched() for hook in hooks]
    places = [place for place, fetches in enumerate(wanted) if fetches is not None]
    step = session.make_callable([train_op] + [wanted[place] for place in places])

    def run():
        values = [None] * len(hooks)
        for place, fetched in zip(places, compat.call_in_session(session, step)[1:]):
            values[place] = fetched
        return values
    return run
