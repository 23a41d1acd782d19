"""A description of the model that a worker is about to train, to be compared among all workers."""

import tensorflow.compat.v1 as tf

_WORDS = {'workers': 'its list of workers', 'ps': 'its list of parameter servers',
          'kind': 'its kind of cluster', 'towers': 'its number of towers',
          'examples': 'its number of examples a step', 'reduction': 'its reduction',
          'tensorflow': 'its TensorFlow', 'optimizer': 'its optimizer',
          'synchronous': 'synchronous', 'backup_workers': 'backup_workers'}


def fingerprint(cluster, built, examples, optimizer=None, settings=None):
    """A dict of JSON's types that is the same on all workers that belong together.

    Args:
      cluster: `Cluster`.
      built: `BuiltTowers`.
      examples: the batch of this machine where all have to have the same, or None.
      optimizer: name of the optimizer's class.
      settings: dict of what else has to agree, from names to numbers or strings.
    """
    return {
        'kind': cluster.kind, 'workers': list(cluster.workers), 'ps': list(cluster.ps),
        'synchronous': cluster.synchronous, 'backup_workers': cluster.backup_workers,
        # 1.15 and 2.21 do not understand each other's messages.
        'tensorflow': tf.VERSION if hasattr(tf, 'VERSION') else tf.__version__,
        'towers': len(built.devices), 'reduction': built.plan.reduction, 'examples': examples,
        'optimizer': optimizer, 'settings': dict(settings or {}),
        'variables': [[variable.op.name, variable.dtype.base_dtype.name,
                       str(variable.get_shape())] for variable in built.variables]}


def difference(own, other):
    """In what another fingerprint differs, one clause; None where it does not."""
    for key in ('kind', 'workers', 'ps', 'synchronous', 'backup_workers', 'tensorflow', 'towers',
                'reduction', 'examples', 'optimizer'):
        if own.get(key) != other.get(key):
            return '%s is %s, and that of worker 0 %s' % (
                _WORDS[key], _text(other.get(key)), _text(own.get(key)))
    ours = {each[0]: each[1:] for each in own['variables']}
    theirs = {each[0]: each[1:] for each in other.get('variables', ())}
    for name in list(ours) + list(theirs):
        if ours.get(name) != theirs.get(name):
            return 'its model is another one: variable %r is %s, and that of worker 0 %s' % (
                name, _variable(theirs.get(name)), _variable(ours.get(name)))
    mine, yours = own['settings'], other.get('settings', {})
    for name in sorted(set(mine) | set(yours)):
        if mine.get(name) != yours.get(name):
            return 'its %s is %s, and that of worker 0 %s' % (
                name, _text(yours.get(name)), _text(mine.get(name)))
    return None


def _variable(entry):
    return 'missing' if entry is None else '%s %s' % tuple(entry)


def _text(value):
    if isinstance(value, list):
        return ', '.join(map(str, value)) or 'empty'
    return 'not given' if value is None else str(value)
