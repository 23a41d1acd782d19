"""Hooks for train.py that send a run to a tracker, here MLflow (pip install mlflow-skinny).

    python train.py --hooks=examples.train_hooks:to_mlflow --train_steps=200 --eval_steps=50

A run that resumes goes on with the same MLflow run: its number is kept in the folder of the run.
"""

import os

import tensorflow.compat.v1 as tf

_EVERY = 10  # steps from one value to the next


class MLflowHook(tf.train.SessionRunHook):
    """Sends the settings, loss and learning rate, and the results of evaluations."""

    def __init__(self, run):
        """`run` is the `Run` that train.py calls `to_mlflow` with."""
        import mlflow
        self._mlflow = mlflow
        self._run = run
        self._values = {'loss': run.built.loss, 'learning_rate': run.learning_rate}
        self._step = 0

    def after_create_session(self, session, coord):
        """Starts the MLflow run, or goes on with it."""
        self._step = int(session.run(self._run.global_step))
        path = os.path.join(self._run.train_dir, 'mlflow_run')
        if self._step and os.path.exists(path):
            with open(path) as file:
                self._mlflow.start_run(file.read())
            return
        with open(path, 'w') as file:
            file.write(self._mlflow.start_run().info.run_id)
        self._mlflow.log_params(self._run.settings)

    def before_run(self, run_context):
        """Fetches the values with the step."""
        return tf.train.SessionRunArgs(self._values)

    def after_run(self, run_context, run_values):
        """Sends the values of every tenth step."""
        self._step += 1
        if self._step % _EVERY == 0:
            values = {name: float(value) for name, value in run_values.results.items()}
            self._mlflow.log_metrics(values, step=self._step)

    def evaluated(self, step, results, seconds):
        """Sends the results of an evaluation."""
        self._mlflow.log_metrics({'test_' + name: value for name, value in results.items()},
                                 step=step)

    def end(self, session):
        """Ends the MLflow run."""
        self._mlflow.end_run()


def to_mlflow(run):
    """The hooks of a run of train.py."""
    return [MLflowHook(run)]
