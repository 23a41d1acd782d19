"""Local steps: `Cluster('ring', every=K)` averages the workers' weights after every K steps.

Each worker updates its own weights by its own gradients, and nothing travels in a step. After K
steps of a session all workers take the mean of their variables,

    v  <-  (v_0 + … + v_{W-1}) / W

over the W workers, of weights, optimizer state and moving averages alike (local SGD: Stich, "Local
SGD Converges Fast and Communicates Little", 2019; K is 100 in speech recognition by RETURNN). The
result is no longer the gradient of one device on all examples.
"""

import tensorflow.compat.v1 as tf

from towers.cluster.collectives import Collectives
from towers.cluster.machines import builds_of, shared_variables
from towers.placement.variable_device import only_device
from towers.run.step_loop import NeverDueHook


class AveragingHook(NeverDueHook):
    """Averages the variables of all workers after every K steps, and at the end of a session."""

    def __init__(self, cluster, built, connection):
        """
        Args:
          cluster, built: as for `Member`.
          connection: `Connection`, which counts the steps: they begin on all workers together.
        """
        self._cluster, self._built, self._connection = cluster, built, connection
        self._operations, self._session, self._steps = [], None, 0

    def begin(self):
        """Makes the operations, when all variables are there."""
        ring, last, written = Collectives(self._cluster), [], []
        for variable in shared_variables(self._built):
            if not (variable.dtype.is_floating or variable.dtype.is_complex):
                continue  # counters, which all workers count alike
            with only_device('/cpu:0'), tf.name_scope('average'):
                with tf.control_dependencies(last):  # a copy of one variable at a time
                    mean = ring.reduce_gradient(variable.read_value(), True, last)
                written.append(tf.assign(variable, mean).op)
        self._operations = [tf.group(*written)]
        self._operations += [built.replicas.refresh() for built in builds_of(self._built)
                             if built.replicas is not None]

    def after_create_session(self, session, coord):
        """Steps are counted from the beginning of a session, which is one on all workers."""
        self._session, self._steps = session, 0

    def after_run(self, run_context, run_values):
        """Averages if it is time."""
        self.step_done(None)

    def step_done(self, fetched):
        """Averages if it is time."""
        if self._steps != self._connection.made:
            self._steps = self._connection.made
            if self._steps % self._cluster.every == 0:
                self._average(self._session)

    def end(self, session):
        """Averages the steps since the last time: the last checkpoint has the mean."""
        if self._steps % self._cluster.every:
            self._average(session)

    def _average(self, session):
        for operation in self._operations:
            session.run(operation)
