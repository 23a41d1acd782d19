"""Where the shared variables live."""

import contextlib
import typing

import tensorflow.compat.v1 as tf

from towers.errors import InvalidArgumentError
from towers.graph.graph_walk import bytes_of
from towers.optimizers import check_alone
from towers.placement.devices import canonical_device, default_variable_device, short_name
from towers.placement.tower_device import all_devices, current_tower_device, stages_of

BALANCED = 'balanced'
REPLICATED = 'replicated'
BY_STAGE = 'stage'


class Placement:
    """Names the device of each variable as it is created.

    Attributes:
      main: the device for operations that belong to no single variable, such as the loss over all
        towers; and for statistics where trainable variables are replicated.
      of_weights: the device of the trainable variables, where one device has them all.
      has_replicas: whether each tower has a replica of every trainable variable.
      by_stage: whether each variable is on the device of its stage.
      leaves_servers: whether a variable that the program puts on a server is refused.
      is_earlier_builds: whether an earlier build's variables are shared, where it has put them.
    """

    def __init__(self, device: typing.Optional[str], devices: typing.Sequence[str],
                 trains: bool = True, alone: bool = False,
                 earlier: typing.Optional['Placement'] = None):
        """
        Args:
          device: the device of `VariablePlacement`, a name or one of its words; or None.
          devices: the device of each tower.
          trains: whether there is an optimizer; without one, or with one tower, are no replicas.
          alone: whether no other machines train with this one, so that no variable is to be on
            their servers.
          earlier: `Placement` of an earlier build, whose variables stay where it says; or None.

        Raises `DeviceError` for a wrong name, `InvalidArgumentError` for replicas with stages.
        """
        self._devices = devices
        self._earlier = earlier
        self._replicated = device == REPLICATED
        self.is_earlier_builds = earlier is not None
        has_stages = len(stages_of(devices[0])) > 1
        if self._replicated and has_stages:
            raise InvalidArgumentError(
                "VariablePlacement('replicated') goes with towers of one device each, and these "
                "have %s: use 'stage', or None for the CPU." % short_name(devices[0]))
        is_one_staged_tower = len(devices) == 1 and has_stages
        self.by_stage = device == BY_STAGE or (device is None and is_one_staged_tower)
        self._bytes_of_devices: typing.Optional[typing.Dict[str, int]] = None  # if balanced
        if device == BALANCED:
            self._bytes_of_devices = dict.fromkeys(all_devices(devices), 0)
        self.main = _main_device(device, devices)
        self.of_weights = str(devices[0]) if self._replicated else self.main
        self.has_replicas = self._replicated and trains and len(devices) > 1
        self.leaves_servers = alone and '/job:ps' not in ' '.join(self.devices())

    def describe(self) -> str:
        """`'/cpu:0'`, or how variables are spread."""
        if self._earlier is not None:
            return self._earlier.describe()
        if self._bytes_of_devices is not None:
            return 'balanced by size, ' + ', '.join(map(short_name, self._bytes_of_devices))
        if self.by_stage:
            return 'on their stage, ' + ', '.join(map(short_name, stages_of(self._devices[0])))
        if self.has_replicas:
            return 'every tower (%d replicas)' % len(self._devices)
        return short_name(self.of_weights)

    def scope(self, trainable: bool = True) -> typing.ContextManager:
        """The device scope in which to create a variable; then `note` it."""
        if self.leaves_servers:
            check_alone()
        if self._replicated and trainable:
            return only_device(self.of_weights)
        if self.by_stage:
            stage_device = current_tower_device(tf.get_default_graph())
            return only_device(str(stage_device or self.main))
        if self._bytes_of_devices is not None:  # the first one among equals
            emptiest = min(self._bytes_of_devices, key=self._bytes_of_devices.__getitem__)
            return only_device(emptiest)
        return only_device(self.main)

    def note(self, variable: tf.Variable) -> None:
        """Counts the bytes of a new variable where it is: with another one, if it is colocated."""
        if self._bytes_of_devices is not None and variable.device in self._bytes_of_devices:
            self._bytes_of_devices[variable.device] += bytes_of(variable)

    def devices(self) -> typing.Tuple[str, ...]:
        """The devices that variables may be on, each once."""
        if self._earlier is not None:
            return tuple(dict.fromkeys((self.main,) + self._earlier.devices()))
        if self._replicated:
            return tuple(sorted({self.main, self.of_weights}))
        if self.by_stage:
            return tuple(dict.fromkeys((self.main,) + stages_of(self._devices[0])))
        if self._bytes_of_devices is not None:
            return tuple(self._bytes_of_devices)
        return (self.main,)

    def scope_of(self, variable: tf.Variable) -> typing.ContextManager:
        """The device scope for the sum of a variable's gradients and for its slots."""
        return only_device(variable.device or self.main)


def _main_device(device: typing.Optional[str], devices: typing.Sequence[str]) -> str:
    """The device of `Placement.main`: the one that `VariablePlacement` names; where it has a word
    or None, the one that variables have by default. Raises `DeviceError` for a wrong name."""
    if device is None or device in (BALANCED, REPLICATED, BY_STAGE):
        return default_variable_device(devices)
    return canonical_device(device)


@contextlib.contextmanager
def only_device(device: typing.Optional[str]) -> typing.Iterator[None]:
    """A device scope that takes nothing over from the scopes around it."""
    with tf.device(None), tf.device(device):
        yield
