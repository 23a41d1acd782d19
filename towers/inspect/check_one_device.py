"""The run of `check_towers` on one device: a plain TF1 program, without this package's towers.

Words of other modules used here: an `Objective` is the optimizer of one loss, with what it trains;
`Objectives.names` is None for one loss without a name; a *shaped* value is then one value, else a
dict by name, from which `entry_of` takes the value of one objective. An optimizer with a `minimize`
of its own (`has_own_minimize`) takes gradients in `minimize`, and not by `compute_gradients`.

Its test is tests/inspect/test_check.py.
"""

import contextlib
import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.api.options import Objective, checked_objectives
from towers.errors import GradientError, InvalidArgumentError, failing_on
from towers.gradients.gradient_pairs import multiplied, tensors_of
from towers.gradients.optimizer_methods import OwnMinimize, minimized
from towers.graph import graph_walk
from towers.graph.graph_walk import operation_names
from towers.graph.same_value import is_computed_from
from towers.graph.variable_access import Writes
from towers.inspect.check_finished import FinishedProgram
from towers.inspect.check_report import Traits
from towers.inspect.check_runs import InitialValues, Program, constants, initialize, train
from towers.inspect.comparison import Numbers
from towers.model.keras_calls import record_keras_calls
from towers.model.losses import registered_losses
from towers.model.objectives import Objectives, all_pairs, checked_variables, flat
from towers.model.outputs import ModelOutput, call_model_fn, to_model_output
from towers.optimizers import has_own_minimize
from towers.placement.session_config import session_config
from towers.reduce.combination import Pairs
from towers.reduce.update import call_transform, free_initial_values

# The floating types, from the most digits to the fewest.
FLOATS = ('float64', 'float32', 'float16', 'bfloat16')


class RunOfOneDevice(typing.NamedTuple):
    """The run of a plain program on one device.

    Attributes:
      numbers: the numbers of its steps.
      initial: the values of all variables before step 1.
      traits: facts about the model.
    """

    numbers: Numbers
    initial: InitialValues
    traits: Traits


def run_one_device(program: Program, seed: int, factor: int) -> RunOfOneDevice:
    """Trains on one device without this package's towers.

    Args:
      program: what is trained.
      seed: graph-level seed of the initial weights.
      factor: what the gradients are multiplied with: 1, or N for the sum over N towers.
    """
    with tf.Graph().as_default():
        tf.set_random_seed(seed)
        model_fn, batch = _model_and_batch(program)
        objectives = _objectives(program)
        # Now there is a global step only if a finished program, imported above, or `make_optimizer`
        # has made it. A model function is called later: a global step that it makes is the model's
        # own, as with the towers.
        global_step = tf.train.get_global_step()
        loss, updates = _loss_on_one_device(model_fn, batch, objectives, program.options)
        pairs_of_losses = []
        for objective in objectives:
            loss_of_objective = objectives.entry_of(objective, loss)
            pairs_of_losses.append(_pairs_on_one_device(objective, loss_of_objective, factor))
        # With several losses, `pairs` is a dict by the names of the losses, as `loss` is.
        pairs = objectives.shaped(pairs_of_losses)
        train_op = _step_on_one_device(objectives, loss, pairs, updates, global_step, factor)
        if global_step is not None:
            train_op = _with_counted_step(train_op, global_step)
        traits = _traits(loss, updates)
        with failing_on('on one device'), tf.Session(config=session_config(1)) as session:
            initialize(session)
            variables = tf.global_variables()
            names = [variable.op.name for variable in variables]
            initial = list(zip(names, session.run(variables)))
            # `train` also runs towers, whose variables may have other names than on one device.
            names_on_one_device = dict(zip(names, names))
            numbers = train(session, loss, pairs, train_op, program.steps, names_on_one_device)
            return RunOfOneDevice(numbers, initial, traits)


def _model_and_batch(program: Program) -> typing.Tuple[typing.Callable, typing.Any]:
    """The model function of a program, and the tensors to call it with, in the default graph.

    A finished model has no function. It is imported here, with the batch in the place of its
    inputs. `_given_output` stands for the function: it is called with the model's output, and
    returns this output.
    """
    if isinstance(program.model_fn, FinishedProgram):
        output = program.model_fn.on_one_device(program.inputs)
        return _given_output, [output]
    return program.model_fn, constants(program.inputs)


def _given_output(output: ModelOutput) -> ModelOutput:
    """The output of a finished model, in the place of a call of its model function."""
    return output


def _objectives(program: Program) -> Objectives:
    """Makes the optimizers of a program; refuses a list of variables, which belong to one graph,
    since there are two graphs."""
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


def _loss_on_one_device(model_fn: typing.Callable, batch: typing.Any, objectives: Objectives,
                        options: typing.Dict[str, typing.Any]) -> typing.Tuple[typing.Any, list]:
    """Calls the model function on the whole batch.

    Args:
      model_fn: the model function.
      batch: tensors, its argument.
      objectives: for each loss its optimizer, and what it trains.
      options: the further arguments of `build_towers`.

    Returns:
      `(the loss, the updates that run with a step)`; the loss is a dict where there are several.
    """
    # The current scope is entered once more, so that `reuse_variables()` in the model function ends
    # with its call. Without a new name scope no name changes.
    with record_keras_calls() as keras, tf.variable_scope(
            tf.get_variable_scope(), auxiliary_name_scope=False), \
            compat.getter_of_variables(_registering_tensors):
        output = to_model_output(call_model_fn(model_fn, batch), needs_loss=True,
                                 names=objectives.names)
    loss = output.loss
    if options.get('regularization') == 'add':
        if objectives.names is not None:
            raise InvalidArgumentError("regularization='add', and there are several losses.")
        loss = _with_registered_losses(loss, keras)
    updates: list = []
    if options.get('update_ops') != 'none':
        updates += tf.get_collection(tf.GraphKeys.UPDATE_OPS) + keras.updates()
        updates += output.updates or ()
    return loss, updates


def _with_registered_losses(loss: tf.Tensor, keras: typing.Any) -> tf.Tensor:
    """The loss plus the registered losses from which it is not computed yet.

    Args:
      loss: the model function's loss.
      keras: what `record_keras_calls` has recorded, with the losses of Keras' layers.
    """
    registered = tf.losses.get_regularization_losses()
    # Keras makes the loss of a weight anew at each call, so that the model's loss may contain
    # another tensor of the same weight loss. `is_computed_from` takes a tensor of equal operations
    # for the same tensor.
    weight_losses = [term for term in keras.weight_losses()
                     if not is_computed_from(registered + [loss], term)]
    upstream_of_loss = graph_walk.ancestors([loss])
    terms = [loss]
    for term in registered + weight_losses + keras.activity_losses():
        is_in_loss = term.op.name in upstream_of_loss
        if not is_in_loss:
            terms.append(tf.cast(term, loss.dtype))
    return tf.add_n(terms)


def _registering_tensors(getter: typing.Callable, *args: typing.Any, **kwargs: typing.Any
                         ) -> tf.Variable:
    """A getter for `compat.getter_of_variables`, with which TF 2 registers the loss of a
    regularizer as a tensor, as TF 1 does. The variable comes from `getter(*args, **kwargs)`.

    TF 2 registers a function, and each call of it makes new operations. A model may add the loss of
    a call to its own loss. `_with_registered_losses` looks for a registered loss among the
    operations of the model's loss: it would not find the operations of another call, and would add
    the loss twice.
    """
    variable = getter(*args, **kwargs)
    registered_losses()  # puts a tensor in the place of each registered function
    return variable


def _pairs_on_one_device(objective: Objective, loss: tf.Tensor, factor: int) -> Pairs:
    """The gradients of one loss times the factor, with their variables, as the objective's
    `transform_gradients` returns them."""
    trainable = _trained_on_one_device(objective)
    optimizer = objective.optimizer
    if has_own_minimize(optimizer):
        # Its `minimize` takes its own gradients. The gradients taken here are for the comparison:
        # any optimizer of TensorFlow takes the same gradients, whatever its rate is.
        optimizer = tf.train.GradientDescentOptimizer(1.)
    pairs = list(optimizer.compute_gradients(loss, var_list=trainable))
    if all(gradient is None for gradient, _ in pairs):
        for_loss = '' if objective.name is None else ' for %r' % objective.name
        raise GradientError(
            'the loss%s depends on none of the %d trainable variables: there is no training to '
            'compare.' % (for_loss, len(trainable)))
    return call_transform(objective.transform_gradients, multiplied(pairs, factor),
                          name_of_loss=objective.name)


def _trained_on_one_device(objective: Objective) -> typing.List[tf.Variable]:
    """The variables that a loss trains; raises `GradientError` if there are none."""
    trained = tf.trainable_variables()
    # A function from all trainable variables to some; `_objectives` refuses a list.
    choose_variables = objective.var_list
    if choose_variables is not None:
        trained = checked_variables(choose_variables(trained), 'var_list')
    if not trained:
        raise GradientError('the model function makes no trainable variable, or var_list leaves '
                            'none: there is no training to compare.')
    return trained


def _step_on_one_device(objectives: Objectives, loss: typing.Any, pairs: typing.Any, updates: list,
                        global_step: typing.Optional[tf.Variable], factor: int) -> typing.Any:
    """Makes the operation of a step: the update by each loss, after the model's own updates.

    Args:
      objectives: for each loss its optimizer, and what it trains.
      loss: the loss; where losses have names, a dict of these.
      pairs: the loss's `(gradient, variable)` pairs; where losses have names, a dict of these.
      updates: the model's own updates, such as batch norm's.
      global_step: the variable that the last optimizer increases; or None.
      factor: what the gradients are multiplied with.
    """
    predecessors = flat(loss) + updates
    has_several_losses = objectives.names is not None
    any_has_own_minimize = any(has_own_minimize(objective.optimizer) for objective in objectives)
    if has_several_losses or any_has_own_minimize:
        # With several losses, every gradient is taken at the weights before the step. An optimizer
        # with its own `minimize` does not wait for the gradients that are compared, since it takes
        # its own gradients: without this wait, the compared gradients could be of the weights after
        # the step.
        predecessors = predecessors + tensors_of(all_pairs(pairs))
    for objective in objectives:
        counter = None
        if objective is objectives[-1]:
            counter = global_step
        loss_of_objective = objectives.entry_of(objective, loss)
        pairs_of_objective = objectives.entry_of(objective, pairs)
        with _after(predecessors):
            train_op = _applied_on_one_device(objective, loss_of_objective, pairs_of_objective,
                                              counter, factor)
        predecessors = [train_op]
    return train_op


@contextlib.contextmanager
def _after(predecessors: list) -> typing.Iterator[None]:
    """A context in which new operations wait for `predecessors`.

    The initial values of variables that are made in it, an optimizer's slots, do not wait: when
    variables are initialized, there is no batch yet.
    """
    names_before = operation_names(tf.global_variables())
    with tf.control_dependencies(predecessors), \
            graph_walk.Recording(tf.get_default_graph()) as made:
        yield
    new_variables = [variable for variable in tf.global_variables()
                     if variable.op.name not in names_before]
    free_initial_values(new_variables, made.operations, predecessors)


def _with_counted_step(train_op: typing.Any, global_step: tf.Variable) -> typing.Any:
    """A step that increases `global_step`: the `train_op` itself, if its optimizer increases the
    variable; else an operation that increases the variable after the `train_op`."""
    writers = graph_walk.names_of(Writes(global_step.graph).writers_of(global_step))
    operations = graph_walk.names_of(graph_walk.step_operations([train_op]))
    if not writers.isdisjoint(operations):
        return train_op
    with tf.control_dependencies([train_op]):
        return tf.assign_add(global_step, 1).op


def _applied_on_one_device(objective: Objective, loss: tf.Tensor, pairs: Pairs,
                           global_step: typing.Optional[tf.Variable], factor: int) -> typing.Any:
    """Makes the update by one loss.

    Args:
      objective: the loss's optimizer, and what it trains.
      loss: the loss of the batch.
      pairs: the gradients of the loss times the factor, with their variables.
      global_step: the variable that the optimizer increases; or None.
      factor: what the gradients are multiplied with.
    """
    optimizer = objective.optimizer
    if not has_own_minimize(optimizer):
        return optimizer.apply_gradients(pairs, global_step=global_step)
    if objective.transform_gradients is not None or factor != 1:
        # The optimizer's `minimize` has to get the changed gradients in the place of its own.
        return OwnMinimize(optimizer, loss).apply_gradients(pairs, global_step)
    # `minimize` takes its own gradients, which nothing changes.
    return minimized(optimizer, loss, global_step, [variable for _, variable in pairs])


def _traits(loss: typing.Any, updates: list) -> Traits:
    """The traits of a model, from its loss (or a dict of losses) and its updates."""
    graph = tf.get_default_graph()
    forward = list(map(graph.get_operation_by_name, graph_walk.ancestors(flat(loss))))
    finder = Writes(graph)
    updated: typing.Set[str] = set()
    for op in graph_walk.step_operations(updates):
        updated.update(finder.written_by(op))
    random_types = {op.type for op in filter(graph_walk.is_random, forward)}
    return Traits(coarsest=_coarsest_float(forward), random=sorted(random_types),
                  updated=updated)


def _coarsest_float(operations: typing.Iterable[tf.Operation]) -> str:
    """The name of the floating type with the fewest digits among the results of operations.

    The type may have fewer digits than the weights' type: some functions, such as the functions of
    `tf.losses`, compute in float32 whatever they get.
    """
    names = {FLOATS[0]}
    for op in operations:
        for output in op.outputs:
            names.add(output.dtype.base_dtype.name)
    floats_found = [name for name in FLOATS if name in names]
    return floats_found[-1]
