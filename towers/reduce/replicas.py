"""A copy of each trainable variable on every tower, all kept equal to the model's own.

The model's own variables are tower 0's: they have the model's names, are in its collections and in
its checkpoints. Tower k > 0 reads a copy, `<name>_replica_<k>/<name>`, on its own device, which is
a local variable: neither saved nor in any list of trainable variables. Its initial value is what
the model's variable holds, so `tf.local_variables_initializer`, which `MonitoredSession` runs after
it has restored a checkpoint, makes the copies agree. The copies' slots are treated alike. Each
update gives every copy the same combined gradient, so that they stay equal, bit for bit.
"""

import collections

import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import DeviceError, InvalidArgumentError, NameScopeError
from towers.placement.variable_device import only_device
from towers.reduce.rows import each_row_once
from towers.reduce.combination import add_up
from towers.tower.variables import owner_by_name


class Replicas:
    """The copies of the model's trainable variables on towers 1, 2, …

    Attributes:
      devices: the towers' devices.
      variables: list of the copies, by variable and then by tower.
      slots: list of the slots that the optimizer made for the copies.
    """

    def __init__(self, devices, micro_batches=1):
        """
        Args:
          devices: the towers' devices.
          micro_batches: how many of each tower share its copies.
        """
        self.devices = tuple(devices)
        self._micro_batches = micro_batches
        self.variables = []
        self.slots = []
        self._origins_of_slots = []
        self._copies = {}  # name of the model's variable -> [its copy on tower 1, tower 2, …]
        self._origin = {}  # name of a copy -> the model's variable

    def make(self, variables):
        """Makes the copies of those variables that are trainable, or finds those there are.

        Copies that an earlier build in this graph made for the same towers are shared, since an
        update by either build has to reach them.

        Args:
          variables: list of the model's variables; those that are not trainable (statistics,
            counters) live once.

        Raises:
          DeviceError: there are copies on other devices.
          NameScopeError: the graph has another operation of a copy's name.
        """
        there = {variable.op.name: variable for variable in tf.local_variables()}
        for variable in variables:
            if not variable.trainable or variable.op.name in there or (
                    variable.op.name in self._copies):
                continue
            names = [copy_name(variable, tower) for tower in range(1, len(self.devices))]
            copies = [there.get(name) for name in names]
            if all(copy is None for copy in copies):
                copies = _make_copies(variable, names, self.devices[1:])
            elif [copy is not None and copy.device for copy in copies] != list(self.devices[1:]):
                raise DeviceError(
                    'variable %s has copies on %s already, of an earlier build, and is to have '
                    'some on %s: build both for the same towers.' % (
                        variable.op.name,
                        ', '.join(copy.device for copy in copies if copy is not None),
                        ', '.join(self.devices[1:])))
            self._copies[variable.op.name] = copies
            self._origin.update((copy.op.name, variable) for copy in copies)
            self.variables.extend(copies)

    def replica_of(self, variable, tower):
        """What tower number `tower` uses for a variable of the model: its copy, if there is one.

        A partitioned variable is one of copies of its parts; anything that has no copy, such as a
        statistic, is returned as it is.
        """
        if not tower:
            return variable
        parts = compat.parts_of(variable)
        if parts is not None:
            return compat.partitioned_like(variable, [self.replica_of(p, tower) for p in parts])
        copies = self._copies.get(getattr(getattr(variable, 'op', None), 'name', None))
        return copies[tower - 1] if copies else variable

    def copied(self):
        """The names of the model's variables that have copies: a frozenset."""
        return frozenset(name for name, copies in self._copies.items() if copies)

    def of_part(self, variable, part):
        """The same for a micro-batch, by its number among those of all towers."""
        return self.replica_of(variable, part // self._micro_batches)

    def original(self, variable):
        """The model's own variable of a copy; any other variable as it is."""
        return self._origin.get(variable.op.name, variable)

    def counterparts(self):
        """`(copy, variable)` of all copies, and of the slots of copies that this build made."""
        return [(copy, self._origin[copy.op.name]) for copy in self.variables] + list(
            zip(self.slots, self._origins_of_slots))

    def name_of_original(self, name):
        """A name that begins with a copy's, such as that of its moving average, with the model's
        own.
        """
        for copy in self.variables:
            if name == copy.op.name or name.startswith(copy.op.name + '/'):
                return self._origin[copy.op.name].op.name + name[len(copy.op.name):]
        return name

    def originals(self, variables):
        """The model's own variables of these, each once."""
        return list({v.op.name: v for v in map(self.original, variables)}.values())

    def sources(self, variables, part, used):
        """The replicas (and variables) whose gradients a tower takes, to get those of `variables`.

        Args:
          variables: list of the model's variables.
          part: the number of its micro-batch among those of all towers.
          used: the variables that the tower's operations read. Where the model function has kept
            the model's own variable (in a Keras layer from around it), that one is among them.
        """
        used = {variable.op.name for variable in used}
        sources = []
        for variable in variables:
            copy = self.of_part(variable, part)
            sources.append(copy)
            if copy is not variable and variable.op.name in used:
                sources.append(variable)
        return sources

    def own_pairs(self, pairs):
        """`(gradient, variable)` pairs of `sources`, as pairs of the model's own variables."""
        found = collections.OrderedDict()
        for gradient, source in pairs:
            variable = self.original(source)
            entry = found.setdefault(variable.op.name, (variable, []))
            if gradient is not None:
                entry[1].append(gradient)
        return [(add_up(gradients, variable) if gradients else None, variable)
                for variable, gradients in found.values()]

    def pairs(self, gradients, on_towers):
        """The `(gradient, variable)` pairs of all copies, for one `apply_gradients`.

        The model's own come first: a copy's slots are made after those that they copy.

        Args:
          gradients: list of `(gradient, variable)`, of the model's own variables: combined, and
            transformed by the caller's function.
          on_towers: dict from a variable's name to its combined gradient on each tower, see
            `all_reduce`.
        """
        ready = []
        for gradient, variable in gradients:
            every = on_towers[variable.op.name]
            if gradient is not every[0]:  # it was transformed, once, and goes to every tower
                every = [gradient] * len(self.devices)
            if isinstance(gradient, tf.IndexedSlices) and variable.op.name in self._copies:
                every = [_without_repeated_rows(gradient)] * len(self.devices)
            ready.append((every, variable))
        pairs = [(every[0], variable) for every, variable in ready]
        for tower in range(1, len(self.devices)):
            pairs += [(_own_tensor(every, tower, self.devices[tower]),
                       self.replica_of(variable, tower))
                      for every, variable in ready if variable.op.name in self._copies]
        return pairs

    def slot_creator(self, variables):
        """A creator for `tf.variable_creator_scope` around `apply_gradients`.

        Slots of copies become local variables with the value of the model's slot: the first slot
        that a copy gets is that of the first slot that its variable has got, and so on.

        Args:
          variables: the variables that are trained, copies included.
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
                if owner.op.name in self._copies:
                    values[owner.op.name].append((slot, _value_or_initial_value(slot)))
                return slot
            number = count[owner.op.name]
            count[owner.op.name] += 1
            if number >= len(values[origin.op.name]):
                raise InvalidArgumentError(
                    "the optimizer makes slot %s for a copy of %s, which has no such slot of its "
                    "own to copy: use a new optimizer, and one that makes the same slots for "
                    "every variable, or another variable_device than 'replicated'."
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

    def refresh(self):
        """An operation that gives every copy, and every copy's slot, the model's values anew.

        That is what `tf.local_variables_initializer` does to them; to be run after anything but
        the train op has written the model's variables (`Saver.restore` in a plain session).
        """
        return tf.group(*[copy.initializer for copy in self.variables + self.slots])

    def bytes(self):
        """Bytes of all copies and their slots, as far as their shapes are static."""
        return sum((each.get_shape().num_elements() or 0) * each.dtype.base_dtype.size
                   for each in self.variables + self.slots)


def copy_name(variable, tower):
    """The name of tower `tower`'s copy.

    It begins and ends as the variable's own, which optimizers go by (weight decay for kernels, a
    rate for each layer). It sorts after the variable's own name with `:0`: Adam puts its powers of
    beta on the device of the first variable by name: the model's own.
    """
    return '%s_replica_%d/%s' % (variable.op.name, tower, variable.op.name)


def check_no_copies(variables):
    """Raises if an earlier build keeps copies of variables that this one trains without them.

    Raises:
      InvalidArgumentError: names one of them.
    """
    there = {variable.op.name for variable in tf.local_variables()}
    for variable in variables:
        if copy_name(variable, 1) in there:
            raise InvalidArgumentError(
                "variable %s has copies on several towers, of an earlier build with "
                "variable_device='replicated', which this build's updates would not reach: build "
                "this one with variable_device='replicated', too." % variable.op.name)


def _make_copies(variable, names, devices):
    value = _value_or_initial_value(variable)
    copies = []
    for name, device in zip(names, devices):
        with tf.control_dependencies(None), tf.name_scope(None), only_device(device):
            # Trainable, for what asks a variable (custom gradients); but on no list of such.
            copy = tf.Variable(
                _any_value(variable), trainable=True, name=name,
                collections=[tf.GraphKeys.LOCAL_VARIABLES], dtype=variable.dtype.base_dtype,
                use_resource=variable.op.type == 'VarHandleOp', constraint=variable.constraint,
                validate_shape=variable.get_shape().is_fully_defined())
            compat.initialize_with(copy, value)
        listed = tf.get_default_graph().get_collection_ref(tf.GraphKeys.TRAINABLE_VARIABLES)
        listed[:] = [each for each in listed if each is not copy]
        if copy.op.name != name:
            raise NameScopeError('the graph has another operation %r, which is to be the name of a '
                                 'copy of variable %s: rename that one.'
                                 % (name, variable.op.name))
        copies.append(copy)
    return copies


def _any_value(variable):
    """A value of the right shape to create a replica with; `initialize_with` then exchanges it,
    so it is never computed."""
    if variable.get_shape().is_fully_defined():
        return tf.zeros(variable.get_shape(), variable.dtype.base_dtype)
    return variable.initial_value


def _value_or_initial_value(variable):
    """What a variable holds, or, before it is initialized, what it will be: a tensor.

    So the copies may be initialized with the model's variables in one run, after a restore, or
    later. Only a session in which everything is initialized already must run the two initializers
    one after the other: in one run, the copies might read what the variable held before. As
    `Variable.initialized_value`, which TF 2 no longer has for resource variables, in fewer
    operations.
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
    """A copy's gradient; a tensor of its own, so that it is seen who uses it: `replica_updates`."""
    gradient = every[tower]
    if gradient is not every[0] or not isinstance(gradient, (tf.Tensor, tf.IndexedSlices)):
        return gradient
    with tf.name_scope('replicas/'), only_device(device):
        if isinstance(gradient, tf.Tensor):
            return tf.identity(gradient)
        return tf.IndexedSlices(tf.identity(gradient.values), gradient.indices,
                                gradient.dense_shape)


def _without_repeated_rows(slices):
    """The same gradient with each row once, so that no copy adds them up in another order."""
    with tf.name_scope('replicas/'), only_device(slices.values.device or None):
        return each_row_once(slices)
