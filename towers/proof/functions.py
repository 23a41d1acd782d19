"""Functions that operations of the scratch graph call: branches of control flow v2, `Defun`s.

The body of each such function is imported into the scratch graph, with the inputs of the call, so
that the rules see through it. The condition and the body of a loop of control flow v2 are imported
once, with placeholders for the values that the loop carries.
"""

import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.graph.edit import Library, functions_of
from towers.graph.graph_walk import source_through
from towers.graph.op_types import BRANCHES_V2
from towers.proof.scratch import leave_out_shapes

_CALLS = ('PartitionedCall', 'StatefulPartitionedCall')
_LOOPS = ('While', 'StatelessWhile')


class LoopBody(typing.NamedTuple):
    """A loop of control flow v2 in the scratch graph."""
    arguments: typing.List[tf.Tensor]  # what an iteration begins with: placeholders; handles
    results: typing.List[tf.Tensor]  # these values after an iteration
    condition: tf.Tensor  # the test for one more iteration


class Bodies(typing.NamedTuple):
    """What the calls of a scratch graph run."""
    results: typing.Dict[str, typing.List[list]]  # {name of a call: results of each branch}
    loops: typing.Dict[str, LoopBody]  # {name of a loop: its body}
    callers: typing.Dict[str, str]  # {name of an operation in a body: the outermost call}
    direct_callers: typing.Dict[str, str]  # {name of an operation in a body: the call that runs it}
    left_out: typing.Set[str]  # names of the calls whose bodies take no batch of another size
    own_gradients: typing.Set[str]  # names of operations whose gradient is the program's own


def import_bodies(graph: tf.Graph, program: tf.Graph) -> Bodies:
    """Imports the bodies of all functions that are called, and of those that they call.

    Args:
      graph: the scratch graph, into which they are imported.
      program: the graph of the program, which alone has gradients that are functions of Python.
    """
    library = Library(graph)
    bodies = Bodies({}, {}, {}, {}, set(), set())
    calls = list(graph.get_operations())
    while calls:
        op = calls.pop()
        functions = _functions_called(op, library)
        if not functions:
            continue
        count = len(graph.get_operations())
        try:
            with graph.as_default():
                _import(op, functions, bodies)
        except (ValueError, tf.errors.OpError):  # of shape inference, as in `scratch`
            bodies.left_out.add(op.name)
            continue
        if any(_has_own_gradient(function, program) for function in functions):
            bodies.own_gradients.add(op.name)
        outermost = bodies.callers.get(op.name, op.name)
        for inner in graph.get_operations()[count:]:
            bodies.callers[inner.name] = outermost
            bodies.direct_callers[inner.name] = op.name
            calls.append(inner)
    return bodies


def _import(op: tf.Operation, functions: list, bodies: Bodies) -> None:
    """Imports what a call runs into the default graph, and adds it to `bodies`."""
    if op.type in _LOOPS:
        condition, body = functions
        bodies.loops[op.name] = _loop_body(op, condition, body)
        return
    arguments = list(op.inputs)
    if op.type in BRANCHES_V2:
        arguments = arguments[1:]  # behind the condition
    results = []
    for number, function in enumerate(functions):
        results.append(_imported(function, arguments, '%s/branch_%d' % (op.name, number)))
    bodies.results[op.name] = results


def _has_own_gradient(function: typing.Any, program: tf.Graph) -> bool:
    """Whether the program gave a function, or an operation of it, a gradient of its own."""
    if compat.has_own_gradient(function.signature.name, program):
        return True
    return any('_gradient_op_type' in node.attr for node in function.node_def)


def _loop_body(op: tf.Operation, condition: typing.Any, body: typing.Any) -> LoopBody:
    """Imports a loop, with the static lengths that an iteration keeps.

    The body is imported with the shapes of the values before the loop. Where a result has another
    length, this length is not static, and the body is imported again; earlier imports stay in the
    graph, and nothing uses them.

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
        kept = [_common_shape(shape, result.shape) for shape, result in zip(shapes, results)]
        is_stable = [_lengths(shape) for shape in shapes] == [_lengths(shape) for shape in kept]
        if is_stable:
            [test] = _imported(condition, arguments, op.name + '/condition')
            return LoopBody(arguments, results, test)
        shapes = kept


def _argument(initial: tf.Tensor, shape: tf.TensorShape, loop: str) -> tf.Tensor:
    """What the body of a loop gets for a value that is `initial` before it: a placeholder; for the
    handle of a variable or a table the handle itself, so that it is known which one that is."""
    if initial.dtype == tf.resource:
        return initial
    return tf.placeholder(initial.dtype, shape, '%s/argument' % loop)


def _check_handles(arguments: typing.List[tf.Tensor], results: typing.List[tf.Tensor]) -> None:
    """Raises a ValueError where an iteration does not hand a handle on as it is."""
    for argument, result in zip(arguments, results):
        result_source = source_through(result, ('Identity',))
        is_kept = result_source.name == source_through(argument, ('Identity',)).name
        if argument.dtype == tf.resource and not is_kept:
            raise ValueError('a loop changes the handle of a variable')


def _common_shape(shape: tf.TensorShape, other: tf.TensorShape) -> tf.TensorShape:
    """The shape with the lengths that two shapes both have, and None for the others."""
    if shape.ndims is None or other.ndims != shape.ndims:
        return tf.TensorShape(None)
    lengths = []
    for one_length, other_length in zip(shape.as_list(), other.as_list()):
        lengths.append(one_length if one_length == other_length else None)
    return tf.TensorShape(lengths)


def _lengths(shape: tf.TensorShape) -> typing.Optional[list]:
    """The lengths of a shape, which can be compared even if some are not static."""
    return None if shape.ndims is None else shape.as_list()


def _functions_called(op: tf.Operation, library: Library) -> list:
    """The `FunctionDef`s of the branches of a call, in order; [] for what is no call of one."""
    names = _names_called(op)
    found = [library.function(name) for name in names]
    return [] if None in found else found


def _names_called(op: tf.Operation) -> typing.List[str]:
    """The names of the functions that an operation calls."""
    attributes = op.node_def.attr
    if op.type in ('If', 'StatelessIf'):
        return [attributes['then_branch'].func.name, attributes['else_branch'].func.name]
    if op.type in BRANCHES_V2:
        return [branch.name for branch in attributes['branches'].list.func]
    if op.type in _LOOPS:
        return [attributes['cond'].func.name, attributes['body'].func.name]
    if op.type in _CALLS:
        return [attributes['f'].func.name]
    if op.type in functions_of(op.node_def):  # a Defun: an operation of the function's own type
        return [op.type]
    return []


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
    body, flat_names = compat.graph_def_of_function(function)
    names = [argument.name for argument in function.signature.input_arg]
    kept = tf.GraphDef()
    kept.versions.CopyFrom(body.versions)
    read: typing.Set[str] = set()  # names of the operations whose results the body reads
    for node in body.node:
        if node.name in names:
            continue
        node.device = ''
        leave_out_shapes(node)
        kept.node.add().CopyFrom(node)
        read.update(text.split(':')[0] for text in node.input)
    by_name = {name + ':0': tensor for name, tensor in zip(names, arguments)}
    results = [flat_names[function.ret[result.name]] for result in function.signature.output_arg]
    inside = [text for text in results if text not in by_name]
    read_arguments = {name + ':0': by_name[name + ':0'] for name in names if name in read}
    imported = tf.import_graph_def(
        kept, input_map=read_arguments, return_elements=inside, name=scope)
    by_name.update(zip(inside, imported))
    return [by_name[text] for text in results]
