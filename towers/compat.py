"""Every difference between TensorFlow versions that this package has to know, 1.15 to 2.21.

Importing this module changes nothing and imports neither Keras nor tf_slim. The one patch in here,
`mend_slim`, is made by calling it.

Names that are not public API, and why each is needed:

* the modules in `_KERAS_LAYERS` and `_LEGACY_LAYERS`: the base classes that every Keras layer and
  every `tf.layers` layer passes through when it is called. `tf.keras.layers.Layer` is public, but
  in graph mode Keras 2 swaps it for a sibling in `base_layer_v1` that is not, and naming it would
  import Keras into programs that do not use it. Looked up in `sys.modules`, never imported.
* `_callable_losses` of a Keras 2 layer: the public `losses` of a model hold those of its parts, so
  that a part shared by two models, or a `tf.layers` layer inside a model (which has already put
  its loss into a collection), would be counted twice.
* `_flatten_layers` of a Keras 2.15 layer, the parts of a layer for the same purpose: the public
  `submodules` raises for an LSTM with dropout in graph mode (not on 1.15, which has just that).
* `_keras_history` of a tensor: whether it comes from a `keras.Input`. No public call tells on all
  of these versions.
* `batch_norm.__closure__` and `batch_norm._key_op` of tf_slim: see `_guard_batch_norm`.
* `_update_input` and `_get_control_flow_context` of an operation: TF has no public way to give an
  operation another input, nor to ask whether it is in a `tf.cond` or `tf.while_loop`.
* `_device_assignments`, `_set_device`, `_set_attr` and `_add_control_inputs` of an operation: a
  clone of a tower's graph has to know which device scope an operation got its device from, and set
  what `tf.import_graph_def` cannot be told: devices and colocations beside operations outside of
  what is imported, and control inputs from there.
* `_get_function` of a graph: the device scopes in the body of a function, for the same purpose, are
  not in its definition.
* `_do_call` of a session: what a function of `make_callable` raises names an operation by a mark in
  its text; this is where `Session.run` turns the mark into the operation and the line that made it.
* `_get_partitions`, `_get_save_slice_info` and `_set_save_slice_info`: see `partitioned_like`.
* `_initializer_op` of a variable: see `initialize_with`.
* `_lr` and `_learning_rate` of TF's optimizers: no public call tells an optimizer's rate, and the
  plan shows it. Where neither is there the plan says that it does not know.
"""

import inspect
import sys
import types

import tensorflow
import tensorflow.compat.v1 as tf

from towers import errors

# (major, minor), e.g. (1, 15) or (2, 21).
TF_VERSION = tuple(int(part) for part in tf.version.VERSION.split('.')[:2])


# ---- tf_slim 1.1.0 on a current TensorFlow ------------------------------------------------------

# Private modules that tf_slim imports -> names that TF no longer has there, and the public
# equivalent with the same signature as TF 1.15 had.
_MOVED = {
    'tensorflow.python.framework.ops': {
        'Tensor': tf.Tensor, 'IndexedSlices': tf.IndexedSlices},
    'tensorflow.python.ops.array_ops': {
        'stack': tf.stack, 'unstack': tf.unstack},
    'tensorflow.python.ops.control_flow_ops': {
        'Assert': tf.Assert, 'case': tf.case, 'cond': tf.cond, 'while_loop': tf.while_loop},
    'tensorflow.python.ops.variable_scope': {
        'variable': tf.Variable},
}
_OPS = 'tensorflow.python.framework.ops'

# From this version on `slim.batch_norm` looks for a Keras layer in a module that does not exist.
_BATCH_NORM_LOST = (2, 15)


class _GraphKeys(object):
    """`tf.GraphKeys`, except that `UPDATE_OPS` is an equal string and never the same object.

    `slim.batch_norm` takes the lost Keras layer if its `updates_collections` *is* that object, and
    its own implementation otherwise; both use the same variable names, the same collection and the
    same formula. As the property makes a new string each time, the identity never holds, whether
    the argument comes from slim's default, an arg_scope or the caller.
    """

    def __getattr__(self, name):
        return getattr(tf.GraphKeys, name)

    @property
    def UPDATE_OPS(self):  # pylint: disable=invalid-name
        return ''.join(list(tf.GraphKeys.UPDATE_OPS))


class _ModuleView(types.ModuleType):
    """A module with some names added, seen only by those who hold the view."""

    def __init__(self, module, added):
        super(_ModuleView, self).__init__(module.__name__, module.__doc__)
        self.__dict__.update(added)
        self._viewed = module

    def __getattr__(self, name):
        return getattr(self._viewed, name)

    def __dir__(self):
        return sorted(set(dir(self._viewed)) | set(self.__dict__))


def mend_slim():
    """Makes tf_slim 1.1.0 work on TF 2.13 to 2.21, without tf-keras. A no-op on TF 1.15.

    TF's own modules stay as they are. The modules of tf_slim that have been imported so far get,
    in place of the private TF modules they hold, views of them that also have the names which TF
    moved elsewhere. That reaches every net and every arg_scope, made before or after, as they look
    these names up when they are called. `tf_slim.nets` uses none of the moved names, so it may be
    imported later.

    Call it again as often as you like; nothing is mended twice.

    Raises (when slim is used, not here): `slim.batch_norm` falls back on slim's own implementation,
    which lacks some of what the lost Keras layer did. It raises `InvalidArgumentError` for
    `renorm=True`, for `adjustment`, and, where it cannot be fused (`fused=False`, or inputs of a
    rank other than 2 and 4), for `param_regularizers` and for half-precision inputs.

    Returns:
        A sorted list of the names that were mended by this call, such as 'array_ops.stack'; empty
        when there was nothing (left) to mend.
    """
    import tf_slim  # pylint: disable=import-outside-toplevel

    lost_batch_norm = TF_VERSION >= _BATCH_NORM_LOST
    views = {}
    for name, moved in _MOVED.items():
        module = sys.modules.get(name)
        if module is None:
            continue
        added = {key: value for key, value in moved.items() if not hasattr(module, key)}
        if name == _OPS and lost_batch_norm:
            added['GraphKeys'] = _GraphKeys()
        if added:
            views[name] = (_ModuleView(module, added), added)

    mended = set()
    for slim_module in _loaded_under(tf_slim.__name__):
        for attribute, held in list(vars(slim_module).items()):
            if not isinstance(held, types.ModuleType) or isinstance(held, _ModuleView):
                continue
            if held.__name__ in views:
                view, added = views[held.__name__]
                setattr(slim_module, attribute, view)
                short = held.__name__.rsplit('.', 1)[-1]
                mended.update('%s.%s' % (short, key) for key in added)
    if lost_batch_norm and _guard_batch_norm(tf_slim.batch_norm):
        mended.add('batch_norm')
    return sorted(mended)


def _loaded_under(package):
    """The imported modules of `package`, itself included."""
    return [module for name, module in sorted(sys.modules.items())
            if isinstance(module, types.ModuleType)
            and (name == package or name.startswith(package + '.'))]


def _guard_batch_norm(batch_norm):
    """Makes slim's batch norm refuse what its own implementation would silently leave out.

    `slim.batch_norm` is a function made by `add_arg_scope`; the function it wraps is in its closure
    and in no module. Exchanging it there catches every reference to `batch_norm` there is,
    `normalizer_fn=slim.batch_norm` in an arg_scope made long ago included, and sees the arguments
    that arg_scopes add.

    Returns:
        Whether the guard was put in by this call.
    """
    cell = batch_norm.__closure__[batch_norm.__code__.co_freevars.index('func')]
    unguarded = cell.cell_contents
    if hasattr(unguarded, 'unguarded'):
        return False
    signature = inspect.signature(unguarded)

    def guarded(*args, **kwargs):
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        _check_batch_norm(bound.arguments)
        return unguarded(*args, **kwargs)

    guarded.unguarded = unguarded
    # The key under which arg_scopes store the arguments for this function.
    guarded._key_op = batch_norm._key_op  # pylint: disable=protected-access
    cell.cell_contents = guarded
    return True


def _check_batch_norm(arguments):
    """Raises for a call of slim's batch norm that would have needed the Keras layer of old."""
    if (arguments['batch_weights'] is not None or arguments['zero_debias_moving_mean'] or
            arguments['updates_collections'] != tf.GraphKeys.UPDATE_OPS):
        return  # slim never used the Keras layer for these
    for name in ('renorm', 'adjustment'):
        if arguments[name]:
            raise errors.InvalidArgumentError(
                'slim.batch_norm was given %s=%r, which needs a Keras layer that TensorFlow %s no '
                'longer has for tf_slim. Leave it out, use another batch norm (such as '
                'keras.layers.BatchNormalization), or run on TensorFlow 1.15.'
                % (name, arguments[name], tf.version.VERSION))
    inputs = tf.convert_to_tensor(arguments['inputs'])
    if arguments['fused'] is not False and inputs.shape.ndims in (2, 4):
        return
    wrong = None
    if arguments['param_regularizers']:
        wrong = 'param_regularizers (they would be ignored)'
    elif inputs.dtype.base_dtype in (tf.float16, tf.bfloat16):
        wrong = '%s inputs (its moving averages would be that too)' % inputs.dtype.base_dtype.name
    if wrong:
        raise errors.InvalidArgumentError(
            'slim.batch_norm was given %s together with fused=%r and inputs of shape %s. On '
            'TensorFlow %s it can only do that fused: leave `fused` out and give inputs of rank 2 '
            'or 4.' % (wrong, arguments['fused'], inputs.shape, tf.version.VERSION))


# ---- Keras --------------------------------------------------------------------------------------

# Modules whose `Layer` is a base class of Keras layers. In order: tf.keras of 1.15 (in TF 2 a copy
# that some programs import as tensorflow.python.keras); Keras 2.15; tf_keras; Keras 3.
_KERAS_3 = 'keras.src.layers.layer'
_KERAS_LAYERS = (
    'tensorflow.python.keras.engine.base_layer',
    'tensorflow.python.keras.engine.base_layer_v1',
    'keras.src.engine.base_layer',
    'keras.src.engine.base_layer_v1',
    'tf_keras.src.engine.base_layer',
    'tf_keras.src.engine.base_layer_v1',
    _KERAS_3,
)
# Modules whose `Layer` is the base class of `tf.layers`, of the RNN cells of `tf.nn.rnn_cell` and
# of what tf_slim uses. They put their updates and losses into the graph's collections themselves.
_LEGACY_LAYERS = (
    'tensorflow.python.layers.base',
    'tensorflow.python.keras.legacy_tf_layers.base',
    'keras.src.legacy_tf_layers.base',
    'tf_keras.src.legacy_tf_layers.base',
)


def keras_layer_modules():
    """Names of the modules that may define a base class of Keras layers, imported or not."""
    return _KERAS_LAYERS


def keras_base_layers():
    """The base classes of Keras layers that the program has imported so far, each one once."""
    return _classes(_KERAS_LAYERS)


def _classes(module_names):
    found = []
    for name in module_names:
        layer = getattr(sys.modules.get(name), 'Layer', None)
        if layer is not None and layer not in found:
            found.append(layer)
    return tuple(found)


def is_legacy_layer(layer):
    """Whether `layer` is of `tf.layers`, `tf.nn.rnn_cell` or tf_slim, which use collections."""
    return isinstance(layer, _classes(_LEGACY_LAYERS))


def is_keras_3(layer):
    """Whether `layer` is of Keras 3, which knows no graphs and keeps no list of updates."""
    return isinstance(layer, _classes((_KERAS_3,)))


def is_keras_3_symbol(value):
    """Whether `value` is a Keras 3 stand-in for a tensor, from which models are drawn."""
    symbols = getattr(sys.modules.get('keras.src.backend.common.keras_tensor'), 'KerasTensor', ())
    return isinstance(value, symbols)


def is_keras_input(op):
    """Whether `op` is the placeholder that Keras 2 made for a `keras.Input`."""
    return op.type == 'Placeholder' and hasattr(op.outputs[0], '_keras_history')


def keras_variables(layer, trainable=False):
    """The `tf.Variable`s of a Keras layer and its parts: all of them, or the trainable ones."""
    variables = layer.trainable_variables if trainable else layer.variables
    if is_keras_3(layer):
        # A Keras 3 variable is no tf.Variable, but holds one.
        return [variable.value for variable in variables]
    return list(variables)


def keras_variable_value(variable):
    """The `tf.Variable` behind a Keras 3 variable; anything else as it is."""
    value = getattr(variable, 'value', None)
    return value if isinstance(value, VARIABLE_TYPES) else variable


def keras_weight_losses(layer):
    """What a Keras layer and its parts add to the loss whatever they are called on.

    That is the regularizers of their weights, and losses given to `add_loss` as functions. Parts
    that are `tf.layers` layers are left out: their losses are in a collection.

    Returns:
        A list of (key, function) pairs. Two pairs with equal keys, from two layers, stand for the
        same loss. The function makes the scalar tensor, or returns None if there is no loss.
    """
    if is_keras_3(layer):
        return [(id(variable), _regularizer_of(variable)) for variable in layer.trainable_variables
                if variable.regularizer is not None]
    pairs = []
    for part in _parts_of(layer):
        if not is_legacy_layer(part):
            pairs.extend((id(loss), loss)
                         for loss in part._callable_losses)  # pylint: disable=protected-access
    return pairs


def _parts_of(layer):
    """A Keras 2 layer and the layers that it contains, at any depth."""
    if hasattr(layer, '_flatten_layers'):
        return list(layer._flatten_layers())  # pylint: disable=protected-access
    return [part for part in (layer,) + tuple(layer.submodules)
            if isinstance(part, keras_base_layers())]


def _regularizer_of(variable):
    return lambda: variable.regularizer(variable)


# ---- Variables and optimizers -------------------------------------------------------------------

# On TF 2 resource variables are instances of the one class and reference variables of the other.
VARIABLE_TYPES = (tf.Variable, tensorflow.Variable)
# A data set made through `import tensorflow as tf` is none of the compat.v1 class on TF 2.
DATASET_TYPES = (tf.data.Dataset, tensorflow.data.Dataset)


def optimizer_learning_rate(optimizer):
    """What an optimizer says its learning rate is: a number, a tensor, or None if it does not."""
    for name in ('_lr', '_learning_rate', 'learning_rate'):
        rate = getattr(optimizer, name, None)
        if rate is not None:
            return rate() if callable(rate) else rate
    return None


def initialize_with(variable, value):
    """Makes a tensor what a variable's initializer gives it, whatever it was made with.

    A variable that is made with a value which depends on another variable gets TF's rewritten copy
    of that value's graph, on its own device, where a reference variable of another device cannot
    be read.
    """
    with tf.control_dependencies(None):
        assign = tf.assign(variable, value, validate_shape=value.shape.is_fully_defined())
    variable._initializer_op = assign.op  # pylint: disable=protected-access


def parts_of(variable):
    """The parts of a partitioned variable as a list; None for anything else."""
    return list(variable) if hasattr(variable, '_get_partitions') else None


def partitioned_like(whole, parts):
    """A partitioned variable of other parts, cut as `whole` is.

    TF has no public way to make one of parts that are there, nor to say which part is which.
    """
    # pylint: disable=protected-access
    for part, original in zip(parts, whole):
        part._set_save_slice_info(original._get_save_slice_info())
    return type(whole)(name=whole.name, shape=whole.shape, dtype=whole.dtype,
                       variable_list=parts, partitions=whole._get_partitions())


# What the kernel of `CollectiveReduce` on CPUs adds.
COLLECTIVE_DTYPES = (tf.float32, tf.float64) + ((tf.float16,) if TF_VERSION >= (2, 0) else ())


# ---- Operations ---------------------------------------------------------------------------------


def in_control_flow(op):
    """Whether an operation is in a branch of a `tf.cond` or the body of a `tf.while_loop`."""
    return op._get_control_flow_context() is not None  # pylint: disable=protected-access


def replace_tensor(old, new):
    """Makes every operation that reads the tensor `old` read `new` instead."""
    for reader in old.consumers():
        for position, tensor in enumerate(reader.inputs):
            if tensor.name == old.name:
                reader._update_input(position, new)  # pylint: disable=protected-access


def replace_input(op, position, new):
    """Makes one operation read the tensor `new` as its input at that position."""
    op._update_input(position, new)  # pylint: disable=protected-access


def device_scopes(op):
    """The arguments of the `tf.device` scopes that an operation was made in, innermost first.

    Each as the `str()` of the argument: a name, 'None', or for a function 'name<file, line>'.
    """
    return [scope.obj for scope in op._device_assignments]  # pylint: disable=protected-access


def set_device(op, device):
    """Puts a finished operation on a device, whatever scopes it was made in."""
    op._set_device(device)  # pylint: disable=protected-access


def set_colocation(op, groups):
    """Makes a finished operation colocated with others; `groups` are bytes, `b'loc:@name'`."""
    value = tf.AttrValue(list=tf.AttrValue.ListValue(s=groups))
    op._set_attr('_class', value)  # pylint: disable=protected-access


def add_control_inputs(op, others):
    """Makes a finished operation wait for others."""
    op._add_control_inputs(others)  # pylint: disable=protected-access


def function_operations(graph, name):
    """{name: operation} of the body of a function of the graph; empty where TF does not keep it."""
    function = graph._get_function(name)  # pylint: disable=protected-access
    body = getattr(function, 'graph', None)
    return {} if body is None else {op.name: op for op in body.get_operations()}


def call_in_session(session, function):
    """Calls a function of `session.make_callable`; its errors are those of `Session.run`."""
    return session._do_call(function)  # pylint: disable=protected-access


# ---- Checkpoints --------------------------------------------------------------------------------


def saved_as(variable):
    """Name and shape under which a `Saver` keeps a variable: a part goes under its whole's.

    `_get_save_slice_info` is what `Saver` asks for that; there is no public way from a part of a
    partitioned variable, as `tf.global_variables` lists them, to the whole.
    """
    info = variable._get_save_slice_info()  # pylint: disable=protected-access
    if info is None:
        return variable.op.name, variable.shape
    return info.full_name, tf.TensorShape(info.full_shape)
