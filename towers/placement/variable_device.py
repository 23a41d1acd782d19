"""The device of each shared variable: on the CPU, spread over the towers, a replica on each tower,
or with the stage that uses it."""

import contextlib
import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.arguments import check_instance
from towers.errors import InvalidArgumentError
from towers.graph.graph_walk import bytes_of
from towers.optimizers import check_alone
from towers.placement.devices import canonical_device, short_name
from towers.placement.tower_device import all_devices, current_tower_device, stages_of

BALANCED = 'balanced'
REPLICATED = 'replicated'
BY_STAGE = 'stage'


class _Layout:
    """A way to spread variables over devices. In this base class one device has all of them."""

    def __init__(self, main: str, devices: typing.Sequence[str]):
        """
        Args:
          main: the device of operations that belong to no single variable.
          devices: the device of each tower.
        """
        self._main = main
        self._devices = devices

    def describe(self) -> str:
        """The plan's text about where variables are."""
        return short_name(self._main)

    def device_of_new(self, trainable: bool) -> str:
        """The device for a new variable.

        Args:
          trainable: whether the variable is trainable.
        """
        return self._main

    def note(self, variable: tf.Variable) -> None:
        """Takes notice of a variable that has been made."""

    def variable_devices(self) -> typing.Tuple[str, ...]:
        """The devices that variables may be on, each once."""
        return (self._main,)


class _Replicated(_Layout):
    """Trainable variables are on the first tower's device, where replicas of the other towers
    follow them; other variables are on the main device."""

    def describe(self) -> str:
        return short_name(self._devices[0])

    def device_of_new(self, trainable: bool) -> str:
        return self._devices[0] if trainable else self._main

    def variable_devices(self) -> typing.Tuple[str, ...]:
        return tuple(sorted({self._main, self._devices[0]}))


class _ByStage(_Layout):
    """Each variable is on the first tower's device of the stage that makes it."""

    def describe(self) -> str:
        return 'on their stage, ' + ', '.join(map(short_name, stages_of(self._devices[0])))

    def device_of_new(self, trainable: bool) -> str:
        # The stage that makes the variable has its scope open now.
        stage_device = current_tower_device(tf.get_default_graph())
        if stage_device is None:  # it is made outside of towers, by the optimizer, say
            return self._main
        return stage_device

    def variable_devices(self) -> typing.Tuple[str, ...]:
        return tuple(dict.fromkeys((self._main,) + stages_of(self._devices[0])))


class _Balanced(_Layout):
    """Each variable is on the device that has the fewest bytes of variables so far."""

    def __init__(self, main: str, devices: typing.Sequence[str]):
        """Takes the arguments of `_Layout`."""
        super().__init__(main, devices)
        self._bytes_of_devices = dict.fromkeys(all_devices(devices), 0)

    def describe(self) -> str:
        return 'balanced by size, ' + ', '.join(map(short_name, self._bytes_of_devices))

    def device_of_new(self, trainable: bool) -> str:
        return min(self._bytes_of_devices, key=self._bytes_of_devices.__getitem__)

    def note(self, variable: tf.Variable) -> None:
        """Counts the bytes of a new variable on the device where it is. That may be another device
        than `device_of_new` has said, if the variable is colocated with another variable."""
        if variable.device in self._bytes_of_devices:
            self._bytes_of_devices[variable.device] += bytes_of(variable)

    def variable_devices(self) -> typing.Tuple[str, ...]:
        return tuple(self._bytes_of_devices)


_LAYOUTS: typing.Dict[str, typing.Type[_Layout]] = {
    BALANCED: _Balanced, REPLICATED: _Replicated, BY_STAGE: _ByStage}
"""{word of `VariablePlacement`: the layout that it means}."""


class Placement:
    """Decides on the device of each variable when it is created.

    A variable is created within `scope()`, and then passed to `note`.

    Attributes:
      main: the device of operations that belong to no single variable, such as the loss over all
        towers. Where trainable variables are replicated, the other variables are on this device.
      of_weights: the device of the trainable variables, where one device has all of them.
      has_replicas: whether each tower has a replica of every trainable variable.
      by_stage: whether each variable is on the device of the stage that makes it.
      refuses_servers: whether to refuse a variable that the program puts on a parameter server,
        since this process trains without parameter servers.
      is_of_earlier_build: whether the variables are of an earlier build, and stay where that build
        has put them.
    """

    def __init__(self, device: typing.Optional[str], devices: typing.Sequence[str],
                 trains: bool = True, alone: bool = False,
                 earlier: typing.Optional['Placement'] = None):
        """
        Args:
          device: the device of `VariablePlacement`: a name, or one of the words `'balanced'`,
            `'replicated'`, `'stage'`; None for the default.
          devices: the device of each tower.
          trains: whether there is an optimizer. Replicas are made only with an optimizer, and only
            for several towers.
          alone: whether this machine trains without a cluster, so that no variable may be on a
            parameter server, unless `device` names the server.
          earlier: `Placement` of an earlier build that shares its variables; or None.

        Raises `DeviceError` for a wrong name, `InvalidArgumentError` for replicas with stages.
        """
        self._num_towers = len(devices)
        self._earlier = earlier
        self.is_of_earlier_build = earlier is not None
        self.main = _main_device(device, devices)
        layout_type = _layout_type(device, devices)
        self._layout = layout_type(self.main, devices)
        self.by_stage = layout_type is _ByStage
        self.of_weights = self.main
        self.has_replicas = False
        if layout_type is _Replicated:
            self.of_weights = devices[0]  # of tower 0, whose variables the replicas follow
            self.has_replicas = trains and len(devices) > 1
        # With `VariablePlacement('/job:ps/…')` the caller wants variables on a server.
        is_server_wanted = any('/job:ps' in name for name in self.devices())
        self.refuses_servers = alone and not is_server_wanted

    def describe(self) -> str:
        """The plan's text about where variables are, such as `'/cpu:0'`."""
        if self._earlier is not None:
            return self._earlier.describe()
        if self.has_replicas:
            return 'every tower (%d replicas)' % self._num_towers
        return self._layout.describe()

    def scope(self, trainable: bool = True) -> typing.ContextManager:
        """The device scope in which to create a variable, `trainable` or not. After that, `note`
        has to be called with the variable."""
        if self.refuses_servers:
            check_alone()  # raises where the program's own device scope names a server
        return only_device(self._layout.device_of_new(trainable))

    def note(self, variable: tf.Variable) -> None:
        """Takes notice of a variable that has been made in `scope`."""
        self._layout.note(variable)

    def devices(self) -> typing.Tuple[str, ...]:
        """The devices that variables may be on, each once."""
        if self._earlier is not None:
            # The variables that this build adds to the earlier build's are on the main device.
            return tuple(dict.fromkeys((self.main,) + self._earlier.devices()))
        return self._layout.variable_devices()

    def scope_of(self, variable: tf.Variable) -> typing.ContextManager:
        """The device scope for the sum of a variable's gradients and for its slots: the variable's
        device. Raises `InvalidArgumentError` if `variable` is no variable."""
        check_instance('variable', variable, compat.VARIABLE_TYPES, 'a variable')
        return only_device(variable.device or self.main)


def _layout_type(device: typing.Optional[str],
                 devices: typing.Sequence[str]) -> typing.Type[_Layout]:
    """The class of the layout that `VariablePlacement` asks for.

    Args:
      device: the device of `VariablePlacement`: a name, one of its words, or None.
      devices: the device of each tower.

    Raises `InvalidArgumentError` for replicas of a model with stages.
    """
    has_stages = len(stages_of(devices[0])) > 1
    if device == REPLICATED and has_stages:
        raise InvalidArgumentError(
            "VariablePlacement('replicated') goes with towers of one device each, and these "
            "have %s: use 'stage', or None for the CPU." % short_name(devices[0]))
    if device is not None:
        return _LAYOUTS.get(device, _Layout)  # `_Layout` for the name of a device
    if has_stages and len(devices) == 1:
        return _ByStage  # so that the one tower has its variables where it computes with them
    return _Layout  # on the device that `default_variable_device` says


def _main_device(device: typing.Optional[str], devices: typing.Sequence[str]) -> str:
    """The value of `Placement.main`: the device that `VariablePlacement` names; for one of its
    words, and for None, the default device of variables.

    Raises `DeviceError` for a wrong name.
    """
    if device is None or device in _LAYOUTS:
        return default_variable_device(devices)
    return canonical_device(device)


@contextlib.contextmanager
def only_device(device: typing.Optional[str]) -> typing.Iterator[None]:
    """A device scope that takes nothing over, such as a job, from the scopes around it."""
    with tf.device(None), tf.device(device):
        yield


def default_variable_device(devices: typing.Sequence[str]) -> str:
    """The device of variables where the caller names none.

    That is the CPU of the first tower's process, which all GPUs can reach. With one tower it is the
    tower's own device, so that no variable has to be sent to the tower; if this tower has stages,
    the device of the first stage.
    """
    if len(devices) == 1:
        return stages_of(devices[0])[0]
    spec = tf.DeviceSpec.from_string(devices[0])
    return tf.DeviceSpec(job=spec.job, replica=spec.replica, task=spec.task,
                         device_type='CPU', device_index=0).to_string()
