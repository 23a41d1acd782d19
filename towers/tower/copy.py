"""Towers 1, 2, … as copies of tower 0's finished graph, forward and backward.

Calling the model function and differentiating its loss takes time for every tower, the more the
larger the model is; and a program that is called N times sees the traces of its earlier calls. So
the operations that tower 0's outputs need are imported once more for each tower:

    x                    ->  tower_k/x            operations, functions, frames and stacks of loops
    tower 0's device     ->  tower k's            and the variable's device for its readers
    seed                 ->  a seed of tower k    of each random operation
    inputs from outside  ->  see `Substitution`
"""

import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import CloneError
from towers.graph import graph_walk
from towers.graph.edit import (Library, colocate, copied_functions, functions_of, group_in_node,
                               producer, rename_functions, tell_apart)
from towers.graph.graph_walk import fetches_in, leaves_of, map_leaves
from towers.graph.op_types import CONTROL_FLOW, PLACEHOLDERS, keeps_state
from towers.graph.order import waited_instead
from towers.graph.variable_access import without_writes
from towers.nonfinite import message_of_tower
from towers.placement.tower_device import moved, overlaps
from towers.tower.batch_values import is_batch_value
from towers.tower.gradients import Differentiated
from towers.tower.inline_updates import InlineUpdates
from towers.tower.objectives import flat, map_shaped
from towers.tower.stateless_random import give_seed_of_tower, key_of
from towers.tower.tower import Substitution, Tower

_MEETS_OTHERS = ('Collective', 'Nccl', 'Horovod')


class Copies:
    """Makes copies of one tower.

    A template holds the copied operations, with names relative to the scope that the towers are
    built in; devices, colocations and control inputs from outside are set after each import.
    """

    def __init__(self, first: Differentiated, updates: InlineUpdates, parts_before: int,
                 further: typing.Sequence):
        """`first` is `Differentiated`, the tower to be copied; `updates` are the `InlineUpdates`
        that copies do without or share; `further` tensors and operations are copied besides the
        tower's own."""
        tower = first.tower
        self._tower, self._graph, self._left_out = tower, tf.get_default_graph(), updates.left_out
        self._parts_before, self._random_keys = parts_before, first.random_keys
        self._made = {op.name: op for op in first.operations}
        self._from_shard = graph_walk.reachable_from(
            [leaf.op for leaf in leaves_of(tower.inputs)], first.operations)
        self._shared = set(updates.shared)
        outputs = [tower.loss, tower.data_loss, tower.predictions, tower.metrics, tower.updates,
                   [gradient for gradient, _ in tower.pairs], flat(tower.of_shard), list(further)]
        needed = self._needed([getattr(each, 'op', each) for each in fetches_in(outputs)])
        # In the order in which they were made, which an import of loops needs.
        self._nodes = {name: needed[name] for name in self._made if name in needed}
        self._leaders = {name: self._leader(name, node) for name, node in self._nodes.items()
                         if node.device}
        self._outside = {}    # name of a tensor from outside: its name in the template
        self._controls = []   # (name, names of operations from outside that it waits for)
        self._colocated = []  # (name, names of the operations that it is colocated with)
        self._template = tf.GraphDef()
        self._template.versions.CopyFrom(self._graph.graph_def_versions)
        for name, node in self._nodes.items():
            self._add(name, node)
        if self._template.ByteSize() >= 2 ** 31 - 2 ** 20:
            raise CloneError('the graph of a tower is larger than 2 GB, which TensorFlow cannot '
                             "import: pass copies='reuse'.")
        library = Library(self._graph)
        self._functions = library.reached_from(self._nodes.values())
        for name, positions in updates.in_functions.items():
            for called in library.called_by(self._nodes[name]) if name in self._nodes else ():
                self._functions[called] = without_writes(library.function(called), positions)
        self._gradients = library.gradients() if self._functions else []

    def tower(self, substitution: Substitution, inputs: typing.Any, size: typing.Any,
              part: typing.Any) -> typing.Tuple[Tower, typing.Callable]:
        """Makes a copy, of a `Part`: a `Tower`; and the function from a tensor or operation to its
        copy."""
        with tf.name_scope(part.scope) as root:
            pass
        outside = {key: substitution.tensor(self._graph.get_tensor_by_name(name))
                   for name, key in self._outside.items()}
        start = len(self._graph.get_operations())
        with tf.device(None):
            tf.import_graph_def(self._adapted(substitution.number, root, part.device), outside,
                                name=root)
        copied = _Copied(self._graph, {name: root + self._relative(name) for name in self._nodes},
                         substitution, self._graph.get_operations()[start:])
        for name, device in self._devices(part.device, copied):
            compat.set_device(copied.operation(name), device)
        for name, groups in self._colocated:
            colocate(copied.operation(name), [copied.operation(each).name for each in groups])
        for name, waits_for in self._controls:
            compat.add_control_inputs(
                copied.operation(name), list(map(copied.operation, waits_for)))
        tower = self._tower

        def copies(nest):
            return map_leaves(copied.leaf, nest)
        return tower._replace(
            index=part.tower, micro_batch=part.micro_batch, device=part.device, name_scope=root,
            inputs=inputs, size=size, gradients=map_shaped(lambda pairs: [
                (copies(gradient), variable) for gradient, variable in pairs], tower.gradients),
            of_shard=map_shaped(copies, tower.of_shard),
            forward=copied.names(tower.forward), backward=copied.names(tower.backward),
            **{field: copies(getattr(tower, field)) for field in (
                'loss', 'data_loss', 'predictions', 'metrics', 'updates')}), copied.leaf

    def _needed(self, operations):
        """{name: `NodeDef`} of operations of tower 0, and of all that they need of tower 0."""
        nodes, stack = {}, [op.name for op in operations]
        while stack:
            name = stack.pop()
            if name in nodes or name not in self._made or name in self._shared:
                continue
            node = self._made[name].node_def
            if self._is_shared(self._made[name], node):
                self._shared.update([name], group_in_node(node))
                continue
            nodes[name] = node
            waits_for = [text[1:] for text in node.input if text.startswith('^')]
            if not self._left_out.isdisjoint(waits_for):
                inputs = [text for text in node.input if not text.startswith('^')]
                del node.input[:]
                node.input.extend(inputs + ['^' + op.name for op in waited_instead(
                    list(map(self._graph.get_operation_by_name, waits_for)), self._left_out)])
            stack.extend(group_in_node(node))
            stack.extend(map(producer, node.input))  # first, with shared operations
        return nodes

    def _is_shared(self, op, node):
        """Whether all towers have an operation in common, that is more than its type, inputs and
        attributes: a table, a queue, an iterator, a placeholder."""
        if op.type.startswith(_MEETS_OTHERS):
            raise CloneError('operation %s (%s), which the model function makes, communicates with '
                             "operations by a name: pass copies='reuse', which calls the model "
                             'function for every tower.' % (op.name, op.type))
        is_from_shard = op.name in self._from_shard
        if not (op.type in PLACEHOLDERS or keeps_state(op)) or is_batch_value(op) or (
                    op.type == 'PlaceholderWithDefault' and is_from_shard):
            return False
        if is_from_shard or compat.in_control_flow(op):
            raise CloneError(
                'operation %s (%s), which the model function makes, keeps state of its own, and '
                "%s: make it before build_towers, or pass copies='reuse'." % (
                    op.name, op.type, 'is made from the shard' if is_from_shard
                    else 'is within a branch or a loop'))
        return True

    def _relative(self, name):
        """A name without the scope that the towers are built in."""
        scope = self._tower.name_scope
        return name[len(scope):] if name.startswith(scope) else 'outside/' + name

    def _add(self, name, node):
        """Adds an operation to the template."""
        copy = self._template.node.add()
        copy.CopyFrom(node)
        copy.name, copy.device = self._relative(name), ''
        del copy.input[:]
        waits_for = []
        for text in node.input:
            source = producer(text)
            if source in self._nodes:
                copy.input.append(text.replace(source, self._relative(source), 1))
            elif text.startswith('^'):
                waits_for.append(source)
            else:
                copy.input.append(self._outside.setdefault(
                    text if ':' in text else text + ':0', '__outside__/%d:0' % len(self._outside)))
        if waits_for:
            self._controls.append((name, waits_for))
        groups = group_in_node(copy)
        if groups:
            del copy.attr['_class']
            self._colocated.append((name, groups))

    def _adapted(self, number, root, device):
        """The `tf.GraphDef` of the tower of this number, name scope and device."""
        graph_def, draws_as = tf.GraphDef(), number + self._parts_before
        graph_def.CopyFrom(self._template)

        def change(node, is_of_resource):
            give_seed_of_tower(node, draws_as)
            # In a function's body a node that reads a variable's handle keeps its device.
            if node.device and overlaps(node.device, self._tower.device) and (
                    functions_of(node) or not is_of_resource):
                node.device = moved(node.device, self._tower.device, device)
        functions, names = copied_functions(
            self._functions, root.strip('/').replace('/', '_'), change)
        graph_def.library.function.extend(functions)
        for each in self._gradients:
            if each.function_name in names:
                graph_def.library.gradient.add(
                    function_name=names[each.function_name],
                    gradient_func=names.get(each.gradient_func, each.gradient_func))
        for name, node in zip(self._nodes, graph_def.node):
            give_seed_of_tower(node, draws_as)
            if names:
                rename_functions(node, names)
            tell_apart(node, root)
            if node.op == 'CheckNumerics':
                node.attr['message'].s = message_of_tower(
                    node.attr['message'].s.decode(), number).encode()
            if name in self._random_keys:
                key = key_of(self._random_keys[name], self._graph.seed, draws_as)
                node.attr['value'].tensor.CopyFrom(tf.make_tensor_proto(key, tf.int64, []))
        return graph_def

    def _leader(self, name, node):
        """The operation on whose device TensorFlow has put this one: a variable's, say; or None."""
        leaders = [each for each in group_in_node(node) if each != name]
        op = self._made[name]
        if not leaders and op.type not in CONTROL_FLOW and not functions_of(node):
            # Others hand a resource on, to its reader.
            leaders = [tensor.op.name for tensor in op.inputs if tensor.dtype == tf.resource]
        return leaders[0] if leaders else None

    def _devices(self, device, copied):
        """Yields (name of an operation, device of its copy in the tower of that device)."""
        there = {here: moved(here, self._tower.device, device) if (
            overlaps(here, self._tower.device)) else here
                 for here in {node.device for node in self._nodes.values()} if here}
        for name, node in self._nodes.items():
            leader = name
            while self._leaders.get(leader):
                leader = self._leaders[leader]
            here = self._nodes[leader].device if leader in self._nodes else (
                copied.operation(leader).device)
            if leader not in self._nodes or here:
                yield name, there[here] if leader in self._nodes else here


class _Copied:
    """The operations of one copy, by the names of tower 0's."""

    def __init__(self, graph, names, substitution, made):
        self._graph, self._names, self._substitution = graph, names, substitution
        self._made = {op.name: op for op in made}

    def operation(self, name):
        """The copy of an operation; of an operation from outside, its substitute."""
        if name in self._names:
            return self._made[self._names[name]]
        return self._substitution.operation(self._graph.get_operation_by_name(name))

    def names(self, names):
        """A frozenset of the names of the copies of the operations that were copied."""
        return frozenset(self._names[name] for name in names if name in self._names)

    def leaf(self, leaf):
        """The copy of a tensor or operation; of a variable, as by `tf.assign`, its operation."""
        copy = self.operation(leaf.op.name if hasattr(leaf, 'op') else leaf.name)
        if isinstance(leaf, tf.Operation):
            return copy
        if copy is leaf.op or isinstance(leaf, compat.VARIABLE_TYPES):
            return leaf if copy is leaf.op else copy
        copy = copy.outputs[leaf.value_index]
        copy.set_shape(leaf.shape)  # a shape that Python code has set is in no GraphDef
        return copy
