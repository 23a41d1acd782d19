"""Where the shared variables live."""

import contextlib

import tensorflow.compat.v1 as tf

from towers.devices import canonical_device, default_variable_device, short_name
from towers.errors import InvalidArgumentError

BALANCED = 'balanced'
REPLICATED = 'replicated'


class Placement:
    """Names the device of each variable as it is created.

    Attributes:
      main: the device for what belongs to no single variable: the loss over all towers, merged
        predictions, statistics where trainable variables are replicated.
      of_weights: the device for what depends on the weights alone: the regularization.
      all_reduce: how replicated variables' gradients are combined; None where none are replicated.
      bytes_on: dict from device to the bytes of variables put there (known sizes only).
    """

    def __init__(self, variable_device, devices, all_reduce=None, trains=True):
        """
        Args:
          variable_device: None (the CPU; the one GPU when there is just one), a device name,
            `'balanced'` (each variable to the tower device that holds the fewest bytes so far),
            `'replicated'` (each trainable variable on every tower, see `replicas`; the model's
            own, and all there is of it where one tower or nobody trains, on the first tower's
            device), or a device function as `tf.device` takes one
            (`tf.train.replica_device_setter`).
          devices: the towers' devices.
          all_reduce: for `'replicated'`: one of `all_reduce.METHODS`, checked there; None for
            `'copy'`.
          trains: whether there is an optimizer.

        Raises:
          DeviceError, InvalidArgumentError: a name that cannot be parsed; another type; an
            all-reduce without copies to reduce for.
        """
        self._devices = devices
        self._device_function = None
        self.balanced = variable_device == BALANCED
        self.replicated = variable_device == REPLICATED
        if all_reduce is not None and not self.replicated:
            raise InvalidArgumentError(
                "all_reduce=%r goes with variable_device='replicated', and that is %r: with one "
                'set of variables there is no all-reduce.' % (all_reduce, variable_device))
        if variable_device is None or self.balanced or self.replicated:
            self.main = default_variable_device(devices)
        elif callable(variable_device):
            self._device_function = variable_device
            self.main = default_variable_device(devices)
        elif isinstance(variable_device, str):
            self.main = canonical_device(variable_device)
        else:
            raise InvalidArgumentError(
                "variable_device=%r: expected None, a device name, 'balanced', 'replicated', or a "
                'device function.' % (variable_device,))
        self.of_weights = devices[0] if self.replicated else self.main
        copies = self.replicated and trains and len(devices) > 1
        self.all_reduce = (all_reduce or 'copy') if copies else None
        self.bytes_on = dict.fromkeys(devices if self.balanced else (), 0)

    def describe(self):
        """`'/cpu:0'`, or how variables are spread."""
        if self.balanced:
            sizes = ['%s (%.1f MB)' % (short_name(device), used / 1e6)
                     for device, used in self.bytes_on.items()]
            if len(sizes) > 3:
                sizes = ['%d devices (%.1f to %.1f MB)' % (
                    len(sizes), min(self.bytes_on.values()) / 1e6,
                    max(self.bytes_on.values()) / 1e6)]
            return 'balanced over ' + ', '.join(sizes)
        if self._device_function is not None:
            return 'placed by a device function'
        if self.all_reduce is not None:
            return 'every tower (%d copies), all-reduce by %s' % (
                len(self._devices), self.all_reduce)
        return short_name(self.of_weights)

    def scope(self, trainable=True):
        """The device scope in which to create a variable; then `note` it."""
        if self.replicated and trainable:
            return only_device(self.of_weights)
        if self._device_function is not None:
            return only_device(self._device_function)
        if self.balanced:  # the first one among equals
            return only_device(min(self.bytes_on, key=self.bytes_on.get))
        return only_device(self.main)

    def note(self, variable):
        """Counts the bytes of a new variable where it really is (beside another, perhaps)."""
        if variable.device in self.bytes_on:
            count = variable.get_shape().num_elements() or 0
            self.bytes_on[variable.device] += count * variable.dtype.base_dtype.size

    def devices(self):
        """The devices that variables may be on, or None where a function of the caller's says."""
        if self._device_function is not None:
            return None
        if self.replicated:
            return tuple(sorted({self.main, self.of_weights}))
        return tuple(self.bytes_on) if self.balanced else (self.main,)

    def scope_of(self, variable):
        """The device scope of what belongs to this variable: its gradient's sum, its slots."""
        return only_device(variable.device or self.main)


@contextlib.contextmanager
def only_device(device):
    """A device scope that takes nothing over from the scopes around it."""
    with tf.device(None), tf.device(device):
        yield
