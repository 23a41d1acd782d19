"""The objectives of a build: losses, each with the optimizer and the variables that it trains.

Its test is `tests/api/test_train_ops.py`.
"""

import collections
import contextlib
import typing

import tensorflow.compat.v1 as tf

from towers.arguments import listed_variables
from towers.errors import GradientError, InvalidArgumentError
from towers.optimizers import GradientsOfModel


class Objectives(tuple):
    """The `Objective`s of a build: none to evaluate, one without a name, or several with names.

    A value that exists once for each objective (a loss, a list of gradients) is *shaped*: with one
    objective without a name it is the value itself, else a dict from names to values.
    """

    @property
    def names(self) -> typing.Optional[typing.List[str]]:
        """List of the objectives' names; None for an evaluation, or one objective without a name.
        """
        if not self or self[0].name is None:
            return None
        return [objective.name for objective in self]

    @property
    def optimizer_calls(self) -> typing.Optional[GradientsOfModel]:
        """The `GradientsOfModel` that stands in the place of an optimizer, where the model function
        calls optimizers itself; else None."""
        for objective in self:
            if isinstance(objective.optimizer, GradientsOfModel):
                return objective.optimizer
        return None

    def shaped(self, values: typing.Iterable) -> typing.Any:
        """A shaped value, from the values of the objectives in their order; [] without objectives,
        since an evaluation has no gradients."""
        if not self:
            return []
        if self.names is None:
            value, = values
            return value
        return collections.OrderedDict(zip(self.names, values))

    def entry_of(self, objective: typing.Any, shaped: typing.Any) -> typing.Any:
        """One objective's entry of a shaped value: the value itself, or the entry of its name."""
        return shaped if objective.name is None else shaped[objective.name]


def map_shaped(function: typing.Callable, *shaped: typing.Any) -> typing.Any:
    """Calls a function for each objective.

    >>> map_shaped(add, {'critic': 1, 'generator': 2}, {'critic': 10, 'generator': 20})
    {'critic': 11, 'generator': 22}
    >>> map_shaped(add, 1, 10)  # of one loss without a name
    11

    Args:
      function: takes the objective's entry of each of the shaped values.
      *shaped: the shaped values, see `Objectives`.

    Returns:
      A shaped value of what the function has returned.
    """
    first = shaped[0]
    if not isinstance(first, dict):
        return function(*shaped)
    result = collections.OrderedDict()
    for name in first:
        result[name] = function(*[each[name] for each in shaped])
    return result


def flat(shaped: typing.Any) -> list:
    """List of the entries of a shaped value, see `Objectives`."""
    return list(shaped.values()) if isinstance(shaped, dict) else [shaped]


@contextlib.contextmanager
def naming_loss(name: typing.Optional[str]) -> typing.Iterator[None]:
    """The context in which a `GradientError` gets the name of the loss; `name` is None where there
    is only one loss."""
    try:
        yield
    except GradientError as error:
        if name is None:
            raise
        raise GradientError('the loss %r: %s' % (name, error)) from None


def all_pairs(gradients: typing.Any) -> typing.List[tuple]:
    """List of the `(gradient, variable)` pairs of all objectives, from shaped lists of pairs."""
    return sum(map(list, flat(gradients)), [])


def with_parts(name: str, shaped: typing.Any) -> typing.List[tuple]:
    """List of `(name, value)` for the entries of a shaped value: `[('loss', …)]` for one objective,
    `[('loss/generator', …), ('loss/critic', …)]` for several."""
    if not isinstance(shaped, dict):
        return [(name, shaped)]
    return [('%s/%s' % (name, of_objective), value) for of_objective, value in shaped.items()]


def checked_variables(variables: typing.Any, called: str) -> typing.List[tf.Variable]:
    """The variables that a function for `var_list` returned, each once, as a list.

    Args:
      variables: what the function returned.
      called: what error texts call the function.

    Raises:
      InvalidArgumentError: the function returned something else.
    """
    try:
        variables = list(variables)
    except TypeError:
        raise InvalidArgumentError('%s returned %.80r: expected a list of variables.'
                                   % (called, variables)) from None
    return listed_variables(called, variables)


def perhaps_trained(objectives: Objectives) -> typing.List[tf.Variable]:
    """List of the variables of the graph, as it is before the model is computed, that a loss may
    train.

    They are the trainable variables, and the variables that a `var_list` names, trainable or not. A
    `var_list` that is a function may choose any.
    """
    variables = tf.trainable_variables()
    for objective in objectives:
        if callable(objective.var_list):
            variables += tf.global_variables()
        else:
            variables += objective.var_list or ()
    return variables


def trained_variables(objectives: Objectives) -> typing.Dict[typing.Optional[str], list]:
    """{name of an objective: list of the variables that its loss trains}.

    Raises `GradientError` for an objective without variables.
    """
    trained = {}
    candidates = tf.trainable_variables()
    for objective in objectives:
        # For errors: which of several losses is meant.
        for_objective = '' if objective.name is None else ' for %r' % objective.name
        trained[objective.name] = _chosen_variables(objective.var_list, candidates, for_objective)
    return trained


def _chosen_variables(var_list: typing.Any, candidates: typing.List[tf.Variable],
                      for_objective: str) -> typing.List[tf.Variable]:
    """The variables that a loss trains, one at least.

    Args:
      var_list: a list of variables, which `Objective` has checked; a function that chooses some of
        the candidates; or None for all candidates.
      candidates: the trainable variables of the graph.
      for_objective: in errors, text that says which of several losses is meant.
    """
    left_by = ' left by var_list'
    if var_list is None:
        chosen = candidates
        left_by = ''
    elif callable(var_list):
        chosen = checked_variables(var_list(list(candidates)), 'var_list' + for_objective)
    else:
        chosen = var_list
    if not chosen:
        raise GradientError('there is no trainable variable%s%s: %s' % (
            for_objective, left_by, _choices_text(candidates)))
    return chosen


def _choices_text(candidates: typing.Sequence[tf.Variable]) -> str:
    """The end of an error about trained variables: which trainable variables there are."""
    if not candidates:
        return 'the model function made none. Pass optimizer=None to evaluate it.'
    names = [variable.op.name for variable in candidates[:5]]
    return 'the choices were %s.' % ', '.join(names)
