"""Makes a finished backward pass recompute tensors of the forward pass instead of keeping them.

The operations of each segment of the forward pass are made a second time, from the kept tensors,
and the backward pass takes the recomputed tensors. Recomputed operations wait for the gradient that
comes into their segment: so they run when their results are wanted, and TensorFlow cannot merge
them with the original operations. Operations that draw random numbers, write or count run once.
"""

import collections

import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import InvalidArgumentError
from towers.graph.graph_walk import inputs_of
from towers.graph.op_types import SIZES
from towers.placement.tower_device import current_tower_device, follows_tower
from towers.recompute.segments import best_cuts, repeatable_operations, segments

Recomputed = collections.namedtuple('Recomputed', 'segments operations')
"""How many segments of a tower's forward pass are recomputed, and how many operations in them."""


def rewrite(keep, forward, backward, root):
    """Rewrites the backward pass of one tower of name scope `root`: `Recomputed`. `keep` is as of
    `Memory.recompute`; an unknown name in it is an `InvalidArgumentError`. `forward` and `backward`
    are operations in the order of making."""
    if keep is None:
        return Recomputed(0, 0)
    takers = _takers(backward, {op.name for op in forward})
    operations = repeatable_operations(forward, set(takers), keep == 'auto')
    cuts = best_cuts(operations, set(takers)) if keep == 'auto' else _cuts_after(
        keep, operations, forward, root)
    stages = getattr(current_tower_device(forward[0].graph), 'stages', ())
    parts, kept = segments(operations, cuts, stages)
    if not parts:
        return Recomputed(0, 0)
    order = _Order(backward)
    scope = forward[0].graph.unique_name('recompute')  # within the tower's scope
    count = sum(_rewrite('%s/segment_%d/' % (scope, number), part, kept, takers, order, root,
                         stages) for number, part in enumerate(parts))
    return Recomputed(len(parts), count)


def _takers(backward, forward):
    """{name of a tensor of the forward pass: [(operation, position)] of the backward pass}, without
    operations that wait for no gradient: they run with the forward pass."""
    made = {op.name for op in backward}
    takers = collections.defaultdict(list)
    for op in backward:
        # What takes only the size of a tensor runs as soon as the tensor is there.
        if op.type in SIZES or compat.in_control_flow(op) or not made & _sources(op):
            continue
        for position, tensor in enumerate(op.inputs):
            if tensor.op.name in forward:
                takers[tensor.name].append((op, position))
    return takers


def _cuts_after(keep, operations, forward, root):
    """The places to cut that keep the results of some names: after the last operation of each."""
    cuts = set()
    for name in keep:
        full = root + name.rstrip('/')
        own = {op.name for op in forward if op.name == full or op.name.startswith(full + '/')}
        if not own:
            raise InvalidArgumentError(
                'recompute=%r has %r, and the model has no operation or scope of this name: '
                'expected names as in the graph, such as %s.' % (
                    keep, name, ', '.join(list(dict.fromkeys(
                        repr(op.name[len(root):].split('/')[0]) for op in operations or forward
                        if op.name.startswith(root)))[:3])))
        places = [index for index, op in enumerate(operations) if op.name in own]
        cuts.update(places[-1:])
    return sorted(cut for cut in cuts if cut + 1 < len(operations))


def _sources(op):
    return {each.name for each in inputs_of(op)}


class _Order:
    """Which operations of a backward pass wait for which, also through what is recomputed."""

    def __init__(self, backward):
        self._operations = {op.name: op for op in backward}
        self._takers = collections.defaultdict(set)
        for op in backward:
            for name in _sources(op) & self._operations.keys():
                self._takers[name].add(op.name)

    def make_wait(self, taking):
        """The operations that the first ones among `taking` wait for; from now on all of them do. A
        first one waits for no other of them, also not through what is recomputed for another
        segment: else two segments would wait for each other for ever."""
        stack = [op.name for op in taking]
        after = set(stack)
        while stack:
            new = self._takers[stack.pop()] - after
            after |= new
            stack.extend(new)
        before = [_sources(op) & self._operations.keys() for op in taking]
        gradients = sorted(set().union(*(names for names in before if after.isdisjoint(names))))
        for name in gradients:
            self._takers[name].update(op.name for op in taking)
        return [self._operations[name] for name in gradients]


def _rewrite(scope, operations, kept, takers, order, root, stages):
    """Recomputes the tensors of a segment that the backward pass takes, and gives it these; returns
    the number of recomputed operations."""
    wanted = collections.OrderedDict(
        (tensor.name, tensor) for op in operations for tensor in op.outputs
        if tensor.name in takers and tensor.name not in kept)
    needed, again = set(wanted), collections.deque()
    for op in reversed(operations):
        if needed.intersection(tensor.name for tensor in op.outputs):
            again.appendleft(op)
            needed.update(tensor.name for tensor in op.inputs if tensor.name not in kept)
    if not wanted:
        return 0
    gradients = order.make_wait(
        {op.name: op for name in wanted for op, _ in takers[name]}.values())
    recomputed = _recomputed(again, kept, scope, root, stages)
    made = {op.name for op in recomputed.values()}
    for op in recomputed.values():
        if not any(tensor.op.name in made for tensor in op.inputs):
            compat.add_control_inputs(op, gradients)
    for name, tensor in wanted.items():
        for op, position in takers[name]:
            compat.replace_input(
                op, position, recomputed[tensor.op.name].outputs[tensor.value_index])
    return len(recomputed)


def _recomputed(operations, kept, scope, root, stages):
    """{name of an operation of a segment: its recomputed operation, on the same stage}, made of
    kept tensors and of those from outside of the segment."""
    graph, graph_def, outside = operations[0].graph, tf.GraphDef(), {}
    graph_def.versions.CopyFrom(graph.graph_def_versions)
    names = {op.name: op.name[len(root):] if op.name.startswith(root) else 'outside/' + op.name
             for op in operations}  # a model may leave its scope, by tf.name_scope(None)
    for op in operations:
        node = graph_def.node.add()
        node.CopyFrom(op.node_def)
        node.name = names[op.name]
        node.attr.pop('_class', None)
        node.device = '' if follows_tower(op) else op.device
        del node.input[:]
        for tensor in op.inputs:
            if tensor.op.name in names and tensor.name not in kept:
                node.input.append('%s:%d' % (names[tensor.op.name], tensor.value_index))
            else:
                key = outside.setdefault(tensor.name, ('kept/%d:0' % len(outside), tensor))[0]
                node.input.append(key)
    with tf.name_scope(None):
        tf.import_graph_def(graph_def, dict(outside.values()), name=scope.rstrip('/'))
    recomputed = collections.OrderedDict()
    for op in operations:
        again = graph.get_operation_by_name(scope + names[op.name])
        for old, new in zip(op.outputs, again.outputs):
            new.set_shape(old.shape)
        if op.device in stages:  # the scope around the backward pass is that of the first stage
            compat.set_device(again, op.device)
        recomputed[op.name] = again
    return recomputed
