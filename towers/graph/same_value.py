"""Whether two tensors compute the same value: by the same operations from the same variables.

Keras makes the loss of a weight anew each time that a program asks for a layer's losses. So two
tensors may be the same loss under different names.
"""

from towers.graph.graph_walk import ancestors, behind
from towers.graph.op_types import LEAD_IN, VARIABLE_OPS

_READS = LEAD_IN | {'ReadVariableOp'}


def is_computed_from(tensors, part):
    """Whether any of `tensors` is computed from `part`, or from a tensor that computes the same.

    Args:
      tensors: list of tensors.
      part: a tensor of the same graph.
    """
    known = ancestors(tensors)
    if part.op.name in known:
        return True
    candidates = [op.outputs[part.value_index] for op in map(
        part.graph.get_operation_by_name, sorted(known)) if op.type == part.op.type]
    return any(each.shape.ndims == part.shape.ndims and _is_same(part, each)
               for each in candidates)


def _is_same(one, other):
    """Whether the same operations compute two tensors from the same variables."""
    stack, seen = [(one, other)], set()
    while stack:
        one, other = [behind(tensor, _READS) for tensor in stack.pop()]
        if one.name == other.name or (one.name, other.name) in seen:
            continue
        seen.add((one.name, other.name))
        op, again = one.op, other.op
        is_source = op.type in VARIABLE_OPS or op.op_def.is_stateful or (
            not op.inputs and op.type != 'Const')
        if is_source or (op.type, one.value_index, len(op.inputs)) != (
                again.type, other.value_index, len(again.inputs)) or (
                    _attributes(op) != _attributes(again)):
            return False
        stack.extend(zip(op.inputs, again.inputs))
    return True


def _attributes(op):
    return {name: value for name, value in op.node_def.attr.items() if not name.startswith('_')}
