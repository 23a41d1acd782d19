"""What `check_towers` takes: its arguments, and those of `build_towers` that it hands on."""

import collections
import functools
import numbers

import numpy as np
import tensorflow.compat.v1 as tf

from towers import compat
from towers.arguments import check_choice, check_count, check_function, check_instance
from towers.api.options import Memory, Pipeline
from towers.api.request import REDUCTIONS, check_model_fn
from towers.cluster.cluster import KINDS
from towers.errors import InputError, InvalidArgumentError

OPTIONS = ('devices', 'remainder', 'variables', 'regularization', 'update_ops', 'copies', 'memory',
           'pipeline', 'batch_norm')


def check_arguments(model_fn, inputs, make_optimizer, num_towers, steps, reduction, tolerance, seed,
                    options):
    """The options, with defaults for those left out; see `check_towers`.

    Args:
      options: dict of arguments of `build_towers`.

    Raises:
      TowersError: arguments that `check_towers` does not take.
    """
    check_model_fn(model_fn)
    check_choice('reduction', reduction, REDUCTIONS)
    if all(leaf is None for leaf in tf.nest.flatten(inputs)):
        raise InputError('inputs=%.80r: expected a sample batch, of at least one array [n, …].'
                         % (inputs,))
    for leaf in tf.nest.flatten(inputs):
        if isinstance(leaf, (tf.Tensor, tf.SparseTensor) + compat.VARIABLE_TYPES):
            raise InputError('inputs hold the tensor %r: check_towers makes graphs of its own and '
                             'takes arrays, such as np.random.rand(8, 3).' % leaf.name
                             if not isinstance(leaf, tf.SparseTensor) else
                             'inputs hold a SparseTensor: check_towers makes graphs of its own and '
                             'takes tf.SparseTensorValues.')
    if make_optimizer is not None:
        if isinstance(make_optimizer, type):
            make_optimizer = functools.partial(make_optimizer)  # a class makes one, too
        check_function('make_optimizer', make_optimizer, 0, 'a function that makes the optimizer, '
                       'such as lambda: tf.train.AdamOptimizer(0.001), since there are two graphs')
    for name, value, least in (('num_towers', num_towers, 1), ('steps', steps, 1),
                               ('seed', seed, 0)):
        check_count(name, value, least)
    if tolerance is not None and (isinstance(tolerance, bool) or not isinstance(
            tolerance, numbers.Real) or not tolerance >= 0):
        raise InvalidArgumentError('tolerance=%r: expected None or a number of at least 0.'
                                   % (tolerance,))
    unknown = sorted(set(options) - set(OPTIONS))
    if unknown:
        raise InvalidArgumentError(
            'check_towers takes no %s: expected some of make_optimizer, %s.%s' % (
                unknown[0], ', '.join(OPTIONS),
                ' make_optimizer= is a function that makes the optimizer: there are two graphs.'
                if unknown[0] == 'optimizer' else ''))
    options = dict(options)
    for name, kind in (('memory', Memory), ('pipeline', Pipeline)):
        given = options.get(name)
        options[name] = kind() if given is None else given
        check_instance(name, options[name], kind, 'a towers.%s, or None' % kind.__name__)
    return options


class Machines(collections.namedtuple('Machines', 'kind shares num_ps')):
    """The workers of `check_towers(cluster=…)`: the kind of cluster, their shares of a batch, and
    the number of parameter servers."""
    __slots__ = ()

    def sizes(self, inputs):
        """How many of the inputs' examples each worker has."""
        leaves = tf.nest.flatten(inputs)
        sparse = [leaf for leaf in leaves if isinstance(leaf, tf.SparseTensorValue)]
        counts = {np.shape(leaf)[0] if np.ndim(leaf) else None for leaf in leaves
                  if leaf is not None}
        if sparse or len(counts) != 1 or None in counts:
            raise InputError('inputs=%.80r: with cluster= expected arrays [n, …] of the same n, '
                             'which can be cut into the parts of the workers.' % (inputs,))
        [count] = counts
        if not count or count % sum(self.shares):
            raise InvalidArgumentError(
                'shares=%r of %d examples: expected whole numbers whose sum divides the number of '
                'examples.' % (self.shares, count))
        return [share * count // sum(self.shares) for share in self.shares]


def checked_machines(cluster, shares, num_ps, same_shards, options):
    """The `Machines` that `check_towers` is asked for; None for one machine."""
    if cluster is None:
        if num_ps is not None:
            raise InvalidArgumentError("num_ps=%r goes with cluster='ps'." % (num_ps,))
        return None
    if not isinstance(cluster, str):
        raise InvalidArgumentError(
            'cluster=%.80r: check_towers starts workers of its own, and takes the kind of cluster: '
            '%s.' % (cluster, ', '.join(map(repr, KINDS))))
    check_choice('cluster', cluster, KINDS)
    for name in ('devices', 'remainder'):
        if name in options:
            raise InvalidArgumentError(
                '%s= and cluster=: %s. Pass one of the two.' % (name, {
                    'devices': 'each worker has num_towers towers on CPUs of its own',
                    'remainder': "a worker's batch that does not divide is weighted"}[name]))
    if num_ps is not None and cluster != 'ps':
        raise InvalidArgumentError("num_ps=%r goes with cluster='ps', and it is %r."
                                   % (num_ps, cluster))
    check_count('num_ps', 1 if num_ps is None else num_ps)
    shares = (1, 1) if shares is None else shares
    if not isinstance(shares, (tuple, list)) or len(shares) < 2 or not all(
            isinstance(share, numbers.Integral) and not isinstance(share, bool) and share > 0
            for share in shares):
        raise InvalidArgumentError('shares=%.80r: expected the parts of two or more workers, whole '
                                   'numbers such as (1, 1) or (3, 1).' % (shares,))
    if same_shards and len(set(shares)) > 1:
        raise InvalidArgumentError('shares=%r and same_shards=True: all shards are the same, so '
                                   'that the workers have equal parts.' % (tuple(shares),))
    return Machines(cluster, tuple(int(share) for share in shares),
                    1 if num_ps is None else int(num_ps))
