"""Towers 1, 2, … as copies of tower 0's finished graph, forward and backward.

Calling the model function and differentiating its loss takes time for every tower, the more the
larger the model is; and a model function that is called N times sees the traces of its earlier
calls. So the operations that tower 0's outputs need are imported once more for each tower:

    x                    ->  tower_k/x            operations, functions, frames and stacks of loops
    tower 0's device     ->  tower k's            and the variable's device for its readers
    seed                 ->  a seed of tower k    of each random operation
    inputs from outside  ->  tower k's            the shard, replicas and the like: `Substitution`

Words of other modules used here:

    `Part`                        a tower, or one of its micro-batches, for which a copy is made
    `InlineUpdates.in_functions`  calls of functions that write variables of tower 0 alone, as an
                                  `If` may do: a copy calls the functions without these writes
    `Differentiated.random_keys`  constants in the seeds of stateless random operations, which have
                                  another value in each copy
"""

import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.copies.substitution import Substitution
from towers.copies.template import make_template
from towers.gradients.backward_pass import Differentiated
from towers.gradients.stateless_random import give_seed_of_tower, key_of
from towers.gradients.tower import Tower
from towers.graph.edit import (
    Library,
    colocate,
    copied_functions,
    functions_of,
    make_names_unique,
    rename_functions,
)
from towers.graph.function_variables import without_writes
from towers.graph.graph_walk import Recording, by_name, map_leaves, names_of, operation_of
from towers.model.objectives import map_shaped
from towers.model.requested import Part
from towers.nonfinite import message_of_tower
from towers.placement.tower_device import device_in_other_tower, may_be_of_tower
from towers.roles.inline_updates import InlineUpdates


class TowerCopy(typing.NamedTuple):
    """A copy of tower 0.

    Attributes:
      tower: the copy.
      copy_of: function from a tensor or operation of tower 0 to its copy.
    """
    tower: Tower
    copy_of: typing.Callable


class Copies:
    """Makes copies of tower 0."""

    def __init__(self, first: Differentiated, updates: InlineUpdates, parts_before: int,
                 other_results: typing.Sequence):
        """
        Args:
          first: tower 0, which is to be copied, and its operations.
          updates: the writes that copies leave out, or share with tower 0.
          parts_before: the number of parts of the batch on the machines before this machine. The
            seed of a random operation depends on the index of its part among the parts of all
            machines.
          other_results: tensors and operations that are copied besides the results of tower 0.
        """
        self._graph = tf.get_default_graph()
        self._tower = first.tower
        self._random_keys = first.random_keys
        self._parts_before = parts_before
        self._template = make_template(first, updates, other_results)
        self._library = Library(self._graph)
        self._functions = self._functions_called(updates.in_functions)

    def tower(self, substitution: Substitution, inputs: typing.Any, size: typing.Any,
              part: Part) -> TowerCopy:
        """Copies tower 0 for a part of the batch.

        Args:
          substitution: what the copy reads in the place of tower 0's inputs from outside.
          inputs: the shard of the copy.
          size: examples in the shard.
          part: index, device and name scope of the copy.
        """
        copied = self._imported(substitution, part)
        self._put_on_devices(copied, part.device)
        self._colocate(copied)
        self._make_wait_for_outside(copied)
        return TowerCopy(self._tower_of(copied, inputs, size, part), copied.leaf)

    def _functions_called(
            self, in_functions: typing.Dict[str, list]) -> typing.Dict[str, typing.Any]:
        """The functions that the template calls, without the writes that copies leave out.

        Args:
          in_functions: {name of a call, such as an `If`: the positions of the variables that copies
            do not write, among the arguments of the called functions}. Positions are counted from
            the last argument, -1. So they are also the positions among the inputs of the `If`,
            whose condition comes before the arguments.

        Returns:
          {name of a function: `FunctionDef`}.
        """
        functions = self._library.reached_from(self._template.graph_def.node)
        # Each name of an operation of tower 0, with its node in the template.
        for name, node in zip(self._template.names, self._template.graph_def.node):
            positions = in_functions.get(name)
            if positions is None:  # copies call the node's functions, if it has any, unchanged
                continue
            for function_name in self._library.called_by(node):
                function = self._library.function(function_name)
                functions[function_name] = without_writes(function, positions)
        return functions

    # ---- one copy --------------------------------------------------------------------------------

    def _imported(self, substitution: Substitution, part: Part) -> '_Copied':
        """Imports the template for a part of the batch.

        Args:
          substitution: what the copy reads in the place of tower 0's inputs from outside.
          part: index, device and name scope of the copy.
        """
        with tf.name_scope(part.scope) as root:
            pass  # only to get a scope that no other operation has
        inputs = {}
        for name_in_template, tensor in self._template.inputs.items():
            inputs[name_in_template] = substitution.tensor(tensor)
        graph_def = self._adapted(substitution.number, root, part.device)
        # `_put_on_devices` gives the operations their devices.
        with tf.device(None), Recording(self._graph) as made:
            tf.import_graph_def(graph_def, inputs, name=root)
        imported = by_name(made.operations)
        operations = {name: imported[root + relative]
                      for name, relative in self._template.names.items()}
        return _Copied(root, operations, substitution)

    def _adapted(self, index: int, root: str, device: str) -> tf.GraphDef:
        """The template with the seeds, names of loops, functions and messages of one copy.

        Seeds depend on the index of the copy among the parts of all machines, so that no two
        machines draw the same numbers. A message names a tower of this machine.

        Args:
          index: the index of the copy among the parts of this machine.
          root: the name scope of the copy.
          device: the device of the copy.
        """
        index_among_machines = self._parts_before + index
        graph_def = tf.GraphDef()
        graph_def.CopyFrom(self._template.graph_def)
        new_names = self._add_functions(graph_def.library, index_among_machines, root, device)
        for name, node in zip(self._template.names, graph_def.node):
            self._give_seed(node, name, index_among_machines)
            make_names_unique(node, root)
            if new_names:
                rename_functions(node, new_names)
            if node.op == 'CheckNumerics':
                message = node.attr['message'].s.decode()
                node.attr['message'].s = message_of_tower(message, index).encode()
        return graph_def

    def _give_seed(self, node: tf.NodeDef, name: str, part: int) -> None:
        """Gives the node of a random operation, or of the constant in its seed, the seed of a copy.

        Args:
          node: the `NodeDef` in the copy, which is changed; any other node stays as it is.
          name: the name of the operation in tower 0.
          part: the index of the copy among the parts of all machines.
        """
        give_seed_of_tower(node, part)
        is_constant_in_seed = name in self._random_keys
        if is_constant_in_seed:
            key = key_of(self._random_keys[name], self._graph.seed, part)
            node.attr['value'].tensor.CopyFrom(tf.make_tensor_proto(key, tf.int64, []))

    def _add_functions(self, library: typing.Any, part: int, root: str,
                       device: str) -> typing.Dict[str, str]:
        """Adds copies of the template's functions to a `FunctionDefLibrary`.

        Args:
          library: the `FunctionDefLibrary`.
          part: the index of the copy among the parts of all machines, by which seeds are made.
          root: the name scope of the copy.
          device: the device of the copy.

        Returns:
          {name of a function: name of its copy}; {} where the template calls no function.
        """
        if not self._functions:
            return {}

        def change(node: tf.NodeDef, is_beside_resource: bool) -> None:
            """Gives a node in the body of a function the seed and the device of the copy.

            Args:
              node: the `NodeDef`, which is changed.
              is_beside_resource: whether the node takes a variable that is an argument of the
                function, or is colocated with a node that takes it.
            """
            give_seed_of_tower(node, part)
            # A node that reads the variable stays on the variable's device. A node that calls
            # another function reads nothing: it hands the variable to that function, whose own
            # nodes stay there.
            keeps_device = is_beside_resource and not functions_of(node)
            if node.device and not keeps_device:
                node.device = self._device_in_tower(node.device, device)

        functions, new_names = copied_functions(
            self._functions, root.strip('/').replace('/', '_'), change)
        library.function.extend(functions)
        # If a function has a gradient function, the function's copy gets the copy of that.
        self._library.give_gradients(library, new_names)
        return new_names

    def _put_on_devices(self, copied: '_Copied', device: str) -> None:
        """Puts the operations of a copy on the devices of its tower.

        An operation without a device, '', stays without a device: TensorFlow chooses it.

        Args:
          copied: the operations of the copy.
          device: the device of the tower.
        """
        new_devices = {'': ''}  # {device of an operation of tower 0: device of its copy}
        for old_device in set(self._template.devices.values()):
            if old_device:
                new_devices[old_device] = self._device_in_tower(old_device, device)
        for name, leader in self._template.leaders.items():
            is_leader_copied = leader in self._template.devices
            if is_leader_copied:
                device_of_copy = new_devices[self._template.devices[leader]]
            else:  # the leader is from outside, such as a variable: its substitute's device
                device_of_copy = copied.operation(leader).device
            if device_of_copy:
                compat.set_device(copied.operation(name), device_of_copy)

    def _device_in_tower(self, device: str, tower_device: str) -> str:
        """The device in another tower that corresponds to the device of an operation of tower 0.

        Args:
          device: the device of the operation. A device that is not tower 0's, such as the device of
            a variable, is the same for all towers.
          tower_device: the device of the other tower.
        """
        if not may_be_of_tower(device, self._tower.device):
            return device
        return device_in_other_tower(device, self._tower.device, tower_device)

    def _colocate(self, copied: '_Copied') -> None:
        """Colocates the operations of a copy with each other, as the operations of tower 0 are."""
        for name, group in self._template.colocated.items():
            colocate(copied.operation(name), map(copied.operation, group))

    def _make_wait_for_outside(self, copied: '_Copied') -> None:
        """Makes the operations of a copy wait for operations from outside of the template, as the
        operations of tower 0 do."""
        for name, awaited in self._template.waits.items():
            compat.add_control_inputs(
                copied.operation(name), list(map(copied.operation, awaited)))

    def _tower_of(self, copied: '_Copied', inputs: typing.Any, size: typing.Any,
                  part: Part) -> Tower:
        """The `Tower` of a copy.

        Args:
          copied: the operations of the copy.
          inputs: the shard of the copy.
          size: examples in the shard.
          part: index, device and name scope of the copy.
        """
        first = self._tower

        def copies_in(nest: typing.Any) -> typing.Any:
            """The nest, with the copies of the tensors and operations in it."""
            return map_leaves(copied.leaf, nest)

        def copies_of_pairs(pairs: list) -> list:
            """The pairs, with the copies of the gradients."""
            return [(copies_in(gradient), variable) for gradient, variable in pairs]

        return first._replace(
            index=part.tower, micro_batch=part.micro_batch, device=part.device,
            name_scope=copied.name_scope, inputs=inputs, size=size,
            loss=copies_in(first.loss), data_loss=copies_in(first.data_loss),
            predictions=copies_in(first.predictions), metrics=copies_in(first.metrics),
            updates=copies_in(first.updates),
            gradients=map_shaped(copies_of_pairs, first.gradients),
            of_shard=map_shaped(copies_in, first.of_shard),
            forward=copied.names(first.forward), backward=copied.names(first.backward))


class _Copied:
    """The operations of one copy, which are found by the names of tower 0's operations.

    Attributes:
      name_scope: the scope of the copy, such as `'tower_1/'`.
    """

    def __init__(self, name_scope: str, operations: typing.Dict[str, tf.Operation],
                 substitution: Substitution):
        """
        Args:
          name_scope: the attribute.
          operations: {name of an operation of tower 0: its copy}.
          substitution: what the copy reads in the place of tower 0's inputs from outside.
        """
        self.name_scope = name_scope
        self._operations = operations
        self._substitution = substitution
        self._graph = tf.get_default_graph()

    def operation(self, name: str) -> tf.Operation:
        """The copy of the operation of tower 0 that has this name; for an operation from outside,
        its substitute."""
        if name in self._operations:
            return self._operations[name]
        return self._substitution.operation(self._graph.get_operation_by_name(name))

    def names(self, names: typing.Iterable[str]) -> typing.FrozenSet[str]:
        """Set of the names of copies.

        Args:
          names: names of operations of tower 0; an operation that was not copied is left out.
        """
        copied = [self._operations[name] for name in names if name in self._operations]
        return frozenset(names_of(copied))

    def leaf(self, leaf: typing.Any) -> typing.Any:
        """The copy of a tensor, an operation or a variable of tower 0; the `leaf` itself, if it was
        not copied.

        A variable is what `tf.assign` returns for a resource variable. It stands for the operation
        that assigns, so its copy is the copy of that operation.
        """
        op = operation_of(leaf)
        copy = self.operation(op.name)
        was_not_copied = copy is op
        if was_not_copied:
            return leaf
        if isinstance(leaf, (tf.Operation,) + compat.VARIABLE_TYPES):
            return copy
        tensor = copy.outputs[leaf.value_index]
        tensor.set_shape(leaf.shape)  # a shape that Python code has set is in no GraphDef
        return tensor
