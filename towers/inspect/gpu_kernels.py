"""Operations on GPUs without a kernel there, found in the graph of a build, on any machine.

TensorFlow's registry of kernels says for which devices and types an operation has one. With soft
placement the placer takes an operation without a kernel for its device to the CPU, and with it all
operations that are colocated with it. A TensorFlow that was built without GPUs knows of no kernel.
"""

import collections
import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.graph.edit import colocated_operations
from towers.placement.devices import is_gpu
from towers.placement.tower_device import operation_device, resources_taken

CPU = '/device:CPU:0'
"""Where soft placement takes what has no kernel on its device."""


class MovedOperations(typing.NamedTuple):
    """Operations of one owner that soft placement would take from one GPU to the CPU.

    Attributes:
      owner: number of the tower; None for operations that belong to no tower.
      device: the GPU.
      on_floats: list of the operations without a kernel that have a floating-point result.
      on_others: list of those on integers, strings and the like, which belong on the CPU.
      pulled: list of the operations that have a kernel, and are colocated with one that has none.
      bytes: of the tensors that then cross between GPU and CPU in a step.
      unknown: how many more tensors cross, of unknown size.
    """
    owner: typing.Optional[int]
    device: str
    on_floats: typing.List[tf.Operation]
    on_others: typing.List[tf.Operation]
    pulled: typing.List[tf.Operation]
    bytes: int
    unknown: int


def knows_gpu_kernels() -> bool:
    """Whether this TensorFlow has kernels for GPUs, and so can tell which operation has none."""
    return _has_kernel('MatMul', {'T': [tf.float32]})


def moved_operations(operations: typing.Iterable[tf.Operation],
                     towers: typing.Sequence) -> typing.List[MovedOperations]:
    """The operations on GPUs that soft placement would take to the CPU, by tower and GPU.

    Args:
      operations: those of a step.
      towers: the `Tower`s of the build.

    Returns:
      list of `MovedOperations`; empty where all have a kernel.
    """
    on_gpus = {op.name: op for op in operations if is_gpu(operation_device(op))}
    without = {name for name, op in on_gpus.items() if not has_gpu_kernel(op)}
    moved = without | _pulled_along(without, on_gpus)
    by_owner: typing.Dict[tuple, typing.List[tf.Operation]] = collections.defaultdict(list)
    for name in sorted(moved):
        op = on_gpus[name]
        by_owner[_owner(name, towers), operation_device(op)].append(op)
    found = [_moved(owner, device, ops, without, moved)
             for (owner, device), ops in by_owner.items()]
    return sorted(found, key=lambda each: (each.owner is None, each.owner or 0, each.device))


def _moved(owner: typing.Optional[int], device: str, ops: typing.List[tf.Operation],
           without: typing.Container[str], moved: typing.Container[str]) -> MovedOperations:
    """The `MovedOperations` of one tower and GPU.

    Args:
      owner: number of the tower, or None.
      device: the GPU.
      ops: its operations that would be on the CPU.
      without: names of all operations without a kernel.
      moved: names of all operations that would be on the CPU.
    """
    on_floats = []
    on_others = []
    pulled = []
    for op in ops:
        if op.name not in without:
            pulled.append(op)
        elif computes_floats(op):
            on_floats.append(op)
        else:
            on_others.append(op)
    size, unknown = _crossing(ops, moved)
    return MovedOperations(owner, device, on_floats, on_others, pulled, size, unknown)


def has_gpu_kernel(op: tf.Operation) -> bool:
    """Whether this TensorFlow has a kernel on GPUs for an operation and its types."""
    types: typing.Dict[str, typing.Sequence[tf.DType]] = {}
    for attribute in op.op_def.attr:
        if attribute.type in ('type', 'list(type)'):
            value = op.get_attr(attribute.name)
            types[attribute.name] = value if isinstance(value, (list, tuple)) else [value]
    return _has_kernel(op.type, types)


def _has_kernel(op_type: str, types: typing.Dict[str, typing.Sequence[tf.DType]]):
    """Whether a type of operation has a kernel for GPUs; `types` are those of its attributes that
    are types."""
    for kernel in compat.registered_kernels(op_type):
        # 'DEFAULT' serves each device that has no kernel of its own.
        if kernel.device_type in ('GPU', 'DEFAULT') and not kernel.label:
            if all(_allows(constraint, types) for constraint in kernel.constraint):
                return True
    return False


def _allows(constraint: typing.Any, types: typing.Dict[str, typing.Sequence[tf.DType]]):
    """Whether a constraint of a `KernelDef` allows the types of an operation."""
    allowed = set(constraint.allowed_values.list.type)
    if not allowed:
        return True
    codes = {tf.as_dtype(each).base_dtype.as_datatype_enum
             for each in types.get(constraint.name, ())}
    return codes <= allowed


def computes_floats(op: tf.Operation) -> bool:
    """Whether an operation has a floating-point result, or takes one and has none but a side
    effect."""
    tensors = op.outputs or op.inputs
    return any(tensor.dtype.base_dtype.is_floating for tensor in tensors)


def _pulled_along(without: typing.Set[str], on_gpus: typing.Dict[str, tf.Operation]):
    """Names of the operations on GPUs that the placer keeps with one of those `without` a kernel:
    those that are colocated, and those that share a resource."""
    together = collections.defaultdict(set)
    for name, op in on_gpus.items():
        for other in colocated_operations(op) + resources_taken(op):
            together[name].add(other.name)
            together[other.name].add(name)
    stack = list(without)
    found = set(without)
    while stack:
        for name in together[stack.pop()]:
            if name not in found:
                found.add(name)
                stack.append(name)
    return (found & on_gpus.keys()) - without


def _owner(name: str, towers: typing.Sequence):
    """The number of the tower that has an operation; None where none has."""
    return next((tower.index for tower in towers if tower.has(name)), None)


def _crossing(ops: typing.Iterable[tf.Operation], moved: typing.Container[str]):
    """`(bytes, count of unknown ones)` of the tensors between moved operations and a GPU.

    Args:
      ops: operations that would be on the CPU, of one tower.
      moved: names of all that would be there.
    """
    tensors = {}
    for op in ops:
        for tensor in op.inputs:
            if _stays_on_gpu(tensor.op, moved):
                tensors[tensor.name] = tensor
        for tensor in op.outputs:
            if any(_stays_on_gpu(taker, moved) for taker in tensor.consumers()):
                tensors[tensor.name] = tensor
    total = 0
    unknown = 0
    for tensor in tensors.values():
        elements = tensor.shape.num_elements()
        if tensor.dtype in (tf.resource, tf.variant):
            continue
        if elements is None or tensor.dtype == tf.string:
            unknown += 1
        else:
            total += elements * tensor.dtype.base_dtype.size
    return total, unknown


def _stays_on_gpu(op: tf.Operation, moved: typing.Container[str]):
    """Whether an operation is on a GPU, and not among the names of the `moved` ones."""
    return op.name not in moved and is_gpu(operation_device(op))
