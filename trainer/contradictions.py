"""Flags that do not go together, and flags that a mode ignores."""

import json
import math
import os

import tensorflow.compat.v1 as tf

from towers.tensorflow_errors import reason_of
from trainer.flags import FLAGS, GROUPS, PATHS
from trainer.profile_hook import profiled_steps


def contradiction(given):
    """What is wrong about the flags together, a line; None if nothing is.

    Args:
      given: names of the flags that were given on the command line.
    """
    return (_of_values(given) or _of_the_schedule() or _of_what_runs_steps(given)
            or _of_the_plan() or _of_machines(given) or _of_micro_batches(given)
            or _of_no_use(given) or _unclear_machines())


def _of_values(given):
    """A value that is none; or two flags for one thing."""
    for name in sum(GROUPS.values(), []):
        if isinstance(FLAGS[name].value, float) and not math.isfinite(FLAGS[name].value):
            return '--%s=%s: expected a finite number' % (name, FLAGS[name].value)
    if {'num_towers', 'devices'} <= given:
        return '--num_towers and --devices both say how many towers there are: give one'
    if {'train_steps', 'train_epochs'} <= given:
        return '--train_steps and --train_epochs both say how long to train: give one'
    if not FLAGS.train_steps and not FLAGS.train_epochs:
        return '--train_steps and --train_epochs are both 0: there is nothing to do'
    if FLAGS.profile_steps and profiled_steps(FLAGS.profile_steps) is None:
        return ('--profile_steps=%s: expected two steps, the first one above 1 and below the '
                'second, such as 100,105' % FLAGS.profile_steps)
    if FLAGS.mode == 'predict' and not FLAGS.predictions:
        return '--predictions is empty: name a file to write'
    return next(filter(None, map(_of_a_path, PATHS)), None)


def _of_a_path(name):
    """What is wrong about the path of a flag."""
    path, remote = FLAGS[name].value, '://' in FLAGS[name].value
    if '\0' in path:
        return '--%s=%a has a NUL in it, as no path has: give another' % (name, path)
    if name in ('train_dir', 'export_dir', 'init_from') and any(
            '\ud800' <= each <= '\udfff' for each in path):
        return '--%s=%a is no UTF-8, and TensorFlow opens no other names: give another' % (
            name, path)
    if remote and not (name in ('export_dir', 'init_from')
                       or name == 'data_dir' and ':' in FLAGS.dataset):  # the user's own to read
        return ('--%s=%s is no path of this machine, and --init_from and --export_dir alone take '
                'others: give one, such as that where it is mounted' % (name, path))
    if remote and name != 'data_dir':
        try:
            tf.io.gfile.exists(path)
        except tf.errors.OpError as error:
            return '--%s=%s cannot be reached: %s' % (name, path, reason_of(error))
    elif name == 'export_dir' and path and not _may_hold_files(path):
        return '--export_dir=%s cannot be written to: name a folder' % path
    return None


def _may_hold_files(folder):
    """Whether a folder is there, or can be made below one that is, and can be written to."""
    folder = os.path.abspath(folder)
    while not os.path.lexists(folder):
        folder = os.path.dirname(folder)
    return os.path.isdir(folder) and os.access(folder, os.W_OK)


def _of_the_schedule():
    """Of the learning rate, of averages, of the end of the run."""
    if FLAGS.base_learning_rate <= 0:
        return '--base_learning_rate=%g: expected more than 0' % FLAGS.base_learning_rate
    if FLAGS.decay == 'exponential' and not FLAGS.decay_epochs:
        return '--decay=exponential needs --decay_epochs'
    if FLAGS.stop_at_accuracy and not FLAGS.eval_steps:
        return '--stop_at_accuracy is looked at when there is an evaluation: give --eval_steps'
    if FLAGS.stop_after and not (FLAGS.eval_steps and FLAGS.keep_best):
        return '--stop_after counts evaluations by --keep_best: give --keep_best and --eval_steps'
    if FLAGS.stop_after and FLAGS.stop_at_accuracy:
        return '--stop_at_accuracy and --stop_after both say when to stop: give one'
    if FLAGS.batch_norm_decay < 0 and FLAGS.batch_norm_decay != -1:
        return '--batch_norm_decay=%g: expected 0 to 1, or -1' % FLAGS.batch_norm_decay
    if FLAGS.average_decay == 1:
        return '--average_decay=1 would never follow the weights: give less'
    if FLAGS.optimizer == 'lars' and FLAGS.reduction == 'sum':
        return ('--optimizer=lars adds its decay to the gradient of the mean loss, and '
                '--reduction=sum multiplies that by the towers: give --reduction=mean')
    return None


def _of_what_runs_steps(given):
    """Of flags that time, measure or sum up steps of training: 'auto', the fingerprint."""
    without_steps = ('--plan_only' if FLAGS.plan_only else '--mode=%s' % FLAGS.mode
                     if FLAGS.mode != 'train' else None)
    if FLAGS.variable_device == 'auto' and without_steps:
        return '--variable_device=auto times steps of training, and %s runs none' % without_steps
    if FLAGS.variable_device == 'auto' and FLAGS.batch_size == 'auto':
        return ('--variable_device=auto times steps of a batch, and --batch_size=auto finds the '
                'batch that fits with the variables in their place: give one of the two')
    if FLAGS.remainder == 'weight' and FLAGS.fingerprint:
        return '--fingerprint takes batches of one size: not --remainder=weight'
    if FLAGS.batch_size == 'auto' and without_steps:
        return '--batch_size=auto runs steps of training, and %s does not train: give a number' % (
            without_steps)
    if 'memory_limit' in given and FLAGS.batch_size != 'auto' and FLAGS.mode != 'memory':
        return '--memory_limit is of no use without --batch_size=auto or --mode=memory'
    return None


def _of_the_plan():
    """Of --plan_only, which runs nothing; and of names to keep in memory."""
    if FLAGS.mode == 'memory' and FLAGS.plan_only:
        return '--mode=memory runs steps to measure them, and --plan_only runs nothing: give one'
    if FLAGS.mode == 'diagnose' and FLAGS.deterministic:
        return ('--mode=diagnose tells the time in a step, which TensorFlow refuses with '
                '--deterministic: leave it out')
    if FLAGS.mode in ('diagnose', 'check_data') and FLAGS.plan_only:
        return '--mode=%s makes no plan: leave out --plan_only' % FLAGS.mode
    if FLAGS.plan_only and FLAGS.export_dir:
        return '--plan_only runs nothing, so there is nothing for --export_dir to write'
    if FLAGS.plan_only and FLAGS.audit_runtime:
        return '--plan_only runs nothing, so there is nothing for --audit_runtime to check'
    if FLAGS.recompute and not FLAGS.recompute.strip(', '):
        return "--recompute=%s names nothing: give 'auto', or names" % FLAGS.recompute
    return None


def _of_machines(given):
    """Of --cluster: what one machine alone can do, and what is of no use without it."""
    if FLAGS.cluster:
        for name, why in (('fingerprint', 'sums up the examples of one machine'),
                          ('audit_runtime', 'looks at the devices of one machine')):
            if FLAGS[name].value:
                return '--%s %s, and --cluster has several: leave it out' % (name, why)
        if FLAGS.variable_device == 'auto':
            return '--variable_device=auto times steps of one machine: name a place, with --cluster'
        if FLAGS.batch_size == 'auto':
            return '--batch_size=auto runs steps of one machine: give a number, with --cluster'
        if FLAGS.remainder == 'weight':
            return ('--remainder=weight ends an epoch with a batch that may not do for all workers '
                    'of --cluster: choose another')
        if not FLAGS.synchronous and FLAGS.remainder != 'carry':
            return ('--remainder=%s needs steps that all workers take together, and with '
                    '--nosynchronous each takes its own' % FLAGS.remainder)
    for name in ('worker_hosts', 'ps_hosts', 'job_name', 'task_index', 'start_timeout',
                 'dead_after'):
        if name in given and not FLAGS.cluster and not (
                name == 'job_name' and FLAGS.job_name == 'evaluator'):  # of a run on one machine
            return '--%s is of no use without --cluster' % name
    return None


def _of_micro_batches(given):
    """Of the two ways to cut a tower's share of the batch, and of the order of its parts."""
    if FLAGS.micro_batches > 1 and FLAGS.accumulate > 1:
        return ('--micro_batches=%d and --accumulate=%d: a pipeline adds up the gradients of its '
                'micro-batches, too: give --micro_batches=%d alone' % (
                    FLAGS.micro_batches, FLAGS.accumulate,
                    FLAGS.micro_batches * FLAGS.accumulate))
    if 'schedule' in given and FLAGS.micro_batches == 1:
        return '--schedule is of no use with --micro_batches=1: it orders several'
    return None


_GOES_WITH = [  # a flag, and the values of another one with which it is of use
    ('synchronous', 'cluster', ['ps']),
    ('backup_workers', 'cluster', ['ps']),
    ('cluster', 'mode', ['train']),
    ('momentum', 'optimizer', ['momentum', 'rmsprop', 'lars']),
    ('all_reduce', 'variable_device', ['replicated', 'auto']),
    ('decay_epochs', 'decay', ['exponential', 'cosine']),
    ('decay_rate', 'decay', ['exponential']),
    ('predictions', 'mode', ['predict']),
    ('diagnose_seconds', 'mode', ['diagnose']),
    ('background_class', 'dataset', ['tfrecords']),
    ('num_classes', 'dataset', ['tfrecords', 'synthetic']),
    ('augment', 'dataset', ['imagenet', 'tfrecords', 'folder']),
    ('bad_examples', 'dataset', ['imagenet', 'tfrecords', 'folder']),
    ('audit_runtime', 'mode', ['train']),
    ('init_from', 'mode', ['train']),
    ('memory_plot', 'mode', ['memory']),
    ('loss_scale', 'mode', ['train', 'memory']),
    ('xla', 'mode', ['train', 'memory'])]


_OF_NETWORKS_BY_NAME = ['weight_decay', 'aux_loss_weight', 'batch_norm_decay', 'fingerprint']


def _of_no_use(given):
    """A flag that was given, and has no effect with the value of another."""
    for flag, other, values in _GOES_WITH:
        if flag in given and FLAGS[other].value not in values:
            return '--%s%s is of no use with --%s=%s: it goes with %s' % (
                'no' * (FLAGS[flag].value is False), flag, other, FLAGS[other].value,
                ' or '.join(values))
    for flag in _OF_NETWORKS_BY_NAME:
        if flag in given and ':' in FLAGS.model and not (
                flag == 'weight_decay' and FLAGS.optimizer in ('lars', 'lamb')):  # its own decay
            return '--%s is of no use with --model=%s: it goes with a network by name' % (
                flag, FLAGS.model)
    return None


def _unclear_machines():
    """What is wrong about --cluster and TF_CONFIG together, a line; None if nothing is."""
    config = os.environ.get('TF_CONFIG', '')
    if FLAGS.cluster in ('ring', 'ps') and not FLAGS.worker_hosts and not config:
        served = FLAGS.cluster == 'ps'
        if FLAGS.job_name == 'evaluator':
            return ('--cluster=%s does not say how many workers the run has, by which an evaluator '
                    'knows its last step: set TF_CONFIG, or give --worker_hosts%s as the run has; '
                    'beside a run on one machine leave --cluster out' % (
                        FLAGS.cluster, ' and --ps_hosts' * served))
        return ('--cluster=%s does not say which machines: set TF_CONFIG, or give --worker_hosts, '
                '%s--job_name and --task_index; on one machine, python -m towers.launch %sstarts '
                'all processes' % (FLAGS.cluster, '--ps_hosts, ' * served, '--ps=1 ' * served))
    if FLAGS.cluster == 'ps' and not FLAGS.ps_hosts and not config:
        return ('--cluster=ps does not say which parameter servers: give --ps_hosts, or '
                '--cluster=ring, which needs none')
    if FLAGS.mode == 'train' and not FLAGS.cluster and config:
        try:
            tasks = sum(len(addresses) for addresses in json.loads(config)['cluster'].values())
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None  # no TF_CONFIG of a cluster
        if tasks > 1:
            return ('TF_CONFIG names %d tasks, and without --cluster each would train alone: give '
                    '--cluster=ring or --cluster=ps, or unset TF_CONFIG' % tasks)
    return None


# Flags of the run around its steps, of what a step computes, and of the network on its devices.
_OF_THE_RUN = frozenset(
    'train_steps train_epochs stop_at_accuracy stop_after eval_steps save_steps keep keep_best '
    'log_every summary_steps profile_steps fingerprint base_learning_rate base_batch_size '
    'lr_scaling warmup_epochs decay decay_epochs decay_rate'.split())
_OF_A_STEP = frozenset(
    'augment augment_shift remainder accumulate recompute micro_batches schedule reduction '
    'all_reduce update_ops batch_norm shares optimizer momentum clip_norm average_decay '
    'check_numerics'.split())
_OF_A_NETWORK = frozenset(GROUPS['Towers'] + GROUPS['Memory and threads'] + GROUPS['Optimizer'] + [
    'model', 'image_size', 'weight_decay', 'aux_loss_weight', 'batch_norm_decay', 'seed',
    'deterministic', 'check_numerics', 'augment_shift', 'recover', 'remainder', 'augment',
    'export_dir'])
_WITHOUT_EFFECT = {'train': frozenset(), 'diagnose': _OF_THE_RUN | {'export_dir'},
                   'memory': _OF_THE_RUN | {'export_dir'},
                   'eval': _OF_THE_RUN | _OF_A_STEP, 'predict': _OF_THE_RUN | _OF_A_STEP,
                   'check_data': _OF_THE_RUN | _OF_A_STEP | _OF_A_NETWORK}


def tell_without_effect():
    """Prints which flags on the command line --mode ignores, if any."""
    unused = without_effect()
    if unused:
        print('without effect %s: --mode=%s does not train' % (
            ', '.join('--' + name for name in unused), FLAGS.mode), flush=True)


def without_effect():
    """Names of the flags on the command line that --mode ignores, a list in the order of the help.

    They are no error, so that a run can be evaluated with the flags that it was trained with.
    """
    return [name for name in sum(GROUPS.values(), [])
            if name in _WITHOUT_EFFECT[FLAGS.mode] and FLAGS[name].present]
