"""Edits of finished graphs: the colocation of operations, and the functions that they call.

TensorFlow keeps the names of the operations that an operation is colocated with as `loc:@name` in
an attribute; an operation that is colocated with none is in a group of its own. Functions are
`Defun`s, loops and branches of control flow v2.
"""

import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.graph.graph_walk import names_of, operations_named

_PREFIX = 'loc:@'


def colocation_group(op: tf.Operation) -> typing.List[str]:
    """List of the names of the operations that `op` is colocated with; its own name if with none.
    """
    return [group.decode()[len(_PREFIX):] for group in op.colocation_groups()]


def colocated_names(op: tf.Operation) -> typing.List[str]:
    """List of the names of the other operations that `op` is colocated with."""
    return [name for name in colocation_group(op) if name != op.name]


def colocated_operations(op: tf.Operation) -> typing.List[tf.Operation]:
    """List of the other operations that `op` is colocated with."""
    return operations_named(op.graph, colocated_names(op))


def is_uncolocated(op: tf.Operation) -> bool:
    """Whether an operation is colocated with no other one."""
    return not colocated_names(op)


def colocate(op: tf.Operation, names: typing.Iterable[str]) -> None:
    """Colocates a finished operation with the operations of these names, and with no others.

    An operation that is only colocated with its own name is free to be anywhere.
    """
    groups = [(_PREFIX + name).encode() for name in names]
    compat.set_attribute(op, '_class', tf.AttrValue(list=tf.AttrValue.ListValue(s=groups)))


def colocation_group_of_node(node: tf.NodeDef) -> typing.List[str]:
    """List of the names of the operations that a node of a `GraphDef` is to be colocated with; []
    if it does not name any, not even its own."""
    if '_class' not in node.attr:
        return []
    entries = [entry.decode() for entry in node.attr['_class'].list.s]
    return [entry[len(_PREFIX):] for entry in entries if entry.startswith(_PREFIX)]


def set_colocation_group(node: tf.NodeDef, names: typing.Iterable[str]) -> None:
    """Changes a node of a `GraphDef` to be colocated with the operations of these names."""
    node.attr['_class'].list.s[:] = [(_PREFIX + name).encode() for name in names]


_RUNTIME_NAMES = ('frame_name', 'stack_name', 'tensor_array_name', '_XlaScope')
"""Attributes with names by which the runtime tells loops, stacks, arrays and XLA's clusters apart.
"""


def make_names_unique(node: tf.NodeDef, scope: str) -> None:
    """Puts a name scope before the names of loops, stacks, arrays and clusters in a node's
    attributes, so that a copied loop does not share them with the original.

    Args:
      node: the node, which is changed.
      scope: the name scope, with a slash at its end.
    """
    for name in _RUNTIME_NAMES:
        if name in node.attr and node.attr[name].s:
            node.attr[name].s = scope.encode() + node.attr[name].s


def producer_name(text: str) -> str:
    """The name of the operation that an input of a `NodeDef` comes from: `'a'` for `'a:1'`, and for
    the control input `'^a'`."""
    return text.lstrip('^').split(':')[0]


# ---- functions ----------------------------------------------------------------------------------

class Library:
    """The functions of a graph: all that it has when this is first asked for one, and what `add`
    adds. A function that is added in another way later is not known."""

    def __init__(self, graph: tf.Graph):
        """`graph` is read only when a function is asked for, since to export it takes long."""
        self._graph = graph
        self._known: typing.Optional[dict] = None
        self._gradients: list = []

    def function(self, name: str) -> typing.Any:
        """The `FunctionDef` of that name, or None."""
        return self._functions().get(name)

    def called_by(self, node: tf.NodeDef) -> typing.List[str]:
        """Sorted list of the names of the graph's functions that a node may call."""
        called = functions_of(node)
        if not called:
            return []  # before `_functions`, which may have to export the graph
        return sorted(called & self._functions().keys())

    def reached_from(self, nodes: typing.Iterable[tf.NodeDef]) -> dict:
        """{name: `FunctionDef`} of all functions that nodes call, themselves or through other
        functions, and of the gradients of these functions."""
        to_visit = self._called_by_any(nodes)
        found: dict = {}
        if not to_visit:
            return found  # before `gradients`, which may have to export the graph
        gradient_of = {each.function_name: each.gradient_func for each in self.gradients()}
        while to_visit:
            name = to_visit.pop()
            if name in found:
                continue
            found[name] = self.function(name)
            to_visit += self._called_by_any(found[name].node_def)
            if name in gradient_of:
                to_visit.append(gradient_of[name])
        return found

    def _called_by_any(self, nodes: typing.Iterable[tf.NodeDef]) -> typing.List[str]:
        """List of the names of the functions that any of some nodes may call."""
        names = []
        for node in nodes:
            names += self.called_by(node)
        return names

    def gradients(self) -> list:
        """List of `GradientDef`s, each of which names a function and the function of its gradient.
        """
        self._functions()  # which reads the gradients, too
        return self._gradients

    def add(self, functions: list) -> None:
        """Adds a list of `FunctionDef`s to the graph."""
        definition = tf.GraphDef()
        definition.versions.CopyFrom(self._graph.graph_def_versions)
        definition.library.function.extend(functions)
        with self._graph.as_default():
            tf.import_graph_def(definition, name='')  # adds the functions, and no operation
        self._functions().update((each.signature.name, each) for each in functions)

    def _functions(self) -> dict:
        """{name: `FunctionDef`} of the graph's functions and of those that were added."""
        if self._known is None:
            library = self._graph.as_graph_def().library
            self._known = {each.signature.name: each for each in library.function}
            self._gradients = list(library.gradient)
        return self._known


def functions_of(node: tf.NodeDef) -> typing.Set[str]:
    """Set of the names of the functions that a node may call.

    These are the functions in its attributes, such as the branches of an `If`. A call of a `Defun`
    has the function's name as the type of its operation, a type that TensorFlow does not know.
    """
    is_operation = hasattr(tf.raw_ops, node.op)
    names = set() if is_operation else {node.op}
    for value in node.attr.values():
        names.update(each.name for each in _in_attribute(value))
    return names


class CopiedFunctions(typing.NamedTuple):
    """Copies of functions, which call each other."""
    copies: list  # the `FunctionDef`s
    names: typing.Dict[str, str]  # {name of a function: name of its copy}


def copied_functions(functions: dict, suffix: str,
                     change: typing.Optional[typing.Callable] = None) -> CopiedFunctions:
    """Copies functions together with all that they call.

    Args:
      functions: {name: `FunctionDef`}, with all functions that they call.
      suffix: what the copies' names end with: `'f'` becomes `'f__<suffix>'`.
      change: function `(node, is_beside_resource)` that may change the node of a copy; or None. The
        second argument says whether the node takes a resource that is an argument of its function,
        or is colocated with a node that does: then it has to stay on the resource's device.
    """
    names = {name: '%s__%s' % (name, suffix) for name in functions}
    copies = []
    for name in sorted(functions):
        copy = type(functions[name])()
        copy.CopyFrom(functions[name])
        copy.signature.name = names[name]
        names_beside_resources = _beside_resources(copy)
        _keep_colocations_inside(copy)
        for node in copy.node_def:
            rename_functions(node, names)
            if change is not None:
                group = [node.name] + colocation_group_of_node(node)
                is_beside_resource = not names_beside_resources.isdisjoint(group)
                change(node, is_beside_resource)
        copies.append(copy)
    return CopiedFunctions(copies, names)


def _keep_colocations_inside(function: typing.Any) -> None:
    """Removes the colocations of a `FunctionDef`'s nodes with operations outside of it, whose names
    the copies of the function have in common: they would all be put on one device."""
    names_inside = names_of(function.node_def)
    for node in function.node_def:
        if not names_inside.issuperset(colocation_group_of_node(node)):
            del node.attr['_class']


def _beside_resources(function: typing.Any) -> typing.Set[str]:
    """Set of the names of the nodes that run on the device of a resource: those of a `FunctionDef`
    that take an argument which is a resource, and the nodes that these are colocated with."""
    resources = {argument.name for argument in function.signature.input_arg
                 if argument.type == tf.resource.as_datatype_enum}
    names = set()
    for node in function.node_def:
        takes_resource = not resources.isdisjoint(node.input)  # an argument's name is the input's
        if takes_resource:
            names.update([node.name] + colocation_group_of_node(node))
    return names


def copy_functions(definition: tf.GraphDef, library: Library, suffix: str) -> None:
    """Makes the nodes of a `GraphDef` call copies of their functions, which are added to it.

    Needed for loops of control flow v2: their gradient adds a changed copy of the condition's
    function, which is named after the original. So two imports that called the same original, in a
    graph or (TF 2) in a process, would add two functions of one name.

    Args:
      definition: the nodes, which are changed.
      library: the functions of the graph that they come from.
      suffix: what the copies' names end with.
    """
    functions = library.reached_from(definition.node)
    if not functions:
        return
    copied = copied_functions(functions, suffix)
    new_names = copied.names
    for node in definition.node:
        rename_functions(node, new_names)
    definition.library.function.extend(copied.copies)
    # The copy of a function with a gradient of its own (`Defun(grad_func=)`) gets the copy of that.
    for own_gradient in library.gradients():
        if own_gradient.function_name in new_names:
            definition.library.gradient.add(
                function_name=new_names[own_gradient.function_name],
                gradient_func=new_names[own_gradient.gradient_func])


def rename_functions(node: tf.NodeDef, names: typing.Dict[str, str]) -> None:
    """Makes a node call other functions; `names` is {old name: new name}."""
    node.op = names.get(node.op, node.op)
    for value in node.attr.values():
        for each in _in_attribute(value):
            each.name = names.get(each.name, each.name)


def call_others(op: tf.Operation, names: typing.Dict[str, str]) -> None:
    """Makes a finished operation call other functions; `names` is {old name: new name}."""
    renamed = op.node_def  # a copy of the operation's definition
    rename_functions(renamed, names)
    for name, value in op.node_def.attr.items():
        if value != renamed.attr[name]:
            compat.set_attribute(op, name, renamed.attr[name])


def _in_attribute(value: tf.AttrValue) -> typing.Iterable:
    """The `NameAttrList`s of the functions that an attribute's value names; often none."""
    kind = value.WhichOneof('value')
    if kind == 'func':
        return [value.func]
    if kind == 'list':
        return value.list.func
    return []
