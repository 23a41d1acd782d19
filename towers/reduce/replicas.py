"""A replica of each trainable variable on every tower, all kept equal to the model's own.

The model's own variables are tower 0's: they have the model's names, are in its collections and in
its checkpoints. Tower k > 0 reads a replica, `<name>_replica_<k>/<name>`, on its own device. The
replica is a local variable: neither saved nor in any list of trainable variables. Its initial value
is what the model's variable holds, so `tf.local_variables_initializer`, which `MonitoredSession`
runs after it has restored a checkpoint, makes all replicas equal to the model's variable. The
slots of replicas are such local variables, too. Each update gives every replica the same combined
gradient, so that they stay equal, bit for bit.
"""

import collections

import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import DeviceError, InvalidArgumentError, NameScopeError
from towers.graph.nests import bytes_of
from towers.placement.variable_device import only_device
from towers.reduce.sparse_rows import each_row_once
from towers.tower.variables import owner_by_name


class Replicas:
    """The replicas of the model's trainable variables on towers 1, 2, …

    Attributes:
      devices: the towers' devices.
      variables: list of the replicas, by variable and then by tower.
      slots: list of the slots that the optimizer made for the replicas.
    """

    def __init__(self, devices):
        """
        Args:
          devices: the towers' devices.
        """
        self.devices = tuple(devices)
        self.variables = []
        self.slots = []
        self._origins_of_slots = []
        self._replicas = {}  # name of the model's variable -> [its replica on tower 1, tower 2, …]
        self._origin = {}  # name of a replica -> the model's variable

    def make(self, variables):
        """Makes the replicas of those variables that are trainable, or finds those there are.

        Replicas that an earlier build in this graph made for the same towers are shared, since an
        update by either build has to reach them.

        Args:
          variables: list of the model's variables; those that are not trainable (statistics,
            counters) live once.

        Raises:
          DeviceError: there are replicas on other devices.
          NameScopeError: the graph has another operation of a replica's name.
        """
        there = {variable.op.name: variable for variable in tf.local_variables()}
        for variable in variables:
            if not variable.trainable or variable.op.name in there or (
                    variable.op.name in self._replicas):
                continue
            names = [replica_name(variable, tower) for tower in range(1, len(self.devices))]
            replicas = [there.get(name) for name in names]
            if all(replica is None for replica in replicas):
                replicas = _make_replicas(variable, names, self.devices[1:])
            elif [each is not None and each.device for each in replicas] != list(self.devices[1:]):
                raise DeviceError(
                    'variable %s has replicas on %s already, of an earlier build, and is to have '
                    'some on %s: build both for the same towers.' % (
                        variable.op.name,
                        ', '.join(replica.device for replica in replicas if replica is not None),
                        ', '.join(self.devices[1:])))
            self._replicas[variable.op.name] = replicas
            self._origin.update((replica.op.name, variable) for replica in replicas)
            self.variables.extend(replicas)

    def replica_of(self, variable, tower):
        """What tower number `tower` reads for a variable of the model.

        That is the tower's replica; for anything without a replica, such as a statistic, the
        variable itself.
        """
        if not tower:
            return variable
        replicas = self._replicas.get(variable.op.name)
        return replicas[tower - 1] if replicas else variable

    def names(self):
        """The names of the model's variables that have replicas: a frozenset."""
        return frozenset(name for name, replicas in self._replicas.items() if replicas)

    def in_tower(self, tower):
        """{name of the model's variable: its replica} on a tower; empty for tower 0."""
        return {} if not tower else {name: replicas[tower - 1]
                                     for name, replicas in self._replicas.items()}

    def original(self, variable):
        """The model's own variable of a replica; any other variable as it is."""
        return self._origin.get(variable.op.name, variable)

    def counterparts(self):
        """`(replica, variable)` of all replicas, and `(slot, slot of the model's variable)`."""
        return [(replica, self._origin[replica.op.name]) for replica in self.variables] + list(
            zip(self.slots, self._origins_of_slots))

    def pairs(self, gradients, on_towers):
        """The `(gradient, variable)` pairs of all replicas, for one `apply_gradients`.

        The model's own come first: a slot of a replica takes the value of the model's slot.

        Args:
          gradients: list of `(gradient, variable)`, of the model's own variables: combined, and
            transformed by the caller's function.
          on_towers: dict from a variable's name to its combined gradient on each tower, see
            `all_reduce`.
        """
        ready = []
        for gradient, variable in gradients:
            if gradient is None:
                ready.append(((None,), variable))
                continue
            every = on_towers.get(variable.op.name, (None,))
            if gradient is not every[0]:  # it was transformed, once, and goes to every tower
                every = [gradient] * len(self.devices)
            if isinstance(gradient, tf.IndexedSlices) and variable.op.name in self._replicas:
                every = [_without_repeated_rows(gradient)] * len(self.devices)
            ready.append((every, variable))
        pairs = [(every[0], variable) for every, variable in ready]
        for tower in range(1, len(self.devices)):
            pairs += [(_own_tensor(every, tower, self.devices[tower]),
                       self.replica_of(variable, tower))
                      for every, variable in ready
                      if variable.op.name in self._replicas and every[0] is not None]
        return pairs

    def slot_creator(self, variables):
        """A creator for `tf.variable_creator_scope` around `apply_gradients`.

        A replica's slots become local variables. The n-th slot of a replica begins with the value
        of the n-th slot of its variable.

        Args:
          variables: the variables that are trained, replicas included.
        """
        by_name = {variable.op.name: variable for variable in variables}
        values = collections.defaultdict(list)  # of the slots of the model's own variables
        count = collections.Counter()

        def create(next_creator, **kwargs):
            owner = owner_by_name(kwargs.get('name') or '', by_name)
            if owner is None:
                return next_creator(**kwargs)
            origin = self.original(owner)
            if origin is owner:
                slot = next_creator(**kwargs)
                if owner.op.name in self._replicas:
                    values[owner.op.name].append((slot, _value_or_initial_value(slot)))
                return slot
            number = count[owner.op.name]
            count[owner.op.name] += 1
            if number >= len(values[origin.op.name]):
                raise InvalidArgumentError(
                    'the optimizer makes slot %s for a replica of %s, which has no slot to take '
                    'the value of: use a new optimizer, and one that makes the same slots for '
                    "every variable, or another VariablePlacement than 'replicated'."
                    % (kwargs['name'].rstrip('/'), origin.op.name))
            first, value = values[origin.op.name][number]
            kwargs.update(initial_value=_any_value(first), dtype=first.dtype.base_dtype,
                          trainable=False, collections=[tf.GraphKeys.LOCAL_VARIABLES])
            slot = next_creator(**kwargs)
            compat.initialize_with(slot, value)
            self.slots.append(slot)
            self._origins_of_slots.append(first)
            return slot
        return create

    def forget_slots(self):
        """Takes the slots of replicas out of the graph's collections: no update writes them."""
        gone = set(map(id, self.slots))
        listed = tf.get_default_graph().get_collection_ref(tf.GraphKeys.LOCAL_VARIABLES)
        listed[:] = [each for each in listed if id(each) not in gone]
        self.slots, self._origins_of_slots = [], []

    def refresh(self):
        """An operation that sets every replica and its slots to the values of the model's own.

        Run it after anything but the train op has written the model's variables (`Saver.restore` in
        a plain session). `tf.local_variables_initializer` does the same.
        """
        return tf.group(*[replica.initializer for replica in self.variables + self.slots])

    def bytes(self):
        """Bytes of all replicas and their slots, as far as their shapes are static."""
        return sum(map(bytes_of, self.variables + self.slots))


def replica_name(variable, tower):
    """The name of tower `tower`'s replica.

    It begins and ends as the variable's own name, since optimizers choose variables by the
    beginning (a rate for each layer) or the end (weight decay for kernels) of a name. It sorts
    after the variable's own name with `:0`, because Adam puts its powers of beta on the device of
    the variable that is first by name: that has to be the model's own.
    """
    return '%s_replica_%d/%s' % (variable.op.name, tower, variable.op.name)


def check_no_replicas(variables):
    """Raises if an earlier build keeps replicas of variables that this one trains without them.

    Raises:
      InvalidArgumentError: names one of them.
    """
    there = {variable.op.name for variable in tf.local_variables()}
    for variable in variables:
        if replica_name(variable, 1) in there:
            raise InvalidArgumentError(
                "variable %s has replicas on several towers, of an earlier build with "
                "VariablePlacement('replicated'), which this build's updates would not reach: "
                "build this one with VariablePlacement('replicated'), too." % variable.op.name)


def _make_replicas(variable, names, devices):
    value = _value_or_initial_value(variable)
    replicas = []
    for name, device in zip(names, devices):
        with tf.control_dependencies(None), tf.name_scope(None), only_device(device):
            # Trainable for code that asks the variable itself (custom gradients), yet in no list of
            # trainable variables.
            replica = tf.Variable(
                _any_value(variable), trainable=True, name=name,
                collections=[tf.GraphKeys.LOCAL_VARIABLES], dtype=variable.dtype.base_dtype,
                use_resource=variable.op.type == 'VarHandleOp', constraint=variable.constraint,
                validate_shape=variable.get_shape().is_fully_defined())
            compat.initialize_with(replica, value)
        listed = tf.get_default_graph().get_collection_ref(tf.GraphKeys.TRAINABLE_VARIABLES)
        listed[:] = [each for each in listed if each is not replica]
        if replica.op.name != name:
            raise NameScopeError('the graph has another operation %r, which is to be the name of a '
                                 'replica of variable %s: rename that one.'
                                 % (name, variable.op.name))
        replicas.append(replica)
    return replicas


def _any_value(variable):
    """A value of the variable's shape, which `initialize_with` exchanges before it is computed."""
    if variable.get_shape().is_fully_defined():
        return tf.zeros(variable.get_shape(), variable.dtype.base_dtype)
    return variable.initial_value


def _value_or_initial_value(variable):
    """A tensor: the value of a variable, or its initial value where it is not initialized yet.

    So the replicas may be initialized in the same run as the model's variables, after a restore, or
    later. Only in a session in which everything is initialized already, the two initializers have
    to run one after the other: in one run, a replica might read the variable's old value. This is
    `Variable.initialized_value`, which TF 2 lacks for resource variables, in fewer operations.
    """
    with tf.control_dependencies(None), tf.name_scope('replicas/'), only_device(variable.device):
        is_set = tf.is_variable_initialized(variable)
        use_value = tf.identity(tf.raw_ops.Switch(data=is_set, pred=is_set).output_true)
        with tf.control_dependencies([use_value]):
            value = variable.read_value()
        initial = tf.raw_ops.Switch(data=variable.initial_value, pred=is_set).output_false
        merged = tf.raw_ops.Merge(inputs=[initial, value]).output
        merged.set_shape(variable.get_shape())
        return merged


def _own_tensor(every, tower, device):
    """A replica's gradient as a tensor of its own: `replica_updates` tells by it who reads it."""
    gradient = every[tower]
    if gradient is not every[0] or not isinstance(gradient, (tf.Tensor, tf.IndexedSlices)):
        return gradient
    with tf.name_scope('replicas/'), only_device(device):
        if isinstance(gradient, tf.Tensor):
            return tf.identity(gradient)
        return tf.IndexedSlices(tf.identity(gradient.values), gradient.indices,
                                gradient.dense_shape)


def _without_repeated_rows(slices):
    """The gradient with repeated rows added up, so that no replica adds them in another order."""
    with tf.name_scope('replicas/'), only_device(slices.values.device or None):
        return each_row_once(slices)
