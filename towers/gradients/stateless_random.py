"""Random numbers: each tower draws other numbers; a resumed run draws the same numbers again.

In copy k of tower 0 an op with the seeds (s, s2) gets seed2 = crc32('s s2 tower k'). Here k is the
index of a part of the batch (the shard of a tower, or one of its micro-batches) among the parts of
all machines, from 0.

The kernel of a stateful random op (dropout's `RandomUniform`) counts its draws in memory. So a run
that is killed and started again counts from zero, and drops out other units. With
`stateless_random` each such op is replaced by its stateless twin, which computes its numbers from

    seed = [graph seed x 2^32 + crc32(name of the op in tower 0, k), step]

(Philox 4x32-10; Salmon et al. 2011). No two towers share a mask.
"""

import collections
import contextlib
import typing
import zlib

import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import GradientError
from towers.graph import graph_walk
from towers.graph.edit import Library, call_others, copied_functions
from towers.graph.graph_walk import has_seed, names_of, step_operations
from towers.graph.op_types import ADDS, SETS
from towers.graph.variable_access import initializers
from towers.placement.tower_device import device_like

Keys = typing.Dict[str, str]
"""{name of a constant: name of an op in tower 0}. The constant is the first number of a seed, which
is computed from the op's name. A copy of tower 0 gets another number in its place: see `key_of`."""


def make_stateless(operations: typing.Iterable[tf.Operation], fetches: list, step: tf.Tensor,
                   graph_seed: typing.Optional[int], part: int = 0) -> Keys:
    """Replaces random ops by their stateless twins.

    Some ops are left as they are: ops in loops and branches, where a draw depends on more than the
    step; ops of types without a twin; and ops that draw the same numbers as an op that is left.

    Args:
      operations: operations, of which the random ops are replaced.
      fetches: what a step fetches; random ops that no fetch needs are left as they are.
      step: integer scalar that counts the steps.
      graph_seed: the graph's seed; None for none.
      part: the index of the part of the batch.

    Returns:
      The `Keys` of the twins.
    """
    needed = names_of(step_operations(fetches))
    draws = [op for op in operations if op.name in needed and graph_walk.is_random(op)]
    keys = {}
    for name, equal_draws in _groups_of_equal_draws(draws).items():
        if not all(map(_has_twin, equal_draws)):
            continue
        for op in equal_draws:
            with _beside(op, '_stateless/'):
                key = tf.constant(key_of(name, graph_seed, part), tf.int64)
                seed = tf.stack([key, tf.cast(step, tf.int64)])
                make_twin = _TWINS[op.type]
                compat.replace_tensor(op.outputs[0], make_twin(op, seed))
            keys[key.op.name] = name
    return keys


def _has_twin(op: tf.Operation) -> bool:
    """Whether a stateless op can take the place of a stateful random op."""
    return op.type in _TWINS and not compat.in_control_flow(op)


@contextlib.contextmanager
def _beside(op: tf.Operation, suffix: str) -> typing.Iterator[None]:
    """A context in which new operations are made on the device of an operation, without control
    inputs.

    Args:
      op: the operation.
      suffix: the name scope of the new operations is the operation's name with this suffix.
    """
    with tf.name_scope(op.name + suffix), tf.device(device_like(op)), \
            tf.control_dependencies(None):
        yield


def _groups_of_equal_draws(draws: typing.Iterable[tf.Operation]
                           ) -> typing.Dict[str, typing.List[tf.Operation]]:
    """Groups random ops that draw the same numbers: ops of one type and dtype, with equal seeds. An
    op without seeds is a group of its own.

    Returns:
      {name of the first op of a group: the ops of the group}.
    """
    groups: typing.Dict[str, list] = collections.OrderedDict()
    first_names: typing.Dict[tuple, str] = {}  # {(type, dtype, seeds): name of the first op}
    for op in draws:
        attributes = op.node_def.attr
        seeds = tuple(op.get_attr(name) for name in ('seed', 'seed2') if name in attributes)
        has_seeds = any(seeds)  # in TensorFlow two seeds of 0 stand for no seed
        name = op.name
        if has_seeds:
            name = first_names.setdefault((op.type, op.outputs[0].dtype, seeds), op.name)
        groups.setdefault(name, []).append(op)
    return groups


def check_draws_nothing(backward: typing.Iterable[tf.Operation]) -> None:
    """Refuses a backward pass that draws random numbers, in a build with `stateless_random=True`.

    `tf.recompute_grad` makes such a backward pass. Only the forward pass gets new seeds, so that a
    dropout would have another mask in the backward pass.
    """
    for op in backward:
        draws_by_seed = graph_walk.seed_position(op) is not None  # a stateless random operation
        if graph_walk.is_random(op) or draws_by_seed:
            raise GradientError(
                'stateless_random=True, and the backward pass draws random numbers (operation %s), '
                'which tf.recompute_grad does of a block with a dropout: use '
                'towers.Memory(recompute=…), which keeps what was drawn.' % op.name)


def give_own_seeds(operations: typing.Sequence[tf.Operation], part: int,
                   graph_seed: typing.Optional[int],
                   step: typing.Optional[tf.Tensor] = None) -> Keys:
    """Gives stateless random ops other seeds in each part of the batch, where all parts would draw
    the same numbers.

    Keras 3 draws with stateless ops whose seed is a variable that each call counts up. Towers share
    this variable, and only the first tower's count is kept. Without other seeds, all towers would
    have the same dropout mask. The new seeds are

        seed = [key, step]                with a step, as for the twins of `make_stateless`
        seed = state XOR [key, 0]         without a step, where `state` is the seed that Keras
                                          computes; in part 0 the key is 0, so that part 0 draws the
                                          same numbers as Keras

    Ops with equal seeds still draw the same numbers in a tower: with a step, ops that take one seed
    have one key; without a step, all ops of the tower have one key.

    Args:
      operations: the operations of a tower.
      part: the index of the tower's part of the batch.
      graph_seed: the graph's seed; None for none.
      step: integer scalar that counts the steps; or None.

    Returns:
      The `Keys` of the new seeds.
    """
    counted_up = _variables_set_by(operations)
    if not counted_up:
        return {}
    keys = {}
    # {name of a group of ops with one key: name of its first op, from which the key is computed}
    first_names: typing.Dict[str, str] = {}
    for op in operations:
        position = _position_of_counted_seed(op, counted_up)
        if position is None:
            continue
        seed = op.inputs[position]
        if step is None:
            group = 'all ops of the tower'
        else:  # the ops that take this seed
            group = graph_walk.source_through(seed, ('Identity',)).name
        name = first_names.setdefault(group, op.name)
        keeps_seed = step is None and part == 0  # with the key 0: state XOR 0 is the state
        number = 0 if keeps_seed else key_of(name, graph_seed, part)
        with _beside(op, '_tower/'):
            key = tf.constant(number, tf.int64)
            new_seed = _seed_of_part(key, seed, step)
            compat.replace_input(op, position, new_seed)
        keys[key.op.name] = name
    return keys


def _position_of_counted_seed(op: tf.Operation,
                              counted_up: typing.Set[str]) -> typing.Optional[int]:
    """The index of the seed among the inputs of a stateless random op, if the seed is computed from
    a variable that is counted up.

    Args:
      op: any operation.
      counted_up: names of the variables that are counted up.

    Returns:
      The index. None for any other operation; for a seed that the model itself passes, such as a
      constant, which stays the same in each tower; and for an op in a loop or a branch (v1), since
      a new seed would be computed outside of the loop or the branch.
    """
    position = graph_walk.seed_position(op)
    if position is None or compat.in_control_flow(op):
        return None
    is_counted_up = not counted_up.isdisjoint(graph_walk.ancestors([op.inputs[position]]))
    return position if is_counted_up else None


def _seed_of_part(key: tf.Tensor, state: tf.Tensor,
                  step: typing.Optional[tf.Tensor]) -> tf.Tensor:
    """The seed of a stateless random op in a part of the batch, by a formula of `give_own_seeds`.

    Args:
      key: int64 scalar, the key of the op in this part.
      state: the seed that the op has taken so far, two integers.
      step: integer scalar that counts the steps; or None.
    """
    if step is not None:
        return tf.cast(tf.stack([key, tf.cast(step, tf.int64)]), state.dtype)
    mask = tf.cast(tf.stack([key, tf.zeros_like(key)]), state.dtype)
    return tf.bitwise.bitwise_xor(state, mask)


def _variables_set_by(operations: typing.Iterable[tf.Operation]) -> typing.Set[str]:
    """Set of the names of the variables that operations set or add to. Operations that set initial
    values do not count."""
    names_of_initializers = initializers()
    names = set()
    for op in operations:
        if op.type in SETS | ADDS and op.name not in names_of_initializers:
            names.add(op.inputs[0].op.name)
    return names


def make_initial_values_stateless(variables: typing.Iterable[tf.Variable],
                                  graph_seed: typing.Optional[int]) -> Keys:
    """Makes initial values depend on nothing but the graph's seed and the names of ops.

    Without this, the seed of an op also depends on the op's index in the graph. The same model with
    the same graph seed would start from other weights on 4 towers than on 1, or with another input
    pipeline. Values that are drawn inside loops and branches are left as they are.

    Args:
      variables: the variables.
      graph_seed: the graph's seed; None for none.

    Returns:
      The `Keys` of the twins.
    """
    initial = list(map(compat.initializer_of, variables))
    with tf.name_scope('initial_values'):
        step = tf.constant(0, tf.int64)
    return make_stateless(step_operations(initial), initial, step, graph_seed)


def key_of(name: str, graph_seed: typing.Optional[int], part: int) -> int:
    """The first number of the seed of a random op: graph seed x 2^32 + crc32(name, part), as int64.

    Args:
      name: the name of the op in tower 0.
      graph_seed: the graph's seed; None counts as 0.
      part: the index of the part of the batch.
    """
    text = name  # for part 0, so that it draws the same numbers as a build of one tower
    if part:
        text = '%s part %d' % (name, part)
    number = (((graph_seed or 0) << 32) + zlib.crc32(text.encode())) % 2 ** 64
    if number >= 2 ** 63:  # too large for int64: take the negative number with the same bits
        number -= 2 ** 64
    return number


def _twin_of_shape(stateless: typing.Callable) -> typing.Callable:
    """Makes an entry of `_TWINS`, for a random op whose one input is the shape.

    Args:
      stateless: function that makes the stateless op from shape, seed and dtype.
    """
    def make_twin(op: tf.Operation, seed: tf.Tensor) -> tf.Tensor:
        return stateless(shape=op.inputs[0], seed=seed, dtype=op.outputs[0].dtype)
    return make_twin


def _uniform_integers(op: tf.Operation, seed: tf.Tensor) -> tf.Tensor:
    """Makes the twin of a `RandomUniformInt`, and returns its numbers."""
    return tf.raw_ops.StatelessRandomUniformInt(
        shape=op.inputs[0], seed=seed, minval=op.inputs[1], maxval=op.inputs[2])


def _multinomial(op: tf.Operation, seed: tf.Tensor) -> tf.Tensor:
    """Makes the twin of a `Multinomial`, and returns its numbers."""
    return tf.raw_ops.StatelessMultinomial(
        logits=op.inputs[0], num_samples=op.inputs[1], seed=seed,
        output_dtype=op.outputs[0].dtype)


_TWINS = {
    'RandomUniform': _twin_of_shape(tf.raw_ops.StatelessRandomUniform),
    'RandomStandardNormal': _twin_of_shape(tf.raw_ops.StatelessRandomNormal),
    'TruncatedNormal': _twin_of_shape(tf.raw_ops.StatelessTruncatedNormal),
    'RandomUniformInt': _uniform_integers,
    'Multinomial': _multinomial,
}
"""{type of a stateful random op: function `(op, seed)` that makes its stateless twin, and returns
the twin's numbers}."""


def give_seeds_of_tower(operations: typing.Iterable[tf.Operation], fetches: list,
                        part: int) -> None:
    """Changes the seeds of the random operations of a tower that is no copy: the first tower of
    machine 1, 2, …, or a tower for which the model function was called again.

    Args:
      operations: the operations of the tower.
      fetches: what a step fetches of the tower. Operations that no fetch needs keep their seeds,
        such as the initial values of variables, which all machines draw alike.
      part: the index of the tower's part of the batch among the parts of all machines.
    """
    needed = names_of(step_operations(fetches))
    nodes = {op: op.node_def for op in operations if op.name in needed}
    library = Library(tf.get_default_graph())
    names_of_copies = _add_functions_with_seeds(library, nodes.values(), part)
    for op, node in nodes.items():
        if has_seed(node):
            give_seed_of_tower(node, part)
            compat.set_attribute(op, 'seed2', node.attr['seed2'])  # the node is a copy
        if names_of_copies and library.called_by(node):
            call_others(op, names_of_copies)


def _add_functions_with_seeds(library: Library, nodes: typing.Iterable[tf.NodeDef],
                              part: int) -> typing.Dict[str, str]:
    """Adds copies of the functions that nodes call to the graph. The copies have the seeds of a
    part of the batch.

    Args:
      library: the functions of the graph.
      nodes: the nodes.
      part: the index of the part of the batch among the parts of all machines.

    Returns:
      {name of a function: name of its copy}; {} if no function draws by a seed.
    """
    def change(node: tf.NodeDef, unused_is_beside_resource: bool) -> None:
        """Gives a node in the body of a function the seed of the part."""
        give_seed_of_tower(node, part)

    functions = library.reached_from(nodes)
    if not any(map(_draws_by_seed, functions.values())):
        return {}
    copies, names_of_copies = copied_functions(functions, 'part_%d' % part, change)
    library.add(copies)
    return names_of_copies


def _draws_by_seed(function: typing.Any) -> bool:
    """Whether a node of a `FunctionDef` draws by a seed in its attributes."""
    return any(map(has_seed, function.node_def))


def give_seed_of_tower(node: tf.NodeDef, part: int) -> None:
    """Gives a node that draws by a seed in its attributes the `seed2` of a part of the batch; any
    other node stays as it is.

    The new seed does not depend on the node's name: two nodes with equal seeds get equal new seeds.

    Args:
      node: the node, which is changed.
      part: the index of the part of the batch among the parts of all machines.
    """
    if has_seed(node):
        text = '%d %d tower %d' % (node.attr['seed'].i, node.attr['seed2'].i, part)
        node.attr['seed2'].i = zlib.crc32(text.encode()) or 1  # not 0, which may stand for no seed
