"""Edits of finished graphs: the colocation of operations, and the functions that they call.

TensorFlow keeps the names of the operations that an operation is colocated with as `loc:@name` in
an attribute; an operation that is colocated with none is in a group of its own. Functions are
`Defun`s, loops and branches of control flow v2.
"""

import typing

import tensorflow.compat.v1 as tf

from towers import compat

_PREFIX = 'loc:@'


def group_of(op: tf.Operation) -> typing.List[str]:
    """The names of the operations that `op` is colocated with, or else its own: a list."""
    return [group.decode()[len(_PREFIX):] for group in op.colocation_groups()]


def names_beside(op: tf.Operation) -> typing.List[str]:
    """The names of the other operations that `op` is colocated with: a list."""
    return [name for name in group_of(op) if name != op.name]


def beside(op: tf.Operation) -> typing.List[tf.Operation]:
    """The other operations that `op` is colocated with: a list."""
    return [op.graph.get_operation_by_name(name) for name in names_beside(op)]


def is_free(op: tf.Operation) -> bool:
    """Whether an operation is colocated with no other one."""
    return not names_beside(op)


def colocate(op: tf.Operation, names: typing.Iterable[str]) -> None:
    """Colocates a finished operation with those of these names, and with no others."""
    groups = [(_PREFIX + name).encode() for name in names]
    compat.set_attribute(op, '_class', tf.AttrValue(list=tf.AttrValue.ListValue(s=groups)))


def group_in_node(node: tf.NodeDef) -> typing.List[str]:
    """The names that a `NodeDef` says; an empty list where it says none."""
    if '_class' not in node.attr:
        return []
    return [group.decode()[len(_PREFIX):] for group in node.attr['_class'].list.s
            if group.startswith(_PREFIX.encode())]


def set_group_in_node(node: tf.NodeDef, names: typing.Iterable[str]) -> None:
    """Writes into a `NodeDef` that it is colocated with the operations of these names."""
    node.attr['_class'].list.s[:] = [(_PREFIX + name).encode() for name in names]


_TOLD_APART_BY = ('frame_name', 'stack_name', 'tensor_array_name', '_XlaScope')
"""Attributes by which TensorFlow tells loops, stacks, arrays and XLA's clusters apart."""


def tell_apart(node: tf.NodeDef, scope: str) -> None:
    """Gives the loops, stacks, arrays and clusters of a `NodeDef` names of a name scope."""
    for name in _TOLD_APART_BY:
        if name in node.attr and node.attr[name].s:
            node.attr[name].s = scope.encode() + node.attr[name].s


def producer(text: str) -> str:
    """The operation that an input of a `NodeDef` comes from: of 'a:1' and of '^a' it is a."""
    return text.lstrip('^').split(':')[0]


# ---- functions ----------------------------------------------------------------------------------

class Library:
    """The functions that a graph has when one is first asked for, and those that are added here."""

    def __init__(self, graph: tf.Graph):
        """Looks at the functions of `graph` when one is first asked for."""
        self._graph = graph
        self._known: typing.Optional[dict] = None
        self._gradients: list = []

    def function(self, name: str) -> typing.Any:
        """The `FunctionDef` of that name, or None."""
        return self._functions().get(name)

    def called_by(self, node: tf.NodeDef) -> typing.List[str]:
        """The names of the functions that a `NodeDef` may call: a sorted list."""
        called = functions_of(node)
        return sorted(called & self._functions().keys()) if called else []

    def reached_from(self, nodes: typing.Iterable[tf.NodeDef]) -> dict:
        """{name: `FunctionDef`} of all that nodes call, themselves or through other functions, and
        of the gradients of these functions."""
        stack = self._called_by_any(nodes)
        found: dict = {}
        if not stack:
            return found  # and the graph is not looked at
        gradient_of = {each.function_name: each.gradient_func for each in self.gradients()}
        while stack:
            name = stack.pop()
            if name in found:
                continue
            found[name] = self.function(name)
            stack += self._called_by_any(found[name].node_def)
            if name in gradient_of:
                stack.append(gradient_of[name])
        return found

    def _called_by_any(self, nodes: typing.Iterable[tf.NodeDef]) -> typing.List[str]:
        """The names of the functions that some nodes may call."""
        names = []
        for node in nodes:
            names += self.called_by(node)
        return names

    def gradients(self) -> list:
        """The `GradientDef`s, which say which function is the gradient of another: a list."""
        self._functions()
        return self._gradients

    def add(self, functions: list) -> None:
        """Adds a list of `FunctionDef`s to the graph."""
        definition = tf.GraphDef()
        definition.versions.CopyFrom(self._graph.graph_def_versions)
        definition.library.function.extend(functions)
        with self._graph.as_default():
            tf.import_graph_def(definition, name='')
        self._functions().update((each.signature.name, each) for each in functions)

    def _functions(self) -> dict:
        """{name: `FunctionDef`} of the graph and of those that were added."""
        if self._known is None:
            library = self._graph.as_graph_def().library
            self._known = {each.signature.name: each for each in library.function}
            self._gradients = list(library.gradient)
        return self._known


def functions_of(node: tf.NodeDef) -> typing.Set[str]:
    """Names of functions that a `NodeDef` may call: those in its attributes; or the type of the
    operation, where TF knows no such type."""
    is_operation = hasattr(tf.raw_ops, node.op)
    names = set() if is_operation else {node.op}
    for value in node.attr.values():
        names.update(each.name for each in _in_attribute(value))
    return names


def copied_functions(functions: dict, suffix: str, change: typing.Callable
                     ) -> typing.Tuple[list, typing.Dict[str, str]]:
    """Copies functions together with all that they call.

    Args:
      functions: {name: `FunctionDef`}, with all functions that they call.
      suffix: of the names of the copies.
      change: function that is called with each `NodeDef` of a copy, to change it, and whether it
        takes an argument of its function that is a resource, or is colocated with one that does.

    Returns:
      The copies, `FunctionDef`s; and {name: name of its copy}.
    """
    names = {name: '%s__%s' % (name, suffix) for name in functions}
    copies = []
    for name in sorted(functions):
        copy = type(functions[name])()
        copy.CopyFrom(functions[name])
        copy.signature.name = names[name]
        names_beside_resources = _beside_resources(copy)
        names_inside = {node.name for node in copy.node_def}
        for node in copy.node_def:
            rename_functions(node, names)
            # A group of what the function does not have would be one for all copies.
            if not names_inside.issuperset(group_in_node(node)):
                del node.attr['_class']
            names_of_group = [node.name] + group_in_node(node)
            change(node, not names_beside_resources.isdisjoint(names_of_group))
        copies.append(copy)
    return copies, names


def _beside_resources(function: typing.Any) -> typing.Set[str]:
    """Names of the nodes of a `FunctionDef` that take an argument which is a resource, and of what
    these are colocated with."""
    resources = {argument.name for argument in function.signature.input_arg
                 if argument.type == tf.resource.as_datatype_enum}
    names = set()
    for node in function.node_def:
        if not resources.isdisjoint(node.input):
            names.update([node.name] + group_in_node(node))
    return names


def copy_functions(definition: tf.GraphDef, library: Library, suffix: str) -> None:
    """Makes the nodes of a `GraphDef` call copies of their functions, which are put into it.

    The gradient of a v2 loop adds a rewritten copy of the condition's function, named after the
    original. Two imports that call the same original, in a graph or (TF 2) in a process, would add
    two functions of one name.
    """
    functions = library.reached_from(definition.node)
    if not functions:
        return
    copies, names = copied_functions(functions, suffix, lambda node, is_of_resource: None)
    for node in definition.node:
        rename_functions(node, names)
    definition.library.function.extend(copies)
    for each in library.gradients():
        if each.function_name in names:
            definition.library.gradient.add(function_name=names[each.function_name],
                                            gradient_func=names[each.gradient_func])


def rename_functions(node: tf.NodeDef, names: typing.Dict[str, str]) -> None:
    """Makes a `NodeDef` call other functions; `names` is a dict from old to new ones."""
    node.op = names.get(node.op, node.op)
    for value in node.attr.values():
        for each in _in_attribute(value):
            each.name = names.get(each.name, each.name)


def call_others(op: tf.Operation, names: typing.Dict[str, str]) -> None:
    """Makes a finished operation call other functions, which its attributes name."""
    node = op.node_def
    rename_functions(node, names)
    for name, value in op.node_def.attr.items():
        if value != node.attr[name]:
            compat.set_attribute(op, name, node.attr[name])


def _in_attribute(value: tf.AttrValue) -> typing.Iterable:
    """The functions that an attribute names, as `NameAttrList`s."""
    kind = value.WhichOneof('value')
    if kind == 'func':
        return [value.func]
    if kind == 'list':
        return value.list.func
    return []
