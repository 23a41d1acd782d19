"""Makes a finished backward pass recompute tensors of the forward pass instead of keeping them.

The operations of each segment of the forward pass are copied. The copies compute from the tensors
that are kept, and the backward pass takes their results:

    forward     x -> a -> b -> c (kept) -> d -> e -> loss
    recomputed  x -> a' -> b',  after the gradient of c; the gradients of a and b take a' and b'

The copies wait for the gradient that comes into their segment: so they run when their results are
wanted, and TensorFlow cannot merge them with the original operations. Operations that draw random
numbers, write or count run once.
"""

import collections
import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import InvalidArgumentError
from towers.graph.graph_walk import (
    by_name,
    inputs_of,
    names_of,
    producers_of,
    tensors_made,
    tensors_taken,
    with_names,
)
from towers.graph.op_types import SIZES
from towers.placement.tower_device import current_stages, follows_tower
from towers.recompute.repeatable import (
    operations_behind,
    repeatable_operations,
    trained_references,
)
from towers.recompute.segments import best_cuts, cut_into_segments

_EXAMPLES = 3  # of names, in an error


class Recomputed(typing.NamedTuple):
    """How much of a tower's forward pass is recomputed.

    Attributes:
      segments: the number of segments.
      operations: the copies that compute the segments' operations again.
      reads_references: whether the copies read trained reference variables again, so that the
        update has to wait for the copies.
    """
    segments: int
    operations: typing.List[tf.Operation]
    reads_references: bool = False


class _Use(typing.NamedTuple):
    """A place where the backward pass takes a tensor of the forward pass."""
    op: tf.Operation
    position: int  # of the tensor among the operation's inputs


def rewrite(keep: typing.Union[None, str, typing.Sequence[str]],
            forward: typing.List[tf.Operation], backward: typing.List[tf.Operation],
            root: str) -> Recomputed:
    """Rewrites the backward pass of one tower, so that it recomputes what is not kept.

    Args:
      keep: which results to keep, the value of `Memory.recompute`: None for all, so that nothing is
        recomputed; `'auto'` for the results with which a step needs the least memory; or names of
        operations or scopes.
      forward: the operations of the forward pass, in the order in which they were made.
      backward: the operations of the backward pass, in the order in which they were made.
      root: the tower's name scope, with a slash at its end; or ''.

    Returns:
      `Recomputed`, with 0 segments if nothing is worth recomputing.

    Raises:
      InvalidArgumentError: `keep` has a name that is not in the model (see `_cuts_after`); or the
        model writes a trained reference variable (see `repeatable_operations`).
    """
    if keep is None:
        return Recomputed(segments=0, operations=[])
    uses = _uses_of_forward(backward, names_of(forward))
    taken = set(uses)  # names of the tensors that the backward pass takes
    is_automatic = keep == 'auto'
    operations = repeatable_operations(forward, taken, keeps_small=is_automatic)
    if is_automatic:
        cuts = best_cuts(operations, taken)
    else:
        cuts = _cuts_after(keep, operations, forward, root)
    graph = forward[0].graph
    stages = current_stages(graph)  # of the tower: its device scope is open
    segments = cut_into_segments(operations, cuts, stages)
    if not segments.recomputed:
        return Recomputed(segments=0, operations=[])
    rewriter = _Rewriter(backward, uses, segments.kept, root, stages)
    scope = graph.unique_name('recompute')  # a new name in the open scope, which is the tower's
    copies: typing.List[tf.Operation] = []
    for index, segment in enumerate(segments.recomputed):
        copies += rewriter.recompute(segment, '%s/segment_%d/' % (scope, index))
    reads_references = bool(trained_references(forward))
    return Recomputed(len(segments.recomputed), copies, reads_references)


def _uses_of_forward(backward: typing.List[tf.Operation], forward_names: typing.Set[str]
                     ) -> typing.Dict[str, typing.List[_Use]]:
    """Finds where the backward pass takes tensors of the forward pass, so late that the tensors
    have to be kept.

    Args:
      backward: the operations of the backward pass.
      forward_names: names of the operations of the forward pass.

    Returns:
      {name of a tensor of the forward pass: its uses}.
    """
    backward_names = names_of(backward)
    uses: typing.Dict[str, typing.List[_Use]] = collections.defaultdict(list)
    for op in backward:
        if not _has_tensors_kept(op, backward_names):
            continue
        for position, tensor in enumerate(op.inputs):
            if tensor.op.name in forward_names:
                uses[tensor.name].append(_Use(op, position))
    return uses


def _has_tensors_kept(op: tf.Operation, backward_names: typing.Set[str]) -> bool:
    """Whether tensors of the forward pass have to be kept for an operation of the backward pass,
    and may be recomputed for it.

    Args:
      op: the operation.
      backward_names: names of the operations of the backward pass.
    """
    if op.type in SIZES:  # it takes only the size of a tensor, as soon as the tensor is there
        return False
    if compat.in_control_flow(op):  # in a loop or a branch (v1): left as it is
        return False
    waits_for_gradient = not backward_names.isdisjoint(_awaited_names(op))
    return waits_for_gradient  # else it runs with the forward pass


def _cuts_after(keep: typing.Sequence[str], operations: typing.List[tf.Operation],
                forward: typing.List[tf.Operation], root: str) -> typing.List[int]:
    """The cuts of `Memory(recompute=[names])`: one after the last operation of each name.

    Args:
      keep: names of operations or scopes of the model.
      operations: the operations that may be computed again.
      forward: all operations of the forward pass.
      root: the tower's name scope, with a slash at its end; or ''.

    Returns:
      Sorted list of cuts: indices of `operations`, after which a segment ends.

    Raises:
      InvalidArgumentError: the model has no operation or scope of a name.
    """
    cuts: typing.Set[int] = set()
    for name in keep:
        full_name = root + name.rstrip('/')
        # The name is looked for in the whole forward pass: perhaps nothing of it may be recomputed.
        if not _indices_below(full_name, forward):
            raise InvalidArgumentError(
                'recompute=%r has %r, and the model has no operation or scope of this name: '
                'expected names as in the graph, such as %s.' % (
                    keep, name, _some_names(operations or forward, root)))
        indices = _indices_below(full_name, operations)
        cuts.update(indices[-1:])  # none where no operation of this name may be computed again
    last_index = len(operations) - 1
    return sorted(cuts - {last_index})  # the last segment ends there without a cut


def _indices_below(name: str, operations: typing.Iterable[tf.Operation]) -> typing.List[int]:
    """Indices of the operations that have this name, or are in the scope of this name."""
    return [index for index, op in enumerate(operations)
            if (op.name + '/').startswith(name + '/')]


def _some_names(operations: typing.List[tf.Operation], root: str) -> str:
    """Names of the model for an error: of the first operations, or scopes, that are directly in the
    scope `root`, such as `"'conv1', 'conv2', 'logits'"`."""
    names_in_root = [op.name[len(root):] for op in operations if op.name.startswith(root)]
    outermost = [name.split('/')[0] for name in names_in_root]
    different = list(dict.fromkeys(outermost))  # each once, in order
    return ', '.join(map(repr, different[:_EXAMPLES]))


def _awaited_names(op: tf.Operation) -> typing.Set[str]:
    """Set of the names of the operations that an operation waits for."""
    return names_of(inputs_of(op))


class _Order:
    """The order of a backward pass: which operations wait for which, also through recomputed
    operations."""

    def __init__(self, backward: typing.List[tf.Operation]):
        """Looks at what the operations of a backward pass wait for."""
        self._operations = by_name(backward)
        # {name of an operation: names of the operations that wait for it}
        self._followers: typing.Dict[str, typing.Set[str]] = collections.defaultdict(set)
        for op in backward:
            for name in self._awaited_in_backward(op):
                self._followers[name].add(op.name)

    def _awaited_in_backward(self, op: tf.Operation) -> typing.Set[str]:
        """Set of the names of the operations of the backward pass that an operation waits for."""
        return _awaited_names(op) & self._operations.keys()

    def gradients_into(self, users: typing.List[tf.Operation]) -> typing.List[tf.Operation]:
        """Finds the gradients that come into a segment, after which the segment is to be
        recomputed. The first users of the segment wait for them. A user is a first user if it waits
        for no other user, directly or not.

        In the diagram of this module, the gradients of a and b are users. The gradient of b is the
        first user; it waits for the gradient of c, which comes into the segment.

        Args:
          users: the operations of the backward pass that take tensors of the segment.

        Returns:
          List of the operations that compute the gradients.
        """
        user_names = names_of(users)
        # An operation that waits for one of these operations waits for a user.
        users_and_followers = user_names | self._all_followers(user_names)
        gradient_names = set()
        for op in users:
            awaited = self._awaited_in_backward(op)
            is_first = users_and_followers.isdisjoint(awaited)
            if is_first:
                gradient_names |= awaited
        return [self._operations[name] for name in sorted(gradient_names)]

    def add_waits(self, users: typing.List[tf.Operation],
                  gradients: typing.List[tf.Operation]) -> None:
        """Notes that the users of a segment wait for gradients from now on: they take recomputed
        tensors, whose operations wait for the gradients.

        Without this note, `gradients_into` another segment could find gradients that wait for this
        segment: the two segments would wait for each other for ever.

        Args:
          users: the operations of the backward pass that take tensors of the segment.
          gradients: the operations after which the segment is recomputed.
        """
        for gradient in gradients:
            self._followers[gradient.name] |= names_of(users)

    def _all_followers(self, names: typing.Iterable[str]) -> typing.Set[str]:
        """Set of the names of the operations that wait, directly or not, for any operation whose
        name is among `names`."""
        to_visit = list(names)
        found: typing.Set[str] = set()
        while to_visit:
            new_names = self._followers[to_visit.pop()] - found
            found |= new_names
            to_visit.extend(new_names)
        return found


class _Rewriter:
    """Makes one tower's backward pass take recomputed tensors, segment by segment."""

    def __init__(self, backward: typing.List[tf.Operation],
                 uses: typing.Dict[str, typing.List[_Use]], kept: typing.Set[str], root: str,
                 stages: typing.Sequence[str]):
        """
        Args:
          backward: the operations of the backward pass.
          uses: {name of a tensor of the forward pass: where the backward pass takes it}.
          kept: names of the tensors that a segment takes from another one.
          root: the tower's name scope, with a slash at its end; or ''.
          stages: the devices of the tower's stages; () without stages.
        """
        self._order = _Order(backward)
        self._uses = uses
        self._kept = kept
        # Names of the tensors that the backward pass takes, and no other segment.
        self._not_kept = uses.keys() - kept
        self._root = root
        self._stages = stages

    def recompute(self, segment: typing.List[tf.Operation],
                  scope: str) -> typing.List[tf.Operation]:
        """Recomputes the tensors of a segment that the backward pass takes, and makes the backward
        pass take the recomputed tensors.

        Args:
          segment: the operations of the segment.
          scope: the name scope of the recomputed operations, with a slash at its end.

        Returns:
          The recomputed operations.
        """
        wanted = self._wanted_of(segment)
        if not wanted:
            return []
        users = self._users_of(wanted)
        gradients = self._order.gradients_into(users)
        self._order.add_waits(users, gradients)
        needed = operations_behind(names_of(wanted), segment, self._kept)
        copies = self._copies_of(needed, scope)
        _make_wait(copies.values(), gradients)
        for tensor in wanted:
            recomputed = copies[tensor.op.name].outputs[tensor.value_index]
            for use in self._uses[tensor.name]:
                compat.replace_input(use.op, use.position, recomputed)
        return list(copies.values())

    def _users_of(self, tensors: typing.List[tf.Tensor]) -> typing.List[tf.Operation]:
        """List of the operations of the backward pass that take any of `tensors`, each once."""
        users: typing.Dict[str, tf.Operation] = {}  # by name
        for tensor in tensors:
            for use in self._uses[tensor.name]:
                users[use.op.name] = use.op
        return list(users.values())

    def _wanted_of(self, segment: typing.List[tf.Operation]) -> typing.List[tf.Tensor]:
        """List of the tensors of a segment that the backward pass takes and that are not kept."""
        return with_names(tensors_made(segment), self._not_kept)

    def _copies_of(self, operations: typing.List[tf.Operation],
                   scope: str) -> typing.Dict[str, tf.Operation]:
        """Copies operations of a segment, each on its stage.

        A copy takes the results of other copies. It takes kept tensors, and tensors from outside of
        the segment, as the original does.

        Args:
          operations: the operations, in the order in which they were made.
          scope: the name scope of the copies, with a slash at its end.

        Returns:
          {name of an operation: its copy}, in the order of `operations`.
        """
        graph = operations[0].graph
        # {name of an operation: name of its copy in the segment's scope}
        copy_names = {op.name: self._name_in_segment(op) for op in operations}
        inputs = self._inputs_of_copies(operations, copy_names)
        graph_def = tf.GraphDef()
        graph_def.versions.CopyFrom(graph.graph_def_versions)
        for op in operations:
            _add_copied_node(graph_def, op, copy_names[op.name], inputs.names)
        with tf.name_scope(None):  # `scope` is a full name
            tf.import_graph_def(graph_def, inputs.from_graph, name=scope.rstrip('/'))
        copies: typing.Dict[str, tf.Operation] = collections.OrderedDict()
        for op in operations:
            copy = graph.get_operation_by_name(scope + copy_names[op.name])
            self._finish_copy(op, copy)
            copies[op.name] = copy
        return copies

    def _inputs_of_copies(self, operations: typing.List[tf.Operation],
                          copy_names: typing.Dict[str, str]) -> '_InputsOfCopies':
        """Finds what the copies take in the place of the operations' inputs.

        Args:
          operations: the operations that are copied.
          copy_names: {name of an operation: name of its copy in the segment's scope}.
        """
        names: typing.Dict[str, str] = {}
        from_graph: typing.Dict[str, tf.Tensor] = {}
        for tensor in tensors_taken(operations):
            if tensor.name in names:  # several operations take it
                continue
            is_from_copy = tensor.op.name in copy_names and tensor.name not in self._kept
            if is_from_copy:
                names[tensor.name] = '%s:%d' % (copy_names[tensor.op.name], tensor.value_index)
            else:
                key = 'kept/%d:0' % len(from_graph)
                names[tensor.name] = key
                from_graph[key] = tensor
        return _InputsOfCopies(names, from_graph)

    def _name_in_segment(self, op: tf.Operation) -> str:
        """The name of an operation's copy, relative to the name scope of its segment."""
        if op.name.startswith(self._root):
            return op.name[len(self._root):]
        return 'outside/' + op.name  # a model may leave its scope, by tf.name_scope(None)

    def _finish_copy(self, op: tf.Operation, copy: tf.Operation) -> None:
        """Gives a copy what its import did not: the static shapes of the original, and its stage.

        A node without a device, see `_add_copied_node`, has got the device of the scope around the
        backward pass: the device of the tower's first stage, whatever the original's stage.
        """
        for old, new in zip(op.outputs, copy.outputs):
            new.set_shape(old.shape)
        is_on_stage = op.device in self._stages
        if is_on_stage:
            compat.set_device(copy, op.device)


def _make_wait(copies: typing.Collection[tf.Operation],
               gradients: typing.List[tf.Operation]) -> None:
    """Makes the copies of a segment wait for the gradients that come into it. Copies that take no
    other copy's result get control edges; the other copies wait for these copies."""
    copy_names = names_of(copies)
    for copy in copies:
        is_first = copy_names.isdisjoint(names_of(producers_of(copy)))
        if is_first:
            compat.add_control_inputs(copy, gradients)


class _InputsOfCopies(typing.NamedTuple):
    """What the copies of a segment take, for an import.

    Attributes:
      names: {name of a tensor that an original takes: what the copy's node names in its place}: the
        output of another copy, or a key of `from_graph`.
      from_graph: {a name that no node has: the tensor of the graph that the import puts there}.
    """
    names: typing.Dict[str, str]
    from_graph: typing.Dict[str, tf.Tensor]


def _add_copied_node(graph_def: tf.GraphDef, op: tf.Operation, name: str,
                     input_names: typing.Dict[str, str]) -> None:
    """Adds the node of an operation's copy to a `GraphDef`, colocated with nothing.

    It keeps the device only if the program, and not the tower's scope, has put the operation there.
    Without a device the import takes the device of the scope around, which is the tower's device
    (with stages the device of the first stage; `_Rewriter._finish_copy` corrects that).

    Args:
      graph_def: the `GraphDef`, which is changed.
      op: the operation.
      name: the name of the copy.
      input_names: see `_InputsOfCopies.names`.
    """
    node = graph_def.node.add()
    node.CopyFrom(op.node_def)
    node.name = name
    node.attr.pop('_class', None)  # names the operations that it is colocated with
    if follows_tower(op):
        node.device = ''
    del node.input[:]  # control inputs, too: the copy waits for gradients in their place
    for tensor in op.inputs:
        node.input.append(input_names[tensor.name])
