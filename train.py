"""Trains an image classifier on several devices; with no flags, handwritten digits on 2 towers."""

import collections
import contextlib
import csv
import math
import os
import signal
import sys
import textwrap
import warnings

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')  # this program's own lines are the output

from absl import app, flags  # noqa: E402
import tensorflow.compat.v1 as tf  # noqa: E402

import datasets  # noqa: E402
from models import registry  # noqa: E402
import towers  # noqa: E402
from towers import choose_placement  # noqa: E402
from towers.averages import WeightAverages, averages_in  # noqa: E402
from towers.evaluation import Evaluation, EvaluationHook  # noqa: E402
from towers.export import export_saved_model  # noqa: E402
from towers.fingerprint import ExamplesChecksum, FingerprintHook  # noqa: E402
from towers.metrics_log import MetricsHook  # noqa: E402
from towers.progress import ProgressHook  # noqa: E402
from towers.stateless_random import make_initial_values_stateless  # noqa: E402
from towers.step_loop import OccasionalHook  # noqa: E402
from towers.stopping import StopOnSignalHook  # noqa: E402
from towers.summaries import SummaryHook, default_summaries  # noqa: E402
from towers.training_session import training_session  # noqa: E402

FLAGS = flags.FLAGS

# Groups of flags, in the order in which --helpshort shows them.
GROUPS = collections.OrderedDict([
    ('What is trained', ['mode', 'model', 'dataset', 'data_dir', 'image_size', 'weight_decay',
                         'aux_loss_weight', 'batch_norm_decay', 'augment_shift', 'init_from']),
    ('Towers', ['num_towers', 'devices', 'batch_size', 'reduction', 'variable_device', 'all_reduce',
                'copies', 'update_ops', 'precision', 'loss_scale', 'xla']),
    ('Optimizer', ['optimizer', 'momentum', 'clip_norm', 'base_learning_rate', 'base_batch_size',
                   'lr_scaling', 'warmup_epochs', 'decay', 'decay_epochs', 'decay_rate',
                   'average_decay']),
    ('The run', ['train_dir', 'train_steps', 'train_epochs', 'stop_at_accuracy', 'eval_steps',
                 'save_steps', 'keep', 'recover', 'seed', 'check_numerics']),
    ('What is shown and written', ['log_every', 'summary_steps', 'fingerprint', 'predictions',
                                   'export_dir', 'plan_only', 'audit_runtime'])])

flags.DEFINE_enum('mode', 'train', ['train', 'eval', 'predict'], 'train; or evaluate the newest '
                  'checkpoint on the test set; or write its predictions')
flags.DEFINE_string('model', 'digits', 'network by name; an unknown one lists those that exist')
flags.DEFINE_string('dataset', 'digits', 'data set by name')
flags.DEFINE_string('data_dir', '', 'folder of the data set, for one that is not part of this')
flags.DEFINE_integer('image_size', 0, 'height and width in pixels; 0: what the network asks for',
                     lower_bound=0)
flags.DEFINE_float('weight_decay', 4e-5, 'factor of the L2 loss of the weights', lower_bound=0)
flags.DEFINE_float('aux_loss_weight', 0.4, 'factor of the loss of auxiliary logits, for networks '
                   'that have them; 0 builds none', lower_bound=0)
flags.DEFINE_float('batch_norm_decay', -1, "of batch norm's moving averages; -1: what the network "
                   'asks for', lower_bound=-1, upper_bound=1)
flags.DEFINE_integer('augment_shift', 0, 'pixels by which training images are shifted at random, '
                     'at most, before they are resized', lower_bound=0)
flags.DEFINE_string('init_from', '', 'checkpoint whose weights to start from, as far as they fit')

flags.DEFINE_integer('num_towers', 2, 'copies of the model, one a device: GPUs where there are '
                     'any, else virtual CPUs', lower_bound=1)
flags.DEFINE_string('devices', '', "the towers' devices by name, instead of --num_towers: "
                    "'/gpu:0,/gpu:2'")
flags.DEFINE_integer('batch_size', 100, 'examples a step, over all towers together', lower_bound=1)
flags.DEFINE_enum('reduction', 'sum', ['sum', 'mean'], "gradient applied: the towers' sum, or that "
                  'of the mean loss of the whole batch')
flags.DEFINE_string('variable_device', '', "where variables live: a device, 'balanced', "
                    "'replicated' (a copy on every tower), or 'auto', which times steps of each; "
                    'empty: the CPU, or the GPU when there is just one')
flags.DEFINE_enum('all_reduce', 'copy', ['copy', 'collective', 'nccl'], 'how the gradients get to '
                  "every tower's copy, with --variable_device=replicated: added on one tower each "
                  "and sent to the others; by TF's ring; by NCCL (GPUs of one machine)")
flags.DEFINE_enum('copies', 'auto', ['auto', 'clone', 'reuse'], 'towers after the first: clones of '
                  'its graph, a call of the model each, or clones where that gives the same')
flags.DEFINE_enum('update_ops', 'first', ['first', 'all', 'none'],
                  "towers whose batch-norm updates run with a step")
flags.DEFINE_enum('precision', 'float32', towers.PRECISIONS, "of products and convolutions, by "
                  "TensorFlow's own graph rewrite: bf16 for CPUs, fp16 for GPUs, which scales the "
                  'loss')
flags.DEFINE_boolean('xla', False, "compile each tower's forward and backward pass; takes long to "
                     'start, and on CPUs was slower in every model measured')
flags.DEFINE_float('loss_scale', 0, 'first factor of the loss, halved and the step skipped when a '
                   'gradient overflows; 0: 32768 with fp16, else none', lower_bound=0)

flags.DEFINE_enum('optimizer', 'adam', ['sgd', 'momentum', 'adam', 'rmsprop'], 'update rule')
flags.DEFINE_float('momentum', 0.9, 'for momentum and rmsprop', lower_bound=0, upper_bound=1)
flags.DEFINE_float('clip_norm', 0, 'largest global norm of the combined gradient; 0: no clipping',
                   lower_bound=0)
flags.DEFINE_float('base_learning_rate', 0.001, 'learning rate of one tower', lower_bound=0)
flags.DEFINE_integer('base_batch_size', 0, 'batch that --base_learning_rate is meant for; 0: that '
                     'of one tower', lower_bound=0)
flags.DEFINE_enum('lr_scaling', 'none', ['none', 'sqrt', 'linear'],
                  'how the rate grows with the batch, hence with the number of towers')
flags.DEFINE_float('warmup_epochs', 0, 'epochs over which the rate rises to its full value',
                   lower_bound=0)
flags.DEFINE_enum('decay', 'none', ['none', 'exponential', 'cosine'], 'how the rate falls')
flags.DEFINE_float('decay_epochs', 0, 'epochs for one factor of --decay_rate (exponential), or '
                   'until the rate is 0 (cosine; 0: the whole run)', lower_bound=0)
flags.DEFINE_float('decay_rate', 0.94, 'factor of the exponential decay', lower_bound=0,
                   upper_bound=1)

flags.DEFINE_float('average_decay', 0, 'keep moving averages of the weights with this decay, and '
                   'evaluate and export them; 0: none', lower_bound=0, upper_bound=1)

flags.DEFINE_string('train_dir', '', "folder of the checkpoints, 'runs/<model>' if empty; a run "
                    'that is there already goes on')
flags.DEFINE_integer('train_steps', 0, 'steps to train for; 0: by --train_epochs', lower_bound=0)
flags.DEFINE_float('train_epochs', 30, 'passes over the training set', lower_bound=0)
flags.DEFINE_float('stop_at_accuracy', 0, 'stop when the test accuracy is at least this; looked at '
                   'every --eval_steps', lower_bound=0, upper_bound=1)
flags.DEFINE_integer('eval_steps', 0, 'steps from one evaluation to the next; 0: at the end only',
                     lower_bound=0)
flags.DEFINE_integer('save_steps', 500, 'steps from one checkpoint to the next', lower_bound=1)
flags.DEFINE_integer('keep', 5, 'how many of the newest checkpoints to keep', lower_bound=1)
flags.DEFINE_boolean('recover', False, 'when the newest checkpoint is damaged, go on from the one '
                     'before it')
flags.DEFINE_integer('seed', 1, 'of the initial weights, the data order, shifts and dropout',
                     lower_bound=0, upper_bound=2 ** 31 - 1)
flags.DEFINE_boolean('check_numerics', True, 'stop at the first NaN or infinity in a loss or a '
                     'gradient')

flags.DEFINE_integer('log_every', 100, 'steps from one line of metrics.jsonl to the next, and of '
                     'the screen where it is no terminal', lower_bound=1)
flags.DEFINE_integer('summary_steps', 100, 'steps from one TensorBoard summary to the next; 0: '
                     'none', lower_bound=0)
flags.DEFINE_boolean('fingerprint', False, 'write checksums of the initial weights and of the '
                     'examples seen to metrics.jsonl, to compare runs by')
flags.DEFINE_string('predictions', 'predictions.csv', 'file that --mode=predict writes, a row an '
                    'image')
flags.DEFINE_string('export_dir', '', 'write a SavedModel of the final weights below this folder')
flags.DEFINE_boolean('plan_only', False, 'build the graph, print the plan and the audit, and stop')
flags.DEFINE_boolean('audit_runtime', False, 'also check what the runtime really places, with the '
                     'first step')


def main(unused_argv):
    """Builds, shows the plan, checks it, and does what --mode says."""
    tf.logging.set_verbosity(tf.logging.ERROR)
    warnings.filterwarnings('ignore', module='tensorflow|tf_slim')  # of TF to tf_slim, not to us
    tf.disable_v2_behavior()
    tf.enable_resource_variables()
    towers.mend_slim()
    network = registry.get_network(FLAGS.model)
    dataset = datasets.get_dataset(FLAGS.dataset, FLAGS.data_dir or None)
    variable_device = FLAGS.variable_device or None
    runs = FLAGS.mode == 'train' and not FLAGS.plan_only
    position = find_position() if runs else START
    if variable_device == 'auto':
        variable_device = choose_variable_device(network, dataset, position)
    with tf.Graph().as_default():
        tf.set_random_seed(FLAGS.seed)
        if FLAGS.mode == 'train':
            job = build_job(network, dataset, variable_device, position,
                            with_evaluation=not FLAGS.plan_only)
            show(job.built)
            stopped_by = None if FLAGS.plan_only else train(job)
            if stopped_by is not None:
                sys.exit(128 + stopped_by)
        else:
            evaluation = make_evaluation(network, dataset, variable_device)
            show(evaluation.built)
            if not FLAGS.plan_only:
                {'eval': evaluate, 'predict': predict}[FLAGS.mode](evaluation)
    if FLAGS.export_dir and not FLAGS.plan_only:
        export(network, dataset)


def show(built):
    """Prints the plan and the audit; an audit that finds a broken promise is the end."""
    print(built.plan, flush=True)
    print(towers.audit(built).raise_if_broken(), flush=True)


Job = collections.namedtuple('Job', 'built train_op evaluation iterator global_step examples_seen '
                             'train_steps learning_rate examples_per_epoch checksum')


# Where in the stream of examples a run is.
Position = collections.namedtuple('Position', 'step examples')
START = Position(0, 0)


def find_position():
    """The `Position` of the run in --train_dir, from its newest checkpoint."""
    if not os.path.isdir(train_dir()):
        return START
    with towers.hold_directory(train_dir()):
        newest = towers.newest_checkpoint(train_dir(), FLAGS.recover)
    if newest is None:
        return START
    reader = tf.train.NewCheckpointReader(newest.prefix)
    if not all(reader.has_tensor(name) for name in ('global_step', 'examples_seen')):
        return START  # of another program: refused, by name, before anything is restored
    return Position(int(reader.get_tensor('global_step')), int(reader.get_tensor('examples_seen')))


def choose_variable_device(network, dataset, position):
    """Where the run in --train_dir has its variables; if it is new, the place that is fastest."""
    def build(candidate):
        tf.set_random_seed(FLAGS.seed)
        job = build_job(network, dataset, candidate, position, with_evaluation=False)
        return choose_placement.Trial(job.train_op, [job.iterator.initializer],
                                      session_config(job.built))
    devices = towers.resolve_devices(FLAGS.devices or FLAGS.num_towers)
    chosen, text = choose_placement.recorded_choice(
        train_dir(), devices,
        lambda: towers.choose_variable_device(build, towers.placement_candidates(devices)))
    print(text, flush=True)
    return chosen


def build_job(network, dataset, variable_device, position=START, with_evaluation=False):
    """The graph: batches, towers, and the evaluation that shares their variables if wanted."""
    examples_per_epoch = dataset.num_examples['train']
    # From the position on: the steps before it may have had another batch size.
    left = FLAGS.train_epochs * examples_per_epoch - position.examples
    train_steps = FLAGS.train_steps or position.step + max(0, int(-(-left // FLAGS.batch_size)))
    last_example = position.examples + max(0, train_steps - position.step) * FLAGS.batch_size
    devices = FLAGS.devices or FLAGS.num_towers
    num_towers = len(towers.resolve_devices(devices, check=not FLAGS.plan_only))
    if FLAGS.batch_size % num_towers:
        raise towers.InvalidArgumentError(
            '--batch_size=%d does not divide among %d towers: give a multiple of %d'
            % (FLAGS.batch_size, num_towers, num_towers))
    with tf.device('/cpu:0'):
        global_step = tf.train.get_or_create_global_step()
        # The run's position: where in the stream of examples, hence of the schedule, it is.
        examples_seen = tf.get_variable('examples_seen', [], tf.int64, tf.zeros_initializer(),
                                        trainable=False)
        batches = dataset.train_batches(
            batch_size=FLAGS.batch_size, seed=FLAGS.seed,
            first_example=tf.identity(examples_seen), shift=FLAGS.augment_shift,
            **image_format(network))
        iterator = tf.data.make_initializable_iterator(batches)
        batch = iterator.get_next()
    rate = make_learning_rate(num_towers, examples_per_epoch, last_example)
    learning_rate = rate.tensor(tf.identity(examples_seen))
    built = towers.build_towers(
        make_model_fn(network, dataset.num_classes, is_training=True), batch,
        make_optimizer(learning_rate), devices, FLAGS.reduction,
        variable_device=variable_device, update_ops=FLAGS.update_ops,
        transform_gradients=clip if FLAGS.clip_norm else None, global_step=global_step,
        learning_rate=rate, check_devices=not FLAGS.plan_only,
        check_numerics=FLAGS.check_numerics, stateless_random=True, copies=FLAGS.copies,
        all_reduce=FLAGS.all_reduce if variable_device == 'replicated' else None,
        precision=FLAGS.precision, loss_scale=make_loss_scale(), xla=FLAGS.xla)
    train_op, weights = built.train_op, contextlib.nullcontext()
    if FLAGS.average_decay:
        averages = WeightAverages(FLAGS.average_decay, global_step)
        train_op = averages.update_after(train_op, [variable for _, variable in built.gradients])
        weights = averages.instead_of_weights()
    make_initial_values_stateless(built.variables, FLAGS.seed)
    checksum = None
    with tf.control_dependencies([train_op]), tf.device('/cpu:0'):
        train_op = tf.assign_add(examples_seen, FLAGS.batch_size).op
        if FLAGS.fingerprint:
            checksum = ExamplesChecksum().update(*batch)
            train_op = tf.group(train_op, checksum.op)
    evaluation = None
    if with_evaluation:
        with weights:
            evaluation = make_evaluation(network, dataset, variable_device, built)
    return Job(built, train_op, evaluation, iterator, global_step, examples_seen, train_steps,
               learning_rate, examples_per_epoch, checksum)


def make_evaluation(network, dataset, variable_device, trained=None):
    """The towers that evaluate the test set, on the variables of trained towers if given."""
    batches = dataset.eval_batches(batch_size=FLAGS.batch_size, **image_format(network))
    return Evaluation(make_model_fn(network, dataset.num_classes, is_training=False), batches,
                      None if trained else FLAGS.devices or FLAGS.num_towers, trained,
                      variable_device=variable_device, check_devices=not FLAGS.plan_only,
                      copies=FLAGS.copies, precision=FLAGS.precision)


def image_format(network):
    """What the network wants of an image: size in pixels, and channels."""
    return {'image_size': FLAGS.image_size or network.default_image_size,
            'channels': network.default_channels}


def make_model_fn(network, num_classes, is_training):
    """The model function that every tower calls with its shard."""
    def model_fn(images, labels):
        logits, end_points = network.build(images, num_classes, is_training=is_training,
                                           weight_decay=FLAGS.weight_decay,
                                           **network_options(network))
        loss = cross_entropy(labels, logits)
        if is_training and end_points.get('AuxLogits') is not None:
            loss += FLAGS.aux_loss_weight * cross_entropy(labels, end_points['AuxLogits'])
        predicted = tf.argmax(logits, 1)
        accuracy = tf.reduce_mean(tf.cast(tf.equal(predicted, labels), tf.float64))
        return towers.ModelOutput(
            loss, metrics={'accuracy': accuracy},
            predictions={'label': labels, 'predicted': predicted,
                         'probability': tf.reduce_max(tf.nn.softmax(logits), 1)})
    return model_fn


def network_options(network):
    """What of the flags is an option of the network."""
    options = {}
    if FLAGS.batch_norm_decay >= 0:
        options['batch_norm_decay'] = FLAGS.batch_norm_decay
    if not FLAGS.aux_loss_weight and 'create_aux_logits' in network.options:
        options['create_aux_logits'] = False
    return options


def cross_entropy(labels, logits):
    """Mean softmax cross-entropy of a shard: [shard] and [shard, classes] to a scalar."""
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels,
                                                                         logits=logits))


def make_learning_rate(num_towers, examples_per_epoch, last_example):
    """The learning-rate schedule of the flags, counted in examples; a cosine ends at the last."""
    decay_examples = decay_rate = None
    if FLAGS.decay != 'none':
        decay_examples = int(FLAGS.decay_epochs * examples_per_epoch)
        decay_rate = FLAGS.decay_rate if FLAGS.decay == 'exponential' else None
        if FLAGS.decay == 'cosine' and not decay_examples:
            decay_examples = last_example
    base_batch_size = FLAGS.base_batch_size or FLAGS.batch_size // num_towers
    if FLAGS.batch_size % base_batch_size:
        raise towers.InvalidArgumentError(
            '--batch_size=%d is no multiple of --base_batch_size=%d: give one of which it is'
            % (FLAGS.batch_size, base_batch_size))
    return towers.LearningRate(
        FLAGS.base_learning_rate, FLAGS.batch_size // base_batch_size, FLAGS.lr_scaling,
        warmup_examples=int(FLAGS.warmup_epochs * examples_per_epoch), decay=FLAGS.decay,
        decay_examples=decay_examples, decay_rate=decay_rate)


def make_optimizer(learning_rate):
    """The optimizer of the flags."""
    return {'sgd': lambda: tf.train.GradientDescentOptimizer(learning_rate),
            'momentum': lambda: tf.train.MomentumOptimizer(learning_rate, FLAGS.momentum),
            'adam': lambda: tf.train.AdamOptimizer(learning_rate),
            'rmsprop': lambda: tf.train.RMSPropOptimizer(learning_rate, momentum=FLAGS.momentum),
            }[FLAGS.optimizer]()


def make_loss_scale():
    """The loss scale of the flags; None for what goes with the precision."""
    first = FLAGS.loss_scale
    if not first:
        return None
    return towers.LossScale(first, least=min(1., first), most=max(2. ** 24, first))


def clip(gradients):
    """Scales the combined gradients down to the global norm of --clip_norm."""
    clipped, _ = tf.clip_by_global_norm([gradient for gradient, _ in gradients], FLAGS.clip_norm)
    return [(gradient, variable) for gradient, (_, variable) in zip(clipped, gradients)]


def train(job):
    """Runs the steps that are left, evaluates, and says where things are.

    Returns:
      The number of the signal that stopped it, or None.
    """
    values = [('loss', job.built.loss), ('learning_rate', job.learning_rate)]
    scaled = job.built.scaled_losses
    if scaled is not None:
        values += [('loss_scale', scaled.scale), ('skipped_steps', scaled.skipped_steps)]
    log_values = values + ([] if job.checksum is None else [('examples_checksum', job.checksum)])
    counts = dict(batch_size=FLAGS.batch_size, examples=job.examples_seen)
    progress = ProgressHook([('lr' if name == 'learning_rate' else name, value)
                             for name, value in values],
                            job.global_step, job.train_steps, log_every=FLAGS.log_every,
                            examples_per_epoch=job.examples_per_epoch,
                            devices=job.built.devices, fetch_every_step=True, **counts)
    metrics = MetricsHook(log_values, job.global_step, os.path.join(train_dir(), 'metrics.jsonl'),
                          examples_per_epoch=job.examples_per_epoch, log_every=FLAGS.log_every,
                          last_step=job.train_steps, fetch_every_step=True, **counts)
    listeners = [progress, metrics]
    if FLAGS.summary_steps:
        listeners.append(SummaryHook(
            default_summaries(job.built, job.learning_rate), job.global_step, train_dir(),
            summary_steps=FLAGS.summary_steps, last_step=job.train_steps, **counts))
    fingerprint = [FingerprintHook(job.built.variables, job.global_step, metrics.log)
                   ] if FLAGS.fingerprint else []
    signals = StopOnSignalHook()
    evaluation = EvaluationHook(
        job.evaluation, job.global_step, FLAGS.eval_steps or None, listeners,
        ('accuracy', FLAGS.stop_at_accuracy) if FLAGS.stop_at_accuracy else None,
        skip_end=lambda: signals.received is not None)
    initial_values = (towers.init_from(FLAGS.init_from, job.built.variables)
                      if FLAGS.init_from else None)
    try:
        with training_session(
                train_dir(), job.global_step, [StartInputHook(job.iterator)] + listeners
                + fingerprint + [evaluation], session_config(job.built), FLAGS.save_steps,
                FLAGS.keep, FLAGS.recover, initial_values,
                [hook.listener for hook in listeners], last_hooks=[signals]) as session:
            def position():
                return session.run_step_fn(
                    lambda step_context: int(step_context.session.run(job.global_step)))
            step = position()
            if step >= job.train_steps:
                print('%s holds %d steps already, and %d were asked for: evaluating them. Another '
                      '--train_dir starts anew.' % (train_dir(), step, job.train_steps))
            elif FLAGS.audit_runtime and not session.should_stop():
                audit_runtime(job, session)
                step += 1
            # Again if TensorFlow lost the session: it then went back to the newest checkpoint.
            while step < job.train_steps and not session.should_stop():
                session.run_steps(job.train_op, job.train_steps - step)
                step = job.train_steps if session.should_stop() else position()
    finally:
        progress.close()
        signals.restore()
    if signals.received is None:
        report(progress.throughput, evaluation.latest)
    print('checkpoint     %s' % tf.train.latest_checkpoint(train_dir()))
    return signals.received


class StartInputHook(OccasionalHook):
    """Starts the input at the example that the restored variables say comes next."""

    def __init__(self, iterator):
        self._iterator = iterator

    def after_create_session(self, session, coord):
        """Runs the iterator's initializer."""
        session.run(self._iterator.initializer)

    def is_due(self):
        """Never: there is nothing to do around a step."""
        return False


def session_config(built):
    """The session's config for these towers; a --variable_device beside them is made as well."""
    config = towers.session_config(built.devices)
    specs = [tf.DeviceSpec.from_string(variable.device) for variable in built.variables]
    config.device_count['CPU'] = max([config.device_count['CPU']] + [
        spec.device_index + 1 for spec in specs if spec.device_type == 'CPU'])
    return towers.use_precision(config, built.precision, built.devices)


def audit_runtime(job, session):
    """Does one step and checks where the runtime put its operations."""
    metadata = tf.RunMetadata()
    session.run(job.train_op, options=tf.RunOptions(output_partition_graphs=True),
                run_metadata=metadata)
    print(towers.audit(job.built, metadata).raise_if_broken(), flush=True)


def report(throughput, evaluation):
    """How good and how fast."""
    print('test accuracy  %.4f on %d images' % (evaluation['accuracy'], evaluation['examples']))
    if throughput is not None:
        print('speed          {:,.0f} images/s'.format(throughput.examples / throughput.seconds))


def evaluate(evaluation):
    """Evaluates the newest checkpoint on the test set."""
    with restored_session(evaluation.built) as session:
        report(None, evaluation.run(session))


def predict(evaluation):
    """Writes a row an image of the test set: its number, label, prediction and probability."""
    with restored_session(evaluation.built) as session, opened(FLAGS.predictions) as table:
        rows = csv.writer(table)
        rows.writerow(['image', 'label', 'predicted', 'probability'])
        number = 0
        for batch in evaluation.predict(session):
            for label, predicted, probability in zip(batch['label'], batch['predicted'],
                                                     batch['probability']):
                rows.writerow([number, label, predicted, '%.6f' % probability])
                number += 1
    print('predictions    %s, %d images' % (FLAGS.predictions, number))


def opened(path):
    """A file to write a table to."""
    try:
        return open(path, 'w', newline='')
    except OSError as error:
        raise towers.LogFileError('%s cannot be written: %s. Give another --predictions.'
                                  % (path, error.strerror))


@contextlib.contextmanager
def restored_session(built):
    """A session with the weights of the newest checkpoint, or their averages if it has them."""
    prefix = newest_or_refuse()
    names, averages = averages_in(prefix, tf.global_variables())
    towers.check_fits(prefix, names)
    saver = tf.train.Saver(names)
    with tf.Session(config=session_config(built)) as session:
        saver.restore(session, prefix)
        print('checkpoint     %s%s' % (prefix, ', moving averages' if averages else ''), flush=True)
        yield session


def newest_or_refuse():
    """The newest checkpoint of --train_dir, which is only read, or an error if there is none."""
    newest = towers.newest_checkpoint(train_dir(), FLAGS.recover)
    if newest is None:
        raise towers.CheckpointError('%s holds no checkpoint: train first, or give the --train_dir '
                                     'of a run.' % train_dir())
    return newest.prefix


def export(network, dataset):
    """Writes the SavedModel of the newest checkpoint."""
    def build():
        form = image_format(network)
        images = tf.placeholder(
            tf.float32, [None, form['image_size'], form['image_size'], form['channels']], 'images')
        logits, _ = network.build(images, dataset.num_classes, is_training=False,
                                  **network_options(network))
        return {'images': images}, {'logits': logits, 'probabilities': tf.nn.softmax(logits),
                                    'classes': tf.argmax(logits, 1)}
    print('SavedModel     %s' % export_saved_model(build, newest_or_refuse(), FLAGS.export_dir))


def train_dir():
    """The folder of the run."""
    return FLAGS.train_dir or os.path.join('runs', FLAGS.model)


def contradiction(given):
    """What makes no sense about the flags, in one line, or None.

    Args:
      given: names of the flags that were given on the command line.
    """
    def only_with(flag, other, values):
        if flag in given and FLAGS[other].value not in values:
            return '--%s is of no use with --%s=%s: it goes with %s' % (
                flag, other, FLAGS[other].value, ' or '.join(values))
        return None
    for name in sum(GROUPS.values(), []):
        if isinstance(FLAGS[name].value, float) and not math.isfinite(FLAGS[name].value):
            return '--%s=%s: expected a finite number' % (name, FLAGS[name].value)
    if {'num_towers', 'devices'} <= given:
        return '--num_towers and --devices both say how many towers there are: give one'
    if {'train_steps', 'train_epochs'} <= given:
        return '--train_steps and --train_epochs both say how long to train: give one'
    if not FLAGS.train_steps and not FLAGS.train_epochs:
        return '--train_steps and --train_epochs are both 0: there is nothing to do'
    if FLAGS.base_learning_rate <= 0:
        return '--base_learning_rate=%g: expected more than 0' % FLAGS.base_learning_rate
    if FLAGS.decay == 'exponential' and not FLAGS.decay_epochs:
        return '--decay=exponential needs --decay_epochs'
    if FLAGS.stop_at_accuracy and not FLAGS.eval_steps:
        return '--stop_at_accuracy is looked at when there is an evaluation: give --eval_steps'
    if FLAGS.batch_norm_decay < 0 and FLAGS.batch_norm_decay != -1:
        return '--batch_norm_decay=%g: expected 0 to 1, or -1' % FLAGS.batch_norm_decay
    if FLAGS.average_decay == 1:
        return '--average_decay=1 would never follow the weights: give less'
    if FLAGS.variable_device == 'auto' and (FLAGS.plan_only or FLAGS.mode != 'train'):
        return '--variable_device=auto times steps of training, and %s runs none' % (
            '--plan_only' if FLAGS.plan_only else '--mode=%s' % FLAGS.mode)
    if FLAGS.plan_only and FLAGS.audit_runtime:
        return '--plan_only runs nothing, so there is nothing for --audit_runtime to check'
    return (only_with('momentum', 'optimizer', ['momentum', 'rmsprop'])
            or only_with('all_reduce', 'variable_device', ['replicated', 'auto'])
            or only_with('decay_epochs', 'decay', ['exponential', 'cosine'])
            or only_with('decay_rate', 'decay', ['exponential'])
            or only_with('predictions', 'mode', ['predict'])
            or only_with('audit_runtime', 'mode', ['train'])
            or only_with('init_from', 'mode', ['train'])
            or only_with('loss_scale', 'mode', ['train'])
            or only_with('xla', 'mode', ['train']))


def help_text():
    """All flags of this program, by group, one or two lines each."""
    lines = [sys.modules[__name__].__doc__, '']
    for group, names in GROUPS.items():
        lines.append('%s:' % group)
        for name in names:
            default = FLAGS[name].default
            text = '%s (%s)' % (FLAGS[name].help, "''" if default == '' else default)
            lines += textwrap.wrap(text, 98, initial_indent='  --%-20s ' % name,
                                   subsequent_indent=' ' * 25)
    return '\n'.join(lines)


def parse_flags(argv):
    """absl's parsing, but with help by group, and status 2 and one line for what is wrong."""
    if {'--help', '--helpshort', '-h', '-help', '-helpshort'} & set(argv[1:]):
        print(help_text())
        sys.exit(0)
    try:
        rest = FLAGS(argv)
    except flags.Error as error:
        refuse(error)
    if len(rest) > 1:
        refuse('%r is no flag: flags begin with --' % rest[1])
    wrong = contradiction({name for name in FLAGS if FLAGS[name].present})
    if wrong:
        refuse(wrong)
    return rest


def refuse(reason):
    """Says on one line why the program does not start, and ends it with status 2."""
    sys.stderr.write('train.py: %s\n' % ' '.join(str(reason).split()))
    sys.exit(2)


def run(argv):
    """Runs `main`; what a user can get wrong is one line, not a traceback."""
    try:
        main(argv)
    except FAILURES as error:
        sys.stderr.write('train.py: %s\n' % error)
        sys.exit(1)
    except towers.TowersError as error:
        refuse(error)
    except KeyboardInterrupt:  # before the first step, where there is nothing to save
        sys.exit(128 + signal.SIGINT)


# What goes wrong in a run, as against what makes no sense about its flags.
FAILURES = (towers.AuditError, towers.CheckpointError, towers.LogFileError, towers.NonFiniteError,
            towers.RunLockedError)


if __name__ == '__main__':
    app.run(run, flags_parser=parse_flags)
