"""Updates of replicated variables: every replica gets what the model's own variable gets.

An optimizer may look at more than gradients: weight decay goes by a variable's name, or by a list
of variables that the program has made; a norm may be taken over all gradients that it is given,
those of replicas among them. Then replicas drift apart, or all of them go wrong together. So the
operations that write a replica are compared with those that write the model's own variable: they
have to be the same, but for the variable, the slots and the gradient that each of them takes.

An update that rides on the train op (`UPDATE_OPS`, `updates`), such as the clipping of weights, is
the first tower's, and writes the model's own variable; the replicas then get the same value. A
write of the forward pass itself is refused, see `inline_updates`.
"""

import tensorflow.compat.v1 as tf

from towers.errors import SharedVariableError
from towers.graph import graph_walk
from towers.graph.variable_access import is_variable, variable_op
from towers.graph.variable_writes import Writes
from towers.placement.variable_device import only_device
from towers.tower.objectives import tensors_of
from towers.tower.variables import owner_by_name


def check_updates_alike(replicas, pairs, applied, made):
    """Raises if `apply_gradients` treats a replica otherwise than the model's own variable.

    Functions that an update calls (control flow v2) are not looked into.

    Args:
      replicas: `Replicas`.
      pairs: the `(gradient, variable)` pairs that the optimizer was given, see `Replicas.pairs`.
      applied: the operation or tensor that `apply_gradients` returned.
      made: the operations that `apply_gradients` made.

    Raises:
      SharedVariableError: names the variable, its replica, and what differs.
    """
    step = {op.name for op in graph_walk.step_operations([applied])}
    comparison = _Comparison(replicas, pairs, [op for op in made if op.name in step])
    for replica, variable in replicas.counterparts():
        found = comparison.difference(variable, replica)
        if found is not None:
            raise SharedVariableError(
                "VariablePlacement('replicated'), and the optimizer does to %s otherwise than to "
                'its replica %s: %s. Replicas have to stay equal. The name of a replica begins and '
                'ends as that of its variable, and a replica is in no list of variables: choose '
                'variables by how their names begin or end, change gradients in '
                'transform_gradients= (decay, clipping), which sees each variable once, or use '
                'another VariablePlacement.'
                % (variable.op.name, replica.op.name, found))


class _Comparison:
    """Compares the operations that one `apply_gradients` has made for variable and replica."""

    def __init__(self, replicas, pairs, made):
        self._replicas = replicas
        self._made = {op.name for op in made}
        self._trained = {variable.op.name: variable for _, variable in pairs}
        self._writes = {}
        finder = Writes(tf.get_default_graph())
        for op in made:
            for name in finder.of(op):
                self._writes.setdefault(name, []).append(op)
        gradients = {pair[1].op.name: tensors_of([pair]) for pair in pairs}
        self._gradients, own, others = set(), set(), set()
        for name, tensors in gradients.items():
            origin = replicas.original(self._trained[name]).op.name
            self._gradients.update((a.name, b.name) for a, b in zip(
                gradients.get(origin, ()), tensors))
            (own if origin == name else others).update(tensor.name for tensor in tensors)
        self._of_replicas = others - own
        self._seen, self._shared = set(), set()

    def difference(self, variable, replica):
        """How the writes of a replica differ from the writes of its variable, in words; or None."""
        ours, theirs = [self._writes.get(each.op.name, []) for each in (variable, replica)]
        for a, b in zip(ours, theirs):
            if a.name == b.name:
                continue  # the operation calls a function that writes both
            found = self._of_operations(a, b)
            if found is not None:
                return found
        if len(ours) != len(theirs):
            alone = max(ours, theirs, key=len)[min(len(ours), len(theirs))]
            return 'operation %s writes one of them, and nothing alike the other' % alone.name
        return None

    def _of_operations(self, a, b):
        stack = [(a, b)]
        while stack:
            a, b = stack.pop()
            if (a.name, b.name) in self._seen:
                continue
            self._seen.add((a.name, b.name))
            if a.name == b.name:
                mixed = self._mixed(a)
                if mixed is not None:
                    return mixed
                continue
            if a.type != b.type or len(a.inputs) != len(b.inputs) or graph_walk.is_random(a) or (
                    a.type == 'Const'
                    and a.node_def.attr['value'] != b.node_def.attr['value']):
                return 'operation %s (%s) against %s (%s)' % (a.name, a.type, b.name, b.type)
            for ours, theirs in zip(a.inputs, b.inputs):
                if (ours.name, theirs.name) in self._gradients:
                    continue
                if ours.value_index != theirs.value_index:
                    return '%s against %s' % (ours.name, theirs.name)
                of_ours, of_theirs = [variable_op(each) if is_variable(each) else None
                                      for each in (ours, theirs)]
                if of_ours is None or of_theirs is None:
                    stack.append((ours.op, theirs.op))
                elif not self._belong_together(of_ours, of_theirs):
                    return 'variable %s against %s' % (of_ours.name, of_theirs.name)
        return None

    def _belong_together(self, ours, theirs):
        """Whether two variables' operations are one, variable and replica, or slots of these."""
        if ours.name == theirs.name:
            return True
        owners = [self._trained[op.name] if op.name in self._trained
                  else owner_by_name(op.name, self._trained) for op in (ours, theirs)]
        known = [owner for owner in owners if owner is not None]
        if len(known) == 2:
            return self._replicas.original(known[1]).op.name == known[0].op.name
        # An optimizer may keep a variable for each of them under a name that it has made up.
        return not known and self._made.issuperset([ours.name, theirs.name])

    def _mixed(self, op):
        """Which shared operation is computed from gradients of replicas, in words; or None."""
        stack = [op]
        while stack:
            op = stack.pop()
            if op.name in self._shared or op.name not in self._made:
                continue
            self._shared.add(op.name)
            for tensor in op.inputs:
                if tensor.name in self._of_replicas:
                    return ('operation %s computes something for both from the gradients of '
                            'variables and replicas' % op.name)
                stack.append(tensor.op)
        return None


def replicas_follow(replicas, updates, after):
    """Operations that write into the replicas what updates have written into their variables.

    The optimizer has to wait for them.

    Args:
      replicas: `Replicas`, or None.
      updates: list of operations or tensors: updates of the step.
      after: tensors or operations that read the replicas in a step: losses and gradients.

    Returns:
      List of operations, one for each replica of a variable that is written.
    """
    if replicas is None or not updates or not replicas.variables:
        return []
    finder, written = Writes(tf.get_default_graph()), set()
    for op in graph_walk.step_operations(updates):
        written.update(finder.of(op))
    operations, values = [], {}
    with tf.name_scope('replicas/'), tf.control_dependencies(list(updates) + list(after)):
        for replica in replicas.variables:
            variable = replicas.original(replica)
            name = variable.op.name
            if name not in written:
                continue
            if name not in values:
                with only_device(variable.device):
                    values[name] = variable.read_value()
            with only_device(replica.device):
                operations.append(tf.assign(
                    replica, values[name],
                    validate_shape=replica.get_shape().is_fully_defined()).op)
    return operations
