"""Whether two tensors compute the same value: by the same operations from the same variables.

Keras makes the loss of a weight anew each time that a program asks for a layer's losses. So two
tensors may be the same loss under different names.
"""

from towers.graph.graph_walk import ancestors
from towers.graph.op_types import LEAD_IN, VARIABLE_OPS


def is_computed_from(tensors, part):
    """Whether any of `tensors` is computed from `part`, or from a tensor that computes the same.

    Args:
      tensors: list of tensors.
      part: a tensor of the same graph.
    """
    forms = _Forms(part.graph)
    wanted = forms.of(part.op)
    return any(forms.of(part.graph.get_operation_by_name(name)) == wanted
               for name in sorted(ancestors(tensors)))


class _Forms:
    """A number for each operation; operations that compute the same value have the same number."""

    def __init__(self, graph):
        self._graph = graph
        self._numbers = {}  # form -> number
        self._known = {}    # name of an operation -> number

    def of(self, op):
        """The number of an operation."""
        stack, entered = [op], set()
        while stack:
            op = stack[-1]
            missing = [] if op.name in entered else [
                tensor.op for tensor in op.inputs if tensor.op.name not in self._known]
            entered.add(op.name)
            if missing:
                stack.extend(missing)
                continue
            stack.pop()
            if op.name not in self._known:
                value = _handed_on(op)
                number = None if value is None else self._known.get(value.op.name)
                self._known[op.name] = self._number(self._form(op)) if number is None else number
        return self._known[op.name]

    def _number(self, form):
        return self._numbers.setdefault(form, len(self._numbers))

    def _form(self, op):
        if op.type in VARIABLE_OPS:
            return op.name
        # A loop's back edge leads to an operation without a number yet.
        inputs = tuple((self._known.get(tensor.op.name, tensor.name), tensor.value_index)
                       for tensor in op.inputs)
        if op.op_def.is_stateful or not inputs and op.type != 'Const':
            return op.name
        node = op.node_def
        return op.type, inputs, tuple(
            (name, node.attr[name].SerializeToString()) for name in sorted(node.attr)
            if not name.startswith('_'))


def _handed_on(op):
    """The tensor whose value all outputs of an operation have; or None."""
    if op.type in LEAD_IN or op.type == 'ReadVariableOp':
        return None if op.inputs[0].value_index else op.inputs[0]
    return None
