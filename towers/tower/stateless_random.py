"""Random numbers of towers: others in each tower, and a resumed run draws the same.

A copy of tower 0 has, for an op of seeds (s, s2) there, seed2 = crc32('s s2 tower k'), with its
number k among the micro-batches of all machines' towers.

The kernel of a stateful random op (dropout's `RandomUniform`) counts its draws in memory. A run
that is killed and started again counts from zero, and drops out other units than the run that was
never killed. With `stateless_random` each such op is replaced by its stateless twin, which computes
its numbers from

    seed = [graph seed x 2^32 + crc32(name of the op), step]

(Philox 4x32-10; Salmon et al. 2011). The name contains the tower, so no two towers share a mask;
in a cluster the tower's number counts the towers of all machines, as on one machine.
Ops that draw the same numbers without this still do: ops of one kind with equal seeds, as those of
a `tf.recompute_grad` of a dropout with a seed. Their seeds have the first op's name.
"""

import collections
import re
import zlib

import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import GradientError
from towers.graph import graph_walk
from towers.graph.graph_walk import has_seed
from towers.graph.edit import Library, call_others, copied_functions
from towers.graph.op_types import ADDS, SETS
from towers.graph.variable_access import initializers
from towers.placement.tower_device import device_like


def make_stateless(operations, fetches, step, graph_seed, keys=None, names=None):
    """Replaces the random ops that the fetches are computed from, in all ops that read them.

    Initial values of variables keep their ops.

    Args:
      operations: the operations of one tower, forward and backward.
      fetches: tensors that the tower computes: loss, predictions, updates, gradients.
      step: scalar integer tensor.
      graph_seed: int or None.
      keys: dict to which is added, for each twin: name of the constant with the first number of
        its seed -> name of the op that the twin replaces.
      names: `NamesOnOneMachine`; None where there is one machine.

    Returns:
      `(replaced, kept)`: counts of random ops. Kept are ops in loops and branches, where a draw
      depends on more than the step; kinds that have no stateless twin; and ops that draw the same
      numbers as one of these. A resumed run draws other numbers there. Loops and branches of
      control flow v2 are functions, in which nothing is replaced and nothing is counted.
    """
    needed = {op.name for op in graph_walk.step_operations(fetches)}
    draws = [op for op in operations if op.name in needed and graph_walk.is_random(op)]
    replaced = kept = 0
    for name, group in _alike(draws).items():
        if any(op.type not in _TWINS or compat.in_control_flow(op) for op in group):
            kept += len(group)
            continue
        for op in group:
            with tf.name_scope(op.name + '_stateless/'), tf.device(device_like(op)), \
                    tf.control_dependencies(None):
                key = tf.constant(key_of(name, graph_seed, names), tf.int64)
                seed = tf.stack([key, tf.cast(step, tf.int64)])
                compat.replace_tensor(op.outputs[0], _TWINS[op.type](op, seed))
            if keys is not None:
                keys[key.op.name] = name
        replaced += len(group)
    return replaced, kept


def _alike(draws):
    """{name of the first op: list of the ops that draw the same numbers}, in order."""
    groups, first_with = collections.OrderedDict(), {}
    for op in draws:
        seeds = tuple(op.get_attr(each) for each in ('seed', 'seed2') if each in op.node_def.attr)
        name = op.name if not any(seeds) else first_with.setdefault(
            (op.type, op.outputs[0].dtype, seeds), op.name)
        groups.setdefault(name, []).append(op)
    return groups


def check_draws_again(forward, backward):
    """Refuses a backward pass that draws other numbers than the forward pass.

    A dropout without a seed in `tf.recompute_grad` does: its gradient is of another mask, in plain
    TensorFlow, too.

    Args:
      forward, backward: lists of operations of one tower.

    Raises:
      GradientError: there is such an operation.
    """
    known = set(filter(None, map(_seeds, forward)))
    for op in backward:
        if graph_walk.is_random(op) or graph_walk.seed_position(op) is not None:
            if _seeds(op) not in known:
                raise GradientError(
                    'stateless_random=True, and the backward pass draws random numbers (operation '
                    '%s) by another seed than the forward pass: where it computes a block again '
                    '(tf.recompute_grad), give its random operations seeds, or use '
                    'towers.recompute.' % op.name)


def _seeds(op):
    """By what an operation draws; None for one that does not, or has no seed."""
    position = graph_walk.seed_position(op)
    if position is not None:
        return op.type, graph_walk.behind(op.inputs[position], ('Identity',)).name
    return (op.type, op.get_attr('seed'), op.get_attr('seed2')) if graph_walk.has_seed(
        op.node_def) else None


def give_own_seeds(operations, index, graph_seed, step=None, keys=None, names=None):
    """Gives a tower's random ops seeds of their own where all towers would draw the same numbers.

    Keras 3 draws with stateless ops whose seed is a variable that each call counts up. Towers share
    that variable, and only the first tower's count is kept: without this, all towers have one
    dropout mask, or, where a tower reads the variable after it was counted up, the next step's. In
    the tower

        seed = [key, step]                with a step, as for the twins of `make_stateless`
        seed = state XOR [key, 0]         without; key = 0 in tower 0, which draws as Keras does

    Ops with equal seeds still draw the same numbers in a tower: with a step, ops with one seed have
    one key; without a step, the whole tower has one key.

    A seed that no variable counts up is the model's own, the same in each tower, and stays.

    Args:
      operations: the operations of one tower, forward and backward.
      index: the tower's number, of all machines.
      graph_seed: int or None.
      step: scalar integer tensor, or None.
      keys, names: as for `make_stateless`.

    Returns:
      The number of ops that got a seed.
    """
    left_out = initializers()
    counted_up = {op.inputs[0].op.name for op in operations
                  if (op.type in SETS or op.type in ADDS) and op.name not in left_out}
    given, first_with = 0, {}
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
            key = tf.constant(key_of(name, graph_seed, names) if index or step is not None
                              else 0, tf.int64)
            second = tf.zeros_like(key) if step is None else tf.cast(step, tf.int64)
            own = tf.cast(tf.stack([key, second]), seed.dtype)
            compat.replace_input(op, position,
                                 tf.bitwise.bitwise_xor(seed, own) if step is None else own)
        if keys is not None:
            keys[key.op.name] = name
        given += 1
    return given


def make_initial_values_stateless(variables, graph_seed):
    """Makes initial values depend on the graph-level seed and the names of their ops alone.

    Otherwise TF seeds each op by its place in the graph too, and the same model with the same seed
    starts from other weights on 4 towers than on 1, or with another input pipeline.

    Args:
      variables: the variables whose initial values are replaced.
      graph_seed: int or None.

    Returns:
      `(replaced, kept)`, as `make_stateless`: an `orthogonal_initializer`'s QR decomposition of
      random numbers is replaced, values drawn inside loops and branches are kept.
    """
    initial = [compat.initializer_of(variable) for variable in variables]
    with tf.name_scope('initial_values'):
        step = tf.constant(0, tf.int64)
    return make_stateless(graph_walk.step_operations(initial), initial, step, graph_seed)


def key_of(name, graph_seed, names=None):
    """The first number of a twin's seed, an int64: graph seed x 2^32 + crc32(name).

    Args:
      name: of the op that the twin replaces.
      graph_seed: int or None.
      names: as for `make_stateless`.
    """
    name = name if names is None else names.name(name)
    number = (((graph_seed or 0) << 32) + zlib.crc32(name.encode())) % 2 ** 64
    return number - 2 ** 64 if number >= 2 ** 63 else number


class NamesOnOneMachine:
    """Names of towers' operations as they are where the towers of all machines are on one.

    Attributes:
      towers_before: how many towers the machines before this one have.
      parts_before: how many micro-batches these towers have together.
    """

    def __init__(self, towers_before, name, parts_before=None):
        """
        Args:
          towers_before, parts_before: see the class; None for one micro-batch a tower.
          name: prefix of the towers' name scopes, such as 'tower'.
        """
        self.towers_before = towers_before
        self.parts_before = towers_before if parts_before is None else parts_before
        self._name = name
        self._number = re.compile(r'(?<![\w.\-])%s_(\d+)' % re.escape(name))

    def name(self, own):
        """The name there of an operation that has the name `own` here."""
        found = self._number.search(own)
        if not self.towers_before:
            return own
        if found is None:  # of a first tower without a name scope, which only machine 0's can be
            return '%s_%d/%s' % (self._name, self.towers_before, own)
        return '%s%d%s' % (own[:found.start(1)], int(found.group(1)) + self.towers_before,
                           own[found.end(1):])


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


def give_seeds_of_tower(operations, fetches, number, graph):
    """Changes the seeds of a tower's random operations, where another tower has the same.

    It is for the first tower of a further machine, and for a further call of the model function.

    Args:
      operations: list of the tower's operations, forward and backward.
      fetches: the tensors and operations that a step runs of them.
      number: the tower's number among those of all machines.
      graph: their graph.
    """
    needed, library = {op.name for op in graph_walk.step_operations(fetches)}, Library(graph)
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
    """Gives a `NodeDef` that draws by a seed of its own the `seed2` of another tower than the first.

    It does not depend on the node's name: two with equal seeds draw the same numbers there, too.
    """
    if has_seed(node):
        node.attr['seed2'].i = zlib.crc32(('%d %d tower %d' % (
            node.attr['seed'].i, node.attr['seed2'].i, tower)).encode()) or 1
