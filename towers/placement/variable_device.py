"""Where the shared variables live."""

import contextlib
import functools

import tensorflow.compat.v1 as tf

from towers.placement.other_combiners import check_alone
from towers.errors import DeviceError, InvalidArgumentError
from towers.graph.nests import bytes_of
from towers.placement.devices import (canonical_device, check_variable_device,
                                      default_variable_device, short_name)
from towers.placement.tower_device import all_devices, current_tower_device, stages_of

BALANCED = 'balanced'
REPLICATED = 'replicated'
BY_STAGE = 'stage'


class Placement:
    """Names the device of each variable as it is created.

    Attributes:
      main: the device for operations that belong to no single variable: the loss over all towers,
        merged predictions; and for statistics where trainable variables are replicated.
      of_weights: the device of the trainable variables, where one device has them all.
      all_reduce: how replicated variables' gradients are combined; None where none are replicated.
      leaves_servers: whether a variable that the program puts on a server is refused.
      bytes_on: dict from device to the bytes of variables put there (known sizes only).
    """

    def __init__(self, device, devices, all_reduce=None, trains=True, checks=False, alone=False,
                 earlier=None):
        """
        Args:
          device: None (the CPU; the one GPU when there is just one), a device name,
            `'balanced'` (each variable to the tower device that holds the fewest bytes so far),
            `'stage'` (each variable on the first tower's device for the stage that makes it; None
            means the same where there is one tower of several devices),
            `'replicated'` (each trainable variable on every tower, see `replicas`; the model's own
            variable on the first tower's device, and no replicas with one tower or without an
            optimizer), or a device function as `tf.device` takes one
            (`tf.train.replica_device_setter`).
          devices: the towers' devices.
          all_reduce: for `'replicated'`: one of `all_reduce.METHODS`; None for `'copy'`.
          trains: whether there is an optimizer.
          checks: whether a device of this process has to exist if a device function returns it.
          alone: whether no other machines train with this one, so that no variable is to be on
            their servers.
          earlier: `Placement` of an earlier build, whose variables stay where it says; or None.
            New ones are where this placement says.

        Raises:
          DeviceError, InvalidArgumentError: a name that cannot be parsed; replicas for towers of
            several devices.
        """
        self._devices = devices
        self._device_function = None
        self.by_stage = device == BY_STAGE or (
            device is None and len(devices) == 1 and len(stages_of(devices[0])) > 1)
        if self.by_stage:
            device = None
        self.balanced = device == BALANCED
        self.replicated = device == REPLICATED
        if device is None or self.balanced or self.replicated:
            self.main = default_variable_device(devices)
        elif callable(device):
            self._device_function = functools.partial(
                _checked_device, device, devices if checks else None)
            self.main = default_variable_device(devices)
        else:
            self.main = canonical_device(device)
        self.of_weights = str(devices[0]) if self.replicated else self.main
        has_replicas = self.replicated and trains and len(devices) > 1
        self.all_reduce = (all_reduce or 'copy') if has_replicas else None
        if self.replicated and len(stages_of(devices[0])) > 1:
            raise InvalidArgumentError(
                "VariablePlacement('replicated') goes with towers of one device each, and these "
                "have %s: use 'stage', or None for the CPU." % short_name(devices[0]))
        self._earlier = earlier
        self.bytes_on = dict.fromkeys(
            all_devices(devices) if self.balanced else
            stages_of(devices[0]) if self.by_stage else (), 0)
        self.leaves_servers = alone and '/job:ps' not in ' '.join(self.devices() or ['/job:ps'])

    @property
    def is_earlier_builds(self):
        """Whether an earlier build's variables are shared, where it has put them."""
        return self._earlier is not None

    def describe(self):
        """`'/cpu:0'`, or how variables are spread."""
        if self._earlier is not None:
            return self._earlier.describe()
        if self.balanced or self.by_stage:
            sizes = ['%s (%.1f MB)' % (short_name(device), used / 1e6)
                     for device, used in self.bytes_on.items()]
            if len(sizes) > 3:
                sizes = ['%d devices (%.1f to %.1f MB)' % (
                    len(sizes), min(self.bytes_on.values()) / 1e6,
                    max(self.bytes_on.values()) / 1e6)]
            return ('balanced over ' if self.balanced else 'their stage, ') + ', '.join(sizes)
        if self._device_function is not None:
            return 'placed by a device function'
        if self.all_reduce is not None:
            return 'every tower (%d replicas), all-reduce by %s' % (
                len(self._devices), self.all_reduce)
        return short_name(self.of_weights)

    def scope(self, trainable=True):
        """The device scope in which to create a variable; then `note` it."""
        if self.leaves_servers:
            check_alone()
        if self.replicated and trainable:
            return only_device(self.of_weights)
        if self._device_function is not None:
            return only_device(self._device_function)
        if self.by_stage:
            return only_device(str(current_tower_device(tf.get_default_graph()) or self.main))
        if self.balanced:  # the first one among equals
            return only_device(min(self.bytes_on, key=self.bytes_on.get))
        return only_device(self.main)

    def note(self, variable):
        """Counts the bytes of a new variable where it is: with another one, if it is colocated."""
        if variable.device in self.bytes_on:
            self.bytes_on[variable.device] += bytes_of(variable)

    def note_moved(self, variable, before):
        """Counts the bytes of a variable on its device, and no longer on its device before."""
        if variable.device != before:
            if before in self.bytes_on:
                self.bytes_on[before] -= bytes_of(variable)
            self.note(variable)

    def devices(self):
        """The devices that variables may be on, or None where a device function decides."""
        if self._earlier is not None:
            theirs = self._earlier.devices()
            return None if theirs is None else tuple(dict.fromkeys((self.main,) + theirs))
        if self._device_function is not None:
            return None
        if self.replicated:
            return tuple(sorted({self.main, self.of_weights}))
        if self.by_stage:
            return tuple(dict.fromkeys((self.main,) + tuple(self.bytes_on)))
        return tuple(self.bytes_on) if self.balanced else (self.main,)

    def scope_of(self, variable):
        """The device scope for the sum of a variable's gradients and for its slots."""
        return only_device(variable.device or self.main)


def _checked_device(function, towers_devices, operation):
    """The device that the caller's device function returns, or an error that names the function.

    If `towers_devices` is not None, a device of this process has to be one of them.
    """
    device = function(operation)
    try:
        device = device if isinstance(device, str) else device.to_string()
        spec = tf.DeviceSpec.from_string(device)
        if towers_devices and spec.device_index is not None and spec.job is None:
            check_variable_device(canonical_device(device), towers_devices)
        return device
    except DeviceError:
        raise
    except (AttributeError, ValueError):
        raise DeviceError(
            "VariablePlacement(%.80r) gave %.80r for %s: expected the name of a device, '/cpu:0' "
            'say.' % (function, device, operation.name)) from None


@contextlib.contextmanager
def only_device(device):
    """A device scope that takes nothing over from the scopes around it."""
    with tf.device(None), tf.device(device):
        yield
