"""Which operations are on a tower's device because they are the tower's, and which for a reason of
their own.

A model that says `tf.device('/cpu:0')` around its embedding wants it there in every tower, and in
the finished graph such an operation of a first tower on `/cpu:0` looks like any other. TensorFlow
keeps with each operation the device scopes that it was made under; the tower's own one is told from
all others by being a `TowerDevice`.
"""

import tensorflow.compat.v1 as tf

from towers import compat


class TowerDevice(str):
    """The name of a tower's device, for `tf.device`; a string like any other but for its type."""

    def __str__(self):
        return self  # what TensorFlow keeps of the argument of `tf.device` is its str()


def follows_tower(op):
    """Whether an operation would be on another device in another tower.

    Not for operations that are colocated with others, which are where those are.

    Returns:
      True; False; or None where it cannot be told: a device function has had a say in it, or it
      was made under `tf.device(other_op.device)`.
    """
    for scope in compat.device_scopes(op):
        if isinstance(scope, TowerDevice):
            return True
        if scope == 'None':
            return False
        if '<' in scope:  # TensorFlow's way to write a function
            return None
        if scope == op.device and '/device:' in scope:  # as `op.device` spells it
            return None
        spec = tf.DeviceSpec.from_string(scope)
        if spec.device_type is not None or spec.device_index is not None:
            return False
    return False


def device_like(op):
    """The device of `op`, for `tf.device` around what is to be wherever `op` is, in any tower."""
    return TowerDevice(op.device) if follows_tower(op) else op.device


def moved(device, source, target):
    """A device with what it has of tower device `source` exchanged for that of `target`.

    >>> moved('/job:a/device:CPU:0', '/device:CPU:0', '/device:GPU:1')
    '/job:a/device:GPU:1'
    """
    if device == source:
        return target
    have, old, new = map(tf.DeviceSpec.from_string, (device, source, target))
    return tf.DeviceSpec(**{
        field: getattr(new, field) if (
            getattr(old, field) == getattr(have, field) and getattr(new, field) is not None)
        else getattr(have, field)
        for field in ('job', 'replica', 'task', 'device_type', 'device_index')}).to_string()


def overlaps(device, tower_device):
    """Whether a device may be that of a tower: same type and number."""
    one, other = tf.DeviceSpec.from_string(device), tf.DeviceSpec.from_string(tower_device)
    return (one.device_type, one.device_index) == (other.device_type, other.device_index)
