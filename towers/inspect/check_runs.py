"""The run of `check_towers` on towers; and the functions that the run on one device also uses.

Its test is tests/inspect/test_check.py.
"""

import typing

import tensorflow.compat.v1 as tf

from towers.api.build import build_towers
from towers.api.built import BuiltTowers
from towers.errors import InputError, failing_on
from towers.graph.graph_walk import operation_names
from towers.inspect.check_finished import FinishedProgram
from towers.inspect.comparison import Numbers
from towers.model.objectives import flat
from towers.placement.session_config import session_config
from towers.variables.new_variables import without_numbers

InitialValues = typing.List[typing.Tuple[str, typing.Any]]
"""Names of variables, with their values before the first step."""


class Program(typing.NamedTuple):
    """What is trained on both sides: arguments of `check_towers`, under their names.

    Attributes:
      model_fn: a function from a batch to its loss; or a `FinishedProgram`.
      inputs: the sample batch.
      make_optimizer: a function that makes a new optimizer.
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


class TrainedTowers(typing.NamedTuple):
    """The result of the towers' run.

    Attributes:
      numbers: the numbers of the run.
      proof: the plan's line `one device`; None if the plan has none.
    """

    numbers: Numbers
    proof: typing.Optional[str]


# ---- towers --------------------------------------------------------------------------------------

def run_towers(program: Program, devices: typing.Sequence[str], initial: InitialValues,
               same_shards: bool) -> TrainedTowers:
    """Trains on towers.

    Args:
      program: what is trained.
      devices: the device of each tower.
      initial: the values with which training begins.
      same_shards: whether all parts of the batch have the same examples.
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
        sum_of_losses = sum_of_tower_losses(built)
        with failing_on('on the %d towers, and not on one device,' % len(built.devices)), \
                tf.Session(config=session_config(devices)) as session:
            initialize(session)
            names = _names_on_one_device(tf.global_variables(), initial)
            assignments = assignments_of(dict(initial), names)
            session.run(assignments.operations, assignments.fed)
            if built.replicas is not None:
                session.run(built.replicas.refresh())
            numbers = train(session, built.loss, built.gradients, built.train_op, program.steps,
                            names, sum_of_losses)
        if not same_shards:  # else a shard gives the same value as the batch
            numbers = numbers._replace(initial_values=_initial_values_of_shard(built, names))
        return TrainedTowers(numbers, built.plan.line('one device'))


def _initial_values_of_shard(built: BuiltTowers,
                             names: typing.Dict[str, str]) -> typing.Dict[str, None]:
    """{name of a variable on one device: None}, of the variables whose initial value is computed
    from the batch: with towers, from tower 0's shard.

    `run_towers` has set all variables to the values of one device, so that the values after the
    steps do not show that the initial values differ. The towers' numbers have these names, and the
    numbers of one device do not: the comparison reports a value that one side lacks as a
    difference.

    Args:
      built: the towers.
      names: {name of a variable of the towers: its name on one device}.
    """
    return dict.fromkeys(names[name] for name in built.plan.initial_of_first)


def sum_of_tower_losses(built: BuiltTowers) -> tf.Tensor:
    """The sum of the losses of all parts of the batch, as the model function has returned them."""
    losses = []
    for tower in built.towers:
        losses += flat(tower.loss)
    return tf.add_n(losses)


class Assignments(typing.NamedTuple):
    """Operations that set the variables of a graph.

    Attributes:
      operations: an assignment for each variable.
      fed: the values, by the placeholders that the operations take them from.
    """

    operations: typing.List[tf.Operation]
    fed: typing.Dict[tf.Tensor, typing.Any]


def assignments_of(values: typing.Dict[str, typing.Any],
                   names: typing.Dict[str, str]) -> Assignments:
    """Makes operations that set the variables of the graph.

    Args:
      values: the values by the variables' names on one device.
      names: {name of a variable: its name on one device}.
    """
    operations = []
    fed = {}
    for variable in tf.global_variables():
        name = names[variable.op.name]
        if name not in values:
            continue  # one device has no such variable: the comparison reports it
        value = tf.placeholder(variable.dtype.base_dtype)
        # A variable without a static shape may get a value of another shape than it has now.
        operations.append(tf.assign(variable, value, validate_shape=False).op)
        fed[value] = values[name]
    return Assignments(operations, fed)


def _names_on_one_device(variables: typing.Iterable[tf.Variable], initial: InitialValues
                         ) -> typing.Dict[str, str]:
    """{name of a variable of the towers: its name on one device}.

    The names are the same, except for layers of Keras 3 to which the program gives no names: Keras
    numbers such layers on from graph to graph. Variables whose names differ only in numbers are
    matched by their order.

    Args:
      variables: the variables of the towers.
      initial: the variables of one device, with their values.
    """
    names = [variable.op.name for variable in variables]
    names_on_one = [name for name, _ in initial]
    have_same_names = set(names) == set(names_on_one)
    differ_in_numbers_only = (
        list(map(without_numbers, names)) == list(map(without_numbers, names_on_one)))
    if not have_same_names and differ_in_numbers_only:
        return dict(zip(names, names_on_one))
    return dict(zip(names, names))


# ---- both ----------------------------------------------------------------------------------------

def constants(inputs: typing.Any) -> typing.Any:
    """The inputs, a nest of arrays and `tf.SparseTensorValue`s, as constants of the graph."""
    return map_arrays(_constant, inputs)


def _constant(leaf: typing.Any) -> typing.Any:
    """An array as a tensor, or a `tf.SparseTensorValue` as a sparse tensor. Raises `InputError` for
    anything else."""
    if isinstance(leaf, tf.SparseTensorValue):
        return tf.SparseTensor.from_value(leaf)
    try:
        return tf.constant(leaf)
    except (TypeError, ValueError):
        raise InputError('inputs hold %.80r of type %s: expected arrays [n, …].' % (
            leaf, type(leaf).__name__)) from None


def initialize(session: tf.Session) -> None:
    """Runs the initializers of variables and tables."""
    session.run([tf.global_variables_initializer(), tf.local_variables_initializer(),
                 tf.tables_initializer()])


def train(session: tf.Session, loss: typing.Any, pairs: typing.Any, train_op: tf.Operation,
          steps: int, names: typing.Dict[str, str],
          sum_of_losses: typing.Optional[tf.Tensor] = None) -> Numbers:
    """Runs some steps, and returns their numbers.

    Args:
      session: the session, in which all variables have the values to begin with.
      loss: the loss; where there are several, a dict by name.
      pairs: list of `(gradient, variable)` pairs; where there are several losses, a dict of such
        lists. A gradient of None is left out.
      train_op: the operation of a step.
      steps: the number of steps.
      names: {name of a variable: its name on one device}.
      sum_of_losses: the sum of the towers' losses; None for one device.
    """
    fetches: typing.Dict[str, typing.Any] = {'losses': dict(_labelled(loss)), 'train_op': train_op}
    # Gradients are fetched with the first step: to run them alone would update counters and
    # averages once more.
    fetches_of_first_step = dict(fetches, gradients=_gradients_by_name(pairs, names))
    if sum_of_losses is not None:
        fetches_of_first_step['sum_of_losses'] = sum_of_losses
    first_step = session.run(fetches_of_first_step)
    losses = _named_losses(1, first_step['losses'])
    for step in range(2, steps + 1):
        losses.update(_named_losses(step, session.run(fetches)['losses']))
    variables = tf.global_variables()
    numbers = Numbers(losses, first_step['gradients'], variables={}, slots={},
                      sum_of_losses=first_step.get('sum_of_losses', 0.))
    return _with_variables(numbers, variables, session.run(variables), names)


def _named_losses(step: int, losses: typing.Dict[str, typing.Any]
                  ) -> typing.Dict[str, typing.Any]:
    """The losses of a step by their names in `Numbers`: `'of step 2'`, `'of step 2 of generator'`.

    Args:
      step: the number of the step.
      losses: its losses by their labels, see `_labelled`.
    """
    named = {}
    for label, value in losses.items():
        name = 'of step %d' % step
        if label:
            name += ' ' + label
        named[name] = value
    return named


def _gradients_by_name(pairs: typing.Any, names: typing.Dict[str, str]) -> dict:
    """{name of a variable on one device: the gradient, dense}; with several losses the keys begin
    with the loss: `'of generator: w'`. The arguments are those of `train`."""
    gradients = {}
    for label, pairs_of_loss in _labelled(pairs):
        prefix = label + ': ' if label else ''
        for gradient, variable in pairs_of_loss:
            if gradient is not None:
                name = prefix + names[variable.op.name]
                gradients[name] = tf.convert_to_tensor(gradient)
    return gradients


def _with_variables(numbers: Numbers, variables: typing.Sequence[tf.Variable],
                    values: typing.Sequence, names: typing.Dict[str, str]) -> Numbers:
    """The numbers, completed by the values of variables and of slots.

    Args:
      numbers: losses and gradients.
      variables: the variables of the graph.
      values: the value of each variable.
      names: {name of a variable: its name on one device}.
    """
    trainable = operation_names(tf.trainable_variables())
    values_of_variables = {}
    values_of_slots = {}
    for variable, value in zip(variables, values):
        name = variable.op.name
        if _is_slot(name, trainable):
            values_of_slots[names[name]] = value
        else:
            values_of_variables[names[name]] = value
    return numbers._replace(variables=values_of_variables, slots=values_of_slots)


def _is_slot(name: str, trainable: typing.Iterable[str]) -> bool:
    """Whether a variable is an optimizer's, by its name: the name is below the name of a trainable
    variable, as `w/Momentum`; or it is a name such as `beta1_power`, a variable that Adam has once
    for all variables.

    Args:
      name: the name of the variable.
      trainable: the names of the trainable variables.
    """
    if any(name.startswith(owner + '/') for owner in trainable):
        return True
    return '/' not in name and name.endswith('_power')


def _labelled(shaped: typing.Any) -> typing.List[typing.Tuple[str, typing.Any]]:
    """The value of each loss with a label: `[(label, value)]`.

    The label is `'of generator'` and the like where there are several losses, else `''`.
    """
    if not isinstance(shaped, dict):
        return [('', shaped)]
    return [('of %s' % name, value) for name, value in shaped.items()]


def map_arrays(function: typing.Callable, inputs: typing.Any) -> typing.Any:
    """Applies a function to each array of a nest, as `tf.nest.map_structure` does.

    A `tf.SparseTensorValue` counts as an array here, whereas `tf.nest` takes it apart.
    """
    if inputs is None:  # an input without an array
        return None
    if isinstance(inputs, tf.SparseTensorValue) or not tf.nest.is_nested(inputs):
        return function(inputs)
    if isinstance(inputs, dict):
        return {key: map_arrays(function, inputs[key]) for key in inputs}
    mapped = [map_arrays(function, entry) for entry in inputs]
    if hasattr(inputs, '_fields'):  # a namedtuple takes its entries one by one
        return type(inputs)(*mapped)
    return type(inputs)(mapped)
