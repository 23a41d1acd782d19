"""Edits of finished graphs: the colocation of operations, and the functions that they call.

TensorFlow keeps the names of the operations that an operation is colocated with as `loc:@name` in
an attribute; an operation that is colocated with none is in a group of its own. Functions are
`Defun`s, loops and branches of control flow v2.
"""

import copy
import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.graph.graph_walk import names_of, operations_named

_PREFIX = 'loc:@'


def _names_in(entries: typing.Iterable[bytes]) -> typing.List[str]:
    """List of the names in entries `b'loc:@name'`. Other entries, which a program may write into
    the same attribute, are left out."""
    names = []
    for entry in entries:
        text = entry.decode()
        if text.startswith(_PREFIX):
            names.append(text[len(_PREFIX):])
    return names


def colocation_group(op: tf.Operation) -> typing.List[str]:
    """List of the names of the operations that `op` is colocated with; if there are none, its own
    name."""
    return _names_in(op.colocation_groups())


def colocated_names(op: tf.Operation) -> typing.List[str]:
    """List of the names of the other operations that `op` is colocated with."""
    return [name for name in colocation_group(op) if name != op.name]


def colocated_operations(op: tf.Operation) -> typing.List[tf.Operation]:
    """List of the other operations that `op` is colocated with."""
    return operations_named(op.graph, colocated_names(op))


def is_colocated(op: tf.Operation) -> bool:
    """Whether an operation is colocated with any other one."""
    return bool(colocated_names(op))


def colocate(op: tf.Operation, leaders: typing.Iterable[tf.Operation]) -> None:
    """Colocates a finished operation with these operations, and with no others.

    An operation that is only colocated with itself is free to be anywhere.
    """
    entries = [(_PREFIX + leader.name).encode() for leader in leaders]
    compat.set_attribute(op, '_class', tf.AttrValue(list=tf.AttrValue.ListValue(s=entries)))


def colocation_group_of_node(node: tf.NodeDef) -> typing.List[str]:
    """List of the names of the operations that a node of a `GraphDef` is to be colocated with; []
    if the node names no operation, not even itself."""
    if '_class' not in node.attr:  # to read a missing attribute would make it
        return []
    return _names_in(node.attr['_class'].list.s)


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
        if name not in node.attr:  # to read a missing attribute would make it
            continue
        runtime_name = node.attr[name].s
        if runtime_name:  # for an empty one the runtime chooses a name of its own
            node.attr[name].s = scope.encode() + runtime_name


def producer_name(text: str) -> str:
    """The name of the operation that an input of a `NodeDef` comes from: `'a'` for `'a:1'`, and for
    the control input `'^a'`."""
    return text.lstrip('^').split(':')[0]


# ---- functions ----------------------------------------------------------------------------------

class Library:
    """The functions of a graph: the functions that the graph has when one is first asked for, and
    those that `add` adds. A function that is added later in another way is not known."""

    def __init__(self, graph: tf.Graph):
        """`graph` is read only when a function is asked for, since to export it takes long."""
        self._graph = graph
        self._known: typing.Optional[dict] = None
        self._gradients: typing.Dict[str, str] = {}

    def function(self, name: str) -> typing.Any:
        """The `FunctionDef` of that name, or None."""
        return self._functions().get(name)

    def called_by(self, node: tf.NodeDef) -> typing.List[str]:
        """Sorted list of the names of the graph's functions that a node may call."""
        names = functions_of(node)
        if not names:
            return []  # before `_functions`, which may have to export the graph
        # `names` may also have the type of an operation of `tf.load_op_library`, which is no
        # function.
        return sorted(names & self._functions().keys())

    def reached_from(self, nodes: typing.Iterable[tf.NodeDef]) -> dict:
        """{name: `FunctionDef`} of all functions that nodes call, directly or through other
        functions, and of the functions that compute the gradients of these functions."""
        to_visit = self._called_by_any(nodes)
        found: dict = {}
        if not to_visit:
            return found  # before `gradients`, which may have to export the graph
        gradients = self.gradients()
        while to_visit:
            name = to_visit.pop()
            if name in found:
                continue
            found[name] = self.function(name)
            to_visit += self._called_by_any(found[name].node_def)
            if name in gradients:
                to_visit.append(gradients[name])
        return found

    def _called_by_any(self, nodes: typing.Iterable[tf.NodeDef]) -> typing.List[str]:
        """List of the names of the functions that any of some nodes may call."""
        names = []
        for node in nodes:
            names += self.called_by(node)
        return names

    def gradients(self) -> typing.Dict[str, str]:
        """{name of a function: name of the function that computes its gradient}, for the functions
        for which the program has given one (`Defun(grad_func=)`)."""
        self._functions()  # which also reads the gradients
        return self._gradients

    def give_gradients(self, copies: typing.Any, new_names: typing.Dict[str, str]) -> None:
        """Gives copies of functions their gradients: where a function has a gradient function, the
        copy of the gradient function becomes the gradient of the function's copy.

        Args:
          copies: the `FunctionDefLibrary` that has the copies; the gradients are added to it.
          new_names: {name of a function: name of its copy}; also of the gradient functions.
        """
        for name, gradient in self.gradients().items():
            if name in new_names:
                copies.gradient.add(function_name=new_names[name],
                                    gradient_func=new_names[gradient])

    def add(self, functions: list) -> None:
        """Adds a list of `FunctionDef`s to the graph."""
        definition = tf.GraphDef()
        definition.versions.CopyFrom(self._graph.graph_def_versions)
        definition.library.function.extend(functions)
        with self._graph.as_default():
            tf.import_graph_def(definition, name='')  # adds the functions, and no operation
        self._functions().update(_by_signature(functions))

    def _functions(self) -> dict:
        """{name: `FunctionDef`} of the graph's functions, and of the functions that `add` added."""
        if self._known is None:
            library = self._graph.as_graph_def().library
            self._known = _by_signature(library.function)
            self._gradients = {each.function_name: each.gradient_func for each in library.gradient}
        return self._known


def _by_signature(functions: typing.Iterable) -> dict:
    """{name: `FunctionDef`} of `FunctionDef`s, which have their names in their signatures."""
    return {function.signature.name: function for function in functions}


def functions_of(node: tf.NodeDef) -> typing.Set[str]:
    """Set of the names of the functions that a node may call.

    These are the functions in its attributes, such as the branches of an `If`. A call of a `Defun`
    has the function's name as the type of its operation, a type that is not TensorFlow's.
    """
    names = set()
    for value in node.attr.values():
        names |= names_of(_functions_in(value))
    is_type_of_tensorflow = hasattr(tf.raw_ops, node.op)
    if not is_type_of_tensorflow:
        names.add(node.op)
    return names


class CopiedFunctions(typing.NamedTuple):
    """Copies of functions, which call each other."""
    copies: list  # the `FunctionDef`s
    names: typing.Dict[str, str]  # {name of a function: name of its copy}


def copied_functions(functions: dict, suffix: str,
                     change: typing.Optional[typing.Callable] = None) -> CopiedFunctions:
    """Copies functions together with all that they call.

    Args:
      functions: {name: `FunctionDef`}; the functions that these call are among them.
      suffix: what the copies' names end with: `'f'` becomes `'f__<suffix>'`.
      change: function `(node, is_beside_resource)` that may change the node of a copy; or None. The
        second argument says whether the node takes a resource that is an argument of its function,
        or is colocated with a node that does: then it has to stay on the resource's device.
    """
    names = {name: '%s__%s' % (name, suffix) for name in functions}
    copies = []
    for name in sorted(functions):  # in the same order in every process
        copied = copy.deepcopy(functions[name])
        copied.signature.name = names[name]
        names_beside_resources = _beside_resources(copied)
        _keep_colocations_inside(copied)
        for node in copied.node_def:
            rename_functions(node, names)
            if change is not None:
                is_beside_resource = not names_beside_resources.isdisjoint(_with_colocated(node))
                change(node, is_beside_resource)
        copies.append(copied)
    return CopiedFunctions(copies, names)


def _keep_colocations_inside(function: typing.Any) -> None:
    """Removes the colocations of a `FunctionDef`'s nodes with operations outside of the function.

    All copies of a function would name the same operation outside, and so be put on its device.
    """
    names_inside = names_of(function.node_def)
    for node in function.node_def:
        if not names_inside.issuperset(colocation_group_of_node(node)):
            del node.attr['_class']


def _beside_resources(function: typing.Any) -> typing.Set[str]:
    """Set of the names of the nodes of a `FunctionDef` that run on the device of a resource.

    These are the nodes that take a resource which is an argument of the function, and the nodes
    with which such a node is colocated.
    """
    resources = set()  # names of arguments
    for argument in function.signature.input_arg:
        if argument.type == tf.resource.as_datatype_enum:
            resources.add(argument.name)
    names = set()
    for node in function.node_def:
        # A node that takes an argument has the argument's name among its inputs.
        takes_resource = not resources.isdisjoint(node.input)
        if takes_resource:
            names.update(_with_colocated(node))
    return names


def _with_colocated(node: tf.NodeDef) -> typing.List[str]:
    """List of the names of a node and of the nodes that it is colocated with."""
    return [node.name] + colocation_group_of_node(node)


def copy_functions(definition: tf.GraphDef, library: Library, suffix: str) -> None:
    """Makes the nodes of a `GraphDef` call copies of their functions, which are added to it.

    Needed for loops of control flow v2. The gradient of such a loop adds a changed copy of the
    condition's function to the graph, and names it after the function. Two imports of a loop that
    called the same function would add two different functions of one name, which TensorFlow
    refuses. TF 2 also refuses them in two graphs of one process.

    Args:
      definition: the nodes, which are changed.
      library: the functions of the graph that the nodes come from.
      suffix: what the copies' names end with.
    """
    functions = library.reached_from(definition.node)
    if not functions:
        return  # before `gradients`, which may have to export the graph
    copied = copied_functions(functions, suffix)
    new_names = copied.names
    for node in definition.node:
        rename_functions(node, new_names)
    definition.library.function.extend(copied.copies)
    library.give_gradients(definition.library, new_names)


def rename_functions(node: tf.NodeDef, names: typing.Dict[str, str]) -> None:
    """Makes a node call other functions; `names` is {old name: new name}."""
    node.op = names.get(node.op, node.op)  # the call of a `Defun` has its name as type
    for value in node.attr.values():
        for function in _functions_in(value):
            function.name = names.get(function.name, function.name)


def call_others(op: tf.Operation, names: typing.Dict[str, str]) -> None:
    """Makes a finished operation call other functions; `names` is {old name: new name}."""
    renamed = op.node_def  # a copy: each access to `node_def` makes one
    rename_functions(renamed, names)
    for name, value in op.node_def.attr.items():
        new_value = renamed.attr[name]
        if value != new_value:
            compat.set_attribute(op, name, new_value)


def _functions_in(value: tf.AttrValue) -> typing.Iterable:
    """The `NameAttrList`s of the functions that an attribute's value names; often none."""
    kind = value.WhichOneof('value')
    if kind == 'func':
        return [value.func]
    if kind == 'list':
        return value.list.func
    return []
