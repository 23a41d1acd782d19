"""Facts about optimizers, and what is refused as one.

The facts are: how many slots an optimizer makes, how a factor of the gradient changes its step,
whether it overrides methods of `tf.train.Optimizer`, and whether it combines gradients over
machines itself. `gradients.optimizer_methods` calls the methods that an optimizer overrides,
`reduce.update` its `apply_gradients`. Tests are in tests/gradients/test_optimizer_gradients.py and
test_optimizer_minimize.py.
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
    """The interface of what takes an optimizer's place where the model function calls optimizers.

    `fronts.optimizer_calls.OptimizerCalls` implements it.
    """

    @abc.abstractmethod
    def weights(self, batch: typing.Any) -> typing.Optional[list]:
        """The factors with which the losses of the towers are multiplied; None if with none.

        `batch` is the `CutBatch` of the build.
        """

    @abc.abstractmethod
    def call(self, weight: typing.Any, placement: typing.Any) -> typing.ContextManager:
        """The context of the model function's call.

        Args:
          weight: the factor of the tower's loss, a number or a scalar; or None.
          placement: the `Placement` of the variables.
        """

    @abc.abstractmethod
    def fetches(self) -> list:
        """The tensors and operations of tower 0 that the updates need."""

    @abc.abstractmethod
    def slots(self) -> list:
        """The variables that the model function's optimizers have made."""

    @abc.abstractmethod
    def optimizers(self) -> list:
        """The optimizers that the model function calls."""

    @abc.abstractmethod
    def compute_gradients(self, loss: tf.Tensor, var_list: typing.Optional[list] = None) -> list:
        """The weighted `(gradient, variable)` pairs of all optimizer calls in tower 0."""

    @abc.abstractmethod
    def of_all_towers(self, copies: typing.Sequence[typing.Callable]) -> typing.Any:
        """An object whose `apply_gradients` makes the updates of all towers.

        Args:
          copies: for each tower but the first, a function from a tensor of tower 0 to its copy.
        """


class OptimizerAround(tf.train.Optimizer):
    """The base of the optimizers of this package that wrap another one."""

    def wrapped(self) -> tf.train.Optimizer:
        """The optimizer inside; it may be made when this is first called."""
        raise NotImplementedError


def check_optimizer(optimizer: typing.Any, argument: str = 'optimizer',
                    or_else: str = 'or None to evaluate') -> None:
    """Raises `InvalidArgumentError` for an object without the methods of a `tf.train.Optimizer`.

    Args:
      optimizer: the value that was given.
      argument: the name of the argument.
      or_else: the error's text about other values that are allowed; empty for none.
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
      slots: how many variables it keeps for each variable that it trains.
      effect: what a factor of the gradient does to the step: `'scales'` it by the same factor;
        `'ignored'` (nearly), since the step is divided by the gradient's size; None for neither.
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
    """How many slots an optimizer makes for a variable, for estimates of the memory of a stage.

    It is that of the class, or of the optimizer that it wraps; of an unknown one 1, as of most.
    """
    for each_class in type(optimizer).__mro__:
        if each_class.__name__ in _KNOWN:
            return _KNOWN[each_class.__name__].slots
    wrapped = compat.wrapped_optimizer(optimizer)
    return 1 if wrapped is None else number_of_slots(wrapped)


def check_learning_rate(optimizer: typing.Any, graph: tf.Graph) -> None:
    """Raises `InvalidArgumentError` if an optimizer's learning rate is a tensor or a variable of
    another graph than `graph`, in which it is to be used."""
    rate = compat.learning_rate_as_given(optimizer)
    is_in_a_graph = isinstance(rate, (tf.Tensor,) + compat.VARIABLE_TYPES)
    # A variable that was made eagerly has no graph, and is let pass here.
    if is_in_a_graph and getattr(rate, 'graph', graph) is not graph:
        raise InvalidArgumentError(
            'the learning rate of %.80r is %.80r, which belongs to another graph: make it, and the '
            'optimizer, in the graph of the model.' % (type(optimizer).__name__, rate.name))


def describe_learning_rate(optimizer: typing.Any, num_summed: int) -> str:
    """The plan's text about an optimizer's learning rate.

    Of SGD with a rate of 0.1 on a sum of 4: '0.1; on the sum, steps as 4 x 0.1 = 0.4 would on the
    mean'.

    Args:
      optimizer: the optimizer.
      num_summed: how many towers' gradients are summed, and not averaged; 1 for a mean.
    """
    rate = compat.optimizer_learning_rate(optimizer)
    if _is_one_number(rate):
        text = '%g' % rate
    elif isinstance(rate, (tf.Tensor,) + compat.VARIABLE_TYPES):
        text = 'the tensor %r' % rate.op.name
    else:
        text = 'not known to the plan'
    if num_summed == 1:
        return text
    return '%s; %s' % (text, _effect_of_sum(optimizer, rate, num_summed))


def _is_one_number(rate: typing.Any) -> bool:
    """Whether a learning rate is a number, or a NumPy array of one."""
    if isinstance(rate, np.ndarray):
        return rate.size == 1
    return isinstance(rate, numbers.Real)


def _effect_of_sum(optimizer: typing.Any, rate: typing.Any, num_summed: int) -> str:
    """The plan's text about the step that an optimizer makes on a sum of gradients.

    Args:
      optimizer: the optimizer.
      rate: its learning rate; anything that is no number where it is not known.
      num_summed: how many towers' gradients are summed.
    """
    class_name = type(optimizer).__name__
    effect = _KNOWN[class_name].effect if class_name in _KNOWN else None
    if effect == 'ignored':
        return '%s steps on a sum (nearly) as on the mean' % class_name
    if effect != 'scales':
        return 'applied to a sum of %d' % num_summed
    if _is_one_number(rate):
        product = '%d x %g = %g' % (num_summed, float(rate), num_summed * float(rate))
    else:
        product = '%d x the rate' % num_summed
    return 'on the sum, steps as %s would on the mean' % product


def is_repeatable(optimizer: typing.Any) -> bool:
    """Whether an optimizer does to a replica exactly what it does to its variable. Then it also
    updates the replicas; else these get the new values of the variable.

    The update of a variable by TensorFlow's own optimizers depends only on its gradient and slots;
    except by `AdagradDAOptimizer`, where it depends on the global step, too. A subclass may do
    anything, so it does not count.
    """
    name = type(optimizer).__name__
    is_tensorflows = type(optimizer) is getattr(tf.train, name, None)
    return is_tensorflows and name in _KNOWN and name != 'AdagradDAOptimizer'


def has_own_minimize(optimizer: typing.Any) -> bool:
    """Whether an optimizer has a `minimize` that is not TensorFlow's. TensorFlow's, also those in
    `tf.contrib.opt`, only call `compute_gradients` and `apply_gradients`."""
    method = getattr(optimizer, 'minimize', None)  # `check_optimizer` does not ask for one
    function = getattr(method, '__func__', method)
    if function is None or function is tf.train.Optimizer.minimize:
        return False
    # The module of its code; `__module__` may be that of another function, by `functools.wraps`.
    module = getattr(function, '__globals__', {}).get('__name__', '')
    return module.split('.')[0] not in ('tensorflow', 'tensorflow_core')


def has_own_compute_gradients(optimizer: typing.Any) -> bool:
    """Whether the build has to call an optimizer's `compute_gradients`, which is not TensorFlow's.

    It has not where the model function calls its optimizers itself (`GradientsOfModel`), nor where
    the optimizer has a `minimize` of its own: then the build calls that, which calls
    `compute_gradients`.
    """
    if isinstance(optimizer, GradientsOfModel) or has_own_minimize(optimizer):
        return False
    function = getattr(optimizer.compute_gradients, '__func__', None)
    return function is not tf.train.Optimizer.compute_gradients


@contextlib.contextmanager
def rows_at_rate(optimizer: typing.Any) -> typing.Iterator[None]:
    """A context for an optimizer's `apply_gradients`, in which TF 1.15's gradient descent casts its
    learning rate for sparse gradients, as it does for dense ones. Without it a rate in float64, or
    one that a function gives, fails there. Optimizers that it wraps are included."""
    with contextlib.ExitStack() as undo:
        for each in _with_wrapped(optimizer):
            undo.enter_context(compat.descent_by_rows(each))
        yield


# ---- optimizers that combine gradients over machines ---------------------------------------------

_PACKAGES = frozenset(['horovod', 'byteps', 'kungfu', 'bluefog', 'smdistributed'])
"""Packages all of whose optimizers wrap another one and combine its gradients over machines."""

_CLASSES = frozenset(['SyncReplicasOptimizer', 'CrossShardOptimizer', 'ElasticAverageOptimizer',
                      'ModelAverageOptimizer', 'AGNOptimizer'])
"""Classes of TensorFlow and of contrib that combine over machines; subclasses count."""


def combiner_of(optimizer: typing.Any) -> typing.Any:
    """The optimizer that combines gradients over machines; or None.

    It is the given one, or one that it wraps, however deep: in an attribute, or in a list or dict
    there. With one, `build_towers(cluster=…)` would combine the gradients a second time. Classes
    are known by their names and those of their modules, so that no package has to be imported.
    """
    for each in _with_wrapped(optimizer):
        if _combining_class(each) is not None:
            return each
    return None


def name_of(combiner: typing.Any) -> str:
    """The name by which users know a combiner's class: `'horovod.DistributedOptimizer'`."""
    combining_class = _combining_class(combiner)
    if combining_class.__name__ in _CLASSES:
        return combining_class.__name__
    package = combining_class.__module__.partition('.')[0]
    return '%s.%s' % (package, combining_class.__name__.lstrip('_'))


def _combining_class(optimizer: typing.Any) -> typing.Any:
    """The first class, of an optimizer's class and its bases, that combines over machines; or
    None."""
    for each_class in type(optimizer).__mro__:
        package = each_class.__module__.partition('.')[0]
        if each_class.__name__ in _CLASSES or package in _PACKAGES:
            return each_class
    return None


def check_alone(optimizers: typing.Iterable = (), refuses_servers: bool = True,
                variables: typing.Iterable[tf.Variable] = ()) -> None:
    """Raises `ClusterError` for a program with parameter servers that does not pass `cluster=`.

    Such a program has variables on `/job:ps`, or a `SyncReplicasOptimizer`.

    Args:
      optimizers: the optimizers of the losses.
      refuses_servers: whether a variable on a parameter server is a fault, since the towers would
        have it on another device.
      variables: the variables of the graph.
    """
    if refuses_servers:
        # Of the variables that are there, and of those that the model function will make: these get
        # what the open `tf.device` scopes of the program say.
        devices = [variable.device for variable in variables] + [compat.devices_of_new_variables()]
        server = re.search('/job:ps(/task:[0-9]+)?', ' '.join(devices))
        if server is not None:
            raise _not_alone('a variable on ' + server.group())
    if any(_is_synchronous(combiner_of(optimizer)) for optimizer in optimizers):
        raise _not_alone('a SyncReplicasOptimizer')


def _not_alone(used: str) -> ClusterError:
    """The error for a program that has something `used` with parameter servers."""
    return ClusterError(
        'this program is one for parameter servers (%s), and without cluster= the towers would '
        'leave them: pass cluster=towers.Cluster(…) and the optimizer alone to build_towers, '
        'and train within towers.join(cluster, built), see docs/migration.md.' % used)


def _is_synchronous(combiner: typing.Any) -> bool:
    """Whether a combiner is TensorFlow's `SyncReplicasOptimizer`; False for None."""
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
            stack.extend(reversed(_wrapped(each)))  # the first of these is taken off next
    return found


def _wrapped(optimizer: typing.Any) -> list:
    """The optimizers in the attributes of an optimizer, or in lists and dicts that are such an
    attribute."""
    candidates: list = []
    if isinstance(optimizer, OptimizerAround):  # its attribute may be a function that makes one
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
    """Whether a value is a `tf.train.Optimizer`, or has the methods of one."""
    if isinstance(value, type):
        return False
    if isinstance(value, tf.train.Optimizer):
        return True
    return callable(getattr(value, 'compute_gradients', None)) and callable(
        getattr(value, 'apply_gradients', None))
