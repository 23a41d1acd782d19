"""All workers stop after the same step, whichever of them is told to."""

import signal
import typing

import numpy as np
import tensorflow.compat.v1 as tf

from towers.arguments import check_instance
from towers.api.built import BuiltTowers
from towers.cluster.cluster import Cluster
from towers.cluster.machines import builds_of
from towers.cluster.step_fetches import StepFetches
from towers.errors import ClusterError, InvalidArgumentError
from towers.run.stopping import StopOnSignalHook


class StopTogetherHook(StopOnSignalHook):
    """`StopOnSignalHook` for a cluster: the first signal to any worker makes all stop, and save.

    Without it a worker that stops leaves the others waiting for it in their next step. Use it on
    all workers, among the hooks that come last. Then only one of them has to know how many steps
    there are: in a ring, and with Horovod, all workers stop when one does, on parameter servers
    when the chief does, whatever the reason (asynchronous workers after the step in which they see
    it). The end of a worker's data is no such stop, see
    `until_all_end`.

    A worker of a ring, or of Horovod, that ends its loop of steps tells the others without running
    the model again, and so without anything that the program feeds. A step that another worker has
    begun meanwhile changes nothing: it raises `tf.errors.OutOfRangeError`, which
    `tf.train.MonitoredSession` takes for the end of the training, as at the end of the data.

        with …session(hooks=[stop]) as session:
            while not session.should_stop():
                session.run(built.train_op)
        sys.exit(stop.status)

    Attributes:
      received: as in `StopOnSignalHook`; None in a worker that stops because another one does.
      is_told: whether this worker stops because a worker, perhaps itself, has said so.
      stopped_by: None, or `(rank, number)` of the worker that got a signal, and the signal's, as
        soon as this worker knows of it.
    """

    def __init__(self, cluster: typing.Any, built: typing.Any, stream: typing.Any = None):
        """
        Args:
          cluster: `Cluster`.
          built: `BuiltTowers`. Of several builds in one graph, which all workers step in the same
            order, it is the one that each round of steps ends with: all stop after its step when a
            worker got a signal. A worker ends its loop between two rounds, all of which begin with
            the same steps.
          stream: as for `StopOnSignalHook`.

        Raises:
          InvalidArgumentError: an argument of another kind; `built` was made without a cluster.
        """
        check_instance('cluster', cluster, Cluster, 'a Cluster')
        check_instance('built', built, BuiltTowers, 'what build_towers returned')
        if built.machines is None:
            raise InvalidArgumentError('built was made without a cluster: pass cluster= to '
                                       'build_towers, too.')
        super(StopTogetherHook, self).__init__(stream)
        self.stopped_by = None
        self._cluster, self._machines = cluster, built.machines
        self._all_machines = lambda: [each.machines for each in builds_of(built)]
        self._trained = built.gradients[0][1].op.name
        self.is_told = self._has_said = False
        self._makes_step = self._is_in_step = False  # the latter also after a step that has failed
        self._session = None
        # The builds that are stepped by this call, by the last step, and by the first of a round.
        self._steps, self._latest, self._first = [], [self._machines], []
        self._fetches = StepFetches(lambda: builds_of(built))

    @property
    def stopping_signal(self):
        """The number of the signal that ended the run, to whichever worker it was sent; or None."""
        if self.received is not None:
            return self.received
        return None if self.stopped_by is None else self.stopped_by[1]

    @property
    def status(self):
        """The exit status by which this worker says so: 128 plus that number; 0 without a signal.
        """
        return 0 if self.stopping_signal is None else 128 + self.stopping_signal

    def reason(self):
        """Who was told to stop, in words: `'worker 1 was told to stop (SIGTERM)'`; or None."""
        number = self.stopping_signal
        if number is None:
            return None
        rank = self._cluster.rank if self.received is not None else self.stopped_by[0]
        return 'worker %d was told to stop (%s)' % (rank, signal.Signals(number).name)

    def after_create_session(self, session, coord):
        """Installs the handlers, once."""
        super(StopTogetherHook, self).after_create_session(session, coord)
        self._session = session

    def always_fetched(self):
        """The tensor to fetch with every step: whether a worker wants to stop, alike on all.

        On asynchronous parameter servers it is whether the chief has ended; None on the chief.
        """
        if self._machines.stops is None and self._machines.chief_end is not None and (
                not self._cluster.is_chief):
            return self._machines.chief_end.has_ended
        return self._machines.stops

    def before_run(self, run_context):
        """Has that tensor fetched with a step; other calls of `run` need no other worker."""
        stepped = self._fetches.steps(run_context.original_args.fetches)
        self._steps = [built.machines for built in stepped]
        self._makes_step = self._machines in self._steps
        if self._steps:
            self._check_round(stepped)
            self._begin_step()
        fetched = self.always_fetched() if self._makes_step else None
        return None if fetched is None else tf.train.SessionRunArgs(fetched)

    def _check_round(self, stepped):
        """Checks that rounds begin with the session's first step, and end with this hook's build.

        Args:
          stepped: list of the `BuiltTowers` of this call.

        Raises:
          ClusterError: rounds begin with another step, or do not end with this hook's build.
        """
        self._first = self._first or self._steps
        if (self._machines in self._latest and self._machines.codes is not None
                and not self._makes_step and self._steps != self._first):
            raise ClusterError(
                'a step of the build that trains %r comes after the build that trains %r, which '
                'StopTogetherHook has, and the first step of the session was another one: give '
                'the hook the build that each round of steps ends with, and begin the session and '
                'all rounds with the same step, on all workers.' % (
                    stepped[0].gradients[0][1].op.name, self._trained))
        self._latest = self._steps

    def after_run(self, run_context, run_values):
        """Asks the session to stop when all do."""
        if self._steps:
            self._is_in_step = False
        if self._makes_step and self._is_time(run_values.results):
            run_context.request_stop()

    def is_due(self):
        """Never: `step_done` can end the session as well."""
        self._begin_step()
        return False

    def step_done(self, fetched):
        """Asks the session to stop when all do."""
        if self._is_time(fetched):
            self._coordinator.request_stop()

    def end(self, session):
        """In a ring, and with Horovod, a worker that stops by itself tells the others.

        Others may stop by themselves after the same step; they then do so, too. One whose step has
        raised an error, such as the end of its own data, has perhaps sent a part of it. Where the
        graph has several builds, the others learn of it when they begin their next round.
        """
        if self._cluster.kind != 'ps' and self._machines.codes is not None:
            of_all = self._all_machines()
            told = session.run([machines.codes.told for machines in of_all])
            told = next((codes for codes in told if codes.any()), None)
            if told is not None:
                session.run([each.codes.skip for each in self._latest])
                self._stop_for(session, told)
            elif not self.is_told and not self._is_in_step:
                first, *together = self._first or of_all[:1]
                self._stop_for(session, first.told_others(session, together))
        elif self._cluster.kind == 'ps' and self._machines.chief_has_ended and not self.is_told:
            self._stop_for(session, None)
        elif self._machines.chief_end is not None and self._cluster.is_chief:
            session.run(self._machines.chief_end.end)
        super(StopTogetherHook, self).end(session)

    def noticed(self):
        """On parameter servers, lets the watch of a step know that nobody wants to wait long."""
        if self._cluster.kind == 'ps':
            self._machines.told_to_stop = True

    def _begin_step(self):
        self._is_in_step = True
        if self.received is not None and not self._has_said and self._machines.codes is not None:
            self._machines.codes.say(self._session, self.received)
            self._has_said = True

    def _is_time(self, stops):
        self._is_in_step = False
        if self._machines.stops is None:
            self.is_told = self.is_told or bool(stops)
            return self.is_told or self.received is not None
        if not self.is_told and np.any(stops):
            self._stop_for(self._session, stops)
        return self.is_told

    def _stop_for(self, session, stops):
        self.is_told = True
        if self._cluster.kind == 'horovod':
            self._machines.have_stopped = True
        self.stopped_by = self._machines.codes.found(session, stops)
