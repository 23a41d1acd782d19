"""The interfaces that legacy code keeps: Estimators, Keras models, their optimizers.

In comes an Estimator's model function or a Keras model. Out comes a model function or a Keras model
with the same interface, which computes on several devices. `build_towers` does the work in between.
Read `optimizer_calls`, with `stand_ins` and `call_checks`, before `estimator`; and `keras_towers`
before `keras_model`.
"""
