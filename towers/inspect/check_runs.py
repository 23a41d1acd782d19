"""The two runs that `check_towers` compares: a plain TF1 program on one device, and towers."""

import typing

import tensorflow.compat.v1 as tf

from towers.api.build import build_towers
from towers.api.options import Objective, checked_objectives
from towers.errors import GradientError, InputError, InvalidArgumentError, failing_on
from towers.gradients.gradient_pairs import tensors_of, times
from towers.gradients.optimizer_methods import OwnMinimize, minimized
from towers.graph import graph_walk
from towers.graph.graph_walk import is_computed_from, operation_names
from towers.graph.variable_access import Writes
from towers.inspect.check_finished import FinishedProgram
from towers.inspect.check_report import Numbers, Traits
from towers.model.keras_calls import record_keras_calls
from towers.model.losses import registered_losses
from towers.model.objectives import Objectives, all_pairs, checked_variables, flat
from towers.model.outputs import ModelOutput, call_model_fn, to_model_output
from towers.optimizers import has_own_minimize
from towers.placement.devices import session_config
from towers.reduce.combination import Pairs
from towers.reduce.update import call_transform, free_initial_values
from towers.variables.new_variables import without_numbers

# From the most digits to the fewest.
FLOATS = ('float64', 'float32', 'float16', 'bfloat16')

InitialValues = typing.List[typing.Tuple[str, typing.Any]]
"""Names of variables, with their values before the first step."""


class Program(typing.NamedTuple):
    """What is trained on both sides; the arguments of `check_towers` of these names.

    Attributes:
      model_fn: from a batch to its loss; or a `FinishedProgram`.
      inputs: the sample batch.
      make_optimizer: makes the optimizer anew.
      steps: how many steps are run.
      reduction: how the towers' gradients are combined, `'sum'` or `'mean'`.
      options: more arguments of `build_towers`, by name.
    """

    model_fn: typing.Any
    inputs: typing.Any
    make_optimizer: typing.Callable
    steps: int
    reduction: str
    options: typing.Dict[str, typing.Any]


class RunOfOneDevice(typing.NamedTuple):
    """The run of a plain program.

    Attributes:
      numbers: the values that its steps computed.
      initial: all variables before step 1.
      traits: what is to be known of the model.
    """

    numbers: Numbers
    initial: InitialValues
    traits: Traits


# ---- one device ----------------------------------------------------------------------------------

def run_one_device(program: Program, seed: int, factor: int) -> RunOfOneDevice:
    """Trains on one device without this package's towers.

    Args:
      program: what is trained.
      seed: graph-level seed of the initial weights.
      factor: by which the loss is multiplied: 1, or N for the sum over N towers.
    """
    with tf.Graph().as_default():
        tf.set_random_seed(seed)
        if isinstance(program.model_fn, FinishedProgram):
            batch = [program.model_fn.on_one_device(program.inputs)]
            program = program._replace(model_fn=output_of)
        else:
            batch = constants(program.inputs)
        objectives = _objectives(program)
        global_step = tf.train.get_global_step()
        loss, updates = _loss_on_one_device(program, batch, objectives)
        pairs = objectives.shaped([
            _pairs_on_one_device(objective, objectives.of(objective, loss), factor)
            for objective in objectives])
        train_op = _step_on_one_device(objectives, loss, pairs, updates, global_step, factor)
        if global_step is not None:
            train_op = _counted(train_op, global_step)
        traits = _traits(loss, updates)
        with failing_on('on one device'), tf.Session(config=session_config(1)) as session:
            _initialize(session)
            variables = tf.global_variables()
            names = [variable.op.name for variable in variables]
            initial = list(zip(names, session.run(variables)))
            numbers = train(session, loss, pairs, train_op, program.steps, dict(zip(names, names)))
            return RunOfOneDevice(numbers, initial, traits)


def output_of(output: ModelOutput) -> ModelOutput:
    """Stands for a model function, where the model has been made already."""
    return output


def _objectives(program: Program) -> Objectives:
    """The objectives of a program, which have to be the same in two graphs."""
    objectives = checked_objectives(program.make_optimizer())
    for objective in objectives:
        if objective.var_list is not None and not callable(objective.var_list):
            raise InvalidArgumentError('make_optimizer returned an Objective with a list as its '
                                       'var_list: expected a function from the trainable variables '
                                       'to some, since there are two graphs.')
    if not objectives:
        raise InvalidArgumentError('make_optimizer returned None: expected an optimizer, or a '
                                   'dict of optimizers by the name of their loss.')
    return objectives


def _loss_on_one_device(program: Program, batch: typing.Any, objectives: Objectives
                        ) -> typing.Tuple[typing.Any, list]:
    """The loss of the whole batch, a dict of several; and the updates that run with a step.

    Args:
      program: what is trained.
      batch: tensors, the argument of its model function.
      objectives: for each loss its optimizer, and what it trains.
    """
    with record_keras_calls() as keras, tf.variable_scope(
            tf.get_variable_scope(), auxiliary_name_scope=False,
            custom_getter=_registering_tensors):
        output = to_model_output(call_model_fn(program.model_fn, batch), True, objectives.names)
    loss = output.loss
    if program.options.get('regularization') == 'add':
        if objectives.names is not None:
            raise InvalidArgumentError("regularization='add', and there are several losses.")
        loss = _with_registered_losses(loss, keras)
    updates: list = []
    if program.options.get('update_ops') != 'none':
        updates += tf.get_collection(tf.GraphKeys.UPDATE_OPS) + keras.updates()
        updates += output.updates or ()
    return loss, updates


def _with_registered_losses(loss: tf.Tensor, keras: typing.Any) -> tf.Tensor:
    """The loss plus the registered losses that are not in it; `keras` has those of its layers."""
    registered = tf.losses.get_regularization_losses()
    of_weights = [each for each in keras.weight_losses()
                  if not is_computed_from(registered + [loss], each)]
    behind_loss = graph_walk.ancestors([loss])
    terms = [loss]
    for each in registered + of_weights + keras.activity_losses():
        if each.op.name not in behind_loss:
            terms.append(tf.cast(each, loss.dtype))
    return tf.add_n(terms)


def _registering_tensors(getter: typing.Callable, *args: typing.Any, **kwargs: typing.Any
                         ) -> tf.Variable:
    """A custom getter that makes TF 2 register a tensor for a regularizer, as TF 1 does: TF 2
    registers a function, which makes new operations at each use, and no loss has these in it.

    It calls `getter` with `args` and `kwargs`.
    """
    variable = getter(*args, **kwargs)
    registered_losses()
    return variable


def _pairs_on_one_device(objective: Objective, loss: tf.Tensor, factor: int) -> Pairs:
    """The gradients of one loss times the factor, as its optimizer gets them."""
    trainable = tf.trainable_variables()
    if objective.var_list is not None:
        trainable = checked_variables(objective.var_list(trainable), 'var_list')
    if not trainable:
        raise GradientError('the model function makes no trainable variable, or var_list leaves '
                            'none: there is no training to compare.')
    optimizer = objective.optimizer
    if has_own_minimize(optimizer):  # which calls its compute_gradients itself
        optimizer = tf.train.GradientDescentOptimizer(1.)
    pairs = list(optimizer.compute_gradients(loss, var_list=trainable))
    if all(gradient is None for gradient, _ in pairs):
        of_loss = '' if objective.name is None else ' for %r' % objective.name
        raise GradientError(
            'the loss%s depends on none of the %d trainable variables: there is no training to '
            'compare.' % (of_loss, len(trainable)))
    if factor != 1:  # also where the optimizer's own method has changed the gradients of the mean
        pairs = [(None if gradient is None else times(gradient, factor), variable)
                 for gradient, variable in pairs]
    return call_transform(objective.transform_gradients, pairs, name_of_loss=objective.name)


def _step_on_one_device(objectives: Objectives, loss: typing.Any, pairs: typing.Any, updates: list,
                        global_step: typing.Optional[tf.Variable], factor: int) -> typing.Any:
    """The operation of a step: the update by each loss, after the model's own updates.

    Args:
      objectives: for each loss its optimizer, and what it trains.
      loss: the loss; where losses have names, a dict of these.
      pairs: its `(gradient, variable)` pairs; where losses have names, a dict of these.
      updates: the model's own updates, such as batch norm's.
      global_step: for the last optimizer to count; or None.
      factor: by which the loss is multiplied.
    """
    graph = tf.get_default_graph()
    after = flat(loss) + updates
    # With several losses, every gradient is taken at the weights before the step; an own
    # `minimize` takes others than those that are compared.
    has_own = any(has_own_minimize(objective.optimizer) for objective in objectives)
    if objectives.names is not None or has_own:
        after = after + tensors_of(all_pairs(pairs))
    for objective in objectives:
        awaited_names = operation_names(tf.global_variables())
        is_last = objective is objectives[-1]
        with tf.control_dependencies(after), graph_walk.Recording(graph) as made:
            train_op = _applied_on_one_device(
                objective, objectives.of(objective, loss), objectives.of(objective, pairs),
                global_step if is_last else None, factor)
        new_variables = [variable for variable in tf.global_variables()
                         if variable.op.name not in awaited_names]
        free_initial_values(new_variables, made.operations, after)
        after = [train_op]
    return train_op


def _counted(train_op: typing.Any, global_step: tf.Variable) -> typing.Any:
    """A step that counts itself, as the caller of an optimizer that does not has it do."""
    writing = graph_walk.names_of(Writes(global_step.graph).to(global_step))
    if not writing.isdisjoint(graph_walk.names_of(graph_walk.step_operations([train_op]))):
        return train_op
    with tf.control_dependencies([train_op]):
        return tf.assign_add(global_step, 1).op


def _applied_on_one_device(objective: Objective, loss: tf.Tensor, pairs: Pairs,
                           global_step: typing.Optional[tf.Variable], factor: int) -> typing.Any:
    """The update by one loss.

    Args:
      objective: the loss's optimizer, and what it trains.
      loss: the loss of the batch.
      pairs: the gradients of the loss times the factor, with their variables.
      global_step: for the optimizer to count; or None.
      factor: by which the loss is multiplied.
    """
    optimizer = objective.optimizer
    if not has_own_minimize(optimizer):
        return optimizer.apply_gradients(pairs, global_step=global_step)
    if objective.transform_gradients is not None or factor != 1:  # which come in between
        return OwnMinimize(optimizer, loss).apply_gradients(pairs, global_step)
    return minimized(optimizer, loss, global_step, [variable for _, variable in pairs])


def _traits(loss: typing.Any, updates: list) -> Traits:
    """The traits of a model by its loss (or a dict of losses) and its updates."""
    graph = tf.get_default_graph()
    forward = [graph.get_operation_by_name(name) for name in graph_walk.ancestors(flat(loss))]
    coarsest = FLOATS[0]
    has_batch_norm = False
    for op in forward:
        has_batch_norm |= 'BatchNorm' in op.type or bool(updates) and op.type == 'Rsqrt'
        for output in op.outputs:
            # tf.losses, for one, computes in float32 whatever it is given.
            name = output.dtype.base_dtype.name
            if name in FLOATS:
                coarsest = max(coarsest, name, key=FLOATS.index)
    writes = Writes(graph)
    updated: typing.Set[str] = set()
    for op in graph_walk.step_operations(updates):
        updated.update(writes.of(op))
    random_types = {op.type for op in forward if graph_walk.is_random(op)}
    return Traits(coarsest, sorted(random_types), has_batch_norm, updated)


# ---- towers --------------------------------------------------------------------------------------

def run_towers(program: Program, devices: typing.Sequence[str], initial: InitialValues,
               same_shards: bool) -> typing.Tuple[Numbers, typing.Optional[str]]:
    """Trains on towers.

    Args:
      program: what is trained.
      devices: the device of each tower.
      initial: the values with which training begins.
      same_shards: whether all parts of the batch have the same examples.

    Returns:
      The numbers, and the plan's line about one device, or None.
    """
    with tf.Graph().as_default():
        model = program.model_fn
        if isinstance(model, FinishedProgram):
            model, batch = model.for_towers(program.inputs)
        else:
            batch = constants(program.inputs)
        optimizer = program.make_optimizer()
        built = build_towers(model, batch, optimizer, devices, program.reduction,
                             global_step=tf.train.get_global_step(), **program.options)
        # A hint at the cause of a difference, no part of the comparison.
        losses = []
        for tower in built.towers:
            losses += flat(tower.loss)
        sum_of_losses = tf.add_n(losses)
        with failing_on('on the %d towers, and not on one device,' % len(built.devices)), \
                tf.Session(config=session_config(devices)) as session:
            _initialize(session)
            names = _names_on_one_device(tf.global_variables(), initial)
            assignments, fed = assigned(dict(initial), names)
            session.run(assignments, fed)
            if built.replicas is not None:
                session.run(built.replicas.refresh())
            numbers = train(session, built.loss, built.gradients, built.train_op, program.steps,
                            names, sum_of_losses)
        if not same_shards:
            from_shard = [names[name] for name in built.plan.initial_of_first]
            numbers = numbers._replace(initial_values=dict.fromkeys(from_shard))
        return numbers, built.plan.line('one device')


def assigned(values: typing.Dict[str, typing.Any], names: typing.Dict[str, str]
             ) -> typing.Tuple[list, dict]:
    """Makes operations that give the graph's variables values.

    Args:
      values: by the names on one device.
      names: from the variables' names to these, where they differ.

    Returns:
      `(operations, what to feed to them)`.
    """
    operations = []
    fed = {}
    for variable in tf.global_variables():
        name = names.get(variable.op.name, variable.op.name)
        if name in values:
            value = tf.placeholder(variable.dtype.base_dtype)
            operations.append(tf.assign(variable, value, validate_shape=False).op)
            fed[value] = values[name]
    return operations, fed


def _names_on_one_device(variables: typing.Iterable[tf.Variable], initial: InitialValues
                         ) -> typing.Dict[str, str]:
    """From the names of the towers' variables to those on one device, which `initial` has: the
    same, but for layers that Keras 3 numbers on from graph to graph, which are matched by their
    order."""
    names = [variable.op.name for variable in variables]
    known = [name for name, _ in initial]
    are_alike = list(map(without_numbers, names)) == list(map(without_numbers, known))
    if set(names) != set(known) and are_alike:
        return dict(zip(names, known))
    return dict(zip(names, names))


# ---- both ----------------------------------------------------------------------------------------

def constants(inputs: typing.Any) -> typing.Any:
    """A nest of arrays and `tf.SparseTensorValue`s as tensors of the graph."""
    return map_leaves(_constant, inputs)


def _constant(leaf: typing.Any) -> typing.Any:
    """An array, or a sparse one, as a tensor; raises `InputError` for what is neither."""
    if isinstance(leaf, tf.SparseTensorValue):
        return tf.SparseTensor.from_value(leaf)
    try:
        return tf.constant(leaf)
    except (TypeError, ValueError):
        raise InputError('inputs hold %.80r of type %s: expected arrays [n, …].' % (
            leaf, type(leaf).__name__)) from None


def _initialize(session: tf.Session) -> None:
    """Gives variables and tables their initial values."""
    session.run([tf.global_variables_initializer(), tf.local_variables_initializer(),
                 tf.tables_initializer()])


def train(session: tf.Session, loss: typing.Any, pairs: typing.Any, train_op: tf.Operation,
          steps: int, names: typing.Dict[str, str],
          sum_of_losses: typing.Optional[tf.Tensor] = None) -> Numbers:
    """Runs some steps, and returns their numbers.

    Args:
      session: in which all variables have their first values.
      loss: shaped.
      pairs: of gradients and variables, shaped; those without a gradient do not count.
      train_op: the operation of a step.
      steps: how many.
      names: from the variables' names to those on one device.
      sum_of_losses: the sum of the towers' losses; or None.
    """
    gradients = {}
    for label, its_pairs in _labelled(pairs):
        for gradient, variable in its_pairs:
            if gradient is not None:
                gradients[label + names[variable.op.name]] = tf.convert_to_tensor(gradient)
    # With the step: another forward pass would write the model's counters and averages again.
    of_first_step: dict = {'gradients': gradients}
    if sum_of_losses is not None:
        of_first_step['sum'] = sum_of_losses
    losses = {}
    for step in range(1, steps + 1):
        values, _, fetched = session.run(
            [dict(_labelled(loss)), train_op, of_first_step if step == 1 else []])
        if step == 1:
            first = fetched
        for label, value in values.items():
            losses[('of step %d %s' % (step, label.rstrip(': '))).rstrip()] = value
    variables = tf.global_variables()
    numbers = Numbers(losses, first['gradients'], {}, {}, first.get('sum', 0.))
    return _with_variables(numbers, variables, session.run(variables), names)


def _with_variables(numbers: Numbers, variables: typing.Sequence[tf.Variable],
                    values: typing.Sequence, names: typing.Dict[str, str]) -> Numbers:
    """The numbers with the values of variables and of slots.

    Args:
      numbers: the others.
      variables: of the graph.
      values: of these.
      names: from their names to those on one device.
    """
    trainable = operation_names(tf.trainable_variables())
    found: dict = {True: {}, False: {}}
    for variable, value in zip(variables, values):
        name = variable.op.name
        belongs_to_one = any(name.startswith(other + '/') for other in trainable)
        is_power = '/' not in name and name.endswith('_power')  # Adam's, of beta
        found[belongs_to_one or is_power][names[name]] = value
    return numbers._replace(variables=found[False], slots=found[True])


def _labelled(shaped: typing.Any) -> typing.List[typing.Tuple[str, typing.Any]]:
    """`[(label, value)]` of a shaped value: of several losses `'of generator: '` and the like, else
    `''`."""
    if not isinstance(shaped, dict):
        return [('', shaped)]
    return [('of %s: ' % name, value) for name, value in shaped.items()]


def map_leaves(function: typing.Callable, inputs: typing.Any) -> typing.Any:
    """Maps a nest as `tf.nest.map_structure`, which would take a `tf.SparseTensorValue` apart."""
    if inputs is None:
        return None
    if isinstance(inputs, tf.SparseTensorValue) or not tf.nest.is_nested(inputs):
        return function(inputs)
    if isinstance(inputs, dict):
        return {key: map_leaves(function, inputs[key]) for key in inputs}
    mapped = [map_leaves(function, each) for each in inputs]
    return type(inputs)(*mapped) if hasattr(inputs, '_fields') else type(inputs)(mapped)
