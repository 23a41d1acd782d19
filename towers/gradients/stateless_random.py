"""Random numbers of towers: others in each tower, and a resumed run draws the same.

A copy of tower 0 has, for an op of seeds (s, s2) there, seed2 = crc32('s s2 tower k'), with its
number k among the micro-batches of all machines' towers.

The kernel of a stateful random op (dropout's `RandomUniform`) counts its draws in memory, so that a
run that is killed and started again counts from zero, and drops out other units. With
`stateless_random` each such op is replaced by its stateless twin, which computes its numbers from

    seed = [graph seed x 2^32 + crc32(name of the op in tower 0, number of the tower), step]

(Philox 4x32-10; Salmon et al. 2011). No two towers share a mask; in a cluster the tower's number
counts the towers of all machines, as on one machine.
"""

import collections
import zlib

import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import GradientError
from towers.graph import graph_walk
from towers.graph.edit import Library, call_others, copied_functions
from towers.graph.graph_walk import has_seed
from towers.graph.op_types import ADDS, SETS
from towers.graph.variable_access import initializers
from towers.placement.tower_device import device_like


def make_stateless(operations, fetches, step, graph_seed, part=0):
    """Replaces the random ops that the fetches are computed from, on tower `part` of all machines.

    Kept are ops in loops and branches, where a draw depends on more than the step; kinds without a
    twin; and ops that draw the same numbers as one of these. Returns {name of the constant in a
    twin's seed: name of the op that gave it}.
    """
    needed, keys = {op.name for op in graph_walk.step_operations(fetches)}, {}
    draws = [op for op in operations if op.name in needed and graph_walk.is_random(op)]
    for name, group in _alike(draws).items():
        if any(op.type not in _TWINS or compat.in_control_flow(op) for op in group):
            continue
        for op in group:
            with tf.name_scope(op.name + '_stateless/'), tf.device(device_like(op)), \
                    tf.control_dependencies(None):
                key = tf.constant(key_of(name, graph_seed, part), tf.int64)
                seed = tf.stack([key, tf.cast(step, tf.int64)])
                compat.replace_tensor(op.outputs[0], _TWINS[op.type](op, seed))
            keys[key.op.name] = name
    return keys


def _alike(draws):
    """{name of the first op: the ops that draw the same numbers, by equal seeds}, in order."""
    groups, first_with = collections.OrderedDict(), {}
    for op in draws:
        seeds = tuple(op.get_attr(each) for each in ('seed', 'seed2') if each in op.node_def.attr)
        name = op.name if not any(seeds) else first_with.setdefault(
            (op.type, op.outputs[0].dtype, seeds), op.name)
        groups.setdefault(name, []).append(op)
    return groups


def check_draws_nothing(backward):
    """Refuses a backward pass that draws, as `tf.recompute_grad` makes it: the mask of a
    dropout would be another one than in the forward pass."""
    for op in backward:
        if graph_walk.is_random(op) or graph_walk.seed_position(op) is not None:
            raise GradientError(
                'stateless_random=True, and the backward pass draws random numbers (operation %s), '
                'which tf.recompute_grad does of a block with a dropout: use '
                'towers.Memory(recompute=…), which keeps what was drawn.' % op.name)


def give_own_seeds(operations, part, graph_seed, step=None):
    """Gives a tower's random ops seeds of their own where all towers would draw the same numbers.

    Keras 3 draws with stateless ops whose seed is a variable that each call counts up. Towers share
    that variable, and only the first tower's count is kept: without this, all towers have one
    dropout mask. In the tower

        seed = [key, step]                with a step, as for the twins of `make_stateless`
        seed = state XOR [key, 0]         without; key = 0 in tower 0, which draws as Keras does

    Ops with equal seeds still draw the same numbers in a tower: with a step, ops with one seed have
    one key; without a step, the whole tower has one key. A seed that no variable counts up is the
    model's own, the same in each tower, and stays. Returns what `make_stateless` does.
    """
    left_out = initializers()
    counted_up = {op.inputs[0].op.name for op in operations
                  if (op.type in SETS or op.type in ADDS) and op.name not in left_out}
    keys, first_with = {}, {}
    for op in operations if counted_up else ():
        position = graph_walk.seed_position(op)
        if position is None or compat.in_control_flow(op):
            continue
        seed = op.inputs[position]
        if counted_up.isdisjoint(graph_walk.ancestors([seed])):
            continue
        source = None if step is None else graph_walk.behind(seed, ('Identity',)).name
        name = first_with.setdefault(source, op.name)
        with tf.name_scope(op.name + '_tower/'), tf.device(device_like(op)), \
                tf.control_dependencies(None):
            key = tf.constant(key_of(name, graph_seed, part) if part or step is not None else 0,
                              tf.int64)
            second = tf.zeros_like(key) if step is None else tf.cast(step, tf.int64)
            own = tf.cast(tf.stack([key, second]), seed.dtype)
            compat.replace_input(op, position,
                                 tf.bitwise.bitwise_xor(seed, own) if step is None else own)
        keys[key.op.name] = name
    return keys


def make_initial_values_stateless(variables, graph_seed):
    """Makes initial values depend on the graph-level seed (or None) and the names of ops alone.

    Otherwise TF seeds each op by its place in the graph too, and the same model with the same seed
    starts from other weights on 4 towers than on 1, or with another input pipeline. Values drawn
    inside loops and branches are kept. Returns what `make_stateless` does.
    """
    initial = [compat.initializer_of(variable) for variable in variables]
    with tf.name_scope('initial_values'):
        step = tf.constant(0, tf.int64)
    return make_stateless(graph_walk.step_operations(initial), initial, step, graph_seed)


def key_of(name, graph_seed, part):
    """The first number of a seed of a tower's op, int64: graph seed x 2^32 + crc32(name, part)."""
    text = '%s part %d' % (name, part) if part else name
    number = (((graph_seed or 0) << 32) + zlib.crc32(text.encode())) % 2 ** 64
    return number - 2 ** 64 if number >= 2 ** 63 else number


def _of_shape(twin):
    return lambda op, seed: twin(shape=op.inputs[0], seed=seed, dtype=op.outputs[0].dtype)


_TWINS = {
    'RandomUniform': _of_shape(tf.raw_ops.StatelessRandomUniform),
    'RandomStandardNormal': _of_shape(tf.raw_ops.StatelessRandomNormal),
    'TruncatedNormal': _of_shape(tf.raw_ops.StatelessTruncatedNormal),
    'RandomUniformInt': lambda op, seed: tf.raw_ops.StatelessRandomUniformInt(
        shape=op.inputs[0], seed=seed, minval=op.inputs[1], maxval=op.inputs[2]),
    'Multinomial': lambda op, seed: tf.raw_ops.StatelessMultinomial(
        logits=op.inputs[0], num_samples=op.inputs[1], seed=seed,
        output_dtype=op.outputs[0].dtype),
}


def give_seeds_of_tower(operations, fetches, number):
    """Changes the seeds of random operations of the first tower of a further machine, or of a
    further call of the model function; `number` counts the towers of all machines."""
    needed = {op.name for op in graph_walk.step_operations(fetches)}
    library = Library(tf.get_default_graph())
    nodes = [(op, op.node_def) for op in operations if op.name in needed]
    functions = library.reached_from([node for _, node in nodes])
    names = {}
    if any(has_seed(node) for function in functions.values() for node in function.node_def):
        copies, names = copied_functions(functions, 'part_%d' % number,
                                         lambda node, _: give_seed_of_tower(node, number))
        library.add(copies)
    for op, node in nodes:
        if has_seed(node):
            give_seed_of_tower(node, number)
            compat.set_attribute(op, 'seed2', node.attr['seed2'])
        if names and library.called_by(node):
            call_others(op, names)


def give_seed_of_tower(node, tower):
    """Gives a `NodeDef` that draws by a seed of its own another tower's `seed2`.

    It does not depend on the node's name: two with equal seeds draw the same numbers there, too.
    """
    if has_seed(node):
        node.attr['seed2'].i = zlib.crc32(('%d %d tower %d' % (
            node.attr['seed'].i, node.attr['seed2'].i, tower)).encode()) or 1
