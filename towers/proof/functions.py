"""Functions that operations of the scratch graph call: branches of control flow v2, `Defun`s.

The body of each such function is imported into the scratch graph, with the inputs of the call, so
that the rules see through it. Loops of control flow v2 have no rule: their bodies are not imported.
"""

import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.graph.edit import Library, functions_of
from towers.graph.op_types import BRANCHES_V2

_CALLS = ('PartitionedCall', 'StatefulPartitionedCall')


class Bodies(typing.NamedTuple):
    """What the calls of a scratch graph run."""
    results: typing.Dict[str, typing.List[list]]  # {name of a call: results of each branch}
    callers: typing.Dict[str, str]  # {name of an operation in a body: the outermost call}


def import_bodies(graph: tf.Graph) -> Bodies:
    """Imports the bodies of all functions that are called, and of those that they call."""
    library, results, callers = Library(graph), {}, {}
    calls = list(graph.get_operations())
    while calls:
        op = calls.pop()
        branches = _functions_called(op, library)
        if not branches:
            continue
        arguments = list(op.inputs)[1 if op.type in BRANCHES_V2 else 0:]
        results[op.name] = []
        for number, function in enumerate(branches):
            count = len(graph.get_operations())
            with graph.as_default():
                results[op.name].append(_imported(
                    function, arguments, '%s/branch_%d' % (op.name, number)))
            made = graph.get_operations()[count:]
            outermost = callers.get(op.name, op.name)
            callers.update((each.name, outermost) for each in made)
            calls += made
    return Bodies(results, callers)


def _functions_called(op, library):
    """The `FunctionDef`s of the branches of a call, in order; [] for what is no call of one."""
    attributes = op.node_def.attr
    if op.type in ('If', 'StatelessIf'):
        names = [attributes['then_branch'].func.name, attributes['else_branch'].func.name]
    elif op.type in BRANCHES_V2:
        names = [each.name for each in attributes['branches'].list.func]
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
            for name in [name for name in node.attr if name.startswith('_')]:
                del node.attr[name]
            kept.node.add().CopyFrom(node)
    given = {name + ':0': tensor for name, tensor in zip(names, arguments)}
    inside = [text for text in wanted if text not in given]
    read = {text.split(':')[0] for node in kept.node for text in node.input}
    read_arguments = {name + ':0': given[name + ':0'] for name in names if name in read}
    made = tf.import_graph_def(kept, input_map=read_arguments, return_elements=inside, name=scope)
    by_name = dict(given, **dict(zip(inside, made)))
    return [by_name[text] for text in wanted]
