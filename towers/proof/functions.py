"""Functions that operations of the scratch graph call: branches of control flow v2, `Defun`s.

The body of each such function is imported into the scratch graph, with the inputs of the call, so
that the rules see through it. The condition and the body of a loop of control flow v2 are imported
once, with placeholders for the values that the loop carries.
"""

import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.graph.edit import Library, functions_of
from towers.graph.op_types import BRANCHES_V2
from towers.proof.scratch import leave_out_shapes

_CALLS = ('PartitionedCall', 'StatefulPartitionedCall')
_LOOPS = ('While', 'StatelessWhile')


class LoopBody(typing.NamedTuple):
    """A loop of control flow v2 in the scratch graph."""
    arguments: typing.List[tf.Tensor]  # placeholders for the values that the loop carries
    results: typing.List[tf.Tensor]  # these values after an iteration
    condition: tf.Tensor  # the test for one more iteration


class Bodies(typing.NamedTuple):
    """What the calls of a scratch graph run."""
    results: typing.Dict[str, typing.List[list]]  # {name of a call: results of each branch}
    loops: typing.Dict[str, LoopBody]  # {name of a loop: its body}
    callers: typing.Dict[str, str]  # {name of an operation in a body: the outermost call}
    left_out: typing.List[str]  # names of the calls whose bodies take no batch of another size
    own_gradients: typing.Set[str]  # names of operations whose gradient is the program's own


def import_bodies(graph: tf.Graph) -> Bodies:
    """Imports the bodies of all functions that are called, and of those that they call."""
    library, bodies = Library(graph), Bodies({}, {}, {}, [], set())
    calls = list(graph.get_operations())
    while calls:
        op = calls.pop()
        functions = _functions_called(op, library)
        if not functions:
            continue
        count = len(graph.get_operations())
        try:
            with graph.as_default():
                if op.type in _LOOPS:
                    bodies.loops[op.name] = _loop_body(op, *functions)
                else:
                    arguments = list(op.inputs)[1 if op.type in BRANCHES_V2 else 0:]
                    bodies.results[op.name] = [
                        _imported(function, arguments, '%s/branch_%d' % (op.name, number))
                        for number, function in enumerate(functions)]
        except (ValueError, tf.errors.OpError):  # of shape inference, as in `scratch`
            bodies.left_out.append(op.name)
            continue
        made = graph.get_operations()[count:]
        outermost = bodies.callers.get(op.name, op.name)
        bodies.callers.update((each.name, outermost) for each in made)
        if any('_gradient_op_type' in node.attr for function in functions
               for node in function.node_def):
            bodies.own_gradients.add(op.name)
        calls += made
    return bodies


def _loop_body(op, condition, body):
    """Imports a loop: with the shapes that its values have at its beginning, where an iteration
    keeps them; lengths that it changes are not static."""
    shapes = [tensor.shape for tensor in op.inputs]
    while True:
        arguments = [tf.placeholder(tensor.dtype, shape, '%s/argument' % op.name)
                     for tensor, shape in zip(op.inputs, shapes)]
        results = _imported(body, arguments, op.name + '/body')
        kept = [_common_shape(shape, result.shape) for shape, result in zip(shapes, results)]
        if all(_lengths(shape) == _lengths(each) for shape, each in zip(shapes, kept)):
            [test] = _imported(condition, arguments, op.name + '/condition')
            return LoopBody(arguments, results, test)
        shapes = kept


def _common_shape(shape, other):
    """The shape whose lengths two shapes have both."""
    if shape.ndims is None or other.ndims != shape.ndims:
        return tf.TensorShape(None)
    return tf.TensorShape([length if length == there else None for length, there in zip(
        shape.as_list(), other.as_list())])


def _lengths(shape):
    return None if shape.ndims is None else shape.as_list()


def _functions_called(op, library):
    """The `FunctionDef`s of the branches of a call, in order; [] for what is no call of one."""
    attributes = op.node_def.attr
    if op.type in ('If', 'StatelessIf'):
        names = [attributes['then_branch'].func.name, attributes['else_branch'].func.name]
    elif op.type in BRANCHES_V2:
        names = [each.name for each in attributes['branches'].list.func]
    elif op.type in _LOOPS:
        names = [attributes['cond'].func.name, attributes['body'].func.name]
    elif op.type in _CALLS:
        names = [attributes['f'].func.name]
    elif op.type in functions_of(op.node_def):  # a Defun: an operation of the function's own type
        names = [op.type]
    else:
        return []
    found = [library.function(name) for name in names]
    return [] if None in found else found


def _imported(function, arguments, scope):
    """Imports the body of a function with these arguments: a list of its results."""
    body, flat_names = compat.graph_def_of_function(function)
    names = [argument.name for argument in function.signature.input_arg]
    wanted = [flat_names[function.ret[result.name]] for result in function.signature.output_arg]
    kept = tf.GraphDef()
    kept.versions.CopyFrom(body.versions)
    for node in body.node:
        if node.name not in names:
            node.device = ''
            leave_out_shapes(node)
            kept.node.add().CopyFrom(node)
    given = {name + ':0': tensor for name, tensor in zip(names, arguments)}
    inside = [text for text in wanted if text not in given]
    read = {text.split(':')[0] for node in kept.node for text in node.input}
    read_arguments = {name + ':0': given[name + ':0'] for name in names if name in read}
    made = tf.import_graph_def(kept, input_map=read_arguments, return_elements=inside, name=scope)
    by_name = dict(given, **dict(zip(inside, made)))
    return [by_name[text] for text in wanted]
