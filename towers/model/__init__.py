"""The request of a build, and what a model function returns and leaves in the graph.

In comes the function that a program passes, or its optimizers. Out go the `Request`, `ModelOutput`
(loss, predictions, metrics, updates), `Losses` with the registered regularization, and
`Objective`s. Read `requested` and `request` (the arguments of a build), `outputs`, `objectives`,
`losses`; `keras_calls` is for the updates of Keras layers, and `build_context` for what a build
leaves in the graph's collections.
"""
