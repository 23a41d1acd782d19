"""Operations on GPUs without a kernel there, found in the graph of a build, on any machine.

TensorFlow's registry says for which devices and types an operation has a kernel. With soft
placement the placer takes an operation without a kernel for its device to the CPU, and with it all
operations that are colocated with it. A TensorFlow that was built without GPUs knows of no kernel.

Its test is tests/inspect/test_gpu_kernels.py.
"""

import collections
import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.gradients.tower import Tower
from towers.graph.edit import colocated_operations
from towers.graph.graph_walk import by_name, names_of, reached
from towers.placement.devices import is_gpu
from towers.placement.tower_device import operation_device, resources_taken

CPU = '/device:CPU:0'
"""The device to which soft placement takes an operation without a kernel."""


class MovedOperations(typing.NamedTuple):
    """Operations of one tower (or of none) that soft placement would take from a GPU to the CPU.

    Attributes:
      owner: the index of the tower; None for operations that belong to no tower.
      device: the GPU.
      on_floats: the operations without a kernel that have a floating-point result.
      on_others: the operations without a kernel on integers, strings and the like, which belong on
        the CPU.
      pulled: the operations with a kernel that are colocated with an operation without a kernel.
      bytes: the size of the tensors that then cross between GPU and CPU in a step.
      unknown: the number of such tensors whose size is not static; `bytes` does not count them.
    """
    owner: typing.Optional[int]
    device: str
    on_floats: typing.List[tf.Operation]
    on_others: typing.List[tf.Operation]
    pulled: typing.List[tf.Operation]
    bytes: int
    unknown: int


def knows_gpu_kernels() -> bool:
    """Whether this TensorFlow has kernels for GPUs, and so can tell which operation has none.

    Every TensorFlow for GPUs has a kernel for the product of matrices: this kernel is looked up.
    """
    return _has_kernel('MatMul', (('T', (tf.float32,)),))


def moved_operations(operations: typing.Iterable[tf.Operation],
                     towers: typing.Sequence[Tower]) -> typing.List[MovedOperations]:
    """Finds the operations on GPUs that soft placement would take to the CPU, by tower and GPU.

    Args:
      operations: the operations of a step.
      towers: the towers of the build.

    Returns:
      List of `MovedOperations`, one for each tower and GPU from which an operation would be taken,
      and last, one for each GPU with operations of no tower; [] where all operations have a kernel.
    """
    on_gpus = by_name(op for op in operations if is_gpu(operation_device(op)))
    without_kernel = names_of(_without_gpu_kernel(on_gpus.values()))
    moved = without_kernel | _pulled_along(without_kernel, on_gpus)
    groups: typing.Dict[tuple, typing.List[tf.Operation]] = collections.defaultdict(list)
    for name in sorted(moved):
        op = on_gpus[name]
        groups[_owner(name, towers), operation_device(op)].append(op)
    found = []
    for (owner, device), group in groups.items():
        found.append(_moved(owner, device, group, without_kernel, moved))
    return sorted(found, key=_owner_and_device)


def _owner_and_device(moved: MovedOperations) -> tuple:
    """A key to sort by: the towers by their indices, then no tower; then the devices."""
    has_no_owner = moved.owner is None
    return has_no_owner, moved.owner or 0, moved.device


def _moved(owner: typing.Optional[int], device: str, group: typing.List[tf.Operation],
           without_kernel: typing.Container[str], moved: typing.Container[str]) -> MovedOperations:
    """The `MovedOperations` of one tower and GPU.

    Args:
      owner: the index of the tower, or None.
      device: the GPU.
      group: the operations of this tower and GPU that would be on the CPU.
      without_kernel: names of all operations without a kernel.
      moved: names of all operations that would be on the CPU.
    """
    on_floats = []
    on_others = []
    pulled = []
    for op in group:
        if op.name not in without_kernel:
            pulled.append(op)
        elif computes_floats(op):
            on_floats.append(op)
        else:
            on_others.append(op)
    crossing = _crossing(group, moved)
    return MovedOperations(owner, device, on_floats, on_others, pulled, bytes=crossing.bytes,
                           unknown=crossing.unknown)


_Types = typing.Tuple[typing.Tuple[str, typing.Tuple[tf.DType, ...]], ...]
"""The types of an operation: pairs of an attribute, such as `'T'`, and the types that it has."""


def _without_gpu_kernel(operations: typing.Iterable[tf.Operation]) -> typing.List[tf.Operation]:
    """List of the operations for which this TensorFlow has no kernel on GPUs."""
    # Most of the operations of a graph are of few kinds; to look a kind up takes long.
    is_there: typing.Dict[tuple, bool] = {}  # by the type of operations and their `_Types`
    found = []
    for op in operations:
        kind = op.type, _types_of(op)
        if kind not in is_there:
            is_there[kind] = _has_kernel(*kind)
        if not is_there[kind]:
            found.append(op)
    return found


def has_gpu_kernel(op: tf.Operation) -> bool:
    """Whether this TensorFlow has a kernel on GPUs for an operation and its types."""
    return not _without_gpu_kernel([op])


def _types_of(op: tf.Operation) -> _Types:
    """The types of an operation."""
    types = []
    for attribute in op.op_def.attr:
        if attribute.type == 'type':
            types.append((attribute.name, (op.get_attr(attribute.name),)))
        elif attribute.type == 'list(type)':
            types.append((attribute.name, tuple(op.get_attr(attribute.name))))
    return tuple(types)


def _has_kernel(op_type: str, types: _Types) -> bool:
    """Whether a type of operation has a kernel for GPUs.

    Args:
      op_type: the type of the operation, such as `'MatMul'`.
      types: the types of an operation.
    """
    types_by_attribute = dict(types)
    for kernel in compat.registered_kernels(op_type):
        # 'DEFAULT' serves each device that has no kernel of its own.
        is_for_gpu = kernel.device_type in ('GPU', 'DEFAULT')
        if not is_for_gpu or kernel.label:  # TensorFlow takes a kernel with a label by request only
            continue
        if all(_allows(constraint, types_by_attribute) for constraint in kernel.constraint):
            return True
    return False


def _allows(constraint: typing.Any,
            types: typing.Mapping[str, typing.Sequence[tf.DType]]) -> bool:
    """Whether a constraint of a `KernelDef` on an attribute allows an operation's types.

    Args:
      constraint: the `KernelDef.AttrConstraint`.
      types: the types of the operation by the name of the attribute.
    """
    allowed = set(constraint.allowed_values.list.type)
    if not allowed:  # the constraint is on something else than types
        return True
    own_types = map(tf.as_dtype, types.get(constraint.name, ()))
    return {dtype.base_dtype.as_datatype_enum for dtype in own_types} <= allowed


def computes_floats(op: tf.Operation) -> bool:
    """Whether an operation has a floating-point result; if it has no results, whether it has
    a floating-point input."""
    tensors = op.outputs or op.inputs
    return any(tensor.dtype.base_dtype.is_floating for tensor in tensors)


def _pulled_along(without_kernel: typing.Set[str], on_gpus: typing.Dict[str, tf.Operation]
                  ) -> typing.Set[str]:
    """The operations that have a kernel, and that the placer keeps with an operation that has none.

    The placer keeps operations together that are colocated, or share a resource.

    Args:
      without_kernel: names of the operations on GPUs without a kernel.
      on_gpus: all operations on GPUs, by name.

    Returns:
      The names of the operations.
    """
    # {name of an operation: {name of an operation kept with it: that operation}}, both ways
    neighbours: typing.Dict[str, typing.Dict[str, tf.Operation]] = collections.defaultdict(dict)
    for op in on_gpus.values():
        for other in colocated_operations(op) + resources_taken(op):
            neighbours[op.name][other.name] = other
            neighbours[other.name][op.name] = op

    def kept_with(op: tf.Operation) -> typing.Iterable[tf.Operation]:
        """The operations that the placer keeps directly with an operation."""
        return neighbours[op.name].values()

    starts = [on_gpus[name] for name in without_kernel]
    all_kept_together = reached(starts, kept_with)  # {name: operation}, also on the CPU
    return (all_kept_together.keys() & on_gpus.keys()) - without_kernel


def _owner(name: str, towers: typing.Sequence[Tower]) -> typing.Optional[int]:
    """The index of the tower that has an operation of this name; None where no tower has it."""
    for tower in towers:
        if tower.has(name):
            return tower.index
    return None


class _Crossing(typing.NamedTuple):
    """The size of tensors that would cross between the CPU and a GPU."""
    bytes: int  # of the tensors whose size is static
    unknown: int  # number of the other tensors


def _crossing(group: typing.Iterable[tf.Operation], moved: typing.Container[str]) -> _Crossing:
    """Measures the tensors that would cross between moved operations and a GPU.

    Args:
      group: operations that would be on the CPU, of one tower and GPU.
      moved: names of all operations that would be on the CPU.
    """
    total = 0
    unknown = 0
    for tensor in _crossing_tensors(group, moved):
        if tensor.dtype in (tf.resource, tf.variant):  # a handle: its resource stays where it is
            continue
        elements = tensor.shape.num_elements()
        if elements is None or tensor.dtype == tf.string:
            unknown += 1
        else:
            total += elements * tensor.dtype.base_dtype.size
    return _Crossing(total, unknown)


def _crossing_tensors(group: typing.Iterable[tf.Operation], moved: typing.Container[str]
                      ) -> typing.Iterable[tf.Tensor]:
    """The tensors that would cross, each once; the arguments are those of `_crossing`."""
    tensors = {}
    for op in group:
        for tensor in op.inputs:
            comes_from_gpu = _stays_on_gpu(tensor.op, moved)
            if comes_from_gpu:
                tensors[tensor.name] = tensor
        for tensor in op.outputs:
            goes_to_gpu = any(_stays_on_gpu(taker, moved) for taker in tensor.consumers())
            if goes_to_gpu:
                tensors[tensor.name] = tensor
    return tensors.values()


def _stays_on_gpu(op: tf.Operation, moved: typing.Container[str]) -> bool:
    """Whether an operation is on a GPU, and is not one of those that would be `moved`."""
    return op.name not in moved and is_gpu(operation_device(op))
