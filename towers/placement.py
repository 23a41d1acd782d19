"""Where the shared variables live."""

import contextlib

import tensorflow.compat.v1 as tf

from towers.devices import canonical_device, default_variable_device, short_name
from towers.errors import InvalidArgumentError

BALANCED = 'balanced'


class Placement:
    """Names the device of each variable as it is created.

    Attributes:
      main: the device for what belongs to no single variable: the loss over all towers, merged
        predictions, the regularization.
      bytes_on: dict from device to the bytes of variables put there (known sizes only).
    """

    def __init__(self, variable_device, devices):
        """
        Args:
          variable_device: None (the CPU; the one GPU when there is just one), a device name,
            `'balanced'` (each variable to the tower device that holds the fewest bytes so far),
            or a device function as `tf.device` takes one (`tf.train.replica_device_setter`).
          devices: the towers' devices.

        Raises:
          DeviceError, InvalidArgumentError: a name that cannot be parsed; another type.
        """
        self._devices = devices
        self._device_function = None
        self.balanced = variable_device == BALANCED
        if variable_device is None or self.balanced:
            self.main = default_variable_device(devices)
        elif callable(variable_device):
            self._device_function = variable_device
            self.main = default_variable_device(devices)
        elif isinstance(variable_device, str):
            self.main = canonical_device(variable_device)
        else:
            raise InvalidArgumentError(
                "variable_device=%r: expected None, a device name, 'balanced', or a device "
                'function.' % (variable_device,))
        self.bytes_on = dict.fromkeys(devices if self.balanced else (), 0)

    def describe(self):
        """`'/cpu:0'`, or how variables are spread."""
        if self.balanced:
            return 'balanced over ' + ', '.join(
                '%s (%.1f MB)' % (short_name(device), used / 1e6)
                for device, used in self.bytes_on.items())
        if self._device_function is not None:
            return 'placed by a device function'
        return short_name(self.main)

    def scope(self, shape, creation):
        """The device scope in which to create a variable.

        Args:
          shape: its shape where the caller knows it, else None.
          creation: the keyword arguments of its creation (`initial_value`, `dtype`).
        """
        if self._device_function is not None:
            return only_device(self._device_function)
        device = self._lightest(shape, creation) if self.balanced else self.main
        return only_device(device)

    def devices(self):
        """The devices that variables may be on, or None where a function of the caller's says."""
        if self._device_function is not None:
            return None
        return tuple(self.bytes_on) if self.balanced else (self.main,)

    def scope_of(self, variable):
        """The device scope of what belongs to this variable: its gradient's sum, its slots."""
        return only_device(variable.device or self.main)

    def _lightest(self, shape, creation):
        device = min(self.bytes_on, key=self.bytes_on.get)  # the first one among equals
        self.bytes_on[device] += _bytes(shape, creation)
        return device


@contextlib.contextmanager
def only_device(device):
    """A device scope that takes nothing over from the scopes around it."""
    with tf.device(None), tf.device(device):
        yield


def _bytes(shape, creation):
    initial = creation.get('initial_value')
    dtype = creation.get('dtype')
    if shape is None and callable(initial):
        with tf.Graph().as_default():  # a scratch graph: only the shape is wanted
            initial = tf.convert_to_tensor(initial())
            shape, dtype = initial.shape, initial.dtype
    elif shape is None:
        initial = tf.convert_to_tensor(initial)
        shape, dtype = initial.shape, initial.dtype
    count = tf.TensorShape(shape).num_elements()
    return (count or 0) * tf.as_dtype(dtype or tf.float32).base_dtype.size
