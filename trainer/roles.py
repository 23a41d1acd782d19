"""Processes of a run that save nothing: its workers, parameter servers and evaluators."""

import tensorflow.compat.v1 as tf

import towers
from towers.run.step_loop import LoopSession
from trainer.cluster import joined
from trainer.data import data_ended_on_worker
from trainer.evaluator import evaluate_run
from trainer.exit_status import status_of_signal
from trainer.flags import FLAGS
from trainer.hooks import EndHook, StartInputHook, tell_end

_FOREVER = 10 ** 15  # steps of a worker, which ends when the chief does


def serve_or_evaluate(setup, cluster):
    """Does the part of a process that builds no towers.

    A parameter server works until a signal ends it, and never returns. An evaluator evaluates the
    chief's checkpoints.

    Args:
      setup: `Setup`.
      cluster: `Cluster`; None: of an evaluator beside a run on one machine.

    Returns:
      The exit status.
    """
    if FLAGS.plan_only:
        print('%s builds no towers: it has no plan' % (cluster.name if cluster else 'an evaluator'))
        return 0
    if cluster is not None and cluster.job == 'ps':
        towers.serve(cluster)
    return status_of_signal(evaluate_run(setup, cluster))


def work(cluster, job):
    """Trains as a worker that saves nothing, until the chief stops or a signal comes.

    Args:
      cluster: `Cluster`.
      job: `Job`.

    Returns:
      The exit status: of the signal, to whichever worker it was sent; or 0.

    Raises:
      OwnDataError: the training data ended before the chief did.
      ClusterError, WorkerLostError: as `towers.join`.
    """
    signals = towers.StopTogetherHook(cluster, job.built)
    end = EndHook(cluster, job, signals)
    own_hooks = [StartInputHook(job.iterator), end]
    if cluster.kind != 'ring' and job.built.machines.stops is None:
        own_hooks.append(tf.train.StopAtStepHook(last_step=job.counts.last_step))
    has_ended, ended = False, None
    try:
        with joined(cluster, job) as member:
            print('%s joined' % cluster.name, flush=True)
            with member.session(own_hooks + [signals], LoopSession) as session:
                try:
                    while not session.should_stop():
                        session.run_steps(job.train_op, _FOREVER)
                except tf.errors.OutOfRangeError:  # which ends the session without an error
                    has_ended = True
            if has_ended and not signals.is_told:  # the chief's end ends a step likewise
                ended = data_ended_on_worker()
            if ended is not None and cluster.kind != 'horovod':
                raise ended  # here, so that the others hear of it at once
    finally:
        signals.restore()
    print('%s ended' % cluster.name, flush=True)
    if ended is not None:
        raise ended
    tell_end(end)
    return status_of_signal(signals.stopping_signal)
