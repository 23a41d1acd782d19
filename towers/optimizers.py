"""Optimizers: their check, and facts about them by their class: slots, the effect of a factor of
the gradient, methods of their own, and which of them combine gradients over machines themselves.

`gradients.optimizer_methods` calls an optimizer's own methods, `reduce.update` its
`apply_gradients`.
"""

import abc
import contextlib
import inspect
import numbers
import re
import typing

import numpy as np
import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import ClusterError, InvalidArgumentError


class GradientsOfModel(abc.ABC):
    """Stands in place of an optimizer where the model function calls its own: `OptimizerCalls`."""

    @abc.abstractmethod
    def weights(self, batch: typing.Any) -> typing.Optional[list]:
        """The weights of the towers' losses, a list; None where these count as they are."""

    @abc.abstractmethod
    def call(self, weight: typing.Any, placement: typing.Any) -> typing.ContextManager:
        """The context of the model function's call, whose loss has this weight."""

    @abc.abstractmethod
    def fetches(self) -> list:
        """The tensors and operations of tower 0 that the update is made of."""

    @abc.abstractmethod
    def slots(self) -> list:
        """List of the variables that the model's optimizers have made."""

    @abc.abstractmethod
    def optimizers(self) -> list:
        """List of the model's optimizers."""

    @abc.abstractmethod
    def compute_gradients(self, loss: tf.Tensor, var_list: typing.Optional[list] = None) -> list:
        """The `(gradient, variable)` pairs of tower 0's calls, weighted."""

    @abc.abstractmethod
    def of_all_towers(self, copies: typing.Sequence[typing.Callable]) -> typing.Any:
        """An object with `apply_gradients`, as an optimizer. `copies` are functions from a tensor
        of tower 0 to its copy, one for each further tower."""


class OptimizerAround(tf.train.Optimizer):
    """An optimizer of towers' own around another one, which it may make when that is first used."""

    def wrapped(self) -> tf.train.Optimizer:
        """The optimizer that this one is around."""
        raise NotImplementedError


def check_optimizer(optimizer: typing.Any, argument: str = 'optimizer',
                    or_else: str = 'or None to evaluate') -> None:
    """Raises `InvalidArgumentError` for an object without the methods of a `tf.train.Optimizer`.

    Args:
      optimizer: that was given.
      argument: its name.
      or_else: which other values are allowed, in words; empty for none.
    """
    if isinstance(optimizer, type):
        raise InvalidArgumentError('%s=%.80r is a class: pass an instance, such as '
                                   'tf.train.AdamOptimizer(0.001).' % (argument, optimizer))
    if isinstance(optimizer, (tf.train.Optimizer, GradientsOfModel)):
        return
    has_methods = hasattr(optimizer, 'compute_gradients') and hasattr(optimizer, 'apply_gradients')
    # Some Keras optimizers have methods of these names as well, with other arguments.
    if has_methods and 'global_step' in inspect.signature(optimizer.apply_gradients).parameters:
        return
    others = ', ' + or_else if or_else else ''
    raise InvalidArgumentError(
        '%s=%.80r has no compute_gradients(loss, var_list) and apply_gradients(pairs, '
        'global_step): expected a tf.train.Optimizer (Keras optimizers are none)%s.' % (
            argument, optimizer, others))


# ---- by class ------------------------------------------------------------------------------------

OPTIMIZER_UPDATES = re.compile(r'^(Resource)?(Sparse)?Apply[A-Z]')
"""Types of the operations by which TensorFlow's optimizers update a variable."""


class Known(typing.NamedTuple):
    """Facts about an optimizer's class.

    Attributes:
      slots: how many variables it keeps for each one that it trains.
      effect: of a factor of the gradient: the step `'scales'`; the factor is `'ignored'` (nearly),
        since the step is divided by the gradient's size; or None.
    """

    slots: int
    effect: typing.Optional[str]


_KNOWN = {
    'AdadeltaOptimizer': Known(2, 'ignored'), 'AdagradOptimizer': Known(1, 'ignored'),
    'AdagradDAOptimizer': Known(2, None), 'AdamOptimizer': Known(2, 'ignored'),
    'AdamWOptimizer': Known(2, 'ignored'), 'AdamWeightDecayOptimizer': Known(2, 'ignored'),
    'FtrlOptimizer': Known(2, None),
    'GradientDescentOptimizer': Known(0, 'scales'), 'LAMBOptimizer': Known(2, 'ignored'),
    'MomentumOptimizer': Known(1, 'scales'), 'ProximalAdagradOptimizer': Known(1, None),
    'ProximalGradientDescentOptimizer': Known(0, None), 'RMSPropOptimizer': Known(2, 'ignored')}


def number_of_slots(optimizer: typing.Any) -> int:
    """How many slots an optimizer makes for a variable; 1 for one that is not known here."""
    for kind in type(optimizer).__mro__:
        if kind.__name__ in _KNOWN:
            return _KNOWN[kind.__name__].slots
    inner = compat.wrapped_optimizer(optimizer)
    return 1 if inner is None else number_of_slots(inner)


def describe_learning_rate(optimizer: typing.Any, added: int) -> str:
    """The plan's line: the learning rate, and the effect of a sum of `added` towers' gradients."""
    rate = compat.optimizer_learning_rate(optimizer)
    times_added = 'the rate'
    if isinstance(rate, numbers.Real) or isinstance(rate, np.ndarray) and rate.size == 1:
        text = '%g' % rate
        times_added = '%g = %g' % (float(rate), added * float(rate))
    elif isinstance(rate, (tf.Tensor,) + compat.VARIABLE_TYPES):
        text = 'the tensor %r' % rate.op.name
    else:
        text = 'not known to the plan'
    if added == 1:
        return text
    kind = type(optimizer).__name__
    effect = _KNOWN[kind].effect if kind in _KNOWN else None
    if effect == 'scales':
        return '%s; on the sum, steps as %d x %s would on the mean' % (text, added, times_added)
    if effect == 'ignored':
        return '%s; %s steps on a sum (nearly) as on the mean' % (text, kind)
    return '%s; applied to a sum of %d' % (text, added)


def is_repeatable(optimizer: typing.Any) -> bool:
    """Whether an optimizer does to a replica exactly what it does to its variable.

    TensorFlow's own go by the gradient and the slots of each variable alone; but for
    `AdagradDAOptimizer`, which goes by the global step, too. A subclass may do more.
    """
    name = type(optimizer).__name__
    is_tensorflows = type(optimizer) is getattr(tf.train, name, None)
    return is_tensorflows and name in _KNOWN and name != 'AdagradDAOptimizer'


def has_own_minimize(optimizer: typing.Any) -> bool:
    """Whether an optimizer's `minimize` is none of TensorFlow's, nor of `tf.contrib.opt`."""
    method = getattr(optimizer, 'minimize', None)
    function = getattr(method, '__func__', method)
    if function is None or function is tf.train.Optimizer.minimize:
        return False
    # Where its code is: `functools.wraps` gives a function the module of another.
    module = getattr(function, '__globals__', {}).get('__name__', '')
    return module.split('.')[0] not in ('tensorflow', 'tensorflow_core')


def has_own_compute_gradients(optimizer: typing.Any) -> bool:
    """Whether gradients are taken by a `compute_gradients` that is none of TensorFlow's: not by the
    model function's own optimizers, nor where a `minimize` of its own calls it."""
    if isinstance(optimizer, GradientsOfModel) or has_own_minimize(optimizer):
        return False
    function = getattr(optimizer.compute_gradients, '__func__', None)
    return function is not tf.train.Optimizer.compute_gradients


@contextlib.contextmanager
def rows_at_rate(optimizer: typing.Any) -> typing.Iterator[None]:
    """The context of an optimizer's `apply_gradients`, in which TF 1.15's gradient descent casts
    its learning rate for sparse gradients, too: a rate in float64, or one by a function."""
    with contextlib.ExitStack() as undo:
        for each in _with_wrapped(optimizer):
            undo.enter_context(compat.descent_by_rows(each))
        yield


# ---- that combine gradients over machines --------------------------------------------------------

_PACKAGES = frozenset(['horovod', 'byteps', 'kungfu', 'bluefog', 'smdistributed'])
"""Packages whose optimizers, of whatever name, are around another one and combine."""

_CLASSES = frozenset(['SyncReplicasOptimizer', 'CrossShardOptimizer', 'ElasticAverageOptimizer',
                      'ModelAverageOptimizer', 'AGNOptimizer'])
"""Names of TensorFlow's own, and those of contrib; subclasses count."""


def combiner_of(optimizer: typing.Any) -> typing.Any:
    """The optimizer that combines gradients over machines: the given one, or one that it wraps,
    however deep; or None. `build_towers(cluster=…)` combines, too: numbers would be wrong.

    Nothing is imported: classes are told by the names of themselves and of their modules. What an
    optimizer wraps is in some attribute of its own, or in a list or dict there.
    """
    for each in _with_wrapped(optimizer):
        if _combining_class(each) is not None:
            return each
    return None


def name_of(combiner: typing.Any) -> str:
    """The class of a combiner as its users know it, such as `'horovod.DistributedOptimizer'`."""
    kind = _combining_class(combiner)
    if kind.__name__ in _CLASSES:
        return kind.__name__
    return '%s.%s' % (kind.__module__.partition('.')[0], kind.__name__.lstrip('_'))


def _combining_class(optimizer: typing.Any) -> typing.Any:
    """The first class of an optimizer, or of its bases, that combines; or None."""
    for kind in type(optimizer).__mro__:
        if kind.__name__ in _CLASSES or kind.__module__.partition('.')[0] in _PACKAGES:
            return kind
    return None


def check_alone(optimizers: typing.Iterable = (), leaves_servers: bool = True,
                variables: typing.Iterable[tf.Variable] = ()) -> None:
    """Raises `ClusterError` for a program of TensorFlow's parameter servers without `cluster=`.

    Args:
      optimizers: of the losses.
      leaves_servers: whether the towers would have the variables elsewhere.
      variables: of the graph.
    """
    found = None
    if leaves_servers:
        devices = [variable.device for variable in variables] + [compat.devices_of_new_variables()]
        found = re.search('/job:ps(/task:[0-9]+)?', ' '.join(devices))
    if found is not None:
        used = 'a variable on ' + found.group()
    elif any(_is_synchronous(combiner_of(optimizer)) for optimizer in optimizers):
        used = 'a SyncReplicasOptimizer'
    else:
        return
    raise ClusterError(
        'this program is one for parameter servers (%s), and without cluster= the towers would '
        'leave them: pass cluster=towers.Cluster(…) and the optimizer alone to build_towers, '
        'and train within towers.join(cluster, built), see docs/migration.md.' % used)


def _is_synchronous(combiner: typing.Any) -> bool:
    """Whether a combiner, or None, is TensorFlow's for synchronous parameter servers."""
    return combiner is not None and name_of(combiner) == 'SyncReplicasOptimizer'


def _with_wrapped(optimizer: typing.Any) -> list:
    """An optimizer, and those that it wraps, however deep."""
    found = []
    stack = [optimizer]
    seen = set()
    while stack:
        each = stack.pop()
        if id(each) not in seen:
            seen.add(id(each))
            found.append(each)
            stack.extend(reversed(_wrapped(each)))
    return found


def _wrapped(optimizer: typing.Any) -> list:
    """The optimizers that are attributes of an optimizer, or members of such."""
    candidates: list = []
    if isinstance(optimizer, OptimizerAround):
        candidates.append(optimizer.wrapped())
    for value in list(getattr(optimizer, '__dict__', {}).values()):
        if isinstance(value, dict):
            candidates += value.values()
        elif isinstance(value, (list, tuple)):
            candidates += value
        else:
            candidates.append(value)
    return [each for each in candidates if _is_optimizer(each)]


def _is_optimizer(value: typing.Any) -> bool:
    """Whether something is an optimizer, of TensorFlow or by its methods."""
    if isinstance(value, type):
        return False
    methods = (getattr(value, 'compute_gradients', None), getattr(value, 'apply_gradients', None))
    return isinstance(value, tf.train.Optimizer) or all(map(callable, methods))
