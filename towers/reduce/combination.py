"""One gradient per variable from those of all towers."""

import re
import typing

import tensorflow.compat.v1 as tf

from towers.arguments import check_graph_mode
from towers.errors import GradientError
from towers.placement.variable_device import only_device
from towers.reduce.joined_products import joined_product
from towers.reduce.sparse_rows import each_row_once, parts_of_lookups


def combine_gradients(tower_gradients: typing.Sequence) -> list:
    """Sums the towers' gradients variable by variable, each on its variable's device.

        combined[v] = sum over the towers k that have a gradient of v of gradients[k][v]

    Gradients are aligned by their variable, not by their place in the list. Dense gradients are
    added, and never stacked: a stack would write and read each of them once more. `IndexedSlices`
    are concatenated, rows with their values, and stay sparse; the gradient of a lookup that takes
    each id once (`embedding_lookup_sparse`) has each row once, as on one device. Products of wide
    dense layers with few examples a tower are made once, see `joined_products`. Where one tower's
    gradient is sparse and another's is dense, the sum is dense. Where only some towers have a
    gradient of a variable, their gradients are summed; a variable without a gradient in any tower
    is left out.

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
        or a variable of another graph than the default one; gradients of one variable whose shapes
        or dtypes differ; no gradient at all; towers of which each has variables of its own, alike
        but for a part of the name, as `t0/w` and `t1/w`.
    """
    check_graph_mode('what combine_gradients makes')
    if isinstance(tower_gradients, (list, tuple)):
        tower_gradients = [list(_listed(pairs, tower)) for tower, pairs in
                           enumerate(tower_gradients)]
    _check_shared(align(tower_gradients), len(tower_gradients))
    return combine(tower_gradients)


def combine(tower_gradients):
    """`combine_gradients` for lists that may belong to no tower, see `VariablesBehindInputs`.

    Raises:
      GradientError: as `combine_gradients`.
    """
    combined = []
    for variable, present in align(tower_gradients):
        gradients = [gradient for _, gradient in present]
        with only_device(variable.device or None):
            joined = joined_product(gradients, variable)
            combined.append((add_up(gradients, variable) if joined is None else joined, variable))
    return combined


def align(tower_gradients):
    """The gradients of all towers by variable, checked; makes no operation.

    Args:
      tower_gradients: as for `combine_gradients`.

    Returns:
      List of `(variable, [(tower, gradient)])`, in the order in which variables first occur,
      without those that have no gradient in any tower.

    Raises:
      GradientError: as `combine_gradients`.
    """
    if not isinstance(tower_gradients, (list, tuple)) or not tower_gradients:
        raise GradientError('combine_gradients expects a list with one list of (gradient, '
                            'variable) pairs a tower, and got %r.' % (tower_gradients,))
    by_variable = {}  # insertion order: the order in which variables first occur
    for tower, pairs in enumerate(tower_gradients):
        for variable, gradient in _checked(pairs, tower).values():
            entry = by_variable.setdefault(variable.op.name, (variable, []))
            if gradient is not None:
                entry[1].append((tower, gradient))
    aligned = [entry for entry in by_variable.values() if entry[1]]
    if not by_variable:
        raise GradientError(
            'no tower has a (gradient, variable) pair, all %d lists are empty: pass for each tower '
            'what its optimizer.compute_gradients(loss) returned.' % len(tower_gradients))
    if not aligned:
        raise GradientError(
            'none of the %d variables has a gradient in any tower: the loss does not depend on '
            'them. Variables: %s.' % (len(by_variable), ', '.join(list(by_variable)[:5]) or 'none'))
    for variable, present in aligned:
        _check_alike(variable, present)
    return aligned


def add_up(gradients, variable):
    """The sum of gradients of one variable, on the current device; a single one is returned as is.

    Dense gradients are added, `IndexedSlices` concatenated; the sum of both kinds is dense.
    """
    if len(gradients) == 1:
        return gradients[0]
    if all(isinstance(gradient, tf.IndexedSlices) for gradient in gradients):
        return _rows_of_all(gradients)
    return tf.add_n([dense(gradient, variable) for gradient in gradients])


def dense(gradient, variable):
    """A gradient as a tensor of the variable's shape."""
    if isinstance(gradient, tf.IndexedSlices) and gradient.dense_shape is None:
        gradient = tf.IndexedSlices(gradient.values, gradient.indices, tf.shape(variable))
    return tf.convert_to_tensor(gradient)


def _check_shared(aligned, num_towers):
    """Raises where towers share no variable, and their variables end alike, as `t0/w` and `t1/w`.
    """
    own = [[] for _ in range(num_towers)]
    for variable, present in aligned:
        if len(present) > 1:
            return
        own[present[0][0]].append(variable)
    own = [(tower, variables) for tower, variables in enumerate(own) if variables]
    kinds = [sorted((re.sub(r'_?\d+', '', each.op.name.split('/')[-1]), str(each.get_shape()))
                    for each in variables) for _, variables in own]
    if len(own) < 2 or any(kind != kinds[0] for kind in kinds):
        return
    (first, ones), (second, others) = own[:2]
    raise GradientError(
        'tower %d has gradients of %r and tower %d of %r, and no variable has one in both: each '
        'tower trains a model of its own. Make the variables with tf.get_variable under the same '
        'names in every tower, with reuse from the second one on, or let build_towers share them.'
        % (first, ones[0].op.name, second, others[0].op.name))


def _listed(pairs, tower):
    try:
        if isinstance(pairs, (str, bytes, dict)):
            raise TypeError
        return list(pairs)
    except (TypeError, RuntimeError):  # the latter for a tensor
        raise GradientError('the gradients of tower %d are a %s: expected a list of (gradient, '
                            'variable) pairs.' % (tower, type(pairs).__name__)) from None


def _checked(pairs, tower):
    found, graph = {}, tf.get_default_graph()
    for pair in _listed(pairs, tower):
        if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not hasattr(pair[1], 'op'):
            raise GradientError('tower %d has %r among its gradients: expected a (gradient, '
                                'variable) pair.' % (tower, pair))
        gradient, variable = pair
        if gradient is not None and not isinstance(gradient, (tf.Tensor, tf.IndexedSlices)):
            raise GradientError('the gradient of %r in tower %d is a %s: expected a tensor, an '
                                'IndexedSlices or None.'
                                % (variable.op.name, tower, type(gradient).__name__))
        if not {variable.graph, variable.graph if gradient is None else gradient.graph} <= {graph}:
            raise GradientError('the gradient of %r in tower %d is of another graph than the '
                                'default one, or its variable is: combine gradients under the '
                                'graph that they are in.' % (variable.op.name, tower))
        if variable.op.name in found:
            raise GradientError('variable %r occurs twice among the gradients of tower %d: sum '
                                'them, or leave one out.' % (variable.op.name, tower))
        found[variable.op.name] = (variable, gradient)
    return found


def _check_alike(variable, present):
    first = present[0][1]
    for tower, gradient in present:
        if gradient.dtype.base_dtype != first.dtype.base_dtype:
            raise GradientError('the gradients of %r have dtype %s in tower %d and %s in tower %d: '
                                'cast them to one.' % (
                                    variable.op.name, first.dtype.base_dtype.name, present[0][0],
                                    gradient.dtype.base_dtype.name, tower))
        if not fits(gradient, variable.get_shape()):
            raise GradientError('the gradient of %r in tower %d is %s, which does not fit the '
                                "variable's shape %s." % (variable.op.name, tower, gradient,
                                                          variable.get_shape()))


def fits(gradient, shape):
    """Whether a gradient may be that of a variable of some shape."""
    if isinstance(gradient, tf.IndexedSlices):  # rows of the variable; TF 1.15 gives it no shape
        return shape.ndims is None or gradient.values.shape[1:].is_compatible_with(shape[1:])
    return gradient.shape.is_compatible_with(shape)


def _rows_of_all(slices):
    """The rows of all gradients, one after the other; see `parts_of_lookups` for the exception.

    `tf.nn.embedding_lookup_sparse` looks up each id of its batch once, and a lookup of
    `tf.range(n)`, of places in a text, takes each row once for all examples. So their gradients on
    one device have no row twice, and a norm of them, taken for clipping, counts no row twice. Here
    rows of such lookups are added up, each row once.
    """
    parts = [parts_of_lookups(each) for each in slices]
    kinds = {tuple(part.is_unique for part in of_one) for of_one in parts}
    if len(kinds) > 1 or not any(next(iter(kinds))):
        return _concatenated(slices)
    of_all = []
    for of_part in zip(*parts):
        rows = _concatenated([part.slices for part in of_part])
        of_all.append(each_row_once(rows) if of_part[0].is_unique else rows)
    return of_all[0] if len(of_all) == 1 else _concatenated(of_all)


def _concatenated(slices):
    indices = [each.indices for each in slices]
    if len({each.dtype for each in indices}) > 1:
        indices = [tf.cast(each, tf.int64) for each in indices]
    shapes = [each.dense_shape for each in slices if each.dense_shape is not None]
    return tf.IndexedSlices(values=tf.concat([each.values for each in slices], 0),
                            indices=tf.concat(indices, 0),
                            dense_shape=shapes[0] if shapes else None)
