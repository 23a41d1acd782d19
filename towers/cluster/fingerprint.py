"""A description of the model that a worker is about to train, to be compared among all workers."""

import tensorflow.compat.v1 as tf

from towers.cluster.forward_digest import difference_of_forward, forward_digest
from towers.cluster.gradient_kinds import difference_of_kinds
from towers.cluster.several_builds import builds_of
from towers.cluster.state_from_worker_0 import ADDED_UP
from towers.cluster.update_numbers import constants_of_updates, difference_of_constants
from towers.cluster.update_operations import difference_of_operations, operations_of_updates
from towers.cluster.update_parts import parts_of_updates
from towers.graph.graph_walk import step_operations

_WORDS = {'workers': 'its list of workers', 'ps': 'its list of parameter servers',
          'kind': 'its kind of cluster', 'towers': 'its number of towers',
          'examples': 'its number of examples a step', 'reduction': 'its reduction',
          'tensorflow': 'its TensorFlow', 'optimizer': 'its optimizer',
          'synchronous': 'synchronous', 'backup_workers': 'backup_workers'}


def fingerprint_of_all(cluster, built, settings=None):
    """The `fingerprint` of a build and, under `'others'`, those of the others in its graph.

    Args:
      cluster, built, settings: as for `fingerprint`.
    """
    builds = builds_of(built)
    own = dict(_of_build(cluster, built, settings), others=[
        _of_build(cluster, each) for each in builds if each is not built])
    if own['others']:
        own['joined'] = [each is built for each in builds].index(True)
    return own


def _of_build(cluster, built, settings=None):
    return fingerprint(cluster, built, built.machines.same_examples, built.plan.optimizer,
                       settings)


def fingerprint(cluster, built, examples, optimizer=None, settings=None):
    """A dict of JSON's types that is the same on all workers that belong together.

    Args:
      cluster: `Cluster`.
      built: `BuiltTowers`.
      examples: number of examples in this machine's batch, if all machines need the same number;
        else None.
      optimizer: name of the optimizer's class.
      settings: dict of further values that have to agree, from names to numbers or strings. They
        are compared before the model; the optimizer's hyper-parameters, where each worker makes
        the update itself, after it.
    """
    parts = parts_of_updates(cluster, built)
    return {
        'kind': cluster.kind, 'workers': list(cluster.workers), 'ps': list(cluster.ps),
        'synchronous': cluster.synchronous, 'backup_workers': cluster.backup_workers,
        # 1.15 and 2.21 do not understand each other's messages.
        'tensorflow': tf.VERSION if hasattr(tf, 'VERSION') else tf.__version__,
        'towers': len(built.devices), 'reduction': built.plan.reduction, 'examples': examples,
        'optimizer': optimizer, 'given': dict(settings or {}),
        'settings': _numbers_of_updates(cluster, built),
        'forward': forward_digest(built) if cluster.num_workers > 1 else {},
        'gradients': built.machines.kinds, 'updates': constants_of_updates(parts),
        'update_operations': operations_of_updates(built, parts),
        'variables': [[variable.op.name, variable.dtype.base_dtype.name,
                       str(variable.get_shape())] for variable in built.variables]}


def difference(own, other):
    """How a worker's fingerprint `other` differs from worker 0's, `own`: a clause, or None."""
    for key in ('kind', 'workers', 'ps', 'synchronous', 'backup_workers', 'tensorflow', 'towers',
                'reduction', 'examples', 'optimizer'):
        if own.get(key) != other.get(key):
            return '%s is %s, and that of worker 0 %s' % (
                _WORDS[key], _text(other.get(key)), _text(own.get(key)))
    why = _difference_of_settings(own, other, 'given')  # which says why the rest differs
    if why is not None:
        return why
    ours = {each[0]: each[1:] for each in own['variables']}
    theirs = {each[0]: each[1:] for each in other.get('variables', ())}
    for name in list(ours) + list(theirs):
        if ours.get(name) != theirs.get(name):
            return 'its model is another one: variable %r is %s, and that of worker 0 %s' % (
                name, _variable(theirs.get(name)), _variable(ours.get(name)))
    why = difference_of_kinds(own['gradients'], other.get('gradients', ()))
    if why is not None:
        return why
    why = difference_of_forward(own.get('forward'), other.get('forward'))
    if why is not None:
        return why
    mine, yours = own.get('servers', {}), other.get('servers', {})
    for name in sorted(set(mine) & set(yours)):
        if mine[name] != yours[name]:
            return ('its variable %r is on ps %d, and that of worker 0 on ps %d, since the two '
                    'spread other variables: make the same ones on all workers, also those that '
                    'the chief alone needs' % (name, yours[name], mine[name]))
    for name in sorted(set(yours) - set(mine)) if mine else ():
        return ('it has the variable %r, and worker 0, which gives the variables on the servers '
                'their values, has none: it would wait for ever. Make the same ones on all '
                'workers (in a name scope of its own each optimizer has others, too), or what '
                'one of them needs for itself in collections=[tf.GraphKeys.LOCAL_VARIABLES]'
                % name)
    return (_difference_of_settings(own, other, 'settings')
            or difference_of_constants(own['updates'], other.get('updates', ()))
            or difference_of_operations(own.get('update_operations'),
                                        other.get('update_operations'))
            or _difference_of_others(own, other))


def _difference_of_settings(own, other, key):
    mine, yours = own.get(key, {}), other.get(key, {})
    for name in sorted(set(mine) | set(yours)):
        if mine.get(name) != yours.get(name):
            return 'its %s is %s, and that of worker 0 %s' % (
                name, _text(yours.get(name)), _text(mine.get(name)))
    return None


def _difference_of_others(own, other):
    ours, theirs = own.get('others', ()), other.get('others', ())
    if len(ours) != len(theirs):
        return ('it builds towers with cluster= %d times, and worker 0 %d times: make the same '
                'builds on all workers, in the same order' % (1 + len(theirs), 1 + len(ours)))
    if own.get('joined') != other.get('joined'):
        return ('it gives build %s of the graph to join, and worker 0 build %s: give the same one '
                'on all workers' % (other.get('joined'), own.get('joined')))
    for place, (our, their) in enumerate(zip(ours, theirs)):
        why = difference(our, their)
        if why is not None:
            return 'in build %d of the graph %s' % (place + (place >= own.get('joined', 0)), why)
    return None


_NOT_NUMBERS = ('var', 'grad', 'delta')  # inputs of an update that are no hyper-parameters
_MOST_OPERATIONS = 300  # of a schedule; a number of more operations is computed by the model


def _numbers_of_updates(cluster, built):
    """Learning rate, momentum and the like, as the graph has them: dict from names to texts.

    Workers whose updates differ in these numbers drift apart without an error. Where the chief
    makes the one update for all, the dict is empty.
    """
    found = {}
    if cluster.kind == 'ps' and cluster.synchronous:
        return found
    state = sorted(variable.op.name for variable in getattr(built.machines, 'state', ()))
    if state:  # worker 0 sends it, and the others wait for it
        found['state that training reads'] = {', '.join(state)}
    for op in step_operations([built.train_op]):
        if 'Apply' not in op.type:
            continue
        for argument, tensor in zip(op.op_def.input_arg, op.inputs):
            if (argument.name not in _NOT_NUMBERS and tensor.shape.ndims == 0
                    and tensor.dtype.base_dtype.is_floating):
                text = _number(tensor)
                if text is not None:
                    found.setdefault('%s of %s' % (argument.name, op.type), set()).add(text)
    return {name: ', '.join(sorted(texts)) for name, texts in found.items()}


def _number(tensor):
    """A hyper-parameter as text: its value; of a computed one, the constants in its computation.

    None where the model, or another worker, has a part in it.
    """
    ops = _made_of(tensor)
    if len(ops) > _MOST_OPERATIONS or any(op.type.startswith(ADDED_UP) for op in ops):
        return None
    numbers = []
    for op in ops:
        if op.type == 'Const':
            value = tf.make_ndarray(op.get_attr('value'))
            if value.dtype.kind in 'biuf' and value.size <= 64:
                numbers += ['%.9g' % each for each in value.reshape(-1).tolist()]
    if all(op.type in ('Const', 'Identity', 'Cast') for op in ops):
        return ' '.join(numbers)
    return 'computed by %d operations from %s' % (len(ops), ' '.join(sorted(numbers)) or 'none')


def _made_of(tensor):
    """The operations that a tensor is computed by, without those that it only waits for."""
    stack, seen = [tensor.op], {tensor.op.name: tensor.op}
    while stack and len(seen) <= _MOST_OPERATIONS:
        for other in stack.pop().inputs:
            if other.op.name not in seen:
                seen[other.op.name] = other.op
                stack.append(other.op)
    return list(seen.values())


def _variable(entry):
    return 'missing' if entry is None else '%s %s' % tuple(entry)


def _text(value):
    if isinstance(value, list):
        return ', '.join(map(str, value)) or 'empty'
    return 'not given' if value is None else str(value)
