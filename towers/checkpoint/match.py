"""Compares a checkpoint with the variables of a graph: does all of it fit, or which part?

Its test is `tests/checkpoint/test_checkpoint_match.py`.
"""

import collections
import contextlib
import itertools
import os
import re
import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.arguments import check_flag, check_instance, checked_path
from towers.checkpoint.files import READ_ERRORS, damage, first_line, list_checkpoints, reader_of
from towers.checkpoint.newest import newest_checkpoint
from towers.errors import CheckpointError, InvalidArgumentError

_FILE_OF_PREFIX = re.compile(r'\.(index|meta|data-\d{5}-of-\d{5})$')
# Adam's count of steps, the only optimizer state of TF that belongs to no single variable.
_BETA_POWER = re.compile(r'(^|/)beta[12]_power(_\d+)?$')


_SHOWN = 4  # how many names a text shows of a long list


class _Wanted(typing.NamedTuple):
    """What a checkpoint has to have under a name, for a variable of the graph."""
    shape: tf.TensorShape
    dtype: tf.DType
    parts: typing.List[tf.Variable]  # the variable; or the parts of a partitioned variable


class _Contents(typing.NamedTuple):
    """The tensors in a checkpoint, by their names."""
    shapes: typing.Dict[str, typing.List[int]]
    dtypes: typing.Dict[str, tf.DType]


class _Choice(typing.NamedTuple):
    """The variables that take their values from a checkpoint, and the variables that do not."""
    taken: typing.Dict[str, typing.List[tf.Variable]]  # {name in the checkpoint: `_Wanted.parts`}
    left: typing.List[typing.Tuple[str, str]]  # the name, and the reason why it is not taken


class Comparison(typing.NamedTuple):
    """The differences of a checkpoint and the variables of a graph.

    Attributes:
      text: what differs, in words; None where all variables are in the checkpoint.
      only_there: sorted list of the names that are in the checkpoint only.
    """
    text: typing.Optional[str]
    only_there: typing.List[str]


def check_fits(prefix: str, variables: typing.Any = None) -> typing.List[str]:
    """Compares a checkpoint with the variables that it is to be restored into, changing nothing.

    Only names, shapes and types are read, from the index of the checkpoint.

    Args:
      prefix: the prefix of the checkpoint, which `Saver.restore` takes; V1 or V2 format, of any TF
        version.
      variables: list of variables, parts of partitioned ones included; or dict from their names in
        the checkpoint, as for `Saver`: to a variable, or to the parts of a partitioned one. None
        for all global variables.

    Returns:
      Sorted list of the names that are in the checkpoint only, which restoring ignores.

    Raises:
      CheckpointError: a variable is not in the checkpoint, or has another shape or type there; the
        text names some of these variables. Or the checkpoint cannot be read.
    """
    prefix = checked_path('prefix', prefix, 'the prefix of a checkpoint')
    comparison = difference(prefix, variables)
    if comparison.text is not None:
        raise CheckpointError(
            '%s. Nothing was changed. Build the model that wrote it, train in another directory, '
            'or take what fits with --init_from=%s (towers.init_from).' % (
                comparison.text, prefix))
    return comparison.only_there


def difference(prefix: str, variables: typing.Any = None) -> Comparison:
    """Compares a checkpoint with the variables that it is to be restored into.

    Args:
      prefix: the prefix of the checkpoint.
      variables: list of variables, or dict from their names in the checkpoint; None for all global
        variables.

    Raises:
      CheckpointError: the checkpoint cannot be read.
    """
    wanted = _wanted(variables)
    if variables is None:  # then a `Saver` also restores the content of tables
        wanted.update(_wanted_by_saveables())
    contents = _contents(prefix)
    reasons = []
    for name in sorted(wanted):
        reason = _mismatch(name, wanted[name], contents)
        if reason is not None:
            reasons.append((name, reason))
    only_there = sorted(set(contents.shapes) - set(wanted))
    if not reasons:
        return Comparison(text=None, only_there=only_there)
    text = ('the checkpoint %s is of another model: %d of the %d variables of this model differ: %s'
            % (prefix, len(reasons), len(wanted), '; '.join(_by_kind(reasons))))
    if only_there:
        text += '; only in the checkpoint: ' + some(only_there)
    return Comparison(text, only_there)


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
        """`var_list` has the variables that are taken, as `tf.train.Saver` takes it; the other
        arguments are the attributes."""
        self.prefix = prefix
        self.taken = sorted(taken)
        self.left = sorted(left)
        self.unused = sorted(unused)
        self._saver = tf.train.Saver(var_list, name='init_from')

    def restore(self, session: tf.Session) -> None:
        """Sets the variables that are taken to their values in the checkpoint; run the initializers
        of all variables before."""
        self._saver.restore(session, self.prefix)

    def __str__(self):
        """The numbers of variables that were taken, by scope; then the variables that were not."""
        scopes = collections.Counter(name.split('/')[0] for name in self.taken)
        counts = ['%s: %d' % (scope, count) for scope, count in sorted(scopes.items())]
        lines = ['from %s: took %d of %d variables (%s)' % (
            self.prefix, len(self.taken), len(self.taken) + len(self.left), some(counts))]
        for kind in _by_kind(self.left):
            lines.append('  left, ' + kind)
        if self.unused:
            lines.append('  of no use here: ' + some(self.unused))
        return '\n'.join(lines)


def init_from(path: str, variables: typing.Any = None, exclude: typing.Sequence = (),
              optimizer_state: bool = False) -> InitialValues:
    """Takes the tensors from a checkpoint that fit the variables of a graph by name, shape, type.

    It is for published weights, such as an InceptionResNet with another number of classes. It makes
    operations: call it before the graph is finalized, and then call `restore` in a session:

        initial = towers.init_from('inception_resnet_v2_2016_08_30.ckpt', built.variables)
        print(initial)
        tf.train.Scaffold(init_fn=lambda scaffold, session: initial.restore(session))

    Every tensor of the checkpoint is read first, to see that it is whole.

    Args:
      path: the prefix of a checkpoint, or one of its files; or a directory, whose newest checkpoint
        is taken.
      variables: list of variables, or dict from names in the checkpoint, as for `check_fits`.
      exclude: names of variables, or of scopes, that are not to be taken.
      optimizer_state: whether to take also slots, moving averages of weights, Adam's beta powers
        and counters, such as the global step. None of these is trainable. A slot has a name below
        another variable's, as `w/Momentum` is below `w`. A counter is a single integer.

    Returns:
      `InitialValues`.

    Raises:
      CheckpointError: there is no such checkpoint, it is damaged, or nothing in it fits.
      InvalidArgumentError: a name in `exclude` that no variable has.
    """
    check_flag('optimizer_state', optimizer_state)
    wanted = _wanted(variables)
    _check_exclude(exclude, wanted)
    prefix = _find(checked_path('path', path, 'a checkpoint or a directory'))
    fault = damage(prefix)
    if fault is not None:
        raise CheckpointError('%s %s. Bring the file back, or fetch it again.' % (prefix, fault))
    contents = _contents(prefix)
    choice = _choice(wanted, contents, _reasons_not_to_take(wanted, exclude, optimizer_state))
    if not choice.taken:
        raise CheckpointError(
            'nothing in %s fits this model: it has %s; of the model are left, %s. If only a scope '
            'in the names differs, pass a dict from names there to variables.' % (
                prefix, some(sorted(contents.shapes)), '; '.join(_by_kind(choice.left))))
    only_there = contents.shapes.keys() - wanted.keys()
    var_list = _var_list(choice.taken, variables)
    return InitialValues(prefix, choice.taken, choice.left, only_there, var_list)


def _choice(wanted: typing.Mapping[str, _Wanted], contents: _Contents,
            reasons_not_to_take: typing.Mapping[str, str]) -> _Choice:
    """Chooses the variables whose values are taken: the variables that the arguments of `init_from`
    do not leave out, and that fit.

    Args:
      wanted: all variables, by their names in the checkpoint.
      contents: the tensors in the checkpoint.
      reasons_not_to_take: {name in the checkpoint: why the arguments leave it out}.
    """
    choice = _Choice(taken=collections.OrderedDict(), left=[])
    for name, entry in wanted.items():
        reason = reasons_not_to_take.get(name)
        if reason is None:
            reason = _mismatch(name, entry, contents)
        if reason is None:
            choice.taken[name] = entry.parts
        else:
            choice.left.append((name, reason))
    return choice


def _reasons_not_to_take(wanted: typing.Mapping[str, _Wanted], exclude: typing.Sequence[str],
                         optimizer_state: bool) -> typing.Dict[str, str]:
    """The variables that the arguments of `init_from` leave out, whatever is in the checkpoint.

    Args:
      wanted: all variables, by their names in the checkpoint.
      exclude: names of variables and scopes that are not to be taken.
      optimizer_state: whether to take also variables that only training needs.

    Returns:
      {name in the checkpoint: why it is not taken}, such as `'excluded'` or `'counter'`.
    """
    reasons = {}
    if not optimizer_state:
        reasons.update(_kinds_of_state(wanted))
    for name in wanted:
        if any(_is_under(name, scope) for scope in exclude):
            reasons[name] = 'excluded'
    return reasons


def _var_list(taken: typing.Mapping[str, typing.List[tf.Variable]], variables: typing.Any
              ) -> typing.Any:
    """The variables to restore, as the argument `var_list` of `tf.train.Saver`.

    Args:
      taken: {name in the checkpoint: the variable, or the parts of a partitioned one}.
      variables: the argument of `init_from`. If the caller has given the names, `Saver` gets what
        the caller has given under them.
    """
    if _has_names(variables):
        return {name: variables[name] for name in taken}
    # `Saver` puts the parts of a partitioned variable together in a list, and not in a dict.
    return list(itertools.chain.from_iterable(taken.values()))


def _contents(prefix: str) -> _Contents:
    """Reads the names, shapes and types in a checkpoint; raises `CheckpointError` if it cannot be
    read."""
    try:
        reader = reader_of(prefix)
        return _Contents(reader.get_variable_to_shape_map(), reader.get_variable_to_dtype_map())
    except READ_ERRORS as error:
        raise CheckpointError('%s cannot be read: %s. Expected a checkpoint of tf.train.Saver, '
                              'without .index or .data at the end.' % (prefix, first_line(error)))


def _wanted(variables: typing.Any) -> typing.Dict[str, _Wanted]:
    """The tensors that a checkpoint has to have: {name in the checkpoint: `_Wanted`}.

    Args:
      variables: the argument of `check_fits`.
    """
    if _has_names(variables):
        return _wanted_by_given_names(variables)
    if variables is None:
        variables = tf.global_variables()
    wanted: typing.Dict[str, _Wanted] = collections.OrderedDict()
    for variable in _as_list(variables):
        _check_is_of_graph(variable)
        # A part of a partitioned variable is saved as a slice of the whole variable. Of a part,
        # `name` and `shape` are the name and the shape of the whole variable.
        name, shape = compat.saved_as(variable)
        entry = wanted.setdefault(name, _Wanted(shape, variable.dtype.base_dtype, parts=[]))
        if any(part is variable for part in entry.parts):
            raise InvalidArgumentError('variables holds %r twice.' % variable.op.name)
        entry.parts.append(variable)
    return wanted


def _wanted_by_given_names(variables: typing.Mapping[str, typing.Any]
                           ) -> typing.Dict[str, _Wanted]:
    """The `_Wanted` of variables for which the caller gives the names in the checkpoint.

    Args:
      variables: {name in the checkpoint: variable}; of a partitioned variable the list of its
        parts, or what `get_variable` has returned.
    """
    wanted: typing.Dict[str, _Wanted] = collections.OrderedDict()
    for name, given in variables.items():
        check_instance('a name in variables', name, str, 'a string')
        if isinstance(given, compat.VARIABLE_TYPES):
            _check_is_of_graph(given)
            wanted[name] = _Wanted(given.shape, given.dtype.base_dtype, parts=[given])
        else:
            parts = _checked_parts(name, given)
            _, whole_shape = compat.saved_as(parts[0])
            wanted[name] = _Wanted(whole_shape, parts[0].dtype.base_dtype, parts)
    return wanted


def _checked_parts(name: str, given: typing.Any) -> typing.List[tf.Variable]:
    """What the caller gives under a name, as the list of the parts of one partitioned variable;
    raises `InvalidArgumentError` for anything else."""
    try:
        parts = list(given)
    except TypeError:  # it cannot be iterated over
        parts = []
    for part in parts:
        _check_is_of_graph(part)
    whole_names = set(map(_saved_name, parts))
    are_parts = all(map(compat.is_part, parts))
    if len(whole_names) != 1 or not are_parts:
        raise InvalidArgumentError('variables[%r]=%.80r: expected a variable of this graph, or the '
                                   'parts of a partitioned one.' % (name, given))
    return parts


def _saved_name(variable: tf.Variable) -> str:
    """The name of a variable in a checkpoint; of a part, the name of the whole variable."""
    name, _ = compat.saved_as(variable)
    return name


def _wanted_by_saveables() -> typing.Dict[str, _Wanted]:
    """The `_Wanted` of what the graph's `SAVEABLE_OBJECTS`, such as a table that changes, keep in a
    checkpoint; without variables, and of any shape."""
    wanted: typing.Dict[str, _Wanted] = collections.OrderedDict()
    for saveable in tf.get_collection(tf.GraphKeys.SAVEABLE_OBJECTS):
        for spec in saveable.specs:
            wanted[spec.name] = _Wanted(tf.TensorShape(None), spec.dtype, parts=[])
    return wanted


def _has_names(variables: typing.Any) -> bool:
    """Whether the argument `variables` is a dict from names in the checkpoint to variables."""
    return hasattr(variables, 'items')


def _check_is_of_graph(variable: typing.Any) -> None:
    """Raises `InvalidArgumentError` unless this is a variable of the default graph."""
    check_instance('a variable among variables', variable, compat.VARIABLE_TYPES, 'a tf.Variable')
    # A variable that was made eagerly has no graph.
    if getattr(variable, 'graph', None) is not tf.get_default_graph():
        raise InvalidArgumentError('variables holds %r, which belongs to another graph.'
                                   % variable.name.partition(':')[0])


def _as_list(variables: typing.Any) -> typing.List[typing.Any]:
    """The argument `variables` as a list; raises `InvalidArgumentError` if it is none."""
    if not isinstance(variables, (str, bytes, type)):
        with contextlib.suppress(TypeError):  # a tensor, or a variable, cannot be iterated over
            return list(variables)
    raise InvalidArgumentError('variables=%.80r: expected a list of variables, or a dict from '
                               'names to them.' % (variables,))


def _mismatch(name: str, wanted: _Wanted, contents: _Contents) -> typing.Optional[str]:
    """Why a variable cannot be restored from a checkpoint.

    Args:
      name: the name of the variable in the checkpoint.
      wanted: what the checkpoint has to have under this name.
      contents: the tensors in the checkpoint.

    Returns:
      The reason, `'kind'` or `'kind: details'`; None if the variable can be restored.
    """
    if name not in contents.shapes:
        return 'not in the checkpoint'
    shape = contents.shapes[name]
    dtype = contents.dtypes[name]
    if not wanted.shape.is_compatible_with(shape):
        return 'another shape: %s there, %s here' % (list(shape), wanted.shape.as_list())
    if dtype != wanted.dtype:
        return 'another type: %s there, %s here' % (dtype.name, wanted.dtype.name)
    return None


def _by_kind(reasons: typing.Iterable[typing.Tuple[str, str]]) -> typing.List[str]:
    """Groups names by the kind of their reason, for texts.

    Args:
      reasons: pairs `(name, reason)`, see `_mismatch`.

    Returns:
      List of texts such as `'another shape: w ([2] there, [3] here), v (…)'`, one for each kind.
    """
    names_by_kind = collections.defaultdict(list)
    for name, reason in reasons:
        kind, _, details = reason.partition(': ')
        names_by_kind[kind].append('%s (%s)' % (name, details) if details else name)
    return ['%s: %s' % (kind, some(names)) for kind, names in sorted(names_by_kind.items())]


def some(names: typing.List[str]) -> str:
    """Names as text: `'a, b, c'`; of many names only the first: `'a, b, c, d and 7 more'`."""
    if len(names) <= _SHOWN + 1:
        return ', '.join(names)
    return '%s and %d more' % (', '.join(names[:_SHOWN]), len(names) - _SHOWN)


def _check_exclude(exclude: typing.Any, wanted: typing.Iterable[str]) -> None:
    """Raises `InvalidArgumentError` unless the argument `exclude` is a list of names or scopes that
    some of the `wanted` names have."""
    is_list = isinstance(exclude, (list, tuple, set))
    if not is_list or not all(isinstance(scope, str) for scope in exclude):
        raise InvalidArgumentError('exclude=%.80r: expected a list of names.' % (exclude,))
    for scope in exclude:
        if not any(_is_under(name, scope) for name in wanted):
            raise InvalidArgumentError(
                'exclude=%.80r: no variable has that name or scope; there are %s.'
                % (scope, some(sorted(wanted))))


def _is_under(name: str, scope: str) -> bool:
    """Whether `name` is the scope itself, or the name of something in the scope."""
    return (name + '/').startswith(scope.rstrip('/') + '/')


def _kinds_of_state(wanted: typing.Mapping[str, _Wanted]) -> typing.Dict[str, str]:
    """Finds the variables that only training needs: {name in the checkpoint: `'counter'` or
    `'optimizer state'`}. `wanted` has all variables by their names in the checkpoint."""
    # The names of all variables: `wanted` may have a slot, `w/Momentum`, and not its variable `w`.
    graph_names = set(map(_saved_name, tf.global_variables()))
    kinds = {}
    for name, entry in wanted.items():
        kind = _kind_of_state(entry.parts[0], graph_names)
        if kind is not None:
            kinds[name] = kind
    return kinds


def _kind_of_state(variable: tf.Variable,
                   graph_names: typing.AbstractSet[str]) -> typing.Optional[str]:
    """Tells variables that only training needs from weights.

    Args:
      variable: the variable.
      graph_names: the names of all variables of the graph.

    Returns:
      `'counter'` for a single integer, such as the global step; `'optimizer state'` for a variable
      whose name is below another variable's, such as `w/Momentum`; None for a weight.
    """
    if variable.trainable:
        return None
    if variable.dtype.is_integer and variable.shape.num_elements() == 1:
        return 'counter'
    name = _saved_name(variable)
    if _BETA_POWER.search(name):
        return 'optimizer state'
    scopes = [name[:slash.start()] for slash in re.finditer('/', name)]  # a and a/b, of a/b/c
    is_below_variable = not graph_names.isdisjoint(scopes)
    if is_below_variable:
        return 'optimizer state'
    return None


def _find(path: str) -> str:
    """The prefix of the checkpoint that a path means: its prefix, one of its files, or a directory.

    Raises `CheckpointError` if there is none.
    """
    if tf.io.gfile.isdir(path):
        directory = path
        newest = newest_checkpoint(path)
        prefix = None if newest is None else newest.prefix
    else:
        directory = os.path.dirname(path) or '.'
        prefix = _prefix_of_file(path)
    if prefix is not None:
        return prefix
    names = list(map(os.path.basename, list_checkpoints(directory)))
    raise CheckpointError('there is no checkpoint %s. Expected a directory, a prefix such as '
                          'model.ckpt-500, or one of its files; in %s there is %s.'
                          % (path, directory, some(names) if names else 'none'))


def _prefix_of_file(path: str) -> typing.Optional[str]:
    """The prefix of a checkpoint, from its prefix or the path of one of its files; None if there is
    no such checkpoint."""
    prefix = _FILE_OF_PREFIX.sub('', path)
    is_v2 = tf.io.gfile.exists(prefix + '.index')
    is_v1 = tf.io.gfile.exists(prefix)  # a V1 checkpoint is one file
    if is_v2 or is_v1:
        return prefix
    return None
