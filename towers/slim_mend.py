"""`mend_slim`, which makes tf_slim 1.1.0 work on TensorFlow 2.15 to 2.21.

Importing this module changes nothing and does not import tf_slim. Its test is
tests/test_compat.py.
"""

import inspect
import sys
import types
import typing

import tensorflow.compat.v1 as tf

from towers.compat import TF_VERSION
from towers.errors import InvalidArgumentError

_OPS = 'tensorflow.python.framework.ops'  # where slim also finds `GraphKeys`

# For each private module that tf_slim imports: the names that TF no longer has there, with the
# public functions and classes that have the signatures of TF 1.15.
_MOVED = {
    _OPS: {
        'Tensor': tf.Tensor, 'IndexedSlices': tf.IndexedSlices},
    'tensorflow.python.ops.array_ops': {
        'stack': tf.stack, 'unstack': tf.unstack},
    'tensorflow.python.ops.control_flow_ops': {
        'Assert': tf.Assert, 'case': tf.case, 'cond': tf.cond, 'while_loop': tf.while_loop},
    'tensorflow.python.ops.variable_scope': {
        'variable': tf.Variable},
}


class _GraphKeys:
    """`tf.GraphKeys`, except that `UPDATE_OPS` is an equal string and never the same object.

    If its `updates_collections` *is* that object, `slim.batch_norm` uses a Keras layer of a module
    that TF 2.15 and later do not have; else its own implementation. Both use the same variable
    names, the same collection and the same formula.
    """

    def __getattr__(self, name: str) -> typing.Any:
        """The name of another collection, from `tf.GraphKeys`."""
        return getattr(tf.GraphKeys, name)

    @property
    def UPDATE_OPS(self) -> str:  # pylint: disable=invalid-name
        """The name of the collection, a new string at each call."""
        return ''.join(list(tf.GraphKeys.UPDATE_OPS))  # Python would give one object for a copy


class _ModuleView(types.ModuleType):
    """An object that looks like a module with some names added; the module itself does not change.
    """

    def __init__(self, module: types.ModuleType, added: typing.Dict[str, typing.Any]):
        """Makes a view of a module, with the values that are `added` by name."""
        super().__init__(module.__name__, module.__doc__)
        self.__dict__.update(added)
        self._viewed = module

    def __getattr__(self, name: str) -> typing.Any:
        """The value of any other name, from the module."""
        return getattr(self._viewed, name)


def mend_slim() -> None:
    """Makes tf_slim 1.1.0 work on TF 2.15 to 2.21, without tf-keras. A no-op on TF 1.15.

    TF's own modules stay as they are. In each imported module of tf_slim the private TF modules are
    replaced by views of them, which also have the names that TF has moved. That reaches every net
    and every arg_scope, made before or after, since slim looks these names up when it is called. A
    second call changes nothing.

    `slim.batch_norm` falls back on slim's own implementation. That raises `InvalidArgumentError`
    for `renorm=True`, for `adjustment`, and, where it cannot be fused (`fused=False`, or inputs of
    a rank other than 2 and 4), for `param_regularizers` and for half-precision inputs.
    """
    import tf_slim  # pylint: disable=import-outside-toplevel
    if TF_VERSION < (2, 0):
        return
    views = _views_of_moved()
    package = tf_slim.__name__
    for name, module in list(sys.modules.items()):
        is_of_slim = (name + '.').startswith(package + '.')
        if is_of_slim and isinstance(module, types.ModuleType):
            _show_views(module, views)
    _guard_batch_norm(tf_slim.batch_norm)


def _views_of_moved() -> typing.Dict[str, _ModuleView]:
    """The views, by the name of the module, of the modules that lack names of `_MOVED`."""
    views = {}
    for name, moved in _MOVED.items():
        module = sys.modules.get(name)
        if module is None:  # tf_slim imports it no more
            continue
        added = {key: value for key, value in moved.items() if not hasattr(module, key)}
        if name == _OPS:
            added['GraphKeys'] = _GraphKeys()
        if added:
            views[name] = _ModuleView(module, added)
    return views


def _show_views(slim_module: types.ModuleType, views: typing.Dict[str, _ModuleView]) -> None:
    """Replaces the modules that are attributes of a module by their views, if they have one.

    `views` are by the names of the modules.
    """
    for attribute, held in list(vars(slim_module).items()):
        if isinstance(held, _ModuleView):  # mended before
            continue
        if isinstance(held, types.ModuleType) and held.__name__ in views:
            setattr(slim_module, attribute, views[held.__name__])


def _guard_batch_norm(batch_norm: typing.Any) -> None:
    """Makes slim's batch norm refuse arguments that its own implementation would ignore.

    `slim.batch_norm` is the wrapper that `add_arg_scope` has made. It adds the arguments of the
    open arg_scopes, and calls the real function, which is in the cell `func` of its closure. The
    content of this cell is replaced, and not the wrapper, for two reasons: the check sees the
    arguments of arg_scopes, too; and programs may hold the wrapper already, as in an arg_scope with
    `normalizer_fn=slim.batch_norm`.
    """
    # A cell of a closure holds one variable of the enclosing function, here of `add_arg_scope`.
    cell = batch_norm.__closure__[batch_norm.__code__.co_freevars.index('func')]
    unguarded = cell.cell_contents
    if hasattr(unguarded, 'unguarded'):
        return  # mended before
    signature = inspect.signature(unguarded)

    def guarded(*args, **kwargs):
        """Checks the arguments, and calls slim's batch norm."""
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        _check_batch_norm(bound.arguments)
        return unguarded(*args, **kwargs)

    setattr(guarded, 'unguarded', unguarded)
    # The key under which arg_scopes store the arguments for this function.
    setattr(guarded, '_key_op', batch_norm._key_op)
    cell.cell_contents = guarded


def _check_batch_norm(arguments: typing.Mapping[str, typing.Any]) -> None:
    """Raises `InvalidArgumentError` for arguments that only the missing Keras layer can handle."""
    if _uses_own_implementation(arguments):
        return
    if arguments['renorm']:
        raise _needs_keras('renorm=True')
    if arguments['adjustment']:
        raise _needs_keras('an adjustment')
    inputs = tf.convert_to_tensor(arguments['inputs'])
    is_fused = arguments['fused'] is not False and inputs.shape.ndims in (2, 4)
    if is_fused:  # slim's own fused batch norm does all of the rest
        return
    # Without fusion, slim ignores these regularizers, and the averages of half-precision inputs.
    if arguments['param_regularizers']:
        raise _needs_keras('param_regularizers, not fused')
    dtype = inputs.dtype.base_dtype
    if dtype in (tf.float16, tf.bfloat16):
        raise _needs_keras(dtype.name + ', not fused')


def _uses_own_implementation(arguments: typing.Mapping[str, typing.Any]) -> bool:
    """Whether slim uses its own implementation for these arguments on TF 1.15, too: then it does
    the same on all versions, and needs no Keras layer on any."""
    is_weighted = arguments['batch_weights'] is not None
    is_debiased = arguments['zero_debias_moving_mean']
    updates_elsewhere = arguments['updates_collections'] != tf.GraphKeys.UPDATE_OPS
    return is_weighted or is_debiased or updates_elsewhere


def _needs_keras(given: str) -> InvalidArgumentError:
    """The error for an argument, `given`, that only a Keras layer can handle."""
    return InvalidArgumentError(
        'slim.batch_norm was given %s, for which it needs a Keras layer that TensorFlow %s '
        'has no more. Leave it out (it is fused without `fused=` and for inputs of rank 2 '
        'or 4), use keras.layers.BatchNormalization, or run on TensorFlow 1.15.'
        % (given, tf.version.VERSION))
