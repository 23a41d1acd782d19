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
    colocation_group_of_node,
    copy_functions,
    make_names_unique,
    producer_name,
)
from towers.graph.graph_walk import names_of, operations_named, with_names, without_names


class Imported:
    """Operations that were imported once more, and what they take from outside.

    Attributes:
      operations: {name of an original operation: its import}.
      scope: the name scope of the imports, with a slash at its end.
    """

    def __init__(self, operations: typing.Dict[str, tf.Operation],
                 substitutes: typing.Dict[str, tf.Tensor], scope: str):
        """
        Args:
          operations, scope: as the attributes.
          substitutes: {name of an original tensor: the tensor that imports take in its place}.
        """
        self.operations = operations
        self.scope = scope
        self._substitutes = substitutes
        # {name of the operation that makes an original tensor: the operation that makes the
        # tensor's substitute}. Where an original waits for the first, its import waits for the
        # second.
        self._awaited_instead = {
            producer_name(name): tensor.op for name, tensor in substitutes.items()}

    def has(self, name: str) -> bool:
        """Whether the original tensor of this name was imported."""
        return producer_name(name) in self.operations

    def operation(self, op: tf.Operation) -> tf.Operation:
        """What imports wait for where the originals wait for `op`: its import; else the operation
        that makes the substitute of its result; else, without a substitute, `op` itself."""
        if op.name in self.operations:
            return self.operations[op.name]
        return self._awaited_instead.get(op.name, op)

    def tensor(self, tensor: tf.Tensor) -> tf.Tensor:
        """What imports take where the originals take `tensor`: its substitute, if it has one; else
        its import; else, if it is not imported, the tensor itself."""
        if tensor.name in self._substitutes:
            return self._substitutes[tensor.name]
        if tensor.op.name in self.operations:
            return self.operations[tensor.op.name].outputs[tensor.value_index]
        return tensor

    def leaf(self, leaf: typing.Any) -> typing.Any:
        """What stands for a leaf of the model's outputs in the imports.

        Args:
          leaf: an operation, a tensor, or an object of the type of a variable.

        Returns:
          For an operation or a tensor, what `operation` or `tensor` returns. A variable is not
          imported, and stands for itself. What `tf.assign` returns for a resource variable is also
          an object of the type of a variable: its `op` is the assignment, whose import stands for
          it.
        """
        if isinstance(leaf, tf.Operation):
            return self.operation(leaf)
        if isinstance(leaf, tf.Tensor):
            return self.tensor(leaf)
        return self.operations.get(leaf.op.name, leaf)

    def redirect(self, operations: typing.Iterable[tf.Operation]) -> None:
        """Makes operations that take an original tensor, or wait for an original operation, take
        and wait for its import.

        Needed for the gradient of an import: the gradient function of a `tf.custom_gradient` is a
        closure, which computes with the original's tensors.
        """
        for op in operations:
            for position, tensor in enumerate(op.inputs):
                imported_tensor = self.tensor(tensor)
                if imported_tensor is not tensor:
                    compat.replace_input(op, position, imported_tensor)
            awaited = list(op.control_inputs)
            imported_awaited = list(map(self.operation, awaited))
            if imported_awaited != awaited:
                compat.set_control_inputs(op, imported_awaited)


def import_again(operations: typing.Sequence[tf.Operation],
                 substitutes: typing.Dict[str, tf.Tensor], scope: str,
                 change: typing.Optional[typing.Callable] = None) -> Imported:
    """Imports operations of the default graph into it once more. What the device of an operation
    leaves open is filled in by the open `tf.device` scopes, as in any import of TensorFlow.

    Args:
      operations: the operations to import, in the order in which they were made.
      substitutes: {name of a tensor: the tensor that imports take in its place}.
      scope: full name of a name scope that has no operation yet, with a slash at its end.
      change: function `(operation, node)` that may change the `NodeDef` of the import; or None.

    Returns:
      `Imported`, by which the import of each operation and tensor is found.
    """
    graph = tf.get_default_graph()
    names = names_of(operations)
    definition = tf.GraphDef()
    definition.versions.CopyFrom(graph.graph_def_versions)
    from_outside: typing.Dict[str, tf.Tensor] = {}
    for op in operations:
        node = definition.node.add()
        _set_node(node, op, scope)
        if change is not None:
            change(op, node)
        _set_inputs(node, op, names, substitutes, from_outside)
    # Copies of functions are named after the scope, which no other import has. A function's name
    # can have no slash.
    suffix = graph.unique_name(scope + 'functions', mark_as_used=False).replace('/', '_')
    copy_functions(definition, Library(graph), suffix)
    tf.import_graph_def(definition, from_outside, name=scope)
    imports = {name: graph.get_operation_by_name(scope + name) for name in names}
    imported = Imported(imports, substitutes, scope)
    for op in operations:
        _wait_for_outside(op, imported)
        _colocate_import(op, imported)
        _add_what_python_adds(op, imported)
    _restore_contexts(operations, imported)
    return imported


def _set_node(node: tf.NodeDef, op: tf.Operation, scope: str) -> None:
    """Makes a node the import of `op` into a name scope; `_set_inputs` writes its inputs."""
    node.CopyFrom(op.node_def)
    make_names_unique(node, scope)
    if colocation_group_of_node(node):
        # `tf.import_graph_def` takes no leader from outside of what it imports. So
        # `_colocate_import` names the leaders, after the import.
        del node.attr['_class']


def _set_inputs(node: tf.NodeDef, op: tf.Operation, names: typing.Container[str],
                substitutes: typing.Dict[str, tf.Tensor],
                from_outside: typing.Dict[str, tf.Tensor]) -> None:
    """Writes the inputs of an import into its node.

    Args:
      node: the node of the import, which is changed.
      op: the original operation.
      names: names of all operations that are imported.
      substitutes: {name of a tensor: the tensor that imports take in its place}.
      from_outside: {key: tensor} of what the nodes take from outside, as the `input_map` of
        `tf.import_graph_def`; it is added to.
    """
    del node.input[:]
    for tensor in op.inputs:
        is_from_outside = tensor.op.name not in names or tensor.name in substitutes
        if is_from_outside:
            # The prefix makes a key that is the name of no imported tensor: where the first output
            # of an operation has a substitute, nodes may still take the second one's import.
            key = '__outside__/%s' % tensor.name
            from_outside[key] = substitutes.get(tensor.name, tensor)
            node.input.append(key)
        else:
            node.input.append(tensor.name)
    for awaited in with_names(op.control_inputs, names):  # `_wait_for_outside` adds other waits
        node.input.append('^' + awaited.name)


def _wait_for_outside(op: tf.Operation, imported: Imported) -> None:
    """Makes the import of `op` wait for the operations that `op` waits for and that are not
    imported, or for their substitutes: `tf.import_graph_def` knows only waits for imports."""
    awaited_outside = without_names(op.control_inputs, imported.operations)
    new = imported.operations[op.name]
    compat.add_control_inputs(new, list(map(imported.operation, awaited_outside)))


def _colocate_import(op: tf.Operation, imported: Imported) -> None:
    """Colocates the import of `op` with the imports of its leaders, and puts it on their device;
    does nothing if `op` has no leaders."""
    group = colocation_group_of_node(op.node_def)
    if not group:
        return
    new = imported.operations[op.name]
    leaders = list(map(imported.operation, operations_named(op.graph, group)))
    colocate(new, leaders)
    compat.set_device(new, leaders[0].device)


def _add_what_python_adds(op: tf.Operation, imported: Imported) -> None:
    """Gives the import of `op` what TensorFlow's Python code gives operations that it makes, and
    `tf.import_graph_def` does not: attributes of the open scopes, the gradients and the Python
    graphs of functions, and the mark of operations that cannot be fetched."""
    new = imported.operations[op.name]
    for name, value in compat.attributes_of_scopes(new).items():
        compat.set_attribute(new, name, value)
    compat.hand_on_gradient(op, new)
    compat.restore_function_graphs(new)  # with which `tf.gradients` differentiates an `If`, `While`
    if not op.graph.is_fetchable(op):  # in a loop or branch
        op.graph.prevent_fetching(new)


# ---- loops and branches of control flow v1 -------------------------------------------------------

_NAMES_OF_TENSORS = ('pred_name', 'pivot_name', 'pivot_for_pred_name', 'pivot_for_body_name',
                     'maximum_iterations_name')
"""Fields of the definition of a branch, `CondContextDef`, or of a loop, `WhileContextDef`."""


def defining_operations(context: typing.Any) -> typing.List[tf.Operation]:
    """List of the operations that the import of a loop or branch (v1) needs, such as its condition.

    All results of a loop are among them, since only a whole loop can be differentiated.

    Args:
      context: TensorFlow's object for the loop or branch.
    """
    definition = context.to_proto()
    graph = tf.get_default_graph()
    names = []
    for field in _NAMES_OF_TENSORS:
        name = getattr(definition, field, '')  # a loop does not have the fields of a branch
        if name:  # '' is in a field that is not set
            names.append(name)
    names += getattr(definition, 'loop_exit_names', ())  # a branch has none
    return operations_named(graph, map(producer_name, names))


def _restore_contexts(operations: typing.Iterable[tf.Operation], imported: Imported) -> None:
    """Makes the Python objects by which TensorFlow differentiates loops and branches: one for each
    loop or branch that the original operations are in.

    TensorFlow makes an object from a definition, and with it the objects of the loops and branches
    within. So only the objects of the outermost loops and branches are made here.
    """
    outermost_contexts = {}  # by name
    for op in operations:
        contexts = compat.contexts_around(op)  # from the inside
        if contexts:
            outermost = contexts[-1]
            outermost_contexts[outermost.name] = outermost
    for context in outermost_contexts.values():
        definition = context.to_proto()
        _put_names_of_imports(definition, imported)
        compat.restore_context(context, definition)
    for op in operations:
        context = compat.control_flow_context(op)
        if context is not None:
            # A definition names the tensors in a loop or branch. So TensorFlow does not find the
            # operations without results, such as a write of a resource variable.
            pivot = imported.tensor(context.pivot)
            compat.set_control_flow_context(
                imported.operations[op.name], compat.control_flow_context(pivot.op))


def _put_names_of_imports(definition: typing.Any, imported: Imported) -> None:
    """Replaces the names of originals by the names of imports in the definition of a loop or
    branch, and in the definitions of the loops and branches within it.

    Operations that were not imported, since nothing needs them, are left out of the definition; so
    are loops and branches within it that were not imported.

    Args:
      definition: `CondContextDef` or `WhileContextDef`, which is changed.
      imported: the imports.
    """
    for field in _NAMES_OF_TENSORS:
        name = getattr(definition, field, '')
        if name:
            setattr(definition, field, _new_name(name, imported))
    is_loop = hasattr(definition, 'loop_enter_names')
    if is_loop:
        _put_names_of_ends(definition, imported)  # and puts the name of the loop's context
    else:
        definition.context_name = imported.scope + definition.context_name
    _put_names_into_values(definition.values_def, imported)
    last_first = reversed(range(len(definition.nested_contexts)))  # since some are deleted
    for index in last_first:
        # `ControlFlowContextDef` has one field for a loop and one for a branch: one of them is set.
        loop_or_branch = definition.nested_contexts[index]
        nested = getattr(loop_or_branch, loop_or_branch.WhichOneof('ctxt'))
        is_imported = imported.has(nested.pivot_name)  # each loop or branch has a pivot
        if is_imported:
            _put_names_of_imports(nested, imported)
        else:
            del definition.nested_contexts[index]


def _put_names_of_ends(definition: typing.Any, imported: Imported) -> None:
    """Replaces, in a `WhileContextDef`, the names of the tensors that enter and leave the loop, and
    the name of its frame, by the names that the imports have."""
    for names in (definition.loop_enter_names, definition.loop_exit_names):
        names[:] = [_new_name(name, imported) for name in names]
    # A loop's context has the name of its frame, by which TensorFlow makes the loop's gradient.
    # Each `Enter` of the imported loop has it, see `make_names_unique`.
    graph = tf.get_default_graph()
    enter = graph.get_tensor_by_name(definition.loop_enter_names[0]).op
    definition.context_name = enter.get_attr('frame_name').decode()


def _put_names_into_values(values: typing.Any, imported: Imported) -> None:
    """Replaces the names of originals by the names of imports in the values of a loop or branch.

    Args:
      values: `ValuesDef`, which is changed. Its `external_values` are {name of a tensor outside:
        name of the tensor that stands for it inside}. Its `values` are the names of all tensors
        that the loop or branch knows: tensors inside, and those tensors outside.
      imported: the imports.
    """
    inside_by_outside = dict(values.external_values)
    values.external_values.clear()
    names_outside = set()  # of what the imported loop or branch takes from outside
    for outside, inside in inside_by_outside.items():
        if imported.has(inside):
            values.external_values[_new_name(outside, imported)] = _new_name(inside, imported)
            names_outside.add(outside)
    known_names = list(values.values)
    del values.values[:]
    for name in known_names:
        if imported.has(name) or name in names_outside:  # else nothing needs it in the import
            values.values.append(_new_name(name, imported))


def _new_name(name: str, imported: Imported) -> str:
    """The name of the import of the original tensor of this name."""
    original = tf.get_default_graph().get_tensor_by_name(name)
    return imported.tensor(original).name
