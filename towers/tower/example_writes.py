"""Writes of shared variables by values that come from the examples.

Tower 0 may write for all towers values that are the same in all, and averages of a statistic of its
examples, such as batch norm's: new = a old + b statistic, with 0 < a < 1, where the statistic is no
sum over the examples; with a = 0 it has to be a mean over them. Rows that belong to examples (class
centers, memory banks), each computed from its example alone, and counts of examples are written by
every tower, after all towers have read, tower by tower. A value that follows from the whole batch
in another way can be no tower's: it is refused, unless it is taken over all towers
(`batch_values`).
"""

import numpy as np
import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import SharedVariableError
from towers.graph import graph_walk
from towers.graph.edit import producer
from towers.graph.op_types import (ADDS, BRANCHES_V2, CHOICES, QUOTIENTS, READS, SAME_NUMBERS,
                                   SETS, SUMS, is_fused_batch_norm)
from towers.graph.variable_access import Writes, read_from
from towers.tower.across_examples import is_added_up, mixed
from towers.tower.sync_batch_norm import statistics_of

_LINEAR = SAME_NUMBERS | SUMS | CHOICES | {'Neg'}


def written_by_every_tower(recorded, writes, size, request):
    """Names of the variables that every tower writes, of the `writes` that a step of tower 0 runs:
    a set. `size` is the size of tower 0's shard: an int, or a tensor."""
    served, found = request.served_rank is not None, set()
    if not writes or request.update_ops != 'first' or len(request.parts) == 1 and not served:
        return found
    others = 'servers' if served else 'copies' if request.has_copies else None
    finder = Writes(tf.get_default_graph())
    forward = _Forward(recorded, {name for write in writes for name in write.variables}, size,
                       finder)
    for op, names in writes:
        has_rows_inside = any(
            _writes_no_average(op, names, function, forward) if op.name in forward.examples else
            _adds_size(function, size) for function in finder.functions(op))
        if any([_is_of_every_tower(op, name, forward) for name in names]) or has_rows_inside:
            _check(op, names[0], forward, others, has_rows_inside)
            found.update(names)
    return found


def _check(op, name, forward, others, has_rows_inside):
    """Refuses a write that every tower would make otherwise than one device makes it.
    `others` are the machines that make the same step: `'servers'` have the variables, `'copies'`
    have one on each worker."""
    reason, is_of_rows = None, 'Scatter' in op.type
    across = mixed(op.inputs[2], forward.examples, statistics_of(forward.operations)) if (
        is_of_rows) else None
    if others == 'servers' or others and is_of_rows:  # a count is a worker's own
        reason = 'other machines would not get the rows: train on one machine'
    elif has_rows_inside or compat.in_control_flow(op):
        reason = 'the operation is in a branch, a loop or a function: write outside of it'
    elif is_of_rows and forward.depends_on_any(op.inputs[1]):
        reason = ('the place of its rows is computed from a variable that the step writes, too, so '
                  'that all towers write the same rows: compute it from the examples')
    elif across is not None:
        reason = ('the rows are computed across the examples of the batch (operation %s), and a '
                  'tower has a part of it alone: compute them over all towers (towers.batch_sum, '
                  'towers.batch_mean), or from each example alone' % across.name)
    if reason is not None:
        raise SharedVariableError(
            'the model function writes variable %s by its examples (operation %s), which every '
            'tower does in its turn, and %s.' % (name, op.name, reason))


def _is_of_every_tower(op, name, forward):
    """Whether every tower has to write for the variable to get one device's value; else tower 0 may
    write for all. `SharedVariableError` where the value comes from the examples otherwise. Where
    the size of the shard is static, a model that counts its examples adds a constant."""
    if op.name not in forward.examples:
        return op.type in ADDS and forward.is_size(op.inputs[1]) and forward.size > 1
    if 'Scatter' in op.type or op.type in ADDS and op.inputs[1].dtype.is_integer:
        return True
    if op.type not in ADDS and op.type not in SETS:
        return False
    added = [op.inputs[1]]
    if op.type in SETS:
        added = _added_to_old(op.inputs[1], name) or added
    is_moving = any(forward.depends(each, name) for each in added)
    if (is_moving or op.type in SETS and not forward.depends(op.inputs[1], name)) and _is_affine(
            op.inputs[1], name, forward, not is_moving):
        return False
    raise SharedVariableError(
        'the model function writes variable %s (operation %s) by its examples, and no moving '
        'average of them: of a part of the batch it would have another value than of the whole. '
        'Take the value over all towers (towers.batch_sum, towers.batch_mean), or compute it from '
        'what does not depend on the examples.' % (name, op.name))


def _writes_no_average(op, names, function, forward):
    """Whether a function that an operation calls writes rows, counts, or a value not computed from
    the variable's own; `names` are the names of the variables that it writes."""
    nodes = {node.name: node for node in function.node_def}
    arguments = [each.name for each in function.signature.input_arg]
    outside = dict(zip(arguments, list(op.inputs)[len(op.inputs) - len(arguments):]))

    def is_own(name, handle):
        return any(forward.depends(outside[name], each) for each in names) if name in outside else (
            nodes[name].op in READS and nodes[name].input[0] == handle)
    return any('Scatter' in node.op or node.op in ADDS | SETS and (
        tf.as_dtype(node.attr['dtype'].type).is_integer or not any(
            is_own(name, node.input[0]) for name in _behind(node.input[1], nodes)))
               for node in nodes.values())


def _adds_size(function, size):
    """Whether a function adds a value computed from the static number of examples, a constant."""
    nodes = {node.name: node for node in function.node_def}
    added = set().union(*[_behind(node.input[1], nodes)
                          for node in nodes.values() if node.op in ADDS])
    return isinstance(size, int) and size > 1 and any(
        size in np.ravel(tf.make_ndarray(nodes[name].attr['value'].tensor))
        for name in added & nodes.keys() if nodes[name].op == 'Const')


def _behind(text, nodes):
    """Names of the operations and arguments of a function that an input is computed from."""
    stack, seen = [producer(text)], set()
    while stack:
        name = stack.pop()
        if name not in seen and name in nodes and nodes[name].op not in READS:
            stack.extend(map(producer, nodes[name].input))
        seen.add(name)
    return seen


def _static(tensor):
    """The scalar that a tensor is, of a constant, or of a size in a static shape; else None."""
    op = tensor.op
    if op.type in ('Identity', 'Cast'):
        return _static(op.inputs[0])
    if op.type == 'StridedSlice' and op.get_attr('shrink_axis_mask') == 1:  # tf.shape(x)[0]
        shape, begin = [tf.get_static_value(each) for each in list(op.inputs)[:2]]
        known = shape is not None and begin is not None and np.shape(shape) == (np.size(shape),)
        return shape[begin[0]] if known else None
    value = tf.get_static_value(tensor)
    return value if np.shape(value) == () else None


class _Forward:
    """A recorded forward pass: its values that depend on the examples, or on variables.

    Attributes:
      operations, examples: as `operations` and `from_shard` of `Recorded`.
      size: of the shard: an int, or a tensor.
    """

    def __init__(self, recorded, names, size, finder):
        """`names` are the names of the variables that are looked for."""
        operations = self.operations = recorded.operations
        self.examples, self.size, self._finder = recorded.from_shard, size, finder
        self._bits = {name: 1 << number for number, name in enumerate(sorted(names))}
        self._found = dict(self._bits)  # name of an operation -> bits of the variables
        made, grows = {op.name for op in operations}, True
        while grows:  # again, for values that come through the back edge of a loop
            grows = False
            for op in operations:
                found = before = self._found.get(op.name, 0)
                for tensor in _counted_inputs(op):
                    if tensor.op.name not in made and tensor.op.name not in self._found:
                        self._found[tensor.op.name] = sum(
                            {self._bits.get(source.name, 0) for source in read_from(tensor)})
                    found |= self._found.get(tensor.op.name, 0)
                self._found[op.name], grows = found, grows or found != before

    def is_size(self, tensor):
        """Whether a tensor is the number of the examples, where that is static."""
        return isinstance(self.size, int) and _static(tensor) == self.size

    def depends(self, tensor, name):
        """Whether a tensor is computed from the value of a variable."""
        return bool(self._found.get(tensor.op.name, 0) & self._bits[name])

    def depends_on_any(self, tensor):
        """Whether it is computed from the value of any of the variables."""
        return bool(self._found.get(tensor.op.name, 0))

    def chosen(self, tensor):
        """The tensors that branches of control flow v2 hand on; None if a branch computes its own.
        A fused batch norm there computes statistics, which count as nothing here, or hands on
        averages."""
        found = []
        for function in self._finder.functions(tensor.op):
            nodes = {node.name: node for node in function.node_def}
            arguments = [each.name for each in function.signature.input_arg]
            text = function.ret[function.signature.output_arg[tensor.value_index].name]
            while text is not None and text not in arguments:
                node, output = nodes[text.split(':')[0]], text.split(':')[1]
                is_statistic = is_fused_batch_norm(node.op) and output.startswith('batch_')
                if is_statistic and node.attr['is_training'].b:
                    break
                text = node.input[3 + (output != 'batch_mean')] if is_statistic else (
                    node.input[0] if node.op in SAME_NUMBERS | READS else None)
            if text is None:
                return None
            found += [tensor.op.inputs[1 + arguments.index(text)]] if text in arguments else []
        return found


def _counted_inputs(op):
    """The inputs that an operation reads: Keras gives its moving averages to a fused batch norm in
    training, too, which ignores them (unless `exponential_avg_factor` is set)."""
    if not is_fused_batch_norm(op.type) or not op.get_attr('is_training'):
        return op.inputs
    attributes = op.node_def.attr
    is_average = 'exponential_avg_factor' in attributes and (
        attributes['exponential_avg_factor'].f != 1.)
    return op.inputs if is_average else list(op.inputs)[:3]


def _added_to_old(tensor, name):
    """The tensors that are added to a variable's old value, or taken from it: a list; or []."""
    tensor = graph_walk.behind(tensor, ('Identity', 'Cast'))
    inputs = list(tensor.op.inputs) if tensor.op.type in SUMS else []
    others = [each for each in inputs
              if not any(source.name == name for source in read_from(each))]
    return others if len(others) < len(inputs) else []


def _is_affine(tensor, name, forward, of_means):
    """Whether a tensor is a sum of the variable's value and statistics, each times a factor that
    does not depend on the examples; with `of_means` all statistics have to be means.
    A sum that is divided by the number of the examples, or by another sum, is a mean."""
    stack, seen = [tensor], set()
    while stack:
        tensor = stack.pop()
        op = tensor.op
        if tensor.name in seen or any(source.name == name for source in read_from(tensor)):
            continue
        seen.add(tensor.name)
        if op.name not in forward.examples:
            if forward.depends(tensor, name):
                stack.extend(op.inputs)
            continue
        if is_fused_batch_norm(op.type) and not op.get_attr('is_training'):
            stack.append(op.inputs[tensor.value_index + 2])  # hands on the averages it is given
        elif op.type in BRANCHES_V2 and forward.chosen(tensor) is not None:
            stack.extend(forward.chosen(tensor))
        elif op.type in _LINEAR:
            stack.extend(op.inputs)
        elif op.type in QUOTIENTS and not forward.depends(tensor, name) and (
                op.inputs[1].op.name in forward.examples or forward.is_size(op.inputs[1])) and (
                    not of_means or graph_walk.behind(
                        op.inputs[0], SAME_NUMBERS).op.type == 'Sum'):
            continue
        elif op.type in QUOTIENTS or op.type == 'Mul':
            stack.extend(each for each in op.inputs if forward.depends(each, name)
                         or each.op.name in forward.examples)
        elif of_means and op.type != 'Mean' and not is_fused_batch_norm(op.type) or (
                forward.depends(tensor, name)) or is_added_up(tensor, forward.examples):
            return False
    return True
