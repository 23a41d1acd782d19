"""What a model function returns and leaves in the graph.

In comes the function that a program passes, or its optimizers. Out go `ModelOutput` (loss,
predictions, metrics, updates), `Losses` with the registered regularization, and `Objective`s.
Read `outputs`, `objectives`, `losses`; `keras_calls` is for the updates of Keras layers, and
`build_context` for what a build leaves in the graph's collections.
"""
