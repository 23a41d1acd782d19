"""The interfaces that legacy code keeps: Estimators, Keras models, their optimizers.

In comes an Estimator's model function or a Keras model, out comes one that computes on several
devices, with the interface of the one that came in; `build_towers` does the work in between. Read
`optimizer_calls`, with `stand_ins` and `call_checks`, before `estimator`; and `keras_towers` before
`keras_model`.
"""
