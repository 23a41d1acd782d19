"""Makes tf_slim 1.1.0 work on a current TensorFlow, by one explicit call.

Names that are not public API, and why each is needed:

* the modules in `_MOVED`: tf_slim holds them, and looks in them for names that TensorFlow has
  moved. They are looked up by name, never imported here.
* `batch_norm.__closure__` and `batch_norm._key_op` of tf_slim: see `_guard_batch_norm`.
"""

import inspect
import sys
import types

import tensorflow.compat.v1 as tf

from towers import errors
from towers.compat import TF_VERSION

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


def mend_slim() -> None:
    """Makes tf_slim 1.1.0 work on TF 2.13 to 2.21, without tf-keras. A no-op on TF 1.15.

    TF's own modules stay as they are. Each imported module of tf_slim gets views in place of the
    private TF modules that it holds; a view also has the names that TF has moved. That reaches
    every net and every arg_scope, made before or after, since slim looks these names up when it is
    called. `tf_slim.nets` uses none of the moved names, so it may be imported later.

    Call it again as often as you like; nothing is mended twice.

    Raises (when slim is used, not here): `slim.batch_norm` falls back on slim's own implementation,
    which lacks some of what the lost Keras layer did. It raises `InvalidArgumentError` for
    `renorm=True`, for `adjustment`, and, where it cannot be fused (`fused=False`, or inputs of a
    rank other than 2 and 4), for `param_regularizers` and for half-precision inputs.
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
            views[name] = _ModuleView(module, added)
    package = tf_slim.__name__
    for name, slim_module in list(sys.modules.items()):
        if isinstance(slim_module, types.ModuleType) and (name + '.').startswith(package + '.'):
            for attribute, held in list(vars(slim_module).items()):
                if isinstance(held, types.ModuleType) and held.__name__ in views and not isinstance(
                        held, _ModuleView):
                    setattr(slim_module, attribute, views[held.__name__])
    if lost_batch_norm:
        _guard_batch_norm(tf_slim.batch_norm)


def _guard_batch_norm(batch_norm):
    """Makes slim's batch norm refuse arguments that its own implementation would ignore.

    `slim.batch_norm` is a function made by `add_arg_scope`; the function it wraps is in its closure
    and in no module. Exchanging it there catches every reference to `batch_norm` there is,
    `normalizer_fn=slim.batch_norm` in an arg_scope made long ago included, and sees the arguments
    that arg_scopes add.
    """
    cell = batch_norm.__closure__[batch_norm.__code__.co_freevars.index('func')]
    unguarded = cell.cell_contents
    if hasattr(unguarded, 'unguarded'):
        return  # mended before
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


def _check_batch_norm(arguments):
    """Raises `InvalidArgumentError` for a call that only the lost Keras layer could do right."""
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
