"""The public functions of `towers`, each with arguments that are right."""

import contextlib
import inspect

import numpy as np
import tensorflow.compat.v1 as tf

import towers


class Reached(towers.TowersError):
    """The arguments were taken, and the call is about to do its work."""


def model_fn(x):
    return tf.reduce_mean(x * tf.get_variable('w', [2]))


def reached(*unused_given, **unused_named):
    """A function of the caller's, in which a call ends that would take long."""
    raise Reached


def say_nothing(unused_line):
    pass


class Given:
    """What each call needs to go well; it is of a graph."""

    def __init__(self, folder):
        self.step = tf.train.get_or_create_global_step()
        self.x = tf.ones([4, 2])
        self.loss = tf.reduce_mean(self.x)
        self.optimizer = tf.train.GradientDescentOptimizer(0.1)
        self.folder = str(folder)
        self.counts = dict(batch_size=4, examples_per_epoch=8)

    @property
    def built(self):
        return towers.build_towers(model_fn, self.x, self.optimizer, 2)

    @property
    def dataset(self):
        return tf.data.Dataset.from_tensors(np.ones([4, 2], np.float32))

    def evaluation(self, trained):
        return towers.Evaluation(model_fn, self.dataset, trained=trained)


def cluster(job='worker'):
    return towers.Cluster('ps', ['127.0.0.1:1'], ['127.0.0.1:2'], job)


class Ending(tf.train.SessionRunHook):
    """In which a call ends that would make a session."""
    begin = reached


class Session:
    """A session that runs nothing."""
    run = reached


# From a `Given`: the function and arguments that are right; None for one that a test would have to
# run, and `reached` for what would be called next.
CALLS = {
    'build_towers': lambda given: (towers.build_towers, dict(
        model_fn=model_fn, inputs=given.x, optimizer=given.optimizer, devices=2)),
    'split_batch': lambda given: (towers.split_batch, dict(inputs=given.x, num_shards=2)),
    'staged': lambda given: (towers.staged, dict(dataset=given.dataset, devices=2)),
    'combine_gradients': lambda given: (towers.combine_gradients, dict(tower_gradients=[[]])),
    'resolve_devices': lambda given: (towers.resolve_devices, dict(devices=2)),
    'session_config': lambda given: (towers.session_config, dict(devices=2)),
    'use_precision': lambda given: (towers.use_precision, dict(
        config=tf.ConfigProto(), precision='float32', devices=2)),
    'LossScale': lambda given: (towers.LossScale, {}),
    'Numerics': lambda given: (towers.Numerics, {}),
    'VariablePlacement': lambda given: (towers.VariablePlacement, {}),
    'Memory': lambda given: (towers.Memory, {}),
    'Pipeline': lambda given: (towers.Pipeline, {}),
    'Objective': lambda given: (towers.Objective, dict(optimizer=given.optimizer)),
    'scale_learning_rate': lambda given: (towers.scale_learning_rate, dict(
        base=0.1, num_towers=2, rule='sqrt')),
    'LearningRate': lambda given: (towers.LearningRate, dict(base=0.1)),
    'WeightAverages': lambda given: (towers.WeightAverages, dict(
        decay=0.9, global_step=given.step)),
    'SummaryHook': lambda given: (towers.SummaryHook, dict(
        summaries=towers.default_summaries(given.built), global_step=given.step,
        logdir=given.folder)),
    'default_summaries': lambda given: (towers.default_summaries, dict(built=given.built)),
    'CheckpointHook': lambda given: (towers.CheckpointHook, dict(
        directory=given.folder, global_step=given.step, save_steps=3)),
    'EvaluationHook': lambda given: (towers.EvaluationHook, dict(
        evaluation=given.evaluation(given.built), global_step=given.step)),
    'Evaluation': lambda given: (towers.Evaluation, dict(
        model_fn=model_fn, dataset=given.dataset, trained=given.built)),
    'StopOnSignalHook': lambda given: (towers.StopOnSignalHook, {}),
    'StopTogetherHook': lambda given: (towers.StopTogetherHook, dict(
        cluster=cluster(), built=given.built._replace(machines=Session()))),
    'out_of_memory_explained': lambda given: (towers.out_of_memory_explained, dict(
        built=given.built)),
    'newest_checkpoint': lambda given: (towers.newest_checkpoint, dict(directory=given.folder)),
    'tidy_directory': lambda given: (towers.tidy_directory, dict(
        directory=given.folder, newest=None)),
    'check_fits': lambda given: (towers.check_fits, dict(prefix=given.folder + '/none')),
    'init_from': lambda given: (towers.init_from, dict(path=given.folder + '/none')),
    'export_saved_model': lambda given: (towers.export_saved_model, dict(
        build=model_fn, checkpoint=given.folder + '/none', directory=given.folder)),
    'hold_directory': lambda given: (towers.hold_directory, dict(directory=given.folder)),
    'training_session': lambda given: (towers.training_session, dict(
        directory=given.folder, global_step=given.step, hooks=[Ending()], say=say_nothing)),
    'check_towers': lambda given: (towers.check_towers, dict(
        model_fn=reached, inputs=np.ones([4, 2], np.float32))),
    'audit': lambda given: (towers.audit, dict(built=given.built)),
    'memory_account': lambda given: (towers.memory_account, dict(built=given.built)),
    'measure_memory': lambda given: (towers.measure_memory, dict(
        built=given.built, session=Session())),
    'memory_report': lambda given: (towers.memory_report, dict(build=reached, batch_size=4)),
    'largest_batch': lambda given: (towers.largest_batch, dict(
        built=given.built, memory_limit=10 ** 5, most=8)),
    'fit_batch_size': lambda given: (towers.fit_batch_size, dict(build=reached, first=4)),
    'files_of_worker': lambda given: (towers.files_of_worker, dict(
        files=['a', 'b'], cluster=cluster())),
    'until_all_end': lambda given: (towers.until_all_end, dict(
        dataset=tf.data.Dataset.range(3).batch(1))),
    'free_ports': lambda given: (towers.free_ports, dict(count=1)),
    'Cluster': lambda given: (towers.Cluster, dict(workers=['127.0.0.1:1', '127.0.0.1:2'])),
    'join': lambda given: (towers.join, dict(cluster=cluster(), built=given.built)),
    'serve': lambda given: (towers.serve, dict(cluster=cluster(), say=say_nothing)),
    'replicate_model_fn': lambda given: (towers.replicate_model_fn, dict(
        model_fn=lambda features, labels: None, devices=2)),
    'TowerOptimizer': lambda given: (towers.TowerOptimizer, dict(
        optimizer_or_optimizer_fn=given.optimizer)),
    'ParallelModel': lambda given: (towers.ParallelModel, dict(model=None)),
    'stage': lambda given: (towers.stage, dict(number=0)),
    'recompute': lambda given: (towers.recompute, dict(block=model_fn)),
    'mend_slim': lambda given: (towers.mend_slim, {}),
    'visible_gpus': lambda given: (towers.visible_gpus, {}),
}

# What is public and in no call of the above, and why.
OTHERS = {
    'what calls return, made by nobody else': [
        'Audit', 'BuiltTowers', 'FittedBatch', 'MeasuredMemory', 'Member', 'MemoryAccount',
        'Plan', 'StagedInputs', 'Tower', 'TowersReport'],
    'called in model functions, with a tensor': ['batch_concat', 'batch_mean', 'batch_sum'],
    'checked when a model function returns it': ['ModelOutput'],
    'checked by the build that it is given to': ['Shards']}

_CONTEXTS = ('hold_directory', 'training_session', 'out_of_memory_explained', 'join', 'stage')


def call(name, function, arguments):
    """Calls a function; where that gives a context, enters and leaves it."""
    result = function(**arguments)
    if name in _CONTEXTS:
        with contextlib.ExitStack() as stack:
            stack.enter_context(result)


def arguments_of(name, function):
    """Names of a public function's arguments, those that are given by name alone included."""
    if name == 'ParallelModel':
        function = type(function).__call__
    parameters = inspect.signature(function).parameters.values()
    return [each.name for each in parameters if each.name != 'cls' and each.kind in (
        each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]


def public():
    """Names of all public callables but errors."""
    return {name for name, value in vars(towers).items() if not name.startswith('_')
            and callable(value) and not (isinstance(value, type) and issubclass(value, Exception))}
