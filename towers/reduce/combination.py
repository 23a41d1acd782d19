"""One gradient per variable from the gradients of all towers."""

import itertools
import typing

import tensorflow.compat.v1 as tf

from towers.arguments import check_graph_mode
from towers.errors import GradientError
from towers.gradients.gradient_pairs import (
    each_row_once,
    expected_gradient,
    listed_pairs,
    lookups_of,
    may_be_gradient_of,
)
from towers.graph.graph_walk import ancestors, bytes_of
from towers.graph.variable_access import REFERENCE_VARIABLES
from towers.placement.variable_device import only_device

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
        """The combined gradients on every tower, as pairs whose variable is None; [] without
        replicas."""
        on_towers = self.on_towers or {}
        return [(gradient, None) for gradient in itertools.chain.from_iterable(on_towers.values())]


Aligned = typing.List[typing.Tuple[tf.Variable, typing.List[typing.Tuple[int, typing.Any]]]]
"""Variables, each with the towers that have a gradient of it, and that gradient."""


def combine_gradients(tower_gradients: typing.Sequence) -> list:
    """Sums the towers' gradients variable by variable, each on its variable's device.

        combined[v] = sum over the towers k that have a gradient of v of gradients[k][v]

    Gradients are aligned by their variable, not by their place in the list. Dense gradients are
    added, and never stacked: a stack would write and read each of them once more. `IndexedSlices`
    are concatenated, rows with their values, and stay sparse. Where each tower's lookup has unique
    ids (`embedding_lookup_sparse`), rows that several towers have are added up, so the result has
    unique rows, too. Where one tower's gradient is sparse and another's is dense, the sum is dense.
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
        than its variable; no gradient at all; towers of which each has variables of its own, as
        `t0/w` and `t1/w`.
    """
    check_graph_mode('the result of combine_gradients')
    _check_shared(align(tower_gradients))
    return combine(tower_gradients)


def combine(tower_gradients: typing.Sequence) -> Pairs:
    """Sums gradients as `combine_gradients` does, but does not check that towers share variables.

    Besides one list a tower, there may be a list that belongs to no tower: the gradients of
    variables from which the batch itself is computed, see `UpstreamVariables`.
    """
    combined = []
    for variable, gradients_by_tower in align(tower_gradients):
        gradients = [gradient for _, gradient in gradients_by_tower]
        with only_device(variable.device or None):
            total = joined_product(gradients, variable)
            if total is None:
                total = add_up(gradients, variable)
        combined.append((total, variable))
    return combined


def all_reduce(tower_gradients: typing.Sequence, other_gradients: typing.Sequence,
               devices: typing.Sequence[str]) -> Combined:
    """Sums the towers' gradients and gives every tower the sums, for replicas.

    The gradients of one variable are added on one tower, so that every tower adds about the same
    number of bytes.

    Args:
      tower_gradients: a list of `(gradient, variable)` for each tower.
      other_gradients: lists of pairs that belong to no tower, see `combine`.
      devices: the device of each tower.
    """
    combined = []
    on_towers = {}
    added_bytes = dict.fromkeys(devices, 0)
    for variable, gradients_by_tower in align(list(tower_gradients) + list(other_gradients)):
        device = min(devices, key=added_bytes.__getitem__)
        added_bytes[device] += bytes_of(variable)
        with only_device(device):
            total = add_up([gradient for _, gradient in gradients_by_tower], variable)
        combined.append((total, variable))
        on_towers[variable.op.name] = [total] * len(devices)
    return Combined(combined, on_towers)


def align(tower_gradients: typing.Any) -> Aligned:
    """Checks all towers' gradients and groups them by variable; makes no operation.

    Returns:
      `[(variable, [(tower, gradient), …]), …]` in the order in which variables first occur, without
      the variables that have no gradient in any tower.

    Raises:
      GradientError: as `combine_gradients` says.
    """
    if not isinstance(tower_gradients, (list, tuple)) or not tower_gradients:
        raise GradientError('combine_gradients expects a list with one list of (gradient, '
                            'variable) pairs a tower, and got %.80r.' % (tower_gradients,))
    aligned = by_variable(tower_gradients)
    if not aligned:
        raise GradientError(
            'no tower has a (gradient, variable) pair, all %d lists are empty: pass for each tower '
            'what its optimizer.compute_gradients(loss) returned.' % len(tower_gradients))
    with_gradients = [(variable, by_tower) for variable, by_tower in aligned if by_tower]
    if not with_gradients:
        names = [variable.op.name for variable, _ in aligned]
        raise GradientError(
            'none of the %d variables has a gradient in any tower: the loss does not depend on '
            'them. Variables: %s.' % (len(names), ', '.join(names[:5])))
    return with_gradients


def by_variable(tower_gradients: typing.Sequence) -> Aligned:
    """Groups all towers' gradients by variable, in the order in which variables first occur.

    Returns:
      `[(variable, [(tower, gradient), …]), …]`; the inner list is empty for a variable that has no
      gradient in any tower.
    """
    variables: typing.Dict[str, tf.Variable] = {}
    gradients: typing.Dict[str, list] = {}
    for tower, pairs in enumerate(tower_gradients):
        for name, (variable, gradient) in _checked(pairs, tower).items():
            if name not in variables:
                variables[name] = variable
                gradients[name] = []
            if gradient is not None:
                gradients[name].append((tower, gradient))
    return [(variables[name], gradients[name]) for name in variables]


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
        gradient = tf.IndexedSlices(gradient.values, gradient.indices, tf.shape(variable))
    return tf.convert_to_tensor(gradient)


def _check_shared(aligned: Aligned) -> None:
    """Raises `GradientError` if every tower trains variables of its own, such as t0/w and t1/w: if
    several towers have gradients, and no variable has gradients in two of them."""
    if any(len(gradients_by_tower) > 1 for _, gradients_by_tower in aligned):
        return
    first_names: typing.Dict[int, str] = {}  # from a tower to the name of its first variable
    for variable, gradients_by_tower in aligned:
        [(tower, _)] = gradients_by_tower
        first_names.setdefault(tower, variable.op.name)
    if len(first_names) > 1:
        tower, other = sorted(first_names)[:2]
        raise GradientError(
            'tower %d has gradients of %r and tower %d of %r, and no variable has one in both: '
            'each tower trains a model of its own. Make the variables with tf.get_variable under '
            'the same names in every tower, with reuse from the second one on, or let build_towers '
            'share them.' % (tower, first_names[tower], other, first_names[other]))


def _checked(pairs: typing.Any, tower: int) -> typing.Dict[str, tuple]:
    """{name of a variable: (variable, gradient)} of a tower's pairs; raises `GradientError` if they
    are no pairs, or a gradient cannot be one of its variable."""
    listed = listed_pairs(pairs)
    found: typing.Dict[str, tuple] = {}
    if listed is None or not all(hasattr(variable, 'op') for _, variable in listed):
        raise GradientError('the gradients of tower %d are %.200r: expected a list of (gradient, '
                            'variable) pairs.' % (tower, pairs))
    for gradient, variable in listed:
        is_in_this_graph = variable.graph is tf.get_default_graph()
        if not is_in_this_graph or not may_be_gradient_of(gradient, variable):
            raise GradientError('the gradient of %r in tower %d is %.80r: %s.' % (
                variable.op.name, tower, gradient, expected_gradient(variable)))
        if variable.op.name in found:
            raise GradientError('variable %r occurs twice among the gradients of tower %d: sum '
                                'them, or leave one out.' % (variable.op.name, tower))
        found[variable.op.name] = (variable, gradient)
    return found


def _rows_of_all(gradients: typing.List[tf.IndexedSlices]) -> tf.IndexedSlices:
    """The sparse gradients of all towers as one.

    The rows of all towers are concatenated, except where a lookup takes each row only once
    (`embedding_lookup_sparse`, whose ids are made unique): there, rows with the same index are
    added up. On one device such a gradient has no row twice either, and a norm of its values, taken
    for clipping, would be another if it had.
    """
    lookups_of_towers = [lookups_of(gradient) for gradient in gradients]
    first_lookups = lookups_of_towers[0]
    has_unique = any(lookup.is_unique for lookup in first_lookups)
    if not has_unique:
        return _concatenated(gradients)
    for lookups in lookups_of_towers:
        if not _are_alike(lookups, first_lookups):
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


def _are_alike(lookups: list, others: list) -> bool:
    """Whether two towers' gradients come from equally many lookups, of which the n-th of both takes
    each row once, or the n-th of neither does."""
    uniqueness = [lookup.is_unique for lookup in lookups]
    return uniqueness == [other.is_unique for other in others]


def _concatenated(slices: typing.List[tf.IndexedSlices]) -> tf.IndexedSlices:
    """The rows of several slices as one, in their order."""
    indices = [rows.indices for rows in slices]
    values = [rows.values for rows in slices]
    if len({tensor.dtype for tensor in indices}) > 1:
        indices = [tf.cast(tensor, tf.int64) for tensor in indices]
    dense_shape = None
    for rows in reversed(slices):  # the first known shape
        if rows.dense_shape is not None:
            dense_shape = rows.dense_shape
    return tf.IndexedSlices(values=tf.concat(values, 0), indices=tf.concat(indices, 0),
                            dense_shape=dense_shape)


# ---- wide dense layers ---------------------------------------------------------------------------

# Measured on two cores, see benchmarks/results/speed.md: from 64 examples a tower on, towers that
# multiply side by side are as fast. No more rows in all than were measured.
_MOST_ROWS = 32
_MOST_JOINT_ROWS = 128
_LEAST_ELEMENTS = 2 ** 20


def joined_product(gradients: typing.List[typing.Any],
                   variable: tf.Variable) -> typing.Optional[tf.Tensor]:
    """The sum of the towers' gradients of a variable [m, n] as one product, on the current device.

    Tower k's gradient of a dense layer's weights is the product of the layer's inputs x_k [r_k, m]
    and the gradient y_k [r_k, n] of its outputs, a row an example. The sum over the towers is

        sum_k x_k^T y_k  =  [x_1; …; x_N]^T [y_1; …; y_N]

    With few examples a tower, N products as large as the weights need not be made, and read again
    to be added up (the "sufficient factors" of Xie et al., UAI 2016). The towers' own products stay
    in the graph; TensorFlow's optimizer drops them from a step that fetches none of them.

    Returns:
      The sum; or None where one gradient is no product of thin static matrices, another operation
      reads it, XLA compiles it, the weights are small, or the devices are not CPUs of one process.
    """
    if len(gradients) < 2 or not all(isinstance(gradient, tf.Tensor) for gradient in gradients):
        return None
    products = []
    awaited: typing.List[tf.Operation] = []
    for gradient in gradients:
        product, control_inputs = _made_by(gradient)
        products.append(product)
        awaited += control_inputs
    factors = _factors(products, variable)
    devices = [variable.device] + [product.device for product in products]
    if factors is None or not _are_cpus_of_one_process(devices):
        return None
    with tf.control_dependencies(awaited):
        x = tf.concat(factors.inputs, 0 if factors.transpose_x else 1)
        y = tf.concat(factors.output_gradients, 1 if factors.transpose_y else 0)
        return tf.matmul(x, y, transpose_a=factors.transpose_x, transpose_b=factors.transpose_y)


class _Factors(typing.NamedTuple):
    """The two factors of every tower's product `tf.matmul(x_k, y_k, transpose_x, transpose_y)`.

    Attributes:
      inputs: x_k of each tower, the layer's inputs; [r_k, m] if `transpose_x`, else [m, r_k].
      output_gradients: y_k of each tower, the gradients of the layer's outputs; [n, r_k] if
        `transpose_y`, else [r_k, n].
      transpose_x: whether the products transpose x.
      transpose_y: whether the products transpose y.
    """

    inputs: typing.List[tf.Tensor]
    output_gradients: typing.List[tf.Tensor]
    transpose_x: bool
    transpose_y: bool


def _made_by(tensor: tf.Tensor) -> typing.Tuple[tf.Operation, typing.List[tf.Operation]]:
    """The operation that computes a tensor, and the control inputs on the way to it.

    Identities on the way are passed over: `tf.gradients` puts one after each of several outputs.
    """
    op = tensor.op
    control_inputs = list(op.control_inputs)
    while op.type == 'Identity':
        op = op.inputs[0].op
        control_inputs += op.control_inputs
    return op, control_inputs


def _factors(products: typing.List[tf.Operation],
             variable: tf.Variable) -> typing.Optional[_Factors]:
    """The factors of the towers' products; None where they cannot be joined to one gradient of the
    variable, or joining them does not pay."""
    elements = variable.get_shape().num_elements() or 0
    if elements < _LEAST_ELEMENTS or not all(_is_thin_product(op, elements) for op in products):
        return None
    transpose_x = products[0].get_attr('transpose_a')
    transpose_y = products[0].get_attr('transpose_b')
    factors = _Factors([], [], transpose_x, transpose_y)
    rows = []
    for op in products:
        if (op.get_attr('transpose_a'), op.get_attr('transpose_b')) != (transpose_x, transpose_y):
            return None
        x, y = op.inputs
        factors.inputs.append(x)
        factors.output_gradients.append(y)
        rows.append(x.shape.as_list()[0 if transpose_x else 1])
    if max(rows) > _MOST_ROWS or sum(rows) > _MOST_JOINT_ROWS:
        return None
    return factors


def _is_thin_product(op: tf.Operation, elements: int) -> bool:
    """Whether an operation is a matrix product that can be joined, and joining pays.

    Joining reads and writes each factor once more, and saves reading and writing the product. It
    pays where the factors have at most half of the product's elements. A product of reference
    variables is not joined: the variables' updates wait for the towers' products.

    Args:
      op: the operation that computes a tower's gradient.
      elements: the number of elements of the variable, and so of the product.
    """
    if op.type != 'MatMul' or '_XlaCompile' in op.node_def.attr or _is_read(op.outputs[0]):
        return False
    if not all(tensor.shape.is_fully_defined() for tensor in op.inputs):
        return False
    elements_of_factors = sum(tensor.shape.num_elements() for tensor in op.inputs)
    if 2 * elements_of_factors > elements:
        return False
    types_upstream = {op.graph.get_operation_by_name(name).type for name in ancestors(op.inputs)}
    return types_upstream.isdisjoint(REFERENCE_VARIABLES)


def _is_read(tensor: tf.Tensor) -> bool:
    """Whether an operation reads a tensor, other than to pass it on."""
    return any(op.type != 'Identity' or _is_read(op.outputs[0]) for op in tensor.consumers())


def _are_cpus_of_one_process(devices: typing.Iterable[str]) -> bool:
    """Whether all these devices are CPUs, and of one task."""
    specs = [tf.DeviceSpec.from_string(device) for device in devices]
    kinds = {spec.device_type for spec in specs}
    tasks = {(spec.job, spec.replica, spec.task) for spec in specs}
    return kinds == {'CPU'} and len(tasks) == 1
