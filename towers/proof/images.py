"""Rules for kernels whose first dimension is that of the images, and so of the examples."""

import numpy as np

from towers.proof.arithmetic import elementwise, estimate
from towers.proof.layout import has_examples_at
from towers.proof.sizes import used
from towers.proof.states import INDEPENDENT, Kind, State, per_example, unknown


def bias_add(op, states, view):
    """`tf.nn.bias_add`: a vector for the channels, which are the last dimension, or the second."""
    is_last = op.get_attr('data_format') != b'NCHW'
    return elementwise(op, states, view) if is_last else images(0)(op, states, view)


def space_to_batch(op, states, view):
    """`tf.space_to_batch_nd`: blocks of each image, all images after each other for each block."""
    return _rounds(op, states, view, lambda outer, blocks: outer * blocks)


def batch_to_space(op, states, view):
    """`tf.batch_to_space_nd`: the blocks of each image together again."""
    return _rounds(op, states, view, lambda outer, blocks: outer // blocks if (
        outer % blocks == 0) else None)


def _rounds(op, states, view, change):
    state, blocks = states[0], view.value(op.inputs[1])
    if not state.is_by_example:
        return estimate(op, [used(op, each, view) for each in states], view)
    if state.kind is not Kind.PER_EXAMPLE or state.axis != 0 or blocks is None:
        return unknown(op, 'has images that are not the examples')
    outer = change(state.outer, int(np.prod(blocks)))
    if outer is None:
        return unknown(op, 'joins blocks of several examples')
    return state._replace(outer=outer, is_constant=False).marked(states)


def images(position):
    """A rule for kernels that take images [n, …] at an input `position`: convolutions, pooling."""
    def rule(op, states, view):
        """Each image by itself, where the examples are the first dimension."""
        state = states[position]
        others = [each for place, each in enumerate(states) if place != position]
        if not any(each.is_by_example or each.is_total for each in states):
            return estimate(op, [used(op, each, view) for each in states], view)
        if any(each.is_by_example or each.is_total for each in others):
            return unknown(op, 'has weights that are computed from the examples')
        if state.kind is Kind.ONE_EXAMPLE:
            return state.marked(others)
        if state.kind is not Kind.PER_EXAMPLE or state.axis != 0:
            return unknown(op, 'has images that are not the examples')
        if op.type == 'AdjustContrastv2' and view.rank(op.inputs[0]) != 4:
            return unknown(op, 'has images that are not the examples')
        return State(Kind.PER_EXAMPLE, 0, state.outer, state.inner).marked(states)
    return rule


def transposed_convolution(op, states, view):
    """The gradient of a convolution, of a shape whose first number alone is of the examples."""
    if not has_examples_at(0, op.inputs[0], view):
        return unknown(op, 'has a shape that is another one for another number of examples')
    return images(2)(op, [INDEPENDENT.marked(states[:1])] + list(states[1:]), view)


def largest_places(op, states, view):
    """`tf.nn.max_pool_with_argmax`: places within each image."""
    if 'include_batch_in_index' in op.node_def.attr and op.get_attr('include_batch_in_index'):
        return unknown(op, 'numbers the entries of all examples')
    return images(0)(op, states, view)


def fused_batch_norm(op, states, view):
    """Batch norm in one kernel: in training mode by the mean and the variance of each channel."""
    state = states[0]
    channel = op.get_attr('data_format').decode().find('C')
    results = len(op.outputs)
    if not state.is_by_example:
        return estimate(op, [used(op, each, view) for each in states], view)
    if state.kind is not Kind.PER_EXAMPLE:
        return unknown(op, 'has images that are not the examples')
    parameters = states[1:]
    scaled = [each for each in parameters[:2] if each.kind is not Kind.INDEPENDENT]
    by_channel = all(each.kind is Kind.PER_EXAMPLE and each.is_constant for each in scaled)
    if not op.get_attr('is_training'):
        if any(each.is_by_example for each in parameters):
            return unknown(op, 'has parameters that are computed from the examples')
        return [state.marked(parameters)] + [INDEPENDENT.marked(parameters)] * (results - 1)
    if state.axis == channel:
        if not by_channel:
            return unknown(op, 'has parameters that are computed from the examples')
        return [state] + [per_example(0, state.outer, state.inner).marked([state])] * (results - 1)
    if scaled:
        return unknown(op, 'has parameters that are computed from the examples')
    view.note(op.name, op, 'normalizes by the mean and the variance of the shard')
    mark = frozenset([op.name])
    mean = State(Kind.MEAN, statistics=mark).marked([state])
    variance = mean._replace(estimated=mean.estimated | mark)
    normalized = state._replace(estimated=state.estimated | mark, is_constant=False)
    normalized = normalized.marked(parameters[:2])
    return [normalized, mean, variance] + [variance] * (results - 3)


def reverse_sequence(op, states, view):
    """`tf.reverse_sequence`: along another dimension than the examples', by lengths of theirs."""
    state, lengths = states[0], used(op, states[1], view)
    if not state.is_by_example and not lengths.is_by_example:
        return estimate(op, [used(op, each, view) for each in states], view)
    batch, sequence = op.get_attr('batch_dim'), op.get_attr('seq_dim')
    is_by_example = state.kind is Kind.PER_EXAMPLE and batch == state.axis != sequence
    is_own = lengths.kind is Kind.INDEPENDENT or lengths[:4] == (
        Kind.PER_EXAMPLE, 0, state.outer, state.inner)
    if not is_by_example or not is_own:
        return unknown(op, 'goes along the examples')
    return state._replace(is_constant=False).marked([lengths])
