"""The part of a step that each of its operations belongs to, as the build and the graph tell.

A tower names the operations of its forward and its backward pass. All else follows from what
depends on what, by data: the shards come from the input; the combination lies between the towers
and the combined gradients; what lies between towers and towers exchanges values of the whole batch.
"""

import typing

import tensorflow.compat.v1 as tf

from towers.api.built import BuiltTowers
from towers.graph.graph_walk import (
    ancestors,
    fetches_in,
    names_of,
    operation_named,
    producers_of,
    reachable_from,
    step_operations,
)
from towers.memory.step_graph import shard_operations
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
OF_TOWERS = (FORWARD, BACKWARD)


class Place(typing.NamedTuple):
    """What an operation is for.

    Attributes:
      part: one of the `PARTS`.
      tower: the index of its tower; None for what belongs to no tower.
      micro_batch: the index of its micro-batch in the tower.
    """
    part: str
    tower: typing.Optional[int] = None
    micro_batch: int = 0


class StepParts:
    """The operations of a step, each with its `Place`.

    Attributes:
      graph: the towers' graph.
      operations: list of the operations that a step, its loss and its predictions take.
      places: dict from their names to `Place`s; what is in none of the other `PARTS` is `OTHER`.
    """

    def __init__(self, built: BuiltTowers):
        """
        Args:
          built: the result of `build_towers`.
        """
        outputs = fetches_in([built.loss, built.predictions, built.metrics])
        train_ops = [each for each in [built.train_op] + list(built.train_ops.values())
                     if each is not None]
        self.operations = step_operations(train_ops + outputs)
        self.graph: tf.Graph = self.operations[0].graph
        self.places: typing.Dict[str, Place] = {}
        # In this order: an operation stays in the first part that it is noted for.
        self._note_towers(built)
        self._note_unless_noted(INPUT, names_of(step_operations(shard_operations(built))))
        after_towers = self._after_towers()
        self._note_unless_noted(EXCHANGE, after_towers & self._before_towers())
        self._note_unless_noted(COMBINATION, after_towers & ancestors(_combined_gradients(built)))
        tensors = [each for each in outputs if isinstance(each, tf.Tensor)]
        self._note_unless_noted(OUTPUTS, after_towers & ancestors(tensors))
        updating = names_of(step_operations(train_ops))
        self._note_unless_noted(UPDATE, updating - self._before_towers())
        self._note_unless_noted(OTHER, names_of(self.operations))

    def _note_towers(self, built: BuiltTowers):
        for tower in built.towers:
            for part, names in ((FORWARD, tower.forward), (BACKWARD, tower.backward)):
                for name in names:
                    self.places[name] = Place(part, tower.index, tower.micro_batch)

    def _note_unless_noted(self, part: str, names: typing.Iterable[str]):
        """Puts operations into a part, but for those that are in a part already."""
        for name in names:
            self.places.setdefault(name, Place(part))

    def _in_towers(self):
        """The step's operations of towers."""
        found = []
        for op in self.operations:
            if self.places.get(op.name, Place(OTHER)).part in OF_TOWERS:
                found.append(op)
        return found

    def _after_towers(self):
        """Names of the operations that depend, by data, on an operation of a tower."""
        return reachable_from(self._in_towers(), self.operations)

    def _before_towers(self):
        """Names of the operations that an operation of a tower depends on, by data."""
        tensors = [tensor for op in self._in_towers() for tensor in op.inputs]
        return ancestors(tensors)

    def operation(self, name: str) -> typing.Optional[tf.Operation]:
        """The operation of a name; None for a name that the graph does not have."""
        return operation_named(self.graph, name)

    def type_of(self, name: str) -> str:
        """The type of the operation of a name; '' for a name that the graph does not have."""
        operation = self.operation(name)
        return '' if operation is None else operation.type

    def place_of(self, name: str) -> typing.Optional[Place]:
        """The `Place` of the operation of a name; None for a name that the graph does not have."""
        place = self.places.get(name)
        if place is None and self.operation(name) is not None:
            return Place(OTHER)
        return place


def _combined_gradients(built: BuiltTowers):
    """The gradients that the optimizer gets: a list of tensors; of sparse ones values and rows."""
    gradients = [gradient for gradient, _ in all_pairs(built.gradients) if gradient is not None]
    return tf.nest.flatten(gradients, expand_composites=True)


def places_in_runtime(
        parts: StepParts, partitions: typing.Sequence[tf.GraphDef]) -> typing.Dict[str, Place]:
    """The `Place`s of operations that TensorFlow itself has added to a step: a dict by name.

    What is computed for operations of one place alone belongs there, such as a folded constant or
    a changed layout; what several places take, to none.

    Args:
      parts: those of the graph as it was built.
      partitions: the graphs of `tf.RunMetadata.partition_graphs`, as the runtime ran them.
    """
    takers: typing.Dict[str, typing.Set[str]] = {}
    for partition in partitions:
        for node in partition.node:
            for source in node.input:
                name = source.lstrip('^').split(':')[0]
                takers.setdefault(name, set()).add(node.name)
    found: typing.Dict[str, Place] = {}
    for name in takers:
        if parts.place_of(name) is None:
            places = _places_of_takers(name, takers, parts)
            if len(places) == 1:
                found[name] = places.pop()
    return found


def _places_of_takers(name: str, takers: typing.Dict[str, typing.Set[str]],
                      parts: StepParts) -> typing.Set[Place]:
    """The `Place`s of the operations of the program that take what the operation `name` makes, or
    what the runtime's operations make of it."""
    places = set()
    stack = [name]
    seen = set(stack)
    while stack:
        for taker in takers.get(stack.pop(), ()):
            place = parts.place_of(taker)
            if place is not None:
                places.add(place)
            elif taker not in seen:
                seen.add(taker)
                stack.append(taker)
    return places


def operations_waited_for(op: tf.Operation) -> typing.List[tf.Operation]:
    """The operations that one waits for, by data and by control edges."""
    return producers_of(op) + list(op.control_inputs)
