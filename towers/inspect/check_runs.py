"""The two runs that `check_towers` compares: a plain TF1 program on one device, and towers."""

import collections

import tensorflow.compat.v1 as tf

from towers.api.build import build_towers
from towers.api.options import checked_objectives
from towers.errors import GradientError, InputError, InvalidArgumentError, failing_on
from towers.gradients.gradient_pairs import tensors_of, times
from towers.gradients.optimizer_methods import OwnMinimize, minimized
from towers.graph import graph_walk
from towers.graph.graph_walk import is_computed_from
from towers.graph.variable_access import Writes
from towers.inspect.check_finished import FinishedProgram
from towers.model.keras_calls import record_keras_calls
from towers.model.losses import registered_losses
from towers.model.objectives import all_pairs, checked_variables, flat
from towers.model.outputs import ModelOutput, call_model_fn, to_model_output
from towers.optimizers import has_own_minimize
from towers.placement.devices import session_config
from towers.reduce.update import checked_transform, free_initial_values
from towers.variables.new_variables import without_numbers

Traits = collections.namedtuple('Traits', 'coarsest random batch_norm updated')
"""Of a model's forward pass: the name of the floating type with the fewest digits that it computes
in; the types of its random operations; whether it has batch norm; names of the variables that its
updates write."""

# From the most digits to the fewest.
FLOATS = ('float64', 'float32', 'float16', 'bfloat16')


def run_one_device(model_fn, inputs, make_optimizer, steps, seed, factor, options):
    """Trains on one device without this package's towers.

    Args: those of `check_towers`; options are of `build_towers`; and
      factor: the factor of the loss: 1, or N for the sum over N towers.

    Returns:
      (result, `Traits`): a dict with `'loss'`, `'gradient'`, `'variable'` and `'slot'`, each a dict
      from name to array, and `'initial'`, a list of (name, value) of all variables before step 1.
    """
    with tf.Graph().as_default() as graph:
        tf.set_random_seed(seed)
        if isinstance(model_fn, FinishedProgram):
            output = model_fn.on_one_device(inputs)
            model_fn = output_of
            batch = [output]
        else:
            batch = constants(inputs)
        objectives = checked_objectives(make_optimizer())
        if any(each.var_list is not None and not callable(each.var_list) for each in objectives):
            raise InvalidArgumentError('make_optimizer returned an Objective with a list as its '
                                       'var_list: expected a function from the trainable variables '
                                       'to some, since there are two graphs.')
        if not objectives:
            raise InvalidArgumentError('make_optimizer returned None: expected an optimizer, or a '
                                       'dict of optimizers by the name of their loss.')
        global_step = tf.train.get_global_step()
        loss, updates = _loss_on_one_device(model_fn, batch, objectives, options)
        pairs = objectives.shaped(_pairs_on_one_device(each, objectives.of(each, loss), factor)
                                  for each in objectives)
        train_op = _step_on_one_device(objectives, loss, pairs, updates, global_step, factor)
        writes = Writes(graph)
        forward = [graph.get_operation_by_name(name)
                   for name in graph_walk.ancestors(flat(loss))]
        traits = Traits(
            # tf.losses, for one, computes in float32 whatever it is given.
            max((output.dtype.base_dtype.name for op in forward for output in op.outputs
                 if output.dtype.base_dtype.name in FLOATS), key=FLOATS.index, default='float64'),
            sorted({op.type for op in forward if graph_walk.is_random(op)}),
            any('BatchNorm' in op.type or updates and op.type == 'Rsqrt' for op in forward),
            {name for op in graph_walk.step_operations(updates) for name in writes.of(op)})
        with failing_on('on one device'), tf.Session(config=session_config(1)) as session:
            _initialize(session)
            variables = tf.global_variables()
            initial = list(zip([v.op.name for v in variables], session.run(variables)))
            names = {name: name for name, _ in initial}
            result = train(session, loss, objectives.shaped(
                [pair for pair in objectives.of(each, pairs) if pair[0] is not None]
                for each in objectives), train_op, steps, names)
            result['initial'] = initial
            return result, traits


def output_of(output: ModelOutput) -> ModelOutput:
    """Stands for a model function, where the model has been made already."""
    return output


def _loss_on_one_device(model_fn, batch, objectives, options):
    """`(loss, updates)` of the model function on the whole batch."""
    with record_keras_calls() as keras, tf.variable_scope(
            tf.get_variable_scope(), auxiliary_name_scope=False,
            custom_getter=_registering_tensors):
        output = to_model_output(call_model_fn(model_fn, batch), True, objectives.names)
    loss = output.loss
    if options.get('regularization') == 'add':
        if objectives.names is not None:
            raise InvalidArgumentError("regularization='add', and there are several losses.")
        known = graph_walk.ancestors([loss])
        registered = tf.losses.get_regularization_losses()
        loss = tf.add_n([loss] + [
            tf.cast(each, loss.dtype) for each in registered + [
                each for each in keras.weight_losses()
                if not is_computed_from(registered + [loss], each)]
            + keras.activity_losses() if each.op.name not in known])
    updates = [] if options.get('update_ops') == 'none' else (
        tf.get_collection(tf.GraphKeys.UPDATE_OPS) + keras.updates()
        + list(output.updates or ()))
    return loss, updates


def _step_on_one_device(objectives, loss, pairs, updates, global_step, factor):
    """The operation of a step: the update by each loss, after the model's own updates."""
    graph = tf.get_default_graph()
    # With several losses, every gradient is taken at the weights before the step; an own
    # `minimize` takes others than those that are compared.
    after = flat(loss) + updates + (
        tensors_of(all_pairs(pairs)) if objectives.names is not None or any(
            has_own_minimize(each.optimizer) for each in objectives) else [])
    for each in objectives:
        known = {variable.op.name for variable in tf.global_variables()}
        with tf.control_dependencies(after), graph_walk.Recording(graph) as made:
            train_op = _applied_on_one_device(
                each, objectives.of(each, loss), objectives.of(each, pairs),
                global_step if each is objectives[-1] else None, factor)
        free_initial_values([variable for variable in tf.global_variables()
                             if variable.op.name not in known], made.operations, after)
        after = [train_op]
    if global_step is not None and not (
            {op.name for op in Writes(graph).to(global_step)}
            & {op.name for op in graph_walk.step_operations([train_op])}):
        with tf.control_dependencies([train_op]):  # as the caller of such an optimizer does
            train_op = tf.assign_add(global_step, 1).op
    return train_op


def _pairs_on_one_device(objective, loss, factor):
    """The gradients of one loss, as its optimizer gets them."""
    trainable = tf.trainable_variables()
    if objective.var_list is not None:
        trainable = checked_variables(objective.var_list(trainable), 'var_list')
    if not trainable:
        raise GradientError('the model function makes no trainable variable, or var_list leaves '
                            'none: there is no training to compare.')
    optimizer = tf.train.GradientDescentOptimizer(1.) if has_own_minimize(
        objective.optimizer) else objective.optimizer  # which calls its compute_gradients itself
    pairs = list(optimizer.compute_gradients(loss, var_list=trainable))
    if all(gradient is None for gradient, _ in pairs):
        raise GradientError(
            'the loss%s depends on none of the %d trainable variables: there is no training to '
            'compare.' % ('' if objective.name is None else ' for %r' % objective.name,
                          len(trainable)))
    if factor != 1:  # also where the optimizer's own method has changed the gradients of the mean
        pairs = [(None if gradient is None else times(gradient, factor), variable)
                 for gradient, variable in pairs]
    if objective.transform_gradients is not None:
        pairs = checked_transform(objective.transform_gradients, pairs, of_loss=objective.name)
    return pairs


def _applied_on_one_device(objective, loss, pairs, global_step, factor):
    """The update by one loss; the gradients are those of the loss times the factor."""
    optimizer = objective.optimizer
    if not has_own_minimize(optimizer):
        return optimizer.apply_gradients(pairs, global_step=global_step)
    if objective.transform_gradients is not None or factor != 1:  # which come in between
        return OwnMinimize(optimizer, loss).apply_gradients(pairs, global_step)
    return minimized(optimizer, loss, global_step, [variable for _, variable in pairs])


def _registering_tensors(getter, *args, **kwargs):
    """A custom getter that makes TF 2 register a tensor for a regularizer, as TF 1 does: TF 2
    registers a function, which makes new operations at each use, and no loss has these in it."""
    variable = getter(*args, **kwargs)
    registered_losses()
    return variable


def run_towers(model_fn, inputs, make_optimizer, devices, steps, initial, reduction, same_shards,
               options):
    """Trains on towers, from the `'initial'` values of `run_one_device`.

    Returns:
      (result, sum of the towers' losses): as that of `run_one_device`, without `'initial'`; its
      `'initial value'` has the variables whose initial value is of a part of the batch as keys, its
      `'proof'` is the plan's line about one device, or None.
    """
    with tf.Graph().as_default():
        if isinstance(model_fn, FinishedProgram):
            model_fn, batch = model_fn.for_towers(inputs)
        else:
            batch = constants(inputs)
        optimizer = make_optimizer()
        built = build_towers(model_fn, batch, optimizer, devices, reduction,
                             global_step=tf.train.get_global_step(), **options)
        # A hint at the cause of a difference, no part of the comparison.
        sum_of_losses = tf.add_n([loss for tower in built.towers for loss in flat(tower.loss)])
        with failing_on('on the %d towers, and not on one device,' % len(built.devices)), \
                tf.Session(config=session_config(devices)) as session:
            _initialize(session)
            names = _names_on_one_device(tf.global_variables(), initial)
            assignments, fed = assigned(dict(initial), names)
            session.run(assignments, fed)
            if built.replicas is not None:
                session.run(built.replicas.refresh())
            result = train(session, built.loss, built.gradients, built.train_op, steps, names,
                           sum_of_losses)
            result['initial value'] = {names[name]: None for name in (
                () if same_shards else built.plan.initial_of_first)}
            result['proof'] = built.plan.line('one device')
            return result, result['also']


def assigned(values, names):
    """`(operations, what to feed)` that give variables the `values` of one device, a dict by the
    names there; `names` is a dict from the variables' names to these, where they differ."""
    operations, fed = [], {}
    for variable in tf.global_variables():
        name = names.get(variable.op.name, variable.op.name)
        if name in values:
            value = tf.placeholder(variable.dtype.base_dtype)
            operations.append(tf.assign(variable, value, validate_shape=False).op)
            fed[value] = values[name]
    return operations, fed


def _names_on_one_device(variables, initial):
    """Dict from the names of the towers' variables to those on one device: the same, but for layers
    that Keras 3 numbers on from graph to graph, which are matched by their order."""
    names = [variable.op.name for variable in variables]
    known = [name for name, _ in initial]
    if set(names) != set(known) and (
            [without_numbers(name) for name in names] == [without_numbers(n) for n in known]):
        return dict(zip(names, known))
    return {name: name for name in names}


def constants(inputs):
    """A nest of arrays and `tf.SparseTensorValue`s as tensors of the graph."""
    return map_leaves(_constant, inputs)


def _constant(leaf):
    if isinstance(leaf, tf.SparseTensorValue):
        return tf.SparseTensor.from_value(leaf)
    try:
        return tf.constant(leaf)
    except (TypeError, ValueError):
        raise InputError('inputs hold %.80r of type %s: expected arrays [n, …].' % (
            leaf, type(leaf).__name__)) from None


def _initialize(session):
    session.run([tf.global_variables_initializer(), tf.local_variables_initializer(),
                 tf.tables_initializer()])


def train(session, loss, pairs, train_op, steps, names, also=()):
    """The numbers of some steps, as `run_one_device` returns them."""
    gradients = [tf.convert_to_tensor(gradient) for gradient, _ in all_pairs(pairs)]
    of_gradients = [label + names[variable.op.name] for label, each in _labelled(pairs)
                    for _, variable in each]
    result = {'loss': {}}
    for step in range(steps):
        # With the step: another forward pass would write the model's counters and averages again.
        values, _, first = session.run([dict(_labelled(loss)), train_op,
                                        [] if step else [gradients, also]])
        if not step:
            result['gradient'], result['also'] = dict(zip(of_gradients, first[0])), first[1]
        result['loss'].update(('of step %d %s' % (step + 1, label.rstrip(': ')) if label else
                               'of step %d' % (step + 1), value)
                              for label, value in values.items())
    variables = tf.global_variables()
    result.update(sort_values(variables, session.run(variables), names))
    return result


def sort_values(variables, values, names):
    """`{'variable': {name: value}, 'slot': {…}}`, by the names that `names` gives for their own."""
    trainable = {variable.op.name for variable in tf.trainable_variables()}
    result = {'variable': {}, 'slot': {}}
    for variable, value in zip(variables, values):
        name = variable.op.name
        is_slot = any(name.startswith(other + '/') for other in trainable) or '/' not in name and (
            name.endswith('_power'))
        result['slot' if is_slot else 'variable'][names[name]] = value
    return result


def _labelled(shaped):
    """`[(label, value)]`: of several losses `'of generator: '` and the like, else `''`."""
    if not isinstance(shaped, dict):
        return [('', shaped)]
    return [('of %s: ' % name, value) for name, value in shaped.items()]


def map_leaves(function, inputs):
    """As `tf.nest.map_structure`, which would take a `tf.SparseTensorValue` apart."""
    if isinstance(inputs, tf.SparseTensorValue) or not tf.nest.is_nested(inputs):
        return None if inputs is None else function(inputs)
    if isinstance(inputs, dict):
        return {key: map_leaves(function, inputs[key]) for key in inputs}
    parts = [map_leaves(function, each) for each in inputs]
    return type(inputs)(*parts) if hasattr(inputs, '_fields') else type(inputs)(parts)
