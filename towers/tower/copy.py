"""Towers 1, 2, … as copies of tower 0's finished graph, forward and backward.

Calling the model function and differentiating its loss takes time for every tower, the more the
larger the model is; and a program that is called N times sees what its earlier calls have left
behind. So the operations that tower 0's outputs need are imported once more for each tower:

    x                    ->  tower_k/x            operations, frames and stacks of loops
    tower 0's device     ->  tower k's            and where variables are for what reads them
    seed                 ->  a seed of tower k    of each random operation
    what is outside      ->  see `Substitution`
"""

import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import CloneError
from towers.graph import graph_walk
from towers.graph.edit import colocate, group_in_node
from towers.graph.library import functions_of
from towers.graph.nests import fetches_in, leaves_of, map_leaves
from towers.graph.op_types import CONTROL_FLOW, PLACEHOLDERS
from towers.placement.tower_device import TowerDevice, moved, overlaps
from towers.tower.batch_values import is_batch_value
from towers.tower.copy_template import CopiedFunctions, Template, producer_of
from towers.tower.objectives import map_shaped


class Copies:
    """Makes copies of one tower."""

    def __init__(self, tower, made, shared, left_out, left_alone, names, random_keys, further=()):
        """
        Args:
          tower: the `Tower` to be copied.
          made: list of the operations that building it made, without those of variables.
          shared: names of operations among `made` whose value all towers use.
          left_out: names of operations that write and that copies do without: what waits for them
            waits for what they wait for.
          left_alone: as for `CopiedFunctions`.
          names: `NamesOnOneMachine`.
          random_keys: {name of a constant that holds a seed: name of the random operation}.
          further: tensors and operations that are copied besides the tower's own.

        Raises:
          CloneError: an operation that cannot be copied; names it.
        """
        self._tower, self._left_out = tower, left_out
        self._graph = tf.get_default_graph()
        self._made = {op.name: op for op in made}
        self._from_shard = graph_walk.reachable_from(
            [leaf.op for leaf in leaves_of(tower.inputs)], made)
        self._shared = set(shared)
        outputs = [tower.loss, tower.data_loss, tower.predictions, tower.metrics, tower.updates,
                   [gradient for gradient, _ in tower.pairs], list(further)]
        needed = self._needed([getattr(each, 'op', each) for each in fetches_in(outputs)])
        # In the order in which they were made, which an import of loops needs.
        self._nodes = {op.name: needed[op.name] for op in made if op.name in needed}
        functions = CopiedFunctions(list(self._nodes.values()), self._graph, tower.device,
                                    left_alone)
        self._devices = self._tell_devices()
        self._template = Template(self._nodes, tower.name_scope, functions, random_keys,
                                  self._graph, names)

    def tower(self, substitution, inputs, size, part):
        """Makes a copy: a `Tower`; and the function from a tensor or operation to its copy.

        Args:
          substitution: `Substitution`.
          inputs: its shard.
          size: examples in the shard.
          part: `Part`: its number, device and scope.
        """
        with tf.name_scope(part.scope) as root:
            pass
        self._template.adapt(substitution.number, root, part.device)
        outside = {key: substitution.tensor(self._graph.get_tensor_by_name(name))
                   for name, key in self._template.outside.items()}
        with tf.device(None), tf.device(TowerDevice(part.device)):
            tf.import_graph_def(self._template.graph_def, outside, name=root)
        copied = _Copied(self._graph, self._nodes, self._template, root, substitution)
        for name in self._devices:
            compat.set_device(copied.operation(name), self._device_of(
                name, part.device, substitution))
        copied.set_colocations_and_controls()
        tower = self._tower

        def copies(nest):
            return map_leaves(copied.leaf, nest)
        copy = tower._replace(
            index=part.tower, micro_batch=part.micro_batch, device=part.device, name_scope=root,
            inputs=inputs, size=size, loss=copies(tower.loss),
            predictions=copies(tower.predictions), metrics=copies(tower.metrics),
            gradients=map_shaped(lambda pairs: [
                (copies(gradient), variable) for gradient, variable in pairs], tower.gradients),
            updates=copies(tower.updates), data_loss=copies(tower.data_loss),
            forward=copied.names(tower.forward), backward=copied.names(tower.backward))
        return copy, copied.leaf

    # ---- what is copied -------------------------------------------------------------------------

    def _needed(self, operations):
        """{name: `NodeDef`} of what the operations need of tower 0, themselves included."""
        nodes, stack = {}, [op.name for op in operations]
        while stack:
            name = stack.pop()
            if name in nodes or name not in self._made or self._is_shared(name):
                continue
            node = nodes[name] = self._without_left_out(self._made[name].node_def)
            stack.extend(group_in_node(node))
            stack.extend(producer_of(text) for text in node.input)  # first, with what is shared
        return nodes

    def _is_shared(self, name):
        """Whether all towers have an operation in common."""
        if name in self._shared:
            return True
        op = self._made[name]
        if op.type.startswith(_MEETS_OTHERS):
            raise CloneError('operation %s (%s), which the model function makes, meets others of '
                             "its name: pass copies='reuse', which calls the model function for "
                             'every tower.' % (name, op.type))
        if not keeps_state(op) or is_batch_value(op) or (
                op.type == 'PlaceholderWithDefault' and name in self._from_shard):
            return False
        if name in self._from_shard or compat.in_control_flow(op):
            raise CloneError(
                'operation %s (%s), which the model function makes, keeps state of its own, and '
                "%s: make it before build_towers, or pass copies='reuse'." % (
                    name, op.type, 'is made from the shard' if name in self._from_shard
                    else 'is within a branch or a loop'))
        self._shared.update([name], group_in_node(op.node_def))
        return True

    def _without_left_out(self, node):
        """A `NodeDef` without control edges from writes that are left out."""
        if not any(text[1:] in self._left_out for text in node.input if text.startswith('^')):
            return node
        changed = type(node)()
        changed.CopyFrom(node)
        waits_for = [self._graph.get_operation_by_name(text[1:]) for text in node.input
                     if text.startswith('^')]
        data = [text for text in node.input if not text.startswith('^')]
        del changed.input[:]
        changed.input.extend(data + ['^' + op.name for op in waited_instead(
            waits_for, self._left_out)])
        return changed

    # ---- devices --------------------------------------------------------------------------------

    def _tell_devices(self):
        """{name: device} of operations that do not move from tower 0's device to the copy's.

        A device is a name; or `('like', name)`: the device of that operation's copy; or `('moved',
        name)`: the device with the tower's part exchanged.
        """
        devices = {}
        for name, node in self._nodes.items():
            leader = self._leader(name, node) if node.device else None
            if leader is not None:
                devices[name] = ('like', leader)
            elif not node.device or not overlaps(node.device, self._tower.device):
                devices[name] = node.device
            elif node.device != str(self._tower.device):
                devices[name] = ('moved', node.device)
        return devices

    def _leader(self, name, node):
        """The operation on whose device TensorFlow has put this one: a variable's, say; or None."""
        leader = next((each for each in group_in_node(node) if each != name), None)
        op = self._made[name]
        if leader is None and op.type not in CONTROL_FLOW and not functions_of(node):
            # Others hand a resource on, to what reads it.
            leader = next((tensor.op.name for tensor in op.inputs if tensor.dtype == tf.resource),
                          None)
        return leader

    def _device_of(self, name, device, substitution):
        said = self._devices.get(name, ('moved', self._tower.device))
        while isinstance(said, tuple) and said[0] == 'like':
            leader = said[1]
            if leader not in self._nodes:
                op = substitution.operation(self._graph.get_operation_by_name(leader))
                return op.device
            said = self._devices.get(leader, ('moved', self._tower.device))
        return moved(said[1], self._tower.device, device) if isinstance(said, tuple) else said


class _Copied:
    """The operations of one copy, by the names of tower 0's."""

    def __init__(self, graph, nodes, template, root, substitution):
        self._graph, self._nodes, self._template = graph, nodes, template
        self._root, self._substitution = root, substitution

    def operation(self, name):
        """The copy of an operation; of one from outside, what stands in its place."""
        if name in self._nodes:
            return self._graph.get_operation_by_name(self._name(name))
        return self._substitution.operation(self._graph.get_operation_by_name(name))

    def names(self, names):
        """A frozenset of the names of the copies of those operations that were copied."""
        return frozenset(self._name(name) for name in names if name in self._nodes)

    def _name(self, name):
        return self._root + self._template.relative(name)

    def set_colocations_and_controls(self):
        """Sets what an import cannot set: colocations, and control inputs from outside."""
        for name, groups in self._template.colocated:
            colocate(self.operation(name), [self.operation(each).name for each in groups])
        for name, waits_for in self._template.controls:
            compat.add_control_inputs(self.operation(name), list(map(self.operation, waits_for)))

    def leaf(self, leaf):
        """The copy of a tensor or an operation.

        Assigning to a variable returns an object of a variable's type; its copy is an operation.
        """
        copy = self.operation(leaf.op.name if hasattr(leaf, 'op') else leaf.name)
        if isinstance(leaf, tf.Operation):
            return copy
        if isinstance(leaf, compat.VARIABLE_TYPES):
            return leaf if copy is leaf.op else copy
        if copy is leaf.op:
            return leaf
        copy = copy.outputs[leaf.value_index]
        copy.set_shape(leaf.shape)  # a shape that Python code has set is in no GraphDef
        return copy


_MEETS_OTHERS = ('Collective', 'Nccl', 'Horovod')
_WITHOUT_NAME = ('Anonymous', 'IteratorFromStringHandle')


def keeps_state(op):
    """Whether an operation is more than its type, inputs and attributes: a table, a queue, an
    iterator, a placeholder."""
    return (op.type in PLACEHOLDERS or op.type.startswith(_WITHOUT_NAME)
            or 'shared_name' in op.node_def.attr)


def waited_instead(control_inputs, left_out):
    """What to wait for instead of operations that are left out: the operations that these wait for.

    In a branch of `tf.cond` (v1) the values to be written are waited for, too: an operation that
    waits for nothing within its branch would run whichever branch is taken.
    """
    found, stack, seen = [], list(reversed(control_inputs)), set()
    while stack:
        op = stack.pop()
        if op.name in seen:
            continue
        seen.add(op.name)
        if op.name not in left_out:
            found.append(op)
            continue
        stack.extend(op.control_inputs)
        if compat.in_control_flow(op):
            stack.extend(tensor.op for tensor in op.inputs if tensor.dtype != tf.resource)
    return found
