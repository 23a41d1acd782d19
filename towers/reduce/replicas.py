"""A replica of each trainable variable on every tower, all kept equal to the model's own.

The model's own variables are tower 0's: they have the model's names, are in its collections and in
its checkpoints. Tower k > 0 reads a replica, `<name>_replica_<k>/<name>`, on its own device: a
local variable, neither saved nor in any list of trainable variables. Its initial value is the
value of the model's variable, so `tf.local_variables_initializer`, which `MonitoredSession` runs
after it has restored a checkpoint, makes all replicas, and their slots, equal to the model's.

An optimizer of TensorFlow's own updates every replica by the same combined gradient, so that they
stay equal, bit for bit (`is_repeatable`). Any other optimizer may look at names, or at a norm over
variables: it updates the model's own variables, and their new values are then sent to the replicas.
Values that an update which rides on the train op (`UPDATE_OPS`) writes, such as clipped weights,
are sent to the replicas as well.
"""

import collections
import contextlib
import itertools
import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import DeviceError, InvalidArgumentError, NameScopeError, counted
from towers.gradients.gradient_pairs import each_row_once
from towers.graph.graph_walk import (
    bytes_of,
    operation_names,
    step_operations,
    variables_by_name,
)
from towers.graph.variable_access import Writes
from towers.placement.variable_device import only_device
from towers.variables.initial_values import value_or_initial_value
from towers.variables.slots import local_variable, owner_by_name


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
        """{name of a variable of the model: its replica on a tower}; {} for tower 0, which has the
        model's variables themselves."""
        if tower == 0:
            return {}
        index = tower - 1
        return {name: replicas[index] for name, (_, replicas) in self.of_variable.items()}

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
        # A list a tower, so that all pairs of tower 0 come before those of tower 1.
        pairs_of_towers: typing.List[list] = [[] for _ in self.devices]
        for gradient, variable in gradients:
            on_each_tower = self._gradient_on_each_tower(gradient, variable, on_towers)
            pairs_of_towers[0].append((on_each_tower[0], variable))
            is_replicated = variable.op.name in self.of_variable
            if gradient is None or not is_replicated:
                continue  # there is nothing to update on the other towers
            for tower in range(1, len(self.devices)):
                replica = self.replica_of(variable, tower)
                pairs_of_towers[tower].append((on_each_tower[tower], replica))
        return list(itertools.chain.from_iterable(pairs_of_towers))

    def _gradient_on_each_tower(self, gradient: typing.Any, variable: tf.Variable,
                                on_towers: dict) -> list:
        """List of the gradients of a variable by which the towers update it, one a tower.

        Where the towers' own all-reduce has given each tower the sum, and the user's function has
        left the sum as it is, each tower takes the sum that it has. Else all towers take the one
        gradient.

        Args:
          gradient: the gradient to apply, combined and transformed.
          variable: the variable of the model.
          on_towers: from the name of a variable to its combined gradient on each tower.
        """
        is_replicated = variable.op.name in self.of_variable
        if is_replicated and isinstance(gradient, tf.IndexedSlices):
            # Repeated rows are added up once, so that no replica adds them in another order.
            with tf.name_scope('replicas/'), only_device(gradient.values.device or None):
                return [each_row_once(gradient)] * len(self.devices)
        combined_on_towers = on_towers.get(variable.op.name)
        if combined_on_towers is not None:
            is_untransformed = gradient is combined_on_towers[0]
            if is_untransformed:
                return combined_on_towers
        return [gradient] * len(self.devices)

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
          names: the names of the variables whose replicas are set. Names of variables without
            replicas, such as slots, do not count.
          after: the operations that the returned operations wait for: all that write the variables,
            or read the replicas, in a step.
        """
        operations = []
        followed = [entry for name, entry in self.of_variable.items() if name in names]
        with tf.name_scope('replicas/'), tf.control_dependencies(after):
            for variable, replicas in followed:
                with only_device(variable.device):
                    value = variable.read_value()
                for replica in replicas:
                    # A variable without a static shape may change its shape.
                    has_static_shape = replica.get_shape().is_fully_defined()
                    with only_device(replica.device):
                        assigned = tf.assign(replica, value, validate_shape=has_static_shape)
                    operations.append(assigned.op)
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

    An optimizer makes the same slots in the same order for each variable that it updates, and the
    model's variables come before the replicas, see `Replicas.pairs`. So the n-th slot that it makes
    for a replica corresponds to the n-th slot that it has made for the variable.

    Attributes:
      created: list of the slots of replicas.
    """

    def __init__(self, replicas: Replicas, variables: typing.List[tf.Variable]):
        """
        Args:
          replicas: the replicas among the trained variables.
          variables: the trained variables, replicas included.
        """
        self.created: typing.List[tf.Variable] = []
        self._trained = variables_by_name(variables)
        self._replicated = set(replicas.of_variable)  # names of the variables that have replicas
        # {name of a replica: name of the variable of the model}
        self._origins: typing.Dict[str, str] = {}
        for name, (_, replicas_of_variable) in replicas.of_variable.items():
            for replica in replicas_of_variable:
                self._origins[replica.op.name] = name
        # {name of a variable of the model: its slots, in the order in which they were made}
        self._slots: typing.Dict[str, typing.List[_Slot]] = collections.defaultdict(list)
        # {name of a replica: the number of slots that were made for it so far}
        self._counts: typing.Dict[str, int] = collections.Counter()

    def create(self, next_creator: typing.Callable, **kwargs: typing.Any) -> tf.Variable:
        """Creates a variable by `next_creator`, as `tf.variable_creator_scope` asks it.

        A slot of a replica becomes a local variable that begins with the value of the model's slot.
        """
        # An optimizer names a slot after the variable that it belongs to.
        owner = owner_by_name(kwargs.get('name') or '', self._trained)
        if owner is None:
            return next_creator(**kwargs)  # a variable that is no slot, as Adam's powers of beta
        name = owner.op.name
        if name in self._origins:
            return self._create_slot_of_replica(name, next_creator, kwargs)
        slot = next_creator(**kwargs)
        if name in self._replicated:
            # The replicas' slots will begin with this value.
            self._slots[name].append(_Slot(slot, _value_or_initial_value(slot)))
        return slot

    def _create_slot_of_replica(self, name: str, next_creator: typing.Callable,
                                kwargs: dict) -> tf.Variable:
        """Creates the next slot of the replica of this name.

        Args:
          name: the name of the replica.
          next_creator: the function that creates a variable.
          kwargs: its arguments, as the optimizer gives them.
        """
        origin = self._origins[name]
        slots_of_origin = self._slots[origin]
        index = self._counts[name]
        # An optimizer that was used before makes no slot for the variable, which has one already.
        if index >= len(slots_of_origin):
            raise InvalidArgumentError(
                'the optimizer makes slot %s for a replica of %s, which has no slot to take '
                'the value of: use a new optimizer, or another VariablePlacement than '
                "'replicated'." % (kwargs['name'].rstrip('/'), origin))
        self._counts[name] += 1
        original = slots_of_origin[index]
        kwargs.update(initial_value=_any_value(original.variable),
                      dtype=original.variable.dtype.base_dtype,
                      trainable=False, collections=[tf.GraphKeys.LOCAL_VARIABLES])
        slot = next_creator(**kwargs)
        compat.initialize_with(slot, original.value)
        self.created.append(slot)
        return slot


class _Slot(typing.NamedTuple):
    """A slot of a variable of the model."""
    variable: tf.Variable  # the slot itself
    value: tf.Tensor  # its value, or its initial value as long as it is not initialized


def follow_updates(replicas: typing.Optional[Replicas], updates: typing.Sequence,
                   after: typing.Sequence) -> typing.List[tf.Operation]:
    """Operations that give replicas the values that updates of the step write into the model's
    variables.

    Args:
      replicas: the replicas, or None.
      updates: the update ops of the step.
      after: the losses and gradients of the step: they read replicas before these get new values.
    """
    if replicas is None or not updates:
        return []
    writes = Writes(tf.get_default_graph())
    written: typing.Set[str] = set()
    for op in step_operations(updates):
        written.update(writes.written_by(op))
    return replicas.follow(written, list(updates) + list(after))


def make_replicas(variables: typing.Iterable[tf.Variable],
                  devices: typing.Iterable[str]) -> Replicas:
    """Makes a replica of each trainable variable on towers 1, 2, …; the result has no slots yet.

    Replicas that an earlier build in this graph made for the same towers are shared, since an
    update by either build has to reach them.

    Args:
      variables: the model's variables; a variable that is not trainable gets no replica.
      devices: the device of each tower.

    Raises:
      DeviceError: an earlier build has replicas of a variable on other devices.
    """
    devices = tuple(devices)
    local_variables = variables_by_name(tf.local_variables())
    of_variable = {}
    for variable in variables:
        is_local = variable.op.name in local_variables  # it is state: each tower has one of its own
        if variable.trainable and not is_local:
            replicas = _replicas_on(variable, devices[1:], local_variables)
            of_variable[variable.op.name] = (variable, replicas)
    return Replicas(devices, of_variable, slots=[])


def _replicas_on(variable: tf.Variable, devices: typing.Sequence[str],
                 local_variables: typing.Dict[str, tf.Variable]) -> typing.List[tf.Variable]:
    """The replicas of one variable: the replicas of an earlier build, or new replicas.

    Args:
      variable: the variable of the model.
      devices: the devices of towers 1, 2, …
      local_variables: {name: variable} of the graph's local variables.

    Raises:
      DeviceError: an earlier build has replicas of the variable on other devices.
    """
    names = [_replica_name(variable, tower) for tower in range(1, len(devices) + 1)]
    replicas = [local_variables[name] for name in names if name in local_variables]
    if not replicas:
        return _new_replicas(variable, names, devices)
    # The lists also differ if the earlier build had fewer towers. If it had more, this build may
    # use the first of its replicas, but not train them: see `check_updates_all_replicas`.
    devices_of_earlier = [replica.device for replica in replicas]
    if devices_of_earlier != list(devices):
        raise DeviceError(
            'variable %s has replicas on %s already, of an earlier build, and is to have some on '
            '%s: build both for the same towers.' % (
                variable.op.name, ', '.join(devices_of_earlier), ', '.join(devices)))
    return replicas


def check_updates_all_replicas(variables: typing.Iterable[tf.Variable],
                               num_towers: int) -> None:
    """Raises `InvalidArgumentError` if an earlier build has replicas of variables that this build
    trains, on more towers than this build updates.

    Args:
      variables: the variables that this build trains.
      num_towers: on how many towers it updates them; 1 if it has no replicas.
    """
    local_names = operation_names(tf.local_variables())
    for variable in variables:
        # Replicas are numbered without a gap: if there are more, one has the next number.
        has_more_replicas = _replica_name(variable, tower=num_towers) in local_names
        if has_more_replicas:
            raise InvalidArgumentError(
                "variable %s has replicas on more than %s, of an earlier build with "
                "VariablePlacement('replicated'), which this build's updates would not reach: "
                "build this one with VariablePlacement('replicated') for the same towers, too." % (
                    variable.op.name, counted(num_towers, 'tower')))


def _replica_name(variable: tf.Variable, tower: int) -> str:
    """The name of a variable's replica on a tower.

    It sorts after the variable's own name with `:0`: Adam puts its powers of beta on the device of
    the variable whose name comes first, which is to be the model's own variable.
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
    first_value = _value_or_initial_value(variable)
    collection = tf.get_default_graph().get_collection_ref(tf.GraphKeys.TRAINABLE_VARIABLES)
    replicas = []
    for name, device in zip(names, devices):
        # A replica is trainable for code that asks the variable itself, such as custom gradients.
        # The program must not find it in `tf.trainable_variables()`, where TensorFlow puts it.
        replica = local_variable(variable, name, initial_value=_any_value(variable),
                                 value=first_value, device=device, trainable=True,
                                 constraint=variable.constraint)
        collection[:] = [listed for listed in collection if listed is not replica]
        if replica.op.name != name:  # the name was taken: TensorFlow has added a number to it
            raise NameScopeError('the graph has another operation %r, which is to be the name of a '
                                 'replica of variable %s: rename that operation.'
                                 % (name, variable.op.name))
        replicas.append(replica)
    return replicas


def _any_value(variable: tf.Variable) -> tf.Tensor:
    """A tensor of the variable's shape and dtype, since TensorFlow makes no variable without an
    initial value. No session computes it: `compat.initialize_with` gives the new variable another
    initializer."""
    if variable.get_shape().is_fully_defined():
        return tf.zeros(variable.get_shape(), variable.dtype.base_dtype)
    return variable.initial_value  # which has the shape that the variable has when it is made


def _value_or_initial_value(variable: tf.Variable) -> tf.Tensor:
    """A tensor with the value of a variable, or with its initial value as long as the variable is
    not initialized.

    So a run may initialize the model's variables and the replicas at the same time, in any order.
    If it initializes variables that have a value already, a replica may get the old value: then the
    replicas have to be initialized in a later run.
    """
    with tf.name_scope('replicas/'):
        return value_or_initial_value(variable)
