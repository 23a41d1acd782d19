"""One gradient per variable from the gradients of all towers."""

import itertools
import typing

import tensorflow.compat.v1 as tf

from towers.arguments import check_graph_mode
from towers.errors import GradientError
from towers.gradients.gradient_pairs import (
    Lookup,
    each_row_once,
    expected_gradient,
    listed_pairs,
    lookups_of,
    may_be_gradient_of,
)
from towers.graph.graph_walk import bytes_of
from towers.placement.variable_device import only_device
from towers.reduce.joined_products import joined_product

Pairs = typing.List[typing.Tuple[typing.Any, typing.Any]]
"""Gradients, each None, a tensor or `tf.IndexedSlices`, with their variables."""


class Combined(typing.NamedTuple):
    """The gradient of each variable over all towers.

    Attributes:
      gradients: the combined gradients with their variables, as `combine_gradients` returns them.
      on_towers: from the name of a replicated variable to its combined gradient on each tower;
        None without replicas.
    """

    gradients: Pairs
    on_towers: typing.Optional[typing.Dict[str, list]] = None

    @property
    def pairs_of_replicas(self) -> Pairs:
        """The combined gradients on every tower, as pairs for `tensors_of`, which asks for no
        variable (None); [] without replicas."""
        if self.on_towers is None:
            return []
        gradients = itertools.chain.from_iterable(self.on_towers.values())
        return [(gradient, None) for gradient in gradients]


class Aligned(typing.NamedTuple):
    """The gradients of one variable.

    Attributes:
      variable: the variable.
      by_tower: {index of a tower that has a gradient of it: the gradient}.
    """

    variable: tf.Variable
    by_tower: typing.Dict[int, typing.Any]

    @property
    def gradients(self) -> list:
        """List of the gradients, in the order of the towers."""
        return list(self.by_tower.values())


def combine_gradients(tower_gradients: typing.Sequence) -> list:
    """Sums the towers' gradients variable by variable, each on its variable's device.

        combined[v] = sum over the towers k that have a gradient of v of gradients[k][v]

    Gradients are aligned by their variable, not by their place in the list. Dense gradients are
    added, and never stacked: a stack would write and read each of them once more. `IndexedSlices`
    are concatenated, rows with their values, and stay sparse. Where each tower's lookup has unique
    ids (`embedding_lookup_sparse`), rows that several towers have are added up, so the result also
    has unique rows. Where one tower's gradient is sparse and another's is dense, the sum is dense.
    The weight gradient of a wide dense layer, x^T dy, is one product over the examples of all
    towers; see `joined_product`. Where only some towers have a gradient of a variable, their
    gradients are summed; a variable without a gradient in any tower is left out.

    Args:
      tower_gradients: list, one entry a tower (K), of lists of `(gradient, variable)` as
        `optimizer.compute_gradients` returns them. Lists may differ in length and order; a gradient
        is a tensor, an `IndexedSlices`, or None.

    Returns:
      List of `(gradient, variable)`, in the order in which variables first occur. With one tower
      the gradients are its own, unchanged.

    Raises:
      InvalidArgumentError: TensorFlow executes eagerly.
      GradientError: no tower; an entry that is no pair; a variable twice in one tower; a gradient
        or a variable of another graph than the default one; a gradient of another shape or dtype
        than its variable; no gradient at all; each tower has variables of its own, such as `t0/w`
        and `t1/w`.
    """
    check_graph_mode('the result of combine_gradients')
    _check_shared(align(tower_gradients))
    return combine(tower_gradients)


def combine(tower_gradients: typing.Sequence) -> Pairs:
    """Sums gradients by the formula of `combine_gradients`, and does not check that towers share
    variables.

    Args:
      tower_gradients: a list of `(gradient, variable)` for each tower; and perhaps a list that
        belongs to no tower, with the gradients of the variables from which the batch itself is
        computed.
    """
    combined = []
    for aligned in align(tower_gradients):
        variable = aligned.variable
        with only_device(variable.device or None):
            total = joined_product(aligned.gradients, variable)
            if total is None:
                total = add_up(aligned.gradients, variable)
        combined.append((total, variable))
    return combined


def all_reduce(tower_gradients: typing.Sequence, other_gradients: typing.Sequence,
               devices: typing.Sequence[str]) -> Combined:
    """Sums the towers' gradients and gives every tower the sums, for replicas.

    The gradients of one variable are added up on the device of one tower: the device on which the
    fewest bytes are added up so far. So every tower does about the same work.

    Args:
      tower_gradients: a list of `(gradient, variable)` for each tower.
      other_gradients: lists of pairs that belong to no tower, see `combine`.
      devices: the device of each tower.
    """
    combined = []
    on_towers = {}
    added_bytes = dict.fromkeys(devices, 0)  # {device: bytes of the sums that are made there}
    for aligned in align(list(tower_gradients) + list(other_gradients)):
        variable = aligned.variable
        device = min(devices, key=added_bytes.__getitem__)
        added_bytes[device] += bytes_of(variable)
        with only_device(device):
            total = add_up(aligned.gradients, variable)
        combined.append((total, variable))
        # The same tensor for each tower: TensorFlow copies it to the devices that take it.
        on_towers[variable.op.name] = [total] * len(devices)
    return Combined(combined, on_towers)


def align(tower_gradients: typing.Any) -> typing.List[Aligned]:
    """Checks all towers' gradients and groups them by variable; makes no operation.

    Args:
      tower_gradients: the argument of `combine_gradients`, not checked yet.

    Returns:
      List of `Aligned`, one a variable, in the order in which variables first occur, without the
      variables that have no gradient in any tower.

    Raises:
      GradientError: no list, no pair, or no gradient at all; an entry that is no pair of a gradient
        and its variable.
    """
    if not isinstance(tower_gradients, (list, tuple)) or not tower_gradients:
        raise GradientError('combine_gradients expects a list with one list of (gradient, '
                            'variable) pairs a tower, and got %.80r.' % (tower_gradients,))
    all_aligned = by_variable(tower_gradients)
    if not all_aligned:
        raise GradientError(
            'no tower has a (gradient, variable) pair, all %d lists are empty: pass for each tower '
            'what its optimizer.compute_gradients(loss) returned.' % len(tower_gradients))
    with_gradients = [aligned for aligned in all_aligned if aligned.by_tower]
    if not with_gradients:
        names = [aligned.variable.op.name for aligned in all_aligned]
        raise GradientError(
            'none of the %d variables has a gradient in any tower: the loss does not depend on '
            'them. Variables: %s.' % (len(names), ', '.join(names[:5])))
    return with_gradients


def by_variable(tower_gradients: typing.Sequence) -> typing.List[Aligned]:
    """Groups all towers' gradients by variable, in the order in which variables first occur.

    Args:
      tower_gradients: a list of `(gradient, variable)` for each tower.

    Returns:
      List of `Aligned`, one a variable, also for a variable that has no gradient in any tower.
    """
    found: typing.Dict[str, Aligned] = {}  # by the variable's name
    for tower, pairs in enumerate(tower_gradients):
        for gradient, variable in _checked(pairs, tower):
            aligned = found.setdefault(variable.op.name, Aligned(variable, {}))
            if gradient is not None:
                aligned.by_tower[tower] = gradient
    return list(found.values())


def add_up(gradients: typing.List[typing.Any], variable: tf.Variable) -> typing.Any:
    """The sum of several gradients of one variable, made on the current device.

    Returns:
      `tf.IndexedSlices` if all gradients are, else a tensor.
    """
    if len(gradients) == 1:
        return gradients[0]
    if all(isinstance(gradient, tf.IndexedSlices) for gradient in gradients):
        return _rows_of_all(gradients)
    return tf.add_n([dense(gradient, variable) for gradient in gradients])


def dense(gradient: typing.Any, variable: tf.Variable) -> tf.Tensor:
    """A gradient as a tensor of the variable's shape."""
    if isinstance(gradient, tf.IndexedSlices) and gradient.dense_shape is None:
        # Without a shape the rows cannot be made a tensor.
        gradient = tf.IndexedSlices(gradient.values, gradient.indices, tf.shape(variable))
    return tf.convert_to_tensor(gradient)


def _check_shared(all_aligned: typing.Sequence[Aligned]) -> None:
    """Raises `GradientError` if every tower trains variables of its own, such as t0/w and t1/w: if
    several towers have gradients, and no variable has gradients in two of them.

    Args:
      all_aligned: the result of `align`, in which each variable has a gradient in one tower at
        least.
    """
    first_names: typing.Dict[int, str] = {}  # {tower: the name of its first variable}
    for aligned in all_aligned:
        if len(aligned.by_tower) > 1:
            return
        [tower] = aligned.by_tower  # the one tower with a gradient of this variable
        first_names.setdefault(tower, aligned.variable.op.name)
    if len(first_names) > 1:
        tower, other = sorted(first_names)[:2]
        raise GradientError(
            'tower %d has gradients of %r and tower %d of %r, and no variable has one in both: '
            'each tower trains a model of its own. Make the variables with tf.get_variable under '
            'the same names in every tower, with reuse from the second one on, or let build_towers '
            'share them.' % (tower, first_names[tower], other, first_names[other]))


def _checked(pairs: typing.Any, tower: int) -> Pairs:
    """List of a tower's pairs; raises `GradientError` if they are no pairs, a gradient cannot be
    its variable's (another graph, shape or dtype), or a variable occurs twice.

    Args:
      pairs: what the caller gave for the tower.
      tower: the index of the tower, for the message.
    """
    listed = listed_pairs(pairs)
    if listed is None or not _have_variables(listed):
        raise GradientError('the gradients of tower %d are %.200r: expected a list of (gradient, '
                            'variable) pairs.' % (tower, pairs))
    names = set()
    for gradient, variable in listed:
        is_in_this_graph = variable.graph is tf.get_default_graph()
        if not is_in_this_graph or not may_be_gradient_of(gradient, variable):
            raise GradientError('the gradient of %r in tower %d is %.80r: %s.' % (
                variable.op.name, tower, gradient, expected_gradient(variable)))
        if variable.op.name in names:
            raise GradientError('variable %r occurs twice among the gradients of tower %d: sum '
                                'them, or leave one out.' % (variable.op.name, tower))
        names.add(variable.op.name)
    return listed


def _have_variables(pairs: Pairs) -> bool:
    """Whether the second entry of each pair is a variable of a graph: it has an operation."""
    return all(hasattr(variable, 'op') for _, variable in pairs)


# ---- sparse gradients ----------------------------------------------------------------------------

def _rows_of_all(gradients: typing.List[tf.IndexedSlices]) -> tf.IndexedSlices:
    """The sparse gradients of all towers as one.

    The rows of all towers are concatenated, except where a lookup takes each row only once
    (`embedding_lookup_sparse`, whose ids are made unique): there, rows with the same index are
    added up. On one device such a gradient has no row twice. If the combined gradient had a row
    twice, a norm of its values, taken for clipping, would differ from one device's.
    """
    lookups_of_towers = list(map(lookups_of, gradients))
    # In towers that are copies of one program, the n-th lookup of each tower is the same lookup. If
    # the lookups differ, the gradients that the caller gave are not of such towers.
    kinds_of_lookups = set(map(_are_unique, lookups_of_towers))
    are_alike = len(kinds_of_lookups) == 1
    has_unique_lookup = any(_are_unique(lookups_of_towers[0]))
    if not are_alike or not has_unique_lookup:
        return _concatenated(gradients)
    rows_of_lookups = []
    for same_lookup in zip(*lookups_of_towers):  # one lookup of the program, in every tower
        rows = _concatenated([lookup.slices for lookup in same_lookup])
        if same_lookup[0].is_unique:
            rows = each_row_once(rows)
        rows_of_lookups.append(rows)
    if len(rows_of_lookups) == 1:
        return rows_of_lookups[0]
    return _concatenated(rows_of_lookups)


def _are_unique(lookups: typing.Iterable[Lookup]) -> typing.Tuple[bool, ...]:
    """For each lookup that the gradient of one tower comes from, whether it takes each row only
    once: `(True, False)` for `embedding_lookup_sparse` and a plain lookup."""
    return tuple(lookup.is_unique for lookup in lookups)


def _concatenated(slices: typing.List[tf.IndexedSlices]) -> tf.IndexedSlices:
    """The rows of several slices as one `IndexedSlices`, in the order of the slices. Its shape is
    the first known shape among the slices; None if no shape is known."""
    dense_shape = None
    indices = []
    values = []
    for rows in slices:
        indices.append(rows.indices)
        values.append(rows.values)
        if dense_shape is None:
            dense_shape = rows.dense_shape
    dtypes = {tensor.dtype for tensor in indices}
    if len(dtypes) > 1:  # int32 and int64: `tf.concat` takes tensors of one dtype
        indices = [tf.cast(tensor, tf.int64) for tensor in indices]
    return tf.IndexedSlices(values=tf.concat(values, 0), indices=tf.concat(indices, 0),
                            dense_shape=dense_shape)
