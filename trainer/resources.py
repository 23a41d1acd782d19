"""What the flags say of memory and threads: of a tower, of a device, of a session."""

import towers
from trainer.flags import FLAGS


def memory_of_tower():
    """`towers.Memory` as the flags say."""
    recompute = FLAGS.recompute if FLAGS.recompute == 'auto' else [
        name for name in FLAGS.recompute.split(',') if name]
    return towers.Memory(FLAGS.accumulate, recompute or None)


def memory_limit():
    """--memory_limit in bytes, an int; None: the memory that the devices have."""
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
