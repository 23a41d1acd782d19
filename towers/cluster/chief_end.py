"""Whether the chief of asynchronous parameter servers has ended: a variable on the first server.

Its workers wait for nobody, so that no step tells them. Without a chief nothing is saved, and a
worker that does not count the steps itself would train for ever.
"""

import tensorflow.compat.v1 as tf

from towers import compat
from towers.cluster.worker_notes import FIRST_SERVER
from towers.placement.variable_device import only_device


class ChiefEnd:
    """The variable of one build.

    Attributes:
      begin: operation by which the chief records that its session has begun.
      end: operation by which the chief records that it has ended.
      has_ended: bool scalar; False before the chief's first session, too, or where the server has
        been started again, and the chief has not yet another session.
    """

    def __init__(self):
        with only_device(FIRST_SERVER):
            ended = tf.Variable(False, trainable=False, use_resource=True,
                                collections=['towers_rounds'], name='chief_has_ended')
            self.begin, self.end = ended.initializer, tf.assign(ended, True).op
            with compat.control_flow_v1():
                self.has_ended = tf.cond(tf.is_variable_initialized(ended), ended.read_value,
                                         lambda: tf.constant(False))
