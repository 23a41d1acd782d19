"""Functions that operations of the scratch graph call: branches of control flow v2, `Defun`s.

The body of each such function is imported into the scratch graph, with the inputs of the call, so
that the rules see through it. The condition and the body of a loop of control flow v2 are imported
once, with placeholders for the values that the loop carries.
"""

import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.graph.edit import Library
from towers.graph.graph_walk import Recording, source_through
from towers.graph.op_types import BRANCHES_V2, LOOPS_V2
from towers.proof.scratch import REFUSALS, leave_out_shapes

_ATTRIBUTES_WITH_FUNCTION = {
    'If': ('then_branch', 'else_branch'), 'StatelessIf': ('then_branch', 'else_branch'),
    'While': ('cond', 'body'), 'StatelessWhile': ('cond', 'body'),
    'PartitionedCall': ('f',), 'StatefulPartitionedCall': ('f',)}
"""{type of an operation that calls functions: the attributes that have their names, in order}

A `Case` is not among them: one attribute of it has the names of all branches."""


class LoopBody(typing.NamedTuple):
    """A loop of control flow v2 in the scratch graph."""
    arguments: typing.List[tf.Tensor]  # an iteration begins with them: placeholders, and handles
    results: typing.List[tf.Tensor]  # these values after an iteration
    condition: tf.Tensor  # the test for one more iteration


class Bodies(typing.NamedTuple):
    """What the calls of a scratch graph run.

    A call that is no loop runs one function, or one of several branches.
    """
    # {name of a call that is no loop: for each function that it may run, the results}
    branch_results: typing.Dict[str, typing.List[typing.List[tf.Tensor]]]
    # {name of a loop: its body}
    loops: typing.Dict[str, LoopBody]
    # {name of the placeholder that an iteration of a loop begins with: the value before the loop}
    initial_values: typing.Dict[str, tf.Tensor]
    # {name of an operation in a body: the call of the program that runs it, perhaps by other calls}
    outermost_calls: typing.Dict[str, str]
    # {name of an operation in a body: the call that runs it, which may be in a body itself}
    innermost_calls: typing.Dict[str, str]
    # names of the calls whose bodies take no batch of another size
    left_out: typing.Set[str]
    # names of the calls of functions with a gradient of their own: the program gave it to the
    # function, or to an operation in the function
    with_own_gradient: typing.Set[str]

    def outermost_call(self, name: str) -> str:
        """The name of the call of the program that runs an operation; of an operation in no body,
        its own name."""
        return self.outermost_calls.get(name, name)

    def is_in_body(self, name: str) -> bool:
        """Whether the operation of a name is in the body of a function."""
        return name in self.outermost_calls

    def has_body_of(self, name: str) -> bool:
        """Whether the operation of a name is a call whose bodies are in the scratch graph."""
        return name in self.branch_results or name in self.loops


def import_bodies(graph: tf.Graph, program: tf.Graph) -> Bodies:
    """Imports the bodies of all functions that a scratch graph calls, and of the functions that
    these functions call.

    A body that shape inference refuses is left out: then nothing is proven of its call's results.

    Args:
      graph: the scratch graph, into which the bodies are imported.
      program: the graph of the program: it knows which functions have a gradient that is a function
        of Python, which no import keeps.
    """
    library = Library(graph)
    bodies = Bodies(branch_results={}, loops={}, initial_values={}, outermost_calls={},
                    innermost_calls={}, left_out=set(), with_own_gradient=set())
    operations = list(graph.get_operations())
    while operations:
        op = operations.pop()
        functions = _functions_called(op, library)
        if not functions:
            continue
        try:
            with graph.as_default(), Recording(graph) as imported:
                _import(op, functions, bodies)
        except REFUSALS:
            bodies.left_out.add(op.name)
            continue
        if any(_has_own_gradient(function, program) for function in functions):
            bodies.with_own_gradient.add(op.name)
        for inner in imported.operations:
            bodies.outermost_calls[inner.name] = bodies.outermost_call(op.name)
            bodies.innermost_calls[inner.name] = op.name
        operations += imported.operations  # which may be calls themselves
    return bodies


def _import(op: tf.Operation, functions: list, bodies: Bodies) -> None:
    """Imports the functions that a call may run into the default graph, and adds them to `bodies`.

    Args:
      op: the call.
      functions: list of `FunctionDef`s: of a loop, its test and its body; else the branches.
      bodies: `Bodies` that were imported before.
    """
    if op.type in LOOPS_V2:
        condition, body = functions
        loop = _loop_body(op, condition, body)
        bodies.loops[op.name] = loop
        for argument, initial in zip(loop.arguments, op.inputs):
            is_handle = argument.dtype == tf.resource  # the body takes it as it is: `_argument`
            if not is_handle:
                bodies.initial_values[argument.op.name] = initial
        return
    arguments = list(op.inputs)
    if op.type in BRANCHES_V2:
        arguments = arguments[1:]  # behind the condition
    results = []
    for number, function in enumerate(functions):
        results.append(_imported(function, arguments, '%s/branch_%d' % (op.name, number)))
    bodies.branch_results[op.name] = results


def _has_own_gradient(function: typing.Any, program: tf.Graph) -> bool:
    """Whether the program gave a function, or an operation of it, a gradient of its own."""
    if compat.has_own_gradient(function.signature.name, program):
        return True
    # TensorFlow's mark of `tf.custom_gradient` and of `gradient_override_map`.
    return any('_gradient_op_type' in node.attr for node in function.node_def)


def _loop_body(op: tf.Operation, condition: typing.Any, body: typing.Any) -> LoopBody:
    """Imports a loop, with the static lengths that an iteration keeps.

    The body is imported with the shapes of the values before the loop. Where a result has another
    length than its argument, this length is not static: the body is imported again, with arguments
    for which this length is not known. The body that was imported first stays in the graph, since
    TensorFlow removes no operation from a graph; no call runs it, and no rule asks for its results.

    Args:
      op: the loop.
      condition: `FunctionDef` of its test.
      body: `FunctionDef` of an iteration.
    """
    shapes = [tensor.shape for tensor in op.inputs]
    while True:
        arguments = [_argument(tensor, shape, op.name)
                     for tensor, shape in zip(op.inputs, shapes)]
        results = _imported(body, arguments, op.name + '/body')
        _check_handles(arguments, results)
        kept_shapes = [shape.most_specific_compatible_shape(result.shape)
                       for shape, result in zip(shapes, results)]
        if list(map(_lengths, kept_shapes)) == list(map(_lengths, shapes)):
            [test] = _imported(condition, arguments, op.name + '/condition')
            return LoopBody(arguments, results, test)
        shapes = kept_shapes


def _argument(initial: tf.Tensor, shape: tf.TensorShape, loop: str) -> tf.Tensor:
    """What the body of a loop gets for a value that is `initial` before the loop: a placeholder;
    for the handle of a variable or a table the handle itself, so that its variable or table is
    known.

    Args:
      initial: the value before the loop.
      shape: the shape that all iterations keep.
      loop: the name of the loop.
    """
    if initial.dtype == tf.resource:
        return initial
    return tf.placeholder(initial.dtype, shape, '%s/argument' % loop)


def _check_handles(arguments: typing.List[tf.Tensor], results: typing.List[tf.Tensor]) -> None:
    """Raises a ValueError where an iteration gives the next one another handle than its own.

    `_argument` has put the handle of one variable into the body, for all iterations. Where an
    iteration changes the handle, that is wrong: such a loop is left out, as a loop that shape
    inference refuses (`REFUSALS`).
    """
    for argument, result in zip(arguments, results):
        if argument.dtype != tf.resource:
            continue
        handle = source_through(argument, ('Identity',))
        next_handle = source_through(result, ('Identity',))
        if next_handle.name != handle.name:
            raise ValueError('a loop changes the handle of a variable')


def _lengths(shape: tf.TensorShape) -> typing.Optional[list]:
    """The lengths of a shape, which can be compared even if some of them are not static; None
    where the rank is not static."""
    return None if shape.ndims is None else shape.as_list()


def _functions_called(op: tf.Operation, library: Library) -> list:
    """The `FunctionDef`s of the functions that an operation may run, in order; [] for an operation
    that calls no function, or a name that the library lacks, such as the type of a custom
    operation."""
    found = [library.function(name) for name in _names_called(op)]
    return [] if None in found else found


def _names_called(op: tf.Operation) -> typing.List[str]:
    """The names of the functions that an operation calls: of a loop, its test and its body."""
    # The call of a `Defun` has the function's name as its type. TensorFlow has no such type.
    if not hasattr(tf.raw_ops, op.type):
        return [op.type]
    if op.type in ('Case', 'StatelessCase'):
        return [branch.name for branch in op.node_def.attr['branches'].list.func]
    attributes = _ATTRIBUTES_WITH_FUNCTION.get(op.type, ())
    return [op.node_def.attr[attribute].func.name for attribute in attributes]


def _imported(function: typing.Any, arguments: typing.List[tf.Tensor],
              scope: str) -> typing.List[tf.Tensor]:
    """Imports the body of a function into the default graph.

    Args:
      function: `FunctionDef`.
      arguments: the tensors that it is called with.
      scope: the name scope of its operations.

    Returns:
      List of its results.
    """
    # `tensor_names` has the name `'add:0'` of a tensor that a `FunctionDef` calls `'add:z:0'`.
    body, tensor_names = compat.graph_def_of_function(function)
    signature = function.signature
    argument_names = [argument.name for argument in signature.input_arg]
    result_names = [tensor_names[function.ret[result.name]] for result in signature.output_arg]
    # In the body an argument is a placeholder: the tensor that is passed takes its place.
    graph_def = _without_nodes(body, argument_names)
    names_taken = _names_taken(graph_def)
    tensors = {}  # {name of a tensor in the body: the tensor in the graph}
    # The same of the arguments that the body takes: an import refuses any other argument.
    input_map = {}
    for name, tensor in zip(argument_names, arguments):
        tensors[name + ':0'] = tensor
        if name in names_taken:
            input_map[name + ':0'] = tensor
    # A result that is an argument is known already.
    computed_names = [name for name in result_names if name not in tensors]
    computed = tf.import_graph_def(
        graph_def, input_map=input_map, return_elements=computed_names, name=scope)
    tensors.update(zip(computed_names, computed))
    return [tensors[name] for name in result_names]


def _without_nodes(body: tf.GraphDef, names: typing.Container[str]) -> tf.GraphDef:
    """The nodes of a function's body but for the nodes of these names, without devices, and without
    the shapes that they have for the program's batch."""
    graph_def = tf.GraphDef()
    graph_def.versions.CopyFrom(body.versions)
    for node in body.node:
        if node.name not in names:
            node.device = ''
            leave_out_shapes(node)
            graph_def.node.add().CopyFrom(node)
    return graph_def


def _names_taken(graph_def: tf.GraphDef) -> typing.Set[str]:
    """The names of the operations whose results the nodes of a graph take."""
    names: typing.Set[str] = set()
    for node in graph_def.node:
        names.update(text.split(':')[0] for text in node.input)
    return names
