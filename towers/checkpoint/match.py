"""Compares a checkpoint with the variables of a graph: does all of it fit, or which part?"""

import collections
import os
import re
import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.arguments import check_flag, check_instance, directory_name
from towers.checkpoint.files import (READ_ERRORS, damage, first_line, list_checkpoints,
                                     newest_checkpoint, reader_of)
from towers.errors import CheckpointError, InvalidArgumentError

_FILE_OF_PREFIX = re.compile(r'\.(index|meta|data-\d{5}-of-\d{5})$')
# Adam's count of steps, the only optimizer state of TF that belongs to no single variable.
_BETA_POWER = re.compile(r'(^|/)beta[12]_power(_\d+)?$')


def check_fits(prefix: str, variables: typing.Any = None) -> typing.List[str]:
    """Compares a checkpoint with the variables that it is to be restored into, changing nothing.

    Only names, shapes and types are read, from the index of the checkpoint.

    Args:
      prefix: as `Saver.restore` takes it; V1 or V2 format, of any TF version.
      variables: list of variables, parts of partitioned ones included; or dict from their names in
        the checkpoint, as for `Saver`. None for all global variables.

    Returns:
      Sorted list of the names that are in the checkpoint only, which restoring ignores.

    Raises:
      CheckpointError: a variable is not in the checkpoint, or has another shape or type there;
        names some of them. Or the checkpoint cannot be read.
    """
    prefix = directory_name('prefix', prefix, 'the prefix of a checkpoint')
    text, only_there = difference(prefix, variables)
    if text is not None:
        raise CheckpointError(
            '%s. Nothing was changed. Build the model that wrote it, train in another directory, '
            'or take what fits with --init_from=%s (towers.init_from).' % (text, prefix))
    return only_there


def difference(prefix, variables=None):
    """The error of `check_fits`, as `(text, sorted names that are in the checkpoint only)`.

    The text is without its full stop; None where all variables are in the checkpoint.

    Raises:
      CheckpointError: the checkpoint cannot be read.
    """
    wanted = _wanted(variables)
    shapes, dtypes = _contents(prefix)
    reasons = [(name, _mismatch(name, shape, dtype, shapes, dtypes))
               for name, (shape, dtype, _) in sorted(wanted.items())]
    reasons = [pair for pair in reasons if pair[1] is not None]
    only_there = sorted(set(shapes) - set(wanted))
    if not reasons:
        return None, only_there
    text = ('the checkpoint %s is of another model: %d of the %d variables of this model differ: %s'
            % (prefix, len(reasons), len(wanted), '; '.join(_by_kind(reasons))))
    if only_there:
        text += '; only in the checkpoint: ' + some(only_there)
    return text, only_there


class InitialValues:
    """The values that `init_from` takes from a checkpoint; `str` lists them.

    Attributes:
      prefix: the checkpoint's prefix.
      taken: sorted list of the names that are taken.
      left: sorted list of `(name, reason)`: variables of the graph that keep their initial value.
      unused: sorted list of the names that are in the checkpoint only.
    """

    def __init__(self, prefix: str, taken: typing.Iterable[str], left: typing.Iterable[tuple],
                 unused: typing.Iterable[str], var_list: typing.Any):
        self.prefix = prefix
        self.taken = sorted(taken)
        self.left = sorted(left)
        self.unused = sorted(unused)
        self._saver = tf.train.Saver(var_list, name='init_from')

    def restore(self, session: tf.Session) -> None:
        """Gives the variables that are taken their values; run the initializers before."""
        self._saver.restore(session, self.prefix)

    def __str__(self):
        scopes = collections.Counter(name.split('/')[0] for name in self.taken)
        lines = ['from %s: took %d of %d variables (%s)' % (
            self.prefix, len(self.taken), len(self.taken) + len(self.left),
            some(['%s: %d' % item for item in sorted(scopes.items())]))]
        lines += ['  left, ' + kind for kind in _by_kind(self.left)]
        if self.unused:
            lines.append('  of no use here: ' + some(self.unused))
        return '\n'.join(lines)


def init_from(path: str, variables: typing.Any = None, exclude: typing.Sequence = (),
              optimizer_state: bool = False) -> InitialValues:
    """Takes the tensors from a checkpoint that fit the variables of a graph by name, shape, type.

    For published weights, such as an InceptionResNet with another number of classes. Builds the
    ops for it, so call it before the graph is finalized, and `restore` in a session:

        initial = towers.init_from('inception_resnet_v2_2016_08_30.ckpt', built.variables)
        print(initial)
        tf.train.Scaffold(init_fn=lambda scaffold, session: initial.restore(session))

    Every tensor of the checkpoint is read first, to see that it is whole.

    Args:
      path: a checkpoint: its prefix, one of its files, or a directory, for the newest one there.
      variables: list of variables, or dict from names in the checkpoint, as for `check_fits`.
      exclude: names of variables, or of scopes, that are not to be taken.
      optimizer_state: whether to take slots, moving averages of weights, Adam's beta powers and
        counters, such as the global step, too. None of these is trainable; slots are told by names
        that are below a variable's, `w/Momentum`, and counters by being single integers.

    Returns:
      `InitialValues`.

    Raises:
      CheckpointError: there is no such checkpoint, it is damaged, or nothing in it fits.
      InvalidArgumentError: a name in `exclude` that no variable has.
    """
    check_flag('optimizer_state', optimizer_state)
    wanted = _wanted(variables)
    _check_exclude(exclude, wanted)
    prefix = _find(directory_name('path', path, 'a checkpoint or a directory'))
    reason = damage(prefix)
    if reason:
        raise CheckpointError('%s %s. Bring the file back, or fetch it again.' % (prefix, reason))
    shapes, dtypes = _contents(prefix)
    own_names = {compat.saved_as(variable)[0] for variable in tf.global_variables()}
    reasons = {name: 'excluded' if any(_is_under(name, scope) for scope in exclude) else (
        None if optimizer_state else _kind_of_state(parts[0], own_names)) or _mismatch(
            name, shape, dtype, shapes, dtypes) for name, (shape, dtype, parts) in wanted.items()}
    left = [(name, reason) for name, reason in reasons.items() if reason]
    taken = {name: wanted[name][2] for name, reason in reasons.items() if not reason}
    if not taken:
        raise CheckpointError(
            'nothing in %s fits this model: it has %s; of the model are left, %s. If only a scope '
            'in the names differs, pass a dict from names there to variables.' % (
                prefix, some(sorted(shapes)), '; '.join(_by_kind(left))))
    # `Saver` puts parts of a variable together in a list, not in a dict.
    var_list = {name: parts[0] for name, parts in taken.items()} if (
        hasattr(variables, 'items')) else [part for parts in taken.values() for part in parts]
    return InitialValues(prefix, taken, left, set(shapes) - set(wanted), var_list)


def _contents(prefix):
    """`({name: shape}, {name: type})` of the tensors in a checkpoint."""
    try:
        reader = reader_of(prefix)
        return reader.get_variable_to_shape_map(), reader.get_variable_to_dtype_map()
    except READ_ERRORS as error:
        raise CheckpointError('%s cannot be read: %s. Expected a checkpoint of tf.train.Saver, '
                              'without .index or .data at the end.' % (prefix, first_line(error)))


def _wanted(variables):
    """OrderedDict from names in the checkpoint to (shape, type, variables: several if parts)."""
    wanted = collections.OrderedDict()
    for name, variable in _named_variables(variables):
        check_instance('a variable among variables', variable, compat.VARIABLE_TYPES,
                       'a tf.Variable')
        # A variable that was made eagerly has no graph.
        if getattr(variable, 'graph', None) is not tf.get_default_graph():
            raise InvalidArgumentError('variables holds %r, which belongs to another graph.'
                                       % variable.name.partition(':')[0])
        whole, shape = compat.saved_as(variable) if name is None else (name, variable.shape)
        wanted.setdefault(whole, (shape, variable.dtype.base_dtype, []))[2].append(variable)
    return wanted


def _named_variables(variables):
    """`[(name in the checkpoint, or None for the variable's own, variable)]` of the argument."""
    if variables is None:
        return [(None, variable) for variable in tf.global_variables()]
    if hasattr(variables, 'items'):
        for name in variables:
            check_instance('a name in variables', name, str, 'a string')
        return list(variables.items())
    try:
        listed = None if isinstance(variables, (str, bytes, type)) else list(variables)
    except TypeError:  # of one tensor or variable, too
        listed = None
    if listed is None:
        raise InvalidArgumentError('variables=%.80r: expected a list of variables, or a dict from '
                                   'names to them.' % (variables,))
    return [(None, variable) for variable in listed]


def _mismatch(name, shape, dtype, shapes, dtypes):
    """Why a variable cannot be restored, as 'kind' or 'kind: details', or None."""
    if name not in shapes:
        return 'not in the checkpoint'
    if not shape.is_compatible_with(shapes[name]):
        return 'another shape: %s there, %s here' % (list(shapes[name]), shape.as_list())
    if dtypes[name] != dtype:
        return 'another type: %s there, %s here' % (dtypes[name].name, dtype.name)
    return None


def _by_kind(reasons):
    """Texts, one a kind of reason, each with a count and some names: from (name, reason) pairs."""
    kinds = {}
    for name, reason in reasons:
        kind, _, details = reason.partition(': ')
        kinds.setdefault(kind, []).append('%s (%s)' % (name, details) if details else name)
    return ['%s: %s' % (kind, some(names)) for kind, names in sorted(kinds.items())]


def some(names, shown=4):
    """A list of names for people, the first ones only where there are many."""
    if len(names) <= shown + 1:
        return ', '.join(names)
    return '%s and %d more' % (', '.join(names[:shown]), len(names) - shown)


def _check_exclude(exclude, wanted):
    if not isinstance(exclude, (list, tuple, set)) or not all(
            isinstance(each, str) for each in exclude):
        raise InvalidArgumentError('exclude=%.80r: expected a list of names.' % (exclude,))
    for scope in exclude:
        if not any(_is_under(name, scope) for name in wanted):
            raise InvalidArgumentError(
                'exclude=%.80r: no variable has that name or scope; there are %s.'
                % (scope, some(sorted(wanted))))


def _is_under(name, scope):
    return (name + '/').startswith(scope.rstrip('/') + '/')


def _kind_of_state(variable, own_names):
    """'counter' (the global step, examples seen, epochs), 'optimizer state' (with a name below
    another variable's), or None."""
    if variable.trainable:
        return None
    if variable.dtype.is_integer and variable.shape.num_elements() == 1:
        return 'counter'
    name = compat.saved_as(variable)[0]
    is_slot = _BETA_POWER.search(name) or any(
        name[:at.start()] in own_names for at in re.finditer('/', name))
    return 'optimizer state' if is_slot else None


def _find(path):
    """The prefix of the checkpoint that a path means."""
    if tf.io.gfile.isdir(path):
        newest = newest_checkpoint(path)
        if newest is not None:
            return newest.prefix
    else:
        prefix = _FILE_OF_PREFIX.sub('', path)
        if tf.io.gfile.exists(prefix + '.index') or tf.io.gfile.exists(prefix):
            return prefix
    directory = path if tf.io.gfile.isdir(path) else os.path.dirname(path) or '.'
    there = [os.path.basename(prefix) for prefix in list_checkpoints(directory)]
    raise CheckpointError('there is no checkpoint %s. Expected a directory, a prefix such as '
                          'model.ckpt-500, or one of its files; in %s there is %s.'
                          % (path, directory, some(there) if there else 'none'))
