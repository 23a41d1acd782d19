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
from towers.copies.substitution import Substitution
from towers.errors import CloneError
from towers.gradients.backward_pass import Differentiated
from towers.gradients.stateless_random import give_seed_of_tower, key_of
from towers.gradients.tower import Tower
from towers.graph import graph_walk
from towers.graph.edit import (
    Library,
    colocate,
    copied_functions,
    functions_of,
    group_in_node,
    producer,
    rename_functions,
    tell_apart,
)
from towers.graph.graph_walk import fetches_in, leaves_of, map_leaves
from towers.graph.op_types import CONTROL_FLOW, PLACEHOLDERS, keeps_state
from towers.graph.order import waited_instead
from towers.graph.variable_access import without_writes
from towers.model.objectives import flat, map_shaped
from towers.nonfinite import message_of_tower
from towers.placement.tower_device import moved, overlaps
from towers.roles.inline_updates import InlineUpdates
from towers.whole_batch.batch_values import is_batch_value

_MEETS_OTHERS = ('Collective', 'Nccl', 'Horovod')


class Copies:
    """Makes copies of one tower.

    A template holds the copied operations, with names relative to the scope that the towers are
    built in; devices, colocations and control inputs from outside are set after each import.
    """

    def __init__(self, first: Differentiated, updates: InlineUpdates, parts_before: int,
                 further: typing.Sequence):
        """
        Args:
          first: the tower to be copied, and its operations.
          updates: the writes that copies do without, or share.
          parts_before: how many parts other machines have before this one's, whose random numbers
            are others.
          further: tensors and operations that are copied besides the tower's own results.
        """
        tower = first.tower
        self._tower, self._graph, self._left_out = tower, tf.get_default_graph(), updates.left_out
        self._parts_before, self._random_keys = parts_before, first.random_keys
        self._made = {op.name: op for op in first.operations}
        self._from_shard = graph_walk.reachable_from(
            [leaf.op for leaf in leaves_of(tower.inputs)], first.operations)
        self._shared = set(updates.shared)
        results = fetches_in([
            tower.loss, tower.data_loss, tower.predictions, tower.metrics, tower.updates,
            [gradient for gradient, _ in tower.pairs], flat(tower.of_shard), list(further)])
        needed = self._needed([getattr(each, 'op', each) for each in results])
        # In the order in which they were made, which an import of loops needs.
        self._nodes = {name: needed[name] for name in self._made if name in needed}
        self._leaders = self._found_leaders()
        self._outside = {}    # name of an input from outside in the template: tower 0's tensor
        self._controls = []   # (name, names of operations from outside that it waits for)
        self._colocated = []  # (name, names of the operations that it is colocated with)
        self._template = self._made_template()
        self._functions, self._gradients = self._functions_called(updates.in_functions)

    def tower(self, substitution: Substitution, inputs: typing.Any, size: typing.Any,
              part: typing.Any) -> typing.Tuple[Tower, typing.Callable]:
        """Makes the tower of a `Part` of the batch, a copy.

        Args:
          substitution: what it reads in place of tower 0's inputs from outside.
          inputs, size: as of `Tower`.
          part: the `Part`: number, device and name scope of the tower.

        Returns:
          (`Tower`, the function from a tensor or operation of tower 0 to its copy).
        """
        copied = self._imported(substitution, part)
        self._put_on_devices(copied, part.device)
        for name, names in self._colocated:
            colocate(copied.operation(name), [copied.operation(each).name for each in names])
        for name, names in self._controls:
            compat.add_control_inputs(
                copied.operation(name), [copied.operation(each) for each in names])

        def copy_of(nest):
            return map_leaves(copied.leaf, nest)

        def copies_of_gradients(pairs):
            return [(copy_of(gradient), variable) for gradient, variable in pairs]
        tower = self._tower
        copy = tower._replace(
            index=part.tower, micro_batch=part.micro_batch, device=part.device,
            name_scope=copied.name_scope, inputs=inputs, size=size,
            loss=copy_of(tower.loss), data_loss=copy_of(tower.data_loss),
            predictions=copy_of(tower.predictions), metrics=copy_of(tower.metrics),
            updates=copy_of(tower.updates),
            gradients=map_shaped(copies_of_gradients, tower.gradients),
            of_shard=map_shaped(copy_of, tower.of_shard),
            forward=copied.names(tower.forward), backward=copied.names(tower.backward))
        return copy, copied.leaf

    # ---- the template ----------------------------------------------------------------------------

    def _needed(self, operations):
        """{name: `NodeDef`} of operations of tower 0, and of all that they need of tower 0."""
        nodes, stack = {}, [op.name for op in operations]
        while stack:
            name = stack.pop()
            if name in nodes or name not in self._made or name in self._shared:
                continue
            node = self._made[name].node_def
            if self._is_shared(self._made[name]):
                self._shared.update([name], group_in_node(node))
                continue
            nodes[name] = node
            self._wait_for_no_left_out(node)
            stack.extend(group_in_node(node))
            stack.extend(map(producer, node.input))  # first, with shared operations
        return nodes

    def _wait_for_no_left_out(self, node):
        """Has a `NodeDef` wait for what the writes wait for that copies do without."""
        waits_for = [text[1:] for text in node.input if text.startswith('^')]
        if self._left_out.isdisjoint(waits_for):
            return
        inputs = [text for text in node.input if not text.startswith('^')]
        instead = waited_instead(
            list(map(self._graph.get_operation_by_name, waits_for)), self._left_out)
        del node.input[:]
        node.input.extend(inputs + ['^' + op.name for op in instead])

    def _is_shared(self, op):
        """Whether all towers have an operation in common, that is more than its type, inputs and
        attributes: a table, a queue, an iterator, a placeholder."""
        if op.type.startswith(_MEETS_OTHERS):
            raise CloneError('operation %s (%s), which the model function makes, communicates with '
                             "operations by a name: pass copies='reuse', which calls the model "
                             'function for every tower.' % (op.name, op.type))
        if is_batch_value(op) or op.type not in PLACEHOLDERS and not keeps_state(op):
            return False
        is_from_shard = op.name in self._from_shard
        if op.type == 'PlaceholderWithDefault' and is_from_shard:
            return False
        if is_from_shard or compat.in_control_flow(op):
            raise CloneError(
                'operation %s (%s), which the model function makes, keeps state of its own, and '
                "%s: make it before build_towers, or pass copies='reuse'." % (
                    op.name, op.type, 'is made from the shard' if is_from_shard
                    else 'is within a branch or a loop'))
        return True

    def _found_leaders(self):
        """{name of a copied operation: name of the operation on whose device TensorFlow has put it,
        a variable's, say}, which may be itself."""
        put_with = {name: self._put_with(name, node) for name, node in self._nodes.items()
                    if node.device}
        leaders = {}
        for name in self._nodes:
            leader = name
            while put_with.get(leader) is not None:
                leader = put_with[leader]
            leaders[name] = leader
        return leaders

    def _put_with(self, name, node):
        """The name of the operation that this one is colocated with, or whose resource it reads; or
        None."""
        others = [each for each in group_in_node(node) if each != name]
        if others:
            return others[0]
        op = self._made[name]
        if op.type in CONTROL_FLOW or functions_of(node):  # these hand a resource on, to its reader
            return None
        return next((tensor.op.name for tensor in op.inputs if tensor.dtype == tf.resource), None)

    def _made_template(self):
        """The `tf.GraphDef` of the copied operations."""
        template = tf.GraphDef()
        template.versions.CopyFrom(self._graph.graph_def_versions)
        keys = {}  # name of a tensor from outside: its name in the template
        for name, node in self._nodes.items():
            self._add(template.node.add(), name, node, keys)
        if template.ByteSize() >= 2 ** 31 - 2 ** 20:
            raise CloneError('the graph of a tower is larger than 2 GB, which TensorFlow cannot '
                             "import: pass copies='reuse'.")
        return template

    def _add(self, copy, name, node, keys):
        """Makes `copy` the operation of the template for an operation of tower 0."""
        copy.CopyFrom(node)
        copy.name, copy.device = self._relative(name), ''
        del copy.input[:]
        data = [text for text in node.input if not text.startswith('^')]
        for text, tensor in zip(data, self._made[name].inputs):
            source = producer(text)
            if source in self._nodes:
                copy.input.append(text.replace(source, self._relative(source), 1))
                continue
            if tensor.name not in keys:
                keys[tensor.name] = '__outside__/%d:0' % len(keys)
                self._outside[keys[tensor.name]] = tensor
            copy.input.append(keys[tensor.name])
        waits_for = [producer(text) for text in node.input if text.startswith('^')]
        copy.input.extend(
            '^' + self._relative(source) for source in waits_for if source in self._nodes)
        from_outside = [source for source in waits_for if source not in self._nodes]
        if from_outside:
            self._controls.append((name, from_outside))
        groups = group_in_node(copy)
        if groups:
            del copy.attr['_class']
            self._colocated.append((name, groups))

    def _relative(self, name):
        """A name without the scope that the towers are built in."""
        scope = self._tower.name_scope
        return name[len(scope):] if name.startswith(scope) else 'outside/' + name

    def _functions_called(self, in_functions):
        """The functions that the template calls, {name: `FunctionDef`}, and the graph's list of
        `GradientDef`s; `in_functions` is as of `InlineUpdates`."""
        library = Library(self._graph)
        functions = library.reached_from(self._nodes.values())
        for name, positions in in_functions.items():
            called = library.called_by(self._nodes[name]) if name in self._nodes else []
            for each in called:
                functions[each] = without_writes(library.function(each), positions)
        return functions, library.gradients() if functions else []

    # ---- one copy --------------------------------------------------------------------------------

    def _imported(self, substitution, part):
        """Imports the template for a part: `_Copied`."""
        with tf.name_scope(part.scope) as root:
            pass
        outside = {key: substitution.tensor(tensor) for key, tensor in self._outside.items()}
        start = len(self._graph.get_operations())
        with tf.device(None):
            tf.import_graph_def(self._adapted(substitution.number, root, part.device), outside,
                                name=root)
        names = {name: root + self._relative(name) for name in self._nodes}
        return _Copied(root, names, substitution, self._graph.get_operations()[start:])

    def _adapted(self, number, root, device):
        """The `tf.GraphDef` of the tower of this number, name scope and device."""
        graph_def, draws_as = tf.GraphDef(), number + self._parts_before
        graph_def.CopyFrom(self._template)
        names = self._add_functions(graph_def.library, draws_as, root, device)
        for name, node in zip(self._nodes, graph_def.node):
            give_seed_of_tower(node, draws_as)
            tell_apart(node, root)
            if names:
                rename_functions(node, names)
            if node.op == 'CheckNumerics':
                message = node.attr['message'].s.decode()
                node.attr['message'].s = message_of_tower(message, number).encode()
            if name in self._random_keys:
                key = key_of(self._random_keys[name], self._graph.seed, draws_as)
                node.attr['value'].tensor.CopyFrom(tf.make_tensor_proto(key, tf.int64, []))
        return graph_def

    def _add_functions(self, library, draws_as, root, device):
        """Adds copies of the functions to a `FunctionDefLibrary`: {name: name of its copy}."""
        def change(node, is_of_resource):
            give_seed_of_tower(node, draws_as)
            # In a function's body a node that reads a variable's handle keeps its device.
            stays = is_of_resource and not functions_of(node)
            if node.device and not stays and overlaps(node.device, self._tower.device):
                node.device = moved(node.device, self._tower.device, device)
        functions, names = copied_functions(
            self._functions, root.strip('/').replace('/', '_'), change)
        library.function.extend(functions)
        for each in self._gradients:
            if each.function_name in names:
                library.gradient.add(function_name=names[each.function_name],
                                     gradient_func=names[each.gradient_func])
        return names

    def _put_on_devices(self, copied, device):
        """Puts the operations of a copy on the devices of its tower."""
        devices = {node.device for node in self._nodes.values() if node.device}
        in_tower = {each: self._device_in_tower(each, device) for each in devices}
        for name, leader in self._leaders.items():
            if leader in self._nodes:
                there = in_tower.get(self._nodes[leader].device)
            else:
                there = copied.operation(leader).device
            if there:
                compat.set_device(copied.operation(name), there)

    def _device_in_tower(self, device, tower_device):
        """The device that stands for tower 0's `device` in a tower; itself, if it is no tower's."""
        if not overlaps(device, self._tower.device):
            return device
        return moved(device, self._tower.device, tower_device)


class _Copied:
    """The operations of one copy, by the names of tower 0's.

    Attributes:
      name_scope: the scope of the copy, such as `'tower_1/'`.
    """

    def __init__(self, name_scope: str, names: typing.Dict[str, str], substitution: Substitution,
                 made: typing.List[tf.Operation]):
        """`names` is from the names of tower 0's operations to those of their copies, which are
        among the operations `made`."""
        self.name_scope, self._names, self._substitution = name_scope, names, substitution
        self._graph, self._made = tf.get_default_graph(), {op.name: op for op in made}

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
