"""The objectives of a build: losses, each with the optimizer and the variables that it trains."""

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
        """List of their names; None where there is none or one without a name."""
        return [each.name for each in self] if self and self[0].name is not None else None

    @property
    def of_model(self) -> typing.Optional[GradientsOfModel]:
        """The `GradientsOfModel` in the place of an optimizer; or None."""
        return next((each.optimizer for each in self
                     if isinstance(each.optimizer, GradientsOfModel)), None)

    def shaped(self, values: typing.Iterable) -> typing.Any:
        """One value for each objective, in order, as the value itself or as a dict by name."""
        values = list(values)
        if self.names is None:
            return values[0] if values else []
        return collections.OrderedDict(zip(self.names, values))

    def of(self, objective: typing.Any, shaped: typing.Any) -> typing.Any:
        """One objective's part of a shaped value: the value itself, or the entry of its name."""
        return shaped if objective.name is None else shaped[objective.name]


def map_shaped(function, *shaped):
    """Calls a function on each objective's part of some shaped values; shaped like the first."""
    if not isinstance(shaped[0], dict):
        return function(*shaped)
    return collections.OrderedDict(
        (name, function(*[each[name] for each in shaped])) for name in shaped[0])


def flat(shaped):
    """The parts of a shaped value as a list."""
    return list(shaped.values()) if isinstance(shaped, dict) else [shaped]


@contextlib.contextmanager
def naming_loss(name):
    """The context in which errors about gradients name the loss, where there are several."""
    try:
        yield
    except GradientError as error:
        if name is None:
            raise
        raise GradientError('the loss %r: %s' % (name, error)) from None


def all_pairs(gradients):
    """The `(gradient, variable)` pairs of all objectives, one after the other."""
    return [pair for pairs in flat(gradients) for pair in pairs]


def with_parts(name, shaped):
    """`[(name, value)]` of a shaped value: `[('loss', …)]`, or `[('loss/generator', …), …]`."""
    if not isinstance(shaped, dict):
        return [(name, shaped)]
    return [('%s/%s' % (name, part), value) for part, value in shaped.items()]


def checked_variables(variables, called):
    """The variables that a function for `var_list` returned, each once, as a list.

    Raises:
      InvalidArgumentError: it returned something else.
    """
    try:
        variables = list(variables)
    except TypeError:
        raise InvalidArgumentError('%s returned %.80r: expected a list of variables.'
                                   % (called, variables)) from None
    return listed_variables(called, variables)


def trained_variables(objectives):
    """{name of an objective: the variables that its loss trains}; `GradientError` for none."""
    found, candidates = {}, tf.trainable_variables()
    for objective in objectives:
        named, wanted = '' if objective.name is None else ' for %r' % (
            objective.name), objective.var_list
        chosen = candidates if wanted is None else wanted if not callable(wanted) else (
            checked_variables(wanted(list(candidates)), 'var_list' + named))
        if not chosen:
            raise GradientError(
                'there is no trainable variable%s%s: %s' % (
                    named, '' if wanted is None else ' left by var_list',
                    'the choices were %s.' % ', '.join(v.op.name for v in candidates[:5])
                    if candidates else 'the model function made none. Pass optimizer=None to '
                    'evaluate it.'))
        found[objective.name] = chosen
    return found
