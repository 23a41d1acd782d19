"""One tower: the model on one device, with the gradients of its shard."""

import typing

import tensorflow.compat.v1 as tf

from towers.arguments import check_instance
from towers.model.objectives import all_pairs
from towers.placement.tower_device import stages_of


def name_in_copy(name: str, scope: str) -> str:
    """The name of an operation of tower 0 in a copy, without the scope of the copy.

    Args:
      name: the name of the operation in tower 0.
      scope: the name scope of tower 0, in which `build_towers` was called; mostly `''`. A model may
        leave it, by `tf.name_scope(None)`.
    """
    if name.startswith(scope):
        return name[len(scope):]
    return 'outside/' + name


class Tower(typing.NamedTuple):
    """The model on one device; with accumulation, one micro-batch of it.

    In a build with several losses, `loss`, `data_loss`, `gradients` and `of_shard` are dicts
    by the name of the loss.

    Attributes:
      index: the index of the tower, from 0.
      device: the device of its operations and of its gradient operations.
      name_scope: the scope of its operations, such as `'tower_1/'`. For tower 0 it is the scope in
        which `build_towers` was called, mostly `''`.
      inputs: its shard: a nest of `placeholder_with_default`s, which can be fed by hand.
      size: the number of examples in the shard: an int, or an int32 scalar.
      loss: scalar, as the model function returned it: the mean over the shard.
      predictions: what the model function returned for the shard, tensors of shape [shard, …].
      metrics: what the model function returned for the shard.
      gradients: list of `(gradient, variable)`: this tower's share of the combined gradient, which
        is the plain sum of all towers' shares. The tower's weight is in its share already.
      of_shard: list of gradients, one for each tensor of the shard that is computed from trained
        variables. With these gradients, such variables get their gradients once for all towers.
      updates: operations of this tower for batch-norm statistics and the like.
      variables: the model's variables that its operations read, directly or as a replica.
      data_loss: scalar, the loss that is differentiated. With `regularization='add'` it includes
        the registered losses.
      micro_batch: the index of this micro-batch in its tower, from 0; 0 without accumulation.
      forward: frozenset of the names of the operations of its forward pass.
      backward: frozenset of the names of the operations of its backward pass.
    """
    index: int  # type: ignore[assignment]  # hides `tuple.index`, of no use here
    device: str
    name_scope: str
    inputs: typing.Any
    size: typing.Union[int, tf.Tensor]
    loss: typing.Any
    predictions: typing.Any
    metrics: typing.Any
    gradients: typing.Any
    of_shard: typing.Any
    updates: typing.List[typing.Any]
    variables: typing.List[tf.Variable]
    data_loss: typing.Any
    micro_batch: int
    forward: typing.FrozenSet[str]
    backward: typing.FrozenSet[str]

    @property
    def pairs(self) -> list:
        """The `(gradient, variable)` pairs of all losses, one after the other."""
        return all_pairs(self.gradients)

    def has(self, name: str) -> bool:
        """Whether the operation of this name belongs to the tower. Raises `InvalidArgumentError` if
        the name is no string."""
        check_instance('name', name, str, 'the name of an operation')
        return name in self.forward or name in self.backward

    def own(self, operations: typing.Iterable[tf.Operation]) -> typing.List[tf.Operation]:
        """List of the operations, among `operations`, that belong to the tower. Raises
        `InvalidArgumentError` if an element of `operations` is no operation."""
        own_operations = []
        for op in operations:
            check_instance('an operation', op, tf.Operation, 'a tf.Operation')
            if self.has(op.name):
                own_operations.append(op)
        return own_operations

    def __repr__(self) -> str:
        micro_batch = ', micro-batch %d' % self.micro_batch if self.micro_batch else ''
        return '<Tower %d%s on %s>' % (
            self.index, micro_batch, '+'.join(stages_of(self.device)))
