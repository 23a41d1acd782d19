"""Imports finished operations once more into their graph, with loops and branches.

    op                       ->  scope/op         with its attributes, device and functions
    an input from outside    ->  its substitute, or itself
    a loop or branch (v1)    ->  a new one, as `tf.train.import_meta_graph` makes it

The imports can be differentiated: `tf.gradients` finds the loops and branches that they are in.
"""

import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.graph.edit import (
    Library,
    colocate,
    copy_functions,
    group_in_node,
    producer,
    set_group_in_node,
    tell_apart,
)
from towers.graph.graph_walk import names_of


class Imported:
    """Operations that were imported once more.

    Attributes:
      operations: dict from the name of an original operation to its import.
      scope: the name scope of the imports, with a slash at its end.
    """

    def __init__(self, operations: typing.Dict[str, tf.Operation],
                 substitutes: typing.Dict[str, tf.Tensor], scope: str):
        """`substitutes` are tensors by the name of the original in whose place they are taken."""
        self.operations = operations
        self.scope = scope
        self._substitutes = substitutes
        self._substituted_operations = {
            name.split(':')[0]: tensor.op for name, tensor in substitutes.items()}

    def has(self, name: str) -> bool:
        """Whether the tensor of this name, an original one, was imported."""
        return producer(name) in self.operations

    def operation(self, op: tf.Operation) -> tf.Operation:
        """The import of an operation, its substitute, or itself."""
        if op.name in self.operations:
            return self.operations[op.name]
        return self._substituted_operations.get(op.name, op)

    def tensor(self, tensor: tf.Tensor) -> tf.Tensor:
        """The import of a tensor, its substitute, or itself."""
        if tensor.name in self._substitutes:
            return self._substitutes[tensor.name]
        if tensor.op.name in self.operations:
            return self.operations[tensor.op.name].outputs[tensor.value_index]
        return tensor

    def leaf(self, leaf: typing.Any) -> typing.Any:
        """The import of a tensor or operation; of a variable, as by `tf.assign`, its operation."""
        if isinstance(leaf, tf.Operation):
            return self.operation(leaf)
        if isinstance(leaf, tf.Tensor):
            return self.tensor(leaf)
        return self.operations.get(leaf.op.name, leaf)

    def redirect(self, operations: typing.Iterable[tf.Operation]) -> None:
        """Makes operations that take an original tensor take its import.

        The gradient function of a `tf.custom_gradient` is a closure: the gradient of an import is
        computed with the original's tensors.
        """
        for op in operations:
            for position, tensor in enumerate(op.inputs):
                instead = self.tensor(tensor)
                if instead is not tensor:
                    compat.replace_input(op, position, instead)
            waits_for = list(op.control_inputs)
            instead = [self.operation(each) for each in waits_for]
            if instead != waits_for:
                compat.set_control_inputs(op, instead)


def import_again(operations: typing.Sequence[tf.Operation],
                 substitutes: typing.Dict[str, tf.Tensor], scope: str,
                 change: typing.Optional[typing.Callable] = None) -> Imported:
    """Imports operations of the default graph, on the devices of the `tf.device` scopes around.

    Args:
      operations: in the order in which they were made.
      substitutes: dict from the name of a tensor to the tensor that imports take in its place.
      scope: full name of a name scope that has no operation yet, with a slash at its end.
      change: function of an operation and of the `NodeDef` of its import, which it changes; or
        None.
    """
    graph = tf.get_default_graph()
    names = names_of(operations)
    definition = tf.GraphDef()
    from_outside = {}
    definition.versions.CopyFrom(graph.graph_def_versions)
    for op in operations:
        node = definition.node.add()
        node.CopyFrom(op.node_def)
        tell_apart(node, scope)
        if change is not None:
            change(op, node)
        if group_in_node(node):
            # With itself for now: in a group an operation takes no device of the scopes around.
            set_group_in_node(node, [op.name])
        del node.input[:]
        for tensor in op.inputs:
            if tensor.op.name in names and tensor.name not in substitutes:
                node.input.append(tensor.name)
            else:
                key = '__outside__/%s' % tensor.name
                from_outside[key] = substitutes.get(tensor.name, tensor)
                node.input.append(key)
        for other in op.control_inputs:
            if other.name in names:
                node.input.append('^' + other.name)
    suffix = graph.unique_name(scope + 'functions', mark_as_used=False).replace('/', '_')
    copy_functions(definition, Library(graph), suffix)
    tf.import_graph_def(definition, from_outside, name=scope)
    imported = Imported(
        {name: graph.get_operation_by_name(scope + name) for name in names}, substitutes, scope)
    for op in operations:
        _finish(op, imported)
    _restore_contexts(operations, imported)
    return imported


def _finish(op: tf.Operation, imported: Imported) -> None:
    """Gives the import of an operation what `tf.import_graph_def` does not take."""
    new = imported.operations[op.name]
    waits_for = [imported.operation(other) for other in op.control_inputs
                 if other.name not in imported.operations]
    if waits_for:
        compat.add_control_inputs(new, waits_for)
    group = group_in_node(op.node_def)
    if group:
        leaders = [imported.operation(op.graph.get_operation_by_name(name)) for name in group]
        colocate(new, [leader.name for leader in leaders])
        compat.set_device(new, leaders[0].device)
    for name, value in compat.attributes_of_scopes(new).items():
        compat.set_attribute(new, name, value)
    compat.restore_function_graphs(new)
    if not op.graph.is_fetchable(op):  # in a loop or branch
        op.graph.prevent_fetching(new)


# ---- loops and branches of control flow v1 -------------------------------------------------------

_NAMES_OF_TENSORS = ('pred_name', 'pivot_name', 'pivot_for_pred_name', 'pivot_for_body_name',
                     'maximum_iterations_name')
"""Fields of the definition of a branch, `CondContextDef`, or of a loop, `WhileContextDef`."""


def defining_operations(context: typing.Any) -> typing.List[tf.Operation]:
    """The operations that a loop or branch needs to be whole, such as its condition: a list.

    All results of a loop are among them, since a loop can be differentiated as a whole only.
    """
    definition = context.to_proto()
    graph = tf.get_default_graph()
    names = [getattr(definition, field, '') for field in _NAMES_OF_TENSORS]
    names += getattr(definition, 'loop_exit_names', ())
    return [graph.get_operation_by_name(producer(name)) for name in names if name]


def _restore_contexts(operations: typing.Iterable[tf.Operation], imported: Imported) -> None:
    """Makes a loop or branch for each one that the original operations are in."""
    outermost = {}
    for op in operations:
        contexts = compat.contexts_around(op)  # from the inside
        if contexts:
            outermost[contexts[-1].name] = contexts[-1]
    for context in outermost.values():
        definition = context.to_proto()
        _put_names_of_imports(definition, imported)
        compat.restore_context(context, definition)


def _put_names_of_imports(definition: typing.Any, imported: Imported) -> None:
    """Puts the names of imports into the definition of a loop or branch, and of those within it.

    What was not imported, since nothing needs it, is left out.

    Args:
      definition: `CondContextDef` or `WhileContextDef`, which is changed.
      imported: the imports.
    """
    graph = tf.get_default_graph()
    for field in _NAMES_OF_TENSORS:
        name = getattr(definition, field, '')
        if name:
            setattr(definition, field, _new_name(name, imported))
    if hasattr(definition, 'loop_enter_names'):
        for names in (definition.loop_enter_names, definition.loop_exit_names):
            names[:] = [_new_name(name, imported) for name in names]
        enter = graph.get_tensor_by_name(definition.loop_enter_names[0]).op
        # The gradient of a loop is in the frame of this name.
        definition.context_name = enter.get_attr('frame_name').decode()
    else:
        definition.context_name = imported.scope + definition.context_name
    _put_names_into_values(definition.values_def, imported)
    for place in reversed(range(len(definition.nested_contexts))):
        one_of = definition.nested_contexts[place]
        nested = getattr(one_of, one_of.WhichOneof('ctxt'))
        if imported.has(nested.pivot_name):
            _put_names_of_imports(nested, imported)
        else:
            del definition.nested_contexts[place]


def _put_names_into_values(values: typing.Any, imported: Imported) -> None:
    """Puts the names of imports into a `ValuesDef`: the tensors that a loop or branch takes from
    outside, each with the one that stands for it inside."""
    from_outside = {outside: inside for outside, inside in values.external_values.items()
                    if imported.has(inside)}
    kept = [name for name in values.values if imported.has(name) or name in from_outside]
    values.values[:] = [_new_name(name, imported) for name in kept]
    values.external_values.clear()
    for outside, inside in from_outside.items():
        values.external_values[_new_name(outside, imported)] = _new_name(inside, imported)


def _new_name(name: str, imported: Imported) -> str:
    """The name of the import of a tensor."""
    return imported.tensor(tf.get_default_graph().get_tensor_by_name(name)).name
