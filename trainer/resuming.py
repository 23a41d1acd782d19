"""What a run that goes on compares with its last start: flags, data, number of workers."""

import collections
import itertools

import datasets
from towers.checkpoint.files import newest_prefix
from towers.errors import BadFileError
from trainer.data import is_own
from trainer.flags import FLAGS, GROUPS, train_dir
from trainer.run_settings import CHANGES, HARMLESS, STATE, RunSettings, recorded_setting

# The kind of each flag in `RunSettings`: what another value of it means for a run that goes on.
RESUMING = collections.OrderedDict([
    # Not recorded: about this start of the program, not about the run.
    (None, ['mode', 'data_dir', 'bad_examples', 'diagnose_seconds', 'init_from',
            'train_dir', 'recover', 'predictions', 'export_dir', 'plan_only', 'audit_runtime',
            'profile_steps',
            'memory_limit', 'memory_plot', 'memory_fraction', 'allow_growth', 'intra_op_threads',
            'inter_op_threads', 'worker_hosts', 'ps_hosts', 'job_name', 'task_index',
            'start_timeout', 'dead_after']),
    (HARMLESS, ['copies', 'recompute', 'schedule', 'train_steps', 'train_epochs',
                'stop_at_accuracy', 'stop_after', 'eval_steps',
                'save_steps', 'keep', 'keep_best', 'check_numerics', 'log_every', 'summary_steps']),
    (CHANGES, ['augment', 'remainder', 'weight_decay', 'batch_norm_decay',
               'augment_shift', 'num_towers', 'devices', 'batch_size', 'accumulate',
               'micro_batches', 'reduction', 'variable_device', 'all_reduce', 'update_ops',
               'batch_norm', 'shares', 'xla',
               'cluster', 'synchronous', 'backup_workers', 'momentum', 'clip_norm',
               'base_learning_rate', 'base_batch_size', 'lr_scaling', 'warmup_epochs', 'decay',
               'decay_epochs', 'decay_rate', 'seed', 'deterministic']),
    # These add or remove variables of the checkpoints.
    (STATE, ['model', 'dataset', 'num_classes', 'background_class', 'image_size',
             'aux_loss_weight', 'precision', 'loss_scale', 'optimizer', 'average_decay',
             'fingerprint'])])


OF_WORKERS = ('number of workers', 'examples of all workers a step', 'learning rate of all workers')
"""Settings that are no flags: what another number of workers makes of batch and rate."""


class _Settings(RunSettings):
    """The settings of a run, of which `OF_WORKERS` are recorded on one machine, too.

    A run that goes on with several machines, or comes from them, says all three. One that stays on
    one machine says by its flags what it has changed, and would say it twice.
    """

    def compare(self, directory):
        differences, problem = super(_Settings, self).compare(directory)
        if self._values.get(OF_WORKERS[0]) == 1 and OF_WORKERS[0] not in [
                each.name for each in differences]:
            differences = [each for each in differences if each.name not in OF_WORKERS]
        return differences, problem


def run_settings(batch_size, further=()):
    """The `RunSettings` of the flags, with the batch size in place of an 'auto'.

    Args:
      batch_size: an int.
      further: list of pairs of a name, with a space in it since it is no flag's, and a value that
        changes the run; some with a third, a text: what another value changes.
    """
    kinds = {name: kind for kind, names in RESUMING.items() for name in names}
    if FLAGS.decay == 'cosine' and not FLAGS.decay_epochs:  # the rate falls until the last step
        kinds.update(train_steps=CHANGES, train_epochs=CHANGES)
    names = [name for name in sum(GROUPS.values(), []) if kinds[name] is not None]
    return _Settings(
        [(name, batch_size if name == 'batch_size' else FLAGS[name].value) for name in names]
        + [each[:2] for each in further],
        dict({name: kinds[name] for name in names}, **{each[0]: CHANGES for each in further}),
        'Or begin another run in another --train_dir, which --init_from={directory} starts with '
        'what fits of the weights.', {each[0]: each[2] for each in further if len(each) > 2})


def settings_of_workers(cluster, job):
    """What a run with another number of workers has changed, without another value of a flag: a
    list of pairs of a name and a value. One machine is one worker."""
    return list(zip(OF_WORKERS, (
        1 if cluster is None else cluster.num_workers, job.counts.batch_size,
        str(job.built.plan.learning_rate))))


# ---- The data ------------------------------------------------------------------------------------

_CLASSES = 'names of classes'  # a setting of the run, which is no flag


def names_of_classes(dataset):
    """The setting of a run that holds them: list of one pair; empty where they have no names."""
    classes = getattr(dataset, 'classes', None)  # image folders have names
    return [] if classes is None else [(_CLASSES, '\n'.join(classes))]


def settings_of_data(dataset):
    """The settings of a run that its data are, as `run_settings` takes them."""
    effect = () if is_own() else (  # their order is the user's own
        'other examples in another order from here on, not the run that it would be without a '
        'stop',)
    found = names_of_classes(dataset) + [
        ('number of training examples', int(dataset.num_examples['train'])) + effect]
    if hasattr(dataset, 'names_digest'):  # files, and they number the examples by their names
        found.append(('digest of the names of training files', dataset.names_digest('train'))
                     + effect)
    return found


def check_classes(dataset):
    """Raises `DatasetError` for classes that are not those which the run's network was trained on.

    A class folder that came, went or got another name moves the numbers of those after it, and
    every label would mean another output of the network.
    """
    recorded, given = recorded_setting(train_dir(), _CLASSES), names_of_classes(dataset)
    if not given or recorded is None or not newest_prefix(train_dir()):
        return
    if not isinstance(recorded, str):
        raise BadFileError('%s/settings.json is not as train.py wrote it: %s is %.80r. Move it '
                           'away.' % (train_dir(), _CLASSES, recorded))
    # Both split, since a name may have a line break in it.
    trained, found = recorded.split('\n'), given[0][1].split('\n')
    if trained != found:
        place = next(place for place, pair in enumerate(itertools.zip_longest(trained, found))
                     if pair[0] != pair[1])
        raise datasets.DatasetError(
            'the %d classes of --data_dir=%s are not the %d that the run in %s was trained on: '
            'class %d is %s, and was %s. Give the folders their old names, or begin another run in '
            'another --train_dir.' % (
                len(found), FLAGS.data_dir, len(trained), train_dir(), place,
                *('%r' % names[place] if place < len(names) else 'none'
                  for names in (found, trained))))
