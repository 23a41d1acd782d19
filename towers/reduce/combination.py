"""One gradient per variable from the gradients of all towers."""

import collections
import typing

import tensorflow.compat.v1 as tf

from towers.arguments import check_graph_mode
from towers.errors import GradientError
from towers.graph.graph_walk import ancestors, bytes_of
from towers.graph.variable_access import REFERENCE_VARIABLES
from towers.placement.variable_device import only_device
from towers.tower.gradient_pairs import (each_row_once, expected_gradient, listed_pairs, lookups_of,
                                         may_be_gradient_of)


class Combined(collections.namedtuple('Combined', 'gradients on_towers', defaults=(None,))):
    """The gradient of each variable.

    Attributes:
      gradients: list of pairs, as `combine_gradients` returns them.
      on_towers: of replicated variables {name: list of the gradient on each tower}; else None.
    """
    __slots__ = ()

    @property
    def of_replicas(self) -> list:
        """The gradients that replicas get as pairs, with None in the place of their variable."""
        return [(gradient, None) for every in (self.on_towers or {}).values()
                for gradient in every]


def combine_gradients(tower_gradients: typing.Sequence) -> list:
    """Sums the towers' gradients variable by variable, each on its variable's device.

        combined[v] = sum over the towers k that have a gradient of v of gradients[k][v]

    Gradients are aligned by their variable, not by their place in the list. Dense gradients are
    added, and never stacked: a stack would write and read each of them once more. `IndexedSlices`
    are concatenated, rows with their values, and stay sparse; the gradient of a lookup that takes
    each id once (`embedding_lookup_sparse`) has each row once, as on one device. Products of wide
    dense layers with few examples a tower are made once, see `joined_product`. Where one tower's
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
        or a variable of another graph than the default one; a gradient of another shape or dtype
        than its variable; no gradient at all; towers of which each has variables of its own, as
        `t0/w` and `t1/w`.
    """
    check_graph_mode('the result of combine_gradients')
    _check_shared(align(tower_gradients))
    return combine(tower_gradients)


def combine(tower_gradients):
    """`combine_gradients` for lists that may belong to no tower, see `VariablesBehindInputs`."""
    combined = []
    for variable, present in align(tower_gradients):
        gradients = [gradient for _, gradient in present]
        with only_device(variable.device or None):
            joined = joined_product(gradients, variable)
            combined.append((add_up(gradients, variable) if joined is None else joined, variable))
    return combined


def all_reduce(tower_gradients, further, devices):
    """Sums the towers' gradients and gives each tower the sums, for replicas: `Combined`. Each
    variable's, with `further` ones that belong to no tower, are added on one tower; every tower
    adds about as many bytes."""
    combined, on_towers, added = [], {}, dict.fromkeys(devices, 0)  # bytes that each one adds
    for variable, present in align(list(tower_gradients) + list(further)):
        device = min(devices, key=added.get)
        added[device] += bytes_of(variable)
        with only_device(device):
            total = add_up([gradient for _, gradient in present], variable)
        combined.append((total, variable))
        on_towers[variable.op.name] = [total] * len(devices)
    return Combined(combined, on_towers)


def align(tower_gradients):
    """`[(variable, [(tower, gradient)])]` of all towers' gradients, checked, in the order in which
    variables first occur, without variables that have no gradient in any tower; makes no op."""
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
    return aligned


def add_up(gradients, variable):
    """The sum of gradients of one variable, on the current device; sparse where all are."""
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


def _check_shared(aligned):
    """Raises if several towers have gradients, and no variable has one in two (t0/w, t1/w)."""
    own = {present[0][0]: variable.op.name for variable, present in reversed(aligned)}
    if len(own) > 1 and all(len(present) == 1 for _, present in aligned):
        (one, of_one), (other, of_other) = sorted(own.items())[:2]
        raise GradientError(
            'tower %d has gradients of %r and tower %d of %r, and no variable has one in both: '
            'each tower trains a model of its own. Make the variables with tf.get_variable under '
            'the same names in every tower, with reuse from the second one on, or let build_towers '
            'share them.' % (one, of_one, other, of_other))


def _checked(pairs, tower):
    """{name of a variable: (variable, gradient)} of a tower's pairs."""
    listed, found = listed_pairs(pairs), {}
    if listed is None or not all(hasattr(variable, 'op') for _, variable in listed):
        raise GradientError('the gradients of tower %d are %.200r: expected a list of (gradient, '
                            'variable) pairs.' % (tower, pairs))
    for gradient, variable in listed:
        if variable.graph is not tf.get_default_graph() or (
                not may_be_gradient_of(gradient, variable)):
            raise GradientError('the gradient of %r in tower %d is %.80r: %s.' % (
                variable.op.name, tower, gradient, expected_gradient(variable)))
        if variable.op.name in found:
            raise GradientError('variable %r occurs twice among the gradients of tower %d: sum '
                                'them, or leave one out.' % (variable.op.name, tower))
        found[variable.op.name] = (variable, gradient)
    return found


def _rows_of_all(slices):
    """The rows of all gradients, one after the other; of lookups that take each row once, added up:
    on one device these have no row twice either, and a norm of them, taken for clipping, counts
    none twice."""
    lookups = [lookups_of(each) for each in slices]
    kinds = {tuple(lookup.is_unique for lookup in of_one) for of_one in lookups}
    if len(kinds) > 1 or not any(next(iter(kinds))):
        return _concatenated(slices)
    of_all = []
    for of_lookup in zip(*lookups):
        rows = _concatenated([lookup.slices for lookup in of_lookup])
        of_all.append(each_row_once(rows) if of_lookup[0].is_unique else rows)
    return of_all[0] if len(of_all) == 1 else _concatenated(of_all)


def _concatenated(slices):
    indices = [each.indices for each in slices]
    if len({each.dtype for each in indices}) > 1:
        indices = [tf.cast(each, tf.int64) for each in indices]
    shapes = [each.dense_shape for each in slices if each.dense_shape is not None]
    return tf.IndexedSlices(values=tf.concat([each.values for each in slices], 0),
                            indices=tf.concat(indices, 0),
                            dense_shape=shapes[0] if shapes else None)


# ---- wide dense layers ---------------------------------------------------------------------------

# Measured on two cores, see benchmarks/results/speed.md: from 64 examples a tower on, towers that
# multiply side by side are as fast. No more rows in all than were measured.
_MOST_ROWS, _MOST_JOINT_ROWS = 32, 128
_LEAST_ELEMENTS = 2 ** 20


def joined_product(gradients, variable):
    """The sum of the towers' gradients of a variable [m, n] as one product, on the current device.

    Tower k's gradient of a dense layer's weights is the product of the layer's inputs x_k [r_k, m]
    and the gradient y_k [r_k, n] of its outputs, a row an example. The sum over the towers is

        sum_k x_k^T y_k  =  [x_1; …; x_N]^T [y_1; …; y_N]

    With few examples a tower, N products as large as the weights need not be made, and read again
    to be added up (the "sufficient factors" of Xie et al., UAI 2016). The towers' own products stay
    in the graph; TensorFlow's optimizer drops them from a step that fetches none of them.

    None where one gradient is no product of thin static matrices, something else reads it, XLA
    compiles it, the weights are small, or the devices are not CPUs of one process.
    """
    elements = variable.get_shape().num_elements() or 0
    if len(gradients) < 2 or elements < _LEAST_ELEMENTS or not all(
            isinstance(gradient, tf.Tensor) for gradient in gradients):
        return None
    products, waits_for = [gradient.op for gradient in gradients], []
    for place, op in enumerate(products):
        while op.type == 'Identity':  # tf.gradients puts an identity after an output of several
            waits_for += op.control_inputs
            products[place] = op = op.inputs[0].op
        waits_for += op.control_inputs
    if not all(_is_thin_product(op, elements) for op in products):
        return None
    (transpose_a, transpose_b), *others = [
        (op.get_attr('transpose_a'), op.get_attr('transpose_b')) for op in products]
    rows = [op.inputs[0].shape.as_list()[0 if transpose_a else 1] for op in products]
    if (any(other != (transpose_a, transpose_b) for other in others) or max(rows) > _MOST_ROWS
            or sum(rows) > _MOST_JOINT_ROWS
            or not _are_cpus_of_one_process([variable.device] + [op.device for op in products])):
        return None
    with tf.control_dependencies(waits_for):
        a = tf.concat([op.inputs[0] for op in products], 0 if transpose_a else 1)
        b = tf.concat([op.inputs[1] for op in products], 1 if transpose_b else 0)
        return tf.matmul(a, b, transpose_a=transpose_a, transpose_b=transpose_b)


def _is_thin_product(op, elements):
    """Whether joining pays: each factor is read and written once more, and the products are not.

    A possible memory of a reference variable is left: its update waits for a tower's product.
    """
    return (op.type == 'MatMul' and '_XlaCompile' not in op.node_def.attr
            and not _is_read(op.outputs[0])
            and all(tensor.shape.is_fully_defined() for tensor in op.inputs)
            and 2 * sum(tensor.shape.num_elements() for tensor in op.inputs) <= elements
            and not any(op.graph.get_operation_by_name(name).type in REFERENCE_VARIABLES
                        for name in ancestors(op.inputs)))


def _is_read(tensor):
    """Whether an operation reads a tensor, other than to pass it on."""
    return any(op.type != 'Identity' or _is_read(op.outputs[0]) for op in tensor.consumers())


def _are_cpus_of_one_process(devices):
    specs = [tf.DeviceSpec.from_string(device) for device in devices]
    return (all(spec.device_type == 'CPU' for spec in specs)
            and len({(spec.job, spec.replica, spec.task) for spec in specs}) == 1)
