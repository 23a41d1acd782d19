"""TensorFlow as train.py runs it: in graph mode, and without its warnings."""

import warnings

import tensorflow.compat.v1 as tf

import towers
from towers import compat
from trainer.flags import FLAGS


def enter_graph_mode():
    """Switches this process to graphs with resource variables, mends tf_slim, silences both.

    With --deterministic it also switches operations to deterministic kernels.
    """
    tf.logging.set_verbosity(tf.logging.ERROR)
    warnings.filterwarnings('ignore', module='tensorflow|tf_slim')  # about calls in tf_slim
    # Of a record that is no tf.Example, which the error names.
    warnings.filterwarnings('ignore', 'Unexpected end-group tag', RuntimeWarning)
    tf.disable_v2_behavior()
    if FLAGS.deterministic:
        compat.enable_determinism()
    tf.enable_resource_variables()
    towers.mend_slim()
