"""A replica of each trainable variable on every tower, all kept equal to the model's own.

The model's own variables are tower 0's: they have the model's names, are in its collections and in
its checkpoints. Tower k > 0 reads a replica, `<name>_replica_<k>/<name>`, on its own device: a
local variable, neither saved nor in any list of trainable variables. Its initial value is the
value of the model's variable, so `tf.local_variables_initializer`, which `MonitoredSession` runs
after it has restored a checkpoint, makes all replicas, and their slots, equal to the model's.

An optimizer of TensorFlow's own updates every replica by the same combined gradient, so that they
stay equal, bit for bit (`is_repeatable`). Any other may look at names or at a norm over variables:
it updates the model's own variables, whose values are then sent to the replicas, as are values
that an update which rides on the train op (`UPDATE_OPS`), such as the clipping of weights, writes.
"""

import collections
import contextlib
import itertools
import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import DeviceError, InvalidArgumentError, NameScopeError
from towers.gradients.gradient_pairs import each_row_once
from towers.graph.graph_walk import bytes_of, operation_names, step_operations
from towers.graph.variable_access import Writes
from towers.placement.variable_device import only_device
from towers.variables.initial_values import value_or_initial_value
from towers.variables.new_variables import local_variable, owner_by_name


class Replicas(typing.NamedTuple):
    """The replicas of the model's trainable variables on towers 1, 2, …

    Attributes:
      devices: the device of each tower.
      of_variable: from the name of a variable to `(variable, [its replica on tower 1, …])`.
      slots: the variables that the optimizer made for the replicas.
    """

    devices: typing.Tuple[str, ...]
    of_variable: typing.Dict[str, typing.Tuple[tf.Variable, typing.List[tf.Variable]]]
    slots: typing.List[tf.Variable]

    @property
    def variables(self) -> typing.List[tf.Variable]:
        """List of the replicas, by variable and then by tower."""
        listed: typing.List[tf.Variable] = []
        for _, replicas in self.of_variable.values():
            listed += replicas
        return listed

    def replica_of(self, variable: tf.Variable, tower: int) -> tf.Variable:
        """The variable that a tower reads in the place of a variable of the model: the tower's
        replica, or the model's variable itself on tower 0 and where it is not replicated."""
        return self.in_tower(tower).get(variable.op.name, variable)

    def in_tower(self, tower: int) -> dict:
        """The replicas of one tower, by the name of the model's variable; none for tower 0."""
        if tower == 0:
            return {}
        return {name: replicas[tower - 1] for name, (_, replicas) in self.of_variable.items()}

    def pairs(self, gradients: list, on_towers: dict) -> list:
        """The pairs for one `apply_gradients` that updates the model's variables and all replicas.

        The pairs of the model's own variables come first, so that their slots are made first: a
        slot of a replica takes the value of the model's slot.

        Args:
          gradients: the `(gradient, variable)` pairs of the model's variables, combined and
            transformed.
          on_towers: from the name of a variable to its combined gradient on each tower.

        Returns:
          List of `(gradient, variable)`, with the pairs of tower 0, 1, … in this order.
        """
        pairs_of_towers: typing.List[list] = [[] for _ in self.devices]
        for gradient, variable in gradients:
            copies = self._copies(gradient, variable, on_towers)
            pairs_of_towers[0].append((copies[0], variable))
            if variable.op.name not in self.of_variable:
                continue
            for tower in range(1, len(self.devices)):
                if copies[tower] is not None:
                    replica = self.replica_of(variable, tower)
                    pairs_of_towers[tower].append((copies[tower], replica))
        return list(itertools.chain.from_iterable(pairs_of_towers))

    def _copies(self, gradient: typing.Any, variable: tf.Variable, on_towers: dict) -> list:
        """The gradient of a variable on each tower: the one of `on_towers`, or, where the user's
        function has transformed it since, the transformed gradient for all towers."""
        is_replicated = variable.op.name in self.of_variable
        if is_replicated and isinstance(gradient, tf.IndexedSlices):
            # Repeated rows are added up once, so that no replica adds them in another order.
            with tf.name_scope('replicas/'), only_device(gradient.values.device or None):
                return [each_row_once(gradient)] * len(self.devices)
        copies = on_towers.get(variable.op.name, [None])
        if gradient is not None and gradient is copies[0]:
            return copies
        return [gradient] * len(self.devices)  # transformed, once for all towers

    @contextlib.contextmanager
    def new_slots(self, variables: list) -> typing.Iterator[list]:
        """A context for `apply_gradients`, in which the optimizer's slots of replicas become local
        variables. The n-th slot of a replica begins with the value of its variable's n-th slot.

        Args:
          variables: the variables and replicas that the optimizer updates.

        Yields:
          A list that fills with the slots of replicas.
        """
        slots = _NewSlots(self, variables)
        with tf.variable_creator_scope(slots.create):
            yield slots.created

    def follow(self, names: typing.Iterable[str], after: list) -> typing.List[tf.Operation]:
        """Operations that give replicas the values of their variables, one for each replica.

        Args:
          names: the names of the variables whose replicas are set.
          after: the operations that write variables or read replicas in a step, which come first.
        """
        operations = []
        with tf.name_scope('replicas/'), tf.control_dependencies(after):
            for name, (variable, replicas) in self.of_variable.items():
                if name not in names:
                    continue
                with only_device(variable.device):
                    value = variable.read_value()
                for replica in replicas:
                    with only_device(replica.device):
                        operations.append(tf.assign(
                            replica, value,
                            validate_shape=replica.get_shape().is_fully_defined()).op)
        return operations

    def refresh(self) -> tf.Operation:
        """An operation that sets every replica and its slots to the values of the model's own.

        Run it after anything but the train op has written the model's variables (`Saver.restore` in
        a plain session). `tf.local_variables_initializer` does the same.
        """
        return tf.group(*[variable.initializer for variable in self.variables + self.slots])

    def bytes(self) -> int:
        """Bytes of all replicas and their slots, as far as their shapes are static."""
        return sum(map(bytes_of, self.variables + self.slots))


class _NewSlots:
    """The slots that an optimizer makes while it applies gradients to variables and replicas.

    Attributes:
      created: list of the slots of replicas.
    """

    def __init__(self, replicas: Replicas, variables: typing.List[tf.Variable]):
        """Watches for slots of trained variables.

        Args:
          replicas: the replicas among them.
          variables: the trained variables, replicas included.
        """
        self.created: typing.List[tf.Variable] = []
        self._by_name = {variable.op.name: variable for variable in variables}
        self._replicated = set(replicas.of_variable)
        # From the name of a replica to that of its variable.
        self._origins: typing.Dict[str, str] = {}
        for name, (_, replicas_of_variable) in replicas.of_variable.items():
            for replica in replicas_of_variable:
                self._origins[replica.op.name] = name
        # From the name of a variable to its slots, each with its value; and from the name of a
        # replica to the number of slots that were made for it so far.
        self._slots: typing.Dict[str, list] = collections.defaultdict(list)
        self._counts: typing.Dict[str, int] = collections.Counter()

    def create(self, next_creator: typing.Callable, **kwargs: typing.Any) -> tf.Variable:
        """Creates a variable by `next_creator`, see `tf.variable_creator_scope`.

        A slot of a replica becomes a local variable that begins with the value of the model's slot.
        """
        owner = owner_by_name(kwargs.get('name') or '', self._by_name)
        name = None if owner is None else owner.op.name
        if name in self._origins:
            return self._create_of_replica(name, next_creator, kwargs)
        slot = next_creator(**kwargs)
        if name in self._replicated:
            self._slots[name].append((slot, _value_or_initial_value(slot)))
        return slot

    def _create_of_replica(self, name: str, next_creator: typing.Callable,
                           kwargs: dict) -> tf.Variable:
        """Creates the next slot of the replica of this name."""
        origin = self._origins[name]
        index = self._counts[name]
        if index >= len(self._slots[origin]):
            raise InvalidArgumentError(
                'the optimizer makes slot %s for a replica of %s, which has no slot to take '
                'the value of: use a new optimizer, or another VariablePlacement than '
                "'replicated'." % (kwargs['name'].rstrip('/'), origin))
        original, value = self._slots[origin][index]
        self._counts[name] += 1
        kwargs.update(initial_value=_any_value(original), dtype=original.dtype.base_dtype,
                      trainable=False, collections=[tf.GraphKeys.LOCAL_VARIABLES])
        slot = next_creator(**kwargs)
        compat.initialize_with(slot, value)
        self.created.append(slot)
        return slot


def follow_updates(replicas: typing.Optional[Replicas], updates: typing.Sequence,
                   after: typing.Sequence) -> typing.List[tf.Operation]:
    """Operations that give replicas the values that updates of the step write into their variables.

    Args:
      replicas: the replicas, or None.
      updates: the update ops of the step.
      after: the losses and gradients of the step, which read replicas, and read the old values.
    """
    if replicas is None or not updates:
        return []
    writes = Writes(tf.get_default_graph())
    written: typing.Set[str] = set()
    for op in step_operations(updates):
        written.update(writes.of(op))
    return replicas.follow(written, list(updates) + list(after))


def make_replicas(variables: typing.Iterable[tf.Variable],
                  devices: typing.Iterable[str]) -> Replicas:
    """Makes a replica of each trainable variable on towers 1, 2, …; of the result the list of slots
    is empty.

    Replicas that an earlier build in this graph made for the same towers are shared, since an
    update by either build has to reach them.

    Args:
      variables: the model's variables; those that are not trainable get no replica.
      devices: the device of each tower.

    Raises:
      DeviceError: an earlier build has replicas of a variable on other devices.
    """
    devices = tuple(devices)
    local = {variable.op.name: variable for variable in tf.local_variables()}
    of_variable = {}
    for variable in variables:
        name = variable.op.name
        if not variable.trainable or name in local:
            continue
        names = [_replica_name(variable, tower) for tower in range(1, len(devices))]
        replicas = [local[replica_name] for replica_name in names if replica_name in local]
        if not replicas:
            replicas = _new_replicas(variable, names, devices[1:])
        elif [replica.device for replica in replicas] != list(devices[1:]):
            raise DeviceError(
                'variable %s has replicas on %s already, of an earlier build, and is to have some '
                'on %s: build both for the same towers.' % (
                    name, ', '.join(replica.device for replica in replicas),
                    ', '.join(devices[1:])))
        of_variable[name] = (variable, replicas)
    return Replicas(devices, of_variable, [])


def check_no_replicas(variables: typing.Iterable[tf.Variable]) -> None:
    """Raises `InvalidArgumentError` if an earlier build keeps replicas of variables that this one
    trains without them."""
    local_names = operation_names(tf.local_variables())
    for variable in variables:
        if _replica_name(variable, 1) in local_names:
            raise InvalidArgumentError(
                "variable %s has replicas on several towers, of an earlier build with "
                "VariablePlacement('replicated'), which this build's updates would not reach: "
                "build this one with VariablePlacement('replicated'), too." % variable.op.name)


def _replica_name(variable: tf.Variable, tower: int) -> str:
    """The name of a variable's replica on a tower.

    It sorts after the variable's own name with `:0`: Adam puts its powers of beta on the device of
    the variable whose name comes first, and that is to be the model's own.
    """
    return '%s_replica_%d/%s' % (variable.op.name, tower, variable.op.name)


def _new_replicas(variable: tf.Variable, names: typing.Sequence[str],
                  devices: typing.Sequence[str]) -> typing.List[tf.Variable]:
    """Makes the replicas of one variable.

    Args:
      variable: the variable of the model.
      names: the name of each replica.
      devices: the device of each replica.

    Raises:
      NameScopeError: another operation of the graph has one of the names.
    """
    value = _value_or_initial_value(variable)
    replicas = []
    for name, device in zip(names, devices):
        # Trainable for code that asks the variable itself (custom gradients), yet in no list of
        # trainable variables.
        replica = local_variable(variable, name, _any_value(variable), value, device,
                                 trainable=True, constraint=variable.constraint)
        listed = tf.get_default_graph().get_collection_ref(tf.GraphKeys.TRAINABLE_VARIABLES)
        listed[:] = [variable for variable in listed if variable is not replica]
        if replica.op.name != name:
            raise NameScopeError('the graph has another operation %r, which is to be the name of a '
                                 'replica of variable %s: rename that operation.'
                                 % (name, variable.op.name))
        replicas.append(replica)
    return replicas


def _any_value(variable: tf.Variable) -> tf.Tensor:
    """A value of the variable's shape for the time until `initialize_with` sets the right one; no
    session computes it."""
    if variable.get_shape().is_fully_defined():
        return tf.zeros(variable.get_shape(), variable.dtype.base_dtype)
    return variable.initial_value


def _value_or_initial_value(variable: tf.Variable) -> tf.Tensor:
    """The value of a variable, or its initial value where it is not initialized yet.

    So the replicas may be initialized in the same run as the model's variables, or later. Only if
    everything has been initialized before, the two initializers have to run one after the other.
    """
    with tf.name_scope('replicas/'):
        return value_or_initial_value(variable)
