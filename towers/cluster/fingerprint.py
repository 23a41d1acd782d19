"""A description of the model that a worker is about to train, to be compared among all workers."""

import tensorflow.compat.v1 as tf

from towers.cluster.gradient_kinds import difference_of_kinds
from towers.cluster.several_builds import builds_of
from towers.cluster.signature import difference_of_signatures, signature_of_loss

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
        _of_build(cluster, each) for each in builds if each.machines is not built.machines])
    if own['others']:
        own['build_of_join'] = [each.machines is built.machines for each in builds].index(True)
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
        are compared before the model.
    """
    machines = built.machines
    return {
        'kind': cluster.kind, 'workers': list(cluster.workers), 'ps': list(cluster.ps),
        'synchronous': cluster.synchronous, 'backup_workers': cluster.backup_workers,
        # 1.15 and 2.21 do not understand each other's messages.
        'tensorflow': tf.VERSION if hasattr(tf, 'VERSION') else tf.__version__,
        'towers': len(built.devices), 'reduction': built.plan.reduction, 'examples': examples,
        'optimizer': optimizer, 'settings': dict(settings or {}),
        'loss': signature_of_loss(built) if cluster.num_workers > 1 else {},
        'gradients': machines.kinds, 'update': machines.update,
        # Worker 0 sends it, and the others wait for it.
        'state': sorted(variable.op.name for variable in getattr(machines, 'state', ())),
        'variables': [[variable.op.name, variable.dtype.base_dtype.name,
                       str(variable.get_shape())] for variable in built.variables]}


def difference(own, other):
    """How a worker's fingerprint `other` differs from worker 0's, `own`: a clause, or None."""
    for key in ('kind', 'workers', 'ps', 'synchronous', 'backup_workers', 'tensorflow', 'towers',
                'reduction', 'examples', 'optimizer'):
        if own.get(key) != other.get(key):
            return '%s is %s, and that of worker 0 %s' % (
                _WORDS[key], _text(other.get(key)), _text(own.get(key)))
    why = _difference_of_settings(own, other)  # which says why the rest differs
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
    why = difference_of_signatures(own.get('loss'), other.get('loss'))
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
    if own.get('state') != other.get('state'):
        return 'its state that training reads is %s, and that of worker 0 %s' % (
            _text(other.get('state')), _text(own.get('state')))
    return (difference_of_signatures(own.get('update'), other.get('update'))
            or _difference_of_others(own, other))


def _difference_of_settings(own, other):
    mine, yours = own.get('settings', {}), other.get('settings', {})
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
    if own.get('build_of_join') != other.get('build_of_join'):
        return ('it gives build %s of the graph to join, and worker 0 build %s: give the same one '
                'on all workers' % (other.get('build_of_join'), own.get('build_of_join')))
    for place, (our, their) in enumerate(zip(ours, theirs)):
        why = difference(our, their)
        if why is not None:
            number = place + (place >= own.get('build_of_join', 0))
            return 'in build %d of the graph %s' % (number, why)
    return None


def _variable(entry):
    return 'missing' if entry is None else '%s %s' % tuple(entry)


def _text(value):
    if isinstance(value, list):
        return ', '.join(map(str, value)) or 'empty'
    return 'not given' if value is None else str(value)
