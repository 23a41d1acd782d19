"""The settings of train.py: flags, and options of --config, in one table."""

import collections
import os
import re

from absl import flags

import towers
from datasets import epochs, preprocessing
from towers.cluster.cluster import KINDS

FLAGS = flags.FLAGS

# Upper bounds of numbers. A larger one is a typing error, which TensorFlow would answer with a
# traceback of its own, or with endless work. Steps times examples a step fit into an int64, and a
# float into a float32.
MOST_PIXELS, MOST_TOWERS, MOST_EPOCHS, MOST_CHECKPOINTS = 4096, 10000, 10 ** 6, 10 ** 6
MOST_EXAMPLES, MOST_STEPS, MOST_FLOAT = 10 ** 6, 10 ** 12, 3e38

# What another value of a setting means for a run that goes on.
ONCE = 'of one start'  # not recorded
HARMLESS = 'harmless'
CHANGES = 'changes the run'
STATE = 'state'  # it adds or removes variables of the checkpoints


class Setting(collections.namedtuple('Setting', 'name default limits kind text')):
    """A flag, or an option of --config; the default has its type.

    Attributes:
      name, default: of it.
      limits: (least, most) of a number; list of the words of which one is expected; or None.
      kind: what another value means for a run that goes on: `ONCE`, `HARMLESS`, `CHANGES`, `STATE`.
      text: a sentence for the help, without the default.
    """
    __slots__ = ()


def _group(*settings):
    return [Setting(*setting) for setting in settings]


GROUPS = collections.OrderedDict([
    ('What is trained', _group(
        ('mode', 'train', ['train', 'eval', 'predict', 'check_data', 'diagnose', 'memory'], ONCE,
         'train; eval or predict by the newest checkpoint; check_data lists bad examples; diagnose '
         'measures which side holds training back; memory shows where memory goes'),
        ('model', 'digits', None, STATE, 'Name of a network (a wrong one lists all); or '
         'module:function, a model function (features, labels, mode)'),
        ('dataset', 'digits', None, STATE, 'Name of a data set (a wrong one lists all); '
         'or module:function, a tf.data pipeline'),
        ('data_dir', '', None, ONCE, 'Folder of the data set, of those in files'),
        ('image_size', 0, (0, MOST_PIXELS), STATE, "Height and width in pixels, 0 for the "
         "network's or the data set's own"),
        ('weight_decay', 4e-5, (0, MOST_FLOAT), CHANGES, 'Factor of the L2 loss of the weights; '
         'of the decay of lars and lamb, which have no L2 loss'),
        ('init_from', '', None, ONCE, 'Checkpoint whose weights to start from, as far as they '
         'fit'))),
    ('Towers', _group(
        ('num_towers', 2, (1, MOST_TOWERS), CHANGES, 'Towers, one a device: GPUs where there are '
         'any, else virtual CPUs'),
        ('devices', '', None, CHANGES, "The towers' devices by name, '/gpu:0,/gpu:2', instead of "
         "--num_towers"),
        ('batch_size', 100, (1, MOST_EXAMPLES), CHANGES, "Examples a step, over all towers "
         "together; 'auto' is the most that memory holds"),
        ('accumulate', 1, (1, MOST_TOWERS), CHANGES, "Micro-batches that each tower's shard is "
         'cut into, one after the other, for one update'),
        ('recompute', '', None, HARMLESS, "'auto' computes the forward pass again in the backward "
         'pass, to save memory; or names of what is kept, with commas'),
        ('reduction', 'sum', ['sum', 'mean'], CHANGES, "Gradient applied: sum, of all towers; or "
         'mean, of the mean loss of the whole batch'),
        ('variable_device', '', None, CHANGES, "Place of variables: a device, 'balanced', or "
         "'replicated' on every tower; if empty, the CPU, or the only GPU"),
        ('batch_norm', 'shard', ['shard', 'sync'], CHANGES, "Batch norm's statistics: shard, of a "
         "tower's part of the batch; sync, of the whole batch"),
        ('precision', 'float32', list(towers.PRECISIONS), STATE, 'Number format of products and '
         'convolutions: bf16 for CPUs, fp16 for GPUs'))),
    ('Optimizer', _group(
        ('optimizer', 'adam', ['sgd', 'momentum', 'adam', 'rmsprop', 'lars', 'lamb'], STATE,
         'Update rule'),
        ('momentum', 0.9, (0, 1), CHANGES, 'Factor of momentum, rmsprop and lars'),
        ('clip_norm', 0., (0, MOST_FLOAT), CHANGES, 'Largest global norm of the combined gradient, '
         '0 for any'),
        ('base_learning_rate', 0.001, (0, MOST_FLOAT), CHANGES, 'Learning rate of one tower'),
        ('lr_scaling', 'none', ['none', 'sqrt', 'linear'], CHANGES, 'Growth of the rate with the '
         'batch, hence with the number of towers: none, sqrt, linear'),
        ('warmup_epochs', 0., (0, MOST_EPOCHS), CHANGES, 'Epochs over which the rate rises to its '
         'full value'),
        ('decay', 'none', ['none', 'exponential', 'cosine'], CHANGES, 'Fall of the rate'),
        ('decay_epochs', 0., (0, MOST_EPOCHS), CHANGES, 'Epochs for one factor of --decay_rate; or '
         'until the cosine is 0, where 0 is the whole run'),
        ('decay_rate', 0.94, (0, 1), CHANGES, 'Factor of the exponential decay'),
        ('average_decay', 0., (0, 1), STATE, 'Decay of moving averages of the weights, which are '
         'then evaluated and exported; 0 for none'))),
    ('The run', _group(
        ('train_dir', '', None, ONCE, "Folder of the run, which goes on if it is there already; "
         "if empty, runs/<model>"),
        ('train_steps', 0, (0, MOST_STEPS), HARMLESS, 'Steps to train for, 0 for --train_epochs'),
        ('train_epochs', 30., (0, MOST_EPOCHS), HARMLESS, 'Passes over the training set'),
        ('max_minutes', 0., (0, MOST_FLOAT), ONCE, 'Minutes after which this start saves and '
         'ends, 0 for any'),
        ('eval_steps', 0, (0, MOST_STEPS), HARMLESS, 'Steps from one evaluation to the next, 0 for '
         'one at the end'),
        ('save_steps', 500, (1, MOST_STEPS), HARMLESS, 'Steps from one checkpoint to the next'),
        ('keep_best', '', None, HARMLESS, "Metric whose best checkpoint is kept in the folder "
         "best: the largest, of loss and '-perplexity' the smallest"),
        ('stop_after', 0, (0, MOST_STEPS), HARMLESS, 'Evaluations without a better one, by '
         '--keep_best, after which the run ends; 0 for any'),
        ('seed', 1, (0, 2 ** 31 - 1), CHANGES, 'Seed of initial weights, data order, shifts and '
         'dropout'),
        ('deterministic', False, None, CHANGES, 'Same bits in each run on GPUs, too, where '
         'TensorFlow has such kernels; slower'))),
    ('What is shown and written', _group(
        ('log_every', 100, (1, MOST_STEPS), HARMLESS, 'Steps from one line of metrics.jsonl, and '
         'of the screen if it is no terminal, to the next'),
        ('summary_steps', 100, (0, MOST_STEPS), HARMLESS, 'Steps from one TensorBoard summary to '
         'the next, 0 for none'),
        ('profile_steps', '', None, ONCE, "Two steps, '100,105': a Chrome trace of the first, "
         "TensorBoard's profile of those up to the second"),
        ('report', 0, (0, MOST_STEPS), ONCE, 'Step whose report, a page that says where its time '
         'and its memory go, is written into the folder of the run; 0 for none'),
        ('predictions', 'predictions.csv', None, ONCE, 'File that --mode=predict writes, a row '
         'an example'),
        ('export_dir', '', None, ONCE, 'Folder below which a SavedModel of the final weights is '
         'written'),
        ('plan_only', False, None, ONCE, 'Print the plan and the audit of the graph, and stop'),
        ('config', [], None, ONCE, 'JSON file of options; or the JSON itself, '
         '\'{"label_smoothing": 0.1}\'; of several, the last one counts'))),
    ('Several machines', _group(
        ('cluster', '', ['', *KINDS], CHANGES, "Train on the machines of "
         'TF_CONFIG, each with --num_towers and --batch_size: ring, ps (parameter servers), or '
         'horovod'),
        ('job_name', '', ['', 'evaluator'], ONCE, 'evaluator evaluates the checkpoints of the run '
         'in --train_dir until it ends')))])

OPTIONS = _group(
    ('num_classes', 0, (0, MOST_EXAMPLES), STATE, 'Classes of tfrecords, 0 for as many as '
     'labels.txt lists; of synthetic images, 0 for 1000'),
    ('background_class', False, None, STATE, 'Labels of tfrecords begin at 1, and 0 is a class '
     'more'),
    ('augment', 'inception', list(preprocessing.AUGMENTS), CHANGES, 'Images in files: cut out at '
     'random, mirrored, colours distorted; without the colours; or the centre of each'),
    ('augment_shift', 0, (0, MOST_PIXELS), CHANGES, 'Pixels by which images of other data sets '
     'are shifted at random, at most'),
    ('remainder', 'carry', list(epochs.REMAINDERS), CHANGES, 'Last batch of an epoch: filled with '
     'the next epoch, or dropped'),
    ('bad_examples', '', None, CHANGES, 'File that lists the examples to leave out, which '
     '--mode=check_data writes'),
    ('aux_loss_weight', 0.4, (0, MOST_FLOAT), STATE, 'Factor of the loss of auxiliary logits, of '
     'networks that have them; 0 builds none'),
    ('batch_norm_decay', -1., (-1, 1), CHANGES, "Decay of batch norm's moving averages; -1 for "
     "what the network asks for"),
    ('label_smoothing', 0., (0, 1), CHANGES, 'Part of each training label that is spread evenly '
     'over all classes'),
    ('base_batch_size', 0, (0, MOST_EXAMPLES), CHANGES, 'Batch that --base_learning_rate is meant '
     'for, 0 for that of one tower'),
    ('micro_batches', 1, (1, MOST_TOWERS), CHANGES, 'Micro-batches that go through the stages of a '
     "tower of several devices, '/gpu:0+/gpu:1'"),
    ('shares', '', None, CHANGES, "Proportions of the towers' shards, such as '3,1'; equal if "
     'empty'),
    ('copies', 'clone', ['clone', 'reuse'], HARMLESS, 'Towers after the first: copies of its '
     'graph, or a call of the model each'),
    ('loss_scale', 0., (0, MOST_FLOAT), STATE, 'First factor of the loss, halved when a gradient '
     'overflows; 0 for 32768 with fp16, else none'),
    ('xla', False, None, CHANGES, "Compile each tower's passes; takes long to start"),
    ('stop_at_accuracy', 0., (0, 1), HARMLESS, 'Test accuracy at which the run ends, by '
     '--eval_steps'),
    ('keep', 5, (1, MOST_CHECKPOINTS), HARMLESS, 'Newest checkpoints to keep'),
    ('recover', False, None, ONCE, 'Go on from the checkpoint before, if the newest is damaged'),
    ('check_numerics', True, None, HARMLESS, 'Stop at the first NaN or infinity in a loss or '
     'gradient'),
    ('probabilities', False, None, ONCE, 'Predictions have the probabilities of all classes'),
    ('unlabelled', '', None, ONCE, 'Folder of images that --mode=predict predicts, in place of the '
     'test set; with a data set of image files'),
    ('validation', 0., (0, 0.5), CHANGES, 'Part of the training examples that a run holds out, and '
     'evaluates in place of the test set'),
    ('summary_images', 3, (0, MOST_EXAMPLES), HARMLESS, 'Images of the input in a TensorBoard '
     'summary'),
    ('histograms', False, None, HARMLESS, 'Histograms of weights and gradients in TensorBoard'),
    ('memory_limit', 0., (0, MOST_FLOAT), ONCE, 'MB of a GPU, or of all CPUs together, for '
     '--batch_size=auto and --mode=memory; 0 for what there are'),
    ('memory_plot', '', None, ONCE, 'Picture that --mode=memory writes, a PNG, by matplotlib'),
    ('memory_fraction', 0., (0, 1), ONCE, "Most of each GPU's memory that is taken, 0 for all"),
    ('allow_growth', True, None, ONCE, 'Take memory of a GPU as it is needed, not all at once'),
    ('intra_op_threads', -1, (-1, MOST_TOWERS), ONCE, 'Threads of one operation; 0 as TensorFlow '
     'chooses; -1 for OMP_NUM_THREADS, or the cores divided among CPU towers'),
    ('inter_op_threads', 0, (0, MOST_TOWERS), ONCE, 'Operations that run at once on CPUs, 0 as '
     'TensorFlow chooses'),
    ('diagnose_seconds', 5., (0.1, 3600), ONCE, 'Seconds of each measurement of '
     '--mode=diagnose'),
    ('synchronous', True, None, CHANGES, 'Whether a step of --cluster=ps waits for all workers'),
    ('start_timeout', 120., (0.1, MOST_FLOAT), ONCE, 'Seconds to wait for the other machines at '
     'the start'),
    ('dead_after', 30., (0.5, MOST_FLOAT), ONCE, 'Seconds without a sign of life after which a '
     'worker or a server is gone'))

FLAGS_BY_NAME, OPTIONS_BY_NAME = (collections.OrderedDict(
    (setting.name, setting) for setting in settings) for settings in (
        sum(GROUPS.values(), []), OPTIONS))
SETTINGS = collections.OrderedDict(list(FLAGS_BY_NAME.items()) + list(OPTIONS_BY_NAME.items()))

# Settings that are paths.
PATHS = ('train_dir', 'data_dir', 'init_from', 'export_dir', 'predictions', 'memory_plot',
         'unlabelled', 'bad_examples')


class _BatchSizeParser(flags.IntegerParser):
    """A whole number, or 'auto'."""

    def parse(self, argument):
        try:
            return argument if argument == 'auto' else super(_BatchSizeParser, self).parse(argument)
        except ValueError as error:
            raise ValueError(str(error) if re.match(r'[+-]?\d+$', str(argument)) else
                             "expected a whole number, or 'auto'")


def _define(setting):
    """Makes a setting a value of `FLAGS`, which checks it."""
    name, default, limits, _, text = setting
    if name == 'batch_size':
        flags.DEFINE(_BatchSizeParser(*limits), name, default, text,
                     serializer=flags.ArgumentSerializer())
    elif isinstance(default, bool):
        flags.DEFINE_boolean(name, default, text)
    elif isinstance(limits, list):
        flags.DEFINE_enum(name, default, limits, text)
    elif isinstance(default, list):
        flags.DEFINE_multi_string(name, default, text)
    elif isinstance(default, str):
        flags.DEFINE_string(name, default, text)
    else:
        define = flags.DEFINE_integer if isinstance(default, int) else flags.DEFINE_float
        define(name, default, text, lower_bound=limits[0], upper_bound=limits[1])


for _setting in SETTINGS.values():
    _define(_setting)


def train_dir():
    """The folder of the run."""
    return FLAGS.train_dir or os.path.join('runs', FLAGS.model.replace(':', '.'))


def profiled_steps(text):
    """`(first, last)` of --profile_steps; None where that is no such pair."""
    parts = text.split(',')
    if len(parts) != 2 or not all(part.isdecimal() and len(part) <= 12 for part in parts):
        return None
    first, last = map(int, parts)
    return (first, last) if 1 < first < last else None
