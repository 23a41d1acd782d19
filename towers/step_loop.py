"""Steps by a prepared callable, and with the session's hooks only where one has something to do.

A step of `tf.train.MonitoredSession.run` is some hundreds of microseconds of Python, whatever the
graph: a new description of what is fetched, every hook asked and told. Most hooks act in one step
of hundreds. Those that can tell (`OccasionalHook`) are asked in a fraction of a microsecond, and
where none has anything to do `LoopSession.run_steps` calls the step that it prepared once.
"""

import tensorflow.compat.v1 as tf


class OccasionalHook(tf.train.SessionRunHook):
    """A hook that knows whether it has something to do in the coming step.

    In any session but a `LoopSession` it is a hook like any other, called at every step.
    """

    def is_due(self):
        """Whether `before_run` and `after_run` have to be called for the coming step."""
        return True

    def step_done(self):
        """Called in their place, after a step in which no hook was due."""

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
        super(LoopSession, self).__init__(session_creator, self._loop_hooks, **options)

    def run_steps(self, train_op, steps):
        """Runs a number of training steps; fewer if a hook, or the end of the data, ends training.

        Where all hooks of the session are `OccasionalHook`s, those steps in which none is due are
        run by a callable. With any other hook among them each step is as `run(train_op)`.

        Args:
          train_op: the operation of a step.
          steps: how many, an int.

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
                    if alone is None:
                        alone = step_context.session.make_callable([train_op] + [
                            fetched for fetched in (hook.always_fetched() for hook in hooks)
                            if fetched is not None])
                    alone()
                    for hook in hooks:
                        hook.step_done()
                done += 1

        self.run_step_fn(loop)
        return done
