"""One gradient per variable from those of all towers, on every tower: for replicated variables.

    combined[v] on each tower = sum over the towers k that have a gradient of v of gradients[k][v]

Two ways to the same sums:

* `'copy'`: each variable's gradients are added on one tower, which sends the sum to the others. The
  variables are dealt out so that every tower adds about as many bytes.
* `'collective'`: TF's own `CollectiveReduce` ops, in one session: a ring, or NCCL where TensorFlow
  chooses it for GPUs.

The latter reduces dense gradients; sparse ones (`IndexedSlices`) are concatenated as by `'copy'`
and stay sparse. Small gradients share a buffer, and a tower reduces one buffer after another, in
the same order on all towers, beginning with the variables made last, whose gradients come first in
a backward pass. So each tower runs one reduction at a time, and the other towers run the same one,
or run it next: with any number of threads no reduction waits for one that cannot start. On TF 2 a
session whose very first step fails cannot use `'collective'` again, and says so; later failures do
no harm.
"""

import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import DeviceError, GradientError
from towers.graph.graph_walk import bytes_of
from towers.placement.devices import short_name
from towers.placement.variable_device import only_device
from towers.reduce.combination import Combined, add_up, align, dense

METHODS = ('copy', 'collective')
BUFFER_BYTES = 4 << 20
"""Gradients are packed together up to this; a larger one is reduced as it is."""

def check_all_reduce(method, devices):
    """Raises `DeviceError` for towers that an all-reduce, one of `METHODS`, cannot reduce over."""
    specs = [tf.DeviceSpec.from_string(device) for device in devices]
    kinds = {(spec.job, spec.replica, spec.task, spec.device_type) for spec in specs}
    if method != 'copy' and (len(kinds) > 1 or len(set(devices)) < len(devices)):
        raise DeviceError(
            'all_reduce=%r reduces over devices of one type on one machine, one for each tower, '
            "and the towers are on %s: use 'copy'." % (
                method, ', '.join(short_name(device) for device in devices)))


def all_reduce(method, tower_gradients, others, devices):
    """Sums the towers' gradients variable by variable and gives each tower the sums.

    Args:
      method: one of `METHODS`, see `check_all_reduce`.
      tower_gradients: list, one entry a tower, of lists of `(gradient, variable)`; the variables
        are the model's own in every tower.
      others: list of further lists of pairs that belong to no tower, see `VariablesBehindInputs`.
      devices: the towers' devices.

    Returns:
      `Combined`.

    Raises:
      GradientError: as `combine_gradients`; or a dtype that the reduction cannot add.
    """
    aligned = align(list(tower_gradients) + list(others))
    on_towers = {}
    if method != 'copy':
        ringed = [(variable, present) for variable, present in aligned
                  if not all(isinstance(gradient, tf.IndexedSlices) for _, gradient in present)]
        on_towers.update(_by_buffers(ringed, devices))
    added = dict.fromkeys(range(len(devices)), 0)  # bytes that each tower adds
    for variable, present in aligned:
        if variable.op.name not in on_towers:
            tower = min(added, key=added.get)
            added[tower] += bytes_of(variable)
            with only_device(devices[tower]):
                total = add_up([gradient for _, gradient in present], variable)
            on_towers[variable.op.name] = [total] * len(devices)
    return Combined([(on_towers[variable.op.name][0], variable) for variable, _ in aligned],
                   on_towers)


def _by_buffers(aligned, devices):
    """Dict from names of variables to their reduced gradient on each tower."""
    for variable, present in aligned:
        dtype = present[0][1].dtype.base_dtype
        if dtype not in compat.COLLECTIVE_DTYPES:
            raise GradientError("all_reduce='collective' adds gradients of %s here, and that of %r "
                                "is %s: use 'copy'." % (
                                    ', '.join(each.name for each in compat.COLLECTIVE_DTYPES),
                                    variable.op.name, dtype.name))
    reduce = _collective(len(devices))
    last = [None] * len(devices)
    on_towers = {}
    for buffer in buffers_of(aligned):
        reduced = []
        for tower, device in enumerate(devices):
            gradients = [_of_tower(tower, present, variable, len(devices), device)
                         for variable, present in buffer]
            with only_device(device):
                packed = gradients[0] if len(gradients) == 1 else tf.concat(
                    [tf.reshape(each, [-1]) for each in gradients], 0)
                with tf.control_dependencies([last[tower]] if last[tower] is not None else []):
                    last[tower] = reduce(packed)
                last[tower].set_shape(packed.shape)
            reduced.append(last[tower])
        # A tower whose result nobody fetches (a gradient is summarized, or transformed once for
        # all) would not take part, and the others would wait for it.
        with only_device(devices[0]), tf.control_dependencies(reduced[1:]):
            reduced[0] = tf.identity(reduced[0])
        for tower, device in enumerate(devices):
            with only_device(device):
                pieces = [reduced[tower]] if len(buffer) == 1 else unpacked(
                    reduced[tower], [variable for variable, _ in buffer])
            for (variable, _), piece in zip(buffer, pieces):
                on_towers.setdefault(variable.op.name, []).append(piece)
    return on_towers


def buffers_of(aligned, most=None):
    """Lists of `(variable, present)` that share a buffer, the variables made last first.

    Args:
      aligned: list of `(variable, present)`, `present` a list of `(tower, gradient)`.
      most: bytes of a buffer; None for `BUFFER_BYTES`.
    """
    most = most or BUFFER_BYTES
    buffers, open_ones = [], {}  # dtype -> (the buffer to be filled, bytes in it)
    for variable, present in reversed(aligned):
        dtype, size = present[0][1].dtype.base_dtype, bytes_of(variable)
        if size > most or not variable.get_shape().is_fully_defined():
            buffers.append([(variable, present)])
            continue
        buffer, used = open_ones.get(dtype, (None, 0))
        if buffer is None or used + size > most:
            buffer, used = [], 0
            buffers.append(buffer)
        buffer.append((variable, present))
        open_ones[dtype] = (buffer, used + size)
    return buffers


def _of_tower(tower, present, variable, num_towers, device):
    """A tower's summand: its gradient, or zeros if it has none.

    Gradients that belong to no tower, of `VariablesBehindInputs`, are added to tower 0's.
    """
    gradients = [gradient for index, gradient in present
                 if index == tower or tower == 0 and index >= num_towers]
    with only_device(device):
        if gradients:
            return dense(add_up(gradients, variable), variable)
        return tf.zeros(tf.shape(present[0][1]) if not variable.get_shape().is_fully_defined()
                        else variable.get_shape(), present[0][1].dtype.base_dtype)


def unpacked(buffer, variables):
    """The gradients in a buffer [elements], a list, each of the shape of its variable."""
    shapes = [variable.get_shape().as_list() for variable in variables]
    pieces = tf.split(buffer, [variable.get_shape().num_elements() for variable in variables])
    return [tf.reshape(piece, shape) for piece, shape in zip(pieces, shapes)]


def _collective(num_towers):
    """A function that makes one `CollectiveReduce`, to be called for one tower after the other.

    The keys that bring the towers' ops together are new to the graph.
    """
    made = [op for op in tf.get_default_graph().get_operations()
            if op.type.startswith('Collective')]
    group = 1 + max([op.get_attr('group_key') for op in made if _has_keys(op)] or [0])
    first = 1 + max([op.get_attr('instance_key') for op in made if _has_keys(op)] or [0])
    calls = []

    def reduce(tensor):
        instance = first + len(calls) // num_towers
        calls.append(instance)
        return tf.raw_ops.CollectiveReduce(
            input=tensor, group_size=num_towers, group_key=group, instance_key=instance,
            merge_op='Add', final_op='Id', subdiv_offsets=[0])
    return reduce


def _has_keys(op):
    return 'group_key' in op.node_def.attr and 'instance_key' in op.node_def.attr
