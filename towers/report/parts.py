"""The part of a step that each of its operations belongs to.

The build knows the operations of each tower's forward and backward pass. The other parts follow
from the graph, by data: the input is upstream of the shards; the combination is between the towers
and the combined gradients; what is between one tower and another exchanges values of the batch.
"""

import typing

import tensorflow.compat.v1 as tf

from towers.api.built import BuiltTowers
from towers.graph.edit import producer_name
from towers.graph.graph_walk import (
    ancestors,
    fetches_in,
    names_of,
    operation_named,
    reachable_from,
    step_operations,
)
from towers.memory.tower_step import shard_operations
from towers.model.objectives import all_pairs

INPUT = 'input'
FORWARD = 'forward'
BACKWARD = 'backward'
EXCHANGE = 'exchange'
COMBINATION = 'combination'
UPDATE = 'update'
OUTPUTS = 'outputs'
COPIES = 'copies'
OTHER = 'other'

# The parts in the order in which they are shown, with their titles.
PARTS = {
    INPUT: 'input',
    FORWARD: 'forward pass',
    BACKWARD: 'backward pass',
    EXCHANGE: 'exchange of values of the whole batch',
    COMBINATION: 'combination of gradients',
    UPDATE: 'update',
    OUTPUTS: 'loss and predictions of the batch',
    COPIES: 'copies between devices',
    OTHER: 'other',
}
OF_TOWERS = (FORWARD, BACKWARD)  # the parts in which towers compute


class Place(typing.NamedTuple):
    """The part, and perhaps the tower, that an operation belongs to.

    Attributes:
      part: one of the `PARTS`.
      tower: the index of its tower; None for an operation of no tower.
      micro_batch: the index of its micro-batch in the tower.
    """
    part: str
    tower: typing.Optional[int] = None
    micro_batch: int = 0


class StepParts:
    """The operations of a step, each with its `Place`.

    Attributes:
      graph: the towers' graph.
      operations: list of the operations that a step, its loss and its predictions need.
      places: {name of one of these operations: its `Place`}; the part of an operation that belongs
        to no other part is `OTHER`.
    """

    def __init__(self, built: BuiltTowers):
        """
        Args:
          built: the result of `build_towers`.
        """
        outputs = fetches_in([built.loss, built.predictions, built.metrics])
        train_ops = fetches_in([built.train_op, built.train_ops])  # none without an optimizer
        self.operations = step_operations(train_ops + outputs)
        self.graph: tf.Graph = self.operations[0].graph
        self.places: typing.Dict[str, Place] = {}
        # The order counts: an operation stays in the first part into which it is put. So each of
        # these parts gets only what none of the parts before it has.
        self._put_towers(built)
        needed_by_shards = names_of(step_operations(shard_operations(built)))
        self._put_others(INPUT, needed_by_shards)
        after_towers = self._after_towers()
        before_towers = self._before_towers()
        # Between two towers: it depends on one of them, and the other one depends on it.
        self._put_others(EXCHANGE, after_towers & before_towers)
        if built.machines is not None:
            # All towers wait for these operations, which wait for the other workers.
            self._put_others(EXCHANGE, before_towers & built.machines.exchange.names_of_begin)
        needed_by_gradients = ancestors(_combined_gradients(built))
        self._put_others(COMBINATION, after_towers & needed_by_gradients)
        output_tensors = [output for output in outputs if isinstance(output, tf.Tensor)]
        needed_by_outputs = ancestors(output_tensors)
        self._put_others(OUTPUTS, after_towers & needed_by_outputs)
        # The train ops need all that the towers need, such as a weight that is read outside of them
        # for all towers: that is no part of the update.
        needed_by_update = names_of(step_operations(train_ops))
        self._put_others(UPDATE, needed_by_update - before_towers)
        self._put_others(OTHER, names_of(self.operations))

    def _put_towers(self, built: BuiltTowers) -> None:
        """Puts the operations of the towers into the parts of their passes."""
        for tower in built.towers:
            for part, names in ((FORWARD, tower.forward), (BACKWARD, tower.backward)):
                for name in names:
                    self.places[name] = Place(part, tower.index, tower.micro_batch)

    def _put_others(self, part: str, names: typing.Iterable[str]) -> None:
        """Puts those of the operations into a part that are in no part yet."""
        for name in names:
            self.places.setdefault(name, Place(part))

    def _in_towers(self) -> typing.List[tf.Operation]:
        """The operations of the step that belong to a tower."""
        operations = []
        for op in self.operations:
            if self.places.get(op.name, Place(OTHER)).part in OF_TOWERS:
                operations.append(op)
        return operations

    def _after_towers(self) -> typing.Set[str]:
        """Names of the operations that depend, by data, on an operation of a tower."""
        return reachable_from(self._in_towers(), self.operations)

    def _before_towers(self) -> typing.Set[str]:
        """Names of the operations that an operation of a tower depends on, by data."""
        inputs = []
        for op in self._in_towers():
            inputs += op.inputs
        return ancestors(inputs)

    def operation(self, name: str) -> typing.Optional[tf.Operation]:
        """The operation of this name; None if the graph has none."""
        return operation_named(self.graph, name)

    def type_of(self, name: str) -> str:
        """The type of the operation of this name; '' if the graph has none."""
        operation = self.operation(name)
        return '' if operation is None else operation.type

    def place_of(self, name: str) -> typing.Optional[Place]:
        """The `Place` of the operation of this name; None if the graph has none."""
        place = self.places.get(name)
        if place is None and self.operation(name) is not None:
            return Place(OTHER)
        return place


def _combined_gradients(built: BuiltTowers) -> typing.List[tf.Tensor]:
    """The tensors of the gradients that the optimizer gets: of a sparse one values and indices."""
    gradients = [gradient for gradient, _ in all_pairs(built.gradients) if gradient is not None]
    return tf.nest.flatten(gradients, expand_composites=True)


def places_in_runtime(
        parts: StepParts, partitions: typing.Sequence[tf.GraphDef]) -> typing.Dict[str, Place]:
    """The `Place`s of operations that TensorFlow itself has added to a step.

    Such an operation, as a folded constant or a changed layout, belongs to the place of the
    operations that use its result, or that wait for it, if all of these have the same place.

    Args:
      parts: the operations of the graph as it was built.
      partitions: `tf.RunMetadata.partition_graphs`, the graphs that the runtime ran.

    Returns:
      {name of an added operation: its `Place`}, without those whose users have several places.
    """
    takers = _takers_by_name(partitions)
    added: typing.Dict[str, Place] = {}
    for name in takers:
        is_added = parts.place_of(name) is None
        if not is_added:
            continue
        places = _places_of_takers(name, takers, parts)
        if len(places) == 1:
            added[name] = places.pop()
    return added


def _takers_by_name(
        partitions: typing.Sequence[tf.GraphDef]) -> typing.Dict[str, typing.Set[str]]:
    """{name of an operation: names of the operations that use its result, or wait for it}."""
    takers: typing.Dict[str, typing.Set[str]] = {}
    for partition in partitions:
        for node in partition.node:
            for source in node.input:
                takers.setdefault(producer_name(source), set()).add(node.name)
    return takers


def _places_of_takers(name: str, takers: typing.Dict[str, typing.Set[str]],
                      parts: StepParts) -> typing.Set[Place]:
    """The `Place`s of the operations of the built graph that use the result of an operation which
    the runtime has added.

    They use it themselves, or by way of other operations that the runtime has added.

    Args:
      name: the name of the operation that the runtime has added.
      takers: {name of an operation: names of the operations that use its result}.
      parts: the operations of the graph as it was built.
    """
    places = set()
    stack = [name]
    seen = set(stack)
    while stack:
        for taker in takers.get(stack.pop(), ()):
            place = parts.place_of(taker)
            if place is not None:
                places.add(place)
            elif taker not in seen:  # the runtime has added this one, too
                seen.add(taker)
                stack.append(taker)
    return places
