"""Makes further towers as clones of the first tower's finished graph, instead of by calls.

Calling the model function and differentiating its loss takes time for every tower, the more the
larger the model is. The graphs of the towers differ only in names, devices, seeds and shards. So
the operations that the first tower's outputs need, forward and backward, are cloned by
`tf.import_graph_def`:

    tower_0/…   ->  tower_k/…                     names, frames of loops, texts that hold names
    shard 0     ->  shard k                       and its weight
    tower 0's device  ->  tower k's               where it was the tower's scope that said so
    seed        ->  a seed of tower k             of each random op
    variables, and other tensors from outside     stay what they are
"""

import tensorflow.compat.v1 as tf

from towers import compat
from towers.clone import limits
from towers.clone.functions import ClonedFunctions
from towers.clone.limits import CannotClone
from towers.clone.template import Template, colocation, producer_of
from towers.graph.scopes import inside_text
from towers.placement.tower_device import TowerDevice, follows_tower, moved, overlaps, stages_of
from towers.tower.objectives import map_shaped


class Cloner:
    """Makes clones of one tower."""

    def __init__(self, tower, made, shards, builder):
        """
        Args:
          tower: the `Tower` to be cloned.
          made: the operations that building it made.
          shards: `Shards`.
          builder: the `TowerBuilder` that built it, which knows what all towers share.

        Raises:
          CannotClone: a clone would differ from a call of the model function.
        """
        self._tower = tower
        self._shards = shards
        self._own_state, self._inline_updates = builder.own_state, builder.inline_updates
        self._shared = {loss.op.name for loss in builder.losses.registered.invariant} | (
            self._inline_updates.shared)
        self._graph = tf.get_default_graph()
        self._root = tower.name_scope
        self._in_text = inside_text(self._root)
        for name in self._own_state.not_in_step:
            raise CannotClone('operation %s, which the step does not run, writes state of the tower'
                              % name)
        outputs = [tower.loss, tower.data_loss, tower.predictions, tower.metrics, tower.updates,
                   [gradient for gradient, _ in tower.pairs]]
        nodes, outside = self._needed(_operations(outputs))
        self._nodes = {op.name: nodes[op.name] for op in made if op.name in nodes}
        for node in self._nodes.values():
            limits.check_state(node, 'operation')
        functions = ClonedFunctions(list(self._nodes.values()), self._graph, tower.device)
        limits.check_outside(
            outside, made, self._shared, builder.owned, self._root,
            {leaf.op.name for leaf in _leaves(shards.inputs[0])}, self._graph)
        self._devices = self._tell_devices()
        self._template = Template(self._nodes, self._root, functions, builder.random_keys,
                                  self._graph, builder.called)

    def tower(self, index, device, scope):
        """Makes a clone: a `Tower`.

        Args:
          index: the clone's number, from 1.
          device: the clone's device.
          scope: the name of the clone's name scope.
        """
        with tf.name_scope(scope) as root:
            pass
        self._template.adapt(index, root, device)
        with tf.device(None), tf.device(TowerDevice(device)):
            tf.import_graph_def(self._template.graph_def, self._from_outside(index), name=root)
        self._finish(device, root)
        tower = self._tower

        def clones(nest):
            return _map_leaves(lambda leaf: self._clone_of(leaf, root), nest)

        return tower._replace(
            index=index, device=device, name_scope=root, inputs=self._shards.inputs[index],
            size=self._shards.sizes[index], loss=clones(tower.loss),
            predictions=clones(tower.predictions), metrics=clones(tower.metrics),
            gradients=map_shaped(lambda pairs: [
                (clones(gradient), self._own_state.of_tower(variable, index))
                for gradient, variable in pairs], tower.gradients),
            updates=clones(tower.updates), data_loss=clones(tower.data_loss),
            backward=frozenset(self._in_text.sub(root, name) for name in tower.backward))

    # ---- what is cloned -------------------------------------------------------------------------

    def _needed(self, operations):
        """Ancestors of operations: `({name: NodeDef} within the tower, names outside of it)`."""
        nodes, outside = {}, set()
        stack = [op.name for op in operations]
        while stack:
            name = stack.pop()
            if name in nodes or name in outside:
                continue
            if not name.startswith(self._root) or name in self._shared:
                outside.add(name)
                continue
            node = nodes[name] = self._inline_updates.without_left_out(
                self._graph.get_operation_by_name(name).node_def)
            stack.extend(producer_of(text) for text in node.input)
            stack.extend(group[len('loc:@'):] for group in colocation(node))
        return nodes, outside

    def _tell_devices(self):
        """{name: device} of operations that do not move from this tower's device to the clone's.

        A device is a name; or `('like', name)`: the device of that operation's clone; or `('moved',
        name)`: the device with the tower's part exchanged.
        """
        devices = {}
        for name, node in self._nodes.items():
            if not node.device:
                devices[name] = ''
                continue
            leader = next((group[len('loc:@'):] for group in colocation(node)
                           if group != 'loc:@' + name), None)
            follows = None if leader else self._was_put(name, node) or follows_tower(
                self._graph.get_operation_by_name(name))
            if leader is None and follows is None:
                leader = self._explained(name, node)
            if leader in self._nodes:
                devices[name] = ('like', leader)
            elif not follows:
                devices[name] = node.device
            elif node.device != str(self._tower.device):
                devices[name] = ('moved', node.device)
        return devices

    def _was_put(self, name, node):
        """Whether an operation is a gradient that was put on the tower after it was made.

        `place_backward` and `keep_with_tower` do so, and, also where the model function takes
        gradients itself, `keep_stacks_with_loops`; no device scope tells of it.
        """
        stages = stages_of(self._tower.device)
        was_made_alone = 'loc:@' + name in colocation(node)
        return (name in self._tower.backward or was_made_alone) and node.device in stages and (
            len(stages) > 1
            or not compat.device_scopes(self._graph.get_operation_by_name(name)))

    def _explained(self, name, node):
        """The operation whose device TensorFlow gave this one by name, not by colocation."""
        if not overlaps(node.device, self._tower.device):
            return None
        op = self._graph.get_operation_by_name(name)
        for tensor in op.inputs:
            if tensor.dtype == tf.resource:
                return tensor.op.name  # reads of variables
        if op.type == 'NoOp' and op.control_inputs:
            return op.control_inputs[0].name  # tf.group, on the device of what it groups
        raise CannotClone('operation %s was put on %s by a device function, or by the name of '
                          "an operation's device" % (name, node.device))

    # ---- the import -----------------------------------------------------------------------------

    def _from_outside(self, index):
        """{key in the template: tensor}: shards and their weights become those of the clone."""
        exchanged = dict(zip(
            (leaf.name for leaf in _leaves(self._shards.inputs[0])),
            _leaves(self._shards.inputs[index])))
        if isinstance(self._shards.weights[0], tf.Tensor):
            exchanged[self._shards.weights[0].name] = self._shards.weights[index]
        # Each of these tensors is the only one of its operation.
        self._exchanged = {producer_of(first): other.op for first, other in exchanged.items()}
        self._exchanged.update(self._own_state.operations_of(index))
        return {key: exchanged[name] if name in exchanged else self._own_state.counterpart(
            self._graph.get_tensor_by_name(name), index)
                for name, key in self._template.outside.items()}

    def _finish(self, device, root):
        """Sets what an import cannot set: devices, colocations, and control inputs from outside."""
        for name in self._devices:
            compat.set_device(self._clone(name, root), self._device_of(name, device))
        for name, groups in self._template.colocated:
            compat.set_colocation(self._clone(name, root), [
                ('loc:@' + self._clone(group[len('loc:@'):], root).name).encode()
                for group in groups])
        for name, waits_for in self._template.controls:
            compat.add_control_inputs(self._clone(name, root), [
                self._clone(other, root) for other in waits_for])

    def _device_of(self, name, device):
        said = self._devices.get(name, ('moved', self._tower.device))
        while isinstance(said, tuple) and said[0] == 'like':
            said = self._devices.get(said[1], ('moved', self._tower.device))
        return moved(said[1], self._tower.device, device) if isinstance(said, tuple) else said

    def _clone(self, name, root):
        """The clone of an operation of the first tower, by name.

        An operation from outside of the tower is returned itself.
        """
        if name in self._nodes:
            return self._graph.get_operation_by_name(self._in_text.sub(root, name))
        return self._exchanged.get(name) or self._graph.get_operation_by_name(name)

    def _clone_of(self, leaf, root):
        """The clone of a tensor or an operation.

        Assigning to a variable returns an object of a variable's type; its clone is an operation.
        """
        clone = self._clone(leaf.op.name if hasattr(leaf, 'op') else leaf.name, root)
        if isinstance(leaf, tf.Operation):
            return clone
        if isinstance(leaf, compat.VARIABLE_TYPES):
            return leaf if clone is leaf.op else clone
        if clone is leaf.op:
            return leaf
        clone = clone.outputs[leaf.value_index]
        clone.set_shape(leaf.shape)  # a shape that Python code has set is in no GraphDef
        return clone


def _leaves(nest):
    return [leaf for leaf in tf.nest.flatten(nest, expand_composites=True) if leaf is not None]


def _operations(nest):
    """The operations of all tensors and operations in a nest."""
    found = []

    def note(leaf):
        op = getattr(leaf, 'op', leaf)
        if isinstance(op, tf.Operation):
            found.append(op)
        return leaf
    _map_leaves(note, nest)
    return found


def _map_leaves(function, nest):
    """`tf.nest.map_structure` that takes sparse tensors apart, and variables not."""
    def on_leaf(leaf):
        if leaf is None or isinstance(leaf, (tf.Tensor, tf.Operation) + compat.VARIABLE_TYPES):
            return None if leaf is None else function(leaf)
        if isinstance(leaf, tf.IndexedSlices):
            return tf.IndexedSlices(*map(on_leaf, (leaf.values, leaf.indices, leaf.dense_shape)))
        if isinstance(leaf, (tf.SparseTensor, tf.RaggedTensor)):
            return tf.nest.map_structure(on_leaf, leaf, expand_composites=True)
        return leaf  # a number, say
    return tf.nest.map_structure(on_leaf, nest)
