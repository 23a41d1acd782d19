"""The objectives of a build: one loss and its optimizer, or several losses and theirs by name."""

import collections
import contextlib

import tensorflow.compat.v1 as tf

from towers.errors import GradientError


class Objectives(tuple):
    """The `Objective`s of a build: none to evaluate, one without a name, or several with names.

    A value that exists once for each objective (a loss, a list of gradients) is *shaped*: with one
    objective without a name it is the value itself, else a dict from names to values.
    """

    @property
    def names(self):
        """List of their names; None where there is none or one without a name."""
        return [each.name for each in self] if self and self[0].name is not None else None

    def shaped(self, values):
        """One value for each objective, in order, as the value itself or as a dict by name."""
        values = list(values)
        if self.names is None:
            return values[0] if values else None
        return collections.OrderedDict(zip(self.names, values))

    def of(self, objective, shaped):
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
def of_loss(name):
    """The context in which errors about gradients say of which of several losses they are."""
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


def tensors_of(pairs):
    """The tensors of `(gradient, variable)` pairs, as a flat list."""
    return [tensor for tensor in tf.nest.flatten([gradient for gradient, _ in pairs],
                                                 expand_composites=True) if tensor is not None]


class GradientsOfModel:
    """Stands in place of an optimizer where the model function has optimizers of its own.

    `build_towers` calls the model function within `call`. `compute_gradients` then returns the
    gradients that the model function has taken, weighted: their sum over the towers, which are
    copies, is the combined gradient. What follows this class has

      weights(shards): the weights of the losses of all towers, a list of floats or scalars; None
        for none.
      call(weight, placement): the context of the call; the first tower's weight, a tensor where
        they differ; `Placement` of the variables.
      note_copy(copied): notes a further tower; a function from a tensor or operation to its copy.
      optimizers(): the optimizers that the model function uses, each once: a list.
      slots(): the variables that optimizers have made within the call.
      fetches(): the tensors and operations that the call has made and that a step runs.
      compute_gradients(loss, var_list), apply_gradients(pairs, global_step, name): an optimizer's.
    """
