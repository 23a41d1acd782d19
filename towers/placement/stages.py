"""Stages: pieces of one model on several devices of a tower.

`stage` is the scope in which a model makes the operations of a stage. Operations outside of stages,
and gradient operations, get their stage here afterwards. `loop_state` places the TensorArrays and
the stacks of loops.
"""

import contextlib
import itertools
import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.arguments import check_count
from towers.errors import ModelFunctionError
from towers.graph.edit import (
    Library,
    colocate,
    colocated_names,
    is_colocated,
)
from towers.graph.graph_walk import devices_of, names_of, producers_of
from towers.graph.variable_access import read_from
from towers.placement.tower_device import (
    StageDevice,
    TowerDevice,
    current_stages,
    resources_taken,
    stages_of,
)


@contextlib.contextmanager
def stage(number: int) -> typing.Iterator[None]:
    """The scope of a stage, a piece of a model that is on one of a tower's devices.

    >>> with towers.stage(0):
    ...     net = stem(images)
    >>> with towers.stage(1):
    ...     logits = head(net)

    With `devices=[['/gpu:0', '/gpu:1'], ['/gpu:2', '/gpu:3']]` stage 1 is on `/gpu:1` in the first
    tower and on `/gpu:3` in the second one. A gradient operation goes to the device of its forward
    operation. An operation outside of stages goes to the last of the stages that its inputs are
    on: a loss, to the last stage. In a tower of one device, and outside of towers, the scope has no
    effect.

    Args:
      number: the number of the stage, from 0.

    Raises:
      InvalidArgumentError: `number` is no int of at least 0.
      ModelFunctionError: the tower has several devices, and none for a stage of this number.
    """
    check_count('number', number, least=0)
    if tf.executing_eagerly():  # towers are parts of a graph
        yield
        return
    stages = current_stages(tf.get_default_graph())
    if len(stages) <= 1:  # 0 outside of towers
        yield
        return
    if number >= len(stages):
        raise ModelFunctionError(
            'stage(%d), and the devices of this tower are %s: name %d devices for each tower, or '
            'one for all stages.' % (number, ' and '.join(stages), number + 1))
    with tf.device(StageDevice(stages[number], stages)):
        yield


def says_stages(operations: typing.Iterable[tf.Operation]) -> bool:
    """Whether the model has made any of these operations in the scope of a `stage`."""
    scopes = itertools.chain.from_iterable(map(compat.device_scopes, operations))
    return any(isinstance(scope, StageDevice) for scope in scopes)


def place_forward(operations: typing.Iterable[tf.Operation], device: str) -> None:
    """Puts each operation that the model has made outside of stages on the last stage that it takes
    a tensor from; on the first stage if it takes a tensor from no stage. An operation on a stage
    stays there.

    Args:
      operations: the operations of the forward pass, each after its inputs.
      device: the device of the tower.
    """
    stages = stages_of(device)
    if len(stages) == 1:
        return
    # {name of an operation: its device}, of the operations so far
    placed: typing.Dict[str, typing.Optional[str]] = {}
    library = Library(tf.get_default_graph())
    for op in operations:
        last_stage = _last_stage_of_inputs(op, placed, stages)
        if last_stage is not None and may_move(op, stages):  # else it stays where it was made
            move(op, last_stage, library)
        # TensorFlow places an operation on a TensorArray, which asks for no device, with the array.
        # Here the operation counts as on the last stage among its inputs: the stage of the loop
        # that fills the array. So operations that take its tensors go to that stage.
        placed[op.name] = op.device or last_stage


def _last_stage_of_inputs(op: tf.Operation, placed: typing.Dict[str, typing.Optional[str]],
                          stages: typing.Sequence[str]) -> typing.Optional[str]:
    """The device of the last stage that an operation takes a tensor from; None if it takes no
    tensor of an operation that is in `placed`, and on a stage there.

    Args:
      op: the operation.
      placed: {name of an operation: its device; None if it has none}.
      stages: the devices of the stages.
    """
    devices = {placed.get(source.name) for source in producers_of(op)}
    return max(devices.intersection(stages), key=stages.index, default=None)


def may_move(op: tf.Operation, stages: typing.Sequence[str]) -> bool:
    """Whether an operation may be put on another stage, since the model has not said where it is.

    Such an operation is on the first stage, by the device scope of the tower. If the model had said
    where it is, by `stage` or `tf.device`, that scope would be inside of the tower's scope.

    Args:
      op: the operation.
      stages: the devices of the stages of its tower.
    """
    if op.device != stages[0] or is_colocated(op):
        return False
    scopes = compat.device_scopes(op)  # the innermost scope first; [] outside of towers
    # A scope of `stage` is a `StageDevice`, a class below `TowerDevice`.
    return bool(scopes) and type(scopes[0]) is TowerDevice


def move(op: tf.Operation, device: str, library: Library) -> None:
    """Puts an operation on the device of a stage.

    Args:
      op: the operation.
      device: the device.
      library: the functions of the graph.

    Raises:
      ModelFunctionError: the operation calls a function with operations on another device. These
        devices are written in the function's definition, and other operations may also call the
        function.
    """
    if op.device == device:
        return
    called_functions = library.reached_from([op.node_def])
    for name, function in called_functions.items():
        devices = devices_of(function.node_def)
        if not devices <= {'', device}:  # a node on '' goes where `op` goes
            raise ModelFunctionError(
                'operation %s of another stage than the first calls the function %s, which '
                'stays where it was made: call tf.disable_control_flow_v2() before the model '
                'is made, and no tf.function or Defun in stages.' % (op.name, name))
    compat.set_device(op, device)


def check_stages(operations: typing.Sequence[tf.Operation], device: str) -> None:
    """Refuses a model in which a stage takes a tensor of a later stage: no pipeline can run it.

    Args:
      operations: the operations of the forward pass. The tensors of other operations, such as the
        tower's shard of the batch, are there before any stage runs.
      device: the device of the tower.

    Raises:
      ModelFunctionError: a stage takes a tensor of a later stage.
    """
    stages = stages_of(device)
    stage_numbers = {op.name: stages.index(op.device) for op in operations if op.device in stages}
    for op in operations:
        # If TensorFlow keeps an operation with another operation, its own device says nothing.
        if op.name in stage_numbers and not _is_kept_with_another(op):
            _check_takes_earlier(op, stage_numbers)


def _check_takes_earlier(op: tf.Operation, stage_numbers: typing.Dict[str, int]) -> None:
    """Raises `ModelFunctionError` for an operation that takes a tensor of a later stage.

    Args:
      op: the operation.
      stage_numbers: {name of an operation on a stage: the number of the stage}.
    """
    number = stage_numbers[op.name]
    for tensor in op.inputs:
        source_number = stage_numbers.get(tensor.op.name, 0)  # 0: there before any stage runs
        if source_number > number and not _is_before_all_stages(tensor):
            raise ModelFunctionError(
                'operation %s of stage %d takes %s of stage %d, so that the stages wait for '
                'each other in a circle: with micro_batches= data goes from a stage to later '
                'ones only.' % (op.name, number, tensor.name, source_number))


def _is_kept_with_another(op: tf.Operation) -> bool:
    """Whether TensorFlow keeps an operation with another operation, wherever the other is: the
    operation is colocated, or takes the handle of a variable."""
    return is_colocated(op) or bool(resources_taken(op))


def _is_before_all_stages(tensor: tf.Tensor) -> bool:
    """Whether a tensor is there before any stage runs: a constant, a variable or its value."""
    if tensor.dtype == tf.resource or tensor.op.type == 'Const':
        return True
    variables = read_from(tensor)  # empty unless the tensor is a variable's value
    return bool(variables)


def place_backward(operations: typing.Sequence[tf.Operation], loss: tf.Tensor,
                   device: str) -> None:
    """Puts each gradient operation of a tower on the stage of its forward operation.

    A gradient operation without a forward operation, such as a sum of gradients, goes to the first
    stage among its inputs, so that the gradient of each activation is sent only once.

    Args:
      operations: the gradient operations, each after its inputs.
      loss: the loss that was differentiated, on the last stage.
      device: the device of the tower.
    """
    stages = stages_of(device)
    if len(stages) == 1:
        return
    placement = _BackwardPlacement(operations, loss, stages)
    for op in operations:
        placement.place(op)


class _BackwardPlacement:
    """Puts a tower's gradient operations on stages, one after the other."""

    def __init__(self, operations: typing.Iterable[tf.Operation], loss: tf.Tensor,
                 stages: typing.Tuple[str, ...]):
        """
        Args:
          operations: all gradient operations.
          loss: the loss that was differentiated.
          stages: the devices of the stages.
        """
        self._stages = stages
        self._loss = loss
        self._placed: typing.Set[str] = set()  # names of the operations that are on their stage
        self._devices_of_loops = _devices_of_loops(loss.graph, operations, stages)
        self._library = Library(loss.graph)

    def place(self, op: tf.Operation) -> None:
        """Puts one operation on its stage, unless it has to stay: beside an operation that has no
        stage, or on a device of the program's own. Its inputs have been placed before."""
        leader_names = colocated_names(op)
        is_beside_unplaced = not self._placed.issuperset(leader_names)
        if is_beside_unplaced:
            return  # it is colocated with a variable, say
        if not leader_names and _is_group(op):
            device = self._colocate_group(op)
        else:
            device = self._device_of(op)
        if not {op.device, device}.issubset(self._stages):
            # The program has put the operation, or the operation that decides its stage, on a
            # device of no stage.
            return
        self._placed.add(op.name)
        move(op, device, self._library)
        if leader_names:
            # TensorFlow colocates some gradient operations with the gradient that they are computed
            # from, which is of a later stage. Colocated with itself alone, the operation goes to
            # its own device.
            colocate(op, [op])

    def _colocate_group(self, group: tf.Operation) -> str:
        """Colocates a group with the first operation that it waits for, and returns that
        operation's device.

        So the copy of the group for another tower is colocated with the copy of that operation, and
        is on a device of the other tower. Without the colocation the copy would stay on a device of
        this tower: `tf.group` makes a group in a `tf.device` scope, with the device of the grouped
        operations, and a copy keeps a device that the program has named by such a scope.

        Args:
          group: an operation that `tf.group` has made.
        """
        leader = group.control_inputs[0]
        colocate(group, [leader])
        return leader.device

    def _device_of(self, op: tf.Operation) -> str:
        """The device to put a gradient operation on: the device of its forward operation; else of
        the loop that it is in; else of the first stage among its inputs; else of the loss."""
        loop = compat.control_flow_context(op)  # None for an operation in no loop
        return (_stage_of_differentiated(op, self._stages)
                or self._devices_of_loops.get(loop)  # for a counter of iterations, say, or a stack
                or _first_stage_of_inputs(op, self._stages)
                or self._loss.op.device)


def _first_stage_of_inputs(op: tf.Operation,
                           stages: typing.Sequence[str]) -> typing.Optional[str]:
    """The device of the first stage that an operation takes a tensor from; None if it takes no
    tensor from a stage. Constants do not count: having no inputs, they are all on the first stage.
    """
    sources = [source for source in producers_of(op) if source.type != 'Const']
    return min(devices_of(sources).intersection(stages), key=stages.index, default=None)


def _stage_of_differentiated(op: tf.Operation,
                             stages: typing.Sequence[str]) -> typing.Optional[str]:
    """The device of the operation whose gradient function has made `op`; None if that operation is
    on no stage, or if no gradient function has made `op`, as `tf.gradients` itself makes a sum of
    gradients."""
    forward = compat.differentiated_operation(op)
    if forward is None or forward.device not in stages:
        return None
    return forward.device


def _is_group(op: tf.Operation) -> bool:
    """Whether `tf.group` has made an operation: it computes nothing, and waits for others."""
    return op.type == 'NoOp' and len(op.control_inputs) > 0


def _devices_of_loops(graph: tf.Graph, backward: typing.Iterable[tf.Operation],
                      stages: typing.Tuple[str, ...]) -> typing.Dict[typing.Any, str]:
    """Finds the device of each loop or branch (v1): the device of the first operation in it that is
    on a stage.

    Args:
      graph: the graph.
      backward: the gradient operations, which have no stage yet. The loop of a backward pass gets
        the device of the forward operations that its operations are gradients of.
      stages: the devices of the stages.

    Returns:
      {TensorFlow's object for the loop or branch: its device}.
    """
    backward_names = names_of(backward)
    devices: typing.Dict[typing.Any, str] = {}
    for op in filter(compat.in_control_flow, graph.get_operations()):
        device = op.device
        if op.name in backward_names:
            device = _stage_of_differentiated(op, stages)
        if device in stages:
            devices.setdefault(compat.control_flow_context(op), device)  # the first one stays
    return devices
