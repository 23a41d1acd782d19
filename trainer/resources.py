"""TensorFlow as train.py runs it: in graph mode, with the memory and threads of the flags."""

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


def memory_of_tower():
    """`towers.Memory` as the flags say."""
    recompute = FLAGS.recompute if FLAGS.recompute == 'auto' else [
        name for name in FLAGS.recompute.split(',') if name]
    return towers.Memory(FLAGS.accumulate, recompute or None)


def memory_limit():
    """The option memory_limit in bytes, an int; None: the memory that the devices have."""
    return int(FLAGS.memory_limit * 1e6) or None


def session_config(built):
    """The `tf.ConfigProto` for a session of towers.

    Args:
      built: `BuiltTowers`.
    """
    config = towers.session_config(
        built.devices, allow_growth=FLAGS.allow_growth,
        memory_fraction=FLAGS.memory_fraction or None,
        intra_op_threads=None if FLAGS.intra_op_threads < 0 else FLAGS.intra_op_threads,
        inter_op_threads=FLAGS.inter_op_threads)
    return towers.use_precision(config, built.precision, built.devices)
