"""Optimizers with a `minimize` of their own: called once, for the loss of the whole batch.

Many private optimizers clip, decay, or gather gradients over steps there, between
`compute_gradients` and `apply_gradients`. The method gets a loss S, `optimizer_gradients`, whose
gradients are the combined ones, transformed; and its operation is the update.
"""

import inspect
import itertools

import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import GradientError
from towers.graph import graph_walk
from towers.graph.variable_writes import Writes
from towers.tower.objectives import GradientsOfModel
from towers.tower.optimizer_gradients import computes_with, times

_numbers = itertools.count()  # of names in TensorFlow's registry of gradients


def has_own_minimize(optimizer):
    """Whether an optimizer's `minimize` is none of TensorFlow's.

    Besides that of `tf.train.Optimizer` there are some in `tf.contrib.opt`, which take one more
    argument, and do nothing besides.
    """
    if isinstance(optimizer, GradientsOfModel):
        return False
    method = getattr(optimizer, 'minimize', None)
    function = getattr(method, '__func__', method)
    if function is None or function is tf.train.Optimizer.minimize:
        return False
    # Where its code is: `functools.wraps` gives a function the module of another.
    module = getattr(function, '__globals__', {}).get('__name__', '')
    return module.split('.')[0] not in ('tensorflow', 'tensorflow_core')


def minimized(optimizer, loss, global_step, var_list):
    """What an optimizer's own `minimize` returns; it may be without `global_step` and `var_list`.

    Raises:
      GradientError: it needs another argument, or returns no operation.
    """
    called, arguments = 'minimize of ' + type(optimizer).__name__, dict(
        global_step=global_step, var_list=var_list)
    known = list(inspect.signature(optimizer.minimize).parameters.values())
    for each in known[1:]:
        if each.default is each.empty and each.name not in arguments and each.kind not in (
                each.VAR_KEYWORD, each.VAR_POSITIONAL):
            raise GradientError('%s needs the argument %r: expected minimize(loss, '
                                'global_step=None, var_list=None).' % (called, each.name))
    if not any(each.kind is each.VAR_KEYWORD for each in known):
        names = {each.name for each in known[1:]}
        arguments = {name: value for name, value in arguments.items() if name in names}
    applied = optimizer.minimize(loss, **arguments)
    if not isinstance(applied, (tf.Operation, tf.Tensor) + compat.VARIABLE_TYPES):
        raise GradientError('%s returned %.80r: expected the operation that updates the variables.'
                            % (called, applied))
    return applied


class Minimizing:
    """Has `apply_gradients`, as an optimizer, which calls the optimizer's own `minimize`."""

    def __init__(self, optimizer, loss, is_whole):
        """
        Args:
          optimizer: the optimizer.
          loss: the mean loss over the batch (of this machine).
          is_whole: whether no other machine has a part in the batch.
        """
        self._optimizer, self._loss, self._is_whole = optimizer, loss, is_whole
        self._called = 'minimize of ' + type(optimizer).__name__

    def apply_gradients(self, pairs, global_step=None):
        """The operation of one step.

        Args:
          pairs: list of `(gradient, variable)`; a gradient may be None.
          global_step: variable to increase by one, or None.

        Raises:
          GradientError: the method takes no gradient of its loss, or computes with the value of the
            loss of one of several machines.
        """
        given = [pair for pair in pairs if pair[0] is not None]
        surrogate, taken = self._surrogate(given)
        with graph_walk.Recording(surrogate.graph) as made:
            applied = minimized(self._optimizer, surrogate, global_step,
                                [variable for _, variable in pairs])
        if not taken:
            raise GradientError(self._called + ' takes no gradient of the loss that it is given.')
        if not self._is_whole and self._writes_with(made.operations, surrogate, given):
            raise GradientError(
                '%s computes with the value of the loss, which is of one worker\'s examples: let '
                'UPDATE_OPS write it to a variable, and read the variable.' % self._called)
        compat.replace_tensor(surrogate, self._loss)
        return applied

    def _surrogate(self, pairs):
        """`(S, taken)`: the list gets dL/dS each time that a gradient is taken."""
        taken, name = [], 'TowersMinimized%d' % next(_numbers)

        def gradients(unused_op, of_loss, *unused_rest):
            taken.append(of_loss)
            return [None] + [times(gradient, of_loss) for gradient, _ in pairs]
        tf.RegisterGradient(name)(gradients)
        with tf.name_scope('whole_loss'):
            reads = [variable.read_value() for _, variable in pairs]
            with tf.get_default_graph().gradient_override_map({'IdentityN': name}):
                return tf.identity_n([self._loss] + reads)[0], taken

    def _writes_with(self, made, surrogate, pairs):
        """Whether what is written to variables is computed with the value of the loss."""
        writes = Writes(surrogate.graph)
        return computes_with([tensor for op in made if writes.of(op) for tensor in op.inputs],
                             surrogate, pairs)
