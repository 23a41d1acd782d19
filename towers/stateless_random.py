"""Random numbers of a model that depend on the step alone, so that a resumed run draws the same.

The kernel of a stateful random op (dropout's `RandomUniform`) counts its draws in memory. A run that
is killed and started again counts from zero, and drops out other units than the run that was never
killed. Here each such op is replaced by its stateless twin, which computes its numbers from

    seed = [graph seed x 2^32 + crc32(name of the op), step]

(Philox 4x32-10; Salmon et al. 2011). The name has the tower in it, so no two towers share a mask.
"""

import zlib

import tensorflow.compat.v1 as tf

from towers import compat, graph_walk
from towers.tower_device import device_like


def make_stateless(operations, fetches, step, graph_seed, keys=None):
    """Replaces, for all that reads them, the random ops that the fetches are computed from.

    Initial values of variables are no part of that, and keep their ops.

    Args:
      operations: the operations of one tower's forward pass.
      fetches: tensors that the tower computes: loss, predictions, updates.
      step: scalar integer tensor.
      graph_seed: int or None.
      keys: dict that gets, for each twin, the name of the constant that holds the first number of
        its seed -> the name of the op that it stands for.

    Returns:
      `(replaced, kept)`: numbers of random ops. Kept are those in loops and branches, where a draw
      depends on more than the step, and kinds that have no stateless twin; a resumed run draws
      other numbers there. Loops and branches of control flow v2 are functions of their own, in
      which nothing is replaced and nothing counted.
    """
    needed = {op.name for op in graph_walk.step_operations(fetches)}
    replaced = kept = 0
    for op in operations:
        if op.name not in needed or not graph_walk.is_random(op):
            continue
        twin = _TWINS.get(op.type)
        if twin is None or compat.in_control_flow(op):
            kept += 1
            continue
        with tf.name_scope(op.name + '_stateless/'), tf.device(device_like(op)), \
                tf.control_dependencies(None):
            key = tf.constant(key_of(op.name, graph_seed), tf.int64)
            seed = tf.stack([key, tf.cast(step, tf.int64)])
            compat.replace_tensor(op.outputs[0], twin(op, seed))
        if keys is not None:
            keys[key.op.name] = op.name
        replaced += 1
    return replaced, kept


def give_own_seeds(operations, index, graph_seed, step=None, keys=None):
    """Gives a tower numbers of its own where all towers would draw the same ones.

    Keras 3 draws with stateless ops whose seed is a variable that each call counts up. Towers share
    that variable, and only the first one's count is kept: without this all of them have one dropout
    mask, or, when another one reads after it was counted up, its next mask early. In the tower

        seed = [key, step]                with a step, as for the twins of `make_stateless`
        seed = state XOR [key, 0]         without; key = 0 in tower 0, which draws what Keras does

    A seed that no variable counts up is the model's own, the same in each tower, and stays.

    Args:
      operations: the operations of one tower's forward pass.
      index: the tower's number.
      graph_seed: int or None.
      step: scalar integer tensor, or None.
      keys: as for `make_stateless`.

    Returns:
      The number of ops that got a seed.
    """
    initializers = {variable.initializer.name for variable in
                    tf.global_variables() + tf.local_variables()}
    counted_up = {op.inputs[0].op.name for op in operations
                  if op.type in _COUNTS and op.name not in initializers}
    given = 0
    for op in operations if counted_up else ():
        position = _position_of_seed(op)
        if position is None or compat.in_control_flow(op):
            continue
        seed = op.inputs[position]
        if counted_up.isdisjoint(graph_walk.ancestors([seed])):
            continue
        with tf.name_scope(op.name + '_tower/'), tf.device(device_like(op)), \
                tf.control_dependencies(None):
            key = tf.constant(key_of(op.name, graph_seed) if index or step is not None else 0,
                              tf.int64)
            second = tf.zeros_like(key) if step is None else tf.cast(step, tf.int64)
            own = tf.cast(tf.stack([key, second]), seed.dtype)
            compat.replace_input(op, position,
                                 tf.bitwise.bitwise_xor(seed, own) if step is None else own)
        if keys is not None:
            keys[key.op.name] = op.name
        given += 1
    return given


def _position_of_seed(op):
    """Which input of a stateless random op is its seed, or None."""
    if not op.type.startswith('Stateless'):
        return None
    names = [argument.name for argument in op.op_def.input_arg]
    return names.index('seed') if 'seed' in names else None


_COUNTS = frozenset(['AssignVariableOp', 'AssignAddVariableOp', 'Assign', 'AssignAdd'])


def make_initial_values_stateless(variables, graph_seed):
    """Makes initial values depend on the graph-level seed and the names of their ops alone.

    Otherwise TF seeds each op by its place in the graph too, and the same model with the same seed
    starts from other weights on 4 towers than on 1, or with another input pipeline.

    Args:
      variables: those whose initial values are meant.
      graph_seed: int or None.

    Returns:
      `(replaced, kept)`, as `make_stateless`: an `orthogonal_initializer`'s QR decomposition of
      random numbers is replaced, values drawn inside loops and branches are kept.
    """
    initializers = [variable.initializer for variable in variables]
    with tf.name_scope('initial_values'):
        step = tf.constant(0, tf.int64)
    return make_stateless(graph_walk.step_operations(initializers), initializers, step, graph_seed)


def key_of(name, graph_seed):
    """The first number of a twin's seed, an int64: graph seed x 2^32 + crc32(name)."""
    number = (((graph_seed or 0) << 32) + zlib.crc32(name.encode())) % 2 ** 64
    return number - 2 ** 64 if number >= 2 ** 63 else number


_TWINS = {
    'RandomUniform': lambda op, seed: tf.raw_ops.StatelessRandomUniform(
        shape=op.inputs[0], seed=seed, dtype=op.outputs[0].dtype),
    'RandomStandardNormal': lambda op, seed: tf.raw_ops.StatelessRandomNormal(
        shape=op.inputs[0], seed=seed, dtype=op.outputs[0].dtype),
    'TruncatedNormal': lambda op, seed: tf.raw_ops.StatelessTruncatedNormal(
        shape=op.inputs[0], seed=seed, dtype=op.outputs[0].dtype),
    'RandomUniformInt': lambda op, seed: tf.raw_ops.StatelessRandomUniformInt(
        shape=op.inputs[0], seed=seed, minval=op.inputs[1], maxval=op.inputs[2]),
    'Multinomial': lambda op, seed: tf.raw_ops.StatelessMultinomial(
        logits=op.inputs[0], num_samples=op.inputs[1], seed=seed,
        output_dtype=op.outputs[0].dtype),
}
