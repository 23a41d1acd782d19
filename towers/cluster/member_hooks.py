"""Hooks of the sessions of a cluster's workers: `Member.hooks`."""

import zlib

import tensorflow.compat.v1 as tf

from towers.cluster.ring import Collectives, broadcast_variables
from towers.errors import ClusterError
from towers.placement.variable_device import only_device
from towers.run.step_loop import OccasionalHook


class BroadcastHook(OccasionalHook):
    """Gives this session the variables of worker 0, which restored or initialised them."""

    def __init__(self, cluster, built):
        self._cluster, self._built = cluster, built
        self._operations, self._names, self._total = [], [], None

    def begin(self):
        """Makes the operations, when all variables are there."""
        if self._cluster.num_workers == 1:
            return
        # What is trained is the same on all workers, whatever collection it is in.
        variables = {variable.op.name: variable for variable in tf.global_variables() + [
            variable for _, variable in self._built.gradients]}
        self._names = sorted(variables)
        variables = [variables[name] for name in self._names]
        self._total = self._added_up(float(self._digest()))
        self._operations = [
            broadcast_variables(self._cluster, variables) if self._cluster.kind == 'ring'
            else self._built.machines.broadcast(variables)]
        if self._built.replicas is not None:
            self._operations.append(self._built.replicas.refresh())

    def after_create_session(self, session, coord):
        """Broadcasts; the workers do so together.

        Raises:
          ClusterError: they have other variables, and would wait for each other for ever.
        """
        if self._total is not None and (
                session.run(self._total) != self._digest() * self._cluster.num_workers):
            models = {variable.op.name for variable in self._built.variables}
            own = [name for name in self._names if name not in models]
            raise ClusterError(
                'the workers have other variables, besides those of the model; this one has %s%s: '
                'worker 0 gives them to all. Make the same ones on every worker, or what one of '
                'them needs for itself in collections=[tf.GraphKeys.LOCAL_VARIABLES].' % (
                    ', '.join(own[:5]) or 'none', ', …' if len(own) > 5 else ''))
        for operation in self._operations:
            session.run(operation)

    def _digest(self):
        return zlib.crc32('\n'.join(self._names).encode())

    def _added_up(self, number):
        """A tensor: the sum of the workers' numbers, float64."""
        with only_device('/cpu:0'), tf.name_scope('same_variables'):
            number = tf.constant(number, tf.float64)
            if self._cluster.kind == 'ring':
                return Collectives(self._cluster.rank, self._cluster.num_workers).reduce(number)
            return self._built.machines.added_up(number, 'towers_variables')

    def is_due(self):
        """Never: there is nothing to do around a step."""
        return False


class StepWatchHook(OccasionalHook):
    """Tells the watch whether a step is under way, which needs all workers."""

    def __init__(self, watch):
        self._watch = watch

    def before_run(self, run_context):
        self._watch.step_begins()

    def after_run(self, run_context, run_values):
        self._watch.step_ends()

    def is_due(self):
        self._watch.step_begins()  # called before every step
        return False

    def step_done(self, fetched):
        self._watch.step_ends()

    def end(self, session):
        self._watch.step_ends()


class ToldAgainHook(OccasionalHook):
    """Tells the first server again what the chief trains, when a session is made again: the server
    may be another process, and a worker that is started later would wait for it."""

    def __init__(self, tell):
        self._tell, self._is_first = tell, True

    def after_create_session(self, session, coord):
        if not self._is_first:
            self._tell()
        self._is_first = False

    def is_due(self):
        """Never: there is nothing to do around a step."""
        return False
