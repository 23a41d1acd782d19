"""What is compared: batches, towers and learning rates, as runs of train.py.

With B examples a tower, N towers and rate r, every arm sees the same examples in the same order:

    one       1 x B      at r            the run that the claim starts from
    sqrt      N x B      at r sqrt(N)    the claim
    same      N x B      at r            no scaling
    linear    N x B      at r N
    big       1 x N B    at r sqrt(N)    the claim's batch on one tower: towers must change nothing
                                         (but what batch norm sees: a shard, or the whole batch)
    sync      N x B      at r sqrt(N)    the claim with batch norm in sync, of the whole batch

Other factors than N (`factors`) put another multiple f of B, at the rate scaled to it, in N B's
place. What is more than N B comes to the N towers in turns: each accumulates the gradients of f / N
shards of B before an update. Batch norm cannot be in sync over shards that are not there at the
same time, so there `sync` is left out.
"""

import collections
import json
import os

from towers.errors import InvalidArgumentError
from towers.run.learning_rate import scale_learning_rate

ARMS = collections.OrderedDict([
    # name: (on N towers, with N times the batch, rule of the rate, batch norm)
    ('one', (False, False, 'none', 'shard')),
    ('sqrt', (True, True, 'sqrt', 'shard')),
    ('same', (True, True, 'none', 'shard')),
    ('linear', (True, True, 'linear', 'shard')),
    ('big', (False, True, 'sqrt', 'shard')),
    ('sync', (True, True, 'sqrt', 'sync'))])

Settings = collections.namedtuple('Settings', [
    'model', 'dataset', 'data_dir', 'image_size', 'num_towers', 'batch_size', 'learning_rate',
    'optimizer', 'reduction', 'warmup_epochs', 'batch_norm_decay', 'aux_loss_weight',
    'examples', 'evaluations', 'seeds', 'factors'])
Settings.__new__.__defaults__ = (None,)
Settings.__doc__ = """What all arms of a set have in common.

Fields:
  model, dataset, data_dir, image_size, optimizer, reduction, aux_loss_weight: as train.py's flags.
  num_towers: N.
  batch_size: B, examples a tower.
  learning_rate: r.
  warmup_epochs: list of floats: each arm whose rate is scaled runs with each of them.
  batch_norm_decay: of batch norm's moving averages at batch B, or None for the network's own. A
    batch N times as large has N times fewer steps to average over, and decays by its N-th power.
  examples: that every run sees; a multiple of the largest batch times `evaluations`.
  evaluations: how many there are on the way, the last one at the end.
  seeds: how many seeds, from 1 on.
  factors: list of how many times B the larger batches are; None: N. 1 is the arm `one`.
"""


class Arm(collections.namedtuple(
        'Arm', 'key towers batch_size rule rate warmup_epochs accumulate batch_norm')):
    """One way to train. `key`: 'sqrt', or 'sqrt-x16-warmup-1'; `batch_size`: of an update."""
    __slots__ = ()

    @property
    def label(self):
        """Such as '4 x 25 at 0.002', or '4 x 8 x 25 at 0.004' of 4 towers that take 8 turns."""
        text = '%d x ' % self.towers + ('%d x ' % self.accumulate if self.accumulate > 1 else '')
        text += '%d at %.4g' % (self.batch_size // self.towers // self.accumulate, self.rate)
        if self.batch_norm == 'sync':
            text += ', in sync'
        if self.warmup_epochs:
            text += ', warm-up %g' % self.warmup_epochs
        return text

    @property
    def kind(self):
        """The arm's name in `ARMS`, such as 'sqrt'."""
        return self.key.split('-')[0]


class Run(collections.namedtuple('Run', 'arm seed folder flags')):
    """One run of train.py: its folder and its flags, without --train_dir."""
    __slots__ = ()

    @property
    def label(self):
        """Such as '4 x 25 at 0.002, seed 1'."""
        return '%s, seed %d' % (self.arm.label, self.seed)


def make_arms(settings, names=None):
    """The arms of a set, in the order of `ARMS`.

    Args:
      settings: `Settings`.
      names: of those wanted; None for all.

    Raises:
      InvalidArgumentError: a name that there is not; a factor that N does not divide.
    """
    for name in names or ():
        if name not in ARMS:
            raise InvalidArgumentError('There is no arm %r; there are %s.'
                                       % (name, ', '.join(ARMS)))
    arms, factors = [], [each for each in factors_of(settings) if each > 1]
    for name, (on_towers, larger, rule, batch_norm) in ARMS.items():
        if names and name not in names:
            continue
        for factor in factors if larger else [1]:
            towers = min(factor, settings.num_towers) if on_towers else 1
            accumulate = factor // towers if on_towers else 1
            if factor % towers:
                raise InvalidArgumentError('A batch of %d times B does not divide among %d towers.'
                                           % (factor, towers))
            if batch_norm == 'sync' and accumulate > 1:
                continue
            key = name if factor in (1, settings.num_towers) else '%s-x%d' % (name, factor)
            # Warm-up goes from r to the scaled rate: where nothing is scaled there is none.
            for warmup in settings.warmup_epochs if rule != 'none' else [0.]:
                arms.append(Arm(
                    key=key if not warmup else '%s-warmup-%g' % (key, warmup), towers=towers,
                    batch_size=settings.batch_size * factor, rule=rule,
                    rate=scale_learning_rate(settings.learning_rate, factor, rule),
                    warmup_epochs=warmup, accumulate=accumulate, batch_norm=batch_norm))
    if not arms:
        raise InvalidArgumentError('There is no arm of %s with factors %s.' % (
            ', '.join(names), ', '.join(map(str, factors)) or 1))
    return arms


def factors_of(settings):
    """How many times B the batches are that are compared with B, in ascending order."""
    return sorted(set(settings.factors or [settings.num_towers]))


def make_runs(settings, arms, directory):
    """All runs, in the order in which they are made: seed by seed, each with all its arms."""
    return [Run(arm, seed, os.path.join(directory, arm.key, 'seed-%d' % seed),
                train_flags(settings, arm, seed))
            for seed in range(1, settings.seeds + 1) for arm in arms]


def train_flags(settings, arm, seed):
    """The flags that make train.py this arm's run with this seed.

    Log lines, evaluations and checkpoints come at the same numbers of examples in all arms.
    """
    scale = arm.batch_size // settings.batch_size
    interval = evaluation_interval(settings) // arm.batch_size
    flags = collections.OrderedDict([
        ('model', settings.model), ('dataset', settings.dataset),
        ('data_dir', settings.data_dir), ('image_size', settings.image_size),
        ('num_towers', arm.towers), ('batch_size', arm.batch_size),
        ('base_learning_rate', settings.learning_rate),
        ('lr_scaling', arm.rule), ('warmup_epochs', arm.warmup_epochs),
        ('accumulate', arm.accumulate if arm.accumulate > 1 else None),
        ('batch_norm', arm.batch_norm if arm.batch_norm != 'shard' else None),
        ('optimizer', settings.optimizer), ('reduction', settings.reduction),
        ('train_steps', settings.examples // arm.batch_size), ('seed', seed),
        ('eval_steps', interval), ('save_steps', interval),
        ('log_every', settings.batch_size * factors_of(settings)[-1] // arm.batch_size),
        ('summary_steps', 0)])
    options = collections.OrderedDict([
        ('base_batch_size', settings.batch_size), ('keep', 1),
        ('aux_loss_weight', settings.aux_loss_weight),
        ('batch_norm_decay', None if settings.batch_norm_decay is None else
         round(settings.batch_norm_decay ** scale, 6))])
    return ['--%s=%s' % (name, '%g' % value if isinstance(value, float) else value)
            for name, value in flags.items() if value not in (None, '')] + [
                '--config=' + json.dumps(collections.OrderedDict(
                    pair for pair in options.items() if pair[1] is not None))]


def evaluation_interval(settings):
    """Examples from one evaluation to the next, whole batches of every arm."""
    return settings.examples // settings.evaluations


def rounded_examples(examples, global_batch, evaluations):
    """The number nearest to `examples` that is whole batches from each evaluation to the next."""
    interval = global_batch * evaluations
    return max(1, int(round(float(examples) / interval))) * interval
