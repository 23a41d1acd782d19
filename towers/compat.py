"""Every difference between TensorFlow versions that this package has to know, 1.15 to 2.21.

Importing this module changes nothing and does not import Keras.

Private names of TensorFlow and Keras are used here alone, where no public name does the same.
Modules of Keras are looked up in `sys.modules`: a program that does not use Keras does not get it.
"""

import contextlib
import functools
import importlib
import inspect
import os
import re
import sys
import threading
import typing

import tensorflow
import tensorflow.compat.v1 as tf

TF_VERSION = tuple(int(part) for part in tf.version.VERSION.split('.')[:2])  # such as (1, 15)


def has_estimator():
    """Whether this TensorFlow has `tf.estimator`: 2.16 and later have none."""
    try:
        return hasattr(tf.estimator, 'EstimatorSpec')  # the package is imported here, not before
    except (AttributeError, ImportError):
        return False


# ---- tf.layers ----------------------------------------------------------------------------------

def missing_layers(error: Exception):
    """What to do where an `error` is of the use of `tf.layers` or `tf.nn.rnn_cell`, which TF takes
    from tf-keras from 2.16 on: a text, or None for any other error.

    It is an `AttributeError` where Keras 3 is in use, and an `ImportError` where
    `TF_USE_LEGACY_KERAS` is set and tf-keras is not installed.
    """
    version = '%d.%d' % TF_VERSION
    text = str(error)
    not_installed = isinstance(error, ImportError) and text.startswith('Keras cannot be imported')
    has_keras_3 = isinstance(error, AttributeError) and 'is not available with Keras 3' in text
    if not not_installed and not has_keras_3:
        return None
    return ('tf.layers and tf.nn.rnn_cell are those of the package tf-keras on TensorFlow %s, '
            "which is not %s: pip install 'tf-keras==%s.*' (the extra tf-layers-%s), and set the "
            'environment variable TF_USE_LEGACY_KERAS=1 before the program first uses them or '
            'tf.keras.' % (version, 'installed' if not_installed else 'in use', version, version))


# ---- Keras --------------------------------------------------------------------------------------

# Modules whose `Layer` is a base class of Keras layers. In order: tf.keras of 1.15 (in TF 2 a copy
# that some programs import as tensorflow.python.keras); Keras 2.15; tf_keras; Keras 3. The public
# `tf.keras.layers.Layer` is another class in graph mode than outside, and naming it imports Keras.
_KERAS_3 = 'keras.src.layers.layer'
KERAS_LAYERS = (
    'tensorflow.python.keras.engine.base_layer', 'tensorflow.python.keras.engine.base_layer_v1',
    'keras.src.engine.base_layer', 'keras.src.engine.base_layer_v1',
    'tf_keras.src.engine.base_layer', 'tf_keras.src.engine.base_layer_v1', _KERAS_3)
# Modules in which Keras 2 counts the layers without a name, graph by graph.
_KERAS_BACKENDS = ('tensorflow.python.keras.backend', 'keras.src.backend', 'tf_keras.src.backend')
# Modules whose `Layer` is the base class of `tf.layers`, of the RNN cells of `tf.nn.rnn_cell` and
# of what tf_slim uses. They put their updates and losses into the graph's collections themselves.
_LEGACY_LAYERS = (
    'tensorflow.python.layers.base', 'tensorflow.python.keras.legacy_tf_layers.base',
    'keras.src.legacy_tf_layers.base', 'tf_keras.src.legacy_tf_layers.base')


def import_keras():
    """Imports what `tf.keras` is, and the base classes of layers of each Keras that is in use."""
    try:
        tf.keras.layers.Layer  # naming it imports Keras  # pylint: disable=pointless-statement
    except (AttributeError, ImportError, RecursionError):
        pass  # none is installed; see `missing_layers`
    for name in KERAS_LAYERS:
        package = name.partition('.engine')[0]  # 'keras.src', say
        if package in sys.modules:
            with contextlib.suppress(ImportError):  # `keras.src` of Keras 3 has no `engine`
                importlib.import_module(name)


def keras_base_layers():
    """The base classes of Keras layers that the program has imported so far, each one once."""
    return _layer_classes(KERAS_LAYERS)


def _layer_classes(module_names: typing.Iterable[str]):
    """The class `Layer` of each of these modules that the program has imported, each once."""
    classes = []
    for name in module_names:
        layer_class = getattr(sys.modules.get(name), 'Layer', None)
        if layer_class is not None and layer_class not in classes:
            classes.append(layer_class)
    return tuple(classes)


def is_legacy_layer(layer: typing.Any):
    """Whether `layer` is of `tf.layers`, `tf.nn.rnn_cell` or tf_slim, which use collections."""
    return isinstance(layer, _layer_classes(_LEGACY_LAYERS))


def is_keras_3(layer: typing.Any):
    """Whether `layer` is of Keras 3, which knows no graphs and keeps no list of updates."""
    return isinstance(layer, _layer_classes((_KERAS_3,)))


def is_keras_3_symbol(value: typing.Any):
    """Whether `value` is a Keras 3 stand-in for a tensor, from which models are drawn."""
    no_class = ()  # of which nothing is an instance, where the module is not imported
    module = sys.modules.get('keras.src.backend.common.keras_tensor')
    return isinstance(value, getattr(module, 'KerasTensor', no_class))


def is_keras_input(op: tf.Operation):
    """Whether `op` is the placeholder that Keras 2 made for a `keras.Input`; no public function
    tells."""
    return op.type == 'Placeholder' and hasattr(op.outputs[0], '_keras_history')


def keras_states(layer: typing.Any):
    """The `tf.Variable`s in which a stateful RNN, or one within a layer, keeps its state."""
    states: list = []
    for part in keras_parts(layer):
        if getattr(part, 'stateful', False):
            states += tf.nest.flatten(getattr(part, 'states', None))
    variables = map(keras_variable_value, states)
    # Before its first call an RNN has None for each state.
    return [variable for variable in variables if isinstance(variable, VARIABLE_TYPES)]


def keras_variable_value(variable: typing.Any):
    """The `tf.Variable` that a Keras 3 variable holds; anything else as it is."""
    value = getattr(variable, 'value', None)
    return value if isinstance(value, VARIABLE_TYPES) else variable


def keras_of(model: typing.Any):
    """The Keras 2 module that a model is of: `tf.keras` of TF 1.15 or 2.15, or `tf_keras`; None for
    any other object, models of Keras 3 and of the package keras beside TF 1.15 included."""
    if is_keras_3(model):
        return None
    for base in type(model).__mro__:
        if base.__module__.startswith('tf_keras.'):
            keras = sys.modules['tf_keras']
        elif base.__module__.startswith(('keras.src.', 'tensorflow.python.keras.')):
            keras = tensorflow.keras
        else:
            continue
        return keras if isinstance(model, keras.Model) else None
    return None


def keras_backend_of(model: typing.Any):
    """The module with `get_session` and `learning_phase` for a model of `keras_of`.

    The public one is in `tf.compat.v1.keras`, which is Keras 3 from TF 2.16 on; tf_keras has none.
    """
    packages = {base.__module__.split('.')[0] for base in type(model).__mro__}
    # TensorFlow's own comes last: the classes of the other two have bases of its package, too.
    for name in reversed(_KERAS_BACKENDS):
        if name in sys.modules and name.split('.')[0] in packages:
            return sys.modules[name]
    raise AssertionError('no backend of %r' % model)


def is_keras_graph_network(model: typing.Any):
    """Whether a Keras 2 model is a functional one, or a `Sequential` of known inputs.

    A subclassed model has `inputs`, too, once it was called on data, and no public call tells.
    """
    return bool(getattr(model, '_is_graph_network', False))


def keras_updates_behind(operations: typing.Iterable[tf.Operation]) -> list:
    """The updates of the Keras 2 layers that have made outputs of some operations, as the layers of
    a functional model: a list of operations and tensors, each layer's once.

    Keras keeps with a tensor the layer that made it, and with the layer its updates; no collection
    has them.
    """
    layers = {}
    for op in operations:
        for tensor in op.outputs:
            history = getattr(tensor, '_keras_history', None)  # the layer, and two numbers
            if history is not None:
                layer = history[0]
                layers[id(layer)] = layer
    updates: list = []
    for layer in layers.values():
        updates += getattr(layer, 'updates', ())
    return updates


def is_made_in_keras_3_call(op: tf.Operation):
    """Whether an operation was made in the call of a Keras 3 layer. Keras 3 keeps no list of what
    its layers write, and no collection has it; TensorFlow keeps the traceback of an operation."""
    module = sys.modules.get(_KERAS_3)
    if module is None:
        return False
    for frame in op.traceback or ():  # None for an operation of an imported graph
        if frame.name == '__call__' and frame.filename == module.__file__:
            return True
    return False


def has_gradient_closure(op: tf.Operation) -> bool:
    """Whether the gradient of an operation is a Python function that `tf.custom_gradient` has made.

    TensorFlow registers that function under a name such as `CustomGradient-7`. It may hold tensors
    of the graph in which it was made, so that it does not fit a copy in another graph.
    """
    if '_gradient_op_type' not in op.node_def.attr:
        return False
    return op.get_attr('_gradient_op_type').startswith(b'CustomGradient')


def forget_dropout_masks(layer: typing.Any):
    """Makes the recurrent layers within a Keras 2 layer draw new dropout masks in their next call.

    On TF 1.15 the cell of an `RNN(cell)` keeps the mask of the first call, with its batch size and
    on its device. Cells of LSTM and GRU, and all cells of later versions, draw a mask a call.
    """
    for part in keras_parts(layer):
        cell = getattr(part, 'cell', None)
        if not isinstance(cell, keras_base_layers()):
            continue
        for inner_cell in keras_parts(cell):  # the cell itself, and those of a stack of cells
            if hasattr(inner_cell, 'reset_dropout_mask'):
                inner_cell.reset_dropout_mask()
                inner_cell.reset_recurrent_dropout_mask()


def keras_mask(tensor: tf.Tensor):
    """The mask that Keras keeps with a tensor: bool [batch, …], or None."""
    return getattr(tensor, '_keras_mask', None)


def keras_logits(tensor: tf.Tensor):
    """What a sigmoid or softmax of Keras 2.15 was computed from; None for other tensors."""
    return getattr(tensor, '_keras_logits', None)


def set_keras_logits(tensor: tf.Tensor, logits: typing.Optional[tf.Tensor]):
    """Makes the cross entropies of Keras 2.15 take `logits` in the place of a tensor; does nothing
    for logits of None."""
    if logits is not None:
        tensor._keras_logits = logits


@contextlib.contextmanager
def autograph_of_layers():
    """A context in which AutoGraph converts the `call` of a user's layer, as Keras does it.

    It is for calls of such layers within a function that is marked `do_not_convert`: TensorFlow
    applies the mark to all that the function calls.
    """
    from tensorflow.python.autograph.core import ag_ctx  # pylint: disable=g-import-not-at-top
    with ag_ctx.ControlStatusCtx(status=ag_ctx.Status.UNSPECIFIED):
        yield


def keras_weight_losses(layer: typing.Any):
    """The losses of a Keras layer and its parts that do not depend on the layers' inputs.

    These are the regularizers of weights, and the functions given to `add_loss`. Parts that are
    `tf.layers` layers are left out: their losses are in a collection. (In the public `losses` of a
    model a part of two models, or a `tf.layers` layer, would count twice.)

    Returns:
      A list of (key, function): pairs with equal keys stand for the same loss, which the function
      makes, a scalar tensor or None.
    """
    if is_keras_3(layer):
        return [(id(variable), functools.partial(variable.regularizer, variable))
                for variable in layer.trainable_variables if variable.regularizer is not None]
    functions: list = []  # Keras 2 keeps those of regularizers and of `add_loss` in one list
    for part in keras_parts(layer):
        if not is_legacy_layer(part):
            functions += part._callable_losses
    return [(id(function), function) for function in functions]


def keras_parts(layer: typing.Any) -> list:
    """A Keras 2 layer and the layers that it contains, at any depth. (The public `submodules`
    raises for an LSTM with dropout in graph mode and, on 1.15, for a compiled model.)"""
    if hasattr(layer, '_flatten_layers'):
        return list(layer._flatten_layers())
    # TF 1.15 has no such method.
    found: list = []
    pending = [layer]
    while pending:
        part = pending.pop(0)
        if not isinstance(part, keras_base_layers()):  # a list or dict of layers
            pending = list(part.layers) + pending
        elif not any(part is other for other in found):
            found.append(part)
            pending = list(part._layers) + pending
    return found


# ---- Variables and optimizers -------------------------------------------------------------------

# On TF 2 resource variables are instances of the one class and reference variables of the other.
VARIABLE_TYPES = (tf.Variable, tensorflow.Variable)
# A data set made through `import tensorflow as tf` is no instance of compat.v1's class on TF 2. On
# 1.15, neither is a data set that a method of that class returns, such as `unbatch`.
DATASET_TYPES = (tf.data.Dataset, tensorflow.compat.v2.data.Dataset)


def outermost_graph(graph: tf.Graph):
    """The graph around a function's graph; any other graph itself."""
    while getattr(graph, 'outer_graph', None) is not None:
        graph = graph.outer_graph
    return graph


@contextlib.contextmanager
def within_branch(op: tf.Operation):
    """A context in which new operations are in the branch (v1) that an operation is in."""
    context = op._get_control_flow_context()
    with contextlib.ExitStack() as stack:
        if context is not None:
            context.Enter()
            stack.callback(context.Exit)
        yield


def builds_loop(graph: tf.Graph):
    """Whether Python is within the body of a `tf.while_loop` (v1)."""
    return _loop_around(graph._get_control_flow_context()) is not None


def builds_inner_graph(graph: tf.Graph):
    """Whether Python is within a branch or a loop (v1), or within a function that becomes a part of
    another graph, such as a branch (v2) or the function of a `Dataset.map`."""
    is_function = getattr(graph, 'outer_graph', None) is not None
    return is_function or graph._get_control_flow_context() is not None


def in_branch_in_loop(graph: tf.Graph):
    """Whether Python is within a branch that is within the body of a loop (v1)."""
    context = graph._get_control_flow_context()
    is_in_branch = False
    while context is not None:  # from the inside
        if context.IsCondContext():
            is_in_branch = True
        elif is_in_branch and context.IsWhileContext():
            return True
        context = context.outer_context
    return False


def register_gradient(name: str, function: typing.Callable):
    """Registers the gradient of operations that `gradient_override_map` gives a name, once."""
    with contextlib.suppress(KeyError):  # it is registered already
        tf.RegisterGradient(name)(function)


def multi_device_iterator(dataset: typing.Any, devices: typing.Sequence[str], buffer_size: int):
    """TensorFlow's `MultiDeviceIterator`, which no public name of graph mode leads to.

    On each device it keeps `buffer_size` elements ready; on the host as many for each device, and
    two at least.
    """
    # pylint: disable=import-outside-toplevel,no-name-in-module
    from tensorflow.python.data.ops import multi_device_iterator_ops
    return multi_device_iterator_ops.MultiDeviceIterator(
        dataset, devices, max_buffer_size=max(2, buffer_size), prefetch_buffer_size=buffer_size)


def shapes_text(shapes: typing.Any) -> str:
    """A nest of shapes as a text for errors, such as '((4, 8, 8, 1), (4,))'."""
    if isinstance(shapes, dict):
        entries = ['%s: %s' % (name, shapes_text(shape)) for name, shape in shapes.items()]
        return '{%s}' % ', '.join(entries)
    if isinstance(shapes, (tuple, list)):
        return '(%s)' % ', '.join(map(shapes_text, shapes))
    return str(shapes)


def map_batches(dataset: typing.Any, function: typing.Callable):
    """`dataset.map` that keeps the known number of batches, which the `map` of v1 forgets."""
    return tensorflow.compat.v2.data.Dataset.map(dataset, function)


_LEARNING_RATES = '_lr', '_learning_rate', 'learning_rate'
"""Attributes in which the optimizers of TensorFlow, and those written after them, keep the rate."""


def learning_rate_as_given(optimizer: typing.Any):
    """The learning rate that an optimizer was made with: a number, a tensor or a function; None if
    it is not known."""
    for name in _LEARNING_RATES:
        rate = getattr(optimizer, name, None)
        if rate is not None:
            return rate
    return None


def optimizer_learning_rate(optimizer: typing.Any):
    """An optimizer's learning rate, a number or a tensor, for the plan; None if it is not known."""
    for name in _LEARNING_RATES:
        rate: typing.Any = getattr(optimizer, name, None)
        is_function = callable(rate) and not isinstance(rate, VARIABLE_TYPES)
        if is_function and _takes_nothing(rate):
            return rate()
        # A function with arguments is no rate, but a method of the optimizer's of that name.
        if rate is not None and not is_function:
            return rate
    return None


def _takes_nothing(function: typing.Callable) -> bool:
    """Whether a function can be called without arguments; False where Python does not know it."""
    try:
        inspect.signature(function).bind()
    except (TypeError, ValueError):
        return False
    return True


@contextlib.contextmanager
def descent_by_rows(optimizer: typing.Any):
    """A context in which `tf.train.GradientDescentOptimizer` casts its learning rate for sparse
    gradients of resource variables, as TF 2 does. On 1.15 it multiplies these by the rate as it was
    given, which fails for a rate of another dtype and for a function."""
    name = '_resource_apply_sparse_duplicate_indices'  # the method that is replaced
    descent = tf.train.GradientDescentOptimizer
    is_descent = isinstance(optimizer, descent)
    # A subclass with a method of its own keeps that.
    has_method_of_descent = is_descent and getattr(type(optimizer), name) is getattr(descent, name)
    if TF_VERSION >= (2, 0) or not has_method_of_descent:
        yield  # nothing is to be mended
        return

    def apply_rows(gradient: tf.Tensor, variable: tf.Variable, indices: tf.Tensor) -> tf.Operation:
        """Subtracts the rows of a gradient, times the rate, from those rows of the variable."""
        rate = tf.cast(optimizer._learning_rate_tensor, gradient.dtype.base_dtype)
        return tf.raw_ops.ResourceScatterAdd(
            resource=variable.handle, indices=indices, updates=-gradient * rate)
    setattr(optimizer, name, apply_rows)  # hides the method, of this optimizer alone
    try:
        yield
    finally:
        delattr(optimizer, name)


def initialize_with(variable: tf.Variable, value: tf.Tensor):
    """Makes a variable's initializer assign the tensor `value`.

    A variable can also be made with that value, but then TensorFlow copies the operations of the
    value onto the device of the variable.
    """
    with tf.control_dependencies(None):  # an initializer waits for no step
        assign = tf.assign(variable, value, validate_shape=value.shape.is_fully_defined())
    variable._initializer_op = assign.op


def initializer_of(variable: tf.Variable):
    """The operation that gives a variable its initial value; or None.

    `variable.initializer` is that operation, or, where `tf.train.init_from_checkpoint` has set a
    reference variable, the tensor that it returns.
    """
    return getattr(variable.initializer, 'op', variable.initializer)


# The key under which TensorFlow keeps a graph's counts of variable scopes; a tuple, as it has it.
_SCOPE_STORE = ('__varscope',)


def opened_scopes(graph: tf.Graph):
    """{name of a variable scope: how often it was opened}. By these counts TensorFlow numbers the
    scopes that have only a default name: `dense`, `dense_1`, …"""
    opened: typing.Dict[str, int] = {}
    for store in graph.get_collection(_SCOPE_STORE):
        opened.update(store.variable_scopes_count)
    return opened


def set_opened_scopes(graph: tf.Graph, opened: typing.Dict[str, int]):
    """Sets the graph's counts of opened scopes to those of `opened_scopes` at another time."""
    for store in graph.get_collection(_SCOPE_STORE):
        store.variable_scopes_count = dict(opened)


@contextlib.contextmanager
def getter_of_variables(getter: typing.Callable):
    """A context in which `getter(tensorflows_getter, *args, **kwargs)` gives each variable that a
    program gets by `tf.get_variable` in the current graph.

    A custom getter of a variable scope would not see all of them: a program may enter a
    `tf.VariableScope`, or call a `tf.make_template`, that was made before. These have the custom
    getters of the scope that they were made in.
    """
    from tensorflow.python.ops import variable_scope
    store = variable_scope._get_default_variable_store()
    kind = type(store)

    def get(self, *args, **kwargs):
        """Stands for the method by which the store makes or finds a variable, or a part of a
        partitioned variable."""
        return getter(functools.partial(kind._get_single_variable, self), *args, **kwargs)

    # A class of its own, since the store may have no attributes besides those of its class.
    store.__class__ = type(kind.__name__, (kind,), {'__slots__': (), '_get_single_variable': get})
    try:
        yield
    finally:
        store.__class__ = kind


def set_reuse(scope: tf.VariableScope, reuse: typing.Any):
    """Sets the reuse flag of a `tf.VariableScope`: its public method only turns it on."""
    scope._reuse = reuse


def wrapped_optimizer(optimizer: typing.Any):
    """The optimizer that another one wraps, such as a loss scale (in `_optimizer`) or a
    `SyncReplicasOptimizer` (in `_opt`); None for one that wraps none."""
    return getattr(optimizer, '_optimizer', None) or getattr(optimizer, '_opt', None)


# Whether `CollectiveGather` takes a number of rows that differs from step to step.
GATHERS_ANY_ROWS = TF_VERSION >= (2, 0)


def among_zeros(rows: tf.Tensor, rank: int, num_workers: int) -> tf.Tensor:
    """This worker's rows [n, …] in a tensor [num_workers * n, …], with zeros in the places of the
    other workers' rows; all workers have n rows.

    The sum of these tensors over the workers, by `CollectiveReduce`, is what `CollectiveGather`
    gives. It is for 1.15, where `CollectiveGather` takes the number of rows of its first step
    alone. Types that `CollectiveReduce` does not take become float64.
    """
    if rows.dtype not in (tf.float32, tf.float64):
        rows = tf.cast(rows, tf.float64)
    num_rows = tf.shape(rows)[0]
    num_before = num_rows * rank
    num_after = num_rows * (num_workers - 1 - rank)
    return tf.pad(rows, [[num_before, num_after]] + [[0, 0]] * (rows.shape.ndims - 1))


def graph_def_of_function(function: typing.Any):
    """The body of a function, a `FunctionDef`, as `(GraphDef, {name of a tensor in the FunctionDef:
    its name in the GraphDef})`. No public function of TensorFlow converts it."""
    from tensorflow.python.framework import function_def_to_graph
    return function_def_to_graph.function_def_to_graph_def(function)


def has_own_gradient(name: str, graph: tf.Graph) -> bool:
    """Whether the program gave a function of a graph a gradient of its own, as a `Defun` takes one.
    A gradient in Python is in no `GraphDef`, and no public way leads to the object that has it."""
    function = graph._get_function(name)
    # A function in Python, or the name of another `Defun`.
    gradients = [getattr(function, 'python_grad_func', None),
                 getattr(function, 'grad_func_name', None)]
    return any(gradient is not None for gradient in gradients)


# ---- Operations ---------------------------------------------------------------------------------

def control_flow_context(op: tf.Operation):
    """The object of the loop or branch (v1) around an operation, one for all in it; or None."""
    return op._get_control_flow_context()


def set_control_flow_context(op: tf.Operation, context: typing.Any) -> None:
    """Puts an operation into a loop or branch (v1), given by its object."""
    op._set_control_flow_context(context)


def contexts_around(op: tf.Operation) -> typing.List[typing.Any]:
    """The objects of the loops and branches (v1) around an operation, from the inside."""
    found = []
    context = control_flow_context(op)
    while context is not None:
        found.append(context)
        context = context.outer_context
    return found


def begins_of_iteration(op: tf.Operation) -> typing.Set[str]:
    """The names of the operations for which TensorFlow makes an operation in a loop (v1) wait, so
    that it runs once in each iteration: those of the innermost loop. Empty outside of loops."""
    context = control_flow_context(op)
    if context is None or not context.IsWhileContext():
        return set()
    pivots = [context._pivot_for_pred, context._pivot_for_body]
    return {pivot.op.name for pivot in pivots if pivot is not None}


def led_into_loop(tensor: tf.Tensor, op: tf.Operation) -> tf.Tensor:
    """What operations take in the place of a tensor from outside, in the loops (v1) that an
    operation is in: an `Enter` of the tensor, of which there is one in each loop; the tensor itself
    where the operation is in none."""
    context = control_flow_context(op)
    return tensor if context is None else context.AddValue(tensor)


def restore_context(original: typing.Any, definition: typing.Any):
    """Makes the object of a loop or branch (v1) whose operations were imported: an import makes
    none, and the gradient of such an operation needs it.

    Of TensorFlow's public functions `tf.train.import_meta_graph` alone does so.

    Args:
      original: the object of the loop or branch whose operations were imported; the new one gets
        its class.
      definition: the protocol buffer of the one to make.
    """
    key = tf.GraphKeys.WHILE_CONTEXT
    if original.IsCondContext():
        key = tf.GraphKeys.COND_CONTEXT
    context_class = type(original)
    tf.add_to_collection(key, context_class.from_proto(definition))


_GRAPHS_OF_FUNCTIONS = {
    'While': [('cond', '_cond_graph'), ('body', '_body_graph')],
    'If': [('then_branch', '_true_graph'), ('else_branch', '_false_graph')]}
"""Attributes of a loop or branch (v2) that name its functions, and those of the Python object where
the gradient looks for their graphs."""


def hand_on_gradient(op: tf.Operation, imported: tf.Operation):
    """Gives the import of a call of a `tf.function` the gradient function of the call.

    TensorFlow 2 keeps it in a private attribute of the call, which no import has; without it
    `tf.gradients` makes a `SymbolicGradient`, which fails for float64. TensorFlow 1.15 registers
    the gradient under a name in the node, which an import has.
    """
    gradient = getattr(op, '_gradient_function', None)  # pylint: disable=protected-access
    if gradient is not None:
        setattr(imported, '_gradient_function', gradient)


def is_gradient_of_python(op: tf.Operation) -> bool:
    """Whether an operation is the gradient of a `tf.py_function`: the Python function behind it is
    TensorFlow's own, which TensorFlow marks so, and keeps by a token of the operation."""
    if op.type != 'EagerPyFunc':
        return False
    from tensorflow.python.ops import script_ops
    function = script_ops._py_funcs._funcs.get(op.get_attr('token').decode())
    return function is not None and function._is_grad_func  # None: of an imported graph


def restore_function_graphs(op: tf.Operation):
    """Makes the Python graphs of the functions of an imported loop or branch (v2), and of the loops
    and branches within it, and puts them where TensorFlow's gradient of the operation looks for
    such graphs. An import makes none.

    If TensorFlow 2 finds no graph there, its gradient makes one itself, in which the handles of a
    nested loop or branch do not tell which variables they stand for. If a variable is read within
    one, `tf.gradients` then fails: "Tried to take gradients (or similar) of a variable without
    handle data". On 1.15 nothing has to be done: the gradient never looks for graphs, and those
    that it makes are complete.
    """
    kind = op.type.replace('Stateless', '')
    if TF_VERSION < (2, 0) or kind not in _GRAPHS_OF_FUNCTIONS:
        return
    # pylint: disable=import-outside-toplevel,no-name-in-module
    from tensorflow.python.ops import control_flow_util_v2, handle_data_util
    if kind == 'If':
        arguments = list(op.inputs)[1:]  # the first input is the condition
        shapes = [tensor.shape for tensor in arguments]
    else:
        arguments = list(op.inputs)  # a loop has results of the same number and shapes
        shapes = [tf.TensorShape(shape) for shape in op.get_attr('output_shapes')]
    for attribute, place in _GRAPHS_OF_FUNCTIONS[kind]:
        graph = control_flow_util_v2.get_func_graph(op, shapes, op.get_attr(attribute).name)
        for outside, inside in zip(arguments, graph.inputs):
            # The shape and type of the variable that a handle stands for.
            handle_data_util.copy_handle_data(outside, inside)
        setattr(op, place, graph)
        for nested in graph.get_operations():
            restore_function_graphs(nested)


def current_control_inputs(graph: tf.Graph) -> typing.List[tf.Operation]:
    """The operations that new operations of a graph wait for, by the `tf.control_dependencies`
    that are open."""
    return list(graph._current_control_dependencies())


def attributes_of_scopes(op: tf.Operation):
    """{name: `tf.AttrValue`} of attributes that the open scopes, such as XLA's `jit_scope`, give to
    new operations, and not to imported ones."""
    found = {}
    for name, value in op.graph._attr_scope_map.items():
        if callable(value):  # a scope may decide by the operation
            value = value(op.node_def)
        if value is not None and name not in op.node_def.attr:
            found[name] = value
    return found


def in_control_flow(op: tf.Operation):
    """Whether an operation is in a branch of a `tf.cond` or the body of a `tf.while_loop` (v1)."""
    return control_flow_context(op) is not None


def condition_around(op: tf.Operation):
    """The condition, a scalar bool, of the innermost branch (v1) around an operation; or None."""
    context = op._get_control_flow_context()
    while context is not None and not context.IsCondContext():
        context = context.outer_context
    return None if context is None else context.pred


def conditions_around(op: tf.Operation):
    """The names of the conditions, scalars, of all branches and loops (v1) around an operation."""
    names = []
    for context in contexts_around(op):
        if context.IsCondContext():
            condition = context.pred
        else:
            condition = context.pivot.op.inputs[0]  # the pivot of a loop is its `LoopCond`
        names.append(condition.name)
    return names


class BranchAround(typing.NamedTuple):
    """A branch (v1) around an operation."""
    condition: tf.Tensor  # of the `tf.cond`, a scalar bool
    runs_if: int  # the value of the condition, 0 or 1, with which the branch runs
    pivot: tf.Tensor  # has a value in the steps in which the branch runs, and in no other


def branches_around(op: tf.Operation) -> typing.List[BranchAround]:
    """The branches (v1) around an operation, from the inside."""
    branches = [context for context in contexts_around(op) if context.IsCondContext()]
    return [BranchAround(branch.pred, branch.branch, branch.pivot) for branch in branches]


def in_loop(op: tf.Operation):
    """Whether an operation is in a loop (v1), perhaps in a branch there."""
    return _loop_around(op._get_control_flow_context()) is not None


def _loop_around(context: typing.Any):
    """The innermost loop (v1) that a context, of a branch or a loop, is or is in; or None."""
    while context is not None and not context.IsWhileContext():
        context = context.outer_context
    return context


# TensorFlow has no public way to change a finished operation: its inputs, here; below, its device,
# attributes and control inputs, which `tf.import_graph_def` does not take either.

def replace_tensor(old: tf.Tensor, new: tf.Tensor,
                   readers: typing.Optional[typing.Iterable[tf.Operation]] = None):
    """Makes every operation that reads the tensor `old`, or these `readers`, read `new` instead."""
    if readers is None:
        readers = old.consumers()
    for reader in readers:
        for position, tensor in enumerate(reader.inputs):
            if tensor.name == old.name:
                reader._update_input(position, new)


def replace_input(op: tf.Operation, position: int, new: tf.Tensor):
    """Makes one operation read the tensor `new` as its input at that position."""
    op._update_input(position, new)


_PRODUCT = re.compile('_(?:Mkl)?(?:Native)?(?:Fused)?((?:MatMul|Conv|DepthwiseConv).*)')
# Types of operations that bring a tensor to another device. The runtime adds the private ones.
SENDS = ('_Send', '_HostSend', 'Send')
RECEIVES = ('_Recv', '_HostRecv', 'Recv')
# What the runtime adds to move tensors between devices and layouts; nothing is computed there.
_MOVES = SENDS + RECEIVES + ('Const', '_MklToTf', '_MklInputConversion')


def computed_operation(op_type: str) -> typing.Optional[str]:
    """The public type of operation that a node of the runtime's graph computes.

    oneDNN computes products as `_MklMatMul` or `_MklNativeMatMul`, grappler joins a product, a bias
    and an activation into `_FusedMatMul`: `'MatMul'` for each; None where it only moves tensors.
    """
    if op_type in _MOVES:
        return None
    product = _PRODUCT.match(op_type)
    if product is not None:
        return product.group(1)
    return re.sub('^_Mkl(Native)?(?=[A-Z])', '', op_type)


@functools.lru_cache(None)
def registered_kernels(op_type):
    """The kernels of a type of operation in this TensorFlow: a list of `KernelDef`; a build without
    GPUs registers none for them. Its list is private: no public function tells it."""
    kernels = importlib.import_module('tensorflow.python.framework.kernels')
    return list(kernels.get_registered_kernels_for_op(op_type).kernel)


def uses_onednn():
    """Whether this TensorFlow computes products and convolutions on CPUs by oneDNN.

    As it decides itself (`port.cc`, `util.cc`): TF 1.15's wheels have none; the later ones have it
    on where `TF_ENABLE_ONEDNN_OPTS` says so, or the CPU has instructions for neural networks.
    """
    if TF_VERSION < (2, 0):
        return False
    setting = os.environ.get('TF_ENABLE_ONEDNN_OPTS', '').strip().lower()
    if setting:
        return setting in ('1', 'true')
    return not _FLAGS_FOR_NEURAL_NETWORKS.isdisjoint(_cpu_flags())


_FLAGS_FOR_NEURAL_NETWORKS = frozenset(
    ['avx512_vnni', 'avx512_bf16', 'avx_vnni', 'amx_tile', 'amx_int8', 'amx_bf16'])


def _cpu_flags() -> typing.List[str]:
    """The names of the instruction sets of the CPU, as Linux has them; [] on other systems."""
    with contextlib.suppress(OSError), open('/proc/cpuinfo') as opened:
        for line in opened:
            if line.startswith('flags'):
                return line.split()
    return []


def device_scopes(op: tf.Operation):
    """The arguments of the `tf.device` scopes that an operation was made in, innermost first; each
    as a string: a name, 'None', or for a function 'name<file, line>'."""
    return [scope.obj for scope in op._device_assignments]


def current_device_scopes(graph: tf.Graph):
    """The `tf.device` scopes that are open now, in the form of `device_scopes`."""
    stack = graph._device_function_stack
    return [scope.display_name for scope in stack.peek_objs()]


def devices_of_new_variables():
    """The devices that the open `tf.device` scopes would give to a new variable of either kind,
    joined by a space, to be searched for a job.

    '' where all scopes are names without a job: only a device function has to be tried.
    """
    stack = tf.get_default_graph()._device_function_stack
    scopes = [scope._device_name_or_function for scope in stack.peek_objs()]
    if all(map(_is_device_without_job, scopes)):
        return ''
    # What a device function answers, only making a variable shows: in a graph that is thrown away.
    with tf.Graph().as_default(), contextlib.ExitStack() as opened:
        for scope in scopes[::-1]:  # the outermost first
            opened.enter_context(tf.device(scope))
        # A resource and a reference variable: a device function may go by the operation's type.
        resource = tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[])
        reference = tf.raw_ops.VariableV2(dtype=tf.float32, shape=[])
        return '%s %s' % (resource.op.device, reference.op.device)


def _is_device_without_job(scope: typing.Any) -> bool:
    """Whether the argument of a `tf.device` scope is None, or a name without a job. A function is
    neither."""
    return scope is None or isinstance(scope, str) and '/job:' not in scope


def differentiated_operation(op: tf.Operation):
    """The operation whose gradient function made `op`; None where no gradient function did."""
    return op._original_op


def set_device(op: tf.Operation, device: str):
    """Puts a finished operation on a device, whatever scopes it was made in."""
    op._set_device(device)


def set_attribute(op: tf.Operation, name: str, value: tf.AttrValue):
    """Gives a finished operation another `tf.AttrValue`."""
    op._set_attr(name, value)


_IS_SEND_PUBLIC = hasattr(tf.raw_ops, 'Send')  # on 1.15 TensorFlow has it for its own use alone


def send(tensor: tf.Tensor, name: str, sender: str, receiver: str) -> tf.Operation:
    """An operation that sends a tensor from the device `sender` to another worker's device, for the
    `receive` there that has the same arguments. `set_incarnation` has to complete both."""
    attributes = _attributes_of_route(name, sender, receiver)
    attributes['T'] = tf.AttrValue(type=tensor.dtype.as_datatype_enum)
    op_type = 'Send' if _IS_SEND_PUBLIC else '_Send'
    op = tensor.graph.create_op(op_type, [tensor], [], attrs=attributes, name='send')
    _list_operation(op)
    return op


def receive(dtype: tf.DType, name: str, sender: str, receiver: str) -> tf.Tensor:
    """The tensor that a `send` of another worker sends to this worker's device `receiver`."""
    attributes = _attributes_of_route(name, sender, receiver)
    attributes['tensor_type'] = tf.AttrValue(type=dtype.as_datatype_enum)
    op_type = 'Recv' if _IS_SEND_PUBLIC else '_Recv'
    graph = tf.get_default_graph()
    op = graph.create_op(op_type, [], [dtype], attrs=attributes, name='receive')
    _list_operation(op)
    return op.outputs[0]


def _attributes_of_route(name: str, sender: str, receiver: str) -> typing.Dict[str, tf.AttrValue]:
    """The attributes that a `send` and its `receive` have in common."""
    return {'tensor_name': tf.AttrValue(s=name.encode()),
            'send_device': tf.AttrValue(s=sender.encode()),
            'recv_device': tf.AttrValue(s=receiver.encode()),
            'send_device_incarnation': tf.AttrValue(i=0),
            'client_terminated': tf.AttrValue(b=False)}


def _list_operation(op: tf.Operation) -> None:
    """On 1.15 adds the type of an operation to Python's list of types, by which a graph is written
    with a checkpoint: private operations are not in it. Later versions ask TensorFlow itself."""
    if not _IS_SEND_PUBLIC:
        from tensorflow.core.framework import op_def_pb2
        from tensorflow.python.framework import op_def_registry
        op_def_registry.register_op_list(op_def_pb2.OpList(op=[op.op_def]))


def set_incarnation(op: tf.Operation, incarnations: typing.Dict[str, int]) -> None:
    """Completes the operation of a `send` or a `receive` by the incarnation of the device that
    sends, which is in `incarnations` by the name of the device."""
    incarnation = incarnations[tf.compat.as_str(op.get_attr('send_device'))]
    if incarnation >= 1 << 63:  # the attribute takes the 64 bits as a signed number
        incarnation -= 1 << 64
    set_attribute(op, 'send_device_incarnation', tf.AttrValue(i=incarnation))


def free_of_variable(graph: tf.Graph):
    """A context in which new operations are not colocated with the variable that is being made.

    It is for an import in the function that gives a variable its initial value. On 1.15 TensorFlow
    calls that function before the variable has an operation, and `tf.import_graph_def` looks for
    the operation by its name.
    """
    # The attribute '_class' names the operations that an operation is colocated with.
    is_colocated = '_class' in graph._attr_scope_map
    if not is_colocated:
        return contextlib.nullcontext()
    return graph._attr_scope({'_class': None})


def colocated_with(graph: tf.Graph):
    """The operations that new operations of a graph are colocated with at the moment."""
    # For a resource variable TF 2 has an object in the stack that is no operation, with its device.
    stack = graph._colocation_stack.peek_objs()
    return [op for op in stack if isinstance(op, tf.Operation)]


def is_colocating(graph: tf.Graph):
    """Whether Python is within `tf.colocate_with`."""
    return bool(list(graph._colocation_stack.peek_objs()))  # an iterator in TF 2


def waiting_for(op: tf.Operation) -> typing.List[tf.Operation]:
    """The operations that take outputs of an operation, or wait for it."""
    followers = []
    for output in op.outputs:
        followers += output.consumers()
    return followers + list(op._control_outputs)


def add_control_inputs(op: tf.Operation, others: typing.Iterable[tf.Operation]):
    """Makes a finished operation wait for others."""
    op._add_control_inputs(others)


def set_control_inputs(op: tf.Operation, others: typing.Iterable[tf.Operation]):
    """Makes a finished operation wait for others, and for nothing else."""
    op._remove_all_control_inputs()
    op._add_control_inputs(others)


# Held while `control_flow_v1` has TensorFlow's switch off.
CONTROL_FLOW_SWITCH = threading.RLock()


@contextlib.contextmanager
def control_flow_v1():
    """A context in which `tf.cond` is TF 1's, whose branches may write reference variables.

    The switch is TensorFlow's own, for the whole process; it is put back at the end. Two threads
    that build at once take turns: the end of one must not switch the other's back.
    """
    with CONTROL_FLOW_SWITCH, contextlib.ExitStack() as stack:
        if tf.control_flow_v2_enabled():
            tf.disable_control_flow_v2()
            stack.callback(tf.enable_control_flow_v2)
        yield


# ---- Sessions, checkpoints, determinism, profiles ------------------------------------------------

def threads_made() -> typing.Optional[int]:
    """The number of the intra-op threads that all sessions of this process share, 0 for one a core;
    None where TensorFlow has not made them yet, so that the first session's config decides.

    TensorFlow 2 makes them with the context of eager operations, which graph programs need as well:
    for the functions of a `tf.data` input, and for a sharded saver. 1.15 makes them with the first
    session.
    """
    if TF_VERSION < (2, 0):
        return None
    from tensorflow.python.eager import context
    eager_context = context.context_safe()
    if eager_context is None or not eager_context._initialized:
        return None
    return tf.config.threading.get_intra_op_parallelism_threads()


def set_threads(number: int):
    """Sets the number of the intra-op threads that all sessions of this process share, where
    TensorFlow 2 has not made them yet. On 1.15 the config of the first session sets it."""
    if TF_VERSION >= (2, 0) and threads_made() is None:
        tf.config.threading.set_intra_op_parallelism_threads(number)


def switch_off_graph_dialect(rewrites: typing.Any):
    """Switches off the passes by which TensorFlow 2 translates a graph to MLIR and back, in the
    `RewriterConfig` of a session.

    They take a tenth of the time of the first run of many towers, and gain nothing here: what they
    rewrite are functions.
    """
    if hasattr(rewrites, 'disable_tfg_optimizer'):  # 1.15 has none
        rewrites.disable_tfg_optimizer = True


def saved_as(variable: tf.Variable):
    """`(name, shape)` by which a `Saver` keeps a variable: for a part of a partitioned variable,
    as `tf.global_variables` lists it, those of the whole one."""
    info = variable._get_save_slice_info()
    if info is None:
        return variable.op.name, variable.shape
    return info.full_name, tf.TensorShape(info.full_shape)


def is_part(variable: tf.Variable) -> bool:
    """Whether a variable is a part of a partitioned variable."""
    return variable._get_save_slice_info() is not None


def names_given_to(saver: tf.train.Saver) -> dict:
    """{name in checkpoints: what a `Saver` keeps under it}, for a saver that was made with such a
    dict; {} for one that keeps variables under their own names."""
    given = getattr(saver, '_var_list', None)
    return given if isinstance(given, dict) else {}


def enable_determinism():
    """Makes operations compute the same bits in each run.

    On TF 2 an operation of a GPU that cannot do so fails. On 1.15 two environment variables choose
    other kernels; of these NVIDIA's build of TensorFlow looks at the first.
    """
    if TF_VERSION >= (2, 0):
        tensorflow.config.experimental.enable_op_determinism()
    else:
        os.environ['TF_DETERMINISTIC_OPS'] = os.environ['TF_CUDNN_DETERMINISTIC'] = '1'


def start_profile(directory: str) -> bool:
    """Begins a profile for TensorBoard; returns whether it has: graph mode of 1.15 has none."""
    if TF_VERSION < (2, 0):
        return False
    tensorflow.profiler.experimental.start(directory)
    return True


def stop_profile():
    """Ends the profile, and writes it."""
    tensorflow.profiler.experimental.stop()


def gives_metadata(session: tf.Session) -> bool:
    """Whether a call of a session fills its `RunMetadata` though its options ask for nothing."""
    config = session._config
    return config is not None and (config.graph_options.build_cost_model > 0
                                   or config.experimental.HasField('session_metadata'))


def called_as_run(session: tf.Session, function: typing.Callable, **options):
    """Calls a function that `session.make_callable` has made, with these options. An error of
    TensorFlow's names the operation that has failed, as an error of `session.run` does."""
    return session._do_call(functools.partial(function, **options))
