"""The template of the copies: the operations of tower 0 that every other tower has, too.

A template is a `tf.GraphDef`. Its names are relative to the scope that the towers are built in.
What depends on the tower is beside it, and is set after each import: the devices, what an operation
is colocated with, and which operations from outside it waits for.

Its test is `tests/copies/test_copy.py`.
"""

import collections
import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import CloneError
from towers.gradients.backward_pass import Differentiated
from towers.gradients.gradient_pairs import gradients_of
from towers.graph.edit import colocation_group_of_node, functions_of, producer_name
from towers.graph.graph_walk import (
    fetches_in,
    leaves_of,
    operation_of,
    reachable_from,
)
from towers.graph.op_types import CONTROL_FLOW, PLACEHOLDERS, keeps_state
from towers.graph.order import awaited_instead
from towers.model.objectives import flat
from towers.roles.inline_updates import InlineUpdates
from towers.whole_batch.batch_values import is_batch_value

_MEETS_OTHERS = ('Collective', 'Nccl', 'Horovod')
"""How types of operations begin that find each other by a name."""

Nodes = typing.Dict[str, tf.NodeDef]
"""{name of an operation of tower 0: its `NodeDef`}, in the order in which they were made."""


class Template(typing.NamedTuple):
    """The operations of tower 0 that every copy has.

    All names are those of tower 0's operations, but for the names in the `GraphDef`.

    Attributes:
      graph_def: the copied operations, without devices and colocations.
      names: {name of a copied operation: its name in the `GraphDef`}, in the same order.
      inputs: {name of an input from outside, in the `GraphDef`: the tensor that tower 0 reads}.
      waits: {name of a copied operation: names of operations from outside that it waits for}.
      colocated: {name of a copied operation: names of the operations that it is colocated with}.
      leaders: {name of a copied operation: name of the operation on whose device it has to be}: its
        own name, or another, such as a variable's.
      devices: {name of a copied operation: its device in tower 0}.
    """
    graph_def: tf.GraphDef
    names: typing.Dict[str, str]
    inputs: typing.Dict[str, tf.Tensor]
    waits: typing.Dict[str, typing.List[str]]
    colocated: typing.Dict[str, typing.List[str]]
    leaders: typing.Dict[str, str]
    devices: typing.Dict[str, str]


def make_template(first: Differentiated, updates: InlineUpdates,
                  other_results: typing.Sequence) -> Template:
    """Makes the template of tower 0.

    Args:
      first: tower 0, and its operations.
      updates: the writes that copies leave out, or share with tower 0.
      other_results: tensors and operations that are copied besides the results of tower 0.

    Raises:
      CloneError: an operation that cannot be copied.
    """
    tower = first.tower
    results = fetches_in([
        tower.loss, tower.data_loss, tower.predictions, tower.metrics, tower.updates,
        gradients_of(tower.pairs), flat(tower.of_shard), list(other_results)])
    nodes = _Selection(first, updates).nodes_for(results)
    operations = {op.name: op for op in first.operations if op.name in nodes}
    return _template_of(nodes, operations, tower.name_scope)


class _Selection:
    """Selects the operations of tower 0 that are copied. All towers share the others."""

    def __init__(self, first: Differentiated, updates: InlineUpdates):
        """
        Args:
          first: tower 0, and its operations.
          updates: the writes that copies leave out, or share with tower 0.
        """
        self._made = {op.name: op for op in first.operations}
        self._from_shard = reachable_from(
            map(operation_of, leaves_of(first.tower.inputs)), first.operations)
        self._left_out = updates.left_out
        self._shared = set(updates.shared)

    def nodes_for(self, results: typing.Iterable) -> Nodes:
        """The nodes of all operations that some results of tower 0 need, and that are copied."""
        needed = {}
        names = list(map(_name_of_operation, results))
        while names:
            name = names.pop()
            if name in needed or name not in self._made or name in self._shared:
                continue
            node = self._made[name].node_def
            if self._is_shared(self._made[name]):
                self._shared.update([name], colocation_group_of_node(node))
                continue
            needed[name] = node
            self._wait_for_no_left_out(node)
            names.extend(colocation_group_of_node(node))
            # Inputs are taken from the end of the list, so before what this is colocated with: an
            # input that is shared makes what it is colocated with shared, too.
            names.extend(map(producer_name, node.input))
        # In the order in which they were made, which an import of loops needs.
        nodes = collections.OrderedDict()
        for name in self._made:
            if name in needed:
                nodes[name] = needed[name]
        return nodes

    def _wait_for_no_left_out(self, node: tf.NodeDef) -> None:
        """Changes a node that waits for writes which copies leave out, to wait for what these wait
        for."""
        awaited_names = [producer_name(text) for text in node.input if _is_control(text)]
        if self._left_out.isdisjoint(awaited_names):
            return
        graph = tf.get_default_graph()
        awaited = list(map(graph.get_operation_by_name, awaited_names))
        inputs = _data_inputs(node)
        del node.input[:]
        node.input.extend(inputs)
        node.input.extend('^' + op.name for op in awaited_instead(awaited, self._left_out))

    def _is_shared(self, op: tf.Operation) -> bool:
        """Whether all towers use tower 0's operation, and not a copy: it keeps state (a table, a
        queue, an iterator), or is a placeholder.

        Raises:
          CloneError: the operation can be neither copied nor shared.
        """
        if op.type.startswith(_MEETS_OTHERS):
            raise CloneError('operation %s (%s), which the model function makes, communicates with '
                             "operations by a name: pass copies='reuse', which calls the model "
                             'function for every tower.' % (op.name, op.type))
        if is_batch_value(op):
            return False
        if op.type not in PLACEHOLDERS and not keeps_state(op):
            return False
        is_from_shard = op.name in self._from_shard
        if op.type == 'PlaceholderWithDefault' and is_from_shard:
            return False
        if is_from_shard:
            self._raise_keeps_state(op, 'is made from the shard')
        if compat.in_control_flow(op):
            self._raise_keeps_state(op, 'is within a branch or a loop')
        return True

    @staticmethod
    def _raise_keeps_state(op: tf.Operation, why: str) -> None:
        """Raises the error for an operation that can be neither copied nor shared; `why` says what
        forbids to share it."""
        raise CloneError(
            'operation %s (%s), which the model function makes, keeps state of its own, and %s: '
            "make it before build_towers, or pass copies='reuse'." % (op.name, op.type, why))


def _name_of_operation(fetch: typing.Any) -> str:
    """The name of an operation, or of the operation of a tensor or variable."""
    return operation_of(fetch).name


def _is_control(text: str) -> bool:
    """Whether an input of a `NodeDef` is a control edge."""
    return text.startswith('^')


def _data_inputs(node: tf.NodeDef) -> typing.List[str]:
    """List of the inputs of a `NodeDef`, without control edges."""
    return [text for text in node.input if not _is_control(text)]


def _template_of(nodes: Nodes, operations: typing.Dict[str, tf.Operation],
                 scope: str) -> Template:
    """Makes the `Template`.

    Args:
      nodes: the nodes of the operations to copy.
      operations: {name: operation} of the same.
      scope: the name scope of tower 0.
    """
    graph_def = tf.GraphDef()
    graph_def.versions.CopyFrom(tf.get_default_graph().graph_def_versions)
    template = Template(
        graph_def=graph_def, names={name: _relative(name, scope) for name in nodes}, inputs={},
        waits={}, colocated={}, leaders=_leaders(nodes, operations),
        devices={name: node.device for name, node in nodes.items()})
    keys: typing.Dict[str, str] = {}
    for name, node in nodes.items():
        _add_node(template, node, operations[name], keys)
    if graph_def.ByteSize() >= 2 ** 31 - 2 ** 20:
        raise CloneError('the graph of a tower is larger than 2 GB, which TensorFlow cannot '
                         "import: pass copies='reuse'.")
    return template


def _relative(name: str, scope: str) -> str:
    """The name of an operation's copy, relative to the copy's scope.

    Args:
      name: the name of the operation in tower 0.
      scope: the name scope of tower 0. A model may leave it, by `tf.name_scope(None)`.
    """
    return name[len(scope):] if name.startswith(scope) else 'outside/' + name


def _add_node(template: Template, node: tf.NodeDef, op: tf.Operation,
              keys: typing.Dict[str, str]) -> None:
    """Adds an operation of tower 0 to a template.

    Args:
      template: the template.
      node: the `NodeDef` of the operation; it may wait for other operations than `op` does.
      op: the operation.
      keys: {name of a tensor from outside: its name in the template}, which is added to.
    """
    copy = template.graph_def.node.add()
    copy.CopyFrom(node)
    copy.name = template.names[node.name]
    copy.device = ''
    del copy.input[:]
    for text, tensor in zip(_data_inputs(node), op.inputs):
        source = producer_name(text)
        if source in template.names:
            copy.input.append(text.replace(source, template.names[source], 1))
            continue
        if tensor.name not in keys:
            keys[tensor.name] = '__outside__/%d:0' % len(keys)
            template.inputs[keys[tensor.name]] = tensor
        copy.input.append(keys[tensor.name])
    waits_outside = []
    for source in map(producer_name, filter(_is_control, node.input)):
        if source in template.names:
            copy.input.append('^' + template.names[source])
        else:
            waits_outside.append(source)
    if waits_outside:
        template.waits[node.name] = waits_outside
    group = colocation_group_of_node(copy)
    if group:
        del copy.attr['_class']
        template.colocated[node.name] = group


def _leaders(nodes: Nodes, operations: typing.Dict[str, tf.Operation]) -> typing.Dict[str, str]:
    """The value of `Template.leaders`.

    An operation that TensorFlow has put on the device of another one, which is itself put on the
    device of a third, has the third as its leader.

    Args:
      nodes: the nodes of the copied operations.
      operations: {name: operation} of the same.
    """
    put_with = {}
    for name, node in nodes.items():
        if node.device:  # else TensorFlow chooses: the operation leads itself
            put_with[name] = _put_with(node, operations[name])
    leaders = {}
    for name in nodes:
        leader = name
        next_leader = put_with.get(leader)
        while next_leader is not None:
            leader = next_leader
            next_leader = put_with.get(leader)
        leaders[name] = leader
    return leaders


def _put_with(node: tf.NodeDef, op: tf.Operation) -> typing.Optional[str]:
    """The name of the operation on whose device TensorFlow puts an operation: one that it is
    colocated with, or whose resource it reads; None if there is none.

    Args:
      node: the `NodeDef` of the operation.
      op: the operation.
    """
    others = [name for name in colocation_group_of_node(node) if name != op.name]
    if others:
        return others[0]
    if op.type in CONTROL_FLOW or functions_of(node):  # these hand a resource on, to its reader
        return None
    for tensor in op.inputs:
        if tensor.dtype == tf.resource:
            return tensor.op.name
    return None
