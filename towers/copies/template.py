"""The template of the copies: the operations of tower 0 of which every other tower has a copy.

A template is a `tf.GraphDef`. Its names are relative to the scope that the towers are built in.
A `Template` also has what depends on the tower, and is set after each import: the devices, with
which operations an operation is colocated, and for which operations from outside it waits.

Words of other modules used here: an `InlineUpdates` sorts the writes of shared variables in tower
0's forward pass. Its `left_out` are writes that no copy has, and no copy uses; its `shared` are
writes whose value all towers use. A *batch value* (`is_batch_value`) is made by `batch_sum` and its
like: an operation of a placeholder's type, which becomes a sum over the towers when all towers are
made.

Its test is `tests/copies/test_copy.py`.
"""

import collections
import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import CloneError
from towers.gradients.backward_pass import Differentiated
from towers.gradients.gradient_pairs import gradients_of
from towers.gradients.tower import name_in_copy
from towers.graph.edit import colocation_group_of_node, functions_of, producer_name
from towers.graph.graph_walk import (
    by_name,
    fetches_in,
    leaves_of,
    names_of,
    operation_of,
    operations_named,
    reachable_from,
    with_names,
)
from towers.graph.op_types import CONTROL_FLOW, PLACEHOLDERS, keeps_state
from towers.graph.order import awaited_without
from towers.model.objectives import flat
from towers.roles.inline_updates import InlineUpdates
from towers.roles.writes import after_kept_writes
from towers.whole_batch.batch_values import is_batch_value

_BY_NAME = ('Collective', 'Nccl', 'Horovod')
"""The beginnings of types of operations that find each other by a name. A copy would have the same
name, and so would communicate with the partners of the original."""

_MOST_BYTES = 2 ** 31 - 2 ** 20  # of a `GraphDef`, with a megabyte to spare

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
        self._made = by_name(first.operations)  # of tower 0, in the order in which they were made
        shards = map(operation_of, leaves_of(first.tower.inputs))
        # Three sets of names of operations of tower 0.
        self._from_shard = reachable_from(shards, first.operations)  # computed from the shard
        self._left_out = updates.left_out
        self._shared_writes = updates.shared
        self._shared = set(updates.shared)  # `nodes_for` adds tables, placeholders and the like
        # Operations that wait for writes which are not left out; and for writes that are copied.
        self._after_kept: typing.Set[str] = set()
        self._after_copied: typing.Set[str] = set()
        self._not_copied = set(self._left_out) | set(self._shared_writes)
        if self._not_copied:
            self._after_kept = after_kept_writes(first.operations, self._left_out)
            self._after_copied = after_kept_writes(first.operations, self._not_copied)

    def nodes_for(self, results: typing.Iterable) -> Nodes:
        """The nodes of the operations to copy: all that results of tower 0 need, without shared
        operations.

        Args:
          results: tensors, variables and operations of tower 0.
        """
        needed: Nodes = {}
        to_visit = list(map(_name_of_operation, results))
        while to_visit:
            name = to_visit.pop()
            is_from_outside = name not in self._made
            if is_from_outside or name in needed or name in self._shared:
                continue
            op = self._made[name]
            node = op.node_def
            _check_uses_no_name(op)
            if self._is_shared(op):
                # The operations that it is colocated with are shared as well: an iterator's data
                # set, for example.
                self._shared.update([name], colocation_group_of_node(node))
                continue
            needed[name] = node
            self._pass_over_not_copied(node)
            to_visit.extend(colocation_group_of_node(node))
            # Inputs are last in the list, and so are visited first. An `IteratorGetNext` takes an
            # iterator, and both are colocated with the data set: the iterator is found to be
            # shared, and the data set with it, before the data set would be copied.
            to_visit.extend(map(producer_name, node.input))
        # The order in which the operations were made: the import of a loop needs this order.
        in_order = [name for name in self._made if name in needed]
        return collections.OrderedDict((name, needed[name]) for name in in_order)

    def _pass_over_not_copied(self, node: tf.NodeDef) -> None:
        """Makes a node wait for what writes that copies do not have wait for.

        Waits for writes that copies leave out are removed. In their place, the node waits for what
        these writes wait for. A wait for a write of tower 0 that all towers share stays; but that
        write comes after other writes of tower 0 alone, so that the node also has to come after the
        copies of these.
        """
        awaited_names = [producer_name(text) for text in node.input if _is_control(text)]
        input_names = set(map(producer_name, node.input))
        if self._left_out.isdisjoint(awaited_names) and input_names.isdisjoint(self._shared_writes):
            return
        graph = tf.get_default_graph()
        awaited = awaited_without(
            operations_named(graph, awaited_names), self._left_out, self._after_kept)
        before_shared = awaited_without(
            operations_named(graph, sorted(input_names & set(self._shared_writes))),
            self._not_copied, self._after_copied)
        awaited += with_names(before_shared, self._after_copied)
        inputs = _data_inputs(node)
        del node.input[:]
        node.input.extend(inputs)
        node.input.extend('^' + name for name in sorted(names_of(awaited)))

    def _is_shared(self, op: tf.Operation) -> bool:
        """Whether all towers use tower 0's operation, and not a copy: it keeps state (a table, a
        queue, an iterator), or is a placeholder.

        Raises:
          CloneError: the operation can be neither copied nor shared.
        """
        # A batch value has the type of a placeholder, but each tower has its own batch value.
        is_placeholder = op.type in PLACEHOLDERS and not is_batch_value(op)
        if not is_placeholder and not keeps_state(op):
            return False
        is_from_shard = op.name in self._from_shard
        has_default_from_shard = is_from_shard and op.type == 'PlaceholderWithDefault'
        if has_default_from_shard:
            return False  # where it is not fed, each tower uses the default of its own shard
        if is_from_shard:
            # If the operation were shared, all towers would use state made from tower 0's shard.
            self._raise_keeps_state(op, 'is made from the shard')
        if compat.in_control_flow(op):
            # The operations of other towers are outside of the branch or the loop, and cannot take
            # a tensor from within it.
            self._raise_keeps_state(op, 'is within a branch or a loop')
        return True

    @staticmethod
    def _raise_keeps_state(op: tf.Operation, why: str) -> None:
        """Raises the error for an operation that can be neither copied nor shared; `why` says what
        forbids to share it."""
        raise CloneError(
            'operation %s (%s), which the model function makes, keeps state of its own, and %s: '
            "make it before build_towers, or pass copies='reuse'." % (op.name, op.type, why))


def _check_uses_no_name(op: tf.Operation) -> None:
    """Raises `CloneError` for an operation that finds others by a name: its copy would have the
    same name. The gradient of a `tf.py_function` finds the last call of that function so."""
    if op.type.startswith(_BY_NAME):
        raise CloneError('operation %s (%s), which the model function makes, communicates with '
                         "operations by a name: pass copies='reuse', which calls the model "
                         'function for every tower.' % (op.name, op.type))
    if compat.is_gradient_of_python(op):
        raise CloneError('operation %s is the gradient of a tf.py_function, of which TensorFlow '
                         "keeps one call, by a name: pass copies='reuse', which calls the model "
                         'function for every tower, or give a tf.numpy_function its gradient by '
                         'tf.custom_gradient.' % op.name)


def _name_of_operation(fetch: typing.Any) -> str:
    """The name of an operation, or of the operation that makes a tensor or a variable."""
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
      operations: {name: operation}, the same operations.
      scope: the name scope of tower 0.

    Raises:
      CloneError: the graph of a tower is too large for TensorFlow.
    """
    graph_def = tf.GraphDef()
    graph_def.versions.CopyFrom(tf.get_default_graph().graph_def_versions)
    template = Template(
        graph_def=graph_def, names={name: name_in_copy(name, scope) for name in nodes}, inputs={},
        waits={}, colocated={}, leaders=_leaders(nodes, operations),
        devices={name: node.device for name, node in nodes.items()})
    names_of_inputs: typing.Dict[str, str] = {}
    for name, node in nodes.items():
        _add_node(template, node, operations[name], names_of_inputs)
    if graph_def.ByteSize() >= _MOST_BYTES:
        raise CloneError('the graph of a tower is larger than 2 GB, which TensorFlow cannot '
                         "import: pass copies='reuse'.")
    return template


def _add_node(template: Template, node: tf.NodeDef, op: tf.Operation,
              names_of_inputs: typing.Dict[str, str]) -> None:
    """Adds an operation of tower 0 to a template.

    Args:
      template: the template.
      node: the `NodeDef` of the operation; it may wait for other operations than `op` does, see
        `_pass_over_not_copied`.
      op: the operation.
      names_of_inputs: {name of a tensor from outside: its name in the template}, which is added to.
    """
    copy = template.graph_def.node.add()
    copy.CopyFrom(node)
    copy.name = template.names[node.name]
    copy.device = ''
    del copy.input[:]
    _add_data_inputs(copy, template, zip(_data_inputs(node), op.inputs), names_of_inputs)
    awaited_outside = []
    for awaited in map(producer_name, filter(_is_control, node.input)):
        if awaited in template.names:
            copy.input.append('^' + template.names[awaited])
        else:
            awaited_outside.append(awaited)
    if awaited_outside:
        template.waits[node.name] = awaited_outside
    group = colocation_group_of_node(copy)
    if group:
        del copy.attr['_class']  # the attribute that names the group
        template.colocated[node.name] = group


def _add_data_inputs(copy: tf.NodeDef, template: Template,
                     inputs: typing.Iterable[typing.Tuple[str, tf.Tensor]],
                     names_of_inputs: typing.Dict[str, str]) -> None:
    """Adds the tensors that an operation takes to its node in a template.

    Args:
      copy: the node in the template, which is changed.
      template: the template, whose `inputs` are added to.
      inputs: for each input of the operation its name in a `NodeDef`, and the tensor.
      names_of_inputs: {name of a tensor from outside: its name in the template}, which is added to.
    """
    for text, tensor in inputs:
        source = producer_name(text)
        if source in template.names:
            # Of `'a'` or `'a:1'` the `'a'` changes.
            copy.input.append(text.replace(source, template.names[source], 1))
            continue
        if tensor.name not in names_of_inputs:
            new_name = '__outside__/%d:0' % len(names_of_inputs)
            names_of_inputs[tensor.name] = new_name
            template.inputs[new_name] = tensor
        copy.input.append(names_of_inputs[tensor.name])


def _leaders(nodes: Nodes, operations: typing.Dict[str, tf.Operation]) -> typing.Dict[str, str]:
    """Finds, for each copied operation, the operation on whose device it has to be.

    TensorFlow puts a look-up of rows on the device of its variable w. It puts an operation that is
    colocated with the look-up on the same device. So w is the leader of both.

    Args:
      nodes: the nodes of the copied operations.
      operations: {name: operation}, the same operations.

    Returns:
      {name of an operation: name of its leader}; an operation that TensorFlow puts with no other
      operation leads itself.
    """
    put_with = {}  # {name of an operation: name of the operation that it is put with, or None}
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
    """The name of the operation on whose device TensorFlow puts `op`: an operation with which `op`
    is colocated, or whose resource `op` reads; None if there is none.

    Args:
      node: the `NodeDef` of the operation.
      op: the operation.
    """
    others = [name for name in colocation_group_of_node(node) if name != op.name]
    if others:
        return others[0]  # all of them are on one device
    # `Enter`, `Switch` and an `If` take a resource to hand it into a loop, a branch or a function.
    # Only the operations within that read the resource.
    hands_resources_on = op.type in CONTROL_FLOW or functions_of(node)
    if hands_resources_on:
        return None
    for tensor in op.inputs:
        if tensor.dtype == tf.resource:
            return tensor.op.name
    return None
