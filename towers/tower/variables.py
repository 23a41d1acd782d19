"""One set of variables for all towers, each pinned to its device, whichever call creates it.

`tf.get_variable` shares by name: the later towers run under `reuse=True`. Code that creates its
variables directly (`tf.Variable`, Keras layers) knows no reuse: there the later towers get the
first tower's variables in the order in which they were created. `tf.variable_creator_scope` sees
every creation of either kind, so variables are pinned to their devices there.
"""

import collections
import contextlib
import re

import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import SharedVariableError
from towers.graph import graph_walk
from towers.graph.variable_access import VARIABLE_OPS, variables_read
from towers.tower.one_device_names import ModelsNames, names_of, of_the_program

DirectVariable = collections.namedtuple('DirectVariable', 'requested_name variable')
"""A variable that was not made by `get_variable`, and the name that was asked for."""

_IN_A_CALL = ('towers_shared_variables',)
"""A key that is no string, like the keys of TF's own stores, so that no meta graph holds it."""


class SharedVariables:
    """Shares and pins the variables of a model function that is called once per tower.

    Attributes:
      created: variables that the first tower made, in order.
      direct: `DirectVariable`s of the first tower, in order of creation, with those that it got
        from an earlier build.
      owned: names of the operations that are parts of the variables: initial values, initializers,
        reads.
      joined: set of `(key, id of a variable)`: the collections that variables joined as they were
        made.
    """

    def __init__(self, placement, scope, reuse=None, earlier=(), replicas=None, on_creation=None):
        """
        Args:
          placement: a `Placement`, which names the device of each new variable.
          scope: name of the variable scope to build under, or None for the caller's scope.
          reuse: for the first tower: None, True or `tf.AUTO_REUSE`, as in `tf.variable_scope`.
          earlier: `DirectVariable`s of an earlier build, which the first tower gets.
          replicas: `Replicas`, which the later towers get; None where all share one set.
          on_creation: context manager without arguments, entered around each `get_variable` of the
            first tower; or None.
        """
        self.created = []
        self.direct = []
        self.owned = set()
        self.joined = set()
        self._placement = placement
        self._scope = scope
        self._reuse = reuse
        self._replicas = replicas
        self._on_creation = on_creation
        self._graph = tf.get_default_graph()
        self._tower = 0
        local = {variable.op.name for variable in tf.local_variables()}
        # Counters of tf.metrics are the earlier build's own: a new build counts anew.
        self._earlier = [each for each in earlier if each.variable.op.name not in local]
        self._pending = []  # those of the first tower that this one has not asked for yet
        self._get_variable_calls = []
        self._local = []  # names of the first tower's local variables, by get_variable
        self._asked = set()  # those of them that this tower has asked for
        self._root = self._outer = self._base = ''
        self._names = None
        self._opened = {}  # variable scopes that the first tower has opened, and how often
        self._before = of_the_program(self._graph)
        self._reuses = False  # whether the scope that this tower is in was entered with reuse

    @contextlib.contextmanager
    def tower(self, index, root, outer):
        """The scope in which tower `index` calls the model function.

        Args:
          index: the tower's number; 0 makes the variables, the others share them.
          root: the name scope of the tower's operations, such as `'tower_1/'`.
          outer: the name scope around all towers, `''` or such as `'train/'`.

        Raises:
          SharedVariableError: at the end of the block, when the tower left out a variable of the
            first's; inside it, at the call that cannot be shared.
        """
        self._tower, self._root, self._outer = index, root, outer
        self._names = ModelsNames(self._graph, root, outer, outer + self._scope_part(), self.owned)
        self._names.take(names_of(self._before, outer))
        self._pending = list(self.direct if index else self._earlier)
        self._asked = set()
        # Re-entering the scope anew for each tower restarts the counters of `default_name`s and
        # unnamed layers; one scope around all towers would go on with dense_1, dense_2, …
        reuse = True if index else self._reuse
        scope = self._scope if self._scope is not None else tf.get_variable_scope()
        with graph_walk.Recording(tf.get_default_graph()) as made, \
                tf.variable_scope(scope, reuse=reuse, custom_getter=self._getter,
                                  auxiliary_name_scope=False) as within, \
                tf.variable_creator_scope(self._creator), self._in_a_call():
            self._base = within.name + '/' if within.name else ''
            self._reuses = within.reuse is True
            try:
                yield
                if not index:
                    self._opened = compat.opened_scopes(self._graph)
            except ValueError as error:
                if self._replicas is None or 'Unsuccessful at finding variable' not in str(error):
                    raise
                raise SharedVariableError(
                    "VariablePlacement('replicated') gives tower %d replicas of the variables, and "
                    'a function with a gradient of its own (tf.custom_gradient, tf.recompute_grad) '
                    'uses one: TensorFlow looks for such variables among the global ones, where '
                    'replicas are not. Pass another VariablePlacement, or give the function the '
                    "variable's value as an argument." % index) from error
        if index and self._pending:
            self._check_left_out(made.operations)

    def number_slots_on(self):
        """Continues the numbers of slots after those of the model function's own optimizer.

        So it is on one device; here the scopes of the first tower were reset for the other towers.
        """
        variables = tuple(variable.op.name + '/' for variable in tf.global_variables())
        compat.note_opened_scopes(self._graph, {
            name: count for name, count in self._opened.items() if name.startswith(variables)})

    def _check_left_out(self, operations):
        # What the model function made in its first call and keeps (a Keras layer from around it, a
        # variable in a dictionary) is not asked for again, and is shared all the same.
        used = {variable.op.name for variable in variables_read(
            operations, self.owned, self.created)}
        left_out = [each for each in self._pending if each.variable.op.name not in used]
        if left_out:
            raise SharedVariableError(
                'tower %d used %d of the %d variables that the first tower made without '
                'get_variable; it left out %r. Make the same variables in every call of the model '
                'function, or make them with tf.get_variable.'
                % (self._tower, len(self.direct) - len(left_out), len(self.direct),
                   left_out[0].requested_name))

    @contextlib.contextmanager
    def _in_a_call(self):
        active = self._graph.get_collection_ref(_IN_A_CALL)
        active.append(self)
        try:
            yield
        finally:
            active.pop()

    def _getter(self, getter, name, *args, **kwargs):
        """Notes that `get_variable` is creating, and translates what TF raises."""
        active = self._graph.get_collection(_IN_A_CALL)
        if not active:
            return getter(name, *args, **kwargs)
        if active[-1] is not self:  # a template has kept the scope of an earlier build
            return active[-1]._getter(getter, name, *args, **kwargs)
        name = self._models_own(name)
        if self._tower and tf.GraphKeys.LOCAL_VARIABLES in (kwargs.get('collections') or ()):
            name = self._local_of_first_tower(name)
        if self._tower and isinstance(kwargs.get('initializer'), tf.Tensor):
            # To make a variable, TF takes the dtype of its initial value; to find one, the default.
            kwargs['dtype'] = kwargs['initializer'].dtype.base_dtype
        self._get_variable_calls.append(name)
        try:
            if self._on_creation is None or self._tower:
                return self._for_tower(getter(name, *args, **kwargs))
            with self._on_creation():
                return getter(name, *args, **kwargs)
        except ValueError as error:
            explanation = self._explain(name, str(error).split('\n', 1)[0])
            if isinstance(error, SharedVariableError) or explanation is None:
                raise
            raise SharedVariableError(explanation) from error
        finally:
            self._get_variable_calls.pop()

    def _models_own(self, name):
        """The name without the tower's scope, see `ModelsNames`."""
        if self._replicas is not None:
            name = self._replicas.name_of_original(name)
        if not name.startswith(self._base):
            return self._names.without_tower(name)
        return self._base + self._names.without_tower(name[len(self._base):])

    def _local_of_first_tower(self, name):
        """The first tower's name for a local variable that may be named after its tower or call.

        The tower gets the variable of that name, or its own one in its place, see `local_state`.
        """
        known = [name for name in self._local if name not in self._asked]
        if name not in self._local:
            alike = [each for each in known
                     if re.sub(r'\d+', '0', each) == re.sub(r'\d+', '0', name)]
            name = alike[0] if alike else name
        self._asked.add(name)
        return name

    def _for_tower(self, variable):
        """The variable that the tower reads for a shared one: its replica where there is one."""
        return variable if self._replicas is None else self._replicas.of_part(
            variable, self._tower)

    def _explain(self, name, first_line):
        """The text of an error for TF's error at a `get_variable`; None if not about sharing."""
        if 'already exists' in first_line and not self._tower:
            if any(variable.op.name == name or variable.op.name.startswith(name + '/part_')
                   for variable in self.created):
                return ('variable %r is made twice in one call of the model function: where both '
                        'are to be one, use tf.variable_scope(..., reuse=tf.AUTO_REUSE) inside the '
                        'model function; else give it another name.' % name)
            return ('variable %r exists already in this graph: pass reuse=True (or '
                    'tf.AUTO_REUSE) to share it with the towers, or variable_scope=... for a '
                    'second set.' % name)
        if 'does not exist' in first_line and not self._tower and self._reuses:
            return ('variable %r does not exist in this graph, and reuse is on, in build_towers or '
                    'in the variable scope around it: it shares variables that are there already. '
                    'Leave it out to make new ones, pass tf.AUTO_REUSE to make those that are '
                    'missing, or make the model that it is to share first, in this graph.' % name)
        if 'does not exist' in first_line and self._tower:
            return ('variable %r of tower %d does not exist in the first tower: the model '
                    'function has to make the same names in every call; look for a name that '
                    'counts calls, or a branch that depends on the call.' % (name, self._tower))
        if not self._tower and 'Trying to ' not in first_line:
            return None  # 'Trying to share variable w, but specified shape (3,) and found ...'
        return ('variable %r of tower %d cannot be shared: %s. Give it the same shape, dtype and '
                'partitions %s.' % (name, self._tower, first_line.rstrip('.'),
                                    'in every call of the model function' if self._tower else
                                    'as the variable that reuse= found'))

    def _creator(self, next_creator, **kwargs):
        if not self._graph.get_collection(_IN_A_CALL):
            return next_creator(**kwargs)
        if self._get_variable_calls:
            if self._tower:
                raise SharedVariableError(
                    'variable %r is new in tower %d, the first tower has none of that name: the '
                    'model function has to make the same names in every call; look for a name '
                    'that counts calls, or a scope with reuse=tf.AUTO_REUSE under a name of its '
                    'own.' % (self._get_variable_calls[-1], self._tower))
            variable = self._create(next_creator, kwargs)
            if tf.GraphKeys.LOCAL_VARIABLES in (kwargs.get('collections') or ()):
                self._local.append(variable.op.name)
            return variable
        requested = self._requested_name(kwargs)
        is_local = tf.GraphKeys.LOCAL_VARIABLES in (kwargs.get('collections') or ())
        if self._tower or self._earlier and not is_local:
            self._names.numbered(kwargs.get('name') or 'Variable')
            return self._hand_over(requested, kwargs)
        # The name scope of the moment without the tower's part gives the model's own name.
        kwargs['name'] = self._names.without_tower(self._names.numbered(
            kwargs.get('name') or 'Variable'))
        with tf.name_scope(self._model_scope()):
            variable = self._create(next_creator, kwargs)
        self.direct.append(DirectVariable(requested, variable))
        return variable

    def _create(self, next_creator, kwargs):
        if tf.GraphKeys.LOCAL_VARIABLES in (kwargs.get('collections') or ()):
            # Counters of tf.metrics are shared, so towers add to them at the same time: the
            # updates of resource variables are atomic, those of reference variables are not.
            kwargs['use_resource'] = True
        with graph_walk.Recording(tf.get_default_graph()) as made, _away_from_operations(), \
                self._placement.scope(_is_trainable(kwargs)):
            variable = next_creator(**kwargs)
        self.owned.update(op.name for op in made.operations)
        for key in self._graph.get_all_collection_keys():
            if any(variable is last for last in self._graph.get_collection_ref(key)[-1:]):
                self.joined.add((key, id(variable)))
        self._placement.note(variable)
        self.created.append(variable)
        return variable

    def _hand_over(self, requested, kwargs):
        first_tower = 'the first tower' if self._tower else 'the earlier build'
        total = len(self.direct if self._tower else self._earlier)
        if not self._pending:
            raise SharedVariableError(
                'tower %d makes variable %r without get_variable, beyond the %d that %s made so: '
                'make the same variables in every call of the model function, or make them with '
                'tf.get_variable.' % (self._tower, requested, total, first_tower))
        first = self._first_that_agrees(requested)
        given = 'tower %d asks for %r as its variable number %d made without get_variable' % (
            self._tower, requested, total - len(self._pending) + 1)
        fix = ('Make the same variables in the same order in every call of the model function, or '
               'make them with tf.get_variable.')
        if first is None:
            raise SharedVariableError('%s; %s made %r there. %s' % (
                given, first_tower, self._pending[0].requested_name, fix))
        shape, dtype = _wanted_shape_and_dtype(kwargs, first.variable)
        if not shape.is_compatible_with(first.variable.get_shape()):
            raise SharedVariableError('%s of shape %s; %s made it of shape %s. %s' % (
                given, shape, first_tower, first.variable.get_shape(), fix))
        if dtype != first.variable.dtype.base_dtype:
            raise SharedVariableError('%s of dtype %s; %s made it of dtype %s. %s' % (
                given, dtype.name, first_tower, first.variable.dtype.base_dtype.name, fix))
        self._pending.remove(first)
        if not self._tower:
            self.direct.append(first)
        return self._for_tower(first.variable)

    def _first_that_agrees(self, requested):
        """The next variable of that name; the model function may have kept the ones before."""
        for each in self._pending:
            if each.requested_name == requested:
                return each
        known = self.direct if self._tower else self._earlier
        if any(requested == each.requested_name for each in known):
            return None  # the first tower has it, and it was asked for already
        # Keras numbers its layers on: what is dense_1 in the first tower is dense_3 in the next.
        for each in self._pending:
            if without_numbers(each.requested_name) == without_numbers(requested):
                return each
        return None

    def _model_scope(self):
        """The current name scope without the tower's part, ending in '/' (or '' at the top)."""
        current = (tf.get_default_graph().get_name_scope() or '') + '/'
        if current.startswith(self._root):
            current = self._outer + self._scope_part() + current[len(self._root):]
        return '' if current == '/' else current

    def _scope_part(self):
        return self._scope + '/' if isinstance(self._scope, str) and self._scope else ''

    def _requested_name(self, kwargs):
        return self._model_scope() + self._names.without_tower(kwargs.get('name') or 'Variable')


def _away_from_operations():
    """A scope without `tf.colocate_with(activation)`, which would put a variable onto one tower.

    `tf.colocate_with(variable)` stays: slots and averages are on their variable's device.
    """
    graph = tf.get_default_graph()
    if all(op.type in VARIABLE_OPS for op in compat.colocated_with(graph)):
        return contextlib.nullcontext()
    return graph.colocate_with(None, ignore_existing=True)


def _is_trainable(kwargs):
    """Whether what a creator is asked for will be trainable, as TF itself decides it."""
    trainable = kwargs.get('trainable')
    if trainable is None:
        return kwargs.get('synchronization') != tf.VariableSynchronization.ON_READ
    return bool(trainable)


@contextlib.contextmanager
def outside_of_calls(graph):
    """The scope, in a tower's call, of variables that are not the model's: an optimizer's slots."""
    calls = graph.get_collection_ref(_IN_A_CALL)
    kept = list(calls)
    calls[:] = []
    try:
        with graph_walk.Recording(graph) as made:
            yield
    finally:
        calls[:] = kept
    for call in kept:
        call.owned.update(op.name for op in made.operations)


def slot_creator(placement, variables, created):
    """A creator for `tf.variable_creator_scope` around `apply_gradients`.

    Optimizers of TF colocate their slots with the variable. Those that make them with
    `get_variable` under the variable's name (BERT's: `<variable>/adam_m`) do not say where, and
    are put on the variable's device here.

    Args:
      placement: the `Placement` of the model's variables.
      variables: the model's variables.
      created: list that each slot is appended to.
    """
    by_name = {variable.op.name: variable for variable in variables}

    def create(next_creator, **kwargs):
        owner = owner_by_name(kwargs.get('name') or '', by_name)
        with placement.scope_of(owner) if owner is not None else contextlib.nullcontext():
            slot = next_creator(**kwargs)
        created.append(slot)
        return slot
    return create


def owner_by_name(name, by_name):
    """The variable whose name a slot's name extends (`dense/kernel` for `dense/kernel/Adam`).

    Args:
      name: the slot's name.
      by_name: dict from operation names of variables to the variables.

    Returns:
      The variable with the longest such name, or None. Scopes around `apply_gradients` may stand
      before it.
    """
    parts = name.split('/')
    for start in range(len(parts) - 1):
        for end in range(len(parts) - 1, start, -1):
            owner = by_name.get('/'.join(parts[start:end]))
            if owner is not None:
                return owner
    return None


def _wanted_shape_and_dtype(kwargs, first):
    """The shape and dtype that a direct creation asks for; its initial value never runs."""
    initial = kwargs.get('initial_value')
    dtype, shape = kwargs.get('dtype'), kwargs.get('shape')
    if callable(initial) and (shape is None or dtype is None):
        with tf.control_dependencies(None), tf.device(None), tf.device(first.device):
            initial = initial()
    if not callable(initial) and initial is not None:
        value = tf.convert_to_tensor(initial, dtype=dtype and tf.as_dtype(dtype).base_dtype)
        return value.shape if shape is None else tf.TensorShape(shape), value.dtype.base_dtype
    return tf.TensorShape(shape), tf.as_dtype(dtype or tf.float32).base_dtype


def without_numbers(name):
    """A variable's name without the numbers that make its parts unique: `a_1/b_2` as `a/b`."""
    return re.sub(r'(_\d+)+(?=/|$)', '', name)
