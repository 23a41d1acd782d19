"""Calls of `session.run` that take the sums of all workers' gradients without making the step.

The chief of synchronous parameter servers takes the sums once a round. A call that takes them and
makes no step, such as a look at a variable into which a hook's summary of `built.gradients` falls,
would leave the next step without gradients: it waits for ever, and so do all workers.
"""

import functools

from towers.cluster.step_fetches import StepFetches
from towers.errors import ClusterError


def refuse_sums_alone(session, built):
    """Has a session refuse such calls.

    Args:
      session: the `tf.Session` of the chief; its `run` is replaced.
      built: `BuiltTowers` of synchronous parameter servers.
    """
    run = session.run
    fetches_of = StepFetches(lambda: [built], lambda op: op.name in built.machines.taking)

    @functools.wraps(run)
    def checked(fetches, *given, **named):
        if not fetches_of.steps(fetches) and fetches_of.need_others(fetches):
            raise ClusterError(
                'a call of session.run takes the sums of the gradients of all workers, and does '
                'not run built.train_op: on synchronous parameter servers they are there in a step '
                'alone, and the next step would wait for ever. Fetch them, or a summary of them, '
                'with built.train_op. A hook that fetches them does so in each call: look at other '
                'things by session.run_step_fn(lambda step_context: '
                'step_context.session.run(…)), which no hook sees.')
        return run(fetches, *given, **named)
    session.run = checked
